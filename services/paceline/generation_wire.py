"""The values of `paceline.generation` to and from the messages of `generation_service.proto`, in both directions.

Light: clients import it, so it loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from paceline.errors import InvalidRequest, PayloadInvalid
from paceline.generation import (
    ChatMessage,
    Delta,
    DeploymentStatus,
    Event,
    Finished,
    GenerationRequest,
    OrchestratorStatus,
    OutputOptions,
    PoolStatus,
    ReplicaStatus,
    Schedule,
    ServedModel,
    ServerInfo,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    StopConditions,
    Usage,
)
from paceline.rounds import RoundRecord, TracedRounds
from paceline.types import DraftOrigin, FinishReason, Origin, TokenLogprobs
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.wire import (
    RULE_FROM_PROTO,
    RULE_TO_PROTO,
    info_from_proto,
    info_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

_SCHEDULE_TO_PROTO = {
    Schedule.PLAIN: generation_pb.SCHEDULE_PLAIN,
    Schedule.SEQUENTIAL: generation_pb.SCHEDULE_SEQUENTIAL,
    Schedule.PIPELINED: generation_pb.SCHEDULE_PIPELINED,
}
_ORIGIN_TO_PROTO = {
    Origin.DRAFT: generation_pb.TOKEN_ORIGIN_DRAFT,
    Origin.CORRECTION: generation_pb.TOKEN_ORIGIN_CORRECTION,
    Origin.BONUS: generation_pb.TOKEN_ORIGIN_BONUS,
    Origin.PLAIN: generation_pb.TOKEN_ORIGIN_PLAIN,
}
_FINISH_REASON_TO_PROTO = {
    FinishReason.STOP: generation_pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb.FINISH_REASON_LENGTH,
}
_DRAFT_ORIGIN_TO_PROTO = {
    DraftOrigin.AHEAD: generation_pb.DRAFT_ORIGIN_AHEAD,
    DraftOrigin.BRANCH: generation_pb.DRAFT_ORIGIN_BRANCH,
    DraftOrigin.REDRAFT: generation_pb.DRAFT_ORIGIN_REDRAFT,
    DraftOrigin.FALLBACK: generation_pb.DRAFT_ORIGIN_FALLBACK,
    DraftOrigin.NONE: generation_pb.DRAFT_ORIGIN_NONE,
}
_SCHEDULE_FROM_PROTO = {number: schedule for schedule, number in _SCHEDULE_TO_PROTO.items()}
_ORIGIN_FROM_PROTO = {number: origin for origin, number in _ORIGIN_TO_PROTO.items()}
_FINISH_REASON_FROM_PROTO = {number: reason for reason, number in _FINISH_REASON_TO_PROTO.items()}
_DRAFT_ORIGIN_FROM_PROTO = {number: origin for origin, number in _DRAFT_ORIGIN_TO_PROTO.items()}

Number = TypeVar("Number", bound=int)
Value = TypeVar("Value")


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def request_to_proto(request: GenerationRequest) -> generation_pb.GenerateRequest:
    stopping = request.stopping
    message = generation_pb.GenerateRequest(
        sampling=sampling_to_proto(request.sampling),
        stopping=generation_pb.StopConditions(
            max_tokens=stopping.max_tokens,
            stop=stopping.stop,
            stop_token_ids=stopping.stop_token_ids,
            ignore_eos=stopping.ignore_eos,
        ),
        speculation=_options_to_proto(request.speculation),
        seed=request.seed,
        output_ids=request.output_ids,
        logprobs=request.logprobs,
        n=request.n if request.n > 1 else None,
        tenant=request.tenant,
        model=request.model,
        output=_output_to_proto(request.output),
        request_id=request.request_id,
    )
    if request.text is not None:
        message.text = request.text
    if request.token_ids is not None:
        message.token_ids.CopyFrom(session_pb.TokenIds(ids=request.token_ids))
    if request.messages is not None:
        turns = [generation_pb.ChatMessage(role=turn.role, content=turn.content) for turn in request.messages]
        message.chat.CopyFrom(generation_pb.ChatMessages(messages=turns))
    return message


def request_from_proto(message: generation_pb.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequest`, which names the parameter."""
    prompt = message.WhichOneof("prompt")
    stopping = message.stopping
    return GenerationRequest(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.ids) if prompt == "token_ids" else None,
        messages=(
            tuple(ChatMessage(turn.role, turn.content) for turn in message.chat.messages) if prompt == "chat" else None
        ),
        sampling=sampling_from_proto(message.sampling),
        stopping=StopConditions(
            max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
            stop=tuple(stopping.stop),
            stop_token_ids=tuple(stopping.stop_token_ids),
            ignore_eos=stopping.ignore_eos,
        ),
        speculation=_options_from_proto(message.speculation),
        seed=message.seed if message.HasField("seed") else None,
        output_ids=tuple(message.output_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        n=message.n if message.HasField("n") else 1,
        tenant=message.tenant,
        model=message.model,
        output=_output_from_proto(message),
        request_id=message.request_id,
    )


