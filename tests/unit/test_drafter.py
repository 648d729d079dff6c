"""Drafting for many sessions: after any history the next draft is a fresh session's, and it always comes.

The fake model's logits depend on every token in its cache, so a cache cut by one too many or too few shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.drafter import (
    Command,
    Commit,
    Drafted,
    DraftedToken,
    Drafter,
    DrafterEvent,
    DraftMethod,
    DraftView,
    Entry,
)
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.methods.ngram import NgramMethod
from orchestrator.loop import SpeculationPlan, run_session
from paceline.errors import (
    ContextTooLong,
    LengthMismatch,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    SessionNotFound,
    StaleEpoch,
)
from paceline.generation import Schedule
from paceline.prefix import TokenPrefix
from paceline.sampling import DistributionUnusable
from paceline.sessions import Address, Close, Open, PeerGone, SessionTable
from paceline.types import Draft, SamplingParams, SessionSpec, SpeculationStats, VerificationRule
from tests.fakes import (
    CountingOutput,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    hashed_logits,
    spec_of,
    target_alone,
)

VOCAB_SIZE = 12
PROMPT = (3, 1, 4, 1, 5)
RULES = list(VerificationRule)
# What shapes a row may depend on all tokens before it: then a history that is off by one shows as well.
SAMPLING = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.4,
    min_tokens=6,
    stop_token_ids=(2,),
)


def spec(rule: VerificationRule) -> SessionSpec:
    sampling = SamplingParams(temperature=0.0) if rule is VerificationRule.GREEDY else SAMPLING
    return spec_of(prompt_length=len(PROMPT), vocab_size=VOCAB_SIZE, rule=rule, sampling=sampling)


def fake_model(*, max_context: int = 4096) -> FakeModel:
    return FakeModel(hashed_logits(VOCAB_SIZE), vocab_size=VOCAB_SIZE, max_context=max_context)


def model_method(model: FakeModel | None = None) -> DraftModelMethod[FakeCache]:
    return DraftModelMethod[FakeCache](model or fake_model(), distribution_entries=64)


def lookup_method() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)


def next_draft(drafts: LocalDrafts, prefix: TokenPrefix, *, draft_length: int, credit: int) -> Draft | None:
    """What there is for the prefix once the drafter has done all it may."""
    drafts.commit(prefix, draft_length=draft_length, credit=credit)
    drafts.work(1000)
    assert not drafts.drafter.has_work()
    return drafts.store.find(prefix.digest(), credit)


def fresh_draft(session_spec: SessionSpec, ids: Sequence[int], credit: int) -> Draft:
    """The draft of a session that was opened on these tokens just now."""
    draft = next_draft(
        LocalDrafts(model_method(), session_spec), TokenPrefix(ids), draft_length=max(1, credit), credit=credit
    )
    assert draft is not None
    assert len(draft) == credit
    return draft


def other_than(token_id: int) -> int:
    return (token_id + 1) % VOCAB_SIZE


# ---- cache arithmetic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_length", range(1, 9))
@pytest.mark.parametrize("is_pipelined", [False, True], ids=["sequential", "pipelined"])
def test_after_every_outcome_the_next_draft_is_a_fresh_sessions(
    rule: VerificationRule, draft_length: int, is_pipelined: bool
) -> None:
    """For each kept length, with a next token that the drafter had drafted itself and with another one (C30, C42).

    Pipelined, the drafter has gone three tokens further before it learns of the outcome. Its cache keeps all that is
    still right: the committed tokens but the last, and after a draft that was kept whole the one before it is fed too.
    """
    credit = draft_length + 3 if is_pipelined else draft_length
    drafted = fresh_draft(spec(rule), PROMPT, draft_length + 1).ids
    for kept_length in range(draft_length + 1):
        for next_token in (drafted[kept_length], other_than(drafted[kept_length])):
            model = fake_model()
            drafts, prefix = LocalDrafts(model_method(model), spec(rule)), TokenPrefix(PROMPT)
            first = next_draft(drafts, prefix, draft_length=draft_length, credit=credit)
            assert first is not None
            assert first.ids[: draft_length + 1] == drafted[: min(credit, draft_length + 1)]
            prefix.extend((*drafted[:kept_length], next_token))
            steps = model.steps
            second = next_draft(drafts, prefix, draft_length=draft_length, credit=credit)
            assert second == fresh_draft(spec(rule), prefix.ids, credit)
            fed_length = len(PROMPT) + credit - 1
            agrees_throughout = first.ids[kept_length : kept_length + 1] == (next_token,)
            expected = fed_length if agrees_throughout else min(fed_length, len(prefix) - 1)
            assert model.lengths_before_step[steps] == expected


@pytest.mark.parametrize("rule", RULES)
def test_rounds_without_a_draft_still_feed_the_drafter(rule: VerificationRule) -> None:
    """Draft lengths 3, 0, 0, 3: before the last the cache holds the committed tokens but one, and its draft is a fresh
    session's (C32)."""
    model = fake_model()
    drafts, prefix = LocalDrafts(model_method(model), spec(rule)), TokenPrefix(PROMPT)
    for draft_length, committed in ((3, (7, 7)), (0, (8,)), (0, (9,))):
        next_draft(drafts, prefix, draft_length=draft_length, credit=draft_length)
        prefix.extend(committed)
    next_draft(drafts, prefix, draft_length=0, credit=0)
    draft = next_draft(drafts, prefix, draft_length=3, credit=3)
    assert model.lengths_before_step[-3:] == [len(prefix) - 1, len(prefix), len(prefix) + 1]
    assert draft == fresh_draft(spec(rule), prefix.ids, 3)


ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 5),  # draft length
        st.integers(0, 6),  # tokens it may draft ahead of that
        st.integers(0, 12),  # steps that the drafter gets before the verdict
        st.booleans(),  # whether the draft is waited for
        st.integers(0, 6),  # kept length
        st.booleans(),  # whether the next token is what the drafter would draft
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds=ROUNDS, rule=st.sampled_from(RULES))
def test_after_any_history_the_next_draft_is_a_fresh_sessions(
    rounds: list[tuple[int, int, int, bool, int, bool]], rule: VerificationRule
) -> None:
    """100 drawn histories: verdicts at any moment, drafts kept in part, as a whole and beyond, drafting ahead, rounds
    without drafts, and lengths that change from round to round. A draft that is waited for comes."""
    drafts, prefix = LocalDrafts(model_method(), spec(rule)), TokenPrefix(PROMPT)
    for draft_length, ahead, steps, is_waited_for, kept_length, is_expected in rounds:
        drafts.commit(prefix, draft_length=draft_length, credit=draft_length + ahead if draft_length else 0)
        drafts.work(1000 if is_waited_for else steps)
        expected = fresh_draft(spec(rule), prefix.ids, 7)
        if is_waited_for and draft_length:
            draft = drafts.store.find(prefix.digest(), draft_length)
            assert draft is not None
            assert draft == expected[: len(draft)]
            assert draft.ids
        prefix.extend(expected.ids[:kept_length])
        prefix.extend([expected.ids[kept_length] if is_expected else other_than(expected.ids[kept_length])])
    draft = next_draft(drafts, prefix, draft_length=3, credit=5)
    assert draft == fresh_draft(spec(rule), prefix.ids, 5)
    assert drafts.failures == []


