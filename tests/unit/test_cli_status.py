"""`paceline status` against a fake server: the table, the lines, the JSON, and a server that goes away."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from rich.console import Console

from paceline.cli.pools import ReplicaState, count_in_words, in_one_line, status_view
from paceline.cli.serving import free_port
from paceline.cli.status import live_view
from paceline.client import DeploymentStatus, OrchestratorStatus, PoolStatus, ReplicaStatus, ServerUnavailable
from paceline.v1 import generation_service_pb2 as pb
from tests.command_line import ESCAPE, end, paceline, refused, started, uncoloured
from tests.fake_generation import POOL_STATUS, FakeGenerationService, serving

REPLICA = ReplicaStatus(
    replica_id="x3k9p2qa-and-more",
    address="10.244.113.17:41234",
    node_id="9f3ac1d2e4",
    model_id="big",
    sessions=3,
    max_sessions=16,
    queued=2,
    kv_used_tokens=750,
    kv_capacity_tokens=1000,
    acceptance_rate=0.714,
    is_connected=True,
)
DRAFTER = ReplicaStatus(
    replica_id="d00d", address="127.0.0.1:5", node_id="b417aa", model_id="ngram", sessions=1, is_connected=True
)
STATUS = DeploymentStatus(
    pools=(
        PoolStatus(
            name="target",
            desired_replicas=4,
            replicas=(
                REPLICA,
                replace(REPLICA, replica_id="b", is_draining=True),
                replace(REPLICA, replica_id="c", is_connected=False),
                replace(REPLICA, replica_id="d", is_connected=False, model_id="", acceptance_rate=None),
            ),
        ),
        PoolStatus(name="drafter", replicas=(DRAFTER,)),
    ),
    orchestrator=OrchestratorStatus(running_answers=3, max_answers=256, stall_fraction=0.043),
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with serving(FakeGenerationService()) as address:
        yield address


def drawn(status: DeploymentStatus, *, width: int = 80) -> list[str]:
    """The lines of the view."""
    console = Console(width=width, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(status_view(status, width=width))
    return console.export_text().splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def test_row_says_all_of_a_replica() -> None:
    """Id, node, address, sessions, queue, KV memory, acceptance and state; ids are cut to what tells them apart."""
    words = [line.split() for line in drawn(STATUS)]
    headings = ["replica", "node", "address", "sessions", "queued", "KV", "used", "accepted", "state"]
    assert words[1] == headings
    assert ["x3k9p2qa", "9f3ac1", "10.244.113.17:41234", "3/16", "2", "75", "%", "71", "%", "●", "connected"] in words


def test_heading_counts_what_runs_and_what_is_wanted() -> None:
    """The numbers of the pool stand before its rows, with the model."""
    lines = drawn(STATUS)
    assert lines[0].split("  ")[0] == "target"
    assert "1 running, 4 wanted, 1 starting, 1 draining, 1 lost  big" in lines[0]
    assert count_in_words(STATUS.pools[1]) == "1 running"


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, ReplicaState.CONNECTED),
        ({"is_draining": True}, ReplicaState.DRAINING),
        ({"is_draining": True, "is_connected": False}, ReplicaState.DRAINING),
        ({"is_connected": False}, ReplicaState.LOST),
        ({"is_connected": False, "model_id": ""}, ReplicaState.STARTING),
    ],
)
def test_state_of_a_replica_is_one_word(changes: dict[str, object], state: ReplicaState) -> None:
    """Draining goes before connected; what was never talked to is starting, and otherwise lost."""
    assert ReplicaState.of(replace(REPLICA, **changes)) is state  # type: ignore[arg-type]


def test_unknown_figures_are_dashes() -> None:
    """A drafter that has no KV memory and no acceptance gets no invented zero."""
    assert ["d00d", "b417aa", "127.0.0.1:5", "1", "0", "-", "-", "●", "connected"] in [
        line.split() for line in drawn(STATUS)
    ]


def test_bar_of_kv_memory_is_as_long_as_its_share() -> None:
    """Three quarters of it are thick where there is room for a bar; a little is seen, nothing is not."""
    assert "━━━━━━━━──  75 %" in "".join(drawn(STATUS, width=120))
    shares = {used: replace(REPLICA, kv_used_tokens=used) for used in (0, 1, 1000)}
    bars = {
        used: drawn(replace(STATUS, pools=(PoolStatus(name="target", replicas=(replica,)),)), width=120)[2]
        for used, replica in shares.items()
    }
    assert "──────────   0 %" in bars[0]
    assert "━─────────   0 %" in bars[1]
    assert "━━━━━━━━━━ 100 %" in bars[1000]


def test_columns_that_say_nothing_are_left_out() -> None:
    """One node needs no node column, and replicas that are known by their address no id."""
    replica = replace(REPLICA, replica_id=REPLICA.address)
    status = replace(STATUS, pools=(PoolStatus(name="target", replicas=(replica,)),))
    assert drawn(status)[1].split() == ["address", "sessions", "queued", "KV", "used", "accepted", "state"]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_view_fits_into_the_terminal(width: int) -> None:
    """Every replica takes one line, of 80 columns or more."""
    lines = drawn(STATUS, width=width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 2 + 4 + 1 + 2 + 1 + 1 + 1


def test_empty_pool_is_its_heading_alone() -> None:
    """A pool that has scaled to zero is shown as that."""
    lines = drawn(replace(STATUS, pools=(PoolStatus(name="drafter", replicas=(), desired_replicas=0),)))
    assert lines[0].rstrip() == "drafter       0 running, 0 wanted"
    assert len(lines) == 3


def test_line_in_short_counts_everything() -> None:
    """One line for logs: both pools with their sessions, and the orchestrator."""
    assert in_one_line(STATUS) == (
        "target 1 running, 4 wanted, 1 starting, 1 draining, 1 lost, 12 sessions · drafter 1 running, 1 session · "
        "3 of 256 answers running, 4 % of their time waiting for drafts"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Once


def test_status_is_shown_on_standard_output(endpoint: str) -> None:
    """The tables are the answer of the command."""
    result = paceline("status", "--endpoint", endpoint)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 running, 2 wanted, 1 draining  fake-target" in result.stdout
    assert "3 of 256 answers running, 0 % of their time waiting for drafts" in result.stdout
    assert ESCAPE not in result.stdout


def test_json_carries_every_field_of_the_protocol(endpoint: str) -> None:
    """One object on one line; no field that a server sends is left out, and what is unknown is null."""
    result = paceline("status", "--endpoint", endpoint, "--json")
    assert result.stdout.count("\n") == 1
    status = json.loads(result.stdout)
    target, drafter = status["pools"]
    assert set(status) == _fields(pb.GetPoolStatusResponse)
    assert set(target) == _fields(pb.PoolStatus)
    assert set(target["replicas"][0]) == _fields(pb.ReplicaStatus)
    assert set(status["orchestrator"]) == _fields(pb.OrchestratorStatus)
    assert (target["desired_replicas"], drafter["desired_replicas"]) == (2, None)
    assert target["replicas"][0]["acceptance_rate"] == 0.75
    assert target["replicas"][1]["acceptance_rate"] is None


def _fields(
    message: type[pb.GetPoolStatusResponse | pb.PoolStatus | pb.ReplicaStatus | pb.OrchestratorStatus],
) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def test_silent_endpoint_is_a_sentence() -> None:
    """Without --watch nobody waits for a server."""
    gone = f"127.0.0.1:{free_port()}"
    assert f"Nothing answers at {gone}" in refused(paceline("status", "--endpoint", gone), status=1)
    assert "HOST:PORT" in refused(paceline("status", "--endpoint", "nonsense", "--watch"), status=1)


# ---------------------------------------------------------------------------------------------------------------------
# Watching


class Scaling(FakeGenerationService):
    """The canned deployment, with another number of wanted targets at each look."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def GetPoolStatus(  # noqa: N802
        self, request: pb.GetPoolStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetPoolStatusResponse:
        self.looks += 1
        status = pb.GetPoolStatusResponse()
        status.CopyFrom(POOL_STATUS)
        status.pools[0].desired_replicas = self.looks
        return status


