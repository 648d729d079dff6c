"""Drafting for many sessions: after any history the next draft is a fresh session's, and it always comes.

The fake model's logits depend on every token in its cache, so a cache cut by one too many or too few shows at once.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from drafter_service.drafter import Command, Drafter, DrafterEvent, Entry
from drafter_service.method import DraftMethod, DraftView, DraftWork, Outcome, Progress
from drafter_service.methods import draft_model
from drafter_service.methods.draft_model import DraftModelMethod, DraftState
from drafter_service.methods.ngram import NgramMethod
from drafter_service.session import Commit, Drafted
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import DraftOrder, run_session
from paceline.engine.interface import Extension, Memory
from paceline.engine.step_plan import StepReport
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
from paceline.sampling import (
    DistributionUnusable,
    DraftedToken,
    DraftRow,
    TokenHistory,
    choose_draft_tokens,
    draw_draft_token,
)
from paceline.sessions import Address, Close, Open, PeerGone, SessionTable
from paceline.types import Draft, SamplingParams, SessionSpec, SpeculationStats, VerificationRule
from tests.fakes import (
    CountingOutput,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    counting_logits,
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


def model_method(model: FakeModel | None = None, *, max_batch_tokens: int = 512) -> DraftModelMethod[FakeCache]:
    return DraftModelMethod(model or fake_model(), distribution_entries=64, max_batch_tokens=max_batch_tokens)


def lookup_method() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)


def next_draft(drafts: LocalDrafts, prefix: TokenPrefix, *, draft_length: int, credit: int) -> Draft | None:
    """What there is for the prefix once the drafter has done all it may."""
    drafts.commit(prefix, DraftOrder(draft_length=draft_length, credit=credit))
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
        drafts.commit(prefix, DraftOrder(draft_length=draft_length, credit=draft_length + ahead if draft_length else 0))
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
        FixedPlanner(schedule=schedule, draft_length=2, rule=session_spec.effective_rule),
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


@dataclass(eq=False)
class Reader:
    """What `CountingMethod` keeps for a session."""

    name: str
    read_length: int = 0
    is_closed: bool = False


@dataclass
class CountingMethod:
    """Drafts the length of the session's ids; notes for whom and for what it was called.

    A step takes `sessions_a_step` sessions and gives each `tokens_a_step` tokens. `left_out` names a session that no step
    takes, `fails_on` one that has the failure for its outcome, `breaks_on` one that brings down the whole step.
    """

    max_context: int = 4096
    memory: Memory | None = None
    preemptions: int = 0
    tokens_a_step: int = 1
    sessions_a_step: int = 1000
    left_out: str = ""
    fails_on: str = ""
    breaks_on: str = ""
    failure: Exception = field(default_factory=lambda: DistributionUnusable("There is no token to draw."))
    has_nothing: bool = False
    is_lost: bool = False  # its device
    calls: list[tuple[str, str]] = field(default_factory=list)
    steps: list[list[str]] = field(default_factory=list)  # whom each step was for
    on_draft: Callable[[], None] = lambda: None

    def open(self, session: DraftView) -> Reader:
        return Reader(session.spec.session_id)

    def draft(self, batch: Sequence[DraftWork[Reader]]) -> Sequence[Outcome]:
        self.steps.append([work.state.name for work in batch])
        if self.breaks_on in self.steps[-1]:
            raise self.failure
        self.on_draft()
        taken = [work for work in batch if work.state.name != self.left_out][: self.sessions_a_step]
        return [self._outcome(work) if work in taken else Progress() for work in batch]

    def _outcome(self, work: DraftWork[Reader]) -> Outcome:
        reader, session = work.state, work.session
        assert not reader.is_closed
        self.calls.append((reader.name, "draft" if work.max_tokens else "ingest"))
        if reader.name == self.fails_on and isinstance(self.failure, PacelineError):
            return self.failure
        fed, reader.read_length = len(session.committed_ids) - reader.read_length, len(session.committed_ids)
        if self.has_nothing:
            return Progress(fed, drafted=())
        length = len(session.committed_ids) + len(session.drafted_ids)
        count = min(work.max_tokens, self.tokens_a_step)
        return Progress(fed, drafted=[DraftedToken(length + index) for index in range(count)])

    def can_step(self) -> bool:
        return not self.is_lost

    def rewind(self, state: Reader, length: int) -> None:
        self.calls.append((state.name, f"rewind {length}"))

    def pending_tokens(self, state: Reader, session: DraftView) -> int:
        return len(session.committed_ids) - state.read_length

    def close(self, state: Reader) -> None:
        assert not state.is_closed, "a session ends once"
        state.is_closed = True


@dataclass
class Clock:
    """Time that passes when told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_second(self) -> None:
        self.now_s += 1.0