@pytest.mark.parametrize("rule", [VerificationRule.GREEDY, VerificationRule.COUPLED, VerificationRule.REJECTION])
@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
@pytest.mark.parametrize("steps_meanwhile", [0, 7])
async def test_a_drafter_equal_to_its_target_keeps_every_draft_for_200_rounds(
    rule: VerificationRule, schedule: Schedule, steps_meanwhile: int
) -> None:
    """However far ahead of the verdicts it gets (C30).

    Under `rejection` the row travels in float16, so each of the 400 draft tokens is refused with a probability of at
    most 2**-12; more than 3 refusals would be a false alarm with odds below 1e-5.
    """
    session_spec = spec(rule)
    model = fake_model()
    drafts = LocalDrafts(model_method(model), session_spec)
    target = LocalTarget(model, session_spec, meanwhile=lambda: drafts.work(steps_meanwhile))
    stats, ids = SpeculationStats(), list[int]()
    async for result in run_session(
        session_spec,
        PROMPT,
        SpeculationPlan(schedule=schedule, draft_length=2),
        target=target,
        drafts=drafts,
        output=CountingOutput(1 + 201 * 3),
        stats=stats,
    ):
        ids += result.delivery.token_ids
    assert stats.num_drafts >= 200
    assert (drafts.stalls, drafts.failures) == (0, [])
    if rule is VerificationRule.REJECTION:
        assert stats.num_rejections <= 3
    else:
        assert stats.num_rejections == 0
        assert stats.num_accepted_tokens == stats.num_draft_tokens >= 400
        assert ids == text_alone(rule)


