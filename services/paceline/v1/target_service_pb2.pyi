from paceline.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTargetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetInfoResponse(_message.Message):
    __slots__ = ("info", "clock_unix_ms")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    info: _session_pb2.ModelInfo
    clock_unix_ms: int
    def __init__(self, info: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ..., clock_unix_ms: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[TargetCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[TargetCommand, _Mapping]]] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("session_id", "epoch", "open", "verify", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    open: _session_pb2.OpenSession
    verify: VerifyDraft
    close: _session_pb2.CloseSession
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[_session_pb2.OpenSession, _Mapping]] = ..., verify: _Optional[_Union[VerifyDraft, _Mapping]] = ..., close: _Optional[_Union[_session_pb2.CloseSession, _Mapping]] = ...) -> None: ...

class VerifyDraft(_message.Message):
    __slots__ = ("base_length", "committed_ids", "draft_ids", "draft_distributions", "budget_ms")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_distributions: _containers.RepeatedScalarFieldContainer[bytes]
    budget_ms: int
    def __init__(self, base_length: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., draft_ids: _Optional[_Iterable[int]] = ..., draft_distributions: _Optional[_Iterable[bytes]] = ..., budget_ms: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("session_id", "epoch", "verdict", "failed", "load")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    verdict: VerdictRows
    failed: _session_pb2.SessionFailed
    load: _session_pb2.LoadReport
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., verdict: _Optional[_Union[VerdictRows, _Mapping]] = ..., failed: _Optional[_Union[_session_pb2.SessionFailed, _Mapping]] = ..., load: _Optional[_Union[_session_pb2.LoadReport, _Mapping]] = ...) -> None: ...

class VerdictRows(_message.Message):
    __slots__ = ("base_length", "token_ids", "ratios", "step_time_us", "queue_time_us", "logprobs", "step_sessions", "step_tokens")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RATIOS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ratios: _containers.RepeatedScalarFieldContainer[float]
    step_time_us: int
    queue_time_us: int
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    step_sessions: int
    step_tokens: int
    def __init__(self, base_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., ratios: _Optional[_Iterable[float]] = ..., step_time_us: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., step_sessions: _Optional[int] = ..., step_tokens: _Optional[int] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("token_logprob", "draft_logprob", "top_ids", "top_logprobs")
    TOKEN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_logprob: float
    draft_logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_logprob: _Optional[float] = ..., draft_logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...
