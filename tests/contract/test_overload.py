"""More than can be answered, callers that do not read, and callers that leave: what the services hold afterwards.

All over real gRPC, with models without weights. The orchestrator's own parts run in this process, to be looked into.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest

from orchestrator.api import SERVICE_NAME, GenerationServicer
from orchestrator.door import Door, OpenGate
from paceline.client import GenerationClient
from paceline.errors import DeadlineExceeded, QueueFull, ReaderStalled
from paceline.generation import Completion, Delta, GenerationRequest, Schedule, Started
from paceline.generation_wire import request_to_proto
from paceline.rpc import Server, open_channel
from paceline.types import MAX_DRAFT_LENGTH
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub, add_GenerationServiceServicer_to_server
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import VOCAB
from tests.fakes import FakeModel, counting_logits
from tests.harness import Fleet, fleet, model_drafter_of, ngram_drafter, request, target_of

LIMIT_S = 60.0
PROMPT = (0, 1, 2)
PLACES = 8
TOKENS = 10_000
"""Of an answer that is far longer than what a transport takes ahead of its reader."""
LONG = replace(
    request(PROMPT, temperature=0.0, max_tokens=TOKENS, draft_length=MAX_DRAFT_LENGTH, schedule=Schedule.SEQUENTIAL),
    logprobs=2,
)
"""Repeats itself, so that prompt lookup drafts it in a few hundred rounds; a hundred bytes a token."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


def counting(*, pause_s: float = 0.0) -> FakeModel:
    """Counts up to 7 and begins again; `pause_s` is how long it takes for each row."""
    row_behind = counting_logits(VOCAB)

    def logits(ids: Sequence[int]) -> Sequence[float]:
        time.sleep(pause_s)
        return row_behind(ids)

    return FakeModel(logits, vocab_size=VOCAB, max_context=TOKENS + 10)


def greedy(max_tokens: int, *, prompt: tuple[int, ...] = PROMPT, n: int = 1, tenant: str = "") -> GenerationRequest:
    return replace(request(prompt, temperature=0.0, max_tokens=max_tokens), n=n, tenant=tenant)


@dataclass
class Deployment:
    """All that must be empty when nobody is answered."""

    address: str
    services: Fleet
    target: FakeModel
    drafter: FakeModel | None
    tasks_at_rest: int

    def remains(self) -> dict[str, int]:
        """What is held, by what it is."""
        held = {
            "answers": self.services.generator.running,
            "waiting requests": self.services.generator.waiting,
            "leases": self.services.leases,
            "tokens at the target": self.target.memory.held_tokens,
            "tokens at the drafter": self.drafter.memory.held_tokens if self.drafter else 0,
            "tasks": max(0, len(asyncio.all_tasks()) - self.tasks_at_rest),
        }
        return {name: count for name, count in held.items() if count}

    async def until_nothing_remains(self) -> float:
        """Seconds until then; fails, with what is left, if that takes very long."""
        began_s = time.perf_counter()
        while remains := self.remains():
            assert time.perf_counter() - began_s < LIMIT_S, remains
            await asyncio.sleep(0.01)
        return time.perf_counter() - began_s


@asynccontextmanager
async def deployment(
    tokenizer: str, *, pause_s: float = 0.0, drafts_by_model: bool = True, **settings: Any
) -> AsyncIterator[Deployment]:
    target, drafter = counting(pause_s=pause_s), counting() if drafts_by_model else None
    drafters = ngram_drafter() if drafter is None else model_drafter_of(drafter)
    async with fleet([target_of(target)], [drafters], tokenizer, **settings) as services:
        server = Server(host="127.0.0.1", port=0)
        servicer = GenerationServicer(Door(services.generator, OpenGate()))
        add_GenerationServiceServicer_to_server(servicer, server.registrar)
        await server.start(SERVICE_NAME)
        # A first answer, so that all that stays for good is there.
        async with GenerationClient(server.address) as client:
            await client.complete(greedy(2))
        await asyncio.sleep(0.1)
        yield Deployment(server.address, services, target, drafter, len(asyncio.all_tasks()))
        await server.stop(0)


