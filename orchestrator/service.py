"""The orchestrator as a process: settings, tokenizer, connections to targets and drafters, server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from prometheus_client import CollectorRegistry

from orchestrator.access import gate_of
from orchestrator.api import SERVICE_NAME, GenerationServicer, let_in_by
from orchestrator.board import PoolBoard, most_room_first, nearest_first
from orchestrator.directory import Directory, StaticDirectory
from orchestrator.door import Door
from orchestrator.drafter_pool import DrafterPool
from orchestrator.generator import Generator
from orchestrator.http_server import HttpServer
from orchestrator.loop_lag import measure_lag
from orchestrator.openai_api import OpenAIApi
from orchestrator.remote_target import FailoverLimits
from orchestrator.replica_client import TargetClient
from orchestrator.request_metrics import RequestMetrics
from orchestrator.request_watch import RequestWatch, Tracer
from orchestrator.target_pool import NewTargetClient, TargetPool
from orchestrator.text import Tokenizer
from paceline.engine.checkpoint import resolve_checkpoint
from paceline.engine.torch_threads import use_threads
from paceline.errors import StartupFailed
from paceline.exposure import refuse_exposure, warn_of_trust
from paceline.process import Lifetime, Serve, run_service, until_idle
from paceline.rpc import Server
from paceline.settings import OrchestratorSettings
from paceline.telemetry import PoolMetrics, SpeculationMetrics, serve_metrics, show_certificates
from paceline.types import ModelInfo
from paceline.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server

if TYPE_CHECKING:
    from paceline.model_service import ModelService

logger = structlog.get_logger(__name__)

# Callers connect anew now and then: to a certificate that was renewed, with one that is still believed.
_CONNECTION_AGE_S = 3600.0


def prepare(settings: OrchestratorSettings) -> Serve:
    if settings.colocated_target is not None:
        from orchestrator.colocated import load_target  # noqa: PLC0415 - brings all that a target needs

        target = load_target(settings.colocated_target)
        return lambda lifetime: serve_colocated(lifetime, settings, target)
    # The orchestrator multiplies nothing: one thread keeps torch's pool from starting.
    use_threads(settings.threads or 1)
    return lambda lifetime: serve_orchestrator(lifetime, settings)


async def serve_orchestrator(
    lifetime: Lifetime,
    settings: OrchestratorSettings,
    *,
    target_addresses: Sequence[str] = (),
    new_target_client: NewTargetClient | None = None,
) -> None:
    """Connect, then serve until asked to stop; raises `StartupFailed` if no target can be reached.

    The targets are those of the settings, unless they are given with what makes their clients.
    """
    target_addresses = target_addresses or settings.target_addresses
    if not target_addresses:
        raise StartupFailed("There is no target; name one or several by --target.")
    registry = CollectorRegistry()
    serve_metrics(registry, host=settings.host, port=settings.metrics_port)
    targets = StaticDirectory(target_addresses, PoolBoard(most_room_first))
    drafters = StaticDirectory(settings.drafter_addresses, PoolBoard(nearest_first))
    async with open_generator(
        settings,
        targets=targets,
        drafters=drafters if settings.drafter_addresses else None,
        registry=registry,
        on_broken=lifetime.stop,
        new_target_client=new_target_client,
    ) as generator:
        await _serve(lifetime, settings, generator, registry)


async def serve_colocated(lifetime: Lifetime, settings: OrchestratorSettings, target: ModelService[Any, Any]) -> None:
    """Serve with a target in this process, which is ready, until asked to stop; raises if its model thread breaks."""
    from orchestrator.colocated import ADDRESS, target_here  # noqa: PLC0415 - likewise

    async with target_here(target, on_broken=lifetime.stop) as new_target_client:
        await serve_orchestrator(lifetime, settings, target_addresses=[ADDRESS], new_target_client=new_target_client)


def _ignore() -> None:
    return None


@asynccontextmanager
async def open_generator(
    settings: OrchestratorSettings,
    *,
    targets: Directory,
    drafters: Directory | None,
    registry: CollectorRegistry,
    on_broken: Callable[[], None] = _ignore,
    new_target_client: NewTargetClient | None = None,
) -> AsyncIterator[Generator]:
    """A generator over the pools of two directories, connected until the block ends.

    Targets are reached over gRPC, unless it is given what makes their clients.

    Raises `StartupFailed` if no target answers in time, `ModelMismatch` if every target, or every drafter, is refused.
    `on_broken` is called if the connections fail in a way that is no replica's fault; leaving the block then raises it.
    """
    metrics, pool_metrics = SpeculationMetrics(registry), PoolMetrics(registry)
    for tls in (settings.target_tls, settings.drafter_tls):
        if tls is not None:
            tls.read()  # what cannot be used is said now, and not by replicas that cannot be reached
    async with AsyncExitStack() as connections:
        target = TargetPool(
            targets,
            limits=FailoverLimits(timeout_s=settings.failover_timeout_s, max_migrations=settings.max_migrations),
            silence_limit_s=settings.silence_limit_s,
            metrics=pool_metrics,
            new_client=new_target_client or partial(TargetClient, tls=settings.target_tls),
        )
        await connections.enter_async_context(_kept_connected(target, on_broken))
        target_info = await _connected_target(target, settings)
        tokenizer = await _load_tokenizer(settings, target_info)
        drafter = None
        if drafters is not None:
            drafter = DrafterPool(
                drafters,
                target_info=target_info,
                silence_limit_s=settings.silence_limit_s,
                metrics=pool_metrics,
                tls=settings.drafter_tls,
            )
            await connections.enter_async_context(_kept_connected(drafter, on_broken))
            if not await drafter.wait_connected(settings.drafter_timeout_s):
                # A drafter is optional at any time: sessions go on without it, and use it when it comes.
                logger.warning("no drafter answers yet", address=settings.drafter)
        metrics.stale_items.set_function(lambda: target.stale_items + (drafter.stale_items if drafter else 0))
        watch = await connections.enter_async_context(_watching(settings, registry, target))
        yield Generator(settings, tokenizer, target=target, drafter=drafter, metrics=metrics, watch=watch)


@asynccontextmanager
async def _watching(
    settings: OrchestratorSettings, registry: CollectorRegistry, target: TargetPool
) -> AsyncIterator[RequestWatch]:
    """What tells operators of requests and of this event loop while the block runs."""
    show_certificates(registry, services=settings.tls_cert, public=settings.public_tls_cert)
    metrics = RequestMetrics(registry)
    lag = asyncio.ensure_future(measure_lag(metrics.loop_lag.observe))
    try:
        async with _open_tracer(settings) as tracer:
            yield RequestWatch(metrics, model=lambda: target.info.model_id if target.info else "", tracer=tracer)
    finally:
        lag.cancel()


@asynccontextmanager
async def _open_tracer(settings: OrchestratorSettings) -> AsyncIterator[Tracer | None]:
    if not settings.otlp_endpoint:
        yield None
        return
    from paceline.tracing import otlp_tracer  # noqa: PLC0415 - OpenTelemetry, which nobody else loads

    service, ratio = "paceline-orchestrator", settings.trace_sample_ratio
    tracer = otlp_tracer(settings.otlp_endpoint, service=service, sample_ratio=ratio)
    try:
        yield tracer
    finally:
        await asyncio.to_thread(tracer.close)


@asynccontextmanager
async def _kept_connected(pool: TargetPool | DrafterPool, on_broken: Callable[[], None]) -> AsyncIterator[None]:
    """Keep the connections up while the block runs; should their task break, say so, and raise its error at the end."""
    task = asyncio.ensure_future(pool.run())
    task.add_done_callback(lambda _: on_broken())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _serve(
    lifetime: Lifetime, settings: OrchestratorSettings, generator: Generator, registry: CollectorRegistry
) -> None:
    refuse_exposure(settings)
    warn_of_trust(settings)
    door = Door(generator, gate_of(settings))
    server = Server(
        host=settings.host,
        port=settings.port,
        tls=settings.public_tls,
        check=let_in_by(door),
        is_reflective=settings.reflection,
        connection_age_s=_CONNECTION_AGE_S,
    )
    add_GenerationServiceServicer_to_server(GenerationServicer(door), server.registrar)
    http = OpenAIApi(door, settings, registry=registry)
    async with _http_port(http, settings) as urls:
        await server.start(SERVICE_NAME)
        lifetime.ready("orchestrator", server.address, **urls)
        logger.info("ready", address=server.address, **urls)
        await lifetime.until_stopped()
        await server.begin_draining()
        http.is_draining = True
        await until_idle(lambda: generator.running + generator.waiting, limit_s=settings.drain_s)
        await server.stop(0.5)


@asynccontextmanager
async def _http_port(api: OpenAIApi, settings: OrchestratorSettings) -> AsyncIterator[dict[str, str]]:
    """Serve HTTP until the block ends, if there is a port for it; gives the URL by the name that the ready line has for it."""
    if settings.http_port is None:
        yield {}
        return
    server = HttpServer(api.application(), host=settings.host, port=settings.http_port, tls=settings.public_tls)
    await server.start()
    try:
        yield {"http": server.url}
    finally:
        await server.stop()


async def _connected_target(target: TargetPool, settings: OrchestratorSettings) -> ModelInfo:
    if not await target.wait_connected(settings.connect_timeout_s) or target.info is None:
        where = " or ".join(settings.target_addresses)
        sentence = (
            f"No target answers at {where}; start one with `python -m target_service` and name it by --target."
            if where
            else "No target answers; see to it that the pool of targets can start."
        )
        if settings.target_tls is not None:
            # A server that does not believe our certificate closes the connection without a word.
            last = "; ".join(target.last_failures) or "none was made"
            sentence += f" Over TLS it must believe --tls-cert; the last attempt: {last}."
        raise StartupFailed(sentence)
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
