"""The life of a model service, the same for drafter and target: one thread with the model, one server, a clean end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc.aio
import structlog
import torch
from prometheus_client import CollectorRegistry

from paceline.errors import PacelineError
from paceline.model_thread import ModelThread, Worker
from paceline.process import Lifetime, until_idle
from paceline.rpc import Server
from paceline.sessions import SessionTable
from paceline.settings import ModelServiceSettings
from paceline.telemetry import ServiceMetrics, serve_metrics
from paceline.types import ModelInfo
from paceline.v1.session_pb2 import LoadReport

logger = structlog.get_logger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class Announcer(Protocol):
    def announce(self) -> None: ...


class Servicer(Protocol):
    """What a service's servicer offers besides its RPCs."""

    @property
    def streams(self) -> Announcer: ...

    def on_events(self, events: Any) -> None: ...


def use_threads(threads: int) -> int:
    """Set the number of threads for arithmetic (0: one for each core this process may use) and return it."""
    chosen = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen


async def run_model_service(
    lifetime: Lifetime,
    settings: ModelServiceSettings,
    *,
    kind: str,
    service_name: str,
    info: ModelInfo,
    worker: Worker[CommandT, EventT],
    sessions: SessionTable[Any],
    make_servicer: Callable[[Callable[[CommandT], None], Callable[[], LoadReport], ServiceMetrics], Servicer],
    register: Callable[[Any, grpc.aio.Server], None],
) -> None:
    """Serve until asked to stop; then drain, end the streams and the thread. Raises if the model thread broke."""
    registry = CollectorRegistry()
    serve_metrics(registry, host=settings.host, port=settings.metrics_port)
    metrics = ServiceMetrics(registry)
    metrics.sessions.set_function(lambda: len(sessions))
    metrics.stale_items.set_function(lambda: sessions.stale_items)
    state = _ServiceState()

    def load() -> LoadReport:
        return LoadReport(
            sessions=len(sessions),
            queued=thread.queued,
            draining=sessions.is_draining,
            stale_items=sessions.stale_items,
        )

    def on_failure() -> None:
        state.broken = True
        lifetime.stop()

    def on_events(events: Sequence[EventT]) -> None:
        servicer.on_events(events)

    thread = ModelThread[CommandT, EventT](worker, on_events=on_events, on_failure=on_failure, name=f"{kind}-model")
    servicer = make_servicer(thread.submit, load, metrics)
    server = Server(host=settings.host, port=settings.port)
    register(servicer, server.registrar)
    await server.start(service_name)
    thread.start()
    lifetime.ready(kind, server.address, model=info.model_id, dtype=info.dtype, threads=torch.get_num_threads())
    logger.info("ready", address=server.address, model=info.model_id, dtype=info.dtype)
    await lifetime.until_stopped()
    sessions.is_draining = True
    servicer.streams.announce()
    await server.begin_draining()
    await until_idle(lambda: len(sessions), limit_s=0.0 if state.broken else settings.drain_s)
    await server.stop(0.5)
    await thread.stop()
    if state.broken:
        raise PacelineError("The model thread broke; the log says where. Start the service again.")


class _ServiceState:
    """What the end of a service depends on."""

    def __init__(self) -> None:
        self.broken = False
