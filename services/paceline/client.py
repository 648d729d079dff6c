"""What backend services import: a typed, asynchronous client of `GenerationService`.

Light on purpose: importing it loads gRPC and the generated code, but no torch, no Ray and no engine.

    async with GenerationClient("127.0.0.1:50051") as client:
        async for event in client.generate(GenerationRequest(text="Once upon a time")):
            ...
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DrafterUnavailable,
    Draining,
    InvalidRequest,
    LengthMismatch,
    ModelMismatch,
    ModelUnavailable,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    RateLimited,
    SessionNotFound,
    StaleEpoch,
    StartupFailed,
    TargetUnavailable,
    Unauthenticated,
)
from paceline.generation import (
    ChatMessage,
    Completion,
    CompletionBuilder,
    Delta,
    DeploymentStatus,
    Event,
    Finished,
    GenerationRequest,
    IncompleteAnswer,
    OrchestratorStatus,
    PoolStatus,
    ReplicaStatus,
    Schedule,
    ServerInfo,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    StopConditions,
    Usage,
)
from paceline.generation_wire import (
    deployment_status_from_proto,
    event_from_proto,
    request_to_proto,
    server_info_from_proto,
    traced_rounds_from_proto,
)
from paceline.interleaving import interleaved
from paceline.rounds import RoundRecord, TracedRounds
from paceline.rpc import APPLICATION_METADATA, DEADLINE_METADATA_KEY, ERROR_DOMAIN, open_channel
from paceline.types import DraftOrigin, FinishReason, Origin, SamplingParams, TokenLogprobs, VerificationRule
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub

__all__ = [
    "ChatMessage",
    "Completion",
    "Delta",
    "DeploymentStatus",
    "DraftOrigin",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationClient",
    "GenerationRequest",
    "IncompleteAnswer",
    "OrchestratorStatus",
    "Origin",
    "PoolStatus",
    "ReplicaStatus",
    "RoundRecord",
    "SamplingParams",
    "Schedule",
    "ServerInfo",
    "ServerUnavailable",
    "SpeculationOptions",
    "SpeculationUsage",
    "Started",
    "StopConditions",
    "TokenLogprobs",
    "TracedRounds",
    "Usage",
    "VerificationRule",
    "complete",
]

ReplyT = TypeVar("ReplyT")

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RESUMPTIONS = 8
INFO_TIMEOUT_S = 10.0

_FIRST_TRIES = 3  # calls that find nobody, before any answer has begun
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_LATEST_DEADLINE_S = 1e12  # since 1970: for ever, for all purposes
_CANCELLED_SENTENCE = "The answer was cancelled before its end; ask again."

# What a dying server, or a proxy before it, makes of a stream that is not at its end.
_BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)


class ServerUnavailable(PacelineError):
    """No Paceline server answers at the endpoint, or it went away in mid-answer."""

    reason = "SERVER_UNAVAILABLE"


class GenerationClient:
    """One connection to an orchestrator, for any number of concurrent requests; an asynchronous context manager.

    An answer whose stream breaks in its middle is resumed: the client calls again, with the seed and the tokens it has,
    and whichever orchestrator answers at the endpoint goes on from there; of a request for several answers each goes on
    by itself. Every method raises a `PacelineError`:
    `ServerUnavailable` if nothing answers, `DeadlineExceeded` after `timeout_s`, otherwise the error that the server
    reported, under its own reason.
    """

    def __init__(
        self, endpoint: str, *, max_resumptions: int = DEFAULT_RESUMPTIONS, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        """`endpoint` is HOST:PORT; raises `InvalidRequest` if it is not.

        `max_resumptions` is how often in a row an answer is taken up again without a new token coming; 0: never.
        `first_pause_s` comes before the first of them, and each further one waits twice as long, up to 2 s, or as long
        as the server asked for.
        """
        self.endpoint = _checked_endpoint(endpoint)
        self._max_resumptions, self._first_pause_s = max_resumptions, first_pause_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # First of all, so that the streams which break now are not resumed.
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[Event]:
        """Stream one answer: `Started`, any number of `Delta`, `Finished`, without a gap or a repetition.

        With n > 1 the events of all choices are mixed, those of one choice in their order, and each has its `Finished`.
        Closing the generator cancels the request at the server. Raises `IncompleteAnswer` if the stream ends without
        `Finished`, whatever its status says, and cannot be resumed. Resumed under `greedy` and `coupled`, the answer is
        the very one that was interrupted; under `rejection` it has the same law.
        """
        limit = _TimeLimit(timeout_s)
        several = request.n > 1
        missing = self._choices(_Choices(request, limit)) if several else self._answer(_Answer(request, limit))
        async with aclosing(missing) as events:
            async for event in events:
                yield event

    async def complete(self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Completion:
        """The whole answer at once. Raises `InvalidRequest` where several are asked for: see `complete_choices`."""
        if request.n != 1:
            raise InvalidRequest("complete gives one answer; with n above 1 call complete_choices.", parameter="n")
        (completion,) = await self.complete_choices(request, timeout_s=timeout_s)
        return completion

    async def complete_choices(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Completion, ...]:
        """The whole answers to one prompt at once, `request.n` of them, in the order of their numbers."""
        builder = CompletionBuilder()
        async with aclosing(self.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                builder.add(event)
        return builder.build_choices()

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
        request = generation_pb.GetServerInfoRequest()
        return server_info_from_proto(await self._ask(self._stub().GetServerInfo, request, timeout_s=timeout_s))

    async def pool_status(self, *, timeout_s: float = INFO_TIMEOUT_S) -> DeploymentStatus:
        """The pools as one orchestrator sees them, and how busy it is; behind an endpoint there may be several."""
        request = generation_pb.GetPoolStatusRequest()
        return deployment_status_from_proto(await self._ask(self._stub().GetPoolStatus, request, timeout_s=timeout_s))

    async def round_trace(
        self, *, request_id: str = "", limit: int = 0, timeout_s: float = INFO_TIMEOUT_S
    ) -> TracedRounds:
        """The last `limit` rounds (0: all) that one orchestrator remembers, of one request alone if its id is given.

        `request_id` is `Started.request_id`; of a request for several answers, all of them. Behind an endpoint there may
        be several orchestrators, each of which knows its own rounds.
        """
        request = generation_pb.GetRoundTraceRequest(request_id=request_id, limit=limit)
        return traced_rounds_from_proto(await self._ask(self._stub().GetRoundTrace, request, timeout_s=timeout_s))

    async def _ask(self, method: Callable[..., Awaitable[ReplyT]], request: Message, *, timeout_s: float) -> ReplyT:
        """The one reply to a question about the server."""
        try:
            return await method(request, timeout=timeout_s, metadata=(APPLICATION_METADATA,))
        except grpc.aio.AioRpcError as error:
            late = f"No reply from {self.endpoint} within {timeout_s:g} s; allow more time, or see how busy it is."
            raise self._explain(error, late=late) from error

    async def _answer(self, answer: _Answer, interruption: _Interrupted | None = None) -> AsyncGenerator[Event]:
        """What is missing of one answer, in as many calls as it takes; `interruption` is what ended the last one."""
        while True:
            if interruption is not None:
                await self._pause(answer, interruption)
            try:
                async with aclosing(self._call(answer)) as events:
                    async for event in events:
                        yield event
                return
            except _Interrupted as error:
                interruption = error

    async def _choices(self, choices: _Choices) -> AsyncGenerator[Event]:
        """All choices of a request: in one call, and from where that breaks in one call for each that is not whole."""
        while not choices.has_started:
            try:
                async with aclosing(self._call(choices)) as events:
                    async for event in events:
                        yield event
                return
            except _Interrupted as error:
                interruption = error
            if not choices.has_started:
                await self._pause(choices, interruption)
        async with aclosing(
            interleaved([self._answer(answer, interruption) for answer in choices.unfinished])
        ) as events:
            async for event in events:
                yield event

    async def _call(self, asked: _Asked) -> AsyncGenerator[Event]:
        """The events of one call that the caller has not seen. Raises `_Interrupted` where another call may help."""
        call = self._stub().Generate(
            request_to_proto(asked.next_request()),
            timeout=asked.limit.remaining_s,
            metadata=(APPLICATION_METADATA, (DEADLINE_METADATA_KEY, str(asked.limit.deadline_unix_ms))),
        )
        has_begun = False
        try:
            async for response in call:
                event = event_from_proto(response)
                if event is None:
                    continue
                has_begun = True
                fresh = asked.take(event)
                if fresh is not None:
                    yield fresh
        except grpc.aio.AioRpcError as error:
            if asked.is_finished:
                return  # the answer is whole, whatever became of the connection then
            late = f"No whole answer within {asked.limit.timeout_s:g} s; allow more time or ask for fewer tokens."
            failure = self._explain(error, late=late, in_mid_answer=asked.has_started)
            if _may_be_resumed(error, failure, asked, has_begun=has_begun):
                raise _Interrupted(failure) from error
            raise failure from error
        except asyncio.CancelledError as error:
            if _is_cancelled_by_caller():
                raise
            if asked.is_finished:
                return
            raise _Interrupted(IncompleteAnswer(_CANCELLED_SENTENCE)) from error
        finally:
            call.cancel()
        if not asked.is_finished:
            raise _Interrupted(IncompleteAnswer("The server's stream ended before the answer did; ask again."))

    async def _pause(self, asked: _Asked, interruption: _Interrupted) -> None:
        """Wait before the next call; raises what ended the last one if there is to be none."""
        failure = interruption.failure
        pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2.0 ** min(asked.failures, 32))
        # Clients that lost the same server must not come back all at once.
        pause_s = max(pause_s, failure.retry_after_s or 0.0) * random.uniform(1.0, 1.25)
        asked.failures += 1
        if asked.failures <= self._most_failures(asked, failure) and pause_s < asked.limit.remaining_s:
            await asyncio.sleep(pause_s)
            if self._channel is not None:
                return
        raise failure from interruption.__cause__

    def _most_failures(self, asked: _Asked, failure: PacelineError) -> int:
        """Failures in a row after which another call is made."""
        if asked.has_started:
            return self._max_resumptions
        # Nothing is lost yet: a server that restarts is waited for briefly, any other trouble is the caller's to judge.
        return min(_FIRST_TRIES - 1, self._max_resumptions) if isinstance(failure, ServerUnavailable) else 0

    def _stub(self) -> GenerationServiceStub:
        assert self._channel is not None, "use the client within `async with`"
        return GenerationServiceStub(self._channel)

    def _explain(self, error: grpc.aio.AioRpcError, *, late: str, in_mid_answer: bool = False) -> PacelineError:
        """The error in our words; `late` are those for a deadline that has passed."""
        reported = reported_error(error)
        if reported is not None:
            return reported
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if in_mid_answer:
                return ServerUnavailable(f"The server at {self.endpoint} went away in mid-answer; ask again.")
            case grpc.StatusCode.UNAVAILABLE:
                return ServerUnavailable(
                    f"Nothing answers at {self.endpoint}; start it with `paceline up` or `paceline serve`."
                )
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return DeadlineExceeded(late)
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
# Resumption. The counting is our own: a retry library's begins with a call and ends with its result, this one begins
# again with each token that comes.


class _Interrupted(Exception):
    """A call has ended before its answer, in a way that another call may mend."""

    def __init__(self, failure: PacelineError) -> None:
        super().__init__(failure.message)
        self.failure = failure  # what the caller is told if no other call is made


class _TimeLimit:
    """Until when the caller waits, over all calls."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.deadline_unix_ms = int(min(time.time() + timeout_s, _LATEST_DEADLINE_S) * 1000)
        self._deadline_s = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        return self._deadline_s - time.monotonic()


