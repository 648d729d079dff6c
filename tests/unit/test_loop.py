"""One session's rounds: the target's own text whatever the drafts, exact ends and counts, and the law of the whole."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.methods.draft_model import DraftModelMethod
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import (
    DraftOrder,
    DraftSource,
    OfferedDraft,
    RoundPlan,
    RoundReport,
    RoundResult,
    Target,
    TimedRows,
    run_session,
)
from paceline import noise
from paceline.errors import PacelineError, PayloadInvalid, TargetUnavailable
from paceline.generation import Schedule
from paceline.noise import Purpose
from paceline.prefix import TokenPrefix
from paceline.types import (
    MAX_CREDIT,
    MAX_DRAFT_LENGTH,
    Draft,
    DraftOrigin,
    FinishReason,
    Origin,
    Row,
    RowLogprobs,
    SessionSpec,
    SpeculationStats,
    TokenLogprobs,
    VerdictRows,
    VerificationRule,
)
from tests.exactness.chi_square import SIGNIFICANCE
from tests.fakes import (
    CountingOutput,
    Delivered,
    EagerTarget,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    UnhurriedTarget,
    hashed_logits,
    markov_logits,
    spec_of,
    target_alone,
    timed,
)

VOCAB_SIZE = 10
PROMPT = (3, 1, 4)
STEP_TIME_S = 0.25
MATCHING_RULES = [VerificationRule.GREEDY, VerificationRule.COUPLED]
SPECULATING = [Schedule.SEQUENTIAL, Schedule.PIPELINED]


# ---- stand-ins for target and drafter -------------------------------------------------------------------------------


def own_token(ids: Sequence[int]) -> int:
    """What the matching target emits behind these tokens: any function of all of them."""
    return (7 * len(ids) + 3 * sum(ids) + ids[-1]) % VOCAB_SIZE


def alone(count: int, *, stop: int | None = None) -> list[int]:
    """The answer of the matching target without any draft."""
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(own_token(ids))
        if ids[-1] == stop:
            break
    return ids[len(PROMPT) :]


@dataclass
class MatchingTarget(UnhurriedTarget):
    """Answers as under `greedy` and `coupled`: its own token on every row, up to the first that ends the draft."""

    fails_at: int | None = None
    asked: list[tuple[tuple[int, ...], Draft]] = field(default_factory=list)

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        if len(self.asked) == self.fails_at:
            raise TargetUnavailable("The target is gone; ask again in a moment.")
        self.asked.append((tuple(prefix.ids), draft))
        own = [own_token([*prefix.ids, *draft.ids[:length]]) for length in range(len(draft) + 1)]
        rows = [Row(token_id) for token_id in own[: kept_length(own, draft.ids) + 1]]
        return timed(VerdictRows(base_length=len(prefix), rows=tuple(rows), step_time_s=STEP_TIME_S))


def kept_length(own: Sequence[int], drafted: Sequence[int]) -> int:
    return next((place for place, token_id in enumerate(drafted) if own[place] != token_id), len(drafted))


@dataclass
class RatioTarget(UnhurriedTarget):
    """Answers as under `rejection`: keeps as much of each draft as `choose_kept` says of its length."""

    choose_kept: Callable[[int], int]
    next_token: int = 0
    bonus: int | None = None  # behind a draft, if it is to differ
    asked: list[tuple[tuple[int, ...], Draft]] = field(default_factory=list)

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        self.asked.append((tuple(prefix.ids), draft))
        kept = self.choose_kept(len(draft)) if draft.ids else 0
        # A ratio of 1 is always accepted and one of 0 never, whatever the uniform.
        rows = [Row(self.next_token, 1.0)] * kept
        bonus = self.next_token if self.bonus is None or not draft.ids else self.bonus
        rows.append(Row(bonus) if kept == len(draft) else Row(self.next_token, 0.0))
        return timed(VerdictRows(base_length=len(prefix), rows=tuple(rows), step_time_s=STEP_TIME_S))


@dataclass
class ScriptedDrafts:
    """Offers what `offer(prefix, max_length)` makes, and says that there is more as `has_next` says."""

    offer: Callable[[TokenPrefix, int], OfferedDraft]
    has_next: Callable[[], bool] = lambda: False
    is_there: bool = True  # before anybody waits for it
    commits: list[tuple[int, int, int]] = field(default_factory=list)
    asked: list[tuple[int, int]] = field(default_factory=list)
    offered: list[OfferedDraft] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    is_distrusted: bool = False

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        self.commits.append((len(prefix), order.draft_length, order.credit))

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        return max_length

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        return self.is_there

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        self.asked.append((len(prefix), plan.draft_length))
        self.offered.append(OfferedDraft() if self.is_distrusted else self.offer(prefix, plan.draft_length))
        return self.offered[-1]

    def continues(self, digest: int) -> bool:
        self.digests.append(digest)
        return self.has_next()

    def distrust(self) -> None:
        self.is_distrusted = True


def fixed_drafts(*, drafted: int = 1, has_next: Callable[[], bool] = lambda: False) -> ScriptedDrafts:
    """As many tokens as are asked for, all the same, each with a row."""
    return ScriptedDrafts(
        lambda _, max_length: OfferedDraft(Draft((drafted,) * max_length, (b"row",) * max_length), DraftOrigin.AHEAD),
        has_next,
    )


def spec(rule: VerificationRule, *, seed: int = 7) -> SessionSpec:
    return spec_of(prompt_length=len(PROMPT), vocab_size=VOCAB_SIZE, rule=rule, seed=seed)


@dataclass
class Answer:
    """What a session gave, round by round, until it ended or failed."""

    rounds: list[RoundResult[Delivered]] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    error: PacelineError | None = None

    @property
    def ids(self) -> list[int]:
        return [token_id for result in self.rounds for token_id in result.delivery.token_ids]

    @property
    def origins(self) -> list[Origin]:
        return [origin for result in self.rounds for origin in result.origins]

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        return [result.delivery.finish_reason for result in self.rounds]


async def answer(
    session_spec: SessionSpec,
    *,
    target: Target,
    drafts: DraftSource,
    schedule: Schedule = Schedule.PIPELINED,
    draft_length: int = 4,
    branches: int = 0,
    max_tokens: int = 20,
    stop: int | None = None,
    prompt: Sequence[int] = PROMPT,
) -> Answer:
    given = Answer()
    rounds = run_session(
        session_spec,
        prompt,
        FixedPlanner(
            schedule=schedule,
            draft_length=draft_length,
            rule=session_spec.effective_rule,
            branches=branches,
            fan_out=min(branches, 3),
        ),
        target=target,
        drafts=drafts,
        output=CountingOutput(max_tokens, stop=stop),
        stats=given.stats,
    )
    try:
        async for result in rounds:
            given.rounds.append(result)
    except PacelineError as error:
        given.error = error
    return given


# ---- the plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "remaining", "draft_length", "credits"),
    [
        (Schedule.PLAIN, 100, 0, (0, 0)),
        (Schedule.SEQUENTIAL, 100, 4, (4, 4)),
        (Schedule.PIPELINED, 100, 4, (8, 9)),
        (Schedule.PIPELINED, 10, 4, (8, 9)),
        (Schedule.PIPELINED, 9, 4, (8, 8)),
        (Schedule.PIPELINED, 6, 4, (5, 5)),
        (Schedule.PIPELINED, 5, 4, (4, 4)),
        (Schedule.PIPELINED, 4, 3, (3, 3)),
        (Schedule.PIPELINED, 2, 1, (1, 1)),
        (Schedule.PIPELINED, 1, 0, (0, 0)),
        (Schedule.SEQUENTIAL, 1, 0, (0, 0)),
    ],
)
def test_nothing_is_drafted_that_the_answer_cannot_use(
    schedule: Schedule, remaining: int, draft_length: int, credits: tuple[int, int]
) -> None:
    """A round adds one token by itself, so at most `remaining - 1` can be of use (C27); pipelined, credit covers the
    draft in flight and the one behind it, which is one longer where a bonus token comes first."""
    plan = FixedPlanner(schedule=schedule, draft_length=4)
    for rule in VerificationRule:
        planner = replace(plan, rule=rule)
        order = planner.order(remaining=remaining)
        assert order.draft_length == planner.plan(available=0, remaining=remaining).draft_length == draft_length
        assert order.credit == credits[rule is not VerificationRule.REJECTION]


def test_the_longest_draft_stays_within_what_the_protocol_allows() -> None:
    """A drafter refuses more credit than `MAX_CREDIT`."""
    for branches in (0, 9):
        plan = FixedPlanner(schedule=Schedule.PIPELINED, draft_length=MAX_DRAFT_LENGTH, branches=branches)
        orders = [replace(plan, rule=rule).order(remaining=1000) for rule in VerificationRule]
        assert max(order.credit for order in orders) == MAX_CREDIT


# ---- the text is the target's own -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rule=st.sampled_from(MATCHING_RULES),
    schedule=st.sampled_from(Schedule),
    draft_length=st.integers(0, 6),
    max_tokens=st.integers(1, 25),
    stop=st.none() | st.integers(0, VOCAB_SIZE - 1),
    is_ready=st.sampled_from([False, True]),
    drawn=st.randoms(use_true_random=False),
)
def test_any_drafts_give_the_text_of_the_target_alone(
    rule: VerificationRule,
    schedule: Schedule,
    draft_length: int,
    max_tokens: int,
    stop: int | None,
    is_ready: bool,
    drawn: random.Random,
) -> None:
    """150 drawn sessions with drafts of any length, right up to a random place or throughout, there at once or not, and
    with any answer to whether there is more: the same tokens; origins and counts follow from what the target was asked
    (C26, C27)."""

    def offer(prefix: TokenPrefix, max_length: int) -> OfferedDraft:
        ids = list(prefix.ids)
        for _ in range(drawn.randint(0, max_length)):
            ids.append(own_token(ids) if drawn.random() < 0.7 else drawn.randrange(VOCAB_SIZE))
        draft = Draft(tuple(ids[len(prefix) :]))
        if not draft.ids:
            return OfferedDraft()
        return OfferedDraft(draft, DraftOrigin.FALLBACK if drawn.random() < 0.3 else DraftOrigin.AHEAD)

    target, drafts = MatchingTarget(), ScriptedDrafts(offer, lambda: drawn.random() < 0.5, is_there=is_ready)
    given = asyncio.run(
        answer(
            spec(rule),
            target=EagerTarget(target),
            drafts=drafts,
            schedule=schedule,
            draft_length=draft_length,
            max_tokens=max_tokens,
            stop=stop,
        )
    )
    expected = alone(max_tokens, stop=stop)
    assert given.ids == expected
    reason = FinishReason.STOP if expected[-1] == stop else FinishReason.LENGTH
    assert given.finish_reasons == [None] * (len(given.rounds) - 1) + [reason]
    assert_accounts_add_up(given, target, drafts)


def assert_accounts_add_up(given: Answer, target: MatchingTarget, drafts: ScriptedDrafts) -> None:
    """Prefixes, origins and counts, from what the target was asked."""
    assert target.asked[0] == (PROMPT, Draft())
    assert [draft for _, draft in target.asked if draft.ids] == [
        each.draft for each in drafts.offered if each.draft.ids
    ]
    counts, text = SpeculationStats(), list(PROMPT)
    origins = iter([each.origin for each in drafts.offered if each.draft.ids])
    was_rejected = False
    for result, (prefix, draft) in zip(given.rounds, target.asked, strict=True):
        assert list(prefix) == text
        own = [own_token([*prefix, *draft.ids[:length]]) for length in range(len(draft) + 1)]
        kept = kept_length(own, draft.ids)
        last = Origin.PLAIN if not draft.ids else Origin.BONUS if kept == len(draft) else Origin.CORRECTION
        assert result.origins == tuple([*[Origin.DRAFT] * kept, last][: len(result.delivery.token_ids)])
        origin = next(origins) if draft.ids else DraftOrigin.NONE
        if origin is DraftOrigin.AHEAD and was_rejected:
            origin = DraftOrigin.BRANCH
        counts.record_round(len(draft), kept, origin=origin)
        was_rejected = kept < len(draft)
        text += result.delivery.token_ids
    counts.branch_hits = given.stats.branch_hits
    assert given.stats.branch_hits <= counts.num_rejections
    counts.target_busy_s = STEP_TIME_S * len(given.rounds)
    assert given.stats.draft_wait_s >= 0.0
    counts.draft_wait_s = given.stats.draft_wait_s
    assert given.stats == counts
    assert [length for length, *_ in drafts.commits] == [len(prefix) for prefix, _ in target.asked]


@pytest.mark.parametrize("rule", list(VerificationRule))
@pytest.mark.parametrize("schedule", SPECULATING)
async def test_the_first_round_has_no_draft(rule: VerificationRule, schedule: Schedule) -> None:
    """The first token never waits for a drafter; which is told to begin all the same."""
    target: Any = RatioTarget(lambda _: 0) if rule is VerificationRule.REJECTION else MatchingTarget()
    drafts = fixed_drafts()
    await answer(spec(rule), target=target, drafts=drafts, schedule=schedule, max_tokens=2)
    assert target.asked[0] == (PROMPT, Draft())
    assert drafts.commits[0] == (3, 1, 1)
    assert drafts.asked == []


async def test_plain_decoding_asks_for_no_draft() -> None:
    """Not once, nor for credit."""
    drafts = fixed_drafts()
    given = await answer(
        spec(VerificationRule.COUPLED), target=MatchingTarget(), drafts=drafts, schedule=Schedule.PLAIN, max_tokens=5
    )
    assert given.ids == alone(5)
    assert given.origins == [Origin.PLAIN] * 5
    assert drafts.asked == []
    assert drafts.commits == [(length, 0, 0) for length in range(3, 8)]


@pytest.mark.parametrize("place", range(5))
async def test_a_token_that_ends_the_answer_in_mid_draft_ends_it_there(place: int) -> None:
    """Four tokens kept and a bonus token, the stop at each of the five: what is behind it is not delivered, and has no
    origin (C23, C24)."""
    stop = 9
    tail = tuple(stop if index == place else 1 for index in range(5))
    offer = OfferedDraft(Draft(tail[:4], (b"row",) * 4))
    drafts = ScriptedDrafts(lambda _, max_length: offer)
    target = RatioTarget(lambda length: length, next_token=tail[4])
    given = await answer(spec(VerificationRule.REJECTION), target=target, drafts=drafts, max_tokens=50, stop=stop)
    if place == 4:
        assert given.ids == [stop]  # the plain token of the first round is the same
        return
    assert given.ids == [1, *tail[: place + 1]]
    assert given.origins == [Origin.PLAIN, *[Origin.DRAFT] * (place + 1)]
    assert given.finish_reasons == [None, FinishReason.STOP]


@pytest.mark.parametrize("fails_at", range(4))
async def test_an_error_of_the_target_comes_after_what_was_given(fails_at: int) -> None:
    """Everything before it is committed and stays valid."""
    drafts = ScriptedDrafts(lambda prefix, _: OfferedDraft(Draft((own_token(prefix.ids), 0))))
    given = await answer(spec(VerificationRule.COUPLED), target=MatchingTarget(fails_at), drafts=drafts, max_tokens=50)
    assert isinstance(given.error, TargetUnavailable)
    assert len(given.rounds) == given.stats.rounds == fails_at
    assert given.ids == alone(50)[: len(given.ids)]


async def test_rows_that_do_not_fit_the_draft_are_an_error() -> None:
    """A target that answers with nonsense ends the session, not the process (C10)."""

    class Silent(MatchingTarget):
        async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
            return timed(VerdictRows(base_length=len(prefix), rows=()))

    given = await answer(spec(VerificationRule.COUPLED), target=Silent(), drafts=fixed_drafts())
    assert isinstance(given.error, PayloadInvalid)


async def test_draft_with_shares_that_are_none_costs_speed_alone() -> None:
    """A target that cannot read what the drafter says of its draft: the round is made again without one, the text is the
    target's own, and the drafter is not asked again."""

    class Reader(MatchingTarget):
        async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
            if draft.distributions:
                raise PayloadInvalid("The distributions cannot be read.")
            return await super().verify(prefix, draft)

    drafts = fixed_drafts()
    given = await answer(spec(VerificationRule.COUPLED), target=Reader(), drafts=drafts, max_tokens=20)
    assert (given.error, given.ids) == (None, alone(20))
    assert drafts.is_distrusted
    assert given.stats.num_draft_tokens == 0


