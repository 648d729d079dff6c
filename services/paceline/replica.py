"""One model service inside a process that belongs to somebody else, such as an actor of a cluster.

Starts and ends the service, says where and what it is, how it fares, and holds a lease for each session that a control
plane placed here. Knows nothing of any control plane, nor of what the service computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry

from paceline.errors import Draining, PacelineError, StartupFailed
from paceline.metrics_bridge import MetricsSystem, bridged
from paceline.process import Lifetime
from paceline.types import ModelInfo

logger = structlog.get_logger(__name__)

PROTOCOL = "paceline.v1"
# Of a node; set by KubeRay from the node's topology, or by `ray start --labels`.
ZONE_LABEL = "ray.io/availability-zone"
_CUT_OFF_LIMIT_S = 2.0


class Load(Protocol):
    """How busy a service is (the fields of `LoadReport`)."""

    @property
    def sessions(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def kv_used_tokens(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def step_busy_share(self) -> float: ...


class Service(Protocol):
    """A prepared service (`model_service.ModelService`)."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def registry(self) -> CollectorRegistry: ...

    @property
    def drain_s(self) -> float: ...

    @property
    def seconds_in_step(self) -> float: ...

    def __call__(self, lifetime: Lifetime, /) -> Coroutine[Any, Any, None]:
        """Serves until asked to stop."""

    def load(self) -> Load: ...

    def holds(self, session_id: str) -> bool:
        """Whether the session is open here."""