# ---------------------------------------------------------------------------------------------------------------------
# Overload


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; fails if that takes very long."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)


async def test_flood_is_refused_at_once_and_the_rest_is_answered(tokenizer: str) -> None:
    """Forty requests of one tenant on two places: those that fit into its part of the line are answered, all others
    hear when to try again while these have not ended; and another tenant's request is next."""
    async with (
        deployment(tokenizer, pause_s=0.004, max_sessions=2, max_queued_requests=8) as deployed,
        GenerationClient(deployed.address, max_resumptions=0) as client,
    ):
        flood = [asyncio.ensure_future(client.complete(greedy(40, tenant="flood"))) for _ in range(40)]
        await until(lambda: sum(answer.done() for answer in flood) >= 34)
        refusals = [answer.exception() for answer in flood if answer.done()]
        assert [type(refusal) for refusal in refusals] == [QueueFull] * 34
        assert all(refusal.retry_after_s for refusal in refusals if isinstance(refusal, QueueFull))
        assert (deployed.services.generator.running, deployed.services.generator.waiting) == (2, 4)
        modest = await client.complete(greedy(4, tenant="modest"))
        assert len(modest.token_ids) == 4
        assert sum(not answer.done() for answer in flood) >= 2, "it did not wait for those that came before it"
        outcomes = await asyncio.gather(*flood, return_exceptions=True)
        assert sum(isinstance(outcome, Completion) for outcome in outcomes) == 6
        await deployed.until_nothing_remains()


