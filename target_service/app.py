"""One target on Ray Serve: the service of `target_service.service` in an actor, found and leased through Serve."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.serve import metrics

from paceline.logs import configure_logging
from paceline.replica import ZONE_LABEL, ModelReplica, ReplicaDeployment
from paceline.settings import TargetSettings
from target_service.service import prepare


class TargetReplica(ReplicaDeployment):
    """The deployment class."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        checked = TargetSettings(**{"host": host, **settings})
        configure_logging(checked.log_level, service="target")
        service = await asyncio.to_thread(prepare, checked)
        zone = str(ray.get_runtime_context().get_node_labels().get(ZONE_LABEL, ""))
        self._replica = await ModelReplica.start(service, pool="target", zone=zone, metrics=metrics)
