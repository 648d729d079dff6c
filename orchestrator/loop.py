"""The life of one session: draft, verify, walk, commit, until the answer ends.

Runs against small Protocols. All schedules are the same loop: they differ in what a planner orders from the drafter, and
in how long it waits for it. Knows nothing of gRPC, text or models.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from orchestrator.proposals import Arrival
from paceline.errors import PayloadInvalid
from paceline.noise import Purpose, uniform
from paceline.prefix import TokenPrefix, extend_digest
from paceline.rejection import emitted_logprobs, walk
from paceline.types import (
    MAX_DRAFT_LENGTH,
    Draft,
    DraftOrigin,
    FinishReason,
    Origin,
    SessionSpec,
    SpeculationStats,
    TokenLogprobs,
    Verdict,
    VerdictRows,
    VerificationRule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOrder:
    """What the drafter is told behind each verdict."""

    draft_length: int = 0  # tokens of one draft; 0: none wanted
    credit: int = 0  # tokens beyond the committed ones that may be drafted
    branches: int = 0  # most lines besides the likeliest one
    fan_out: int = 0  # most guesses at one position
    acceptance: float = 0.0  # expected of one token
    is_due: bool = True  # False: not told now, which costs both sides, but later, with the tokens of then


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What is verified in one round, and how long that waits for drafted tokens."""

    draft_length: int = 0  # most tokens to verify; 0: decode plainly
    enough_length: int = 0  # with so many the round begins at once; 0: it never waits
    patience_s: float = 0.0  # the longest wait for them
    reason: str = ""  # for the round trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What came of one round; tokens and seconds."""

    draft_length: int
    kept_length: int
    emitted: int
    origin: DraftOrigin
    waited_s: float  # for the draft
    is_rejection: bool
    has_continuation: bool  # when the verdict came, drafted tokens were there behind what it committed
    verify_s: float  # from the draft's leaving for the target to the verdict's arrival
    step_s: float  # this and the following as the target reports
    queue_s: float
    step_sessions: int
    step_tokens: int
    round_s: float  # from when the last verdict was dealt with until this one is, without what the client took


class RoundPlanner(Protocol):
    """Decides what is drafted and what is verified (`fixed_planner.FixedPlanner`, `controller.SessionController`)."""

    def order(self, *, remaining: int) -> DraftOrder:
        """What the drafter is told now, right behind a verdict; `remaining` tokens may still come."""

    def plan(self, *, available: int, remaining: int) -> RoundPlan:
        """The next round; `available` drafted tokens are there for the committed ones. Asked again, it is planned anew."""

    def record(self, outcome: RoundOutcome) -> None:
        """A round has ended."""


@dataclass(frozen=True, slots=True)
class OfferedDraft:
    """A draft for one round, and where it came from."""

    draft: Draft = field(default_factory=Draft)
    origin: DraftOrigin = DraftOrigin.NONE
    arrival: Arrival | None = None  # None: it did not come from a drafter


@dataclass(frozen=True, slots=True)
class TimedRows:
    """A target's rows for one draft, with two moments of `time.perf_counter`."""

    rows: VerdictRows
    asked_s: float  # the draft left for the target that gave them
    arrived_s: float  # they were here, whoever was waiting for them


class Target(Protocol):
    """The session's target."""

    def ask(self, prefix: TokenPrefix, draft: Draft) -> None:
        """Have the target begin with what is verified next, if that can be sent at once. What goes wrong shows in `verify`.

        To be followed by `verify` of the same prefix and draft, which then awaits that verdict, or by nothing at all.
        """

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        """Rows for a draft that continues the committed tokens; raises `PacelineError` if there is no verdict."""