IDLE_TTL_S = 10.0


class Service:
    """A drafter with its clock, and everything it has said."""

    def __init__(self, method: DraftMethod[Any], *, max_sessions: int = 4) -> None:
        self.clock = Clock()
        self.said: list[DrafterEvent] = []
        self.reports: list[StepReport] = []
        self.sessions = SessionTable[Entry[Any]](
            max_sessions=max_sessions,
            idle_ttl_s=IDLE_TTL_S,
            pending_tokens_of=lambda entry: method.pending_tokens(entry.state, entry.view),
            clock=self.clock,
        )
        self.drafter = Drafter(method, self.sessions, on_step=self.reports.append, clock=self.clock)

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


A, B, C, D = (Address(peer, name, 1) for peer, name in ((1, "a"), (2, "b"), (2, "c"), (2, "d")))


def test_nothing_is_drafted_without_credit() -> None:
    """Not before the first commit, and not with credit 0; the tokens are read all the same."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A))
    assert service.work() == []
    service.tell(commit(A, 4, (7,), credit=0))
    assert service.work() == []
    assert method.calls == [("a", "ingest"), ("a", "ingest")]


def test_a_method_that_says_it_has_caught_up_is_not_asked_again() -> None:
    """Even if it goes on counting tokens that it will never read."""

    class Blind(CountingMethod):
        def pending_tokens(self, state: Reader, session: DraftView) -> int:
            return len(session.committed_ids)

    method = Blind()
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=2, credit=2))
    for _ in range(3):
        assert service.drafter.has_work()
        service.step()
    assert not service.drafter.has_work()
    assert method.calls == [("a", "draft"), ("a", "draft"), ("a", "ingest")]


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
    """A draft may end before its length, and nobody is to wait for the rest of it."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), commit(A, draft_length=4, credit=8))
    service.step()
    service.step()
    method.has_nothing = True
    assert [draft_of(event) for event in service.work()] == [(3, (3, 4)), (5, ())]


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
        FixedPlanner(schedule=Schedule.PIPELINED, draft_length=4, rule=session_spec.effective_rule),
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


def test_a_step_takes_all_sessions_the_most_urgent_first() -> None:
    """One that waits comes before one that drafts ahead, and both before one that only has to read; work that comes
    between two steps joins the next."""
    method = CountingMethod()
    service = Service(method)
    service.tell(opening(A), opening(B), opening(C))
    service.work()
    method.steps.clear()
    service.tell(commit(C, 4, (9,), credit=0), commit(A, draft_length=1, credit=3))
    service.step()
    service.tell(commit(B, draft_length=2, credit=2), commit(C, 5, (9,), credit=0))
    service.work()
    assert method.steps == [["a", "c"], ["b", "a", "c"], ["b", "a"]]
    assert method.calls[-5:] == [("b", "draft"), ("a", "draft"), ("c", "ingest"), ("b", "draft"), ("a", "draft")]


def test_sessions_that_wait_are_served_in_turn_draft_by_draft() -> None:
    """Where a step takes one session, a draft is finished before the next begins: the first is out as early as can be."""
    service = Service(CountingMethod(sessions_a_step=1))
    for address in (A, B, C):
        service.tell(opening(address), commit(address, draft_length=2, credit=4))
    order = [event.address.session_id for event in service.work()]
    assert order == ["a", "b", "c"] * 2


@pytest.mark.parametrize("last", [commit(C, credit=90), commit(C, 4, (9,), credit=0)], ids=["drafts", "reads"])
def test_no_session_starves_where_a_step_takes_one(last: Commit) -> None:
    """Two with credit for ages are served from the first step on; the third has its turn within 8 steps for each."""
    method = CountingMethod(sessions_a_step=1)
    service = Service(method)
    for command in (commit(A, credit=90), commit(B, credit=90), last):
        service.tell(opening(command.address), command)
    for _ in range(3 * 8):
        service.step()
    assert {name for name, _ in method.calls} == {"a", "b", "c"}


def test_the_session_left_out_longest_is_next_whoever_else_is_served() -> None:
    """Fifteen that are served all the time have no turn of their own to waste, and one that cannot be served now does not
    keep the last one from its turn."""
    method = CountingMethod(sessions_a_step=15, left_out="15")
    service = Service(method, max_sessions=20)
    for number in range(17):
        address = Address(1, str(number), 1)
        service.tell(opening(address), commit(address, draft_length=90, credit=90))
    for _ in range(2 * 8):
        service.step()
    assert ("16", "draft") in method.calls


