"""What goes into one answer and what comes out of it, as values; the words are those of `generation_service.proto`.

Knows nothing of gRPC, tensors or models; `client` carries these values over the wire.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import InvalidRequest, PacelineError, quoted
from paceline.types import (
    MAX_DRAFT_LENGTH,
    MAX_FAN_OUT,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_TENANT_LENGTH,
    FinishReason,
    ModelInfo,
    Origin,
    SamplingParams,
    TokenLogprobs,
    VerificationRule,
)

MAX_STOP_STRINGS = 16
MAX_CHOICES = 16
MAX_MESSAGES = 4096
MAX_LISTED_TOKEN_IDS = 1024  # in any list of token ids but the prompt and the output
ROLES = ("system", "user", "assistant")
_MAX_UINT32 = 2**32 - 1
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]+")


# ---------------------------------------------------------------------------------------------------------------------
# Requests


class Schedule(StrEnum):
    """The order of drafting and verification."""

    PLAIN = "plain"  # no drafts
    SEQUENTIAL = "sequential"  # draft, wait, verify, wait
    PIPELINED = "pipelined"  # the next draft is made while the current one is verified


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When and how the answer ends."""

    max_tokens: int | None = None  # None: the deployment's default
    stop: tuple[str, ...] = ()  # the text is cut in front of the first of these
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end tokens
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How to speculate; None takes the deployment's default. It changes the speed alone."""

    rule: VerificationRule | None = None
    draft_length: int | None = None  # tokens of one draft, 0 to 64; 0 decodes plainly
    schedule: Schedule | None = None
    fan_out: int | None = None  # most guesses at one position that branches are drafted for, 0 to 16; 0: no branches


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What of an answer is sent, at least one of them; what is left out is not computed, where nothing else needs it."""

    text: bool = True
    token_ids: bool = True  # and origins; an answer can be resumed by them alone, and log-probabilities need them
    pieces: bool = True  # text of each token by itself, and of the most probable ones


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to answer, and how; exactly one of `text`, `token_ids` and `messages` is the prompt.

    Raises `InvalidRequest`, which names the parameter, for what the protocol cannot carry.
    """

    text: str | None = None  # tokenized as it stands
    token_ids: tuple[int, ...] | None = None  # used as they are
    messages: tuple[ChatMessage, ...] | None = None  # put into the model's own chat template
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StopConditions = field(default_factory=StopConditions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    seed: int | None = None  # None: one is drawn and reported
    output_ids: tuple[int, ...] = ()  # resumes an answer: what the caller has of it; needs the seed above temperature 0
    logprobs: int | None = (
        None  # 0 to 20: with raw log-probabilities, and of so many most probable tokens too; None: without
    )
    n: int = 1  # answers to the same prompt, side by side, each with its own seed
    tenant: str = ""  # drafts may come from what the same tenant was answered before, never from another's answers
    model: str = ""  # which served model is to answer; "": whichever is served
    output: OutputOptions = field(default_factory=OutputOptions)
    request_id: str = (
        ""  # the caller's own name for this answer: 1 to 64 letters, digits, ".", "_", "-"; "": one is drawn
    )

    def __post_init__(self) -> None:
        given = [prompt for prompt in (self.text, self.token_ids, self.messages) if prompt is not None]
        if len(given) != 1:
            raise InvalidRequest("A request needs one prompt: text, token ids or chat messages.", parameter="prompt")
        _require_text("prompt", self.text or "")
        _require_range("token_ids", self.token_ids or ())
        _require_count("messages", self.messages or (), most=MAX_MESSAGES)
        for message in self.messages or ():
            _require_role(message.role)
            _require_text("messages", message.content)
        _check_sampling(self.sampling)
        _check_stopping(self.stopping)
        _require_range("draft_length", _present(self.speculation.draft_length), highest=MAX_DRAFT_LENGTH)
        _require_range("fan_out", _present(self.speculation.fan_out), highest=MAX_FAN_OUT)
        _require_range("seed", _present(self.seed), highest=MAX_SEED)
        _require_range("output_ids", self.output_ids)
        _require_range("logprobs", _present(self.logprobs), highest=MAX_LOGPROBS)
        _require_range("n", [self.n], lowest=1, highest=MAX_CHOICES)
        _require_tenant(self.tenant)
        _require_text("model", self.model)
        _check_output(self.output, logprobs=self.logprobs)
        if self.request_id:
            require_request_id(self.request_id, longest=61 if self.n > 1 else 64)
        if self.output_ids and self.n > 1:
            raise InvalidRequest(
                "n must be 1 where output_ids resume an answer; resume each choice by itself, with its own seed.",
                parameter="n",
            )
        if self.output_ids and self.seed is None and not self.sampling.is_greedy:
            raise InvalidRequest(
                "output_ids resume an answer, whose seed must be given above temperature 0.", parameter="seed"
            )


def _check_sampling(sampling: SamplingParams) -> None:
    """`SamplingParams` has checked what the values mean; left is how many there are, and what a uint32 can carry."""
    _require_range("top_k", [sampling.top_k])
    _require_range("min_tokens", [sampling.min_tokens])
    _require_listed("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
    _require_listed("banned_token_ids", sampling.banned_token_ids)
    _require_listed("allowed_token_ids", sampling.allowed_token_ids or ())
    _require_listed("stop_token_ids", sampling.stop_token_ids)


def _check_stopping(stopping: StopConditions) -> None:
    _require_range("max_tokens", _present(stopping.max_tokens))
    _require_listed("stop_token_ids", stopping.stop_token_ids)
    _require_count("stop", stopping.stop, most=MAX_STOP_STRINGS)
    for stop in stopping.stop:
        if not stop:
            raise InvalidRequest("stop must not hold an empty string.", parameter="stop")
        _require_text("stop", stop)


def _present(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def _require_count(parameter: str, items: Sequence[object], *, most: int) -> None:
    if len(items) > most:
        raise InvalidRequest(f"{parameter} must hold at most {most} entries, not {len(items)}.", parameter=parameter)


def _require_listed(parameter: str, token_ids: Sequence[int]) -> None:
    _require_count(parameter, token_ids, most=MAX_LISTED_TOKEN_IDS)
    _require_range(parameter, token_ids)


def _require_range(parameter: str, values: Sequence[int], *, lowest: int = 0, highest: int = _MAX_UINT32) -> None:
    for value in values:
        if not lowest <= value <= highest:
            raise InvalidRequest(f"{parameter} must lie in [{lowest}, {highest}], not {value}.", parameter=parameter)


def _require_text(parameter: str, text: str) -> None:
    """Half of a surrogate pair is no character, and protobuf refuses it in words that help nobody."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{parameter} must be valid Unicode text, without unpaired surrogates.", parameter=parameter
        ) from error


def _require_tenant(tenant: str) -> None:
    _require_text("tenant", tenant)
    if len(tenant) > MAX_TENANT_LENGTH:
        raise InvalidRequest(
            f"tenant must have at most {MAX_TENANT_LENGTH} characters, not {len(tenant)}.", parameter="tenant"
        )


def _check_output(output: OutputOptions, *, logprobs: int | None) -> None:
    if not (output.text or output.token_ids or output.pieces):
        raise InvalidRequest("output asks for nothing; ask for text, token_ids or pieces.", parameter="output")
    if logprobs is not None and not output.token_ids:
        raise InvalidRequest("logprobs belong to token ids; ask for token_ids in output too.", parameter="output")


def require_request_id(request_id: str, *, longest: int = 64) -> None:
    """Raises `InvalidRequest` for a name that no answer can have."""
    if len(request_id) > longest or not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            f"request_id must be 1 to {longest} letters (A-Z, a-z), digits, dots, underscores or hyphens.",
            parameter="request_id",
        )


def _require_role(role: str) -> None:
    if role not in ROLES:
        raise InvalidRequest(
            f"The role of a message must be one of {', '.join(ROLES)}, not {quoted(role)}.", parameter="messages"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Answers


class IncompleteAnswer(PacelineError):
    """The stream ended without saying how the answer finished; what arrived is not the whole answer."""

    reason = "INCOMPLETE_ANSWER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was admitted."""

    request_id: str  # identifies this request in logs and errors, and is what cancels it
    seeds: tuple[
        int, ...
    ]  # in force, one a choice; each alone, as the seed of a request with n=1, gives its choice again
    prompt_tokens: int

    @property
    def seed(self) -> int:
        """Of the first choice, mostly the only one."""
        return self.seeds[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens of one round."""

    text: str  # complete so far: never half a character, never the beginning of a stop string
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]  # one a token
    pieces: tuple[str, ...]  # text of each token by itself, for display
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    choice: int = 0  # which of the request's answers this belongs to


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int  # as delivered, the end token included; of the whole answer, however often it was resumed

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationUsage:
    """What speculation did for one request; names and meanings are those of the protocol's `SpeculationUsage`.

    Of an answer that was resumed it covers what came behind `Finished.resumed_tokens`.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    acceptance_rate: float = 0.0
    mean_acceptance_length: float = 1.0
    per_token_acceptance: float = 0.0
    rounds: int = 0
    plain_rounds: int = 0
    fallback_rounds: int = 0
    ahead_rounds: int = 0
    branch_rounds: int = 0
    redraft_rounds: int = 0
    num_rejections: int = 0
    branch_hits: int = 0
    num_received_draft_tokens: int = 0
    target_busy_s: float = 0.0
    draft_wait_s: float = 0.0
    elapsed_s: float = 0.0
    rule: VerificationRule | None = None  # the rule in force
    schedule: Schedule | None = None  # the schedule in force

    @property
    def target_busy_share(self) -> float:
        """Share of the request's time that the target spent computing for it, 0 to 1."""
        return min(1.0, self.target_busy_s / self.elapsed_s) if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a whole answer; with n > 1 others may still go on."""

    finish_reason: FinishReason
    text: str  # held back until now
    usage: Usage
    speculation: SpeculationUsage
    resumed_tokens: int = 0  # of the completion tokens, those that the last call brought along as `output_ids`
    resumptions: int = 0  # how often the client took the answer up again; a server never says
    choice: int = 0  # which of the request's answers this belongs to


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer; if the request itself had `output_ids`, what came behind them."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]  # one a token
    pieces: tuple[str, ...]  # text of each token by itself, for display
    finish_reason: FinishReason
    seed: int
    usage: Usage
    speculation: SpeculationUsage
    resumed_tokens: int = 0  # of the completion tokens, those that the last call brought along
    resumptions: int = 0  # how often the client took the answer up again after a break
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    choice: int = 0  # which of the request's answers this is

    @property
    def tokens_per_second(self) -> float:
        """Tokens delivered over the time from admission to the last of them, since the last resumption."""
        elapsed_s = self.speculation.elapsed_s
        return (self.usage.completion_tokens - self.resumed_tokens) / elapsed_s if elapsed_s else 0.0


class CompletionBuilder:
    """Gathers the events of one stream, given in order, into a `Completion` for each choice."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Delta():
                self._deltas[event.choice].append(event)
            case Finished():
                self._finished[event.choice] = event

    def build(self) -> Completion:
        """The only choice. Raises `IncompleteAnswer` unless both `started` and `finished` have come."""
        (completion,) = self.build_choices()
        return completion

    def build_choices(self) -> tuple[Completion, ...]:
        """All choices, in their order. Raises `IncompleteAnswer` unless `started`, and `finished` for each, have come."""
        started = self._started
        if started is None or len(self._finished) < len(started.seeds):
            raise IncompleteAnswer("The server's answer lacks its beginning or its end; ask again.")
        return tuple(self._build(started, choice) for choice in range(len(started.seeds)))

    def _build(self, started: Started, choice: int) -> Completion:
        deltas, finished = self._deltas[choice], self._finished[choice]
        return Completion(
            request_id=started.request_id,
            text="".join(delta.text for delta in deltas) + finished.text,
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            origins=tuple(origin for delta in deltas for origin in delta.origins),
            pieces=tuple(piece for delta in deltas for piece in delta.pieces),
            finish_reason=finished.finish_reason,
            seed=started.seeds[choice],
            usage=finished.usage,
            speculation=finished.speculation,
            resumed_tokens=finished.resumed_tokens,
            resumptions=finished.resumptions,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            choice=choice,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Servers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Which models answer, with which defaults, and who gives them."""

    target: ModelInfo
    drafter: ModelInfo | None  # None: no drafter is connected
    speculation: SpeculationOptions
    version: str = ""  # of Paceline, as the orchestrator runs it; "": unknown
    clock_unix_ms: int = 0  # what its clock said when it answered; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model that requests can be for, with its limits and defaults."""

    name: str  # what requests call it
    target: ModelInfo
    drafter: ModelInfo | None  # None: no drafter is connected
    speculation: SpeculationOptions
    default_max_tokens: int  # of requests that name none
    max_prompt_tokens: int
    max_choices: int  # answers to one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica of a model service: what it last said of itself; counts are 0 until it has said anything."""

    replica_id: str  # unique for each start of a replica
    address: str  # HOST:PORT of its gRPC server
    node_id: str = ""  # in the control plane's words; "": unknown
    model_id: str = ""  # "": it has not been asked yet
    sessions: int = 0  # held by it, to whichever orchestrator they belong
    max_sessions: int = 0  # 0: unknown
    queued: int = 0  # items waiting for a model step
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0  # 0: unknown, or without a bound
    acceptance_rate: float | None = None  # accepted / judged draft tokens since its start; None: unknown
    is_draining: bool = False  # takes no new sessions and will stop soon
    is_connected: bool = False  # the orchestrator that was asked has a stream to it
    version: str = ""  # of Paceline, as the replica runs it; "": unknown
    refusal: str = ""  # why that orchestrator does not use it, and what to do; "": it does, or nothing answers there
    preemptions: int = 0  # sessions that gave up their memory for others, since its start


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The replicas of one model service."""

    name: str  # "target" or "drafter"
    replicas: tuple[ReplicaStatus, ...]
    desired_replicas: int | None = None  # None: nothing scales the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrchestratorStatus:
    """How busy the orchestrator is that was asked."""

    running_answers: int
    max_answers: int
    stall_fraction: float | None = None  # share of its answers' time spent waiting for drafts lately; None: unknown
    replica_id: str = ""  # "": there is no control plane
    node_id: str = ""  # in the control plane's words; "": unknown
    waiting_requests: int = 0  # in front of it, to begin


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentStatus:
    """The state of a deployment, as one of its orchestrators sees it."""

    pools: tuple[PoolStatus, ...]
    orchestrator: OrchestratorStatus