# ---- lengths under every pattern of kept tokens ---------------------------------------------------------------------


@dataclass
class Path:
    """One way through a run: follows `script`, then takes the first option everywhere."""

    script: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)

    def choose(self, options: int) -> int:
        """One of `0 .. options-1`."""
        place = len(self.taken)
        self.taken.append(self.script[place] if place < len(self.script) else 0)
        self.options.append(options)
        return self.taken[-1]

    def following(self) -> Path | None:
        """The next way, depth first; None after the last."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.options[len(taken) - 1]:
            taken.pop()
        return Path([*taken[:-1], taken[-1] + 1]) if taken else None


async def count_paths(run: Callable[[Path], Awaitable[None]]) -> int:
    """Runs along every path there is."""
    path: Path | None = Path()
    count = 0
    while path is not None:
        await run(path)
        path, count = path.following(), count + 1
    return count


@pytest.mark.parametrize(("max_tokens", "draft_length"), [(8, 4), (2, 3), (1, 4), (7, 1)])
@pytest.mark.parametrize("schedule", SPECULATING)
async def test_every_pattern_of_kept_lengths_gives_exactly_the_tokens_asked_for(
    max_tokens: int, draft_length: int, schedule: Schedule
) -> None:
    """Under `rejection`, with the next draft there or not after each draft that is kept whole: usage is what was
    delivered, and nothing is drafted beyond the end (C26, C27)."""

    async def run(path: Path) -> None:
        target = RatioTarget(lambda length: path.choose(length + 1))
        drafts = fixed_drafts(has_next=lambda: path.choose(2) == 1)
        given = await answer(
            spec(VerificationRule.REJECTION),
            target=target,
            drafts=drafts,
            schedule=schedule,
            draft_length=draft_length,
            max_tokens=max_tokens,
        )
        assert len(given.ids) == len(given.origins) == max_tokens
        assert given.finish_reasons[-1] is FinishReason.LENGTH
        assert given.error is None
        assert len(given.rounds) <= max_tokens
        for prefix, draft in target.asked:
            assert len(prefix) + len(draft) + 1 <= len(PROMPT) + max_tokens

    assert await count_paths(run) >= {(8, 4): 100, (2, 3): 1, (1, 4): 1, (7, 1): 30}[max_tokens, draft_length]


# ---- the bonus token in a pipeline (design 3.6) ---------------------------------------------------------------------


async def test_the_bonus_token_is_discarded_when_the_next_draft_is_there() -> None:
    """Under `rejection` the next draft's first token is judged in its place, in the next step."""
    target = RatioTarget(lambda length: length, next_token=9)
    given = await answer(
        spec(VerificationRule.REJECTION),
        target=target,
        drafts=fixed_drafts(has_next=lambda: True),
        draft_length=2,
        max_tokens=6,
    )
    assert given.ids == [9, 1, 1, 1, 1, 9]
    assert given.origins == [Origin.PLAIN, *[Origin.DRAFT] * 4, Origin.BONUS]
    assert [len(prefix) for prefix, _ in target.asked] == [3, 4, 6]