def test_a_drafts_time_is_that_of_the_steps_its_session_took_part_in() -> None:
    """Two steps of a second each for the first; the other one was left out of them, and had to wait."""
    method = CountingMethod(sessions_a_step=1)
    service = Service(method)
    method.on_draft = service.clock.pass_second
    for address in (A, B):
        service.tell(opening(address), commit(address, draft_length=2, credit=2))
    assert [event.outcome.draft_time_s for event in service.work() if isinstance(event.outcome, Drafted)] == [2.0, 2.0]
    assert [report.seconds for report in service.reports] == [1.0] * 4


def test_each_step_is_at_most_one_model_step() -> None:
    """Commands can be applied between any two of them."""
    model = fake_model()
    drafts = LocalDrafts(model_method(model), spec(VerificationRule.COUPLED))
    drafts.commit(TokenPrefix(PROMPT), DraftOrder(draft_length=4, credit=9))
    steps = [0]
    while drafts.drafter.has_work():
        drafts.work(1)
        steps.append(model.steps)
    assert all(later - earlier <= 1 for earlier, later in pairwise(steps))
    assert steps[-1] == 9


def test_all_sessions_share_one_model_step() -> None:
    """Prompts of any length, then one token each; a session that joins later does so at the next step. The reports say
    how much that was."""
    model = fake_model()
    service = Service(model_method(model))
    service.tell(opening(A, (0, 1, 2)), commit(A, draft_length=4, credit=4))
    service.tell(opening(B, (4, 1)), commit(B, 2, draft_length=4, credit=4))
    service.step()
    service.tell(opening(C, (5,)), commit(C, 1, credit=0))
    service.tell(Open(D, spec_of(prompt_length=1, vocab_size=VOCAB_SIZE, session_id="d"), (1, 2, 3)))
    service.work()
    assert model.batches == [[3, 2], [1, 1, 2], [1, 1], [1, 1]]
    assert [(report.sessions, report.tokens) for report in service.reports] == [(2, 5), (4, 4), (2, 2), (2, 2)]


def test_a_long_prompt_stalls_nobody() -> None:
    """It is fed in chunks of what the budget of a step leaves; the others have a token from each step meanwhile, and it
    drafts once it is fed."""
    model = fake_model()
    service = Service(model_method(model, max_batch_tokens=100))
    service.tell(opening(A), commit(A, draft_length=1, credit=8))
    service.tell(opening(B), commit(B, draft_length=1, credit=8))
    service.step()
    long_prompt = tuple(number % VOCAB_SIZE for number in range(250))
    service.tell(opening(C, long_prompt), commit(C, 250, draft_length=2, credit=2))
    said = [service.step() for _ in range(4)]
    assert [sorted(batch) for batch in model.batches[1:]] == [[1, 1, 98], [1, 1, 98], [1, 1, 54], [1, 1, 1]]
    assert [event.address for events in said for event in events] == [C]
    assert {event.address: draft_of(event)[0] for event in service.said} == {A: 3, B: 3, C: 250}


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (CountingMethod(fails_on="b"), "DISTRIBUTION_UNUSABLE"),
        (CountingMethod(breaks_on="b"), "DISTRIBUTION_UNUSABLE"),
        (CountingMethod(breaks_on="b", failure=RuntimeError("the secret of the method")), "INTERNAL"),
    ],
    ids=["outcome", "step", "fault"],
)
def test_a_session_whose_method_fails_is_let_go_alone(method: CountingMethod, reason: str) -> None:
    """Its peer hears why, unless that is a fault of ours; the others get their drafts, also out of a step that failed as
    a whole."""
    service = Service(method)
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


def test_a_lost_device_ends_the_service_and_no_session() -> None:
    """What it raises breaks the model thread, and with it the replica, whose sessions then draft elsewhere."""
    service = Service(CountingMethod(breaks_on="b", failure=RuntimeError("the device is gone"), is_lost=True))
    service.tell(opening(B), commit(B))
    with pytest.raises(RuntimeError, match="the device is gone"):
        service.work()


# ---- many sessions, one model ---------------------------------------------------------------------------------------