def test_watching_in_a_pipe_is_a_line_each_time_and_outlives_the_server() -> None:
    """While nothing answers, the lines say so; when a server is back at the same place, they go on."""
    port = free_port()
    with started("status", "--watch", "--interval", "0.1", "--endpoint", f"127.0.0.1:{port}") as process:
        assert process.stdout is not None
        for _ in range(2):
            with serving(Scaling(), port=port):
                _read_until(process.stdout, "1 running, 1 wanted, 1 draining, 3 sessions · drafter 0 running")
                _read_until(process.stdout, "1 running, 3 wanted")
            _read_until(process.stdout, "Nothing answers at")
        process.send_signal(signal.SIGINT)
        status, output = end(process)
    assert status == 130
    assert "Traceback" not in output


def test_watching_as_json_is_an_object_each_time() -> None:
    """A program reads the state or an error from every line."""
    port = free_port()
    with started("status", "--watch", "--json", "--interval", "0.1", "--endpoint", f"127.0.0.1:{port}") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["error"]["reason"] == "SERVER_UNAVAILABLE"
        with serving(Scaling(), port=port):
            _read_until(process.stdout, '"pools"')
            assert json.loads(process.stdout.readline())["pools"][0]["desired_replicas"] > 1


def test_watching_on_a_terminal_keeps_one_picture(endpoint: str) -> None:
    """The tables are drawn over themselves, and Ctrl-C gives the cursor back."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "40"}
    arguments = ("status", "--watch", "--interval", "0.1", "--endpoint", endpoint)
    with started(*arguments, environment=environment) as process:
        assert process.stdout is not None
        for _ in range(3):
            _read_until(process.stdout, "answers running")
        process.send_signal(signal.SIGINT)
        status, output = end(process)
    assert status == 130
    assert "Traceback" not in output
    assert f"{ESCAPE}[?25h" in output


def _read_until(lines: Iterator[str], words: str) -> None:
    """Fails by pytest's timeout, or at the end of the lines."""
    assert any(words in uncoloured(line) for line in lines)


def test_picture_of_before_stays_while_nothing_answers() -> None:
    """What was seen last is dimmed, with the time it is from, and a sentence says what is wrong."""
    console = Console(width=80, record=True, force_terminal=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    trouble = ServerUnavailable("Nothing answers at a:1.")
    console.print(live_view("a:1", trouble, (STATUS, "12:34:56"), width=80))
    text = console.export_text(clear=False)
    assert "a:1  12:34:56" in text
    assert "x3k9p2qa" in text
    assert "Nothing answers at a:1. Looking again." in text
    assert f"{ESCAPE}[2mx3k9p2qa" in console.export_text(styles=True)


def test_picture_without_a_server_is_a_sentence() -> None:
    """Nothing is invented before the first answer."""
    console = Console(width=80, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(live_view("a:1", ServerUnavailable("Nothing answers at a:1."), None, width=80))
    text = console.export_text()
    assert "Nothing answers at a:1. Looking again." in text
    assert "running" not in text
