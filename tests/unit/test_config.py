"""The configuration of a Ray application: what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import (
    DRAFTER_LABELS,
    TARGET_LABELS,
    ConfigInvalid,
    load_serve_file,
    on_loopback,
    parse_application,
    parse_serve_file,
)
from paceline.settings import OrchestratorSettings, TargetSettings


def serve_file(**application: Any) -> dict[str, Any]:
    return {"applications": [{"import_path": "orchestrator.app:build", "args": {"target": {}}, **application}]}


def test_a_pool_is_placed_by_its_label_unless_the_file_says_otherwise() -> None:
    """Targets and drafters go to their own nodes; orchestrators only prefer the targets'."""
    application = parse_application({"target": {}, "drafter": {}})
    assert application.target.labels == TARGET_LABELS
    assert application.drafter is not None
    assert application.drafter.labels == DRAFTER_LABELS
    assert application.orchestrator.labels == {}
    assert application.orchestrator.prefers == TARGET_LABELS


def test_a_pool_of_drafters_may_be_empty_and_small_ones_aim_at_what_they_take() -> None:
    """What is not said fits what is."""
    application = parse_application(
        {"target": {"service": {"max_sessions": 2}}, "drafter": {"replicas": {"min": 0, "max": 1}}}
    )
    assert application.drafter is not None
    assert application.drafter.replicas.min == 0


def test_the_settings_of_a_service_are_its_own() -> None:
    """`service` takes what the service takes from its command line, and the replica adds what it decides."""
    application = parse_application({"target": {"service": {"model": "m", "max_sessions": 3}}})
    settings = application.target.settings(host="10.0.0.1")
    assert isinstance(settings, TargetSettings)
    assert (settings.model, settings.max_sessions, settings.host) == ("m", 3, "10.0.0.1")
    assert isinstance(application.orchestrator.settings(), OrchestratorSettings)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"target": {}, "draftr": {}}, "draftr is not known here; did you mean drafter?"),
        ({"target": {"replcas": {}}}, "target.replcas is not known here; did you mean replicas?"),
        ({"target": {"replicas": {"maks": 2}}}, "target.replicas.maks is not known here; did you mean max?"),
        ({"target": {"service": {"modl": "m"}}}, "target.service: modl is not known here; did you mean model?"),
        ({"target": {"service": {"max_sessions": 0}}}, "target.service: max_sessions:"),
        ({"target": {"service": {"port": 1}}}, "port is decided by the placement"),
        ({"target": {}, "orchestrator": {"service": {"target": "x:1"}}}, "target is decided by the placement"),
        ({"target": {"replicas": {"min": 3, "max": 2}}}, "min 3 is more than max 2"),
        ({"target": {"replicas": {"min": 1, "max": 2, "initial": 3}}}, "initial 3 must lie between"),
        ({"target": {"num_gpus": -1}}, "target.num_gpus:"),
        ({"drafter": {}}, "target: Field required"),
        ({"target": {"replicas": {"min": 0}}}, "without one of these nothing answers"),
        ({"target": {}, "orchestrator": {"replicas": {"min": 0}}}, "without one of these nothing answers"),
        ({"target": {"replicas": {"min": "1"}}}, "target.replicas.min:"),
        ({"target": {"replicas": {"min": True}}}, "target.replicas.min:"),
        ({"target": {"num_cpus": float("inf")}}, "target.num_cpus:"),
        ({"target": {"num_gpus": 1.5}}, "a share of one GPU, or whole ones"),
        ({"target": {"labels": {"paceline.pool": "tar get"}}}, "'tar get' is no label"),
        (
            {"target": {"service": {"max_sessions": 4}, "replicas": {"sessions_per_replica": 5}}},
            "sessions_per_replica 5 is more than service.max_sessions 4",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(args: dict[str, Any], words: str) -> None:
    """Every sentence says where the fault is; an unknown key names the nearest valid one."""
    with pytest.raises(ConfigInvalid) as refused:
        parse_application(args)
    assert words in str(refused.value)
    assert refused.value.reason == "CONFIG_INVALID"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**serve_file(), "grpc_optoins": {}}, "grpc_optoins is not known here; did you mean grpc_options?"),
        (serve_file(import_path="other:build"), "applications.0.import_path"),
        (serve_file(deployments=[]), "applications.0.deployments is not known here"),
        ({"applications": []}, "applications"),
        (serve_file(name="a/b"), "applications.0.name"),
        (serve_file(route_prefix="x"), "applications.0.route_prefix"),
        ({**serve_file(), "grpc_options": {"port": 8000}}, "are both 8000"),
        ({**serve_file(), "grpc_options": {"grpc_servicer_functions": ["a.b"]}}, "which the ingress serves"),
        (
            serve_file(
                autoscaling_policy={"policy_function": "orchestrator.app:PoolPolicy", "policy_kwargs": {"kv_tarjet": 1}}
            ),
            "kv_tarjet is not known here; did you mean kv_target?",
        ),
        (
            serve_file(
                autoscaling_policy={"policy_function": "orchestrator.app:PoolPolicy", "policy_kwargs": {"kv_target": 0}}
            ),
            "kv_target cannot be 0",
        ),
    ],
)
def test_a_serve_file_is_checked_as_a_whole(content: dict[str, Any], words: str) -> None:
    """Serve itself ignores keys that it does not know."""
    with pytest.raises(ConfigInvalid) as refused:
        parse_serve_file(content)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications: [", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        ("- 1", "holds no configuration"),
        ("", "holds no configuration"),
    ],
)
def test_a_file_that_is_no_configuration_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "paceline.yaml"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=words):
        load_serve_file(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load_serve_file(tmp_path / "nowhere.yaml")


def test_replicas_of_one_machine_listen_on_loopback() -> None:
    """Those of models, which others need not reach; a file that says where they listen is followed."""
    content = serve_file(args={"target": {"service": {"model": "m"}}, "drafter": {"service": {"host": "10.0.0.1"}}})
    application = on_loopback(parse_serve_file(content)).application
    assert application.target.settings().host == "127.0.0.1"
    assert application.target.settings().model == "m"
    assert application.drafter is not None
    assert application.drafter.settings().host == "10.0.0.1"
    assert on_loopback(parse_serve_file(serve_file())).application.drafter is None
