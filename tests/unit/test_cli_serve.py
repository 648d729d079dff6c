"""`paceline serve` and `paceline demo --ray` with a cluster that is only a port: words, refusals, signals, clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from orchestrator.config import load_serve_file, parse_serve_file
from paceline.cli.demo import PROMPTS, ray_configuration
from paceline.cli.laptop import laptop_configuration
from paceline.cli.serve import Changes
from paceline.client import DeploymentStatus, OrchestratorStatus, PoolStatus, ReplicaStatus, ServerUnavailable
from paceline.local_stack import LocalStackSettings, ThreadPlan
from tests.command_line import end, paceline, refused, started
from tests.fake_cluster import BEHAVIOUR_VARIABLE, FakeCluster
from tests.fake_generation import TEXT

REPOSITORY = Path(__file__).resolve().parents[2]
LAPTOP = REPOSITORY / "deploy" / "serve" / "laptop.yaml"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """In place of Ray, for commands that run within the test."""
    fake = FakeCluster()
    monkeypatch.setitem(sys.modules, "orchestrator.cluster", fake.as_module())
    return fake


@contextmanager
def serving_process(behaviour: str = "well", *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`paceline serve` on a free port, with a cluster of that behaviour, as a process of its own."""
    environment = {**os.environ, BEHAVIOUR_VARIABLE: behaviour}
    with started("serve", "--port", "0", *arguments, module="tests.fake_cluster", environment=environment) as process:
        yield process


def read_until(lines: IO[str] | None, words: str) -> str:
    """The first line with these words, or "" if the lines end before."""
    assert lines is not None
    return next((line for line in lines if words in line), "")


# ---------------------------------------------------------------------------------------------------------------------
# What is started


def test_without_a_file_the_laptop_is_configured() -> None:
    """The configuration of an installed package is the one shipped in deploy/."""
    assert parse_serve_file(laptop_configuration()) == load_serve_file(LAPTOP)


def test_file_address_and_port_reach_the_cluster(cluster: FakeCluster) -> None:
    """The options say what is deployed and where; the port goes before the file's, and nothing else is changed."""
    cluster.behaviour = "failing"
    paceline("serve", "--config", str(LAPTOP), "--port", "9123", "--address", "10.0.0.1:6379")
    paceline("serve", "--config", str(LAPTOP), "--sim-cluster")
    first, second = cluster.files
    assert first.grpc_options.port == 9123
    assert second == load_serve_file(LAPTOP)
    assert first.applications == second.applications
    assert first.http_options == second.http_options
    assert cluster.options == [
        {"address": "10.0.0.1:6379", "is_simulated": False},
        {"address": None, "is_simulated": True},
    ]


def test_port_zero_takes_any_free_one(cluster: FakeCluster) -> None:
    """Serve cannot do that itself; without a file its HTTP port gets out of the way too."""
    cluster.behaviour = "failing"
    paceline("serve", "--port", "0")
    (file,) = cluster.files
    assert file.grpc_options.port not in (0, 9000)
    assert file.http_options.port not in (0, 8000, file.grpc_options.port)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        ("[", "is not valid YAML"),
        (
            "applications:\n- import_path: orchestrator.app:build\n  args: {target: {servce: {}}}\n",
            "did you mean service?",
        ),
    ],
)
def test_bad_file_is_refused_before_anything_starts(
    cluster: FakeCluster, tmp_path: Path, content: str | None, complaint: str
) -> None:
    """A sentence with the option at fault and exit status 2, without a traceback; no Ray is started for it."""
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    words = refused(paceline("serve", "--config", str(path), COLUMNS="300"))
    assert "Invalid value for --config" in words
    assert complaint in words
    assert cluster.files == []


def test_simulated_and_existing_cluster_contradict_each_other(cluster: FakeCluster) -> None:
    """Only one of the two can be meant."""
    assert "--address names one that runs" in refused(paceline("serve", "--sim-cluster", "--address", "a:1"))
    assert cluster.files == []


def test_failed_start_is_a_sentence_and_cleans_up(cluster: FakeCluster) -> None:
    """The reason stands on standard error, the exit status is 1, and what was started is stopped."""
    cluster.behaviour = "failing"
    words = refused(paceline("serve"), status=1)
    assert words.endswith("The application cannot start: there is no model 'bigg'. [STARTUP_FAILED]")
    assert not cluster.is_running


