"""The Kubernetes manifests are of the form that their kinds ask for, and none lies there unread."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError
from ray.scripts.scripts import start as ray_start

from tests.deploy.builds import (
    BUILDS,
    FOREIGN_KINDS,
    KUBERAY,
    NODE_CACHE,
    OVERLAYS,
    container_of,
    each_build,
    ray_cluster,
    ray_service,
)
from tests.deploy.files import DEPLOY, Manifest
from tests.deploy.kubernetes import validate, validate_container, validate_pod_template
from tests.deploy.rayservice import RayService


@each_build
def test_objects_are_valid_for_kubernetes(build: list[Manifest]) -> None:
    """Each object of a kind that Kubernetes knows fits its schema, without unknown fields."""
    for manifest in build:
        if manifest["kind"] not in FOREIGN_KINDS:
            validate(manifest)


@each_build
def test_what_kubernetes_knows_within_the_ray_service_is_valid(build: list[Manifest]) -> None:
    """Pod templates, the service and the autoscaler's container fit Kubernetes' schemas."""
    service = ray_service(build)
    for template in ray_cluster(build).templates.values():
        validate_pod_template(template)
    validate({"apiVersion": "v1", "kind": "Service", **service.spec.serve_service})
    options = ray_cluster(build).autoscaler_options
    validate_container(
        {
            "resources": options.resources,
            "securityContext": options.security_context,
            "volumeMounts": options.volume_mounts,
        }
    )


def test_an_unknown_field_is_refused_at_every_level() -> None:
    """The checks above can fail: in the RayService, in a worker group, in a pod template."""
    manifest = next(each for each in BUILDS["production"] if each["kind"] == "RayService")
    for path in (["spec"], ["spec", "rayClusterConfig"], ["spec", "rayClusterConfig", "workerGroupSpecs", 0]):
        changed = copy.deepcopy(manifest)
        place: Any = changed
        for part in path:
            place = place[part]
        place["maxReplica"] = 3
        with pytest.raises(ValidationError, match="maxReplica"):
            RayService.model_validate(changed)
    template = copy.deepcopy(ray_cluster(BUILDS["production"]).worker_group("target").template)
    template["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        validate_pod_template(template)


@each_build
def test_pod_monitor_names_a_port_of_every_ray_pod(build: list[Manifest]) -> None:
    """Prometheus finds the metrics port by its name."""
    for monitor in [each for each in build if each["kind"] == "PodMonitor"]:
        assert monitor["spec"].keys() == {"selector", "podTargetLabels", "podMetricsEndpoints"}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint.keys() == {"port", "interval", "scrapeTimeout", "metricRelabelings"}
            for template in ray_cluster(build).templates.values():
                assert endpoint["port"] in {port["name"] for port in container_of(template)["ports"]}


@each_build
def test_ray_start_knows_every_parameter(build: list[Manifest]) -> None:
    """KubeRay hands them to `ray start` unread."""
    known = {option.lstrip("-") for parameter in ray_start.params for option in parameter.opts}
    cluster = ray_cluster(build)
    given = [cluster.head_group_spec.ray_start_params, *(each.ray_start_params for each in cluster.worker_group_specs)]
    for parameters in given:
        assert parameters.keys() <= known


def test_every_folder_is_built() -> None:
    """Each kustomization is part of a build."""
    read = {KUBERAY / "base", NODE_CACHE, DEPLOY / "envoy", OVERLAYS / "production", OVERLAYS / "development"}
    assert {path.parent for path in DEPLOY.rglob("kustomization.yaml")} == read


def test_every_manifest_is_part_of_something() -> None:
    """Each YAML file beside a kustomization is named by it."""
    for kustomization in DEPLOY.rglob("kustomization.yaml"):
        named = kustomization.read_text(encoding="utf-8")
        for path in kustomization.parent.glob("*.yaml"):
            assert path == kustomization or path.name in named, path
