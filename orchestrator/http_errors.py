"""Errors as HTTP tells them: one table of status codes, and the shape in which OpenAI's clients expect the rest.

Knows nothing of requests, streams or servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paceline.errors import ContextTooLong, InvalidRequest, PacelineError
from paceline.rpc import status_code

HTTP_CODES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""By the gRPC code that the same error has on the other front (`rpc.STATUS_CODES`); the canonical mapping."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 504: "timeout_error"}
_CODES: dict[type[PacelineError], str] = {ContextTooLong: "context_length_exceeded"}  # what OpenAI's clients look for


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One error on its way out: an HTTP status with a body, or the last event of a stream."""

    status: int
    message: str  # one sentence for a person
    code: str  # stable, for programs: the error's reason in lower case
    param: str | None = None  # the parameter at fault
    retry_after_s: float | None = None  # when trying again may help

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            # The standard's header knows whole seconds alone; OpenAI's clients look at the finer one first.
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1000))
        return headers


class RequestRefused(Exception):
    """The request fails at HTTP itself: its path, method, content type, or size."""

    def __init__(self, status: int, message: str, *, code: str) -> None:
        super().__init__(message)
        self.problem = Problem(status=status, message=message, code=code)


def problem_of(error: PacelineError) -> Problem:
    return Problem(
        status=HTTP_CODES[status_code(error).name],
        message=error.message,
        code=_CODES.get(type(error), error.reason.lower()),
        param=error.parameter if isinstance(error, InvalidRequest) else error.details.get("parameter"),
        retry_after_s=error.retry_after_s,
    )
