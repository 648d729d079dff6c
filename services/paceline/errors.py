"""What can go wrong, as types: one root, few children, data as fields.

Every error carries a `reason` (stable, UPPER_SNAKE_CASE, part of the public contract), a sentence that says what to
do, and optional details. `rpc.py` holds the one table that maps them to gRPC codes.
"""

from __future__ import annotations

from collections.abc import Mapping

_LONGEST_QUOTE = 64  # characters


class PacelineError(Exception):
    """Root of every error that Paceline raises on purpose; `str(error)` is one sentence for a person."""

    reason = "INTERNAL"
    retry_after_s: float | None = None  # when trying again may help

    def __init__(self, message: str, *, reason: str | None = None, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.details = dict(details or {})


def internal_error() -> PacelineError:
    """What a peer is told of a fault of ours; the log holds the rest."""
    return PacelineError("Something went wrong inside Paceline; the log of the service says what.")


def quoted(text: str) -> str:
    """What a caller has sent, as its error repeats it: cut, for the words of an error travel in headers of bounded size."""
    return repr(text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}...")


class InvalidRequest(PacelineError):
    """A value in the request is out of range or of the wrong form; `parameter` names it."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message, details={"parameter": parameter})
        self.parameter = parameter


class PayloadInvalid(PacelineError):
    """A message item is malformed: ids outside the vocabulary, wrong lengths, an undecodable distribution."""

    reason = "PAYLOAD_INVALID"


class ContextTooLong(PacelineError):
    """The prompt does not fit into the model's context."""

    reason = "CONTEXT_TOO_LONG"


class SessionNotFound(PacelineError):
    """The replica holds no such session: it was never opened here, was closed, or has idled too long."""

    reason = "SESSION_NOT_FOUND"


class StaleEpoch(PacelineError):
    """The session lives on under a newer epoch; the older holder must let go."""

    reason = "STALE_EPOCH"


class LengthMismatch(PacelineError):
    """The item does not join on to what the replica knows; the session must be opened again from its tokens."""

    reason = "LENGTH_MISMATCH"


class ModelMismatch(PacelineError):
    """Drafter and target, or request and model, do not speak the same token ids."""

    reason = "MODEL_MISMATCH"


class ModelUnavailable(PacelineError):
    """The model of a service cannot be found or loaded."""

    reason = "MODEL_UNAVAILABLE"


class ModelNotFound(PacelineError):
    """The request is for a model that is not served here."""

    reason = "MODEL_NOT_FOUND"


class RequestIdTaken(PacelineError):
    """Another answer of the same caller that is running has the id that the request chose."""

    reason = "REQUEST_ID_TAKEN"


class AnswerCancelled(PacelineError):
    """The caller has cancelled the answer by its id; what was streamed before stays valid."""

    reason = "CANCELLED"


class MethodNotFound(PacelineError):
    """The server has no such method."""

    reason = "METHOD_NOT_FOUND"


class QueueFull(PacelineError):
    """A bound on sessions or queued work is reached; try again after `retry_after_s`."""

    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unauthenticated(PacelineError):
    """The call brings no token, or none that is known here."""

    reason = "UNAUTHENTICATED"


class PeerRefused(PacelineError):
    """One of two services does not believe the other's certificate, or does not let its name in."""

    reason = "PEER_REFUSED"


class ReaderStalled(PacelineError):
    """The caller has read nothing of its answer for so long that it was ended; what was streamed stays valid, and the
    answer can be resumed."""

    reason = "READER_STALLED"


class RateLimited(QueueFull):
    """The caller has used up what its token allows for now; try again after `retry_after_s`."""

    reason = "RATE_LIMITED"


class MemoryFull(PacelineError):
    """There is no room for the tokens of a step; whoever plans steps makes room first."""

    reason = "KV_EXHAUSTED"
    retry_after_s = 1.0


class Draining(PacelineError):
    """The replica takes no new sessions, for it is about to stop; another one will."""

    reason = "DRAINING"
    retry_after_s = 1.0


class TargetUnavailable(PacelineError):
    """The target is gone or does not answer; nothing that was streamed is lost, but the answer cannot go on."""

    reason = "TARGET_UNAVAILABLE"
    retry_after_s = 1.0


class DrafterUnavailable(PacelineError):
    """The drafter is gone; the session goes on without it."""

    reason = "DRAFTER_UNAVAILABLE"
    retry_after_s = 1.0


class DeadlineExceeded(PacelineError):
    """The caller's time is used up."""

    reason = "DEADLINE_EXCEEDED"


class StartupFailed(PacelineError):
    """A service cannot start: its port is taken, its settings contradict each other, a peer refuses."""

    reason = "STARTUP_FAILED"
    retry_after_s = 1.0