async def test_the_bonus_token_is_emitted_when_the_next_draft_is_not_there() -> None:
    """Under `rejection` too: nobody waits for it."""
    given = await answer(
        spec(VerificationRule.REJECTION),
        target=RatioTarget(lambda length: length, next_token=9),
        drafts=fixed_drafts(has_next=lambda: False),
        draft_length=2,
        max_tokens=7,
    )
    assert given.ids == [9, 1, 1, 9, 1, 1, 9]


@pytest.mark.parametrize("rule", MATCHING_RULES)
async def test_the_bonus_token_is_always_emitted_where_it_is_compared(rule: VerificationRule) -> None:
    """Under `greedy` and `coupled` it is the target's own token, whether or not the next draft is there."""
    drafts = ScriptedDrafts(
        lambda prefix, max_length: OfferedDraft(Draft(tuple(alone(40)[len(prefix) - 3 :][:max_length]))), lambda: True
    )
    target = MatchingTarget()
    given = await answer(spec(rule), target=target, drafts=drafts, draft_length=2, max_tokens=10)
    assert given.ids == alone(10)
    assert given.origins == [Origin.PLAIN, *[Origin.DRAFT, Origin.DRAFT, Origin.BONUS] * 3]


async def test_the_last_token_is_a_bonus_though_more_drafts_are_there() -> None:
    """One token is left behind the draft, for which none would be verified: without the bonus the answer would be
    short of it."""
    given = await answer(
        spec(VerificationRule.REJECTION),
        target=RatioTarget(lambda length: length, next_token=9),
        drafts=fixed_drafts(has_next=lambda: True),
        draft_length=4,
        max_tokens=6,
    )
    assert given.ids == [9, 1, 1, 1, 1, 9]


