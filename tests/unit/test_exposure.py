"""Where a service may listen: beyond this machine only for those whom it can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from paceline.errors import StartupFailed
from paceline.exposure import is_loopback, refuse_exposure, warn_of_trust
from paceline.settings import DrafterSettings, OrchestratorSettings, ServiceSettings, TargetSettings

OWN: dict[str, Any] = {"tls_cert": Path("c"), "tls_key": Path("k"), "tls_ca": Path("a")}
PUBLIC: dict[str, Any] = {"public_tls_cert": Path("c"), "public_tls_key": Path("k")}
PUBLIC_HOSTS = ["0.0.0.0", "::", "[::]", "10.1.2.3", "192.168.0.7", "fd00::7", "target", "example.com", "", "127.1"]


def target(**settings: Any) -> TargetSettings:
    return TargetSettings(**settings)


def drafter(**settings: Any) -> DrafterSettings:
    return DrafterSettings(**settings)


def orchestrator(**settings: Any) -> OrchestratorSettings:
    return OrchestratorSettings(target="127.0.0.1:1", **settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback_is_known(host: str) -> None:
    """Nobody else can reach it."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", [*PUBLIC_HOSTS, "localhost.example.com", "::ffff:10.0.0.1"])
def test_everything_else_may_be_reached_by_others(host: str) -> None:
    """A name too: whoever set it up decides what it means."""
    assert not is_loopback(host)


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
@pytest.mark.parametrize("settings_of", [target, drafter, orchestrator])
def test_an_unprotected_service_does_not_listen_for_others(settings_of: Any, host: str) -> None:
    """The sentence names the three ways out."""
    with pytest.raises(StartupFailed) as caught:
        refuse_exposure(settings_of(host=host))
    for way_out in ("--host", "--tls-cert" if settings_of is not orchestrator else "--tokens-file", "--trust-network"):
        assert way_out in caught.value.message


@pytest.mark.parametrize(
    "settings",
    [
        target(host="0.0.0.0", **OWN),
        drafter(host="0.0.0.0", **OWN),
        orchestrator(host="0.0.0.0", tokens_file=Path("t")),
        orchestrator(host="0.0.0.0", **PUBLIC, public_tls_ca=Path("a")),
        target(host="0.0.0.0", trust_network=True),
        orchestrator(host="0.0.0.0", trust_network=True),
        target(),
        orchestrator(),
    ],
)
def test_a_protected_service_listens_anywhere(settings: ServiceSettings) -> None:
    """By certificates, tokens, or the word of whoever runs it; on loopback without any."""
    refuse_exposure(settings)


@pytest.mark.parametrize("settings", [orchestrator(host="0.0.0.0", **PUBLIC), orchestrator(host="0.0.0.0", **OWN)])
def test_encryption_alone_lets_everybody_in(settings: OrchestratorSettings) -> None:
    """A certificate of the server's says nothing of who calls, nor do those that services show one another."""
    with pytest.raises(StartupFailed):
        refuse_exposure(settings)


def test_trust_is_said_once_where_it_is_all_there_is() -> None:
    """Not where something else protects the service, or nobody can reach it."""
    with capture_logs() as logs:
        warn_of_trust(target(host="0.0.0.0", trust_network=True))
        warn_of_trust(target(host="0.0.0.0", trust_network=True, **OWN))
        warn_of_trust(target(trust_network=True))
    assert [entry["log_level"] for entry in logs] == ["warning"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tls_cert": "c"}, "--tls-cert and --tls-key"),
        ({"tls_cert": "c", "tls_key": "k"}, "all three"),
        ({"tls_ca": "a"}, "all three"),
        ({"public_tls_cert": "c"}, "--public-tls-cert"),
        ({"public_tls_key": "k"}, "--public-tls-cert"),
        ({"public_tls_ca": "a"}, "--public-tls-cert and --public-tls-key"),
    ],
)
def test_half_a_certificate_is_refused(settings: dict[str, Any], sentence: str) -> None:
    """Before anything else happens."""
    with pytest.raises(ValidationError, match=sentence):
        orchestrator(**settings)


def test_an_empty_variable_means_no_file() -> None:
    """As compose files and charts write them."""
    settings = orchestrator(tls_cert="", tls_key="", tls_ca="", tokens_file="")
    assert (settings.target_tls, settings.tokens_file) == (None, None)