@pytest.mark.parametrize("timeout_s", [0.05, 0.0, -1.0])
async def test_request_whose_time_passes_before_its_turn_opens_no_session(tokenizer: str, timeout_s: float) -> None:
    """The models never hear of it, whether it had to wait or not. The generator itself is asked: behind an ingress no timer
    of gRPC's ends the call."""
    async with (
        deployment(tokenizer, pause_s=0.004, max_sessions=1, max_queued_requests=4) as deployed,
        GenerationClient(deployed.address) as client,
    ):
        generator = deployed.services.generator
        running = asyncio.ensure_future(client.complete(greedy(2000)))
        await until(lambda: deployed.services.leases == 2)
        asked = replace(LONG, tenant="late")
        # One that has time left is refused at once if it would wait for longer than that, by what was measured so far.
        with pytest.raises((DeadlineExceeded, QueueFull) if timeout_s > 0 else DeadlineExceeded):
            await anext(generator.generate(asked, timeout_s=timeout_s))
        assert (deployed.services.leases, generator.running, generator.waiting) == (2, 1, 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await deployed.until_nothing_remains()
        if timeout_s <= 0:
            with pytest.raises(DeadlineExceeded):
                await anext(generator.generate(asked, timeout_s=timeout_s))


# ---------------------------------------------------------------------------------------------------------------------
# Callers that do not read


async def until_still(model: FakeModel) -> None:
    """Until the model makes no more steps, for a moment; should it only be slow, a test sees fewer tokens, not more."""
    steps = -1
    while steps != model.steps:
        steps = model.steps
        await asyncio.sleep(0.3)


async def read_on(call: Any, ids: list[int]) -> None:
    """Read to the end, into `ids`."""
    while (response := await call.read()) is not grpc.aio.EOF:
        ids += response.delta.token_ids


def counted(length: int) -> list[int]:
    """What the model answers."""
    return [(PROMPT[-1] + 1 + index) % VOCAB for index in range(length)]


async def test_answer_that_is_not_read_is_not_made(tokenizer: str) -> None:
    """Of 10,000 tokens, a good megabyte, the transport takes some KiB; then rounds wait for the reader, who gets all."""
    async with deployment(tokenizer, drafts_by_model=False) as deployed, open_channel(deployed.address) as channel:
        call = GenerationServiceStub(channel).Generate(request_to_proto(LONG), timeout=LIMIT_S)
        await call.read()
        await until_still(deployed.target)
        assert len(PROMPT) < deployed.target.memory.held_tokens < TOKENS / 2
        ids: list[int] = []
        await read_on(call, ids)
        assert ids == counted(TOKENS)
        await deployed.until_nothing_remains()


async def test_choices_that_are_not_read_are_not_made(tokenizer: str) -> None:
    """All of them together are one stream, and none runs ahead of the others by more than a round."""
    async with deployment(tokenizer, drafts_by_model=False) as deployed, open_channel(deployed.address) as channel:
        asked = replace(LONG, n=3, stopping=replace(LONG.stopping, max_tokens=3000))
        call = GenerationServiceStub(channel).Generate(request_to_proto(asked), timeout=LIMIT_S)
        await call.read()
        await until_still(deployed.target)
        assert deployed.target.memory.held_tokens < TOKENS / 2
        call.cancel()
        await deployed.until_nothing_remains()


async def test_answer_of_a_reader_that_stalls_is_ended_and_can_be_resumed(tokenizer: str) -> None:
    """Its place and its sessions are free while it still does not read; what was sent before the end is not lost."""
    asked = replace(LONG, stopping=replace(LONG.stopping, max_tokens=4000))
    async with deployment(tokenizer, drafts_by_model=False, stalled_reader_timeout_s=0.3) as deployed:
        async with open_channel(deployed.address) as channel:
            call = GenerationServiceStub(channel).Generate(request_to_proto(asked), timeout=LIMIT_S)
            await call.read()
            # The call itself waits for its reader, to say how it ended.
            await until(lambda: deployed.remains().keys() <= {"tasks"})
            ids: list[int] = []
            with pytest.raises(grpc.aio.AioRpcError, match="was ended") as ending:
                await read_on(call, ids)
            assert ending.value.code() is grpc.StatusCode.ABORTED
            assert 0 < len(ids) < 4000
            await deployed.until_nothing_remains()
        async with GenerationClient(deployed.address) as client:
            rest = await client.complete(replace(asked, output_ids=tuple(ids)))
        assert ids + list(rest.token_ids) == counted(4000)


async def test_client_resumes_an_answer_that_it_was_too_slow_for(tokenizer: str) -> None:
    """Of its own accord: whoever iterates sees nothing of it. Without resumptions it is a typed error."""
    asked = replace(LONG, stopping=replace(LONG.stopping, max_tokens=4000))

    async def read_late(client: GenerationClient, deployed: Deployment) -> list[int]:
        ids: list[int] = []
        async for event in client.generate(asked, timeout_s=LIMIT_S):
            if isinstance(event, Started):
                await until(lambda: deployed.services.generator.running == 1)
                await until(lambda: deployed.services.generator.running == 0)
            elif isinstance(event, Delta):
                ids += event.token_ids
        return ids

    async with deployment(tokenizer, drafts_by_model=False, stalled_reader_timeout_s=0.3) as deployed:
        async with GenerationClient(deployed.address) as client:
            assert await read_late(client, deployed) == counted(4000)
        async with GenerationClient(deployed.address, max_resumptions=0) as client:
            with pytest.raises(ReaderStalled) as ending:
                await read_late(client, deployed)
            assert ending.value.reason == "READER_STALLED"


# ---------------------------------------------------------------------------------------------------------------------
# Callers that leave


@dataclass(frozen=True)
class Leaver:
    """One caller: what it asks, how it leaves, and when."""

    asked: GenerationRequest
    disconnects: bool  # else it cancels
    events: int  # it has read so many
    pause_s: float  # then this passes


def leavers(count: int, *, seed: int) -> list[Leaver]:
    """Short and long prompts, one choice or three, of four tenants."""
    drawn = random.Random(seed)
    return [
        Leaver(
            greedy(
                2000,
                prompt=tuple(drawn.choices(range(VOCAB), k=drawn.choice([3, 3, 400]))),
                n=drawn.choice([1, 1, 3]),
                tenant=drawn.choice("abcd"),
            ),
            disconnects=drawn.random() < 0.5,
            events=drawn.choice([0, 0, 1, 2, 5]),
            pause_s=drawn.choice([0.0, drawn.random() * 0.05]),
        )
        for _ in range(count)
    ]


WAYS = {"without an event", "in mid-answer", grpc.StatusCode.RESOURCE_EXHAUSTED.name}


async def leave(address: str, leaver: Leaver) -> str:
    """Ask, and leave; how far it got."""
    channel = open_channel(address)
    call = GenerationServiceStub(channel).Generate(request_to_proto(leaver.asked), timeout=LIMIT_S)
    how = "without an event"
    try:
        await call.wait_for_connection()
        for _ in range(leaver.events):
            await call.read()
            how = "in mid-answer"
        await asyncio.sleep(leaver.pause_s)
    except grpc.aio.AioRpcError as error:
        how = error.code().name
    if not leaver.disconnects:
        call.cancel()
    await channel.close()
    return how


async def leave_all(deployed: Deployment, count: int, *, at_once: int) -> tuple[set[str], float]:
    """The ways in which callers left, and how long anything of them remained."""
    gate = asyncio.Semaphore(at_once)

    async def one(leaver: Leaver) -> str:
        async with gate:
            return await leave(deployed.address, leaver)

    ways = set(await asyncio.gather(*(one(leaver) for leaver in leavers(count, seed=count))))
    return ways, await deployed.until_nothing_remains()


async def test_callers_that_leave_at_any_moment_leave_nothing(tokenizer: str) -> None:
    """A hundred, in the line, while the prompt is read, or in mid-answer, by cancelling or by closing the connection."""
    async with deployment(tokenizer, pause_s=0.001, max_sessions=PLACES, max_queued_requests=16) as deployed:
        ways, _ = await leave_all(deployed, 100, at_once=24)
        assert {"without an event", "in mid-answer"} <= ways <= WAYS
        async with GenerationClient(deployed.address) as client:
            assert len((await client.complete(greedy(8))).token_ids) == 8


STREAMS = """
import asyncio, sys
from paceline.client import GenerationClient, GenerationRequest, StopConditions

async def main():
    async with GenerationClient(sys.argv[1]) as client:
        stopping = StopConditions(max_tokens=2000, ignore_eos=True)
        asked = GenerationRequest(token_ids=(0, 1, 2), stopping=stopping, n=2)
        await asyncio.gather(*(client.complete_choices(asked) for _ in range(6)))

asyncio.run(main())
"""


async def test_client_that_is_killed_leaves_nothing(tokenizer: str) -> None:
    """A process with four answers of two choices each, and two that wait; it gets no chance to cancel them."""
    async with deployment(tokenizer, pause_s=0.004, max_sessions=PLACES, max_queued_requests=16) as deployed:
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", STREAMS, deployed.address)
        generator = deployed.services.generator
        await until(lambda: (generator.running, generator.waiting) == (PLACES, 2))
        client.kill()
        await client.wait()
        await deployed.until_nothing_remains()


@pytest.mark.slow
async def test_a_thousand_callers_that_leave_are_forgotten_within_two_seconds(tokenizer: str) -> None:
    """A limit on time, so not among the quick tests: on a machine that does nothing else it takes a tenth of that."""
    async with deployment(tokenizer, pause_s=0.001, max_sessions=64, max_queued_requests=64) as deployed:
        ways, remained_s = await leave_all(deployed, 1000, at_once=128)
        assert {"without an event", "in mid-answer"} <= ways <= WAYS
        assert remained_s < 2.0