def _output_to_proto(output: OutputOptions) -> generation_pb.OutputOptions | None:
    """None, which is shorter, for everything."""
    if output == OutputOptions():
        return None
    return generation_pb.OutputOptions(text=output.text, token_ids=output.token_ids, pieces=output.pieces)


def _output_from_proto(message: generation_pb.GenerateRequest) -> OutputOptions:
    if not message.HasField("output"):
        return OutputOptions()
    return OutputOptions(text=message.output.text, token_ids=message.output.token_ids, pieces=message.output.pieces)


def _options_to_proto(options: SpeculationOptions) -> generation_pb.SpeculationOptions:
    return generation_pb.SpeculationOptions(
        rule=RULE_TO_PROTO[options.rule] if options.rule else session_pb.VERIFICATION_RULE_UNSPECIFIED,
        draft_length=options.draft_length,
        schedule=_SCHEDULE_TO_PROTO[options.schedule] if options.schedule else generation_pb.SCHEDULE_UNSPECIFIED,
        fan_out=options.fan_out,
    )


def _options_from_proto(message: generation_pb.SpeculationOptions) -> SpeculationOptions:
    for parameter, number, known in (
        ("rule", message.rule, RULE_FROM_PROTO),
        ("schedule", message.schedule, _SCHEDULE_FROM_PROTO),
    ):
        if number and number not in known:
            raise InvalidRequest(f"{parameter} {number} is not known here; leave it out.", parameter=parameter)
    return SpeculationOptions(
        rule=RULE_FROM_PROTO.get(message.rule),
        draft_length=message.draft_length if message.HasField("draft_length") else None,
        schedule=_SCHEDULE_FROM_PROTO.get(message.schedule),
        fan_out=message.fan_out if message.HasField("fan_out") else None,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def event_to_proto(event: Event) -> generation_pb.GenerateResponse:
    match event:
        case Started():
            started = generation_pb.Started(
                request_id=event.request_id, seed=event.seed, prompt_tokens=event.prompt_tokens, seeds=event.seeds
            )
            return generation_pb.GenerateResponse(started=started)
        case Delta():
            # A mapping, not a message, which would be made first and then copied: this is done for every round.
            fields: Any = {
                "text": event.text,
                "token_ids": event.token_ids,
                "origins": [_ORIGIN_TO_PROTO[origin] for origin in event.origins],
                "pieces": event.pieces,
                "logprobs": [_logprobs_to_proto(entry) for entry in event.logprobs],
                "choice": event.choice,
            }
            return generation_pb.GenerateResponse(delta=fields)
        case Finished():
            finished = generation_pb.Finished(
                finish_reason=_FINISH_REASON_TO_PROTO[event.finish_reason],
                text=event.text,
                usage=generation_pb.Usage(
                    prompt_tokens=event.usage.prompt_tokens, completion_tokens=event.usage.completion_tokens
                ),
                speculation=_usage_to_proto(event.speculation),
                resumed_tokens=event.resumed_tokens,
                choice=event.choice,
            )
            return generation_pb.GenerateResponse(finished=finished)


def event_from_proto(response: generation_pb.GenerateResponse) -> Event | None:
    """None for an event that this client is too old to know; raises `PayloadInvalid` for what it cannot read."""
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return Started(
                request_id=started.request_id,
                seeds=tuple(started.seeds) or (started.seed,),
                prompt_tokens=started.prompt_tokens,
            )
        case "delta":
            delta = response.delta
            return Delta(
                text=delta.text,
                token_ids=tuple(delta.token_ids),
                origins=tuple(_known(_ORIGIN_FROM_PROTO, origin) for origin in delta.origins),
                pieces=tuple(delta.pieces),
                logprobs=_logprobs_from_proto(delta),
                choice=delta.choice,
            )
        case "finished":
            finished = response.finished
            return Finished(
                finish_reason=_known(_FINISH_REASON_FROM_PROTO, finished.finish_reason),
                text=finished.text,
                usage=Usage(
                    prompt_tokens=finished.usage.prompt_tokens, completion_tokens=finished.usage.completion_tokens
                ),
                speculation=_usage_from_proto(finished.speculation),
                resumed_tokens=finished.resumed_tokens,
                choice=finished.choice,
            )
        case _:
            return None


def _logprobs_to_proto(logprobs: TokenLogprobs) -> generation_pb.TokenLogprobs:
    return generation_pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
        top_pieces=logprobs.top_pieces,
    )


