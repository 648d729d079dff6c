"""The Kubernetes manifests give no more rights than needed, and keep the service up through what happens to pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.builds import (
    BUILDS,
    container_of,
    each_build,
    pod_specs,
    ray_cluster,
    ray_service,
    serve_config,
)
from tests.deploy.files import Manifest
from tests.deploy.kustomize import identity


@each_build
def test_containers_have_no_more_rights_than_they_need(build: list[Manifest]) -> None:
    """What the restricted Pod Security Standard asks for, and a read-only root file system."""
    contexts = [container["securityContext"] for spec in pod_specs(build) for container in spec["containers"]]
    for context in [*contexts, ray_cluster(build).autoscaler_options.security_context]:
        assert context == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    for spec in pod_specs(build):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@each_build
def test_only_the_head_may_talk_to_kubernetes(build: list[Manifest]) -> None:
    """KubeRay gives the head the account that the autoscaler needs; nobody else has a token."""
    head = ray_cluster(build).templates["head"]["spec"]
    assert "serviceAccountName" not in head
    for spec in pod_specs(build):
        assert spec == head or spec["automountServiceAccountToken"] is False


@each_build
def test_memory_is_guaranteed(build: list[Manifest]) -> None:
    """Limits equal requests, so a node that runs short kills others first."""
    resources = [container["resources"] for spec in pod_specs(build) for container in spec["containers"]]
    for each in [*resources, ray_cluster(build).autoscaler_options.resources]:
        assert each["limits"]["memory"] == each["requests"]["memory"]


@each_build
def test_ray_writes_only_where_it_may(build: list[Manifest]) -> None:
    """/tmp, its logs there, the home folder (a token file) and, for workers, the models: all of them volumes."""
    for name, template in ray_cluster(build).templates.items():
        mounts = {mount["mountPath"]: mount["name"] for mount in container_of(template)["volumeMounts"]}
        assert mounts.keys() >= {"/tmp", "/tmp/ray", "/home/paceline"}
        assert ("/var/cache/paceline" in mounts) == (name != "head")
        assert set(mounts.values()) == {volume["name"] for volume in template["spec"]["volumes"]}
    shared = {mount["name"] for mount in ray_cluster(build).autoscaler_options.volume_mounts}
    assert shared <= {volume["name"] for volume in ray_cluster(build).templates["head"]["spec"]["volumes"]}


@each_build
def test_ray_stops_before_its_pod_does(build: list[Manifest]) -> None:
    """Each Ray pod ends by `ray stop`."""
    for template in ray_cluster(build).templates.values():
        assert "ray stop" in container_of(template)["lifecycle"]["preStop"]["exec"]["command"]


@each_build
def test_the_head_does_no_work(build: list[Manifest]) -> None:
    """No CPUs and no GPUs for Ray, and its proxy is no endpoint of the service."""
    parameters = ray_cluster(build).head_group_spec.ray_start_params
    assert (parameters["num-cpus"], parameters["num-gpus"]) == ("0", "0")
    assert ray_service(build).spec.exclude_head_pod_from_serve_svc


@each_build
def test_the_budget_can_be_kept_by_an_operators_pods(build: list[Manifest]) -> None:
    """A Ray cluster has no scale subresource, so its budget is a whole number that must stay, and fewer than there are."""
    (budget,) = [each for each in build if identity(each) == ("PodDisruptionBudget", "paceline-target")]
    assert budget["spec"].keys() == {"minAvailable", "selector"}
    assert isinstance(budget["spec"]["minAvailable"], int)
    group = ray_cluster(BUILDS["production"]).worker_group("target")
    assert budget["spec"]["minAvailable"] < group.min_replicas


@each_build
def test_ray_asks_for_tokens(build: list[Manifest]) -> None:
    """Ray's own ports take commands: only from holders of the cluster's token."""
    assert ray_cluster(build).auth_options.mode == "token"


def test_only_drafters_run_on_spot_nodes() -> None:
    """In production the two groups choose their nodes, and the drafters' alone tolerate spot."""
    groups = {
        group.group_name: group.template["spec"] for group in ray_cluster(BUILDS["production"]).worker_group_specs
    }
    assert groups["target"]["nodeSelector"] == {"paceline.pool": "target"}
    assert groups["drafter"]["nodeSelector"] == {"paceline.pool": "drafter", "paceline.capacity": "spot"}
    tolerated = {name: {each["key"] for each in spec["tolerations"]} for name, spec in groups.items()}
    assert tolerated == {"target": {"nvidia.com/gpu"}, "drafter": {"nvidia.com/gpu", "paceline.capacity"}}


def test_the_node_cache_swaps_the_models_and_nothing_else() -> None:
    """The component puts the models into a folder of the node, for which the namespace must allow it."""
    cluster = ray_cluster(BUILDS["production with node cache"])
    for group in cluster.worker_group_specs:
        sources = {volume["name"]: volume.keys() - {"name"} for volume in group.template["spec"]["volumes"]}
        assert sources.pop("models") == {"hostPath"}
        assert set().union(*sources.values()) == {"emptyDir", "projected"}


@pytest.mark.parametrize("name", ["production", "production with node cache"])
def test_workers_have_the_certificates_and_tokens_that_the_configuration_names(name: str) -> None:
    """Each file of it is mounted, read-only, wherever a replica of its pool may run; nothing else of those secrets is."""
    application = serve_config(BUILDS[name]).application
    files = {
        pool: {Path(value) for key, value in section.service.items() if key.startswith("tls_") or key == "tokens_file"}
        for pool, section in application.pools.items()
    }
    assert [len(files[pool]) for pool in ("Target", "Drafter", "Orchestrator")] == [3, 3, 4]
    for group in ray_cluster(BUILDS[name]).worker_group_specs:
        (mount,) = [each for each in container_of(group.template)["volumeMounts"] if each["name"] == "identity"]
        assert mount["readOnly"] is True
        (volume,) = [each for each in group.template["spec"]["volumes"] if each["name"] == "identity"]
        items = [item for source in volume["projected"]["sources"] for item in source["secret"]["items"]]
        mounted = {Path(mount["mountPath"]) / item["path"] for item in items}
        assert mounted == files[group.group_name.capitalize()] | files["Orchestrator"]


@each_build
def test_no_pool_is_open_to_everybody_by_omission(build: list[Manifest]) -> None:
    """Certificates between the services and tokens before them, or the word of whoever wrote the configuration."""
    for pool in serve_config(build).application.pools.values():
        settings = pool.settings()
        assert settings.is_protected or settings.trust_network
    in_production = build is not BUILDS["development"]
    assert not in_production or not any(
        pool.settings().trust_network for pool in serve_config(build).application.pools.values()
    )