@cache
def text_alone(rule: VerificationRule) -> list[int]:
    return target_alone(hashed_logits(VOCAB_SIZE), spec(rule), PROMPT, 1 + 201 * 3)


# ---- how far, and what is pushed when -------------------------------------------------------------------------------


@dataclass
class CountingMethod:
    """Drafts the length of the session's ids, a token a step; notes for whom and for what it was called."""

    max_context: int = 4096
    tokens_a_step: int = 1
    fails_on: str = ""
    failure: Exception = field(default_factory=lambda: DistributionUnusable("There is no token to draw."))
    has_nothing: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)

    def open(self, session: DraftView) -> str:
        return session.spec.session_id

    def ingest(self, state: str, session: DraftView) -> None:
        self.calls.append((state, "ingest"))

    def draft(self, state: str, session: DraftView, max_tokens: int) -> Sequence[DraftedToken]:
        assert max_tokens > 0
        self.calls.append((state, "draft"))
        if state == self.fails_on:
            raise self.failure
        if self.has_nothing:
            return []
        length = len(session.ids)
        return [DraftedToken(length + index) for index in range(min(max_tokens, self.tokens_a_step))]

    def rewind(self, state: str, length: int) -> None:
        self.calls.append((state, f"rewind {length}"))

    def kv_tokens(self, state: str, session: DraftView) -> int:
        return len(session.ids)


@dataclass
class Clock:
    """Time that passes when told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


IDLE_TTL_S = 10.0


class Service:
    """A drafter with its clock, and everything it has said."""

    def __init__(self, method: DraftMethod[Any], *, max_sessions: int = 4) -> None:
        self.clock = Clock()
        self.said: list[DrafterEvent] = []
        self.sessions = SessionTable[Entry[Any]](
            max_sessions=max_sessions,
            idle_ttl_s=IDLE_TTL_S,
            kv_tokens_of=lambda entry: method.kv_tokens(entry.state, entry.session),
            clock=self.clock,
        )
        self.drafter = Drafter(method, self.sessions)

    def tell(self, *commands: Command) -> Sequence[DrafterEvent]:
        """What the commands are answered with at once."""
        events = [event for command in commands for event in self.drafter.accept(command)]
        self.said += events
        return events

    def step(self) -> Sequence[DrafterEvent]:
        events = self.drafter.step()
        self.said += events
        return events

    def work(self) -> list[DrafterEvent]:
        """What comes out until nothing is left to do."""
        events: list[DrafterEvent] = []
        while self.drafter.has_work():
            events += self.step()
        return events


def opening(address: Address, committed: tuple[int, ...] = (0, 1, 2)) -> Open:
    return Open(address, spec_of(prompt_length=1, vocab_size=100, session_id=address.session_id), committed)


def commit(
    address: Address, base_length: int = 3, ids: tuple[int, ...] = (), *, draft_length: int = 2, credit: int = 2
) -> Commit:
    return Commit(address=address, base_length=base_length, committed_ids=ids, draft_length=draft_length, credit=credit)


def draft_of(event: DrafterEvent) -> tuple[int, tuple[int, ...]]:
    """Where a pushed draft stands, and its tokens."""
    assert isinstance(event.outcome, Drafted)
    return event.outcome.base_length, tuple(token.token_id for token in event.outcome.tokens)


A, B, C = Address(1, "a", 1), Address(2, "b", 1), Address(2, "c", 1)


def test_nothing_is_drafted_without_credit() -> None:
    """Not before the first commit, and not with credit 0; the tokens are read all the same."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A))
    assert service.work() == []
    service.tell(commit(A, 4, (7,), credit=0))
    assert service.work() == []
    assert method.calls == [("a", "ingest"), ("a", "ingest")]


