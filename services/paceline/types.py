"""The values that travel between the services, and the words for them (ARCHITECTURE.md, "Vocabulary").

Lengths and positions form one family. Positions are absolute and count from 0 at the first prompt token. A length `n`
means positions `0 .. n-1`, so the next token is decided at position `n`:

* `committed_length`: tokens nobody will take back; `committed_length = prompt_length + output_length`
* `base_length`: the number of tokens that a draft, a proposal or a verdict stands on
* `cached_length`: tokens whose keys and values a model's cache holds
* `kept_length`: how many tokens of one draft the target accepted

Knows nothing of tensors, text, gRPC or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import InvalidRequest

LOWEST_TEMPERATURE = 1e-6  # besides 0
MAX_SEED = 2**64 - 1
MAX_DRAFT_LENGTH = 64  # tokens of one draft
MAX_VOCAB_SIZE = 2**22  # tokens; far beyond any model, and few enough to pad a row to
MAX_CREDIT = 2 * MAX_DRAFT_LENGTH + 1  # tokens drafted beyond the committed ones
MAX_BRANCHES = 64  # lines of drafted tokens besides the likeliest one, and branches of one proposal
MAX_FAN_OUT = 16  # guesses at one position
MAX_LOGPROBS = 20  # most probable tokens that are reported beside one token
MAX_TENANT_LENGTH = 256  # characters
MAX_SESSION_ID_LENGTH = 128  # characters; ids of ended sessions are remembered


class VerificationRule(StrEnum):
    """How the target judges a draft; every rule leaves the output's law exactly the target's (design: the laws)."""

    GREEDY = "greedy"  # temperature 0: accept the arg max, emit the arg max
    REJECTION = "rejection"  # accept with min(1, target/draft), correct from the residual
    COUPLED = "coupled"  # drafter and target share the noise; the emitted token is always the target's own sample


class Origin(StrEnum):
    """Where a token of the output came from."""

    DRAFT = "draft"  # an accepted draft token
    CORRECTION = "correction"  # the next token after a rejection
    BONUS = "bonus"  # the next token after a draft that was kept whole
    PLAIN = "plain"  # the only token of a round without a draft


class DraftOrigin(StrEnum):
    """Where the draft of a round came from."""

    AHEAD = "ahead"  # the drafter, before the verdict, for the case that all was kept
    BRANCH = "branch"  # the drafter, before the verdict, for the case that came
    REDRAFT = "redraft"  # the drafter, behind the verdict: it was waited for
    FALLBACK = "fallback"  # the orchestrator's own lookup
    NONE = "none"  # there was none


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What shapes the target distribution at every row, in the order of design 3.2.

    `stop_token_ids` are here because `min_tokens` forbids them until that many tokens are out. Penalties follow the
    field's convention: repetition looks at prompt and output, presence and frequency at the output alone.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_between("temperature", self.temperature, 0.0, 100.0)
        _require(
            self.temperature == 0.0 or self.temperature >= LOWEST_TEMPERATURE,
            "temperature",
            f"must be 0, or at least {LOWEST_TEMPERATURE:g} so that logits divided by it stay numbers",
        )
        _require(self.top_k >= 0, "top_k", f"must be 0 (off) or a positive count, not {self.top_k}")
        _require_finite("top_p", self.top_p)
        _require(0.0 < self.top_p <= 1.0, "top_p", f"must lie in (0, 1], not {self.top_p}")
        _require_finite("min_p", self.min_p)
        _require(0.0 <= self.min_p < 1.0, "min_p", f"must lie in [0, 1), not {self.min_p}")
        _require_between("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_between("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _require_between("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for token_id, bias in self.logit_bias:
            _require_between("logit_bias", bias, -1000.0, 1000.0)
            _require(token_id >= 0, "logit_bias", f"names token id {token_id}; ids are not negative")
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids",
            "must name at least one token, or be left out to allow all",
        )
        _require(self.min_tokens >= 0, "min_tokens", f"must not be negative, but is {self.min_tokens}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have, and filters that leave no token at all."""
        named = {
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "banned_token_ids": list(self.banned_token_ids),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "stop_token_ids": list(self.stop_token_ids),
        }
        for parameter, ids in named.items():
            for token_id in ids:
                _require(
                    0 <= token_id < vocab_size,
                    parameter,
                    f"names token id {token_id}, but the model's ids are 0 to {vocab_size - 1}",
                )
        forbidden = set(self.banned_token_ids) | (set(self.stop_token_ids) if self.min_tokens else set())
        allowed = vocab_size if self.allowed_token_ids is None else len(set(self.allowed_token_ids) - forbidden)
        if self.allowed_token_ids is None:
            allowed -= len(forbidden)
        _require(allowed > 0, "banned_token_ids", "leaves no token that could be sampled; allow at least one")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _require(condition: bool, parameter: str, complaint: str) -> None:
    if not condition:
        raise InvalidRequest(f"{parameter} {complaint}.", parameter=parameter)


