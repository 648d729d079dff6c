"""The target as a process: settings, model, worker, server."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from paceline.engine.emulation import emulated
from paceline.engine.interface import CacheT, Model
from paceline.engine.memory import Allocation, step_tokens
from paceline.engine.torch_threads import use_threads
from paceline.model_service import ModelService, load_model, session_table
from paceline.process import Lifetime, run_service
from paceline.sessions import SessionTable
from paceline.settings import TargetSettings
from paceline.telemetry import ServiceMetrics
from paceline.types import ModelInfo
from paceline.v1 import target_service_pb2
from paceline.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from paceline.version import installed_version
from target_service.scheduler import Command, Scheduler, TargetEvent
from target_service.servicer import TargetServicer
from target_service.verifier import TargetSession

SERVICE_NAME = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


def prepare(settings: TargetSettings) -> ModelService[Command, TargetEvent]:
    """Load the model; the result serves it until asked to stop."""
    use_threads(settings.threads)
    model = load_model(settings)
    info = ModelInfo(
        model_id=model.model_id,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_sha256=model.tokenizer_sha256,
        incarnation=uuid.uuid4().hex,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=tuple(model.eos_token_ids),
        emulated=settings.is_emulated,
    )
    held = emulated(
        model,
        step_ms=settings.emulated_step_ms,
        per_session_ms=settings.emulated_step_ms_per_session,
        per_token_ms=settings.emulated_step_ms_per_token,
    )
    return assemble(settings, held, info, allocation=model.allocation)


def assemble(
    settings: TargetSettings, model: Model[CacheT], info: ModelInfo, *, allocation: Allocation | None = None
) -> ModelService[Command, TargetEvent]:
    """A service over any model behind the narrow interface; tests and benchmarks pass fakes."""
    info = replace(info, version=info.version or installed_version())
    metrics = ServiceMetrics(CollectorRegistry())
    sessions: SessionTable[TargetSession[CacheT]] = session_table(
        settings, model.memory, pending_tokens_of=lambda session: session.pending_tokens
    )
    scheduler = Scheduler(
        model,
        sessions,
        max_batch_tokens=step_tokens(settings.max_num_batched_tokens, allocation.device if allocation else "cpu"),
        on_step=metrics.observe_step,
    )
    return ModelService(
        settings,
        kind="target",
        service_name=SERVICE_NAME,
        info=info,
        worker=scheduler,
        sessions=sessions,
        outcomes=scheduler.outcomes,
        memory=model.memory,
        allocation=allocation,
        metrics=metrics,
        patience_s=scheduler.patience_s,
        make_servicer=lambda submit, load: TargetServicer(
            info,
            submit=submit,
            load=load,
            metrics=metrics,
            heartbeat_s=settings.heartbeat_s,
            orphan_grace_s=settings.orphan_grace_s,
        ),
        register=add_TargetServiceServicer_to_server,
    )


async def serve_target(lifetime: Lifetime, settings: TargetSettings, model: Model[Any], info: ModelInfo) -> None:
    """Serve any model behind the narrow interface until asked to stop."""
    await assemble(settings, model, info)(lifetime)


def main() -> NoReturn:
    run_service("target", TargetSettings, prepare)