def test_drafts_are_pushed_whole_and_then_up_to_the_credit() -> None:
    """The first as soon as it has its length; what is ahead of it in one more, as far as the credit goes."""
    service = Service(CountingMethod())
    service.tell(opening(A), commit(A, draft_length=3, credit=8))
    assert [draft_of(event) for event in service.work()] == [(3, (3, 4, 5)), (6, (6, 7, 8, 9, 10))]


@pytest.mark.parametrize(("draft_length", "credit", "drafts"), [(4, 2, [(3, (3, 4))]), (0, 1, [(3, (3,))])])
def test_a_draft_is_never_longer_than_its_credit(
    draft_length: int, credit: int, drafts: list[tuple[int, tuple[int, ...]]]
) -> None:
    """It is pushed when the credit is used up, though shorter than asked for."""
    service = Service(CountingMethod())
    service.tell(opening(A), commit(A, draft_length=draft_length, credit=credit))
    assert [draft_of(event) for event in service.work()] == drafts


def test_a_method_may_give_many_tokens_in_a_step() -> None:
    """They are pushed as one draft."""
    method = CountingMethod(tokens_a_step=100)
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=3, credit=7))
    assert [draft_of(event) for event in service.work()] == [(3, (3, 4, 5, 6, 7, 8, 9))]
    assert method.calls == [("a", "draft")]


def test_credit_given_again_is_not_drafted_again() -> None:
    """The same commit twice pushes nothing twice; a commit that agrees with the draft only moves the limit."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=2, credit=4))
    assert [draft_of(event) for event in service.work()] == [(3, (3, 4)), (5, (5, 6))]
    service.tell(commit(A, draft_length=2, credit=4))
    assert service.work() == []
    service.tell(commit(A, 5, (3, 4), draft_length=2, credit=4))
    assert [draft_of(event) for event in service.work()] == [(7, (7, 8))]
    assert not [call for call in method.calls if call[1].startswith("rewind")]


@pytest.mark.parametrize("steps", range(5))
def test_a_rejection_between_two_steps_rolls_back_at_once(steps: int) -> None:
    """Whatever was drafted by then: the next draft stands on the committed tokens, and nothing of the old one comes."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=4, credit=4))
    for _ in range(steps):
        if service.drafter.has_work():
            service.step()
    service.tell(commit(A, 5, (3, 90), draft_length=2, credit=2))
    assert [draft_of(event) for event in service.work()] == [(5, (5, 6))]
    rewound = [call for call in method.calls if call[1].startswith("rewind")]
    assert rewound == ([] if steps < 2 else [("a", "rewind 4")])


@pytest.mark.parametrize("drafted", [1, 2, 3])
def test_what_is_drafted_already_is_pushed_when_the_credit_shrinks(drafted: int) -> None:
    """Nothing more may be drafted, so nothing would ever push it, and an orchestrator would wait in vain."""
    service = Service(CountingMethod())
    service.tell(opening(A), commit(A, draft_length=4, credit=4))
    for _ in range(drafted):
        service.step()
    service.tell(commit(A, draft_length=1, credit=1))
    service.work()
    assert [draft_of(event) for event in service.said] == [(3, tuple(range(3, 3 + drafted)))]


def test_what_is_drafted_already_is_pushed_after_rounds_without_drafts() -> None:
    """Draft lengths 4, 0, 1, where the tokens committed meanwhile are those that were drafted (C32)."""
    service = Service(CountingMethod())
    service.tell(opening(A), commit(A, draft_length=4, credit=4))
    service.step()
    service.step()
    service.tell(commit(A, 4, (3,), draft_length=0, credit=0))
    service.work()
    service.tell(commit(A, 4, draft_length=1, credit=1))
    service.work()
    assert [draft_of(event) for event in service.said] == [(4, (4,))]


def test_nothing_to_offer_is_said_once_for_each_commit() -> None:
    """An empty draft, so that nobody waits for one; more committed tokens are a new chance."""
    method = CountingMethod(has_nothing=True)
    service = Service(method)
    service.tell(opening(A), commit(A))
    assert [draft_of(event) for event in service.work()] == [(3, ())]
    assert service.work() == []
    service.tell(commit(A, 4, (50,)))
    assert [draft_of(event) for event in service.work()] == [(4, ())]
    method.has_nothing = False
    service.tell(commit(A, 5, (51,)))
    assert [draft_of(event) for event in service.work()] == [(5, (5, 6))]