class _Asked(Protocol):
    """What one call asks for: an answer, or all choices of a request together."""

    limit: _TimeLimit
    failures: int  # calls in a row that brought no token

    @property
    def has_started(self) -> bool: ...

    @property
    def has_tokens(self) -> bool: ...

    @property
    def is_finished(self) -> bool: ...

    def next_request(self) -> GenerationRequest: ...

    def take(self, event: Event) -> Event | None: ...


class _Answer:
    """What has come of one answer, over all calls for it. Invariant: `take` has let each token through once."""

    def __init__(self, request: GenerationRequest, limit: _TimeLimit, *, choice: int = 0) -> None:
        self.limit, self.failures = limit, 0
        self.is_finished = False
        self._request, self._choice = request, choice
        self._started: Started | None = None
        self._token_ids: list[int] = []
        self._resumptions = 0

    @property
    def has_started(self) -> bool:
        return self._started is not None

    @property
    def has_tokens(self) -> bool:
        return bool(self._token_ids)

    def next_request(self) -> GenerationRequest:
        """Asks for what is missing."""
        if self._started is None:
            return self._request
        output_ids = (*self._request.output_ids, *self._token_ids)
        return replace(self._request, n=1, seed=self._started.seed, output_ids=output_ids)

    def take(self, event: Event) -> Event | None:
        """What of an event the caller gets, under the number that the answer has for the caller.

        Raises `ModelMismatch` if another model has taken the answer up, and `PayloadInvalid` if the server leaves out
        what was asked for.
        """
        match event:
            case Started():
                return self._take_started(event)
            case Delta():
                self._check_logprobs(event)
                self._token_ids += event.token_ids
                self.failures = 0 if event.token_ids else self.failures
                return replace(event, choice=self._choice)
            case Finished():
                self.is_finished = True
                return replace(event, resumptions=self._resumptions, choice=self._choice)

    def _take_started(self, event: Started) -> Started | None:
        if self._started is None:
            self._started = event
            return event
        if event.prompt_tokens != self._started.prompt_tokens:
            raise ModelMismatch(
                f"The prompt was {self._started.prompt_tokens} tokens long and is {event.prompt_tokens} where the answer "
                "was to go on, so another model answers now; ask again."
            )
        self._resumptions += 1
        return None

    def _check_logprobs(self, event: Delta) -> None:
        if self._request.logprobs is not None and len(event.logprobs) != len(event.token_ids):
            raise PayloadInvalid("The server gives no log-probabilities; it is older than this client.")