def _logprobs_from_proto(delta: generation_pb.Delta) -> tuple[TokenLogprobs, ...]:
    if len(delta.logprobs) not in (0, len(delta.token_ids)):
        raise PayloadInvalid(
            f"The server sent {len(delta.token_ids)} tokens with {len(delta.logprobs)} log-probabilities; ask again."
        )
    return tuple(
        TokenLogprobs(
            token_id,
            entry.logprob,
            tuple(zip(entry.top_ids, entry.top_logprobs, strict=False)),
            tuple(entry.top_pieces),
        )
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False)
    )


def _known(values: dict[Number, Value], number: Number) -> Value:
    if number not in values:
        raise PayloadInvalid("The server speaks a newer protocol than this client; update the client.")
    return values[number]


def _usage_to_proto(usage: SpeculationUsage) -> generation_pb.SpeculationUsage:
    return generation_pb.SpeculationUsage(
        num_drafts=usage.num_drafts,
        num_draft_tokens=usage.num_draft_tokens,
        num_accepted_tokens=usage.num_accepted_tokens,
        num_accepted_tokens_per_pos=usage.num_accepted_tokens_per_pos,
        num_draft_tokens_per_pos=usage.num_draft_tokens_per_pos,
        acceptance_rate=usage.acceptance_rate,
        mean_acceptance_length=usage.mean_acceptance_length,
        per_token_acceptance=usage.per_token_acceptance,
        rounds=usage.rounds,
        plain_rounds=usage.plain_rounds,
        fallback_rounds=usage.fallback_rounds,
        ahead_rounds=usage.ahead_rounds,
        branch_rounds=usage.branch_rounds,
        redraft_rounds=usage.redraft_rounds,
        num_rejections=usage.num_rejections,
        branch_hits=usage.branch_hits,
        num_received_draft_tokens=usage.num_received_draft_tokens,
        target_busy_s=usage.target_busy_s,
        draft_wait_s=usage.draft_wait_s,
        elapsed_s=usage.elapsed_s,
        rule=RULE_TO_PROTO[usage.rule] if usage.rule else session_pb.VERIFICATION_RULE_UNSPECIFIED,
        schedule=_SCHEDULE_TO_PROTO[usage.schedule] if usage.schedule else generation_pb.SCHEDULE_UNSPECIFIED,
    )


def _usage_from_proto(message: generation_pb.SpeculationUsage) -> SpeculationUsage:
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
        ahead_rounds=message.ahead_rounds,
        branch_rounds=message.branch_rounds,
        redraft_rounds=message.redraft_rounds,
        num_rejections=message.num_rejections,
        branch_hits=message.branch_hits,
        num_received_draft_tokens=message.num_received_draft_tokens,
        target_busy_s=message.target_busy_s,
        draft_wait_s=message.draft_wait_s,
        elapsed_s=message.elapsed_s,
        rule=RULE_FROM_PROTO.get(message.rule),
        schedule=_SCHEDULE_FROM_PROTO.get(message.schedule),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Servers