def crowd_spec(name: str) -> SessionSpec:
    """Sessions of one batch differ in everything: seed, rule and parameters."""
    number = ord(name) - ord("a")
    rule = RULES[number % len(RULES)]
    sampling = SamplingParams(temperature=0.0) if rule is VerificationRule.GREEDY else SAMPLING
    if number >= len(RULES):
        sampling = replace(sampling, top_k=5, presence_penalty=0.1 * number)
    return spec_of(
        prompt_length=1, vocab_size=VOCAB_SIZE, rule=rule, sampling=sampling, session_id=name, seed=100 + number
    )


@cache
def drawn_alone(name: str, ids: tuple[int, ...]) -> DraftedToken:
    """The token that a session drafts behind these ids, from scratch: nothing cached and nobody beside it."""
    session_spec = crowd_spec(name)
    token_id, distribution = draw_draft_token(
        torch.tensor(hashed_logits(VOCAB_SIZE)(ids)),
        params=session_spec.sampling,
        rule=session_spec.effective_rule,
        history=TokenHistory(ids[:1], ids[1:]),
        drafted=(),
        seed=session_spec.seed,
        position=len(ids),
    )
    return DraftedToken(token_id, distribution)


def drafted_alone(name: str, ids: Sequence[int], count: int) -> list[DraftedToken]:
    """The draft behind these ids, from scratch."""
    tokens: list[DraftedToken] = []
    for _ in range(count):
        tokens.append(drawn_alone(name, (*ids, *(token.token_id for token in tokens))))
    return tokens


def comparable(tokens: Iterable[DraftedToken]) -> list[tuple[int, Mapping[int, float] | None]]:
    return [(token.token_id, token.distribution.shares if token.distribution else None) for token in tokens]


class Crowd:
    """Sessions on one fake model, and what has been committed to each of them; every draft is checked as it is pushed.

    Sessions a and b are peer 1's, all others peer 2's. Time stands still for the method unless told.
    """

    def __init__(self, model: FakeModel, *, max_batch_tokens: int = 512) -> None:
        self.model, self.method_clock = model, Clock()
        self.method = DraftModelMethod(
            model, distribution_entries=64, max_batch_tokens=max_batch_tokens, clock=self.method_clock
        )
        self.service = Service(self.method, max_sessions=1000)
        self.committed: dict[str, list[int]] = {}  # of the sessions that are open, in the order of opening
        self._epochs: Counter[str] = Counter()

    def open(self, name: str, ids: Sequence[int]) -> None:
        """Or again, under a newer epoch."""
        self._epochs[name] += 1
        self.committed.pop(name, None)
        self.committed[name] = list(ids)
        assert self.service.tell(Open(self.address(name), crowd_spec(name), tuple(ids))) == []

    def address(self, name: str) -> Address:
        return Address(1 if name in "ab" else 2, name, self._epochs[name])

    def commit(self, name: str, new: Sequence[int] = (), *, draft_length: int = 2, credit: int = 2) -> None:
        """Commit more tokens."""
        self.committed[name] += new
        self._check(
            self.service.tell(
                commit(
                    self.address(name),
                    len(self.committed[name]),
                    tuple(new),
                    draft_length=draft_length,
                    credit=credit,
                )
            )
        )

    def keep(self, name: str, kept_length: int, *, is_expected: bool = False, draft_length: int, credit: int) -> None:
        """Commit so much of what the session drafts, and the next token, as expected or another one."""
        ids = [token.token_id for token in drafted_alone(name, self.committed[name], kept_length + 1)]
        if not is_expected:
            ids[-1] = other_than(ids[-1])
        self.commit(name, ids, draft_length=draft_length, credit=credit)

    def close(self, name: str) -> None:
        del self.committed[name]
        self.service.tell(Close(self.address(name)))

    def lose_peer(self, peer: int) -> None:
        for name in [name for name in self.committed if self.address(name).peer == peer]:
            del self.committed[name]
        self.service.tell(PeerGone(peer))

    def step(self) -> None:
        self._check(self.service.step())
        self.model.memory.check()

    def work(self, steps: int = 1000) -> None:
        for _ in range(steps):
            if self.service.drafter.has_work():
                self.step()

    def drafted(self, name: str) -> int:
        """How many tokens were pushed that continue what is committed now."""
        outcomes = [event.outcome for event in self.service.said if event.address == self.address(name)]
        ends = [
            outcome.base_length + len(outcome.tokens)
            for outcome in outcomes
            if isinstance(outcome, Drafted) and outcome.prefix_digest == self._digest(name, outcome.base_length)
        ]
        return max(ends, default=len(self.committed[name])) - len(self.committed[name])

    def _digest(self, name: str, length: int) -> int | None:
        """Of what is committed and the draft behind it; None for a length that is committed already."""
        ids, ahead = self.committed[name], length - len(self.committed[name])
        tokens = drafted_alone(name, ids, ahead)
        return None if ahead < 0 else TokenPrefix([*ids, *(token.token_id for token in tokens)]).digest()

    def _check(self, events: Sequence[DrafterEvent]) -> None:
        for event in events:
            outcome, name = event.outcome, event.address.session_id
            assert isinstance(outcome, Drafted), outcome
            ahead = outcome.base_length - len(self.committed[name])
            alone = drafted_alone(name, self.committed[name], ahead + len(outcome.tokens))[ahead:]
            assert comparable(outcome.tokens) == comparable(alone)
            assert outcome.prefix_digest == self._digest(name, outcome.base_length)


