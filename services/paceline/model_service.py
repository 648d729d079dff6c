"""The life of a model service, the same for drafter and target: one thread with the model, one server, a clean end."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import structlog
import torch

from paceline import sampling
from paceline.engine.interface import Memory
from paceline.engine.memory import Allocation, MemoryLimits
from paceline.engine.model import CausalModel
from paceline.errors import PacelineError
from paceline.exposure import refuse_exposure, warn_of_trust
from paceline.model_thread import CommandT_contra, EventT_co, ModelThread, Worker
from paceline.process import Lifetime, until_idle
from paceline.rpc import Server
from paceline.sessions import SessionTable
from paceline.settings import ModelServiceSettings
from paceline.telemetry import ServiceMetrics, serve_metrics, show_certificates
from paceline.types import ModelInfo, SpeculationStats
from paceline.v1.session_pb2 import LoadReport

logger = structlog.get_logger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
StateT = TypeVar("StateT")


class ModelWorker(Worker[CommandT_contra, EventT_co], Protocol[CommandT_contra, EventT_co]):
    """What runs on the thread of a model service."""

    @property
    def preemptions(self) -> int:
        """Sessions that gave up their memory for others."""


class Streams(Protocol):
    """The peers of a service (`streams.PeerStreams`)."""

    def announce(self) -> None: ...

    async def serve(
        self, batches: AsyncIterable[Iterable[Any]], write: Callable[[list[Any]], Awaitable[object]]
    ) -> None: ...


class Servicer(Protocol):
    """What a service's servicer offers besides its RPCs."""

    @property
    def streams(self) -> Streams: ...

    def on_events(self, events: Any) -> None: ...


class PeerService(Protocol):
    """A model service, as a peer in the same process sees it (`ModelService`)."""

    @property
    def info(self) -> ModelInfo: ...

    async def serve_peer(
        self, batches: AsyncIterable[Iterable[Any]], write: Callable[[list[Any]], Awaitable[object]]
    ) -> None: ...


