"""The target's worker: drafts in order of arrival, stale work dropped and counted, one session never harms another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    LengthMismatch,
    PacelineError,
    QueueFull,
    SessionNotFound,
    StaleEpoch,
)
from paceline.sessions import Address, Close, Open, PeerGone, SessionTable
from paceline.types import Row, VerdictRows, VerificationRule
from target_service import scheduler
from target_service.scheduler import Command, Judge, Scheduler, TargetEvent
from target_service.verifier import DraftToJudge, TargetSession, Verifier
from tests.fakes import FakeCache, FakeModel, Logits, hashed_logits, spec_of

VOCAB_SIZE, MAX_CONTEXT = 8, 20
PROMPT = (3, 1, 4)
IDLE_TTL_S = 10.0


@dataclass
class Clock:
    """Time that passes when told to."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Service:
    """A scheduler over a fake model, with its clock and everything it has said."""

    max_sessions: int = 4
    logits: Logits = field(default_factory=lambda: hashed_logits(VOCAB_SIZE))
    clock: Clock = field(default_factory=Clock)
    said: list[TargetEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = FakeModel(self.logits, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)
        self.sessions = SessionTable[TargetSession[FakeCache]](
            max_sessions=self.max_sessions,
            idle_ttl_s=IDLE_TTL_S,
            kv_tokens_of=lambda session: session.kv_tokens,
            clock=self.clock,
        )
        self.scheduler = Scheduler(Verifier[FakeCache](self.model), self.sessions, clock=self.clock)

    def tell(self, *commands: Command) -> Sequence[TargetEvent]:
        """What the commands are answered with at once."""
        events = [event for command in commands for event in self.scheduler.accept(command)]
        self.said += events
        return events

    def work(self) -> Sequence[TargetEvent]:
        """What comes out until nothing is left to do."""
        events: list[TargetEvent] = []
        while self.scheduler.has_work():
            events += self.scheduler.step()
        self.said += events
        return events


def opening(address: Address, committed: tuple[int, ...] = PROMPT) -> Open:
    spec = spec_of(
        prompt_length=len(PROMPT), vocab_size=VOCAB_SIZE, rule=VerificationRule.COUPLED, session_id=address.session_id
    )
    return Open(address, spec, committed)


def judge(
    address: Address,
    draft_ids: tuple[int, ...] = (),
    *,
    base_length: int = len(PROMPT),
    committed_ids: tuple[int, ...] = (),
    arrived_s: float = 100.0,
    deadline_s: float | None = None,
) -> Judge:
    draft = DraftToJudge(base_length=base_length, committed_ids=committed_ids, draft_ids=draft_ids, distributions=None)
    return Judge(address=address, draft=draft, arrived_s=arrived_s, deadline_s=deadline_s)


def rows_of(event: TargetEvent) -> tuple[Row, ...]:
    assert isinstance(event.outcome, VerdictRows)
    return event.outcome.rows


def fresh_rows(draft_ids: tuple[int, ...], committed: tuple[int, ...] = PROMPT) -> tuple[Row, ...]:
    """The verdict of a service that has never seen anything else."""
    service, address = Service(), Address(0, "fresh", 1)
    service.tell(opening(address, committed), judge(address, draft_ids, base_length=len(committed)))
    (event,) = service.work()
    return rows_of(event)


A, B = Address(1, "a", 1), Address(2, "b", 1)


def test_drafts_are_judged_in_the_order_of_their_arrival() -> None:
    """One session a step, whoever sent them; the answer goes to the peer that asked."""
    service = Service()
    assert service.tell(opening(A), opening(B), judge(B, (1, 2)), judge(A, (5,)), judge(B, (0,))) == []
    events = service.work()
    assert [event.address for event in events] == [B, A, B]
    assert [rows_of(event) for event in events] == [fresh_rows((1, 2)), fresh_rows((5,)), fresh_rows((0,))]
    assert service.model.steps == 3


def test_opening_costs_no_step() -> None:
    """The prompt is read with the first draft."""
    service = Service()
    service.tell(opening(A))
    assert not service.scheduler.has_work()
    assert service.model.steps == 0


def test_verdict_says_how_long_the_draft_waited() -> None:
    """From its arrival to the start of its step; never less than nothing."""
    service = Service()
    service.tell(opening(A), judge(A, arrived_s=98.5), judge(A, arrived_s=101.0))
    waits_s = [event.outcome.queue_time_s for event in service.work() if isinstance(event.outcome, VerdictRows)]
    assert waits_s == [1.5, 0.0]


def test_work_that_is_late_already_is_not_begun() -> None:
    """A typed error, and no step; work that is just in time is done."""
    service = Service()
    service.tell(opening(A), judge(A, deadline_s=99.9), judge(A, deadline_s=100.0))
    late, in_time = service.work()
    assert isinstance(late.outcome, DeadlineExceeded)
    assert rows_of(in_time) == fresh_rows(())
    assert service.model.steps == 1


@pytest.mark.parametrize("times", [1, 2])
def test_draft_of_a_preempted_session_is_dropped_and_counted(times: int) -> None:
    """The session was opened again, once or twice, while its draft waited: no verdict, no step, no change (C33)."""
    service = Service()
    service.tell(opening(A), judge(A, (1, 2)))
    newer = A
    for epoch in range(2, 2 + times):
        newer = Address(1, "a", epoch)
        service.tell(opening(newer, (*PROMPT, 6)))
    assert service.work() == []
    assert (service.sessions.stale_items, service.model.steps) == (1, 0)
    service.tell(judge(newer, (1, 2), base_length=4))
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((1, 2), (*PROMPT, 6))


def test_draft_of_a_closed_session_is_answered_by_an_error() -> None:
    """It was closed while its draft waited: no step is spent on it (C33)."""
    service = Service()
    service.tell(opening(A), judge(A, (1, 2)), Close(A))
    (event,) = service.work()
    assert isinstance(event.outcome, SessionNotFound)
    assert (event.address, service.model.steps, len(service.sessions)) == (A, 0, 0)


def test_draft_on_fewer_tokens_than_are_committed_is_stale() -> None:
    """A message that was overtaken: dropped and counted, neither an error nor applied."""
    service = Service()
    service.tell(opening(A), judge(A, (1,), base_length=5, committed_ids=(6, 7)), judge(A, (1,), base_length=4))
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((1,), (*PROMPT, 6, 7))
    assert service.sessions.stale_items == 1


def test_repeated_draft_is_answered_again_in_the_same_words() -> None:
    """A duplicate costs a step and changes nothing."""
    service = Service()
    asked = judge(A, (1, 2), base_length=4, committed_ids=(6,))
    service.tell(opening(A), asked, asked)
    first, second = service.work()
    assert rows_of(first) == rows_of(second) == fresh_rows((1, 2), (*PROMPT, 6))


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (judge(Address(1, "bad", 1), base_length=5, committed_ids=(6,)), LengthMismatch),
        (judge(Address(1, "bad", 1), (0,) * MAX_CONTEXT), ContextTooLong),
        (judge(Address(1, "bad", 2)), SessionNotFound),
        (judge(Address(1, "unknown", 1)), SessionNotFound),
    ],
)
def test_draft_that_cannot_be_judged_fails_its_session_alone(bad: Judge, kind: type[PacelineError]) -> None:
    """A typed error for whoever sent it; the session beside it is judged as if nothing had happened."""
    service = Service()
    service.tell(opening(Address(1, "bad", 1)), opening(A), judge(A, (1, 2)), bad, judge(A, (5,)))
    first, failed, second = service.work()
    assert (failed.address, type(failed.outcome)) == (bad.address, kind)
    assert [rows_of(first), rows_of(second)] == [fresh_rows((1, 2)), fresh_rows((5,))]


