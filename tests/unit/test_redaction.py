"""Secrets do not reach the log, under whatever name or within whatever text they come."""

from __future__ import annotations

import json

import pytest

from paceline.redaction import REDACTED, redact_secrets
from paceline.tokens import new_token


@pytest.mark.parametrize(
    "name",
    [
        "authorization",
        "Authorization",
        "proxy-authorization",
        "api_key",
        "x-api-key",
        "password",
        "token",
        "bearer_token",
    ],
)
def test_a_field_that_is_named_like_a_secret_is_emptied(name: str) -> None:
    """Whatever it holds."""
    assert redact_secrets(None, "info", {"event": "call", name: "Bearer x"}) == {"event": "call", name: REDACTED}


@pytest.mark.parametrize("name", ["tokens", "token_ids", "kv_capacity_tokens", "prompt_tokens", "tokens_per_minute"])
def test_counts_of_tokens_stay(name: str) -> None:
    """They are what most lines are about."""
    assert redact_secrets(None, "info", {name: 12}) == {name: 12}


def test_a_token_is_found_wherever_it_stands() -> None:
    """In a sentence, a traceback, a header among others, a list within a dictionary."""
    token = new_token()
    event = {
        "event": f"refused {token}.",
        "exception": f"Traceback: headers={{'authorization': 'Bearer {token}'}}",
        "metadata": {"nested": [token, ("x", f"bearer {token}")], "Authorization": token},
    }
    logged = json.dumps(redact_secrets(None, "error", event))
    assert token not in logged
    assert token.removeprefix("paceline_") not in logged
    assert "refused" in logged


def test_a_bearer_of_another_make_is_found() -> None:
    """Callers send tokens of other services by mistake."""
    assert redact_secrets(None, "info", {"event": "got Bearer sk-abc"})["event"] == f"got Bearer {REDACTED}"


def test_other_lines_stay_as_they_are() -> None:
    """Names of packages and modules begin as our tokens do."""
    event = {"event": "ready", "address": "127.0.0.1:1", "module": "paceline_target", "count": 3, "model": None}
    assert redact_secrets(None, "info", dict(event)) == event
