"""What was seen of a deployment, as values: the probes make them, the checks judge them. Knows nothing of either."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.generation import SpeculationUsage
from paceline.types import ModelInfo


class Trouble(StrEnum):
    """Why there is no connection."""

    UNKNOWN_HOST = "unknown host"
    REFUSED = "refused"  # the machine is there, and nothing listens
    SILENT = "silent"  # no answer in time: nobody is there, or somebody on the way keeps quiet
    UNREACHABLE = "unreachable"


class Greeting(StrEnum):
    """What a port says to somebody who speaks HTTP/2, as gRPC does."""

    HTTP2 = "HTTP/2"
    HTTP1 = "HTTP/1"
    OTHER = "other"
    NOTHING = "nothing"


class Distrust(StrEnum):
    """Why a server's certificate is not believed."""

    EXPIRED = "expired"
    NOT_YET_VALID = "not yet valid"
    NAME = "name"  # it is somebody else's
    AUTHORITY = "authority"  # nobody whom we believe has signed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a server's certificate says."""

    names: tuple[str, ...]
    issuer: str
    ends: dt.datetime  # with its zone


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLook:
    """What is at HOST:PORT."""

    address: str
    trouble: Trouble | None = None  # None: somebody listens
    greeting: Greeting = Greeting.NOTHING  # within TLS, where it speaks that
    is_tls: bool = False
    certificate: Certificate | None = None  # of the server
    distrust: Distrust | None = None  # where TLS was asked for; None: its certificate is believed

    @property
    def is_grpc(self) -> bool:
        """As far as one can tell without a call."""
        return self.greeting is Greeting.HTTP2

    @property
    def wants_certificate(self) -> bool:
        """Whether it ends connections of those who show none, or not the right one."""
        return self.is_tls and self.greeting is Greeting.NOTHING


class Health(StrEnum):
    """What a gRPC server says of one of its services."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNKNOWN_SERVICE = "unknown service"  # it has no such service, or nothing is known of its health
    NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLook:
    """Who answers at the endpoint."""

    health: Health  # of the generation service
    answers_as: str = ""  # "target" or "drafter", if it is one of those instead
    trouble: str = ""  # in gRPC's words, where nobody answers

    @property
    def answers(self) -> bool:
        """Whether it is an orchestrator."""
        return self.health in (Health.SERVING, Health.NOT_SERVING)


@dataclass(frozen=True, slots=True)
class ClockLook:
    """Another machine's clock."""

    ahead_s: float  # of this machine's; negative: behind
    uncertain_s: float  # either way


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLook:
    """One model service, as it answers this machine."""

    kind: str  # "target" or "drafter"
    address: str
    is_named: bool  # by whoever asks; else the orchestrator says that it is there
    info: ModelInfo | None = None  # None: it did not answer
    clock: ClockLook | None = None  # None: it does not say
    trouble: str = ""  # why it did not answer
    wants_certificate: bool = False  # it speaks TLS, and was asked without
    open_at: str = ""  # an address beyond this machine at which it answers everybody; "": none is known

    @property
    def title(self) -> str:
        return f"The {self.kind} at {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLook:
    """Whether strangers are answered."""

    is_anonymous_answered: bool  # a caller without token and certificate
    address: str = ""  # beyond this machine, at which it was asked; "": none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLook:
    """One short answer, from its request to its end."""

    request_id: str
    token_ids: tuple[int, ...]
    first_token_s: float  # from the call on
    usage: SpeculationUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLook:
    """What is at an HTTP URL. A status of 0: there was no answer."""

    url: str
    trouble: str = ""  # why there was none
    distrust: Distrust | None = None
    health_status: int = 0
    health_words: str = ""
    models_status: int = 0
    model_names: tuple[str, ...] | None = None  # None: not in OpenAI's form
    metrics: str = field(default="", repr=False)  # "": not to be had