class ModelService(Generic[CommandT, EventT]):
    """A model service that is ready to be served, once: over gRPC by `await service(lifetime)`, or to peers of this
    process alone, within `running`.

    `outcomes` are the drafts of which the worker knows what was kept; none at a drafter. `memory` is that of the model,
    if there is one, and `allocation` says how it came to be as large as it is. `patience_s` is what `ModelThread` takes.
    """

    def __init__(
        self,
        settings: ModelServiceSettings,
        *,
        kind: str,
        service_name: str,
        info: ModelInfo,
        worker: ModelWorker[CommandT, EventT],
        sessions: SessionTable[Any],
        outcomes: SpeculationStats,
        metrics: ServiceMetrics,
        make_servicer: Callable[[Callable[[CommandT], None], Callable[[], LoadReport]], Servicer],
        register: Callable[[Any, grpc.aio.Server], None],
        memory: Memory | None = None,
        allocation: Allocation | None = None,
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.info = info
        self._worker, self._memory, self._allocation = worker, memory, allocation
        self._settings, self._kind, self._service_name = settings, kind, service_name
        self._sessions, self._outcomes, self._register = sessions, outcomes, register
        self._thread = ModelThread[CommandT, EventT](
            worker,
            on_events=self._on_events,
            on_failure=self._on_failure,
            name=f"{kind}-model",
            patience_s=patience_s,
        )
        self.registry = metrics.registry
        metrics.follow(self.load)
        show_certificates(self.registry, services=settings.tls_cert)
        self._servicer = make_servicer(self._thread.submit, self.load)
        self._on_broken: Callable[[], None] = lambda: None
        self._is_broken = False

    async def __call__(self, lifetime: Lifetime) -> None:
        """Serve until asked to stop; then drain, end the streams and the thread. Raises if the model thread broke."""
        settings = self._settings
        refuse_exposure(settings)
        warn_of_trust(settings)
        self.serve_metrics()
        server = Server(host=settings.host, port=settings.port, tls=settings.server_tls)
        self._register(self._servicer, server.registrar)
        await server.start(self._service_name)
        async with self.running(lifetime.stop):
            self._say_ready(lifetime, server.address)
            await lifetime.until_stopped()
            self._sessions.is_draining = True
            self._servicer.streams.announce()
            await server.begin_draining()
            await until_idle(lambda: len(self._sessions), limit_s=0.0 if self._is_broken else settings.drain_s)
            await server.stop(0.5)

    @asynccontextmanager
    async def running(self, on_broken: Callable[[], None]) -> AsyncIterator[None]:
        """Run the model thread while the block runs, once; raises behind it if the thread broke.

        `on_broken` is called when that happens. A block that raises leaves the thread to end with the process: who is
        in such a hurry must not wait for a model that hangs.
        """
        self._on_broken = on_broken
        self._thread.start()
        yield
        await self._thread.stop()
        if self._is_broken:
            raise PacelineError("The model thread broke; the log says where. Start the service again.")

    def serve_metrics(self) -> None:
        """Answer scrapes on the port of the settings, if there is one, until the process ends."""
        serve_metrics(self.registry, host=self._settings.host, port=self._settings.metrics_port)

    async def serve_peer(
        self, batches: AsyncIterable[Iterable[Any]], write: Callable[[list[Any]], Awaitable[object]]
    ) -> None:
        """Serve a peer in this process until its batches of commands end, as if they came on a stream: the same messages,
        of which it must change none that it has sent or got.
        """
        await self._servicer.streams.serve(batches, write)

    def load(self) -> LoadReport:
        """How busy the service is; costs next to nothing, whatever it holds."""
        sessions, thread = self._sessions, self._thread
        return LoadReport(
            sessions=len(sessions),
            queued=thread.queued,
            draining=sessions.is_draining,
            stale_items=sessions.stale_items,
            max_sessions=sessions.max_sessions,
            kv_used_tokens=sessions.kv_used_tokens,
            kv_capacity_tokens=sessions.kv_capacity_tokens,
            num_draft_tokens=self._outcomes.num_draft_tokens,
            num_accepted_tokens=self._outcomes.num_accepted_tokens,
            step_busy_share=thread.step_busy_share,
            preemptions=self._worker.preemptions,
            prefix_reused_tokens=self._memory.reused_tokens if self._memory else 0,
        )

    def holds(self, session_id: str) -> bool:
        """Whether the session is open here."""
        return self._sessions.find(session_id) is not None

    @property
    def drain_s(self) -> float:
        """How long the sessions that run get to end, once the service was asked to stop."""
        return self._settings.drain_s

    @property
    def seconds_in_step(self) -> float:
        """How long the model step that runs has taken so far; grows without end if the model hangs."""
        return self._thread.seconds_in_step

    def _say_ready(self, lifetime: Lifetime, address: str) -> None:
        emulation = self._settings.emulated_times if self.info.emulated else {}
        model, dtype, threads = self.info.model_id, self.info.dtype, torch.get_num_threads()
        if self.info.emulated:
            logger.warning("model steps are held to a set time: what is measured here is emulated", **emulation)
        method = {"method": self.info.method} if self.info.method else {}
        memory = _memory_fields(self._allocation)
        lifetime.ready(self._kind, address, model=model, **method, dtype=dtype, threads=threads, **memory, **emulation)
        logger.info("ready", address=address, model=model, **method, dtype=dtype, **memory)

    def _on_events(self, events: Sequence[EventT]) -> None:
        self._servicer.on_events(events)

    def _on_failure(self) -> None:
        self._is_broken = True
        self._on_broken()


def load_model(settings: ModelServiceSettings, *, logit_noise: float = 0.0, verifier: str | None = None) -> CausalModel:
    """The model that the settings name, warmed up; raises `ModelUnavailable` and `StartupFailed`."""
    model = CausalModel.load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        cache_dir=settings.cache_dir,
        logit_noise=logit_noise,
        quantization=settings.quantization,
        limits=memory_limits(settings),
        shares_prefixes=settings.enable_prefix_caching,
        verifier=verifier,
    )
    model.warm_up()
    sampling.warm_up()
    if settings.cuda_graphs:
        model.capture_graphs(settings.max_sessions)
    return model


def memory_limits(settings: ModelServiceSettings) -> MemoryLimits:
    """What the settings say of memory."""
    return MemoryLimits(
        memory_fraction=settings.memory_fraction,
        kv_budget_tokens=settings.kv_budget_tokens,
        max_context=settings.max_context,
        max_sessions=settings.max_sessions,
        block_size=settings.block_size,
    )


def _memory_fields(allocation: Allocation | None) -> dict[str, object]:
    if allocation is None:
        return {}
    return {
        "max_context": allocation.plan.max_context,
        "kv_capacity_tokens": allocation.plan.capacity_tokens,
        "memory": str(allocation),
    }


def session_table(
    settings: ModelServiceSettings, memory: Memory | None, *, pending_tokens_of: Callable[[StateT], int]
) -> SessionTable[StateT]:
    """The table for the sessions of a model service: as many as its settings say, and as its memory holds, if any."""
    return SessionTable(
        max_sessions=settings.max_sessions,
        idle_ttl_s=settings.session_idle_ttl_s,
        pending_tokens_of=pending_tokens_of,
        held_tokens=lambda: memory.held_tokens if memory else 0,
        kv_capacity_tokens=memory.capacity_tokens if memory else 0,
    )
