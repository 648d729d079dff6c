"""`paceline doctor` on the command line: lines, JSON, a table, and the exit status."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from rich.console import Console

from paceline.cli.doctor import findings_table, in_short
from paceline.cli.serving import free_port
from paceline.doctor.findings import failed, ok, skipped, warning
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import add_GenerationServiceServicer_to_server
from tests.command_line import paceline, refused
from tests.fake_generation import POOL_STATUS, FakeGenerationService

FINDINGS = [
    ok("port", "A server listens."),
    warning("clock", "It is behind.", "Set it."),
    failed("targets", "There is none.", "Start one."),
    skipped("http", "Nobody knows."),
]


class Draining(FakeGenerationService):
    """One of its targets is about to stop; all are on this machine, where nobody listens for them."""

    def GetPoolStatus(  # noqa: N802 - the name is the contract's
        self, request: pb.GetPoolStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetPoolStatusResponse:
        status = pb.GetPoolStatusResponse.FromString(POOL_STATUS.SerializeToString())
        for number, replica in enumerate(status.pools[0].replicas, start=1):
            replica.address, replica.is_connected = f"127.0.0.1:{number}", True
        return status


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A server with its health, whose pools are not all well."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    add_GenerationServiceServicer_to_server(Draining(), server)
    its_health = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(its_health, server)
    its_health.set("paceline.v1.GenerationService", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


def test_a_failure_is_a_line_and_an_exit_status() -> None:
    """In a pipe a line each, as they come, with what to do."""
    result = paceline("doctor", "--endpoint", f"127.0.0.1:{free_port()}")
    assert result.exit_code == 1
    (first, *_) = result.stdout.splitlines()
    assert first.startswith("failed   port: Nothing listens")
    assert " To do: Start it" in first


def test_json_is_one_object() -> None:
    """With every check, and whether one has failed."""
    result = paceline("doctor", "--endpoint", f"127.0.0.1:{free_port()}", "--json")
    seen = json.loads(result.stdout)
    assert result.exit_code == 1
    assert seen["failed"] is True
    assert seen["checks"][0]["name"] == "port"
    assert seen["checks"][0]["outcome"] == "failed"
    assert seen["checks"][0]["remedy"]


def test_warnings_alone_are_a_success(endpoint: str) -> None:
    """A replica that drains is said, and nothing has failed."""
    result = paceline("doctor", "--endpoint", endpoint, "--no-answers")
    assert result.exit_code == 0
    assert "warning  targets: The target at 127.0.0.1:2 is about to stop" in result.stdout


def test_token_is_shown_nowhere(endpoint: str) -> None:
    """Neither in lines nor in JSON."""
    for more in ((), ("--json",)):
        result = paceline("doctor", "--endpoint", endpoint, "--no-answers", "--token", "paceline_secret", *more)
        assert "paceline_secret" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "7001"), "HOST:PORT"),
        (("--drafter", "a:0"), "HOST:PORT"),
        (("--http", "localhost:8000"), "HTTP URL"),
        (("--endpoint", "9000"), "HOST:PORT"),
    ],
)
def test_addresses_that_are_none_are_refused(arguments: tuple[str, ...], words: str) -> None:
    """Before anything is looked at."""
    result = paceline("doctor", *arguments)
    assert words in refused(result, status=result.exit_code)
    assert result.exit_code in (1, 2)


def test_table_says_what_to_do_below_what_was_seen() -> None:
    """Marks tell the outcomes apart without colours; the sum begins with the worst."""
    console = Console(width=60, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(findings_table(FINDINGS))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "✓ port    A server listens.",
        "! clock   It is behind.",
        "          Set it.",
        "✗ targets There is none.",
        "          Start one.",
        "- http    Nobody knows.",
    ]
    assert in_short(FINDINGS) == "1 failed, 1 warning, 1 ok, 1 skipped"