async def test_a_round_without_a_draft_always_gives_its_token() -> None:
    """Whatever is said to be there behind it: each round commits at least one token (C10)."""
    drafts = ScriptedDrafts(lambda *_: OfferedDraft(), lambda: True)
    given = await answer(
        spec(VerificationRule.REJECTION), target=RatioTarget(lambda _: 0, next_token=9), drafts=drafts, max_tokens=5
    )
    assert given.ids == [9] * 5
    assert len(given.rounds) == 5


async def test_a_draft_that_vanishes_behind_a_discarded_bonus_costs_a_round_alone() -> None:
    """The drafter was lost at that moment: the next round is a plain one, on the same tokens."""
    offers = iter([OfferedDraft(Draft((1, 1), (b"row",) * 2)), OfferedDraft(), OfferedDraft()])
    given = await answer(
        spec(VerificationRule.REJECTION),
        target=RatioTarget(lambda length: length, next_token=9),
        drafts=ScriptedDrafts(lambda *_: next(offers), lambda: True),
        draft_length=2,
        max_tokens=5,
    )
    assert given.ids == [9, 1, 1, 9, 9]
    assert given.origins == [Origin.PLAIN, Origin.DRAFT, Origin.DRAFT, Origin.PLAIN, Origin.PLAIN]


