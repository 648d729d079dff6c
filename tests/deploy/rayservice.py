"""The fields of a RayService (ray.io/v1, KubeRay 1.7) that our manifests use, by name and type; others are refused.

Kubernetes' own types within it (pod templates, services) are left open here: they have schemas of their own. The names
were compared by hand with KubeRay's Go types, because its resource definition is not at hand offline.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

Open = dict[str, Any]  # one of Kubernetes' own types


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel)


class AuthOptions(_Fields):
    mode: Literal["disabled", "token"]


class RedisCredential(_Fields):
    value_from: Open


class GcsFaultToleranceOptions(_Fields):
    redis_address: str
    redis_password: RedisCredential


class AutoscalerOptions(_Fields):
    version: Literal["v1", "v2"]
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"]
    idle_timeout_seconds: int
    resources: Open
    security_context: Open
    volume_mounts: list[Open]


class HeadGroup(_Fields):
    ray_start_params: dict[str, str]
    template: Open


class WorkerGroup(_Fields):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    labels: dict[str, str]
    resources: dict[str, str] = {}
    ray_start_params: dict[str, str]
    template: Open


class RayCluster(_Fields):
    ray_version: str
    auth_options: AuthOptions
    gcs_fault_tolerance_options: GcsFaultToleranceOptions
    enable_in_tree_autoscaling: bool
    autoscaler_options: AutoscalerOptions
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]

    def worker_group(self, name: str) -> WorkerGroup:
        return next(group for group in self.worker_group_specs if group.group_name == name)

    @property
    def templates(self) -> dict[str, Open]:
        """Pod templates by group; the head's is called head."""
        workers = {group.group_name: group.template for group in self.worker_group_specs}
        return {"head": self.head_group_spec.template, **workers}


class UpgradeStrategy(_Fields):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]


class RayServiceSpec(_Fields):
    upgrade_strategy: UpgradeStrategy
    ray_cluster_deletion_delay_seconds: int
    exclude_head_pod_from_serve_svc: bool
    serve_config_v2: str
    serve_service: Open
    ray_cluster_config: RayCluster


class RayService(_Fields):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Open
    spec: RayServiceSpec
