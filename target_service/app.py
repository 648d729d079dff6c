"""One target on Ray Serve: the service of `target_service.service` in an actor, found and leased through Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray

from paceline.replica import ModelReplica
from paceline.settings import TargetSettings
from paceline.telemetry import configure_logging
from target_service.service import prepare


class TargetReplica:
    """The deployment class; Serve calls its methods by their names."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        checked = TargetSettings(**settings, host=ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        configure_logging(checked.log_level, service="target")
        self._replica = await ModelReplica.start(await asyncio.to_thread(prepare, checked), pool="target")

    def record_replica_metadata(self) -> dict[str, str]:
        return self._replica.metadata()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.stats()

    def check_health(self) -> None:
        self._replica.check_health()

    async def lease(self, session_id: str) -> AsyncIterator[dict[str, str]]:
        """One item, then nothing for as long as the session is here."""
        async for granted in self._replica.lease(session_id):
            yield granted

    async def __del__(self) -> None:
        await self._replica.stop()
