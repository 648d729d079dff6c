"""What backend services import: a typed, asynchronous client of `GenerationService`.

Light on purpose: gRPC and the generated code only. Importing it loads no torch, no Ray and no engine, so the few lines
that turn a request into a message stand here and not in `wire`.

    async with GenerationClient("127.0.0.1:50051") as client:
        async for event in client.generate(GenerationRequest(text="Once upon a time")):
            ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

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
from paceline.rpc import ERROR_DOMAIN, open_channel
from paceline.types import FinishReason, ModelInfo, Origin, SamplingParams, VerificationRule
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import session_pb2 as session_pb
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
        call = self._stub().Generate(request_to_message(request), timeout=timeout_s)
        last: Event | None = None
        try:
            async for response in call:
                event = _event_from(response)
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
        return ServerInfo(
            target=_model_info_from(response.target),
            drafter=_model_info_from(response.drafter) if response.HasField("drafter") else None,
            speculation=_options_from(response.speculation),
        )

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


# ---------------------------------------------------------------------------------------------------------------------
# Translation


def request_to_message(request: GenerationRequest) -> generation_pb.GenerateRequest:
    message = generation_pb.GenerateRequest(
        sampling=_sampling_message(request.sampling),
        stopping=_stopping_message(request.stopping),
        speculation=_speculation_message(request.speculation),
        seed=request.seed,
    )
    if request.text is not None:
        message.text = request.text
    if request.token_ids is not None:
        message.token_ids.CopyFrom(session_pb.TokenIds(ids=request.token_ids))
    if request.messages is not None:
        turns = [generation_pb.ChatMessage(role=turn.role, content=turn.content) for turn in request.messages]
        message.chat.CopyFrom(generation_pb.ChatMessages(messages=turns))
    return message


def _sampling_message(sampling: SamplingParams) -> session_pb.SamplingParams:
    allowed = sampling.allowed_token_ids
    return session_pb.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[session_pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        banned_token_ids=sampling.banned_token_ids,
        allowed_token_ids=None if allowed is None else session_pb.TokenIds(ids=allowed),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def _stopping_message(stopping: StopConditions) -> generation_pb.StopConditions:
    return generation_pb.StopConditions(
        max_tokens=stopping.max_tokens,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
    )


def _speculation_message(options: SpeculationOptions) -> generation_pb.SpeculationOptions:
    return generation_pb.SpeculationOptions(
        rule=_RULES_TO_PROTO[options.rule],
        draft_length=options.draft_length,
        schedule=_SCHEDULES_TO_PROTO[options.schedule],
    )


_RULES_TO_PROTO = {
    None: session_pb.VERIFICATION_RULE_UNSPECIFIED,
    VerificationRule.GREEDY: session_pb.VERIFICATION_RULE_GREEDY,
    VerificationRule.REJECTION: session_pb.VERIFICATION_RULE_REJECTION,
    VerificationRule.COUPLED: session_pb.VERIFICATION_RULE_COUPLED,
}
_SCHEDULES_TO_PROTO = {
    None: generation_pb.SCHEDULE_UNSPECIFIED,
    Schedule.PLAIN: generation_pb.SCHEDULE_PLAIN,
    Schedule.SEQUENTIAL: generation_pb.SCHEDULE_SEQUENTIAL,
    Schedule.PIPELINED: generation_pb.SCHEDULE_PIPELINED,
}
_RULES = {number: rule for rule, number in _RULES_TO_PROTO.items()}
_SCHEDULES = {number: schedule for schedule, number in _SCHEDULES_TO_PROTO.items()}
_ORIGINS = {
    generation_pb.TOKEN_ORIGIN_DRAFT: Origin.DRAFT,
    generation_pb.TOKEN_ORIGIN_CORRECTION: Origin.CORRECTION,
    generation_pb.TOKEN_ORIGIN_BONUS: Origin.BONUS,
    generation_pb.TOKEN_ORIGIN_PLAIN: Origin.PLAIN,
}
_FINISH_REASONS = {
    generation_pb.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}

Number = TypeVar("Number", bound=int)
Value = TypeVar("Value")


def _known(values: dict[Number, Value], number: Number) -> Value:
    if number not in values:
        raise PayloadInvalid("The server speaks a newer protocol than this client; update the client.")
    return values[number]


def _event_from(response: generation_pb.GenerateResponse) -> Event | None:
    """None for an event that this client is too old to know."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(request_id=started.request_id, seed=started.seed, prompt_tokens=started.prompt_tokens)
        case "delta":
            delta = response.delta
            return Delta(
                text=delta.text,
                token_ids=tuple(delta.token_ids),
                origins=tuple(_known(_ORIGINS, origin) for origin in delta.origins),
                pieces=tuple(delta.pieces),
            )
        case "finished":
            finished = response.finished
            return Finished(
                finish_reason=_known(_FINISH_REASONS, finished.finish_reason),
                text=finished.text,
                usage=Usage(
                    prompt_tokens=finished.usage.prompt_tokens, completion_tokens=finished.usage.completion_tokens
                ),
                speculation=_speculation_usage_from(finished.speculation),
            )
        case _:
            return None


def _speculation_usage_from(message: generation_pb.SpeculationUsage) -> SpeculationUsage:
    return SpeculationUsage(
        num_drafts=message.num_drafts,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(message.num_accepted_tokens_per_pos),
        num_draft_tokens_per_pos=tuple(message.num_draft_tokens_per_pos),
        acceptance_rate=message.acceptance_rate,
        mean_acceptance_length=message.mean_acceptance_length,
        per_token_acceptance=message.per_token_acceptance,
        rounds=message.rounds,
        plain_rounds=message.plain_rounds,
        fallback_rounds=message.fallback_rounds,
        target_busy_s=message.target_busy_s,
        draft_wait_s=message.draft_wait_s,
        elapsed_s=message.elapsed_s,
        rule=_known(_RULES, message.rule),
        schedule=_known(_SCHEDULES, message.schedule),
    )


def _options_from(message: generation_pb.SpeculationOptions) -> SpeculationOptions:
    return SpeculationOptions(
        rule=_known(_RULES, message.rule),
        draft_length=message.draft_length if message.HasField("draft_length") else None,
        schedule=_known(_SCHEDULES, message.schedule),
    )


def _model_info_from(message: session_pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        model_id=message.model_id,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        tokenizer_sha256=message.tokenizer_sha256,
        incarnation=message.incarnation,
        method=message.method,
        dtype=message.dtype,
        eos_token_ids=tuple(message.eos_token_ids),
    )
