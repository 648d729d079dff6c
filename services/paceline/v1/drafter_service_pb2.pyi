from paceline.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetDrafterInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrafterInfoResponse(_message.Message):
    __slots__ = ("info", "clock_unix_ms")
    INFO_FIELD_NUMBER: _ClassVar[int]
    CLOCK_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    info: _session_pb2.ModelInfo
    clock_unix_ms: int
    def __init__(self, info: _Optional[_Union[_session_pb2.ModelInfo, _Mapping]] = ..., clock_unix_ms: _Optional[int] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DrafterCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DrafterCommand, _Mapping]]] = ...) -> None: ...

class DrafterCommand(_message.Message):
    __slots__ = ("session_id", "epoch", "open", "commit", "close")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    open: _session_pb2.OpenSession
    commit: Commit
    close: _session_pb2.CloseSession
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[_session_pb2.OpenSession, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., close: _Optional[_Union[_session_pb2.CloseSession, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("base_length", "committed_ids", "draft_length", "credit", "branches", "fan_out", "acceptance", "resend")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_length: int
    credit: int
    branches: int
    fan_out: int
    acceptance: float
    resend: bool
    def __init__(self, base_length: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., draft_length: _Optional[int] = ..., credit: _Optional[int] = ..., branches: _Optional[int] = ..., fan_out: _Optional[int] = ..., acceptance: _Optional[float] = ..., resend: bool = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DrafterEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DrafterEvent, _Mapping]]] = ...) -> None: ...

class DrafterEvent(_message.Message):
    __slots__ = ("session_id", "epoch", "proposal", "failed", "load")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    proposal: Proposal
    failed: _session_pb2.SessionFailed
    load: _session_pb2.LoadReport
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., failed: _Optional[_Union[_session_pb2.SessionFailed, _Mapping]] = ..., load: _Optional[_Union[_session_pb2.LoadReport, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("base_length", "prefix_digest", "draft_ids", "draft_distributions", "draft_time_us", "draft_steps", "branches")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    prefix_digest: int
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_distributions: _containers.RepeatedScalarFieldContainer[bytes]
    draft_time_us: int
    draft_steps: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, base_length: _Optional[int] = ..., prefix_digest: _Optional[int] = ..., draft_ids: _Optional[_Iterable[int]] = ..., draft_distributions: _Optional[_Iterable[bytes]] = ..., draft_time_us: _Optional[int] = ..., draft_steps: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("base_length", "prefix_digest", "draft_ids", "draft_distributions")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DISTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    prefix_digest: int
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_distributions: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, base_length: _Optional[int] = ..., prefix_digest: _Optional[int] = ..., draft_ids: _Optional[_Iterable[int]] = ..., draft_distributions: _Optional[_Iterable[bytes]] = ...) -> None: ...
