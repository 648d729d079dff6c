"""The table of HTTP status codes, and the shape of an error."""

from __future__ import annotations

import pytest

from orchestrator.http_errors import HTTP_CODES, problem_of
from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    QueueFull,
    RateLimited,
    TargetUnavailable,
    Unauthenticated,
    internal_error,
)
from paceline.rpc import STATUS_CODES


def test_every_code_that_an_error_has_over_grpc_has_one_over_http() -> None:
    assert {code.name for code in STATUS_CODES.values()} <= HTTP_CODES.keys()


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (InvalidRequest("n is bad.", parameter="n"), 400, "invalid_request_error", "invalid_argument", "n"),
        (ContextTooLong("Too long."), 400, "invalid_request_error", "context_length_exceeded", None),
        (Unauthenticated("Who?"), 401, "authentication_error", "unauthenticated", None),
        (
            ModelNotFound("None such.", details={"parameter": "model"}),
            404,
            "invalid_request_error",
            "model_not_found",
            "model",
        ),
        (QueueFull("Full."), 429, "rate_limit_error", "queue_full", None),
        (RateLimited("Enough."), 429, "rate_limit_error", "rate_limited", None),
        (internal_error(), 500, "server_error", "internal", None),
        (Draining("Going."), 503, "server_error", "draining", None),
        (TargetUnavailable("Gone."), 503, "server_error", "target_unavailable", None),
        (DeadlineExceeded("Late."), 504, "timeout_error", "deadline_exceeded", None),
    ],
)
def test_errors_have_openais_shape(error: PacelineError, status: int, kind: str, code: str, param: str | None) -> None:
    problem = problem_of(error)
    assert problem.status == status
    assert problem.body == {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize(("seconds", "header", "milliseconds"), [(0.25, "1", "250"), (2.5, "3", "2500")])
def test_when_to_try_again_is_said_twice(seconds: float, header: str, milliseconds: str) -> None:
    """In whole seconds as the standard wants it, and exactly, as OpenAI's clients read it."""
    headers = problem_of(QueueFull("Full.", retry_after_s=seconds)).headers
    assert headers == {"retry-after": header, "retry-after-ms": milliseconds}


def test_who_needs_a_token_is_told_which_kind() -> None:
    assert problem_of(Unauthenticated("Who?")).headers == {"www-authenticate": "Bearer"}
