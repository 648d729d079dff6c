"""What can go wrong with a call, in a caller's words: what servers report, and what becomes of calls that reach none."""

from __future__ import annotations

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.errors import DeadlineExceeded, InvalidRequest, PacelineError, QueueFull
from paceline.generation import IncompleteAnswer
from paceline.rpc import ERROR_DOMAIN, STATUS_CODES

CANCELLED_SENTENCE = "The answer was cancelled before its end; ask again."


class ServerUnavailable(PacelineError):
    """No Paceline server answers at the endpoint, or it went away in mid-answer."""

    reason = "SERVER_UNAVAILABLE"


class ClientClosed(PacelineError):
    """The client is not open: it is used outside of its `with`, or was closed in the middle of a call."""

    reason = "CLIENT_CLOSED"

    def __init__(self) -> None:
        super().__init__("The client is not open; use it within `with`.")


def explained(error: grpc.aio.AioRpcError, *, endpoint: str, late: str, in_mid_answer: bool = False) -> PacelineError:
    """A failed call in our words; `late` are those for a deadline that has passed."""
    reported = reported_error(error)
    if reported is not None:
        return reported
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if in_mid_answer:
            return ServerUnavailable(f"The server at {endpoint} went away in mid-answer; ask again.")
        case grpc.StatusCode.UNAVAILABLE:
            return ServerUnavailable(
                f"Nothing answers at {endpoint}; start it with `paceline up` or `paceline serve`, or ask `paceline doctor "
                f"--endpoint {endpoint}` what is there."
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(late)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ServerUnavailable(f"What answers at {endpoint} is not a Paceline orchestrator.")
        case grpc.StatusCode.CANCELLED:
            return IncompleteAnswer(CANCELLED_SENTENCE)
        case code:
            return PacelineError(error.details() or f"The server failed with {code.name}.", reason=code.name)


_KIND_BY_REASON = {kind.reason: kind for kind in STATUS_CODES}


def reported_error(error: grpc.aio.AioRpcError) -> PacelineError | None:
    """The error that a Paceline server described in its status, as its own type; None if it described none."""
    status = _rich_status(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        # Unpack leaves a message of another type alone.
        detail.Unpack(info)
        detail.Unpack(retry)
    if status is None or info.domain != ERROR_DOMAIN:
        return None
    details, retry_after_s = dict(info.metadata), retry.retry_delay.ToNanoseconds() / 1e9
    kind = _KIND_BY_REASON.get(info.reason, PacelineError)
    if issubclass(kind, InvalidRequest):
        return kind(status.message, parameter=details.get("parameter", ""))
    if issubclass(kind, QueueFull):
        return kind(status.message, retry_after_s=retry_after_s)
    reported = kind(status.message, reason=info.reason, details=details)
    reported.retry_after_s = retry_after_s or reported.retry_after_s
    return reported


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
