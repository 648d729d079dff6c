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
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.client import GenerationClient
from paceline.errors import PacelineError
from paceline.generation import Completion, CompletionBuilder, Delta, GenerationRequest, Schedule
from paceline.local_stack import LocalStack, LocalStackSettings, ServiceProcess
from paceline.types import VerificationRule
from tests.harness import complete_all, request

SEEDS = range(50)
FEW_SEEDS = range(8)
MAX_TOKENS = 120
TOKENS_BEFORE_THE_FAULT = 20
START_LIMIT_S = 180.0  # far above what it takes

Outcomes = list[Completion | BaseException]


@pytest.fixture
def stack(tiny_target: Path) -> Iterator[LocalStack]:
    settings = LocalStackSettings(target=str(tiny_target), drafter=str(tiny_target), dtype="float32", logit_noise=1.0)
    with LocalStack(settings) as running:
        yield running


def long_request(seed: int, *, schedule: Schedule | None = None) -> GenerationRequest:
    return request((seed, 2, 3), seed=seed, max_tokens=MAX_TOKENS, schedule=schedule, rule=VerificationRule.COUPLED)


def pid_of(stack: LocalStack, name: str) -> int:
    return next(process.pid for process in stack.processes if process.name == name)


async def answer_with_fault(client: GenerationClient, seeds: range, strike: Callable[[], Awaitable[None]]) -> Outcomes:
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


in_the_story = pytest.mark.asyncio(loop_scope="module")


def strike(process: ServiceProcess, signal_number: signal.Signals) -> Callable[[], Awaitable[None]]:
    async def struck() -> None:
        os.kill(process.pid, signal_number)

    return struck


def assert_all_unchanged(answers: Outcomes, plain: list[Completion]) -> None:
    """None has failed, and each has the text of plain decoding, to its last token."""
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []
    completions = [answer for answer in answers if isinstance(answer, Completion)]
    assert [(answer.token_ids, answer.text) for answer in completions] == [
        (answer.token_ids, answer.text) for answer in plain
    ]
    assert all(answer.usage.completion_tokens == MAX_TOKENS for answer in completions)


def accepted_tokens(answers: Outcomes) -> int:
    return sum(answer.speculation.num_accepted_tokens for answer in answers if isinstance(answer, Completion))


@pytest.mark.slow
async def test_answers_complete_unchanged_when_the_drafter_hangs(stack: LocalStack) -> None:
    """50 answers under way, the drafter is stopped: all complete, with the text of plain decoding."""
    drafter = pid_of(stack, "drafter")

    async def strike() -> None:
        os.kill(drafter, signal.SIGSTOP)

    async with GenerationClient(stack.endpoint) as client:
        plain = await complete_all(client, [long_request(seed, schedule=Schedule.PLAIN) for seed in SEEDS])
        try:
            answers = await answer_with_fault(client, SEEDS, strike)
        finally:
            os.kill(drafter, signal.SIGCONT)
    assert_all_unchanged(answers, plain)
    assert accepted_tokens(answers) > 0


# ---------------------------------------------------------------------------------------------------------------------
# Two targets and a drafter: four processes, lost one after another


@dataclass(frozen=True, slots=True)
class Story:
    """What the answers were that were under way at each fault, and what came of the last one."""

    plain: list[Completion]  # the texts without drafts, undisturbed
    target_hung: Outcomes
    target_killed: Outcomes
    drafter_killed: Outcomes
    last_target_killed: Outcomes
    ended_within_s: float  # behind the loss of the last target
    refused: PacelineError  # asked for after that


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(tiny_target: Path) -> Story:
    """One target is stopped in mid-answer; woken up again, it takes over when the other is killed. Then the drafter is
    killed, and at last the target that is left."""
    model = ("--model", str(tiny_target), "--dtype", "float32")
    with ExitStack() as stack:
        first, second, drafter = started(
            stack,
            ("target_service", *model, "--heartbeat-s", "0.2"),
            ("target_service", *model, "--heartbeat-s", "0.2"),
            ("drafter_service", *model, "--method", "draft_model", "--logit-noise", "1"),
        )
        targets = f"{first.address},{second.address}"
        (orchestrator,) = started(
            stack, ("orchestrator", "--target", targets, "--drafter", drafter.address, "--silence-limit-s", "1")
        )
        async with GenerationClient(orchestrator.address, max_resumptions=0) as client:
            plain = await complete_all(client, [long_request(seed, schedule=Schedule.PLAIN) for seed in SEEDS])
            hung = await answer_with_fault(client, FEW_SEEDS, strike(first, signal.SIGSTOP))
            os.kill(first.pid, signal.SIGCONT)
            await until_connected(client, first.address)
            killed = await answer_with_fault(client, FEW_SEEDS, strike(second, signal.SIGKILL))
            without_drafter = await answer_with_fault(client, SEEDS, strike(drafter, signal.SIGKILL))
            struck_s = 0.0

            async def kill_the_last() -> None:
                nonlocal struck_s
                os.kill(first.pid, signal.SIGKILL)
                struck_s = time.monotonic()

            ended = await answer_with_fault(client, FEW_SEEDS, kill_the_last)
            ended_s = time.monotonic()
            with pytest.raises(PacelineError) as refused:
                await client.complete(long_request(1))
    return Story(plain, hung, killed, without_drafter, ended, ended_s - struck_s, refused.value)


@in_the_story
async def test_answers_go_on_unchanged_when_a_target_hangs_and_another_is_killed(story: Story) -> None:
    """Of two targets one is stopped in mid-answer; woken up again, it takes over when the other is killed. Nobody notices."""
    for answers in (story.target_hung, story.target_killed):
        assert_all_unchanged(answers, story.plain[: len(FEW_SEEDS)])


@in_the_story
async def test_answers_complete_unchanged_when_the_drafter_is_killed(story: Story) -> None:
    """50 answers under way, the drafter is killed: all complete, with the text of plain decoding."""
    assert_all_unchanged(story.drafter_killed, story.plain)
    assert accepted_tokens(story.drafter_killed) > 0


@in_the_story
async def test_a_killed_target_is_a_clear_error_within_two_seconds(story: Story) -> None:
    """There is no other: the stream ends with TARGET_UNAVAILABLE and a sentence; what came before it was delivered."""
    errors = [outcome for outcome in story.last_target_killed if isinstance(outcome, PacelineError)]
    assert len(errors) >= 1
    assert {error.reason for error in [*errors, story.refused]} == {"TARGET_UNAVAILABLE"}
    assert all("again" in error.message for error in errors)
    assert story.ended_within_s < 2.0


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
        ready = settled.get(timeout=START_LIMIT_S)
        assert ready.is_ready, ready.explain_end()
    return processes


async def until_connected(client: GenerationClient, address: str) -> None:
    async with asyncio.timeout(30):
        while True:
            pools = (await client.pool_status()).pools
            replicas = [replica for pool in pools for replica in pool.replicas]
            if any(replica.is_connected for replica in replicas if replica.address == address):
                return
            await asyncio.sleep(0.05)