class DraftSource(Protocol):
    """Where the session's drafts come from. Never raises: a drafter that is gone costs speed alone."""

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        """Say what is committed, and what is wanted behind that."""

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        """How many drafted tokens are there for the committed ones, counted up to `max_length`."""

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        """Whether `draft` would wait for nothing now."""

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        """A draft that continues the committed tokens; empty if none comes in time."""

    def continues(self, digest: int) -> bool:
        """Whether a draft is there already for the prefix with that digest."""

    def distrust(self) -> None:
        """What was drafted cannot be judged: nothing more is to come of it in this session."""


class Observer(Protocol):
    """Hears of each round (`round_trace`)."""

    def on_round(self, round_: RoundReport) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """All that is known of one round, for whoever looks on; seconds of `time.perf_counter`."""

    number: int  # in the session, from 0
    base_length: int
    order: DraftOrder
    plan: RoundPlan
    available: int  # drafted tokens that were there when the round was planned
    arrival: Arrival | None  # of the draft, if a drafter made it
    began_s: float  # the last verdict was dealt with, and where nothing was asked ahead the client has what came of it
    draft_s: float  # the draft was in hand
    verdict_s: float  # the verdict was here; it may have waited for the client
    outcome: RoundOutcome


class Delivery(Protocol):
    """What the output made of a run of tokens (`finish.Delivered`)."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


DeliveryT = TypeVar("DeliveryT", bound=Delivery)
DeliveryT_co = TypeVar("DeliveryT_co", bound=Delivery, covariant=True)


class Output(Protocol[DeliveryT_co]):
    """Decides token by token where the answer ends (`finish.OutputTracker`)."""

    @property
    def remaining(self) -> int: ...

    def accept(self, token_ids: Sequence[int]) -> DeliveryT_co: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult(Generic[DeliveryT]):
    """What one round added to the answer."""

    delivery: DeliveryT
    origins: tuple[Origin, ...]  # one a delivered token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a delivered token; empty where the session asks for none


_NO_PLAN, _NO_DRAFT = RoundPlan(), OfferedDraft()


class _Round:
    """One round in the making: when what happened."""

    __slots__ = (
        "available",
        "back_s",
        "began_s",
        "client_s",
        "draft_s",
        "ended_s",
        "number",
        "offered",
        "order",
        "plan",
        "verdict_s",
        "was_rejected",
    )

    def __init__(self) -> None:
        self.number = 0
        self.was_rejected = False  # how the round before ended
        self.begin(DraftOrder(), time.perf_counter())

    def begin(self, order: DraftOrder, now_s: float) -> None:
        self.order, self.began_s, self.draft_s, self.verdict_s, self.ended_s = order, now_s, now_s, now_s, now_s
        self.available, self.plan, self.offered = 0, _NO_PLAN, _NO_DRAFT
        self.client_s = self.back_s = 0.0  # how long the client took, and when it had taken what the last round gave

    def go_on(self, handed_over_s: float) -> None:
        """The client has taken what the last round gave."""
        self.back_s = time.perf_counter()
        self.client_s = self.back_s - handed_over_s

    def begin_here(self) -> None:
        """Nothing has been done before the client had its tokens: none of its time is the round's."""
        self.began_s += self.client_s
        self.client_s = 0.0

    def end(self, judged: TimedRows) -> None:
        """The verdict is dealt with now."""
        self.verdict_s, self.ended_s = judged.arrived_s, time.perf_counter()
        if judged.asked_s >= self.back_s:  # whatever was asked ahead came to nothing
            self.draft_s += self.client_s
            self.begin_here()
        else:  # while the target judged, the client's time cost nothing
            self.client_s = max(0.0, self.back_s - judged.arrived_s)