@dataclass(eq=False, slots=True)
class _Lease:
    """A session's place."""

    session_id: str
    used_s: float  # when its session was last seen here, on the loop's clock; before that, when it was granted
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class ModelReplica:
    """A running service.

    Invariant: every lease ends when the service does, when it is asked to stop, and some time after its session has
    gone. Its holder gives it back before that, unless the holder has died: nobody cancels a dead caller's calls.
    """

    def __init__(
        self,
        service: Service,
        *,
        pool: str,
        metrics: MetricsSystem | None,
        advertised_host: str | None,
        zone: str,
        step_limit_s: float,
        stop_margin_s: float,
        unused_lease_s: float,
    ) -> None:
        """Begins to run the service; `start` also waits until it serves."""
        self._leases: set[_Lease] = set()
        self._unused_lease_s = unused_lease_s
        self._service, self._pool, self._zone, self._advertised_host = service, pool, zone, advertised_host
        self._step_limit_s, self._stop_limit_s = step_limit_s, service.drain_s + stop_margin_s
        self._is_leaving = False
        self._lifetime = Lifetime()
        self._task = asyncio.ensure_future(self._serve(metrics))
        self._task.add_done_callback(self._on_end)

    @classmethod
    async def start(
        cls,
        service: Service,
        *,
        pool: str,
        metrics: MetricsSystem | None = None,
        advertised_host: str | None = None,
        zone: str = "",
        start_limit_s: float = 60.0,
        step_limit_s: float = 300.0,
        stop_margin_s: float = 5.0,
        unused_lease_s: float = 15.0,
    ) -> ModelReplica:
        """Run a prepared service on this event loop and wait until it serves.

        While it runs its metrics are copied to `metrics`, if given, with the pool's name as the label `service`.
        `advertised_host` is the host that others reach it by, if that is not the one it listens on (0.0.0.0); `zone` is
        where it runs, among places that are near one another. A model step longer than `step_limit_s` counts as a hang;
        `stop` takes the service's own time to drain and at most `stop_margin_s` more; a lease ends `unused_lease_s`
        after its session was seen last. Raises `StartupFailed` if the service ends instead, or is not ready in time.
        """
        replica = cls(
            service,
            pool=pool,
            metrics=metrics,
            advertised_host=advertised_host,
            zone=zone,
            step_limit_s=step_limit_s,
            stop_margin_s=stop_margin_s,
            unused_lease_s=unused_lease_s,
        )
        try:
            await replica._until_ready(start_limit_s)
        except BaseException:
            replica._task.cancel()
            raise
        return replica

    @property
    def address(self) -> str:
        """HOST:PORT by which others reach the service."""
        address = self._lifetime.address.result()
        if self._advertised_host is None:
            return address
        host = f"[{self._advertised_host}]" if ":" in self._advertised_host else self._advertised_host
        return f"{host}:{address.rpartition(':')[2]}"

    def metadata(self) -> dict[str, str]:
        """What a control plane publishes of this replica; never changes while it runs."""
        info = self._service.info
        return {
            "grpc_address": self.address,
            "pool": self._pool,
            "zone": self._zone,
            "model_id": info.model_id,
            "tokenizer_sha256": info.tokenizer_sha256,
            "incarnation": info.incarnation,
            "method": info.method,
            "protocol": PROTOCOL,
        }

    @property
    def leases(self) -> int:
        """Open now."""
        return len(self._leases)

    async def lease(self, session_id: str) -> AsyncGenerator[dict[str, str], None]:
        """One item at once, then nothing until it is closed, its session has been gone for a while, or the replica leaves.

        Raises `Draining` instead of the item if the replica is leaving already.
        """
        if self._is_leaving:
            raise Draining("This replica is about to stop and takes no new sessions; lease another one.")
        lease = _Lease(session_id, asyncio.get_running_loop().time())
        self._leases.add(lease)
        try:
            yield {"session_id": session_id, "incarnation": self._service.info.incarnation}
            await lease.has_ended.wait()
        finally:
            self._leases.discard(lease)

    def check_health(self) -> None:
        """Raises `PacelineError` if the service has ended, or the model has hung in one step for too long."""
        if self._task.done():
            raise PacelineError(f"The service of this {self._pool} replica has ended: {_ending(self._task)}")
        seconds_in_step = self._service.seconds_in_step
        if seconds_in_step > self._step_limit_s:
            raise PacelineError(
                f"The model has been in one step for {seconds_in_step:.0f} s, longer than {self._step_limit_s:g} s; "
                "start the replica again."
            )

    def stats(self) -> dict[str, float]:
        """Figures for an autoscaler; any moment's may be asked for."""
        load = self._service.load()
        return {
            "kv_used_fraction": load.kv_used_tokens / max(1, load.kv_capacity_tokens),
            "queued": float(load.queued),
            "sessions": float(load.sessions),
            "leases": float(self.leases),
            "step_busy_share": load.step_busy_share,
        }

    async def stop(self) -> None:
        """End all leases, let the service drain, and wait for its end; cut it off when the time is up.

        May be called again, also at the same time. Does not raise if the service failed: the log says so.
        """
        self._leave()
        self._lifetime.stop()
        await asyncio.wait({self._task}, timeout=self._stop_limit_s)
        if not self._task.done():
            logger.error("the service did not end in time and is cut off", pool=self._pool)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CUT_OFF_LIMIT_S)

    async def _serve(self, metrics: MetricsSystem | None) -> None:
        service = self._service
        exported = bridged(service.registry, metrics, labels={"service": self._pool}) if metrics else nullcontext()
        leases = asyncio.ensure_future(self._end_unused_leases())
        try:
            async with exported:
                await service(self._lifetime)
        finally:
            leases.cancel()

    async def _end_unused_leases(self) -> None:
        while True:
            await asyncio.sleep(self._unused_lease_s / 8)
            now_s = asyncio.get_running_loop().time()
            for lease in self._leases:
                if self._service.holds(lease.session_id):
                    lease.used_s = now_s
                elif now_s - lease.used_s > self._unused_lease_s:
                    lease.has_ended.set()

    def _leave(self) -> None:
        self._is_leaving = True
        for lease in self._leases:
            lease.has_ended.set()

    async def _until_ready(self, limit_s: float) -> None:
        waited_for: set[asyncio.Future[Any]] = {self._task, self._lifetime.address}
        await asyncio.wait(waited_for, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            raise StartupFailed(_ending(self._task))
        if not self._lifetime.address.done():
            raise StartupFailed(
                f"The {self._pool} service was not ready within {limit_s:g} s; its log says how far it got."
            )

    def _on_end(self, task: asyncio.Future[None]) -> None:
        self._leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the service failed", pool=self._pool, exc_info=error)


class ReplicaDeployment:
    """What a control plane calls on a model service, by the names that Ray Serve gives these calls."""

    _replica: ModelReplica

    def record_replica_metadata(self) -> dict[str, str]:
        return self._replica.metadata()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.stats()

    def check_health(self) -> None:
        self._replica.check_health()

    async def lease(self, session_id: str) -> AsyncGenerator[dict[str, str], None]:
        async with aclosing(self._replica.lease(session_id)) as granted:
            async for item in granted:
                yield item

    async def __del__(self) -> None:
        # Nothing is there to stop if the start failed.
        if hasattr(self, "_replica"):
            await self._replica.stop()


def _ending(task: asyncio.Future[None]) -> str:
    """Why a service ended, in a sentence."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, PacelineError):
        return error.message
    return "Something went wrong inside it; its log says what." if error else "It was told to stop."
