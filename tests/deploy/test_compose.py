"""The compose file gives the services settings that they know, and no more rights or reach than they need."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic_settings import CliApp

from paceline.exposure import refuse_exposure
from paceline.settings import DrafterSettings, OrchestratorSettings, ServiceSettings, TargetSettings
from tests.deploy.files import DEPLOY, project_version, read_yaml

COMPOSE = read_yaml(DEPLOY / "compose" / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "target": TargetSettings,
    "drafter": DrafterSettings,
    "orchestrator": OrchestratorSettings,
}
COMMANDS = {
    "target": ["python", "-m", "target_service"],
    "drafter": ["python", "-m", "drafter_service"],
    "orchestrator": ["python", "-m", "orchestrator"],
}
METRICS_JOB = read_yaml(DEPLOY / "observability" / "prometheus.yaml")["scrape_configs"][0]

each_service = pytest.mark.parametrize("name", SETTINGS)


@pytest.fixture
def settings(name: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """What the service would read from its environment."""
    for variable, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    return CliApp.run(SETTINGS[name], cli_args=[])


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration.removesuffix("s"))


def test_the_three_services_are_there() -> None:
    """Nothing else runs."""
    assert SERVICES.keys() == SETTINGS.keys()


@each_service
def test_command_is_the_service(name: str) -> None:
    """Settings come from the environment, not from the command line."""
    assert SERVICES[name]["command"] == COMMANDS[name]


@each_service
def test_every_variable_is_a_setting(name: str) -> None:
    """A variable that no setting reads would be passed over in silence."""
    prefix = SETTINGS[name].model_config.get("env_prefix", "")
    known = {f"{prefix}{field}".upper() for field in SETTINGS[name].model_fields}
    assert SERVICES[name]["environment"].keys() <= known


@each_service
def test_values_are_valid(name: str, settings: ServiceSettings) -> None:
    """The service would start with them, reachable from the other containers."""
    assert settings.host == "0.0.0.0"
    assert settings.port > 0
    refuse_exposure(settings)


@each_service
def test_health_is_asked_where_the_service_listens(name: str, settings: ServiceSettings) -> None:
    """By the script that the image holds."""
    command = SERVICES[name]["healthcheck"]["test"]
    assert command == ["CMD", "python", "/opt/paceline/health.py", f"127.0.0.1:{settings.port}"]


@each_service
def test_prometheus_asks_where_the_metrics_are(name: str, settings: ServiceSettings) -> None:
    """The example of a scrape configuration names this host and port."""
    targets = {each["labels"]["service"]: each["targets"] for each in METRICS_JOB["static_configs"]}
    assert targets[name] == [f"{name}:{settings.metrics_port}"]


@each_service
def test_a_container_outlives_the_drain(name: str, settings: ServiceSettings) -> None:
    """The grace period is longer than the time that running sessions get."""
    assert seconds(SERVICES[name]["stop_grace_period"]) > settings.drain_s


@each_service
def test_a_container_is_confined(name: str) -> None:
    """Read-only, no capabilities, no new ones, bounded in memory, CPU, processes and logs, and started again if it dies."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert service["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
    assert service["pids_limit"] > 0
    assert "max-size" in service["logging"]["options"]


def test_only_the_orchestrator_is_published() -> None:
    """On loopback; the others share a network without a way out."""
    assert {name for name, service in SERVICES.items() if "ports" in service} == {"orchestrator"}
    port = SERVICES["orchestrator"]["environment"]["PACELINE_ORCHESTRATOR_PORT"]
    assert SERVICES["orchestrator"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    assert SERVICES["target"]["networks"] == SERVICES["drafter"]["networks"] == ["inside"]


def test_the_orchestrator_finds_its_peers() -> None:
    """It is told their names in the network and their ports."""
    told = SERVICES["orchestrator"]["environment"]
    for peer in ("target", "drafter"):
        port = SERVICES[peer]["environment"][f"PACELINE_{peer.upper()}_PORT"]
        assert told[f"PACELINE_ORCHESTRATOR_{peer.upper()}"] == f"{peer}:{port}"


def test_the_orchestrator_waits_for_no_drafter() -> None:
    """Drafters are optional, at the start too."""
    assert SERVICES["orchestrator"]["depends_on"].keys() == {"target"}


def test_all_services_run_the_one_image() -> None:
    """It is built once, from the project's root."""
    assert {service["image"] for service in SERVICES.values()} == {SERVICES["target"]["image"]}
    (built,) = [service["build"] for service in SERVICES.values() if "build" in service]
    context = (DEPLOY / "compose" / built["context"]).resolve()
    assert (context / built["dockerfile"]).is_file()
    assert SERVICES["target"]["image"] == f"paceline:{project_version()}"
    arguments = set(re.findall(r"^ARG (\w+)", (context / built["dockerfile"]).read_text("utf-8"), re.MULTILINE))
    assert built["args"].keys() <= arguments