async def run_session(
    spec: SessionSpec,
    prompt_ids: Sequence[int],
    planner: RoundPlanner,
    *,
    target: Target,
    drafts: DraftSource,
    output: Output[DeliveryT],
    stats: SpeculationStats,
    observer: Observer | None = None,
) -> AsyncIterator[RoundResult[DeliveryT]]:
    """Rounds until the output says that the answer has ended; counts them in `stats`.

    The target is asked for at most one verdict beyond the results taken. Raises what `target.verify` raises, and
    `PayloadInvalid` for a verdict that does not fit the draft or the session: everything yielded before is committed and
    stays valid.
    """
    prefix = TokenPrefix(prompt_ids)
    round_ = _Round()
    _tell_drafter(round_, prefix, planner, drafts, output)
    # The first round has no draft: the first token never waits for a drafter, which reads the prompt meanwhile.
    while True:
        judged = await _judge(target, prefix, round_, drafts)
        round_.end(judged)
        verdict = _walk(spec, round_, prefix, judged.rows, drafts, output)
        draft = round_.offered.draft
        logprobs = () if spec.logprobs is None else emitted_logprobs(draft.ids, judged.rows.rows, verdict)
        result = _deliver(output, draft, verdict, logprobs)
        prefix.extend(result.delivery.token_ids)
        outcome = _outcome(round_, verdict, judged.rows, result, has_continuation=drafts.continues(prefix.digest()))
        _count(stats, outcome)
        planner.record(outcome)
        if observer is not None:
            observer.on_round(_report(round_, len(prefix) - outcome.emitted, outcome))
        if result.delivery.finish_reason is not None:
            yield result
            return
        round_.number += 1
        round_.was_rejected = outcome.is_rejection
        # Before the client has its tokens: the time of drafter and target is dearer.
        _tell_drafter(round_, prefix, planner, drafts, output)
        is_planned = _plan_if_ready(round_, prefix, planner, drafts, output)
        if is_planned:
            await _take_draft(round_, prefix, drafts)
            target.ask(prefix, round_.offered.draft)
        handed_over_s = time.perf_counter()
        yield result
        round_.go_on(handed_over_s)
        if not is_planned:
            round_.begin_here()
            _plan(round_, prefix, planner, drafts, output)
            await _take_draft(round_, prefix, drafts)


async def _judge(target: Target, prefix: TokenPrefix, round_: _Round, drafts: DraftSource) -> TimedRows:
    """The target's rows for the round's draft; a draft with shares that are none costs speed alone.

    Its tokens decide nothing then: what is emitted in their place is drawn with other numbers than they were.
    """
    try:
        return await target.verify(prefix, round_.offered.draft)
    except PayloadInvalid:
        if not round_.offered.draft.distributions:
            raise
        drafts.distrust()
        round_.offered = OfferedDraft()
        return await target.verify(prefix, round_.offered.draft)


def _tell_drafter(
    round_: _Round, prefix: TokenPrefix, planner: RoundPlanner, drafts: DraftSource, output: Output[DeliveryT]
) -> None:
    """A round begins with a commit."""
    round_.begin(planner.order(remaining=output.remaining), time.perf_counter())
    drafts.commit(prefix, round_.order)


def _plan_if_ready(
    round_: _Round, prefix: TokenPrefix, planner: RoundPlanner, drafts: DraftSource, output: Output[DeliveryT]
) -> bool:
    """Plan the round, and say whether it can begin now; if not, it is planned anew when it can.

    Depends on what has arrived, as everything does that decides on a draft, never on the value of a drawn token.
    """
    _plan(round_, prefix, planner, drafts, output)
    return round_.plan.draft_length == 0 or drafts.is_ready(prefix, round_.plan)


def _plan(
    round_: _Round, prefix: TokenPrefix, planner: RoundPlanner, drafts: DraftSource, output: Output[DeliveryT]
) -> None:
    remaining = output.remaining
    # A round adds one token by itself: nothing is to be drafted beyond the answer's end.
    most = min(MAX_DRAFT_LENGTH, remaining - 1)
    round_.available = drafts.available(prefix, most) if most > 0 else 0
    round_.plan = planner.plan(available=round_.available, remaining=remaining)


