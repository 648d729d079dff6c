"""The drafter as a process: settings, method, worker, server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NoReturn

from drafter_service.drafter import Drafter, DraftMethod, Entry
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.methods.ngram import NgramMethod
from drafter_service.servicer import DrafterServicer
from paceline.engine.model import CausalModel
from paceline.errors import StartupFailed
from paceline.model_service import run_model_service, use_threads
from paceline.process import Lifetime, Serve, run_service
from paceline.sessions import SessionTable
from paceline.settings import DrafterSettings
from paceline.types import ModelInfo
from paceline.v1 import drafter_service_pb2
from paceline.v1.drafter_service_pb2_grpc import add_DrafterServiceServicer_to_server

SERVICE_NAME = drafter_service_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name


def prepare(settings: DrafterSettings) -> Serve:
    """Build the drafting method, loading its model if it has one; the result serves it until asked to stop."""
    use_threads(settings.threads)
    method, info = METHODS[settings.method](settings)
    return lambda lifetime: serve_drafter(lifetime, settings, method, info)


def _draft_model(settings: DrafterSettings) -> tuple[DraftMethod[Any], ModelInfo]:
    model = CausalModel.load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        cache_dir=settings.cache_dir,
        logit_noise=settings.logit_noise,
    )
    model.warm_up()
    info = ModelInfo(
        model_id=model.model_id,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_sha256=model.tokenizer_sha256,
        incarnation=uuid.uuid4().hex,
        method="draft_model",
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return DraftModelMethod(model, distribution_entries=settings.distribution_entries), info


def _ngram(settings: DrafterSettings) -> tuple[DraftMethod[Any], ModelInfo]:
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise StartupFailed("--prompt-lookup-min is larger than --prompt-lookup-max; raise the latter.")
    method = NgramMethod(prompt_lookup_min=settings.prompt_lookup_min, prompt_lookup_max=settings.prompt_lookup_max)
    info = ModelInfo(
        model_id="ngram",
        vocab_size=0,
        max_context=method.max_context,
        tokenizer_sha256="",
        incarnation=uuid.uuid4().hex,
        method="ngram",
    )
    return method, info


METHODS: dict[str, Callable[[DrafterSettings], tuple[DraftMethod[Any], ModelInfo]]] = {
    "draft_model": _draft_model,
    "ngram": _ngram,
}


async def serve_drafter(
    lifetime: Lifetime, settings: DrafterSettings, method: DraftMethod[Any], info: ModelInfo
) -> None:
    """Serve any drafting method; tests and benchmarks pass fakes."""
    sessions = SessionTable[Entry[Any]](max_sessions=settings.max_sessions, idle_ttl_s=settings.session_idle_ttl_s)
    await run_model_service(
        lifetime,
        settings,
        kind="drafter",
        service_name=SERVICE_NAME,
        info=info,
        worker=Drafter(method, sessions),
        sessions=sessions,
        make_servicer=lambda submit, load, metrics: DrafterServicer(
            info, submit=submit, load=load, metrics=metrics, heartbeat_s=settings.heartbeat_s
        ),
        register=add_DrafterServiceServicer_to_server,
    )


def main() -> NoReturn:
    run_service("drafter", DrafterSettings, prepare)
