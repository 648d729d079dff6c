"""Commands that ask a running server: as whom, over what, and which model must answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.cli.connecting import Connecting
from paceline.client import ClientTls
from tests.certificates import Authority
from tests.command_line import paceline
from tests.fake_generation import TEXT, FakeGenerationService, serving


@pytest.fixture
def service() -> FakeGenerationService:
    return FakeGenerationService()


@pytest.fixture
def endpoint(service: FakeGenerationService) -> Iterator[str]:
    with serving(service) as endpoint:
        yield endpoint


@pytest.mark.parametrize("way", ["option", "environment"])
def test_token_goes_with_the_commands(service: FakeGenerationService, endpoint: str, way: str) -> None:
    """By option or `PACELINE_TOKEN`, and it is shown to nobody here."""
    options, environment = (("--token", "secret"), {}) if way == "option" else ((), {"PACELINE_TOKEN": "secret"})
    results = [
        paceline("generate", "Why?", "--endpoint", endpoint, *options, **environment),
        paceline("status", "--endpoint", endpoint, *options, **environment),
    ]
    assert [result.exit_code for result in results] == [0, 0]
    assert [metadata["authorization"] for metadata in service.metadata] == ["Bearer secret"] * 2
    assert not any("secret" in result.output for result in results)


@pytest.mark.parametrize("command", [("generate", "Why?", "--endpoint"), ("status", "--endpoint"), ("trace",)])
def test_token_is_not_shown_to_strangers(command: tuple[str, ...]) -> None:
    """The refusal says what would do, and not the token."""
    result = paceline(*command, "10.0.0.1:9000", "--token", "secret")
    assert result.exit_code != 0
    assert "give tls" in " ".join(result.output.split())
    assert "secret" not in result.output


def test_commands_reach_a_server_over_tls(service: FakeGenerationService, tmp_path: Path) -> None:
    """Its name may be given; one that nobody vouches for is not asked."""
    authority = Authority(tmp_path)
    server = authority.issue("server.paceline")
    credentials = grpc.ssl_server_credentials([(server.key.read_bytes(), server.cert.read_bytes())])
    with serving(service, credentials=credentials) as endpoint:
        believed = ("--tls-ca", str(authority.ca), "--tls-name", "server.paceline")
        assert paceline("generate", "Why?", "--endpoint", endpoint, *believed).stdout == TEXT + "\n"
        assert paceline("status", "--endpoint", endpoint, *believed).exit_code == 0
        assert paceline("status", "--endpoint", endpoint, "--tls").exit_code != 0
    assert len(service.metadata) == 2


def test_certificates_are_for_a_running_server() -> None:
    """One that the command starts itself has none."""
    result = paceline("generate", "Why?", "--tls")
    assert result.exit_code == 2
    assert "--endpoint" in result.output


def test_model_and_id_reach_the_server(service: FakeGenerationService, endpoint: str, tmp_path: Path) -> None:
    """By option, and by line of a file."""
    assert paceline("generate", "Why?", "--endpoint", endpoint, "--model", "m").exit_code == 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Why?", "model": "n", "request_id": "first"}\n', encoding="utf-8")
    assert paceline("generate", "--prompts", str(prompts), "--endpoint", endpoint).exit_code == 0
    assert [(request.model, request.request_id) for request in service.requests] == [("m", ""), ("n", "first")]


def test_any_option_about_certificates_means_tls() -> None:
    """None means none; and what is printed of it shows no token."""
    nothing: dict[str, Any] = dict.fromkeys(("token", "ca", "cert", "key", "name"))
    assert Connecting.of(**nothing, tls=False, trust_network=False).tls is None
    assert Connecting.of(**nothing, tls=True, trust_network=False).tls == ClientTls()
    named = Connecting.of(**{**nothing, "name": "n", "token": "secret"}, tls=False, trust_network=False)
    assert named.tls == ClientTls(server_name="n")
    assert "secret" not in repr(named)