async def _take_draft(round_: _Round, prefix: TokenPrefix, drafts: DraftSource) -> None:
    """Wait for the round's draft as long as the plan says."""
    if round_.plan.draft_length:
        offered = await drafts.draft(prefix, round_.plan)
        if offered.origin is DraftOrigin.AHEAD and not round_.available:
            offered = replace(offered, origin=DraftOrigin.REDRAFT)
        elif offered.origin is DraftOrigin.AHEAD and round_.was_rejected:
            offered = replace(offered, origin=DraftOrigin.BRANCH)
        round_.offered = offered
    round_.draft_s = time.perf_counter()


def _walk(
    spec: SessionSpec,
    round_: _Round,
    prefix: TokenPrefix,
    verdict_rows: VerdictRows,
    drafts: DraftSource,
    output: Output[DeliveryT],
) -> Verdict:
    draft = round_.offered.draft
    return walk(
        draft.ids,
        verdict_rows.rows,
        accept_uniform=lambda position: uniform(spec.seed, position, Purpose.ACCEPT),
        base_length=len(prefix),
        bonus_is_drafted=spec.effective_rule is VerificationRule.REJECTION and _has_next(prefix, draft, drafts, output),
    )


def _has_next(prefix: TokenPrefix, draft: Draft, drafts: DraftSource, output: Output[DeliveryT]) -> bool:
    """Whether the draft behind this one is there and may be verified: then it stands in for the bonus token.

    Depends on what has arrived, never on the value of any token that is drawn. Should the planner leave it all the same, a
    round without a draft decides the same position by a draw that nobody has looked at.
    """
    if not draft.ids or output.remaining - len(draft) <= 1:
        return False
    digest = prefix.digest()
    for token_id in draft.ids:
        digest = extend_digest(digest, token_id)
    return drafts.continues(digest)


def _deliver(
    output: Output[DeliveryT], draft: Draft, verdict: Verdict, logprobs: tuple[TokenLogprobs, ...]
) -> RoundResult[DeliveryT]:
    ids = list(draft.ids[: verdict.kept_length])
    origins = [Origin.DRAFT] * len(ids)
    if verdict.next_token is not None:
        ids.append(verdict.next_token)
        origins.append(verdict.next_origin)
    delivery = output.accept(ids)
    delivered = len(delivery.token_ids)
    return RoundResult(delivery=delivery, origins=tuple(origins[:delivered]), logprobs=logprobs[:delivered])


def _outcome(
    round_: _Round,
    verdict: Verdict,
    rows: VerdictRows,
    result: RoundResult[DeliveryT],
    *,
    has_continuation: bool,
) -> RoundOutcome:
    draft_length = len(round_.offered.draft)
    return RoundOutcome(
        draft_length=draft_length,
        kept_length=verdict.kept_length,
        emitted=len(result.delivery.token_ids),
        origin=round_.offered.origin,
        waited_s=round_.draft_s - round_.began_s,
        is_rejection=verdict.kept_length < draft_length,
        has_continuation=has_continuation,
        verify_s=round_.verdict_s - round_.draft_s,
        step_s=rows.step_time_s,
        queue_s=rows.queue_time_s,
        step_sessions=rows.step_sessions,
        step_tokens=rows.step_tokens,
        round_s=round_.ended_s - round_.began_s - round_.client_s,
    )


def _count(stats: SpeculationStats, outcome: RoundOutcome) -> None:
    stats.record_round(
        outcome.draft_length, outcome.kept_length, origin=outcome.origin, has_continuation=outcome.has_continuation
    )
    stats.target_busy_s += outcome.step_s
    stats.draft_wait_s += outcome.waited_s


def _report(round_: _Round, base_length: int, outcome: RoundOutcome) -> RoundReport:
    return RoundReport(
        number=round_.number,
        base_length=base_length,
        order=round_.order,
        plan=round_.plan,
        available=round_.available,
        arrival=round_.offered.arrival,
        began_s=round_.began_s,
        draft_s=round_.draft_s,
        verdict_s=round_.verdict_s,
        outcome=outcome,
    )
