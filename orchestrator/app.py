"""The orchestrator as a process: settings, tokenizer, connections to target and drafter, server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NoReturn

import structlog
from prometheus_client import CollectorRegistry

from orchestrator.api import GenerationServicer
from orchestrator.clients import DrafterClient, TargetClient
from orchestrator.generator import Generator
from orchestrator.text import Tokenizer
from paceline.engine.checkpoint import resolve_checkpoint
from paceline.errors import StartupFailed
from paceline.model_service import use_threads
from paceline.process import Lifetime, Serve, run_service, until_idle
from paceline.rpc import Server
from paceline.settings import OrchestratorSettings
from paceline.telemetry import SpeculationMetrics, serve_metrics
from paceline.types import ModelInfo
from paceline.v1 import generation_service_pb2
from paceline.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server

logger = structlog.get_logger(__name__)

SERVICE_NAME = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


def prepare(settings: OrchestratorSettings) -> Serve:
    # The orchestrator multiplies nothing: one thread keeps torch's pool from starting.
    use_threads(settings.threads or 1)
    return lambda lifetime: serve_orchestrator(lifetime, settings)


async def serve_orchestrator(lifetime: Lifetime, settings: OrchestratorSettings) -> None:
    """Connect, then serve until asked to stop; raises `StartupFailed` if the target cannot be reached."""
    registry = CollectorRegistry()
    serve_metrics(registry, host=settings.host, port=settings.metrics_port)
    metrics = SpeculationMetrics(registry)
    async with AsyncExitStack() as connections:
        target = TargetClient(settings.target, silence_limit_s=settings.silence_limit_s)
        await connections.enter_async_context(_kept_connected(target, lifetime))
        target_info = await _connected_target(target, settings)
        tokenizer = await _load_tokenizer(settings, target_info)
        drafter = None
        if settings.drafter is not None:
            drafter = DrafterClient(settings.drafter, target_info=target_info, silence_limit_s=settings.silence_limit_s)
            await connections.enter_async_context(_kept_connected(drafter, lifetime))
            if not await drafter.wait_connected(settings.drafter_timeout_s):
                # A drafter is optional at any time: sessions go on without it, and use it when it comes.
                logger.warning("no drafter answers yet", address=settings.drafter)
        metrics.stale_items.set_function(lambda: target.stale_items + (drafter.stale_items if drafter else 0))
        await _serve(
            lifetime, settings, Generator(settings, tokenizer, target=target, drafter=drafter, metrics=metrics)
        )


@asynccontextmanager
async def _kept_connected(client: TargetClient | DrafterClient, lifetime: Lifetime) -> AsyncIterator[None]:
    """Keep the connection up while the block runs; should its task break, the service stops with that error."""
    task = asyncio.ensure_future(client.run())
    task.add_done_callback(lambda _: lifetime.stop())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _serve(lifetime: Lifetime, settings: OrchestratorSettings, generator: Generator) -> None:
    server = Server(host=settings.host, port=settings.port)
    add_GenerationServiceServicer_to_server(GenerationServicer(generator), server.registrar)
    await server.start(SERVICE_NAME)
    lifetime.ready("orchestrator", server.address)
    logger.info("ready", address=server.address)
    await lifetime.until_stopped()
    await server.begin_draining()
    await until_idle(lambda: generator.running, limit_s=settings.drain_s)
    await server.stop(0.5)


async def _connected_target(target: TargetClient, settings: OrchestratorSettings) -> ModelInfo:
    if not await target.wait_connected(settings.connect_timeout_s) or target.info is None:
        raise StartupFailed(
            f"No target answers at {settings.target}; start one with `python -m target_service` and name it by --target."
        )
    return target.info


async def _load_tokenizer(settings: OrchestratorSettings, target: ModelInfo) -> Tokenizer:
    name = settings.tokenizer or target.model_id
    tokenizer = await asyncio.to_thread(
        lambda: Tokenizer.load(str(resolve_checkpoint(name, cache_dir=settings.cache_dir)))
    )
    if target.tokenizer_sha256 and tokenizer.fingerprint != target.tokenizer_sha256:
        raise StartupFailed(
            f"The tokenizer {name!r} ({tokenizer.fingerprint[:16]}) is not the target's "
            f"({target.tokenizer_sha256[:16]}); name the target's by --tokenizer."
        )
    return tokenizer


def main() -> NoReturn:
    run_service("orchestrator", OrchestratorSettings, prepare)
