"""The Kubernetes manifests hang together, and ask for what the Serve configuration needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.builds import (
    BUILDS,
    KUBERAY,
    WORKLOADS,
    container_of,
    each_build,
    pod_labels,
    ray_cluster,
    ray_service,
    serve_config,
)
from tests.deploy.files import DEPLOY, Manifest, pinned_version, project_version, read_yaml
from tests.deploy.kustomize import identity

# Pods of others, which our policies let in or reach.
OTHERS = (
    {"app.kubernetes.io/name": "kuberay-operator"},
    {"app.kubernetes.io/name": "prometheus"},
    {"k8s-app": "kube-dns"},
)
# What an operator must bring: deploy/README.md says how.
SECRETS_BROUGHT = {"paceline-redis", "paceline-tls", "paceline-clients"}


def selectors_in(value: Any) -> Iterator[dict[str, str]]:
    """Every label selector of pods, at any depth."""
    if isinstance(value, list):
        for inner in value:
            yield from selectors_in(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("selector", "podSelector"):
                yield inner.get("matchLabels", inner)
            else:
                yield from selectors_in(inner)


def test_the_ray_service_serves_production_yaml() -> None:
    """kustomize cannot read a file into a field, so the text is there twice; it is the same text."""
    kept = (DEPLOY / "serve" / "production.yaml").read_text(encoding="utf-8")
    base = read_yaml(KUBERAY / "base" / "rayservice.yaml")
    assert base["spec"]["serveConfigV2"] == kept, (
        "deploy/serve/production.yaml and serveConfigV2 in deploy/kuberay/base/rayservice.yaml differ: copy the file "
        "there, indented by four spaces"
    )


@each_build
def test_each_pool_has_the_worker_group_it_asks_for(build: list[Manifest]) -> None:
    """The labels of a pool are those of exactly one group, and the group's pods have GPUs if the pool wants any."""
    cluster, pools = ray_cluster(build), serve_config(build).application.pools
    for name in ("Target", "Drafter"):
        (group,) = [each for each in cluster.worker_group_specs if pools[name].labels.items() <= each.labels.items()]
        assert group.group_name == name.lower()
        gpus = float(container_of(group.template)["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert (gpus > 0) == (pools[name].num_gpus > 0)
        assert float(group.resources.get("GPU", 0)) == gpus, "what an empty group declares is what its pods have"
    preferred = serve_config(build).application.orchestrator.prefers
    assert preferred.items() <= cluster.worker_group("target").labels.items()


@each_build
def test_the_pools_fit_into_their_groups(build: list[Manifest]) -> None:
    """As many replicas as a pod has GPUs for find CPUs there too, an orchestrator beside a target; the largest pool fits
    into the largest group."""
    cluster, pools = ray_cluster(build), serve_config(build).application.pools
    for name, beside in (("Target", pools["Orchestrator"].num_cpus), ("Drafter", 0.0)):
        pool, group = pools[name], cluster.worker_group(name.lower())
        limits = container_of(group.template)["resources"]["limits"]
        gpus, cpus = float(limits.get("nvidia.com/gpu", 0)), float(limits["cpu"])
        each_pod = math.floor(gpus / pool.num_gpus) if pool.num_gpus else math.floor((cpus - beside) / pool.num_cpus)
        assert each_pod >= 1
        assert each_pod * pool.num_cpus + beside <= cpus, name
        assert each_pod * group.max_replicas >= pool.replicas.max, name
        assert each_pod * group.min_replicas >= pool.replicas.min or group.min_replicas < group.max_replicas, name


@each_build
def test_pods_outlive_the_drain_of_their_replicas(build: list[Manifest]) -> None:
    """Kubernetes kills a pod, and KubeRay a replaced cluster, only after Serve would have killed the replicas there."""
    cluster, pools = ray_cluster(build), serve_config(build).application.pools
    grace_s = {name: template["spec"]["terminationGracePeriodSeconds"] for name, template in cluster.templates.items()}
    assert grace_s["target"] > max(pools["Target"].drain_s, pools["Orchestrator"].drain_s)
    assert grace_s["drafter"] > pools["Drafter"].drain_s
    assert ray_service(build).spec.ray_cluster_deletion_delay_seconds > max(pool.drain_s for pool in pools.values())


@each_build
def test_serve_ports_are_the_same_everywhere(build: list[Manifest]) -> None:
    """In the Serve configuration, on the pods, in KubeRay's service, and in the policy that lets Envoy in."""
    file, service = serve_config(build), ray_service(build)
    expected = {"serve": file.http_options.port, "serve-grpc": file.grpc_options.port}
    for template in ray_cluster(build).templates.values():
        ports = {port["name"]: port["containerPort"] for port in container_of(template)["ports"]}
        assert expected.items() <= ports.items()
    ports = {port["name"]: port for port in service.spec.serve_service["spec"]["ports"]}
    assert {name: port["port"] for name, port in ports.items()} == expected
    assert ports["serve-grpc"]["appProtocol"] == "kubernetes.io/h2c"
    assert file.http_options.host == "0.0.0.0", "a pod that serves on loopback is never ready"
    (policy,) = [each for each in build if identity(each) == ("NetworkPolicy", "paceline")]
    (from_envoy,) = [rule for rule in policy["spec"]["ingress"] if "paceline-envoy" in str(rule["from"])]
    assert [port["port"] for port in from_envoy["ports"]] == [file.grpc_options.port]


@each_build
def test_selectors_meet_pods_that_exist(build: list[Manifest]) -> None:
    """Each selector in a policy, budget, monitor or service finds one of our pods, or names somebody else's."""
    # A policy may name what only another build has: Envoy, or a Redis of its own.
    pods = [labels for any_build in BUILDS.values() for labels in pod_labels(any_build)]
    for manifest in build:
        if manifest["kind"] not in WORKLOADS | {"RayService"}:
            for selector in selectors_in(manifest.get("spec", {})):
                met = any(selector.items() <= labels.items() for labels in pods)
                assert met or selector in OTHERS, (identity(manifest), selector)


@each_build
def test_named_objects_exist(build: list[Manifest]) -> None:
    """Service accounts, configuration maps and secrets are part of the build, or brought as the runbook says."""
    names = {identity(each) for each in build}
    text = yaml.safe_dump_all(build)
    for kind, pattern in (
        ("ServiceAccount", r"serviceAccountName: (\S+)"),
        ("ConfigMap", r"configMap:\s+name: (\S+)"),
        ("Secret", r"secretName: (\S+)"),
        ("Secret", r"secretKeyRef:\s+key: \S+\s+name: (\S+)"),
    ):
        for name in re.findall(pattern, text):
            assert (kind, name) in names or (kind == "Secret" and name in SECRETS_BROUGHT), (kind, name)


@each_build
def test_every_object_lives_in_the_namespace(build: list[Manifest]) -> None:
    """The namespace is created with the rest."""
    assert ("Namespace", "paceline") in {identity(each) for each in build}
    assert all(each["metadata"].get("namespace") == "paceline" for each in build if each["kind"] != "Namespace")


@each_build
def test_one_image_with_the_pinned_ray(build: list[Manifest]) -> None:
    """Head and workers run the same image, and KubeRay is told the Ray version that constraints.txt installs there."""
    cluster = ray_cluster(build)
    assert cluster.ray_version == pinned_version("ray")
    (image,) = {container_of(template)["image"] for template in cluster.templates.values()}
    assert image.endswith(f"paceline:{project_version()}")
