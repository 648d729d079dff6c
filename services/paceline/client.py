"""What backend services import: a typed, asynchronous client of `GenerationService`.

Light on purpose: importing it loads gRPC and the generated code, but no torch, no Ray and no engine.

    async with GenerationClient("127.0.0.1:50051") as client:
        async for event in client.generate(GenerationRequest(text="Once upon a time")):
            ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DrafterUnavailable,
    InvalidRequest,
    LengthMismatch,
    ModelMismatch,
    ModelUnavailable,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    SessionNotFound,
    StaleEpoch,
    StartupFailed,
    TargetUnavailable,
)
from paceline.generation import (
    ChatMessage,
    Completion,
    CompletionBuilder,
    Delta,
    Event,
    Finished,
    GenerationRequest,
    IncompleteAnswer,
    Schedule,
    ServerInfo,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    StopConditions,
    Usage,
)
from paceline.generation_wire import event_from_proto, request_to_proto, server_info_from_proto
from paceline.rpc import ERROR_DOMAIN, open_channel
from paceline.types import FinishReason, Origin, SamplingParams, VerificationRule
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub

__all__ = [
    "ChatMessage",
    "Completion",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationClient",
    "GenerationRequest",
    "IncompleteAnswer",
    "Origin",
    "SamplingParams",
    "Schedule",
    "ServerInfo",
    "ServerUnavailable",
    "SpeculationOptions",
    "SpeculationUsage",
    "Started",
    "StopConditions",
    "Usage",
    "VerificationRule",
    "complete",
]

DEFAULT_TIMEOUT_S = 600.0
INFO_TIMEOUT_S = 10.0
_CANCELLED_SENTENCE = "The answer was cancelled before its end; ask again."


class ServerUnavailable(PacelineError):
    """No Paceline server answers at the endpoint, or it went away in mid-answer."""

    reason = "SERVER_UNAVAILABLE"


class GenerationClient:
    """One connection to an orchestrator, for any number of concurrent requests; an asynchronous context manager.

    Every method raises a `PacelineError`: `ServerUnavailable` if nothing answers, `DeadlineExceeded` after `timeout_s`,
    otherwise the error that the server reported, under its own reason.
    """

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is HOST:PORT; raises `InvalidRequest` if it is not."""
        self.endpoint = _checked_endpoint(endpoint)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[Event]:
        """Stream one answer: `Started`, any number of `Delta`, `Finished`.

        Closing the generator cancels the request at the server. Raises `IncompleteAnswer` if the stream ends without
        `Finished`, whatever its status says.
        """
        call = self._stub().Generate(request_to_proto(request), timeout=timeout_s)
        last: Event | None = None
        try:
            async for response in call:
                event = event_from_proto(response)
                if event is not None:
                    last = event
                    yield event
        except grpc.aio.AioRpcError as error:
            raise self._explain(error, timeout_s=timeout_s, in_mid_answer=last is not None) from error
        except asyncio.CancelledError as error:
            if _is_cancelled_by_caller():
                raise
            raise IncompleteAnswer(_CANCELLED_SENTENCE) from error
        finally:
            call.cancel()
        if not isinstance(last, Finished):
            raise IncompleteAnswer("The server's stream ended before the answer did; ask again.")

    async def complete(self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Completion:
        """The whole answer at once."""
        builder = CompletionBuilder()
        async with aclosing(self.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                builder.add(event)
        return builder.build()

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
        try:
            response = await self._stub().GetServerInfo(generation_pb.GetServerInfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._explain(error, timeout_s=timeout_s, in_mid_answer=False) from error
        return server_info_from_proto(response)

    def _stub(self) -> GenerationServiceStub:
        assert self._channel is not None, "use the client within `async with`"
        return GenerationServiceStub(self._channel)

    def _explain(self, error: grpc.aio.AioRpcError, *, timeout_s: float, in_mid_answer: bool) -> PacelineError:
        reported = reported_error(error)
        if reported is not None:
            return reported
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if in_mid_answer:
                return ServerUnavailable(f"The server at {self.endpoint} went away in mid-answer; ask again.")
            case grpc.StatusCode.UNAVAILABLE:
                return ServerUnavailable(f"Nothing answers at {self.endpoint}; start it with `paceline up`.")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded(
                    f"No whole answer within {timeout_s:g} s; allow more time or ask for fewer tokens."
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return ServerUnavailable(f"What answers at {self.endpoint} is not a Paceline orchestrator.")
            case grpc.StatusCode.CANCELLED:
                return IncompleteAnswer(_CANCELLED_SENTENCE)
            case code:
                return PacelineError(error.details() or f"The server failed with {code.name}.", reason=code.name)


def complete(endpoint: str, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Completion:
    """The whole answer, for scripts without an event loop; blocks. Raises what `GenerationClient.complete` raises."""

    async def run() -> Completion:
        async with GenerationClient(endpoint) as client:
            return await client.complete(request, timeout_s=timeout_s)

    return asyncio.run(run())


def _checked_endpoint(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"An endpoint is HOST:PORT, such as 127.0.0.1:50051, not {endpoint!r}.", parameter="endpoint"
        )
    return endpoint


def _is_cancelled_by_caller() -> bool:
    """gRPC raises CancelledError also when the channel is closed, which must not end a task that nobody cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


# ---------------------------------------------------------------------------------------------------------------------
# Errors

_ERRORS_BY_REASON: dict[str, type[PacelineError]] = {
    kind.reason: kind
    for kind in (
        PayloadInvalid,
        ContextTooLong,
        SessionNotFound,
        StaleEpoch,
        LengthMismatch,
        ModelMismatch,
        ModelUnavailable,
        TargetUnavailable,
        DrafterUnavailable,
        DeadlineExceeded,
        StartupFailed,
    )
}


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
    details = dict(info.metadata)
    match info.reason:
        case InvalidRequest.reason:
            return InvalidRequest(status.message, parameter=details.get("parameter", ""))
        case QueueFull.reason:
            return QueueFull(status.message, retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9)
        case reason:
            return _ERRORS_BY_REASON.get(reason, PacelineError)(status.message, reason=reason, details=details)


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
