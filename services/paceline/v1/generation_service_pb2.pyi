from paceline.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_UNSPECIFIED: _ClassVar[Schedule]
    SCHEDULE_PLAIN: _ClassVar[Schedule]
    SCHEDULE_SEQUENTIAL: _ClassVar[Schedule]
    SCHEDULE_PIPELINED: _ClassVar[Schedule]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_DRAFT: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_CORRECTION: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_PLAIN: _ClassVar[TokenOrigin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class DraftOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_ORIGIN_UNSPECIFIED: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_AHEAD: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_BRANCH: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_REDRAFT: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_FALLBACK: _ClassVar[DraftOrigin]
    DRAFT_ORIGIN_NONE: _ClassVar[DraftOrigin]
SCHEDULE_UNSPECIFIED: Schedule
SCHEDULE_PLAIN: Schedule
SCHEDULE_SEQUENTIAL: Schedule
SCHEDULE_PIPELINED: Schedule
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_DRAFT: TokenOrigin
TOKEN_ORIGIN_CORRECTION: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin
TOKEN_ORIGIN_PLAIN: TokenOrigin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
DRAFT_ORIGIN_UNSPECIFIED: DraftOrigin
DRAFT_ORIGIN_AHEAD: DraftOrigin
DRAFT_ORIGIN_BRANCH: DraftOrigin
DRAFT_ORIGIN_REDRAFT: DraftOrigin
DRAFT_ORIGIN_FALLBACK: DraftOrigin
DRAFT_ORIGIN_NONE: DraftOrigin

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("rule", "draft_length", "schedule", "fan_out")
    RULE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    rule: _session_pb2.VerificationRule
    draft_length: int
    schedule: Schedule
    fan_out: int
    def __init__(self, rule: _Optional[_Union[_session_pb2.VerificationRule, str]] = ..., draft_length: _Optional[int] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., fan_out: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "sampling", "stopping", "speculation", "seed", "output_ids", "logprobs", "n", "tenant", "model", "output", "request_id")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _session_pb2.TokenIds
    chat: ChatMessages
    sampling: _session_pb2.SamplingParams
    stopping: StopConditions
    speculation: SpeculationOptions
    seed: int
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    n: int
    tenant: str
    model: str
    output: OutputOptions
    request_id: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_session_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[_session_pb2.SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StopConditions, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., seed: _Optional[int] = ..., output_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("text", "token_ids", "pieces")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    text: bool
    token_ids: bool
    pieces: bool
    def __init__(self, text: bool = ..., token_ids: bool = ..., pieces: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("was_running",)
    WAS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    was_running: bool
    def __init__(self, was_running: bool = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "prompt_tokens", "seeds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    prompt_tokens: int
    seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "origins", "pieces", "logprobs", "choice")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    choice: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., pieces: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "top_pieces")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_PIECES_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_pieces: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., top_pieces: _Optional[_Iterable[str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class SpeculationUsage(_message.Message):
    __slots__ = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "num_draft_tokens_per_pos", "acceptance_rate", "mean_acceptance_length", "per_token_acceptance", "rounds", "plain_rounds", "fallback_rounds", "target_busy_s", "draft_wait_s", "elapsed_s", "rule", "schedule", "num_rejections", "branch_hits", "num_received_draft_tokens", "ahead_rounds", "branch_rounds", "redraft_rounds")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTIONS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    REDRAFT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    acceptance_rate: float
    mean_acceptance_length: float
    per_token_acceptance: float
    rounds: int
    plain_rounds: int
    fallback_rounds: int
    target_busy_s: float
    draft_wait_s: float
    elapsed_s: float
    rule: _session_pb2.VerificationRule
    schedule: Schedule
    num_rejections: int
    branch_hits: int
    num_received_draft_tokens: int
    ahead_rounds: int
    branch_rounds: int
    redraft_rounds: int
    def __init__(self, num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ..., num_draft_tokens_per_pos: _Optional[_Iterable[int]] = ..., acceptance_rate: _Optional[float] = ..., mean_acceptance_length: _Optional[float] = ..., per_token_acceptance: _Optional[float] = ..., rounds: _Optional[int] = ..., plain_rounds: _Optional[int] = ..., fallback_rounds: _Optional[int] = ..., target_busy_s: _Optional[float] = ..., draft_wait_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., rule: _Optional[_Union[_session_pb2.VerificationRule, str]] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., num_rejections: _Optional[int] = ..., branch_hits: _Optional[int] = ..., num_received_draft_tokens: _Optional[int] = ..., ahead_rounds: _Optional[int] = ..., branch_rounds: _Optional[int] = ..., redraft_rounds: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "text", "usage", "speculation", "resumed_tokens", "choice")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    text: str
    usage: Usage
    speculation: SpeculationUsage
    resumed_tokens: int
    choice: int
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationUsage, _Mapping]] = ..., resumed_tokens: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("target", "drafter", "speculation", "version", "clock_unix_ms")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    target: _session_pb2.ModelInfo
    drafter: _session_pb2.ModelInfo
    speculation: SpeculationOptions
    version: str
    clock_unix_ms: int
    def __init__(self, target: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ..., drafter: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., version: _Optional[str] = ..., clock_unix_ms: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    def __init__(self, models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "target", "drafter", "speculation", "default_max_tokens", "max_prompt_tokens", "max_choices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    target: _session_pb2.ModelInfo
    drafter: _session_pb2.ModelInfo
    speculation: SpeculationOptions
    default_max_tokens: int
    max_prompt_tokens: int
    max_choices: int
    def __init__(self, name: _Optional[str] = ..., target: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ..., drafter: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., default_max_tokens: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_choices: _Optional[int] = ...) -> None: ...

class GetPoolStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolStatusResponse(_message.Message):
    __slots__ = ("pools", "orchestrator")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    ORCHESTRATOR_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    orchestrator: OrchestratorStatus
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., orchestrator: _Optional[_Union[OrchestratorStatus, _Mapping]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("name", "desired_replicas", "replicas")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESIRED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    desired_replicas: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    def __init__(self, name: _Optional[str] = ..., desired_replicas: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica_id", "address", "node_id", "model_id", "sessions", "max_sessions", "queued", "kv_used_tokens", "kv_capacity_tokens", "acceptance_rate", "is_draining", "is_connected", "version", "refusal", "preemptions")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    node_id: str
    model_id: str
    sessions: int
    max_sessions: int
    queued: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    acceptance_rate: float
    is_draining: bool
    is_connected: bool
    version: str
    refusal: str
    preemptions: int
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., node_id: _Optional[str] = ..., model_id: _Optional[str] = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., queued: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., acceptance_rate: _Optional[float] = ..., is_draining: bool = ..., is_connected: bool = ..., version: _Optional[str] = ..., refusal: _Optional[str] = ..., preemptions: _Optional[int] = ...) -> None: ...

class OrchestratorStatus(_message.Message):
    __slots__ = ("running_answers", "max_answers", "stall_fraction", "replica_id", "node_id", "waiting_requests")
    RUNNING_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STALL_FRACTION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_answers: int
    max_answers: int
    stall_fraction: float
    replica_id: str
    node_id: str
    waiting_requests: int
    def __init__(self, running_answers: _Optional[int] = ..., max_answers: _Optional[int] = ..., stall_fraction: _Optional[float] = ..., replica_id: _Optional[str] = ..., node_id: _Optional[str] = ..., waiting_requests: _Optional[int] = ...) -> None: ...

class GetRoundTraceRequest(_message.Message):
    __slots__ = ("request_id", "limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    limit: int
    def __init__(self, request_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GetRoundTraceResponse(_message.Message):
    __slots__ = ("records", "dropped", "clock_offset_s", "is_emulated", "orchestrator_id")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    IS_EMULATED_FIELD_NUMBER: _ClassVar[int]
    ORCHESTRATOR_ID_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    dropped: int
    clock_offset_s: float
    is_emulated: bool
    orchestrator_id: str
    def __init__(self, records: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ..., dropped: _Optional[int] = ..., clock_offset_s: _Optional[float] = ..., is_emulated: bool = ..., orchestrator_id: _Optional[str] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("session_id", "number", "committed_length", "began_s", "draft_s", "verdict_s", "ended_s", "queue_time_s", "step_time_s", "step_sessions", "step_tokens", "draft_origin", "draft_arrived_s", "draft_time_s", "draft_steps", "available", "draft_length", "kept_length", "emitted", "has_continuation", "ordered_draft_length", "credit", "branches", "fan_out", "reason")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERDICT_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEP_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KEPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    HAS_CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    ORDERED_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    number: int
    committed_length: int
    began_s: float
    draft_s: float
    verdict_s: float
    ended_s: float
    queue_time_s: float
    step_time_s: float
    step_sessions: int
    step_tokens: int
    draft_origin: DraftOrigin
    draft_arrived_s: float
    draft_time_s: float
    draft_steps: int
    available: int
    draft_length: int
    kept_length: int
    emitted: int
    has_continuation: bool
    ordered_draft_length: int
    credit: int
    branches: int
    fan_out: int
    reason: str
    def __init__(self, session_id: _Optional[str] = ..., number: _Optional[int] = ..., committed_length: _Optional[int] = ..., began_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., verdict_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., queue_time_s: _Optional[float] = ..., step_time_s: _Optional[float] = ..., step_sessions: _Optional[int] = ..., step_tokens: _Optional[int] = ..., draft_origin: _Optional[_Union[DraftOrigin, str]] = ..., draft_arrived_s: _Optional[float] = ..., draft_time_s: _Optional[float] = ..., draft_steps: _Optional[int] = ..., available: _Optional[int] = ..., draft_length: _Optional[int] = ..., kept_length: _Optional[int] = ..., emitted: _Optional[int] = ..., has_continuation: bool = ..., ordered_draft_length: _Optional[int] = ..., credit: _Optional[int] = ..., branches: _Optional[int] = ..., fan_out: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