def test_what_was_drafted_before_nothing_is_left_to_offer_is_pushed() -> None:
    """A draft may end before its length."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=4, credit=8))
    service.step()
    service.step()
    method.has_nothing = True
    assert [draft_of(event) for event in service.work()] == [(3, (3, 4))]


def test_the_digest_names_the_prefix_that_the_draft_continues() -> None:
    """Of the committed tokens, and of those drafted before."""
    service = Service(CountingMethod())
    service.tell(opening(A, (7, 8)), commit(A, 2, draft_length=1, credit=2))
    digests = [event.outcome.prefix_digest for event in service.work() if isinstance(event.outcome, Drafted)]
    assert digests == [TokenPrefix((7, 8)).digest(), TokenPrefix((7, 8, 2)).digest()]


# ---- the end of the context -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", range(28, 33))
def test_committed_and_drafted_tokens_never_exceed_the_context(prompt_length: int) -> None:
    """The drafter holds 32, draft length 4, credit 9: what fits is drafted, then nothing, and no error (C50).

    The fake model itself refuses to hold more than its context.
    """
    drafts, prefix = (
        LocalDrafts(model_method(fake_model(max_context=32)), spec(VerificationRule.COUPLED)),
        TokenPrefix(),
    )
    prefix.extend([token_id % VOCAB_SIZE for token_id in range(prompt_length)])
    while len(prefix) <= 32:
        draft = next_draft(drafts, prefix, draft_length=4, credit=9)
        assert len(draft or Draft()) == min(9, 32 - len(prefix))
        prefix.extend([0])
    assert drafts.failures == []


@pytest.mark.parametrize("is_opening", [True, False])
def test_tokens_beyond_the_context_fail_the_session_alone(is_opening: bool) -> None:
    """A typed error that says to decode without the drafter; others go on (C50)."""
    service = Service(CountingMethod(max_context=5))
    service.tell(opening(B))
    if is_opening:
        (event,) = service.tell(opening(A, (0,) * 6))
    else:
        (event,) = service.tell(opening(A), commit(A, 6, (1, 1, 1)))
    assert (event.address, type(event.outcome)) == (A, ContextTooLong)
    service.tell(commit(B))
    assert [draft_of(event) for event in service.work() if event.address == B] == [(3, (3, 4))]


async def test_text_is_the_targets_when_the_drafter_runs_out_of_context() -> None:
    """Prompt 30, drafter 32, target 4,096: one draft of one token, then none, and the same text throughout (C50)."""
    prompt = [token_id % VOCAB_SIZE for token_id in range(30)]
    session_spec = spec_of(prompt_length=30, vocab_size=VOCAB_SIZE, rule=VerificationRule.COUPLED)
    drafts = LocalDrafts(model_method(fake_model(max_context=32)), session_spec)
    target = LocalTarget(fake_model(), session_spec)
    stats, ids = SpeculationStats(), list[int]()
    async for result in run_session(
        session_spec,
        prompt,
        SpeculationPlan(schedule=Schedule.PIPELINED, draft_length=4),
        target=target,
        drafts=drafts,
        output=CountingOutput(20),
        stats=stats,
    ):
        ids += result.delivery.token_ids
    assert ids == target_alone(hashed_logits(VOCAB_SIZE), session_spec, prompt, 20)
    assert stats.num_draft_tokens == 1
    assert {type(failure) for failure in drafts.failures} <= {ContextTooLong}


# ---- many sessions --------------------------------------------------------------------------------------------------


def test_a_session_that_waits_comes_before_one_that_drafts_ahead() -> None:
    """And both before one that only has to read."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), opening(B), opening(C))
    service.work()
    method.calls.clear()
    service.tell(commit(C, 4, (9,), credit=0), commit(A, draft_length=1, credit=3))
    service.step()
    service.tell(commit(B, draft_length=2, credit=2))
    service.work()
    assert method.calls == [
        ("a", "draft"),
        ("b", "draft"),
        ("b", "draft"),
        ("a", "draft"),
        ("a", "draft"),
        ("c", "ingest"),
    ]


