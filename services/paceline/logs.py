"""Log lines: JSON on standard error, each with the service's name and the ids of the request and session it is about.

Prompts and answers are never logged, nor what a caller wrote in a request that is refused; there is no switch for it.
Tokens are cut out of whatever is logged.
"""

from __future__ import annotations

import logging
import sys

import structlog

from paceline.redaction import redact_secrets
from paceline.types import request_id_of


def configure_logging(level: str, *, service: str, takes_libraries: bool = False) -> None:
    """Structured lines on standard error: JSON for machines, coloured text on a terminal.

    With `takes_libraries` what libraries log by `logging` or `warnings` takes the same form, from warnings on; for
    processes of our own, not for those of a cluster that has its own ways.
    """
    own_level = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact_secrets,  # last, so that it sees tracebacks too
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(own_level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    if takes_libraries:
        _take_libraries(shared, renderer, level=max(own_level, logging.WARNING))


def bind_request(request_id: str) -> None:
    """Name the request in every line that is logged from here on in this task, and in tasks that it begins; "": none."""
    if request_id:
        structlog.contextvars.bind_contextvars(request_id=request_id)
    else:
        structlog.contextvars.unbind_contextvars("request_id")


def bind_session(session_id: str) -> None:
    """Likewise the session."""
    structlog.contextvars.bind_contextvars(session_id=session_id)


def _add_request_id(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Where only the session is known, as in callbacks of streams and at model services, it says which request's it is."""
    session_id = event.get("session_id")
    if session_id and "request_id" not in event:
        event["request_id"] = request_id_of(session_id)
    return event


def _take_libraries(
    processors: list[structlog.typing.Processor], renderer: structlog.typing.Processor, *, level: int
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *processors],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