class _Choices:
    """All choices of one request, as long as one call brings them. They start together; then each goes its own way."""

    def __init__(self, request: GenerationRequest, limit: _TimeLimit) -> None:
        self.limit, self.failures = limit, 0
        self._request = request
        self._answers = [_Answer(request, limit, choice=choice) for choice in range(request.n)]

    @property
    def unfinished(self) -> list[_Answer]:
        return [answer for answer in self._answers if not answer.is_finished]

    @property
    def has_started(self) -> bool:
        return self._answers[0].has_started

    @property
    def has_tokens(self) -> bool:
        return any(answer.has_tokens for answer in self._answers)

    @property
    def is_finished(self) -> bool:
        return not self.unfinished

    def next_request(self) -> GenerationRequest:
        return self._request

    def take(self, event: Event) -> Event | None:
        """As `_Answer.take`; raises `PayloadInvalid` if the server gives another number of answers."""
        if isinstance(event, Started):
            if len(event.seeds) != len(self._answers):
                raise PayloadInvalid(
                    f"The server gives {len(event.seeds)} answers, not {len(self._answers)}; it is older than this client."
                )
            for answer, seed in zip(self._answers, event.seeds, strict=True):
                answer.take(replace(event, seeds=(seed,)))
            return event
        if event.choice >= len(self._answers):
            raise PayloadInvalid(
                f"The server sent tokens of answer {event.choice}, of {len(self._answers)}; ask again."
            )
        return self._answers[event.choice].take(event)


def _may_be_resumed(error: grpc.aio.AioRpcError, failure: PacelineError, asked: _Asked, *, has_begun: bool) -> bool:
    """Whether another call may go on where this one ended, of which any event came if it `has_begun`.

    It may not where the request itself is at fault.
    """
    if reported_error(error) is not None:
        # An orchestrator tries itself to go on at another target for as long as it is told to; full and draining are its
        # own troubles, which another one need not have. Without a token nothing is lost: the caller may judge.
        return asked.has_tokens and isinstance(failure, Draining | QueueFull)
    # Full is a place where the answer was to go on, before it does; later it is a message too large to be sent.
    return error.code() in _BROKEN or (error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not has_begun)


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
        Draining,
        DeadlineExceeded,
        StartupFailed,
        Unauthenticated,
        RateLimited,
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
            reported = _ERRORS_BY_REASON.get(reason, PacelineError)(status.message, reason=reason, details=details)
            reported.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9 or reported.retry_after_s
            return reported


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == rpc_status.GRPC_DETAILS_METADATA_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