def test_sessions_that_wait_are_served_in_turn_draft_by_draft() -> None:
    """A draft is finished before the next begins, so that the first one is out as early as can be."""
    method = CountingMethod()
    service = Service(method)
    for address in (A, B, C):
        service.tell(opening(address), commit(address, draft_length=2, credit=4))
    order = [event.address.session_id for event in service.work()]
    assert order == ["a", "b", "c"] * 2


def test_each_step_is_at_most_one_model_step() -> None:
    """Commands can be applied between any two of them."""
    model = fake_model()
    drafts = LocalDrafts(model_method(model), spec(VerificationRule.COUPLED))
    drafts.commit(TokenPrefix(PROMPT), draft_length=4, credit=9)
    steps = [0]
    while drafts.drafter.has_work():
        drafts.work(1)
        steps.append(model.steps)
    assert all(later - earlier <= 1 for earlier, later in pairwise(steps))
    assert steps[-1] == 9


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (DistributionUnusable("There is no token to draw."), "DISTRIBUTION_UNUSABLE"),
        (RuntimeError("the secret of the method"), "INTERNAL"),
    ],
)
def test_a_session_whose_method_fails_is_let_go_alone(failure: Exception, reason: str) -> None:
    """Its peer hears why, unless that is a fault of ours; the others get their drafts."""
    service = Service(CountingMethod(fails_on="b", failure=failure))
    for address in (A, B, C):
        service.tell(opening(address), commit(address))
    outcomes = {event.address: event.outcome for event in service.work()}
    error = outcomes[B]
    assert isinstance(error, PacelineError)
    assert error.reason == reason
    assert "secret" not in error.message
    assert isinstance(outcomes[A], Drafted)
    assert isinstance(outcomes[C], Drafted)
    assert {held.address for held in service.sessions} == {A, C}
    (event,) = service.tell(commit(B))
    assert isinstance(event.outcome, SessionNotFound)


# ---- stale, repeated and contradictory commands ---------------------------------------------------------------------


def test_a_commit_that_was_overtaken_is_dropped_and_counted() -> None:
    """An older base or an older epoch: not an error, and nothing changes."""
    service = Service(CountingMethod())
    newer = Address(1, "a", 2)
    service.tell(opening(A), opening(newer), commit(newer, 5, (3, 4), credit=0))
    service.work()
    assert service.tell(commit(newer, 4, (3,)), commit(A, 6, (7, 7, 7))) == []
    assert service.sessions.stale_items == 2
    assert service.work() == []
    service.tell(commit(newer, 5))
    assert [draft_of(event) for event in service.work()] == [(5, (5, 6))]


@pytest.mark.parametrize(
    ("base_length", "ids"),
    [
        (5, (9,)),  # a token is missing
        (4, (8, 9)),  # contradicts the committed tokens
        (3, (9,)),
        (3, (9, 9, 9, 9)),  # more tokens than that length
    ],
)
def test_tokens_that_do_not_join_on_are_refused(base_length: int, ids: tuple[int, ...]) -> None:
    """With a typed error; the session is as it was, and drafts for what it knows."""
    service = Service(CountingMethod())
    service.tell(opening(A))
    (event,) = service.tell(commit(A, base_length, ids))
    assert (event.address, type(event.outcome)) == (A, LengthMismatch)
    service.tell(commit(A, 4, (2, 9)))
    assert [draft_of(event) for event in service.work()] == [(4, (4, 5))]


def test_a_committed_id_outside_the_targets_vocabulary_is_refused() -> None:
    """Also by a method that has no vocabulary of its own and would copy it into a draft (C47)."""
    service = Service(CountingMethod())
    (event,) = service.tell(opening(A), commit(A, 5, (99, 100)))
    assert isinstance(event.outcome, PayloadInvalid)
    service.tell(commit(A, 4, (99,)))
    assert [draft_of(event) for event in service.work()] == [(4, (4, 5))]


def test_committed_tokens_may_be_told_again() -> None:
    """From anywhere, also from the prompt on: a commit is idempotent."""
    service = Service(CountingMethod())
    service.tell(opening(A), commit(A, 6, (0, 1, 2, 8, 9, 8)))
    assert [draft_of(event) for event in service.work()] == [(6, (6, 7))]
    assert service.tell(commit(A, 6, (9, 8)), commit(A, 6, (0, 1, 2, 8, 9, 8)), commit(A, 6)) == []
    assert service.work() == []


