"""A bare peer of a model service: it sends any items, well formed or not, and gathers what comes back.

Knows the messages, but nothing of how an orchestrator behaves: that is what makes it useful.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import Phase
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.process import Serve
from paceline.rpc import open_channel
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import drafter_service_pb2_grpc as drafter_grpc
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc
from tests.harness import Running, start

VOCAB = 8  # tokens, of the models in these tests
MAX_CONTEXT = 64  # tokens, likewise
LIMIT_S = 10.0
"""Longest wait for anything; a test that gets there has failed."""

CommandT = TypeVar("CommandT", target_pb.TargetCommand, drafter_pb.DrafterCommand)
EventT = TypeVar("EventT", target_pb.TargetEvent, drafter_pb.DrafterEvent)
ResultT = TypeVar("ResultT")


class StreamPeer(Generic[CommandT, EventT]):
    """One stream to a model service. Invariant: every event is handed out once, in the order of its session."""

    def __init__(self, call: Any, wrap: Callable[[Sequence[CommandT]], Any]) -> None:
        self._call = call
        self._wrap: Callable[[Sequence[CommandT]], Any] = wrap
        self._inbox: defaultdict[str, asyncio.Queue[EventT]] = defaultdict(asyncio.Queue)
        self._loads: asyncio.Queue[EventT] = asyncio.Queue()
        self._reader = asyncio.ensure_future(self._read())

    async def send(self, *commands: CommandT) -> None:
        """All commands in one message."""
        await self._call.write(self._wrap(commands))

    async def event(self, session_id: str) -> EventT:
        """The next event of a session."""
        return await self._next(self._inbox[session_id], f"event of {session_id!r}")

    async def failure(self, session_id: str) -> session_pb.SessionFailed:
        """The next event of a session, which is its failure, told in a sentence."""
        event = await self.event(session_id)
        assert event.WhichOneof("event") == "failed", event
        assert_is_sentence(event.failed.message)
        return event.failed

    def waiting(self, session_id: str) -> list[EventT]:
        """The events of a session that have arrived and were not asked for."""
        queue = self._inbox[session_id]
        return [queue.get_nowait() for _ in range(queue.qsize())]

    async def load(self, condition: Callable[[session_pb.LoadReport], bool] = lambda _: True) -> session_pb.LoadReport:
        """The next sign of life that meets the condition; one that came before the last event was asked for is none."""
        while not self._loads.empty():
            self._loads.get_nowait()
        seen: list[session_pb.LoadReport] = []
        async with asyncio.timeout(LIMIT_S):
            while not seen or not condition(seen[-1]):
                seen.append((await self._next(self._loads, f"load after {seen[-1:]}")).load)
        return seen[-1]

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def ending(self) -> grpc.StatusCode:
        """Wait for the end of the stream; gives its status."""
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({self._reader})
            code: grpc.StatusCode = await self._call.code()
            return code

    async def hang_up(self) -> None:
        """Go away without a word."""
        self._call.cancel()
        await asyncio.wait({self._reader})

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def _next(self, queue: asyncio.Queue[EventT], what: str) -> EventT:
        getting = asyncio.ensure_future(queue.get())
        await asyncio.wait({getting, self._reader}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            getting.cancel()
            raise AssertionError(f"no {what}; the stream {'has ended' if self._reader.done() else 'lives on'}")
        return getting.result()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                for event in message.events:
                    is_load = event.WhichOneof("event") == "load"
                    (self._loads if is_load else self._inbox[event.session_id]).put_nowait(event)
        except (grpc.RpcError, asyncio.CancelledError):
            return  # `ending` gives the status


TargetPeer = StreamPeer[target_pb.TargetCommand, target_pb.TargetEvent]
DrafterPeer = StreamPeer[drafter_pb.DrafterCommand, drafter_pb.DrafterEvent]


@asynccontextmanager
async def target_peer(address: str) -> AsyncIterator[TargetPeer]:
    """A stream to the target service at `address`."""
    async with open_channel(address) as channel:
        peer = open_target_stream(channel)
        yield peer
        await peer.hang_up()


@asynccontextmanager
async def drafter_peer(address: str) -> AsyncIterator[DrafterPeer]:
    """A stream to the drafter service at `address`."""
    async with open_channel(address) as channel:
        peer = open_drafter_stream(channel)
        yield peer
        await peer.hang_up()


def open_target_stream(channel: grpc.aio.Channel) -> TargetPeer:
    call = target_grpc.TargetServiceStub(channel).Verify()
    return TargetPeer(call, lambda commands: target_pb.VerifyRequest(commands=commands))


def open_drafter_stream(channel: grpc.aio.Channel) -> DrafterPeer:
    call = drafter_grpc.DrafterServiceStub(channel).Draft()
    return DrafterPeer(call, lambda commands: drafter_pb.DraftRequest(commands=commands))


async def status_of_bytes(channel: grpc.aio.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    """Send bytes that need not be a message on a stream of their own; gives the status that ends it."""
    call: Any = channel.stream_stream(method, request_serializer=None, response_deserializer=None)()
    with suppress(grpc.aio.AioRpcError):
        await call.write(message)
        await call.done_writing()
        async for _ in call:
            pass
    return await call.code(), await call.details()


async def health_of(address: str, service_name: str) -> str:
    """What the standard health service says: SERVING, NOT_SERVING, or the status code of its refusal."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service_name), timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def open_session(committed_ids: Sequence[int], **changes: Any) -> session_pb.OpenSession:
    """A valid greedy session on a prompt, but for the fields named in `changes`."""
    fields: dict[str, Any] = {
        "committed_ids": committed_ids,
        "prompt_length": len(committed_ids),
        "sampling": session_pb.SamplingParams(temperature=0.0),
        "seed": 7,
        "rule": session_pb.VERIFICATION_RULE_GREEDY,
        "vocab_size": VOCAB,
    }
    return session_pb.OpenSession(**(fields | changes))


