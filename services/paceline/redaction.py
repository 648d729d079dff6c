"""What no log line may hold: tokens, whoever logs them and under whatever name."""

from __future__ import annotations

import re
from typing import Any

import structlog

TOKEN_PREFIX = "paceline_"
"""Of every token: so a leaked one is found by whoever looks for it."""
REDACTED = "[redacted]"

_SECRET_NAMES = re.compile(r"authorization|api[-_]?key|password|secret|cookie|^(bearer_|access_)?token$", re.IGNORECASE)
_SECRET_TEXT = re.compile(rf"\b{TOKEN_PREFIX}[A-Za-z0-9_-]{{20,}}|(?<=\bbearer )\S+", re.IGNORECASE)


def redact_secrets(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The event without secrets (a structlog processor; to stand behind the one that formats tracebacks)."""
    return {name: REDACTED if _SECRET_NAMES.search(str(name)) else _redacted(value) for name, value in event.items()}


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return _SECRET_TEXT.sub(REDACTED, value)
    if isinstance(value, dict):
        return redact_secrets(None, "", value)
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return value