def test_a_session_opened_again_starts_from_its_tokens() -> None:
    """The work of the old one is dropped, whatever it waited for."""
    service = Service(CountingMethod())
    service.tell(opening(A), commit(A, draft_length=4, credit=8))
    service.step()
    other_peer = Address(7, "a", 2)
    (event,) = service.tell(opening(other_peer, (0, 1, 2, 3, 4, 5, 6)))
    assert (event.address, type(event.outcome)) == (A, StaleEpoch)
    assert service.work() == []
    service.tell(commit(other_peer, 7))
    (event,) = service.work()
    assert (event.address, draft_of(event)) == (other_peer, (7, (7, 8)))


def test_more_sessions_than_there_is_room_for_are_refused() -> None:
    """At once, and the ones that are held go on."""
    service = Service(CountingMethod(), max_sessions=1)
    service.tell(opening(A))
    (event,) = service.tell(opening(B))
    assert (event.address, type(event.outcome)) == (B, QueueFull)
    service.tell(commit(A))
    assert [draft_of(event) for event in service.work()] == [(3, (3, 4))]


def test_idle_sessions_are_forgotten_with_their_work() -> None:
    """A commit counts as use."""
    service = Service(CountingMethod())
    service.tell(opening(A), opening(B))
    service.clock.now_s = IDLE_TTL_S - 1
    service.tell(commit(A))
    service.clock.now_s += 2
    assert service.drafter.expire_idle() == []
    assert [held.address for held in service.sessions] == [A]
    assert [event.address for event in service.work()] == [A]


def test_sessions_of_a_peer_that_is_gone_are_let_go_with_their_work() -> None:
    """Theirs alone: nothing is drafted for them any more."""
    service = Service(CountingMethod())
    stranger = Address(9, "stranger", 1)
    service.tell(opening(A), opening(stranger), commit(A), commit(stranger))
    assert service.tell(PeerGone(A.peer)) == []
    assert [held.address for held in service.sessions] == [stranger]
    assert {event.address for event in service.work()} == {stranger}


# ---- figures --------------------------------------------------------------------------------------------------------


def test_sessions_that_wait_for_a_step_are_counted() -> None:
    """Whatever they wait for."""
    service = Service(CountingMethod())
    service.tell(opening(A), opening(B), commit(B))
    assert service.drafter.waiting == 2
    service.work()
    assert service.drafter.waiting == 0


def test_tokens_held_are_those_in_the_draft_models_caches() -> None:
    """From the opening on those of the prompt, which will be there; then what was fed, less what is rolled back."""
    method: DraftMethod[Any] = model_method()
    service = Service(method)
    service.tell(Open(A, spec_of(prompt_length=5, vocab_size=VOCAB_SIZE, session_id="a"), PROMPT))
    assert service.sessions.kv_used_tokens == 5
    service.tell(commit(A, 5, draft_length=4, credit=4))
    service.work()
    assert service.sessions.kv_used_tokens == 5 + 3  # the last token drafted is not fed
    held = service.sessions.find("a")
    assert held is not None
    drafted = tuple(held.state.session.ids[5:])
    service.tell(commit(A, 7, (drafted[0], other_than(drafted[1])), credit=0))
    assert service.sessions.kv_used_tokens == 7
    service.tell(Close(A))
    assert service.sessions.kv_used_tokens == 0


def test_a_method_without_a_model_holds_no_keys_and_values() -> None:
    """However long the sessions are."""
    method: DraftMethod[Any] = lookup_method()
    service = Service(method)
    service.tell(opening(A, (1, 2, 1, 2)), commit(A, 4))
    service.work()
    assert service.sessions.kv_used_tokens == 0


# ---- any history ----------------------------------------------------------------------------------------------------