def assert_is_sentence(message: str) -> None:
    """Written for a person: several words, an end, and nothing that only a programmer would say."""
    assert re.fullmatch(r"[^\n]+\S+( \S+){3,}[^\n]*[.)]", message), message
    assert not re.search(r"Traceback|Error\b|Exception|object at 0x", message), message


BAD_SAMPLING: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (float("nan"), float("inf"), -0.1, 100.5)),
    *(("top_p", value) for value in (float("nan"), 0.0, -0.5, 2.0)),
    *(("min_p", value) for value in (float("nan"), -0.1, 1.0)),
    *(("repetition_penalty", value) for value in (float("nan"), float("inf"), 0.0, -1.0, 1000.0)),
    *(("presence_penalty", value) for value in (float("nan"), 100.5)),
    *(("frequency_penalty", value) for value in (float("-inf"), -100.5)),
    ("logit_bias", [session_pb.LogitBias(token_id=1, bias=1000.5)]),
    ("logit_bias", [session_pb.LogitBias(token_id=1, bias=float("nan"))]),
    ("logit_bias", [session_pb.LogitBias(token_id=VOCAB, bias=1.0)]),
    ("logit_bias", [session_pb.LogitBias(token_id=2**32 - 1, bias=1.0)]),
    ("banned_token_ids", [VOCAB]),
    ("banned_token_ids", list(range(VOCAB))),
    ("allowed_token_ids", session_pb.TokenIds(ids=[2**31 - 1])),
    ("allowed_token_ids", session_pb.TokenIds()),
    ("stop_token_ids", [VOCAB]),
]
"""Sampling parameters out of range for `VOCAB` tokens, each with the name of the parameter at fault."""


def sampling_with(**parameters: Any) -> session_pb.SamplingParams:
    """Sampling at temperature 1, but for the parameters given."""
    return session_pb.SamplingParams(**({"temperature": 1.0} | parameters))


# ---------------------------------------------------------------------------------------------------------------------
# Random items

NO_SHRINKING = (Phase.explicit, Phase.generate)
"""A case that breaks the service costs a second, so the first that was found must do."""

