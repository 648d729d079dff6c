"""The Kubernetes manifests as they would be sent, and ways into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from orchestrator.config import ServeFile, parse_serve_file
from tests.deploy.files import DEPLOY, Manifest
from tests.deploy.kustomize import render
from tests.deploy.rayservice import RayCluster, RayService

KUBERAY = DEPLOY / "kuberay"
NODE_CACHE = KUBERAY / "components" / "node-cache"
OVERLAYS = KUBERAY / "overlays"
BUILDS: dict[str, list[Manifest]] = {
    "production": render(OVERLAYS / "production"),
    "production with node cache": render(OVERLAYS / "production", components=(NODE_CACHE,)),
    "development": render(OVERLAYS / "development"),
}
# Kinds that operators define; the schemas of the Kubernetes release do not know them.
FOREIGN_KINDS = {"RayService", "PodMonitor"}
WORKLOADS = {"Deployment", "StatefulSet"}

each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())


def ray_service(build: list[Manifest]) -> RayService:
    return RayService.model_validate(next(each for each in build if each["kind"] == "RayService"))


def ray_cluster(build: list[Manifest]) -> RayCluster:
    return ray_service(build).spec.ray_cluster_config


def serve_config(build: list[Manifest]) -> ServeFile:
    return parse_serve_file(yaml.safe_load(ray_service(build).spec.serve_config_v2))


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    """The only container of a pod template."""
    (container,) = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def pod_specs(build: list[Manifest]) -> Iterator[dict[str, Any]]:
    """Of every pod that the objects lead to."""
    yield from (template["spec"] for template in ray_cluster(build).templates.values())
    yield from (each["spec"]["template"]["spec"] for each in build if each["kind"] in WORKLOADS)


def pod_labels(build: list[Manifest]) -> Iterator[dict[str, str]]:
    """Labels of every such pod, with those that KubeRay adds."""
    cluster, by_ray = ray_cluster(build), {"ray.io/is-ray-node": "yes"}
    yield from (each["spec"]["template"]["metadata"]["labels"] for each in build if each["kind"] in WORKLOADS)
    yield {**cluster.head_group_spec.template["metadata"]["labels"], **by_ray}
    for group in cluster.worker_group_specs:
        yield {**group.template["metadata"]["labels"], **group.labels, **by_ray}