@pytest.mark.parametrize("has_next", [True, False])
async def test_the_bonus_decision_never_looks_at_a_value(has_next: bool) -> None:
    """For every value that the bonus token could have, the same question is asked (is there a draft behind exactly
    this one?) and the same is done."""
    for bonus in range(VOCAB_SIZE):
        drafts = fixed_drafts(has_next=lambda: has_next)
        given = await answer(
            spec(VerificationRule.REJECTION),
            target=RatioTarget(lambda length: length, bonus=bonus),
            drafts=drafts,
            draft_length=2,
            max_tokens=20,
        )
        behind_the_first_round, behind_the_draft = drafts.digests[:2]
        assert behind_the_first_round == TokenPrefix((*PROMPT, given.ids[0])).digest()
        assert behind_the_draft == TokenPrefix((*PROMPT, given.ids[0], 1, 1)).digest()
        assert given.rounds[1].delivery.token_ids == ((1, 1) if has_next else (1, 1, bonus))


# ---- loop, drafter and verifier together ----------------------------------------------------------------------------


def local_system(
    session_spec: SessionSpec, *, target: FakeModel, drafter: FakeModel, drawn: random.Random
) -> tuple[LocalTarget, LocalDrafts]:
    """Both services in this process; while a draft is judged the drafter takes a random number of steps."""
    drafts = LocalDrafts(DraftModelMethod[FakeCache](drafter, distribution_entries=64), session_spec)
    return LocalTarget(target, session_spec, meanwhile=lambda: drafts.work(drawn.randrange(12))), drafts


@pytest.mark.parametrize("rule", MATCHING_RULES)
@pytest.mark.parametrize("schedule", SPECULATING)
@pytest.mark.parametrize(("draft_length", "branches"), [(1, 0), (4, 0), (1, 3), (4, 9)])
async def test_the_text_is_that_of_the_target_alone_with_a_drafter_of_any_quality(
    rule: VerificationRule, schedule: Schedule, draft_length: int, branches: int
) -> None:
    """A drafter that agrees often, and one that agrees by chance, at three timings each, with branches and without."""
    logits = hashed_logits(VOCAB_SIZE)
    session_spec = spec(rule)
    expected = target_alone(logits, session_spec, PROMPT, 60)
    acceptances = []

    def similar(ids: Sequence[int]) -> Sequence[float]:
        return logits(ids) if len(ids) % 3 else hashed_logits(VOCAB_SIZE, salt=1)(ids)

    for number, drafter_logits in enumerate([similar, hashed_logits(VOCAB_SIZE, salt=2)] * 3):
        target, drafts = local_system(
            session_spec,
            target=FakeModel(logits, vocab_size=VOCAB_SIZE),
            drafter=FakeModel(drafter_logits, vocab_size=VOCAB_SIZE),
            drawn=random.Random(number),
        )
        given = await answer(
            session_spec,
            target=target,
            drafts=drafts,
            schedule=schedule,
            draft_length=draft_length,
            branches=branches,
            max_tokens=60,
        )
        assert given.ids == expected
        assert (drafts.stalls, drafts.failures) == (0, [])
        acceptances.append(given.stats.acceptance_rate)
    assert min(acceptances) < 0.4 < max(acceptances)