def server_info_to_proto(info: ServerInfo) -> generation_pb.GetServerInfoResponse:
    return generation_pb.GetServerInfoResponse(
        target=info_to_proto(info.target),
        drafter=info_to_proto(info.drafter) if info.drafter else None,
        speculation=_options_to_proto(info.speculation),
        version=info.version,
        clock_unix_ms=info.clock_unix_ms,
    )


def server_info_from_proto(message: generation_pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        target=info_from_proto(message.target),
        drafter=info_from_proto(message.drafter) if message.HasField("drafter") else None,
        speculation=_options_from_proto(message.speculation),
        version=message.version,
        clock_unix_ms=message.clock_unix_ms,
    )


def served_models_to_proto(models: Sequence[ServedModel]) -> generation_pb.ListModelsResponse:
    return generation_pb.ListModelsResponse(
        models=[
            generation_pb.ServedModel(
                name=model.name,
                target=info_to_proto(model.target),
                drafter=info_to_proto(model.drafter) if model.drafter else None,
                speculation=_options_to_proto(model.speculation),
                default_max_tokens=model.default_max_tokens,
                max_prompt_tokens=model.max_prompt_tokens,
                max_choices=model.max_choices,
            )
            for model in models
        ]
    )


def served_models_from_proto(message: generation_pb.ListModelsResponse) -> tuple[ServedModel, ...]:
    return tuple(
        ServedModel(
            name=model.name,
            target=info_from_proto(model.target),
            drafter=info_from_proto(model.drafter) if model.HasField("drafter") else None,
            speculation=_options_from_proto(model.speculation),
            default_max_tokens=model.default_max_tokens,
            max_prompt_tokens=model.max_prompt_tokens,
            max_choices=model.max_choices,
        )
        for model in message.models
    )


def deployment_status_to_proto(status: DeploymentStatus) -> generation_pb.GetPoolStatusResponse:
    return generation_pb.GetPoolStatusResponse(
        pools=[
            generation_pb.PoolStatus(
                name=pool.name,
                desired_replicas=pool.desired_replicas,
                replicas=[_replica_to_proto(replica) for replica in pool.replicas],
            )
            for pool in status.pools
        ],
        orchestrator=generation_pb.OrchestratorStatus(
            running_answers=status.orchestrator.running_answers,
            max_answers=status.orchestrator.max_answers,
            stall_fraction=status.orchestrator.stall_fraction,
            replica_id=status.orchestrator.replica_id,
            node_id=status.orchestrator.node_id,
            waiting_requests=status.orchestrator.waiting_requests,
        ),
    )


def deployment_status_from_proto(message: generation_pb.GetPoolStatusResponse) -> DeploymentStatus:
    orchestrator = message.orchestrator
    return DeploymentStatus(
        pools=tuple(
            PoolStatus(
                name=pool.name,
                desired_replicas=pool.desired_replicas if pool.HasField("desired_replicas") else None,
                replicas=tuple(_replica_from_proto(replica) for replica in pool.replicas),
            )
            for pool in message.pools
        ),
        orchestrator=OrchestratorStatus(
            running_answers=orchestrator.running_answers,
            max_answers=orchestrator.max_answers,
            stall_fraction=orchestrator.stall_fraction if orchestrator.HasField("stall_fraction") else None,
            replica_id=orchestrator.replica_id,
            node_id=orchestrator.node_id,
            waiting_requests=orchestrator.waiting_requests,
        ),
    )


def _replica_to_proto(replica: ReplicaStatus) -> generation_pb.ReplicaStatus:
    return generation_pb.ReplicaStatus(
        replica_id=replica.replica_id,
        address=replica.address,
        node_id=replica.node_id,
        model_id=replica.model_id,
        sessions=replica.sessions,
        max_sessions=replica.max_sessions,
        queued=replica.queued,
        kv_used_tokens=replica.kv_used_tokens,
        kv_capacity_tokens=replica.kv_capacity_tokens,
        acceptance_rate=replica.acceptance_rate,
        is_draining=replica.is_draining,
        is_connected=replica.is_connected,
        version=replica.version,
        refusal=replica.refusal,
        preemptions=replica.preemptions,
    )