addresses = st.builds(Address, st.integers(1, 2), st.sampled_from(["x", "y"]), st.integers(1, 3))
token_ids = st.lists(st.integers(0, 5), max_size=3).map(tuple)
commands = st.one_of(
    st.builds(opening, addresses, st.lists(st.integers(0, 5), min_size=1, max_size=9).map(tuple)),
    st.builds(
        commit,
        addresses,
        st.integers(0, 12) | st.just(2**32 - 1),
        token_ids,
        draft_length=st.integers(0, 4),
        credit=st.integers(0, 9),
    ),
    st.builds(Close, addresses),
)
actions = st.lists(commands | st.sampled_from(["step", "step", "step", "wait", "drain"]), max_size=25)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(history=actions, tokens_a_step=st.integers(0, 3), fails_on=st.sampled_from(["", "y"]))
def test_no_history_breaks_the_worker_or_a_session_beside_it(
    history: list[Command | str], tokens_a_step: int, fails_on: str
) -> None:
    """200 drawn histories of opening, committing and closing, in any order and on any lengths, of which one session may
    fail in its steps, and a drain, beside a well-behaved session: only typed errors, each for a session that was named,
    the drafts of the good one as if alone, and at any moment the right count of tokens held, which ends at 0."""
    method = CountingMethod(max_context=10, tokens_a_step=tokens_a_step, fails_on=fails_on)
    service = Service(method, max_sessions=3)
    alone = Service(CountingMethod(max_context=10, tokens_a_step=tokens_a_step))
    for each in (service, alone):
        each.tell(opening(A), commit(A, 4, (9,), draft_length=2, credit=5))
    named = {command.address for command in history if not isinstance(command, str | PeerGone)} | {A}
    for action in history:
        if not isinstance(action, str):
            service.tell(action)
        elif action == "wait":
            service.clock.now_s += 3
            service.drafter.expire_idle()
            service.sessions.use(A)
        elif action == "drain":
            service.sessions.is_draining = True
        elif service.drafter.has_work():
            service.step()
        assert_queued_by_urgency(service)
        assert service.sessions.kv_used_tokens == sum(len(held.state.session.ids) for held in service.sessions)
    service.work()
    assert {event.address for event in service.said} <= named
    assert all(isinstance(event.outcome, PacelineError | Drafted) for event in service.said)
    assert [draft_of(event) for event in service.said if event.address == A] == [
        draft_of(event) for event in alone.work()
    ]
    for event in service.said:
        if isinstance(event.outcome, Drafted):
            assert event.outcome.base_length + len(event.outcome.tokens) <= 10
    service.tell(*(Close(held.address) for held in list(service.sessions)))
    assert (len(service.sessions), service.drafter.has_work()) == (0, False)
    assert not any(service.drafter._queues.values())
    assert (service.sessions.kv_used_tokens, service.drafter.waiting) == (0, 0)


def assert_queued_by_urgency(service: Service) -> None:
    """The invariant of `Drafter`: a session stands in the queue of its urgency, or in none."""
    urgencies = {held.address.session_id: held.state.session.urgency for held in service.sessions}
    queued = {session_id: urgency for urgency, queue in service.drafter._queues.items() for session_id in queue}
    assert queued == {session_id: urgency for session_id, urgency in urgencies.items() if urgency is not None}


def test_a_draft_that_is_due_at_once_leaves_its_session_drafting_ahead() -> None:
    """A shorter draft length makes it whole: those who still wait for their first token come before it."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=4, credit=8))
    service.step()
    service.step()
    (event,) = service.tell(commit(A, draft_length=2, credit=8))
    assert draft_of(event) == (3, (3, 4))
    assert_queued_by_urgency(service)
    service.tell(opening(B), commit(B, draft_length=1, credit=1))
    method.calls.clear()
    service.step()
    assert method.calls == [("b", "draft")]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 1), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8
    )
)
def test_a_draft_or_word_that_there_is_none_always_comes(rounds: list[tuple[int, int, int, int]]) -> None:
    """100 drawn histories of prompt lookup over two tokens: whoever asks within the credit never waits in vain."""
    session_spec = spec_of(prompt_length=1, vocab_size=2)
    drafts, prefix = LocalDrafts(lookup_method(), session_spec), TokenPrefix((0,))
    for steps, token_id, draft_length, ahead in rounds:
        drafts.commit(prefix, draft_length=draft_length, credit=draft_length + ahead if draft_length else 0)
        drafts.work(steps)
        prefix.extend([token_id])
        assert next_draft(drafts, prefix, draft_length=2, credit=2) is not None
    assert drafts.failures == []
