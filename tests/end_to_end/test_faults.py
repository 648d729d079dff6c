"""Processes that are killed or stopped in mid-answer: a lost drafter costs speed, a lost target a pause, or a clear error
if there is no other.

The services are real processes on tiny checkpoints; nothing here depends on how fast they are, only on limits that are
far above what they need.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.client import GenerationClient
from paceline.errors import PacelineError
from paceline.generation import Completion, CompletionBuilder, Delta, GenerationRequest, Schedule
from paceline.local_stack import LocalStack, LocalStackSettings, ServiceProcess
from paceline.types import VerificationRule
from tests.harness import complete_all, request

SEEDS = range(50)
MAX_TOKENS = 120
TOKENS_BEFORE_THE_FAULT = 20


@pytest.fixture
def stack(tiny_target: Path) -> Iterator[LocalStack]:
    settings = LocalStackSettings(target=str(tiny_target), drafter=str(tiny_target), dtype="float32", logit_noise=1.0)
    with LocalStack(settings) as running:
        yield running


def long_request(seed: int, *, schedule: Schedule | None = None) -> GenerationRequest:
    return request((seed, 2, 3), seed=seed, max_tokens=MAX_TOKENS, schedule=schedule, rule=VerificationRule.COUPLED)


def pid_of(stack: LocalStack, name: str) -> int:
    return next(process.pid for process in stack.processes if process.name == name)


async def answer_with_fault(
    client: GenerationClient, seeds: range, strike: Callable[[], Awaitable[None]]
) -> list[Completion | BaseException]:
    """Run all answers at once, and strike when one of them is in its middle."""
    in_the_middle = asyncio.Event()

    async def watched(seed: int) -> Completion:
        builder, received = CompletionBuilder(), 0
        async for event in client.generate(long_request(seed), timeout_s=120):
            builder.add(event)
            received += len(event.token_ids) if isinstance(event, Delta) else 0
            if received > TOKENS_BEFORE_THE_FAULT:
                in_the_middle.set()
        return builder.build()

    answers = [asyncio.ensure_future(watched(seed)) for seed in seeds]
    await asyncio.wait_for(in_the_middle.wait(), 60)
    await strike()
    return await asyncio.gather(*answers, return_exceptions=True)


@pytest.mark.parametrize("loss", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_answers_complete_unchanged_when_the_drafter_is_lost(stack: LocalStack, loss: signal.Signals) -> None:
    """50 answers under way, the drafter is killed, or hangs: all complete, with the text of plain decoding."""
    drafter = pid_of(stack, "drafter")

    async def strike() -> None:
        os.kill(drafter, loss)

    async with GenerationClient(stack.endpoint) as client:
        plain = await complete_all(client, [long_request(seed, schedule=Schedule.PLAIN) for seed in SEEDS])
        try:
            answers = await answer_with_fault(client, SEEDS, strike)
        finally:
            if loss == signal.SIGSTOP:
                os.kill(drafter, signal.SIGCONT)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    completions = [answer for answer in answers if isinstance(answer, Completion)]
    assert [(answer.token_ids, answer.text) for answer in completions] == [
        (answer.token_ids, answer.text) for answer in plain
    ]
    assert sum(answer.speculation.num_accepted_tokens for answer in completions) > 0


async def test_a_killed_target_is_a_clear_error_within_two_seconds(stack: LocalStack) -> None:
    """There is no other: the stream ends with TARGET_UNAVAILABLE and a sentence; what came before it was delivered."""
    struck_s = 0.0

    async def strike() -> None:
        nonlocal struck_s
        os.kill(pid_of(stack, "target"), signal.SIGKILL)
        struck_s = time.monotonic()

    async with GenerationClient(stack.endpoint, max_resumptions=0) as client:
        outcomes = await answer_with_fault(client, range(4), strike)
        ended_s = time.monotonic()
        with pytest.raises(PacelineError) as refused:
            await client.complete(long_request(1))
    errors = [outcome for outcome in outcomes if isinstance(outcome, PacelineError)]
    assert len(errors) >= 1
    assert {error.reason for error in [*errors, refused.value]} == {"TARGET_UNAVAILABLE"}
    assert all("again" in error.message for error in errors)
    assert ended_s - struck_s < 2.0


# ---------------------------------------------------------------------------------------------------------------------
# Two targets


def started(stack: ExitStack, *commands: tuple[str, ...]) -> list[ServiceProcess]:
    """Processes of our own, started at once and ready; killed at the end of the stack."""
    settled: queue.SimpleQueue[ServiceProcess] = queue.SimpleQueue()
    processes = []
    for module, *options in commands:
        arguments = [module, "--stop-with-parent", "--threads", "1", "--log-level", "error", *options]
        process = ServiceProcess(module, arguments, on_log=lambda *_: None)
        stack.callback(process.kill)
        process.settle_into(settled)
        processes.append(process)
    for _ in processes:
        ready = settled.get(timeout=60)
        assert ready.is_ready, ready.explain_end()
    return processes


async def until_connected(client: GenerationClient, address: str) -> None:
    async with asyncio.timeout(30):
        while True:
            (targets,) = (await client.pool_status()).pools
            if any(replica.is_connected for replica in targets.replicas if replica.address == address):
                return
            await asyncio.sleep(0.05)


async def test_answers_go_on_unchanged_when_a_target_hangs_and_another_is_killed(tiny_target: Path) -> None:
    """Of two targets one is stopped in mid-answer; woken up again, it takes over when the other is killed. Nobody notices."""
    model = ("--model", str(tiny_target), "--dtype", "float32")
    seeds = range(8)
    with ExitStack() as stack:
        first, second = started(
            stack,
            ("target_service", *model, "--heartbeat-s", "0.2"),
            ("target_service", *model, "--heartbeat-s", "0.2"),
        )
        targets = f"{first.address},{second.address}"
        (orchestrator,) = started(
            stack,
            ("orchestrator", "--target", targets, "--silence-limit-s", "1"),
        )
        async with GenerationClient(orchestrator.address, max_resumptions=0) as client:
            plain = await complete_all(client, [long_request(seed, schedule=Schedule.PLAIN) for seed in seeds])

            async def stop_the_first() -> None:
                os.kill(first.pid, signal.SIGSTOP)

            async def kill_the_second() -> None:
                os.kill(second.pid, signal.SIGKILL)

            hung = await answer_with_fault(client, seeds, stop_the_first)
            os.kill(first.pid, signal.SIGCONT)
            await until_connected(client, first.address)
            killed = await answer_with_fault(client, seeds, kill_the_second)
    for answers in (hung, killed):
        assert [answer for answer in answers if isinstance(answer, BaseException)] == []
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        assert [(answer.token_ids, answer.text) for answer in completions] == [
            (answer.token_ids, answer.text) for answer in plain
        ]
        assert all(answer.usage.completion_tokens == MAX_TOKENS for answer in completions)