uint32s = st.one_of(st.integers(0, VOCAB), st.integers(0, MAX_CONTEXT + 2), st.sampled_from([2**31 - 1, 2**32 - 1]))
id_lists = st.lists(st.one_of(st.integers(0, VOCAB - 1), uint32s), max_size=6)
doubles = st.one_of(st.floats(-2, 2), st.floats(), st.sampled_from([0.0, 1.0, 5e-324, 1e-300, 1e-40, 100.0]))
any_sampling = st.builds(
    session_pb.SamplingParams,
    temperature=st.none() | doubles,
    top_k=st.integers(0, 3) | uint32s,
    top_p=st.none() | doubles,
    min_p=doubles | st.just(0.0),
    repetition_penalty=st.none() | doubles,
    presence_penalty=doubles | st.just(0.0),
    frequency_penalty=doubles | st.just(0.0),
    logit_bias=st.lists(st.builds(session_pb.LogitBias, token_id=uint32s, bias=st.floats(width=32)), max_size=2),
    banned_token_ids=id_lists,
    allowed_token_ids=st.none() | st.builds(session_pb.TokenIds, ids=id_lists),
    min_tokens=uint32s,
    stop_token_ids=id_lists,
)
token_ids = st.integers(0, VOCAB - 1)
legal_sampling = st.builds(
    session_pb.SamplingParams,
    temperature=st.floats(0, 100) | st.sampled_from([1.0, 1.0, 1e-6, 5e-324]),
    top_k=st.integers(0, 2**32 - 1) | st.just(0),
    top_p=st.floats(0, 1, exclude_min=True) | st.just(1.0),
    min_p=st.floats(0, 1, exclude_max=True) | st.just(0.0),
    repetition_penalty=st.floats(0, 100, exclude_min=True) | st.just(1.0),
    presence_penalty=st.floats(-100, 100) | st.just(0.0),
    frequency_penalty=st.floats(-100, 100) | st.just(0.0),
    logit_bias=st.lists(
        st.builds(session_pb.LogitBias, token_id=token_ids, bias=st.floats(-1000, 1000, width=32)), max_size=3
    ),
    banned_token_ids=st.lists(token_ids, max_size=3),
    allowed_token_ids=st.none() | st.builds(session_pb.TokenIds, ids=st.lists(token_ids, min_size=1, max_size=3)),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(token_ids, max_size=2),
)
any_opening = st.builds(
    session_pb.OpenSession,
    committed_ids=id_lists,
    prompt_length=st.integers(0, 3) | uint32s,
    sampling=legal_sampling | any_sampling,
    seed=st.integers(0, 2**64 - 1),
    rule=st.integers(0, 4),
    vocab_size=st.just(VOCAB) | uint32s,
)


class FuzzBench(Generic[CommandT, EventT]):
    """A service and a stream to it that outlive the cases of one test; a case that breaks them gets the next new ones.

    Runs its own event loop, because a property is a plain function.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        serve: Callable[[], Serve],
        open_stream: Callable[[grpc.aio.Channel], StreamPeer[CommandT, EventT]],
    ) -> None:
        self._runner, self._serve = runner, serve
        self._open_stream: Callable[[grpc.aio.Channel], StreamPeer[CommandT, EventT]] = open_stream
        self._service: Running | None = None
        self._channel: grpc.aio.Channel | None = None
        self._peer: StreamPeer[CommandT, EventT] | None = None
        self._cases = 0

    def run(self, case: Callable[[StreamPeer[CommandT, EventT], str], Awaitable[ResultT]]) -> ResultT:
        """Run a case on the stream, with a prefix for session ids that no other case has."""

        async def run() -> ResultT:
            await self._start()
            assert self._peer is not None
            return await case(self._peer, f"{self._cases}-")

        self._cases += 1
        return self._runner.run(run())

    def status_of(self, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
        """The status that ends a stream of its own on which these bytes are sent."""

        async def run() -> tuple[grpc.StatusCode, str]:
            await self._start()
            assert self._channel is not None
            return await status_of_bytes(self._channel, method, message)

        return self._runner.run(run())

    def stop(self) -> None:
        self._runner.run(self._stop())

    async def _start(self) -> None:
        if self._service is None or self._service.task.done() or self._peer is None or self._peer.has_ended:
            await self._stop()
            self._service = await start(self._serve())
            self._channel = open_channel(self._service.address)
            self._peer = self._open_stream(self._channel)

    async def _stop(self) -> None:
        if self._peer is not None and self._channel is not None:
            await self._peer.hang_up()
            await self._channel.close()
        if self._service is not None:
            self._service.lifetime.stop()
            # A service whose model thread a case has broken says so when it ends; the case has failed by then.
            with suppress(PacelineError):
                await self._service.task