TARGET_ROWS = [[0.40, 0.30, 0.20, 0.10], [0.10, 0.35, 0.15, 0.40], [0.25, 0.25, 0.40, 0.10], [0.30, 0.10, 0.20, 0.40]]
DRAFT_ROWS = [[0.55, 0.15, 0.15, 0.15], [0.20, 0.20, 0.30, 0.30], [0.40, 0.20, 0.25, 0.15], [0.15, 0.25, 0.20, 0.40]]
SESSIONS, TOKENS = 30, 200


class NextDraftPeekers(LocalDrafts):
    """A planted fault: says that the next draft is there only where it begins with token 0."""

    def continues(self, digest: int) -> bool:
        draft = self.store.find(digest, 1)
        return draft is not None and draft.ids == (0,)


class DraftPeekers(LocalDrafts):
    """A planted fault: withholds drafts that do not begin with token 0."""

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        offered = await LocalDrafts.draft(self, prefix, plan)
        return offered if offered.draft.ids[:1] == (0,) else OfferedDraft()


async def markov_answers(
    kind: type[LocalDrafts] = LocalDrafts,
    *,
    draft_length: int = 2,
    branches: int = 0,
    fewest_steps: int = 0,
    sessions: int = SESSIONS,
    is_eager: bool = False,
) -> list[list[int]]:
    """Answers of two Markov chains as target and drafter under `rejection`, one a seed, with random timing: while a
    draft is judged the drafter takes `fewest_steps` or more."""
    answers = []
    for seed in range(sessions):
        session_spec = spec_of(prompt_length=1, vocab_size=4, rule=VerificationRule.REJECTION, seed=seed)
        drawn = random.Random(seed)
        drafts = kind(
            DraftModelMethod[FakeCache](FakeModel(markov_logits(DRAFT_ROWS), vocab_size=4), distribution_entries=64),
            session_spec,
        )

        def meanwhile(drafts: LocalDrafts = drafts, drawn: random.Random = drawn) -> None:
            drafts.work(fewest_steps + drawn.randrange(3 * draft_length + 2))

        target = LocalTarget(FakeModel(markov_logits(TARGET_ROWS), vocab_size=4), session_spec, meanwhile=meanwhile)
        given = await answer(
            session_spec,
            target=EagerTarget(target) if is_eager else target,
            drafts=drafts,
            draft_length=draft_length,
            branches=branches,
            max_tokens=TOKENS,
            prompt=(seed % 4,),
        )
        assert (drafts.stalls, drafts.failures) == (0, [])
        answers.append([seed % 4, *given.ids])
    return answers