def _require_finite(parameter: str, value: float) -> None:
    _require(math.isfinite(value), parameter, f"must be a finite number, not {value}")


def _require_between(parameter: str, value: float, lowest: float, highest: float) -> None:
    _require_finite(parameter, value)
    _require(lowest <= value <= highest, parameter, f"must lie in [{lowest:g}, {highest:g}], not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a model service must know of a session, fixed for its life."""

    session_id: str
    prompt_length: int  # tokens; the rest of the committed tokens are output
    sampling: SamplingParams
    seed: int  # 0 .. MAX_SEED
    rule: VerificationRule
    vocab_size: int  # of the target: no id at or above it may be drafted
    logprobs: int | None = None  # how many most probable tokens to report beside each token; None: no log-probabilities
    tenant: str = ""  # a drafter never lets one tenant's answers serve another's session

    @property
    def effective_rule(self) -> VerificationRule:
        """Temperature 0 is greedy whatever rule was asked for: all rules agree on a one-hot target."""
        return VerificationRule.GREEDY if self.sampling.is_greedy else self.rule


def request_id_of(session_id: str) -> str:
    """The request that a session belongs to.

    Sessions are called REQUEST, or REQUEST~DRAWN where the caller chose the request's id, with -CHOICE behind that for all
    choices but the first.
    """
    chosen, tilde, _ = session_id.partition("~")
    return chosen if tilde else session_id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed in one round, with the distributions they were drawn from where the rule needs them.

    `distributions` holds one packed sparse row a token (`wire.pack_distribution`), which the orchestrator relays
    unread; it is empty for a deterministic draft, which is judged as one-hot.
    """

    ids: tuple[int, ...] = ()
    distributions: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.distributions) in (0, len(self.ids)), "one distribution a drafted token, or none at all"

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, window: slice) -> Draft:
        return Draft(self.ids[window], self.distributions[window])

    def joins(self, following: Draft) -> bool:
        """Whether `self + following` is one draft: both deterministic, or both drawn."""
        return not self.ids or not following.ids or bool(self.distributions) == bool(following.distributions)

    def __add__(self, following: Draft) -> Draft:
        return Draft(self.ids + following.ids, self.distributions + following.distributions)


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens drafted for another outcome than the likeliest: they continue the `base_length` tokens whose digest is
    `prefix_digest`, the last of which may be a guess."""

    base_length: int
    prefix_digest: int
    draft: Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What the drafter pushes: a draft that continues the `base_length` tokens whose digest is `prefix_digest`, branches
    for other outcomes, or both.

    An empty draft without branches says that the drafter has nothing to offer for that prefix; with branches it says
    nothing of it.
    """

    base_length: int
    prefix_digest: int
    draft: Draft
    draft_time_s: float = 0.0  # of the model steps that the session took part in since the last proposal
    draft_steps: int = 0  # how many those were
    branches: tuple[Branch, ...] = ()


TopLogprobs = tuple[tuple[int, float], ...]
"""The most probable tokens at one row with their log-probabilities, in descending order, the lower id first on a tie."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the model itself finds one emitted token, and the most probable tokens in its place.

    Log-probabilities are raw: the log-softmax, in float32, of the target's logits before penalties, biases, bans,
    temperature and filters. The token is among `top` only if it is one of the most probable; tokens of probability 0
    never are.
    """

    token_id: int
    logprob: float
    top: TopLogprobs = ()
    top_pieces: tuple[str, ...] = ()  # text of each of `top` by itself, for display, where somebody has a tokenizer


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The raw log-probabilities (`TokenLogprobs`) at one row, of whichever token the walk may emit there."""

    sampled: float  # of the row's own token
    drafted: float | None = None  # of the drafted token, where the row carries a ratio; -inf for probability 0
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class Row:
    """What the target says of one row of a block.

    `greedy` and `coupled`: `token_id` is the target's own sample, `ratio` is None. `rejection`: `ratio` is
    target(x)/draft(x) for the drafted x and `token_id` one draw from that row's residual; on the row behind the draft
    `ratio` is None and `token_id` the target's own sample.
    """

    token_id: int
    ratio: float | None = None
    logprobs: RowLogprobs | None = None  # None: the session asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRows:
    """The target's answer to one draft: rows up to and including the first that ends the draft."""

    base_length: int
    rows: tuple[Row, ...]
    step_time_s: float = 0.0  # of the model steps that the draft took part in: one, but for prompts
    queue_time_s: float = 0.0  # from arrival at the target to the start of the first
    step_sessions: int = 0  # how many sessions the last of them took
    step_tokens: int = 0  # how many tokens it fed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `rejection.walk` reads from the rows: how much of the draft is kept, and the next token.

    `next_token` is None only where the bonus is left to the draft behind it (design 3.6, rule `rejection`).
    """

    kept_length: int
    next_token: int | None
    next_origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Who a model service is; compared when drafter and target are paired."""

    model_id: str
    vocab_size: int  # 0: a drafting method without a model, for ids of any vocabulary
    max_context: int  # tokens
    tokenizer_sha256: str  # of the id-to-string map; empty: works on any token ids
    incarnation: str  # new at every start of the process
    method: str = ""  # drafters only
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()
    emulated: bool = False  # its steps are held to a set time (`engine.emulation`): no speed seen is a measurement
    expected_acceptance: tuple[tuple[float, float], ...] = ()  # drafters only: (temperature, acceptance) in training
    version: str = ""  # of Paceline, as the service runs it; empty: unknown

    @property
    def has_model(self) -> bool:
        return self.vocab_size > 0


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request; names and formulas follow the field (vLLM's spec_decode metrics)."""

    rounds: int = 0
    plain_rounds: int = 0  # rounds without a draft
    fallback_rounds: int = 0  # rounds whose draft came from the orchestrator's own lookup
    fallback_accepted_tokens: int = 0  # in those
    fallback_rejections: int = 0  # of those, the ones ended by a rejection
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0  # rounds ended by a rejection
    branch_hits: int = 0  # of the rejections, those behind which drafted tokens were there when the verdict came
    num_received_draft_tokens: int = 0  # that drafters pushed, branches included
    rounds_by_origin: dict[DraftOrigin, int] = field(default_factory=lambda: dict.fromkeys(DraftOrigin, 0))
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    target_busy_s: float = 0.0
    draft_wait_s: float = 0.0

    def record_round(
        self,
        draft_length: int,
        kept_length: int,
        *,
        origin: DraftOrigin = DraftOrigin.AHEAD,
        has_continuation: bool = False,
    ) -> None:
        """Count one round; `has_continuation`: drafted tokens were there behind what its verdict committed."""
        is_fallback = origin is DraftOrigin.FALLBACK
        self.rounds += 1
        self.rounds_by_origin[origin if draft_length else DraftOrigin.NONE] += 1
        self.fallback_rounds += is_fallback
        if draft_length == 0:
            self.plain_rounds += 1
            return
        self.num_drafts += 1
        self.num_draft_tokens += draft_length
        self.num_accepted_tokens += kept_length
        self.num_rejections += kept_length < draft_length
        self.branch_hits += kept_length < draft_length and has_continuation
        if is_fallback:
            self.fallback_accepted_tokens += kept_length
            self.fallback_rejections += kept_length < draft_length
        missing = draft_length - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for position in range(draft_length):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < kept_length

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def per_token_acceptance(self) -> float:
        """`a` of design section 6: accepted over (accepted + rounds ended by a rejection)."""
        judged = self.num_accepted_tokens + self.num_rejections
        return self.num_accepted_tokens / judged if judged else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a drafted round yields: 1 + accepted / drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


AcceptUniform = Callable[[int], float]
"""From an absolute position to the ACCEPT uniform there, strictly inside (0, 1)."""