def _replica_from_proto(message: generation_pb.ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id=message.replica_id,
        address=message.address,
        node_id=message.node_id,
        model_id=message.model_id,
        sessions=message.sessions,
        max_sessions=message.max_sessions,
        queued=message.queued,
        kv_used_tokens=message.kv_used_tokens,
        kv_capacity_tokens=message.kv_capacity_tokens,
        acceptance_rate=message.acceptance_rate if message.HasField("acceptance_rate") else None,
        is_draining=message.is_draining,
        is_connected=message.is_connected,
        version=message.version,
        refusal=message.refusal,
        preemptions=message.preemptions,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The round trace


def traced_rounds_to_proto(traced: TracedRounds) -> generation_pb.GetRoundTraceResponse:
    """Pieces that follow one another are merged as messages, in their order."""
    return generation_pb.GetRoundTraceResponse(
        records=[_record_to_proto(record) for record in traced.records],
        dropped=traced.dropped,
        clock_offset_s=traced.clock_offset_s,
        is_emulated=traced.is_emulated,
        orchestrator_id=traced.orchestrator_id,
    )


def traced_rounds_from_proto(message: generation_pb.GetRoundTraceResponse) -> TracedRounds:
    """Raises `PayloadInvalid` for an origin of a draft that this client is too old to know."""
    return TracedRounds(
        records=tuple(_record_from_proto(record) for record in message.records),
        dropped=message.dropped,
        clock_offset_s=message.clock_offset_s,
        is_emulated=message.is_emulated,
        orchestrator_id=message.orchestrator_id,
    )


def _record_to_proto(record: RoundRecord) -> generation_pb.RoundRecord:
    message = generation_pb.RoundRecord(
        session_id=record.session_id,
        number=record.number,
        committed_length=record.committed_length,
        began_s=record.began_s,
        draft_s=record.draft_s,
        verdict_s=record.verdict_s,
        ended_s=record.ended_s,
        queue_time_s=record.queue_time_s,
        step_time_s=record.step_time_s,
        step_sessions=record.step_sessions,
        step_tokens=record.step_tokens,
        draft_origin=_DRAFT_ORIGIN_TO_PROTO[record.draft_origin],
        draft_arrived_s=record.draft_arrived_s,
        draft_time_s=record.draft_time_s,
        draft_steps=record.draft_steps,
        available=record.available,
        draft_length=record.draft_length,
        kept_length=record.kept_length,
        emitted=record.emitted,
        ordered_draft_length=record.ordered_draft_length,
        credit=record.credit,
        branches=record.branches,
        fan_out=record.fan_out,
        reason=record.reason,
    )
    if record.has_continuation is not None:
        message.has_continuation = record.has_continuation
    return message


def _record_from_proto(message: generation_pb.RoundRecord) -> RoundRecord:
    return RoundRecord(
        session_id=message.session_id,
        number=message.number,
        committed_length=message.committed_length,
        began_s=message.began_s,
        draft_s=message.draft_s,
        verdict_s=message.verdict_s,
        ended_s=message.ended_s,
        queue_time_s=message.queue_time_s,
        step_time_s=message.step_time_s,
        step_sessions=message.step_sessions,
        step_tokens=message.step_tokens,
        draft_origin=_known(_DRAFT_ORIGIN_FROM_PROTO, message.draft_origin),
        draft_arrived_s=message.draft_arrived_s if message.HasField("draft_arrived_s") else None,
        draft_time_s=message.draft_time_s,
        draft_steps=message.draft_steps,
        available=message.available,
        draft_length=message.draft_length,
        kept_length=message.kept_length,
        emitted=message.emitted,
        has_continuation=message.has_continuation if message.HasField("has_continuation") else None,
        ordered_draft_length=message.ordered_draft_length,
        credit=message.credit,
        branches=message.branches,
        fan_out=message.fan_out,
        reason=message.reason,
    )