def p_value(answers: list[list[int]], *, known: int) -> float:
    """Chi-square of the next token given the `known` tokens before it, against the target's row of the last one.

    The law says that only the last token matters, so `known` 1 tests single transitions and 2 tests pairs of them.
    """
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for ids in answers:
        for place in range(known, len(ids)):
            counts[tuple(ids[place - known : place])][ids[place]] += 1
    statistic, degrees = 0.0, 0
    for before, observed in counts.items():
        expected = [probability * observed.total() for probability in TARGET_ROWS[before[-1]]]
        if min(expected) < 5:
            continue  # too rare for the chi-square law to hold
        statistic += sum((observed[token_id] - number) ** 2 / number for token_id, number in enumerate(expected))
        degrees += len(expected) - 1
    half = torch.tensor([degrees / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    ("draft_length", "branches", "is_eager", "sessions"),
    [(1, 0, True, 30), (3, 0, False, 30), (3, 6, True, 15), pytest.param(3, 6, True, 60, marks=pytest.mark.slow)],
)
async def test_the_answers_follow_the_targets_law(
    draft_length: int, branches: int, is_eager: bool, sessions: int
) -> None:
    """200 tokens a session of two Markov chains under `rejection`, pipelined, with branches and without, at random timings,
    with verdicts that are asked for ahead where the draft is there, and with none: single transitions (12 degrees of
    freedom) and pairs of them (48). With fixed seeds the outcome never changes; had they been drawn afresh, the odds of a
    false alarm would be 1e-4 for each of the two. The faults planted below show in as few tokens."""
    answers = await markov_answers(draft_length=draft_length, branches=branches, is_eager=is_eager, sessions=sessions)
    assert p_value(answers, known=1) > SIGNIFICANCE
    assert p_value(answers, known=2) > SIGNIFICANCE


@pytest.mark.parametrize(("kind", "sessions"), [(NextDraftPeekers, 15), (DraftPeekers, 5)])
async def test_the_law_test_sees_a_choice_by_value(kind: type[LocalDrafts], sessions: int) -> None:
    """Planted: whether the bonus is emitted, or a draft is used at all, depends on the value of a drawn token. 3,000
    tokens show the one, 1,000 the other."""
    answers = await markov_answers(kind, draft_length=1, fewest_steps=4, sessions=sessions)
    assert p_value(answers, known=1) < SIGNIFICANCE / 100


async def test_the_law_test_sees_a_number_that_serves_two_purposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whether a draft is kept is decided by the very number that drew it. 2,000 tokens show it."""
    key = noise.stream_key

    def confused(seed: int, position: int, purpose: Purpose) -> int:
        return key(seed, position, Purpose.DRAFT_SAMPLE if purpose is Purpose.ACCEPT else purpose)

    monkeypatch.setattr(noise, "stream_key", confused)
    answers = await markov_answers(sessions=SESSIONS // 3)
    assert p_value(answers, known=1) < SIGNIFICANCE / 100


async def test_the_pair_test_sees_noise_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: two positions share the number that draws their drafts, each of them right by itself. 3,000 tokens show
    it."""
    key = noise.stream_key

    def standing(seed: int, position: int, purpose: Purpose) -> int:
        return key(seed, position // 2 * 2 if purpose is Purpose.DRAFT_SAMPLE else position, purpose)

    monkeypatch.setattr(noise, "stream_key", standing)
    answers = await markov_answers(sessions=SESSIONS // 2)
    assert p_value(answers, known=2) < SIGNIFICANCE / 100


# ---- what is asked ahead --------------------------------------------------------------------------------------------


def session_of(
    target: Target, drafts: DraftSource, *, max_tokens: int = 20, draft_length: int = 2, **kept: Any
) -> AsyncIterator[RoundResult[Delivered]]:
    """A session read round by round."""
    return run_session(
        spec(VerificationRule.COUPLED),
        PROMPT,
        FixedPlanner(schedule=Schedule.PIPELINED if draft_length else Schedule.PLAIN, draft_length=draft_length),
        target=target,
        drafts=drafts,
        output=CountingOutput(max_tokens),
        stats=SpeculationStats(),
        **kept,
    )


@pytest.mark.parametrize("draft_length", [0, 2])
async def test_the_next_verdict_is_asked_for_before_the_client_has_its_tokens(draft_length: int) -> None:
    """One round ahead, with or without a draft: a client that reads no further has the target do no more."""
    target = EagerTarget(MatchingTarget())
    rounds = session_of(
        target, ScriptedDrafts(lambda prefix, _: OfferedDraft(Draft((0, 0)))), draft_length=draft_length
    )
    lengths = [len(PROMPT)]
    for number in range(1, 4):
        lengths.append(lengths[-1] + len((await anext(rounds)).delivery.token_ids))
        assert target.asked_lengths == lengths[1:]
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(target.asked_lengths) == number


async def test_nothing_is_asked_behind_the_end_of_the_answer() -> None:
    """Nor before a draft is there that the round would wait for: then the client has its tokens first."""
    target = EagerTarget(MatchingTarget())
    assert len([result async for result in session_of(target, fixed_drafts(), max_tokens=3, draft_length=0)]) == 3
    assert target.asked_lengths == [4, 5]
    late = ScriptedDrafts(lambda prefix, _: OfferedDraft(Draft(tuple(next_own(prefix, 2)))), is_there=False)
    target = EagerTarget(MatchingTarget())
    rounds = session_of(target, late, max_tokens=6)
    await anext(rounds)
    assert late.asked == []
    await anext(rounds)
    assert [length for length, _ in late.asked] == [4]
    await anext(rounds)  # one token is left, for which no draft is worth waiting
    assert target.asked_lengths == []


@dataclass
class Clock:
    """The time of the loop and of its target; moved by the test."""

    now_s: float = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@dataclass
class TimedTarget:
    """Takes two seconds for a verdict from when it is asked, ahead or not; what it is asked ahead `is_lost` before it is
    waited for, or not."""

    clock: Clock
    is_lost: bool = False
    ahead_s: float | None = None
    inner: MatchingTarget = field(default_factory=MatchingTarget)

    def ask(self, prefix: TokenPrefix, draft: Draft) -> None:
        self.ahead_s = None if self.is_lost else self.clock.now_s

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        asked_s = self.clock.now_s if self.ahead_s is None else self.ahead_s
        self.ahead_s = None
        self.clock.now_s = max(self.clock.now_s, asked_s + 2.0)
        return TimedRows((await self.inner.verify(prefix, draft)).rows, asked_s, asked_s + 2.0)


@dataclass
class SlowDrafts(ScriptedDrafts):
    """Half a second passes before a draft is there that is waited for."""

    clock: Clock = field(default_factory=Clock)

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        self.clock.now_s += 0.0 if self.is_there else 0.5
        return await ScriptedDrafts.draft(self, prefix, plan)


class Notes:
    """The rounds that a session tells of (`loop.Observer`)."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []

    def on_round(self, round_: RoundReport) -> None:
        self.reports.append(round_)


@pytest.mark.parametrize("client_s", [0.0, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("is_there", "is_lost"), [(True, False), (True, True), (False, False)])
async def test_the_time_that_a_client_takes_is_no_rounds(
    client_s: float, is_there: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it lies before the target is asked, while that judges, behind the verdict, or before the target is asked
    again because what was asked ahead came to nothing. A round lasts as long as its wait and its verdict, and the
    verdict came when it came."""
    clock, notes = Clock(), Notes()
    monkeypatch.setattr("orchestrator.loop.time", clock)
    drafts = SlowDrafts(lambda prefix, _: OfferedDraft(Draft((0, 0))), is_there=is_there, clock=clock)
    rounds = session_of(TimedTarget(clock, is_lost=is_lost), drafts, draft_length=2, observer=notes)
    handed_over_s = []
    for _ in range(4):
        await anext(rounds)
        handed_over_s.append(clock.now_s)
        clock.now_s += client_s
    waited_s = 0.0 if is_there else 0.5
    for report, left_s in zip(notes.reports[1:], handed_over_s, strict=False):
        outcome = report.outcome
        assert (outcome.waited_s, outcome.verify_s, outcome.round_s) == (waited_s, 2.0, waited_s + 2.0)
        came_s = left_s + 2.0 + (0.0 if is_there and not is_lost else client_s + waited_s)
        assert (report.began_s, report.draft_s, report.verdict_s) == (came_s - 2.0 - waited_s, came_s - 2.0, came_s)


async def test_what_the_loop_is_late_to_deal_with_counts_as_the_rounds_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that waits while other sessions have their turn, and not for the client, has not made the round shorter."""
    clock, notes = Clock(), Notes()
    monkeypatch.setattr("orchestrator.loop.time", clock)

    class Busy(TimedTarget):
        async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
            judged = await TimedTarget.verify(self, prefix, draft)
            self.clock.now_s += 0.25
            return judged

    rounds = session_of(Busy(clock), fixed_drafts(), draft_length=0, observer=notes)
    for _ in range(3):
        await anext(rounds)
    assert [(report.outcome.verify_s, report.outcome.round_s) for report in notes.reports] == [(2.0, 2.25)] * 3


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@dataclass
class DescribingTarget(UnhurriedTarget):
    """Another target's rows with made-up log-probabilities, each token's its own: -id where sampled, -id - 100 where
    drafted, and the length of the prefix behind the most probable one."""

    target: Target

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        judged = await self.target.verify(prefix, draft)
        described = [
            replace(row, logprobs=self._describe(row, len(prefix) + index, draft.ids[index : index + 1]))
            for index, row in enumerate(judged.rows.rows)
        ]
        return replace(judged, rows=replace(judged.rows, rows=tuple(described)))

    def _describe(self, row: Row, position: int, drafted: Sequence[int]) -> RowLogprobs:
        drafted_logprob = None if row.ratio is None else -100.0 - drafted[0]
        return RowLogprobs(-float(row.token_id), drafted_logprob, ((position, 0.0),))


def described(ids: Sequence[int], *, offsets: Sequence[float]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token_id, offset - token_id, ((len(PROMPT) + index, 0.0),))
        for index, (token_id, offset) in enumerate(zip(ids, offsets, strict=True))
    ]


@pytest.mark.parametrize("stop", [None, *sorted(set(alone(11)))])
async def test_log_probabilities_end_with_the_tokens(stop: int | None) -> None:
    """One for each delivered token, whichever token of a draft ends the answer (C23): nothing behind it is told."""
    drafts = ScriptedDrafts(lambda prefix, length: OfferedDraft(Draft(tuple(next_own(prefix, length)))))
    asked = replace(spec(VerificationRule.COUPLED), logprobs=1)
    outcome = await answer(asked, target=DescribingTarget(MatchingTarget()), drafts=drafts, max_tokens=11, stop=stop)
    assert outcome.ids == alone(11, stop=stop)
    assert [len(result.logprobs) for result in outcome.rounds] == [
        len(result.delivery.token_ids) for result in outcome.rounds
    ]
    told = [entry for result in outcome.rounds for entry in result.logprobs]
    assert told == described(outcome.ids, offsets=[0.0] * len(outcome.ids))


def next_own(prefix: TokenPrefix, length: int) -> list[int]:
    """A draft that the matching target keeps whole."""
    ids = list(prefix.ids)
    for _ in range(length):
        ids.append(own_token(ids))
    return ids[len(prefix) :]


async def test_pipelined_rejection_tells_of_the_first_token_behind_a_draft_with_its_own_row() -> None:
    """Drafts of three kept whole, the first bonus left to the draft behind it: that draft's first row speaks for its
    token, and nothing is told of the bonus that nobody looked at. Behind the last draft the bonus is emitted."""
    drafts = fixed_drafts(drafted=1, has_next=lambda: True)
    target = DescribingTarget(RatioTarget(lambda length: length, bonus=9))
    asked = replace(spec(VerificationRule.REJECTION), logprobs=1)
    outcome = await answer(asked, target=target, drafts=drafts, draft_length=3, max_tokens=8)
    assert outcome.ids == [0, *[1] * 6, 9]
    told = [entry for result in outcome.rounds for entry in result.logprobs]
    assert told == described(outcome.ids, offsets=[0.0, *[-100.0] * 6, 0.0])


async def test_target_that_keeps_its_log_probabilities_to_itself_ends_the_answer() -> None:
    """They were asked for, so they are never left out in silence."""
    asked = replace(spec(VerificationRule.COUPLED), logprobs=0)
    outcome = await answer(asked, target=MatchingTarget(), drafts=fixed_drafts())
    assert isinstance(outcome.error, PayloadInvalid)
    assert outcome.ids == []


async def test_log_probabilities_that_nobody_asked_for_are_not_passed_on() -> None:
    """The session decides, not the target."""
    outcome = await answer(
        spec(VerificationRule.COUPLED), target=DescribingTarget(MatchingTarget()), drafts=fixed_drafts(), max_tokens=3
    )
    assert [result.logprobs for result in outcome.rounds] == [()] * len(outcome.rounds)
