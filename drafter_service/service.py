"""The drafter as a process: settings, method, worker, server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from drafter_service.drafter import Command, Drafter, DrafterEvent, Entry
from drafter_service.method import DraftMethod, StateT
from drafter_service.registry import build_method
from drafter_service.servicer import DrafterServicer
from paceline.engine.memory import Allocation
from paceline.engine.torch_threads import use_threads
from paceline.model_service import ModelService, session_table
from paceline.process import Lifetime, run_service
from paceline.sessions import SessionTable
from paceline.settings import DrafterSettings
from paceline.telemetry import ServiceMetrics
from paceline.types import ModelInfo, SpeculationStats
from paceline.v1 import drafter_service_pb2
from paceline.v1.drafter_service_pb2_grpc import add_DrafterServiceServicer_to_server
from paceline.version import installed_version

SERVICE_NAME = drafter_service_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name


def prepare(settings: DrafterSettings) -> ModelService[Command, DrafterEvent]:
    """Build the drafting method, loading its model if it has one; the result serves it until asked to stop."""
    use_threads(settings.threads)
    built = build_method(settings)
    return assemble(settings, built.method, built.info, allocation=built.allocation)


def assemble(
    settings: DrafterSettings, method: DraftMethod[StateT], info: ModelInfo, *, allocation: Allocation | None = None
) -> ModelService[Command, DrafterEvent]:
    """A service over any drafting method; tests and benchmarks pass fakes."""
    info = replace(info, version=info.version or installed_version())
    metrics = ServiceMetrics(CollectorRegistry())
    sessions: SessionTable[Entry[StateT]] = session_table(
        settings,
        method.memory,
        pending_tokens_of=lambda entry: method.pending_tokens(entry.state, entry.view),
    )
    return ModelService(
        settings,
        kind="drafter",
        service_name=SERVICE_NAME,
        info=info,
        worker=Drafter(method, sessions, on_step=metrics.observe_step),
        sessions=sessions,
        outcomes=SpeculationStats(),
        memory=method.memory,
        allocation=allocation,
        metrics=metrics,
        make_servicer=lambda submit, load: DrafterServicer(
            info,
            submit=submit,
            load=load,
            metrics=metrics,
            heartbeat_s=settings.heartbeat_s,
            orphan_grace_s=settings.orphan_grace_s,
        ),
        register=add_DrafterServiceServicer_to_server,
    )


async def serve_drafter(
    lifetime: Lifetime, settings: DrafterSettings, method: DraftMethod[Any], info: ModelInfo
) -> None:
    """Serve any drafting method until asked to stop."""
    await assemble(settings, method, info)(lifetime)


def main() -> NoReturn:
    run_service("drafter", DrafterSettings, prepare)