def small_model(*, num_blocks: int, block_size: int, max_context: int = 4096) -> FakeModel:
    return FakeModel(
        hashed_logits(VOCAB_SIZE),
        vocab_size=VOCAB_SIZE,
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=max_context,
    )


def prompt(length: int, *, variant: int = 0) -> list[int]:
    """Prompts of a variant begin alike."""
    return [(7 * position + position // 5 + variant) % VOCAB_SIZE for position in range(length)]


def test_every_mix_of_sessions_gives_each_its_draft_alone() -> None:
    """25 seeded histories of five sessions with their own parameters, in a memory that holds about two of them: they
    join, leave, are opened again, commit, roll back, lose their peer, their memory or their patience. Each draft and its
    distributions are those from scratch; the oldest session can always go on; no block is lost."""
    preemptions = reused_tokens = 0
    for seed in range(25):
        crowd = random_history(random.Random(seed))
        preemptions += crowd.service.drafter.preemptions
        reused_tokens += crowd.model.memory.reused_tokens
        while crowd.committed:
            oldest = next(iter(crowd.committed))
            credit = min(3, crowd.model.max_context - len(crowd.committed[oldest]) - 1)
            crowd.keep(oldest, 0, draft_length=3, credit=credit)
            crowd.work()
            assert crowd.drafted(oldest) == credit
            crowd.close(oldest)
        assert crowd.model.memory.held_tokens == 0
        assert crowd.service.sessions.kv_used_tokens == 0
    assert min(preemptions, reused_tokens) > 100, "the mixes are what they are meant to be"


def random_history(randomness: random.Random) -> Crowd:
    crowd = Crowd(small_model(num_blocks=18, block_size=4), max_batch_tokens=randomness.choice([8, 20, 100]))
    for _ in range(40):
        name = randomness.choice("abcde")
        action = randomness.choices(["open", "keep", "close", "peer", "silence"], [6, 12, 1, 0.3, 1])[0]
        if action == "silence":
            crowd.method_clock.now_s += 3.0
        elif action == "peer":
            crowd.lose_peer(randomness.choice([1, 2]))
        elif name not in crowd.committed:
            crowd.open(name, prompt(randomness.randint(1, 40), variant=randomness.randint(0, 1)))
        elif action == "open" and randomness.random() < 0.1:
            crowd.open(name, crowd.committed[name])
        elif action == "close":
            crowd.close(name)
        elif len(crowd.committed[name]) < 60:
            draft_length = randomness.randint(0, 4)
            crowd.keep(
                name,
                randomness.randint(0, 4),
                is_expected=randomness.random() < 0.5,
                draft_length=draft_length,
                credit=draft_length + randomness.randint(0, 4) if draft_length else 0,
            )
        crowd.work(randomness.randint(0, 6))
    return crowd


def test_a_session_drafts_the_same_beside_seven_others() -> None:
    """Temperature 1 and its own seed, alone and in a batch, twice each; every draft is checked against one from scratch
    as well (C13)."""
    runs = []
    for names in ("b", "abcdefgh", "b", "abcdefgh"):
        crowd = Crowd(fake_model())
        for name in names:
            crowd.open(name, prompt(9, variant=ord(name)))
            crowd.commit(name, draft_length=4, credit=9)
        crowd.work()
        assert crowd.model.batches == [[9] * len(names)] + [[1] * len(names)] * 8
        runs.append([draft_of(event) for event in crowd.service.said if event.address.session_id == "b"])
    assert runs == [runs[0]] * 4


def test_kept_none_and_kept_whole_share_a_batch() -> None:
    """One feeds its next token, the other its last draft token with it, and each row is its own session's (C40)."""
    for first, second in ("ab", "ba"):
        crowd = Crowd(fake_model())
        for name in "ab":
            crowd.open(name, prompt(9))
            crowd.commit(name, draft_length=3, credit=3)
        crowd.work()
        crowd.keep(first, 0, draft_length=3, credit=3)
        crowd.keep(second, 3, draft_length=3, credit=3)
        crowd.work()
        assert crowd.model.batches[-3:] == [[1, 2], [1, 1], [1, 1]]
        assert (crowd.drafted("a"), crowd.drafted("b")) == (3, 3)


@pytest.mark.parametrize("culprit", "abc")
def test_a_fault_in_one_row_costs_the_others_nothing(culprit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a row that holds no token nor one that breaks us: no step is repeated, and the others have their tokens."""
    for error in (DistributionUnusable("There is no token to draw."), RuntimeError("a fault of ours")):
        crowd = Crowd(fake_model())
        with monkeypatch.context() as patch:
            patch.setattr(draft_model, "choose_draft_tokens", failing_for(crowd_spec(culprit).seed, error))
            for name in "abc":
                crowd.open(name, prompt(9))
                crowd.commit(name)
            events = [*crowd.service.step(), *crowd.service.step()]
        outcomes = {event.address.session_id: event.outcome for event in events}
        refusal = outcomes.pop(culprit)
        assert isinstance(refusal, PacelineError)
        assert refusal.reason == ("INTERNAL" if isinstance(error, RuntimeError) else "DISTRIBUTION_UNUSABLE")
        assert all(isinstance(outcome, Drafted) for outcome in outcomes.values())
        assert crowd.model.batches == [[9, 9, 9], [1, 1]]


def failing_for(seed: int, error: Exception) -> Callable[..., list[DraftedToken]]:
    """Drawing that fails for one seed."""

    def draw(rows: Sequence[DraftRow], **kwargs: Any) -> list[DraftedToken]:
        if any(row.seed == seed for row in rows):
            raise error
        return choose_draft_tokens(rows, **kwargs)

    return draw


def test_a_model_step_that_fails_is_tried_session_by_session() -> None:
    """Only the culprit fails, and its memory is free again; the others' drafts are right, in this step and later."""
    crowd = Crowd(PoisonedModel(hashed_logits(VOCAB_SIZE), vocab_size=VOCAB_SIZE))
    for variant, name in enumerate("abc"):
        crowd.open(name, [*prompt(20, variant=variant), PoisonedModel.POISON if name == "b" else 0])
        crowd.commit(name)
    with capture_logs() as logs:
        events = crowd.service.step()
    assert [log["log_level"] for log in logs] == ["error"] * 2
    (event,) = [event for event in events if not isinstance(event.outcome, Drafted)]
    assert event.address.session_id == "b"
    assert isinstance(event.outcome, PacelineError)
    assert event.outcome.reason == "INTERNAL"
    del crowd.committed["b"]
    crowd.work()
    assert (crowd.drafted("a"), crowd.drafted("c")) == (2, 2)
    crowd.close("a")
    crowd.close("c")
    assert crowd.model.memory.held_tokens == 0


class PoisonedModel(FakeModel):
    """Cannot take one token as the last of a prompt."""

    POISON = VOCAB_SIZE - 1

    def step(self, batch: Sequence[Extension[FakeCache]]) -> list[Tensor]:
        if any(len(extension.ids) > 1 and extension.ids[-1] == self.POISON for extension in batch):
            raise RuntimeError("out of memory, or whatever a device may say")
        return super().step(batch)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_session_opened_last_gives_up_its_memory_and_waits() -> None:
    """Its drafts go on when there is room again, as if nothing had happened; until then nothing spins (C33)."""
    crowd = Crowd(small_model(num_blocks=12, block_size=4))
    for name in "ab":
        crowd.open(name, prompt(20, variant=ord(name)))
        crowd.commit(name, draft_length=2, credit=2)
    crowd.work()
    crowd.keep("a", 2, draft_length=8, credit=8)
    crowd.work()
    assert (crowd.drafted("a"), crowd.service.drafter.preemptions) == (8, 1)
    assert crowd.service.sessions.kv_used_tokens == 20, "what the other one gave up is to be fed again"
    crowd.keep("b", 1, draft_length=4, credit=4)
    crowd.work()
    assert (crowd.drafted("b"), crowd.service.drafter.waiting) == (0, 1)
    assert not crowd.service.drafter.has_work()
    # The verdict of a draft from before comes late, and again.
    stale = commit(crowd.address("b"), 21, (crowd.committed["b"][20],))
    assert crowd.service.tell(stale, stale) == []
    assert crowd.service.sessions.stale_items == 2
    crowd.work()
    crowd.close("a")
    crowd.work()
    assert crowd.drafted("b") == 4


def test_a_silent_session_gives_way_to_a_later_one() -> None:
    """One whose orchestrator has not asked for seconds, as housekeeping finds out; not one that asked just now."""
    crowd = Crowd(small_model(num_blocks=12, block_size=4))
    crowd.open("a", prompt(40))
    crowd.open("b", prompt(30, variant=1))
    crowd.commit("b", draft_length=1, credit=1)
    for _ in range(2):
        crowd.method_clock.now_s += 1.5
        crowd.keep("a", 0, draft_length=1, credit=1)
        crowd.service.drafter.expire_idle()
        crowd.work()
        assert (crowd.drafted("a"), crowd.drafted("b"), crowd.service.drafter.has_work()) == (1, 0, False)
    crowd.method_clock.now_s += 2.5
    assert not crowd.service.drafter.has_work()
    assert crowd.service.drafter.expire_idle() == []
    crowd.work()
    assert crowd.drafted("b") == 1


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_oldest_session_can_use_all_memory(block_size: int) -> None:
    """Beside two others that hold some and want to draft all the time, up to the last token of the context."""
    crowd = Crowd(small_model(num_blocks=48 // block_size, block_size=block_size))
    for name in "abc":
        crowd.open(name, prompt(16, variant=ord(name)))
    crowd.work()
    for name in "bc":
        crowd.commit(name, draft_length=4, credit=16)
    for _ in range(31):
        crowd.keep("a", 0, draft_length=1, credit=1)
        crowd.step()
        assert crowd.drafted("a") == 1
    assert len(crowd.committed["a"]) + 1 == 48 == crowd.model.max_context
    assert crowd.service.drafter.preemptions >= 2


ENDINGS = ["close", "peer", "idle", "row", "step", "again", "overtaken"]


@pytest.mark.parametrize("block_size", [1, 16])
def test_every_ending_gives_back_all_memory(block_size: int) -> None:
    """1,000 sessions, up to eight at once, each ended in one of seven ways in the middle of its work (C37)."""
    randomness = random.Random(block_size)
    model = PoisonedModel(
        counting_logits(VOCAB_SIZE), vocab_size=VOCAB_SIZE, num_blocks=512 // block_size, block_size=block_size
    )
    service = Service(model_method(model), max_sessions=1000)
    addresses = [Address(number % 5, str(number), 1) for number in range(8)]
    states: weakref.WeakSet[DraftState[FakeCache]] = weakref.WeakSet()
    for number in range(1000):
        place = randomness.randrange(8)
        address = addresses[place]
        if service.sessions.find(address.session_id) is not None:
            with capture_logs():
                end_session(service, address, ENDINGS[number % len(ENDINGS)])
            assert service.sessions.find(address.session_id) is None
        addresses[place] = replace(address, epoch=address.epoch + 1)
        length = randomness.randint(1, 40)
        service.tell(opening(addresses[place], tuple(prompt(length))))
        service.tell(commit(addresses[place], length, draft_length=2, credit=randomness.randint(0, 6)))
        for _ in range(randomness.randint(0, 3)):
            if service.drafter.has_work():
                service.step()
        states.update(held.state.state for held in service.sessions)
    assert (model.memory.held_tokens, len(states)) > (0, 0)
    for address in addresses:
        service.tell(Close(address))
    model.memory.check()
    assert (model.memory.held_tokens, len(service.sessions), service.drafter.waiting) == (0, 0, 0)
    service.said.clear()  # errors, whose tracebacks hold on to what was at hand
    gc.collect()
    assert len(states) == 0, "nothing else keeps what a session had either"


def end_session(service: Service, address: Address, ending: str) -> None:
    """Bring the session to its end; most take others of its kind along, as they do in life."""
    session = service.sessions.find(address.session_id)
    assert session is not None
    base_length = session.state.session.committed_length
    match ending:
        case "close":
            service.tell(Close(address))
        case "peer":
            service.tell(PeerGone(address.peer))
        case "idle":
            service.clock.now_s += IDLE_TTL_S + 1
            service.drafter.expire_idle()
        case "row":
            barred = SamplingParams(allowed_token_ids=(VOCAB_SIZE,))  # a token that the draft model does not have
            newer = replace(address, epoch=address.epoch + 1)
            bad_spec = spec_of(prompt_length=1, vocab_size=100, session_id=address.session_id, sampling=barred)
            service.tell(Open(newer, bad_spec, (0, 1)), commit(newer, 2))
            service.work()
            assert service.sessions.find(address.session_id) is None
            service.tell(Close(newer))
        case "step":
            service.tell(commit(address, base_length + 3, (0, 5, PoisonedModel.POISON)))
            service.work()
        case "again":
            service.tell(opening(replace(address, peer=9, epoch=address.epoch + 1)))
            service.tell(PeerGone(9))
        case "overtaken":
            service.tell(Close(replace(address, epoch=address.epoch + 1)))


@pytest.mark.parametrize("block_size", [1, 16])
def test_only_committed_tokens_are_shared(block_size: int) -> None:
    """Another session begins with the tokens of one, drafted ones included: it reuses what was committed, and no more
    (C36)."""
    crowd = Crowd(small_model(num_blocks=512 // block_size, block_size=block_size))
    crowd.open("a", prompt(32))
    crowd.commit("a", draft_length=4, credit=40)
    crowd.work()
    drafted = [token.token_id for token in drafted_alone("a", prompt(32), 40)]
    crowd.open("b", [*prompt(32), *drafted])
    crowd.commit("b")
    crowd.work()
    assert crowd.model.memory.reused_tokens == 32
    assert crowd.drafted("b") == 2


def test_sessions_that_share_a_prompt_compute_it_once() -> None:
    """Four answers to one prompt, all opened at once, in chunks: the others wait a step and reuse what the first one
    computed; their drafts are their own."""
    crowd = Crowd(fake_model(), max_batch_tokens=64)
    for name in "abcd":
        crowd.open(name, prompt(160))
        crowd.commit(name, draft_length=2, credit=2)
    crowd.work()
    assert [crowd.drafted(name) for name in "abcd"] == [2] * 4
    computed = sum(sum(batch) for batch in crowd.model.batches)
    assert computed <= 160 + 3 * 16 + 4
    assert crowd.model.memory.reused_tokens >= 3 * 144


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


def test_tokens_to_be_fed_are_counted_from_the_opening_on() -> None:
    """And after each commit and step; drafted tokens that are cached and committed later are none."""
    method: DraftMethod[Any] = model_method()
    service = Service(method)
    service.tell(Open(A, spec_of(prompt_length=5, vocab_size=VOCAB_SIZE, session_id="a"), PROMPT))
    assert service.sessions.kv_used_tokens == 5
    service.tell(commit(A, 5, draft_length=4, credit=4))
    service.work()
    assert service.sessions.kv_used_tokens == 0
    held = service.sessions.find("a")
    assert held is not None
    drafted = tuple(held.state.view.drafted_ids)
    service.tell(commit(A, 7, (drafted[0], other_than(drafted[1])), credit=0))
    assert service.sessions.kv_used_tokens == 1
    service.tell(Close(A))
    assert service.sessions.kv_used_tokens == 0


def test_a_method_without_a_model_has_no_tokens_to_feed() -> None:
    """However long the sessions are."""
    method: DraftMethod[Any] = lookup_method()
    service = Service(method)
    service.tell(opening(A, (1, 2, 1, 2)), commit(A, 4))
    assert service.sessions.kv_used_tokens == 0
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
@given(
    history=actions,
    tokens_a_step=st.integers(0, 3),
    sessions_a_step=st.integers(1, 3),
    fails_on=st.sampled_from(["", "y"]),
)
def test_no_history_breaks_the_worker_or_a_session_beside_it(
    history: list[Command | str], tokens_a_step: int, sessions_a_step: int, fails_on: str
) -> None:
    """200 drawn histories of opening, committing and closing, in any order and on any lengths, of which one session may
    fail in its steps, and a drain, beside a well-behaved session, in steps for any number: only typed errors, each for a
    session that was named, the drafts of the good one as if alone, and always the right count of tokens to be fed, which
    ends at 0."""
    method = CountingMethod(
        max_context=10, tokens_a_step=tokens_a_step, sessions_a_step=sessions_a_step, fails_on=fails_on
    )
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
        assert service.sessions.kv_used_tokens == sum(
            method.pending_tokens(held.state.state, held.state.view) for held in service.sessions
        )
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
    service.step()
    assert method.steps[-1] == ["b", "a"]


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
        drafts.commit(prefix, DraftOrder(draft_length=draft_length, credit=draft_length + ahead if draft_length else 0))
        drafts.work(steps)
        prefix.extend([token_id])
        assert next_draft(drafts, prefix, draft_length=2, credit=2) is not None
    assert drafts.failures == []
