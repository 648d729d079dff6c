"""The shipped Serve configurations are valid, for us and for Ray Serve, and fit the machines they are meant for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from orchestrator.config import POLICY_FUNCTION, ConfigInvalid, ServeFile, load_serve_file, parse_serve_file
from paceline.cli.laptop import laptop_configuration
from tests.deploy.files import DEPLOY, SERVE_FILES, read_yaml

LOOPBACK = "127.0.0.1"


def serve_file(name: str) -> ServeFile:
    return load_serve_file(DEPLOY / "serve" / f"{name}.yaml")


def refuse_unknown_keys(content: dict[str, Any], schema: ServeDeploySchema) -> None:
    """Ray's own models pass over what they do not know, which hides misspellings."""
    assert content.keys() <= ServeDeploySchema.model_fields.keys()
    assert content["http_options"].keys() <= type(schema.http_options).model_fields.keys()
    assert content["grpc_options"].keys() <= type(schema.grpc_options).model_fields.keys()
    for application in content["applications"]:
        assert application.keys() <= type(schema.applications[0]).model_fields.keys()


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_file_is_valid_here(path: Path) -> None:
    """Our own model takes every key; it refuses unknown ones."""
    assert load_serve_file(path).applications[0].name == "paceline"


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_file_is_valid_for_ray_serve(path: Path) -> None:
    """`serve deploy` takes the same file, and knows every key of it."""
    content = read_yaml(path)
    refuse_unknown_keys(content, ServeDeploySchema.model_validate(content))


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_a_misspelt_key_is_refused(path: Path) -> None:
    """The check of these files can fail: one letter more in the arguments, and the nearest valid name is said."""
    content = read_yaml(path)
    arguments = content["applications"][0]["args"]
    arguments["target"]["drain_ss"] = arguments["target"].pop("drain_s")
    with pytest.raises(ConfigInvalid, match=r"drain_ss.*drain_s"):
        parse_serve_file(content)


@pytest.mark.parametrize("path", SERVE_FILES, ids=lambda path: path.stem)
def test_a_replica_takes_more_sessions_than_it_is_scaled_for(path: Path) -> None:
    """Otherwise a pool is full before its autoscaler sees a reason to add a replica."""
    for name, pool in load_serve_file(path).application.pools.items():
        assert pool.replicas.sessions_per_replica <= pool.settings().max_sessions, name


def test_the_laptop_needs_no_gpu_no_download_and_one_node() -> None:
    """The default model, prompt lookup, no GPUs, nothing that only a labelled node could satisfy, HTTP on loopback."""
    file = serve_file("laptop")
    pools = file.application.pools
    assert file.proxy_location == "HeadOnly"
    assert file.http_options.host == LOOPBACK
    assert all(pool.num_gpus == 0 and not pool.labels for pool in pools.values())
    assert pools["Target"].settings().model == "smollm2"
    assert pools["Drafter"].settings().method == "ngram"


def test_the_laptop_is_what_serve_runs_without_a_file() -> None:
    """`paceline serve` cannot read this file once installed, so it has the same configuration built in."""
    assert parse_serve_file(laptop_configuration()) == serve_file("laptop")


def test_the_simulated_cluster_has_two_pools_that_can_be_told_apart() -> None:
    """Each pool asks for its own label and for GPUs that are not there, and for next to nothing of the real machine."""
    file = serve_file("sim-cluster")
    pools = file.application.pools
    assert pools["Target"].labels == {"paceline.pool": "target"}
    assert pools["Drafter"].labels == {"paceline.pool": "drafter"}
    assert pools["Target"].num_gpus == 1
    assert pools["Drafter"].num_gpus == 0.5
    assert sum(pool.num_cpus * pool.replicas.max for pool in pools.values()) <= 2
    assert pools["Target"].settings().emulated_step_ms > 0
    # One address for all nodes: a second proxy would find its port taken.
    assert file.proxy_location == "HeadOnly"


def test_production_survives_the_loss_of_any_one_node() -> None:
    """Two targets (a GPU node holds one) and two orchestrators on different nodes; drafters may come and go."""
    pools = serve_file("production").application.pools
    assert pools["Target"].replicas.min >= 2
    assert pools["Target"].num_gpus == 1
    assert pools["Orchestrator"].replicas.min >= 2
    assert pools["Orchestrator"].max_replicas_per_node == 1
    assert pools["Drafter"].replicas.min == 0


def test_production_may_scale_its_pools_together() -> None:
    """The line that is commented out in the file is valid as well."""
    path = DEPLOY / "serve" / "production.yaml"
    commented = f'  # autoscaling_policy: {{policy_function: "{POLICY_FUNCTION}"}}\n'
    text = path.read_text(encoding="utf-8")
    assert commented in text
    content = read_yaml(path)
    content["applications"][0]["autoscaling_policy"] = {"policy_function": POLICY_FUNCTION}
    parse_serve_file(content)
    ServeDeploySchema.model_validate(content)
