"""The drafter as a process: settings, method, worker, server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NoReturn

from prometheus_client import CollectorRegistry

from drafter_service.drafter import Command, Drafter, DrafterEvent, DraftMethod, Entry, StateT
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.methods.ngram import NgramMethod
from drafter_service.servicer import DrafterServicer
from paceline.engine.emulation import emulated
from paceline.engine.memory import Allocation, step_tokens
from paceline.errors import StartupFailed
from paceline.model_service import ModelService, load_model, session_table, use_threads
from paceline.process import Lifetime, run_service
from paceline.sessions import SessionTable
from paceline.settings import DrafterSettings
from paceline.telemetry import ServiceMetrics
from paceline.types import ModelInfo, SpeculationStats
from paceline.v1 import drafter_service_pb2
from paceline.v1.drafter_service_pb2_grpc import add_DrafterServiceServicer_to_server

SERVICE_NAME = drafter_service_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name


def prepare(settings: DrafterSettings) -> ModelService[Command, DrafterEvent]:
    """Build the drafting method, loading its model if it has one; the result serves it until asked to stop."""
    use_threads(settings.threads)
    method, info, allocation = METHODS[settings.method](settings)
    return assemble(settings, method, info, allocation=allocation)


def _draft_model(settings: DrafterSettings) -> tuple[DraftMethod[Any], ModelInfo, Allocation | None]:
    model = load_model(settings, logit_noise=settings.logit_noise)
    info = ModelInfo(
        model_id=model.model_id,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_sha256=model.tokenizer_sha256,
        incarnation=uuid.uuid4().hex,
        method="draft_model",
        dtype=str(model.dtype).removeprefix("torch."),
        emulated=settings.emulated_step_ms > 0,
    )
    method = DraftModelMethod(
        emulated(model, step_ms=settings.emulated_step_ms),
        distribution_entries=settings.distribution_entries,
        max_batch_tokens=step_tokens(settings.max_num_batched_tokens, model.allocation.device),
    )
    return method, info, model.allocation


def _ngram(settings: DrafterSettings) -> tuple[DraftMethod[Any], ModelInfo, Allocation | None]:
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise StartupFailed("--prompt-lookup-min is larger than --prompt-lookup-max; raise the latter.")
    if settings.emulated_step_ms:
        raise StartupFailed("--emulated-step-ms holds the steps of a model, and --method ngram has none; drop it.")
    method = NgramMethod(prompt_lookup_min=settings.prompt_lookup_min, prompt_lookup_max=settings.prompt_lookup_max)
    info = ModelInfo(
        model_id="ngram",
        vocab_size=0,
        max_context=method.max_context,
        tokenizer_sha256="",
        incarnation=uuid.uuid4().hex,
        method="ngram",
    )
    return method, info, None


METHODS: dict[str, Callable[[DrafterSettings], tuple[DraftMethod[Any], ModelInfo, Allocation | None]]] = {
    "draft_model": _draft_model,
    "ngram": _ngram,
}


def assemble(
    settings: DrafterSettings, method: DraftMethod[StateT], info: ModelInfo, *, allocation: Allocation | None = None
) -> ModelService[Command, DrafterEvent]:
    """A service over any drafting method; tests and benchmarks pass fakes."""
    metrics = ServiceMetrics(CollectorRegistry())
    sessions: SessionTable[Entry[StateT]] = session_table(
        settings,
        method.memory,
        pending_tokens_of=lambda entry: method.pending_tokens(entry.state, entry.session),
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
