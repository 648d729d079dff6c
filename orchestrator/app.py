"""The application on Ray Serve: three deployments, built from one validated configuration.

`build` is what `serve deploy` and `paceline serve` call. The Orchestrator deployment is the ingress: Serve's proxy hands
it gRPC calls, and everything behind them runs as it does without Ray.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from typing import Any

import ray
import structlog
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import RayError
from ray.serve import metrics
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from drafter_service.app import DrafterReplica
from orchestrator import api
from orchestrator.access import ingress_gate_of
from orchestrator.board import PoolBoard, most_room_first, nearest_first
from orchestrator.config import OrchestratorPool, Pool, parse_application
from orchestrator.door import Caller, Door, Gate
from orchestrator.openai_api import OpenAIApi
from orchestrator.ray_directory import RayDirectory
from orchestrator.scaling import PoolPolicy
from orchestrator.service import open_generator
from paceline.errors import PacelineError
from paceline.generation import DeploymentStatus
from paceline.logs import configure_logging
from paceline.metrics_bridge import bridged
from paceline.replica import ZONE_LABEL
from paceline.settings import OrchestratorSettings
from paceline.v1 import generation_service_pb2 as generation_pb
from target_service.app import TargetReplica

__all__ = ["PoolPolicy", "build"]

logger = structlog.get_logger(__name__)

_PLACES_BEYOND_WORK = 32  # for what is being refused, and for status and health calls, while all other places are taken
_SHUTDOWN_POLL_S = 0.5
_CONTROLLER_TIMEOUT_S = 2.0
_CANCEL_TIMEOUT_S = 2.0
# Under a control plane a lost target is started again: it is worth waiting for. Large models load for minutes.
_ORCHESTRATOR_DEFAULTS = {
    "threads": 1,
    "connect_timeout_s": 3600.0,
    "failover_timeout_s": 300.0,
    "drafter_timeout_s": 1.0,
}


@serve.ingress()
class OrchestratorReplica:
    """One orchestrator behind Serve's ingress: gRPC by the methods that bear its names, HTTP by an ASGI application."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        service: dict[str, Any],
        target: DeploymentHandle[Any],
        drafter: DeploymentHandle[Any] | None,
        *,
        has_drafters_always: bool,
    ) -> None:
        settings = OrchestratorPool(service=service).settings()
        configure_logging(settings.log_level, service="orchestrator")
        context = ray.get_runtime_context()
        here: dict[str, Any] = {
            "node_id": context.get_node_id(),
            "zone": str(context.get_node_labels().get(ZONE_LABEL, "")),
        }
        targets = RayDirectory(target, "target", PoolBoard(most_room_first, **here), is_always_there=True)
        drafters = None
        if drafter is not None:
            board = PoolBoard(nearest_first, **here)
            drafters = RayDirectory(drafter, "drafter", board, is_always_there=has_drafters_always)
        gate = _ingress_gate(settings)
        self._settings, self._registry = settings, CollectorRegistry()
        self._is_broken = False
        self._orchestrators: DeploymentHandle[Any] | None = None
        self._resources = AsyncExitStack()
        self._generator = await self._resources.enter_async_context(
            open_generator(
                settings, targets=targets, drafters=drafters, on_broken=self._on_broken, registry=self._registry
            )
        )
        self._door = Door(self._generator, gate)
        await self._resources.enter_async_context(bridged(self._registry, metrics, labels={"service": "orchestrator"}))

    def __serve_build_asgi_app__(self) -> Starlette:
        # Called by Serve behind the constructor. Its proxy says the id of a request itself.
        return OpenAIApi(self._door, self._settings, registry=self._registry, names_requests=False).application()

    async def Generate(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[generation_pb.GenerateResponse]:
        async with aclosing(api.ingress_generate(self._door, request, grpc_context)) as responses:
            async for response in responses:
                yield response

    async def Cancel(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.CancelRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb.CancelResponse:
        return await api.ingress_cancel(self._door, request, grpc_context, elsewhere=self._cancel_elsewhere)

    async def cancel_here(self, caller: str, request_id: str) -> bool:
        """What one orchestrator asks all of them."""
        return await self._door.cancel(request_id, caller=Caller(caller))

    async def _cancel_elsewhere(self, caller: Caller, request_id: str) -> bool:
        # Of that kind there are few, and none is part of an answer's way: what Serve's broadcasts are for.
        try:
            if self._orchestrators is None:
                self._orchestrators = await asyncio.to_thread(_orchestrators)
            asked = self._orchestrators.broadcast("cancel_here", caller.name, request_id)
            replies = await asked.results_async(timeout_s=_CANCEL_TIMEOUT_S, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException) as error:
            logger.warning("the other orchestrators were not asked to cancel", error=type(error).__name__)
            return False
        return any(reply is True for reply in replies)

    async def ListModels(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb.ListModelsResponse:
        return await api.ingress_list_models(self._door, grpc_context)

    async def GetServerInfo(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetServerInfoRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb.GetServerInfoResponse:
        return await api.ingress_get_server_info(self._door, grpc_context)

    async def GetPoolStatus(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetPoolStatusRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb.GetPoolStatusResponse:
        return await api.ingress_get_pool_status(self._door, grpc_context, annotate=_annotated)

    async def GetRoundTrace(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetRoundTraceRequest, grpc_context: RayServegRPCContext
    ) -> generation_pb.GetRoundTraceResponse:
        replica_id = serve.get_replica_context().replica_tag
        return await api.ingress_get_round_trace(
            self._door,
            request,
            grpc_context,
            annotate=lambda traced: replace(traced, orchestrator_id=replica_id),
        )

    async def Check(  # noqa: N802 - the name is the contract's
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> HealthCheckResponse:
        return await api.ingress_check(self._generator, request, grpc_context)

    async def Watch(self, request: HealthCheckRequest) -> AsyncIterator[HealthCheckResponse]:  # noqa: N802
        async with aclosing(api.ingress_watch(self._generator, request)) as responses:
            async for response in responses:
                yield response

    def check_health(self) -> None:
        if self._is_broken:
            raise PacelineError("The connections of this orchestrator broke; the log says where.")

    def _on_broken(self) -> None:
        self._is_broken = True

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._generator.scaling_figures()

    async def __del__(self) -> None:
        await self._resources.aclose()


def _ingress_gate(settings: OrchestratorSettings) -> Gate:
    # With HAProxy before Serve's own proxy every caller comes from this machine.
    gate = ingress_gate_of(settings, hides_peers=os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1")
    if not settings.is_protected and settings.trust_network:
        logger.warning("everybody who can reach Serve's ports is let in, as trust_network says")
    return gate


def _orchestrators() -> DeploymentHandle[Any]:
    """All replicas of this one's deployment; blocks while Serve is asked."""
    here = serve.get_replica_context()
    return serve.get_deployment_handle(here.deployment, app_name=here.app_name)


def _wanted_replicas() -> dict[str, int]:
    """By pool: the replicas that Serve runs or is about to; empty while its controller is away."""
    try:
        deployments = serve.status().applications[serve.get_replica_context().app_name].deployments
    except (RayError, RayServeException, KeyError):
        return {}
    return {
        name.lower(): sum(count for state, count in status.replica_states.items() if state != "STOPPING")
        for name, status in deployments.items()
    }


async def _annotated(status: DeploymentStatus) -> DeploymentStatus:
    """With what Serve knows of it."""
    wanted: Mapping[str, int] = {}
    # Who asks while Serve's controller is away wants to know all the rest.
    with suppress(TimeoutError):
        async with asyncio.timeout(_CONTROLLER_TIMEOUT_S):
            wanted = await asyncio.to_thread(_wanted_replicas)
    pools = tuple(replace(pool, desired_replicas=wanted.get(pool.name)) for pool in status.pools)
    orchestrator = replace(
        status.orchestrator,
        replica_id=serve.get_replica_context().replica_tag,
        node_id=ray.get_runtime_context().get_node_id(),
    )
    return replace(status, pools=pools, orchestrator=orchestrator)


def build(args: dict[str, Any]) -> serve.Application:
    """The application for a configuration's `args`; raises `ConfigInvalid`."""
    application = parse_application(args)
    target = _deployment(TargetReplica, "Target", application.target).bind(_service_settings(application.target))
    drafter = None
    if application.drafter is not None:
        pool = _deployment(DrafterReplica, "Drafter", application.drafter)
        drafter = pool.bind(_service_settings(application.drafter))
    orchestrator = _deployment(OrchestratorReplica, "Orchestrator", application.orchestrator)
    # Only what it needs: Serve starts replicas afresh whose arguments have changed.
    return orchestrator.bind(
        {**_ORCHESTRATOR_DEFAULTS, **application.orchestrator.service},
        target,
        drafter,
        has_drafters_always=application.drafter is not None and application.drafter.replicas.min > 0,
    )


def _deployment(replica_type: type[Any], name: str, pool: Pool) -> serve.Deployment:
    replicas = pool.replicas
    settings = pool.settings()
    max_sessions = settings.max_sessions
    options: dict[str, Any] = {
        "max_ongoing_requests": max_sessions,
        "max_queued_requests": max_sessions,
        "graceful_shutdown_timeout_s": pool.drain_s,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_POLL_S,
        "health_check_period_s": pool.health_check_period_s,
        "health_check_timeout_s": pool.health_check_timeout_s,
        "ray_actor_options": _actor_options(pool),
        # Also a pool of a fixed size: its figures reach the policy for the whole application only so.
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "initial_replicas": replicas.initial,
            "target_ongoing_requests": min(replicas.sessions_per_replica, max_sessions),
            "upscale_delay_s": replicas.upscale_delay_s,
            "downscale_delay_s": replicas.downscale_delay_s,
            "downscale_to_zero_delay_s": replicas.downscale_to_zero_delay_s,
            "look_back_period_s": replicas.look_back_period_s,
        },
    }
    if isinstance(pool, OrchestratorPool):
        # Serve's own line stays empty: whoever is not answered waits in the orchestrator's, which is short and fair, or is
        # refused by it in words.
        options["max_ongoing_requests"] += settings.longest_queue + _PLACES_BEYOND_WORK
        options["max_queued_requests"] = -1
    else:
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="orchestrator.ray_directory:PoolRouter",  # type: ignore[arg-type]
            request_router_kwargs={"pool": name.lower()},
        )
    if pool.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = pool.max_replicas_per_node
    return serve.deployment(name=name, **options)(replica_type)


def _service_settings(pool: Pool) -> dict[str, Any]:
    """A replica computes on as many threads as it was given cores, unless the configuration says otherwise."""
    return {"threads": max(1, int(pool.num_cpus)), **pool.service}


def _actor_options(pool: Pool) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus}
    if pool.accelerator_type is not None:
        options["accelerator_type"] = pool.accelerator_type
    if pool.labels:
        options["label_selector"] = pool.labels
    if isinstance(pool, OrchestratorPool) and pool.prefers:
        # Soft: first a node of that kind, then any that the hard labels allow.
        options["label_selector"] = {**pool.labels, **pool.prefers}
        options["fallback_strategy"] = [{"label_selector": pool.labels}]
    if pool.environment:
        options["runtime_env"] = {"env_vars": pool.environment}
    return options