def test_fault_of_the_model_fails_its_session_alone() -> None:
    """Its peer hears that something went wrong, not what, and the session is let go; the others go on."""

    def faulty(ids: Sequence[int]) -> Sequence[float]:
        if ids[-1] == 7:
            raise RuntimeError("the secret of token 7")
        return hashed_logits(VOCAB_SIZE)(ids)

    service = Service(logits=faulty)
    service.tell(opening(A), opening(B), judge(A, (7,)), judge(B, (1, 2)), judge(A))
    fault, verdict, gone = service.work()
    assert isinstance(fault.outcome, PacelineError)
    assert (fault.address, fault.outcome.reason) == (A, "INTERNAL")
    assert "secret" not in fault.outcome.message
    assert rows_of(verdict) == fresh_rows((1, 2))
    assert isinstance(gone.outcome, SessionNotFound)


def test_session_that_does_not_fit_is_refused_at_once() -> None:
    """A prompt beyond the context, or more sessions than there is room for."""
    service = Service(max_sessions=1)
    (too_long,) = service.tell(opening(A, (0,) * (MAX_CONTEXT + 1)))
    assert (too_long.address, type(too_long.outcome)) == (A, ContextTooLong)
    service.tell(opening(A))
    (too_many,) = service.tell(opening(B))
    assert (too_many.address, type(too_many.outcome)) == (B, QueueFull)
    assert len(service.sessions) == 1


def test_older_holder_is_told_when_another_peer_takes_the_session() -> None:
    """It must let go; the newer one gets no word of that."""
    service = Service()
    service.tell(opening(A))
    (event,) = service.tell(opening(Address(9, "a", 2)))
    assert (event.address, type(event.outcome)) == (A, StaleEpoch)


def test_idle_sessions_are_forgotten() -> None:
    """Those that nobody used for the idle time; a draft counts as use."""
    service = Service()
    service.tell(opening(A), opening(B))
    service.clock.now_s += IDLE_TTL_S - 1
    service.tell(judge(A))
    service.work()
    service.clock.now_s += 2
    assert service.scheduler.expire_idle() == []
    assert [held.address for held in service.sessions] == [A]
    service.tell(judge(B))
    (event,) = service.work()
    assert isinstance(event.outcome, SessionNotFound)


