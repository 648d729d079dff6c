"""The three services in one process over real sockets, and what must hold of them during and after any batch of cases.

Runs its own event loop, because a property is a plain function.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import psutil
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.generation import Completion
from paceline.rpc import open_channel
from paceline.types import VerificationRule
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from tests.checkpoints import TINY_VOCAB_SIZE, save_tiny_checkpoint
from tests.fakes import FakeModel, Logits, fake_info, hashed_logits
from tests.fuzz.messages import MAX_CONTEXT
from tests.harness import System, model_drafter_of, request, system, target_of

PATIENCE_S = 60.0
"""Longest wait for anything; a case that gets there has failed."""
_ROWS = 256  # different rows of logits
_STEADY = request((3, 1, 4), max_tokens=24, rule=VerificationRule.COUPLED)

GENERATION, TARGET, DRAFTER = (
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (generation_pb, "GenerationService"),
        (target_pb, "TargetService"),
        (drafter_pb, "DrafterService"),
    )
)


def _quick_logits(salt: int) -> Logits:
    """Depend on every token so far, at no cost: one of a few rows that are made once."""
    rows = [hashed_logits(TINY_VOCAB_SIZE, salt=salt)([number]) for number in range(_ROWS)]
    return lambda ids: rows[hash(tuple(ids)) % _ROWS]


target_logits, _other_logits = _quick_logits(1), _quick_logits(2)


def drafter_logits(ids: Sequence[int]) -> Sequence[float]:
    """The target's, but for every fourth token."""
    return _other_logits(ids) if len(ids) % 4 == 0 else target_logits(ids)


def greedy(row: Sequence[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


class Case(Protocol):
    """Something that a stranger does."""

    async def play(self, arena: Arena) -> None:
        """Raises `AssertionError` if it is met with anything but an answer or an error of ours."""


@dataclass
class Arena:
    """Running services. Invariant: between two batches they hold no session, no place and no memory."""

    services: System
    channels: dict[str, grpc.aio.Channel]  # by the full name of a service
    url: str
    faults: list[str]  # what the services and the libraries under them have logged as errors
    solo: Completion  # the steady session's answer when nobody disturbs it
    _runner: asyncio.Runner
    tasks: int = 0  # when nothing is going on; 0: not known yet
    cases: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def play(self, cases: Sequence[Case]) -> None:
        """All cases side by side, beside a session of somebody else's, whose answer must be the same as ever."""
        self._runner.run(self._play(cases))
        self.cases += len(cases)

    @property
    def resident_mib(self) -> float:
        gc.collect()
        return float(psutil.Process().memory_info().rss) / 2**20

    def new_name(self) -> str:
        """Six digits that no other batch of items has."""
        return f"{next(self._numbers) % 10**6:06d}"

    async def _play(self, cases: Sequence[Case]) -> None:
        steady = asyncio.ensure_future(self.services.client.complete(_STEADY, timeout_s=PATIENCE_S))
        endings = await asyncio.gather(*(case.play(self) for case in cases), return_exceptions=True)
        assert _bare(await steady) == _bare(self.solo), "the steady session was disturbed"
        await self._until_nothing_is_left()
        await self._require_health()
        faults, self.faults[:] = list(self.faults), []
        for case, ending in zip(cases, endings, strict=True):
            if ending is not None:
                raise AssertionError(f"{case!r:.4000}: {ending!r} {faults}") from ending
        assert not faults, faults

    async def _until_nothing_is_left(self) -> None:
        left: object = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while left := await self._left():  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.05)
                # Behind the questions, which are tasks as well.
                while len(left := asyncio.all_tasks()) > self.tasks > 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"something is left: {left!s:.4000}") from None

    async def _left(self) -> object:
        status = await self._ask(GENERATION.full_name, "GetPoolStatus", generation_pb.GetPoolStatusResponse)
        orchestrator = status.orchestrator
        if orchestrator.running_answers or orchestrator.waiting_requests:
            return status
        for service, method, kind in (
            (TARGET.full_name, "Verify", target_pb.VerifyResponse),
            (DRAFTER.full_name, "Draft", drafter_pb.DraftResponse),
        ):
            call: Any = self.channels[service].stream_stream(f"/{service}/{method}")()
            load: session_pb.LoadReport = kind.FromString(await call.read()).events[0].load
            call.cancel()
            if load.sessions or load.kv_used_tokens or load.queued:
                return load
        return None

    async def _require_health(self) -> None:
        for service, channel in self.channels.items():
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S
            )
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, service

    async def _ask(self, service: str, method: str, kind: Any) -> Any:
        call: Any = self.channels[service].unary_unary(f"/{service}/{method}")
        return kind.FromString(await call(b"", timeout=PATIENCE_S))


def _bare(answer: Completion) -> object:
    return (answer.text, answer.token_ids, answer.pieces, answer.finish_reason, answer.usage, answer.seed)


class _Faults(logging.Handler):
    """Gathers what is logged as an error, by whomever."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))

    def on_entry(self, _logger: object, level: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """For structlog, in place of all that it would do."""
        if level in ("error", "exception", "critical"):
            trace = traceback.format_exc() if entry.get("exc_info") else ""
            self.seen.append(f"{entry} {trace}")
        raise structlog.DropEvent

    def on_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For what no task could tell anybody."""
        self.seen.append(str(context))


@contextmanager
def _faults() -> Iterator[_Faults]:
    faults, before = _Faults(), structlog.get_config()["processors"]
    structlog.configure(processors=[faults.on_entry])
    logging.getLogger().addHandler(faults)
    try:
        yield faults
    finally:
        logging.getLogger().removeHandler(faults)
        structlog.configure(processors=before)


@contextmanager
def arena(folder: Path) -> Iterator[Arena]:
    """Services over models without weights, until the block ends."""
    tokenizer = str(save_tiny_checkpoint(folder / "tiny", seed=1))
    models = [
        FakeModel(logits, vocab_size=TINY_VOCAB_SIZE, max_context=MAX_CONTEXT)
        for logits in (target_logits, drafter_logits)
    ]
    # What a stranger leaves on a stream of its own goes when the stream has.
    settings: dict[str, Any] = {"orphan_grace_s": 0.05}
    target = target_of(models[0], fake_info(models[0]), **settings)
    drafter = model_drafter_of(models[1], **settings)
    with _faults() as faults, asyncio.Runner() as runner:
        stack = AsyncExitStack()

        async def start() -> Arena:
            runner.get_loop().set_exception_handler(faults.on_loop)
            # The loop stands still between two batches, which is no silence.
            patient = {"silence_limit_s": 600.0, "http_port": 0}
            services = await stack.enter_async_context(system(target, drafter, tokenizer, **patient))
            assert services.drafter is not None
            addresses = {
                GENERATION.full_name: services.orchestrator.address,
                TARGET.full_name: services.target.address,
                DRAFTER.full_name: services.drafter.address,
            }
            channels = {
                service: await stack.enter_async_context(open_channel(address))
                for service, address in addresses.items()
            }
            solo = await services.client.complete(_STEADY)
            url = str(services.orchestrator.lifetime.details["http"])
            return Arena(services, channels, url, faults.seen, solo, runner)

        opened = runner.run(start())
        opened.play([])  # whatever is made once and kept, such as connections, is there behind this
        opened.tasks = runner.run(_count_tasks())
        yield opened
        runner.run(stack.aclose())


async def _count_tasks() -> int:
    """The fewest of a while, in which those of the last questions end."""
    counts = []
    for _ in range(20):
        counts.append(len(asyncio.all_tasks()))
        await asyncio.sleep(0.02)
    return min(counts)