# ---------------------------------------------------------------------------------------------------------------------
# From start to end


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("behaviour", ["well", "taking SIGTERM"])
def test_serve_answers_until_it_is_stopped(behaviour: str, number: signal.Signals, status: int) -> None:
    """The first line is the endpoint, which answers; the state follows, and a signal stops everything.

    Also when Ray has put in a handler of its own, which would end the process on the spot.
    """
    with serving_process(behaviour) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        assert paceline("generate", "Hi", "--endpoint", endpoint).stdout == TEXT + "\n"
        assert read_until(process.stderr, "1 running, 2 wanted, 1 draining")
        assert read_until(process.stderr, f"paceline generate --endpoint {endpoint}")
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert output == ""  # whatever Ray prints, a program that reads the endpoint is not confused
    assert "stopping: done" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("moment", "after"),
    [
        ("starting Ray ...", ["starting Ray: done", "stopping ...", "stopping: done"]),
        ("starting Target ...", ["stopping ...", "stopping: done"]),
    ],
)
def test_interrupt_while_starting_stops_what_was_started(
    moment: str, after: list[str], number: signal.Signals, status: int
) -> None:
    """A step of the start is never cut in half: the signal takes effect behind it, and clean-up follows."""
    with serving_process("starting") as process:
        assert read_until(process.stderr, moment)
        process.send_signal(number)
        returned, output = end(process)
    assert returned == status
    assert [line for line in output.splitlines() if not line.startswith("(raylet)")] == after


def test_impatience_does_not_cut_the_cleaning_short() -> None:
    """Ctrl-C again and again, and SIGTERM, while things are being stopped: they are stopped all the same."""
    with serving_process("taking SIGTERM") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert read_until(process.stderr, "stopping ...")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.02)  # signals that are pending together count as one
        returned, output = end(process)
    assert (returned, output) == (130, "stopping: done\n")


# ---------------------------------------------------------------------------------------------------------------------
# What is said meanwhile


def status_with(running: int, *, wanted: int) -> DeploymentStatus:
    replicas = tuple(ReplicaStatus(replica_id=str(n), address="a:1", is_connected=True) for n in range(running))
    target = PoolStatus(name="target", replicas=replicas, desired_replicas=wanted)
    drafter = PoolStatus(name="drafter", replicas=(), desired_replicas=0)
    return DeploymentStatus(pools=(target, drafter), orchestrator=OrchestratorStatus(running_answers=0, max_answers=1))


def test_only_changes_are_said() -> None:
    """A pool whose numbers are others gets a line; the same numbers, and more sessions, get none."""
    changes = Changes(status_with(1, wanted=1))
    assert changes.since_last(status_with(1, wanted=1)) == []
    assert changes.since_last(status_with(1, wanted=2)) == ["target: 1 running, 2 wanted"]
    assert changes.since_last(status_with(2, wanted=2)) == ["target: 2 running, 2 wanted"]
    busier = replace(status_with(2, wanted=2), orchestrator=OrchestratorStatus(running_answers=1, max_answers=1))
    assert changes.since_last(busier) == []


def test_outage_is_said_once_and_so_is_its_end() -> None:
    """Nobody needs the same bad news each second."""
    changes = Changes(status_with(1, wanted=1))
    error = ServerUnavailable("Nothing answers at a:1.")
    assert changes.since_failure(error) == ["The application does not answer: Nothing answers at a:1."]
    assert changes.since_failure(error) == []
    assert changes.since_last(status_with(1, wanted=1)) == ["The application answers again."]
    assert changes.since_last(status_with(1, wanted=1)) == []


# ---------------------------------------------------------------------------------------------------------------------
# demo --ray


def test_demo_on_ray_compares_the_schedules(cluster: FakeCluster) -> None:
    """The same prompts and the same table as without Ray, and everything is stopped behind it."""
    result = paceline("demo", "--ray", "--max-tokens", "6")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "three Ray Serve deployments that talk gRPC" in words
    assert all(prompt.name in words for prompt in PROMPTS)
    assert f"All three schedules gave the same tokens for each of the {len(PROMPTS)} prompts." in words
    assert not cluster.is_running


def test_demo_on_ray_uses_the_models_it_is_told() -> None:
    """Models, arithmetic, draft length and threads reach the services; the rest is the laptop's configuration."""
    settings = LocalStackSettings(target="big", drafter="small", dtype="float32", draft_length=6)
    plan = ThreadPlan(cores=3, target=2, drafter=1)
    application = parse_serve_file(ray_configuration(settings, plan)).application
    assert application.drafter is not None
    target, drafter = application.target.settings(), application.drafter.settings()
    assert (target.model, target.dtype, target.threads) == ("big", "float32", 2)
    assert (drafter.method, drafter.model, drafter.dtype, drafter.threads) == ("draft_model", "small", "float32", 1)
    assert application.orchestrator.settings().draft_length == 6


def test_demo_on_ray_is_the_laptop_by_default() -> None:
    """Default model, prompt lookup, and the deployment's own draft length."""
    file = parse_serve_file(ray_configuration(LocalStackSettings(), ThreadPlan(cores=2, target=2, drafter=1)))
    usual = load_serve_file(LAPTOP).application
    assert file.application.drafter is not None
    assert usual.drafter is not None
    assert file.application.target.settings() == usual.target.settings(threads=2)
    assert file.application.drafter.settings() == usual.drafter.settings(threads=1)
    assert file.application.orchestrator == usual.orchestrator


# ---------------------------------------------------------------------------------------------------------------------
# Lightness


def test_command_line_loads_no_ray() -> None:
    """Importing it, as every command does, loads neither Ray nor torch nor a service."""
    code = (
        "import sys, paceline.cli; "
        "print([name for name in ('ray', 'torch', 'transformers', 'orchestrator') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.strip() == "[]"