def test_sessions_of_a_peer_that_is_gone_are_let_go() -> None:
    """Theirs alone; one that was opened again by another stream stays, and what still comes for the others is not found."""
    service = Service()
    moved = Address(A.peer, "moved", 1)
    service.tell(opening(A), opening(moved), opening(Address(9, "moved", 2)))
    assert service.tell(PeerGone(A.peer)) == []
    assert [held.address.peer for held in service.sessions] == [9]
    service.tell(judge(A))
    (event,) = service.work()
    assert isinstance(event.outcome, SessionNotFound)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_tokens_of_a_prompt_count_from_its_opening_and_then_those_in_the_cache() -> None:
    """Also those of a draft, until the next one tells that they are rolled back."""
    service = Service()
    service.tell(opening(A))
    assert service.sessions.kv_used_tokens == 3
    service.tell(judge(A, (1, 2, 5)))
    service.work()
    assert service.sessions.kv_used_tokens == 6
    service.tell(judge(A, (1,), base_length=4, committed_ids=(7,)))
    service.work()
    assert service.sessions.kv_used_tokens == 5
    service.tell(opening(Address(1, "a", 2), (*PROMPT, 7, 7, 7, 7)))
    assert service.sessions.kv_used_tokens == 7
    service.tell(Close(Address(1, "a", 2)))
    assert service.sessions.kv_used_tokens == 0


def test_drafts_that_wait_are_counted() -> None:
    """Until their step."""
    service = Service()
    service.tell(opening(A), judge(A), judge(A))
    assert service.scheduler.waiting == 2
    service.work()
    assert service.scheduler.waiting == 0


# ---- any history ----------------------------------------------------------------------------------------------------

addresses = st.builds(Address, st.integers(1, 2), st.sampled_from(["x", "y"]), st.integers(1, 3))
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple)
commands = st.one_of(
    st.builds(
        opening,
        addresses,
        st.lists(st.integers(0, 7), min_size=3, max_size=MAX_CONTEXT + 1).map(tuple) | st.just(PROMPT),
    ),
    st.builds(
        judge,
        addresses,
        token_ids,
        base_length=st.integers(0, 8) | st.just(2**32 - 1),
        committed_ids=token_ids,
        deadline_s=st.none() | st.sampled_from([0.0, 1e9]),
    ),
    st.builds(Close, addresses),
)
actions = st.lists(commands | st.sampled_from(["step", "step", "wait", "good draft", "drain"]), max_size=25)
FAULTY_TOKEN = 7


def faulty_logits(ids: Sequence[int]) -> Sequence[float]:
    if ids[-1] == FAULTY_TOKEN:
        raise RuntimeError("broken on purpose")
    return hashed_logits(VOCAB_SIZE)(ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(history=actions)
def test_no_history_breaks_the_worker_or_a_session_beside_it(history: list[Command | str]) -> None:
    """300 drawn histories of opening, judging and closing, in any order and on any lengths, with a model that fails at
    one token and a drain, while a well-behaved session goes on: only typed errors, each for a session that was named,
    verdicts of the good one as if alone, and at any moment the right count of tokens held, which ends at 0."""
    service = Service(max_sessions=3, logits=faulty_logits)
    named = {command.address for command in history if not isinstance(command, str | PeerGone)} | {A}
    committed: tuple[int, ...] = PROMPT
    pending = False
    service.tell(opening(A))
    for action in [*history, "good draft", *["step"] * (len(history) + 1)]:
        if not isinstance(action, str):
            service.tell(action)
        elif action == "wait":
            service.clock.now_s += 3
            service.scheduler.expire_idle()
            service.sessions.use(A)
        elif action == "drain":
            service.sessions.is_draining = True
        elif action == "good draft" and not pending and len(committed) < MAX_CONTEXT - 2:
            service.tell(judge(A, (1, 2), base_length=len(committed), committed_ids=committed[-1:]))
            pending = True
        elif action == "step" and service.scheduler.has_work():
            events = service.scheduler.step()
            service.said += events
            for event in events:
                if event.address == A:
                    assert rows_of(event) == fresh_rows((1, 2), committed)
                    committed, pending = (*committed, 1), False
        assert service.sessions.kv_used_tokens == tokens_held(service)
    assert not pending
    assert {event.address for event in service.said} <= named
    assert all(isinstance(event.outcome, PacelineError | VerdictRows) for event in service.said)
    assert len({held.address.session_id for held in service.sessions}) == len(service.sessions) <= 3
    service.tell(*(Close(held.address) for held in list(service.sessions)))
    service.work()
    assert (len(service.sessions), service.scheduler.has_work()) == (0, False)
    assert service.sessions.kv_used_tokens == 0


def tokens_held(service: Service) -> int:
    """Counted by going through all sessions."""
    return sum(max(held.state.cache.length, len(held.state.committed)) for held in service.sessions)


def test_only_so_many_drafts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a draft is refused at once with a hint, and those that wait are judged."""
    monkeypatch.setattr(scheduler, "MAX_QUEUED", 2)
    service = Service()
    service.tell(opening(A))
    said = service.tell(judge(A, (1, 2)), judge(A, (1, 2)), judge(A, (1, 2)))
    assert [type(event.outcome) for event in said] == [QueueFull]
    assert len(service.work()) == 2
