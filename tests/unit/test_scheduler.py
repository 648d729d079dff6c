"""The target's worker: a step takes every session with a draft, stale work is dropped, one session never harms another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.step_plan import StepReport
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
from target_service.verifier import SILENT_S, DraftToJudge, TargetSession
from tests.fakes import FakeCache, FakeModel, Logits, hashed_logits, spec_of

VOCAB_SIZE, MAX_CONTEXT = 8, 20
PROMPT = (3, 1, 4)
IDLE_TTL_S = 10.0


@pytest.fixture(autouse=True, scope="module")
def _no_log() -> Iterator[None]:
    """Drawing a traceback takes longer than a hundred steps of a fake model."""
    with structlog.testing.capture_logs():
        yield


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
    row_s: float = 0.0  # that a step takes for each row
    max_batch_tokens: int = 256
    max_context: int = MAX_CONTEXT
    num_blocks: int = 64
    block_size: int = 16
    clock: Clock = field(default_factory=Clock)
    said: list[TargetEvent] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = FakeModel(
            self._timed_logits,
            vocab_size=VOCAB_SIZE,
            max_context=self.max_context,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        )
        self.sessions = SessionTable[TargetSession[FakeCache]](
            max_sessions=self.max_sessions,
            idle_ttl_s=IDLE_TTL_S,
            pending_tokens_of=lambda session: session.pending_tokens,
            held_tokens=lambda: self.model.memory.held_tokens,
            clock=self.clock,
        )
        self.scheduler = Scheduler(
            self.model,
            self.sessions,
            max_batch_tokens=self.max_batch_tokens,
            on_step=self.reports.append,
            clock=self.clock,
        )

    def _timed_logits(self, ids: Sequence[int]) -> Sequence[float]:
        self.clock.now_s += self.row_s
        return self.logits(ids)

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
        prompt_length=min(len(PROMPT), len(committed)),
        vocab_size=VOCAB_SIZE,
        rule=VerificationRule.COUPLED,
        session_id=address.session_id,
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


@cache
def fresh_rows(draft_ids: tuple[int, ...], committed: tuple[int, ...] = PROMPT) -> tuple[Row, ...]:
    """The verdict of a service that has never seen anything else."""
    service, address = Service(max_context=10_000, num_blocks=256), Address(0, "fresh", 1)
    service.tell(opening(address, committed), judge(address, draft_ids, base_length=len(committed)))
    (event,) = service.work()
    return rows_of(event)


A, B = Address(1, "a", 1), Address(2, "b", 1)


def test_every_session_with_a_draft_enters_the_step() -> None:
    """One forward pass for all of them, answered in the order of arrival, each to the peer that asked."""
    service = Service()
    assert service.tell(opening(A), opening(B), judge(B, (1, 2)), judge(A, (5,))) == []
    events = service.scheduler.step()
    assert [event.address for event in events] == [B, A]
    assert [rows_of(event) for event in events] == [fresh_rows((1, 2)), fresh_rows((5,))]
    assert service.model.batches == [[5, 4]]
    assert not service.scheduler.has_work()


def test_drafts_of_one_session_are_judged_one_a_step() -> None:
    """In the order of their arrival, while others have their turn."""
    service = Service()
    service.tell(opening(A), opening(B), judge(B, (1, 2)), judge(B, (0,)), judge(A, (5,)))
    first, second = service.scheduler.step(), service.scheduler.step()
    assert [event.address for event in first] == [B, A]
    assert [rows_of(event) for event in (*first, *second)] == [fresh_rows((1, 2)), fresh_rows((5,)), fresh_rows((0,))]
    assert service.model.batches == [[5, 4], [2]]


def test_each_step_is_reported() -> None:
    """How many sessions and tokens it took on, and how long it took: here a second a row."""
    service = Service(row_s=1.0)
    service.tell(opening(A), opening(B), judge(B, (1, 2)), judge(A, (5,)), judge(A))
    service.work()
    assert [(report.sessions, report.tokens) for report in service.reports] == [(2, 9), (1, 1)]
    assert [report.seconds for report in service.reports] == [5.0, 1.0]


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


def test_waiting_for_a_place_in_a_step_is_waiting() -> None:
    """The budget takes one session a step here; the second one waits until the step that it enters."""
    service = Service(max_batch_tokens=4)
    service.tell(opening(A), judge(A, (5,), arrived_s=99.0))
    service.tell(opening(B, (*PROMPT, 6, 6)), judge(B, (5,), base_length=5, arrived_s=99.0))
    waits_s = []
    for _ in range(3):  # the last two are chunks of one prompt
        for event in service.scheduler.step():
            assert isinstance(event.outcome, VerdictRows)
            waits_s.append(event.outcome.queue_time_s)
        service.clock.now_s += 3.0
    assert waits_s == [1.0, 4.0]


def test_work_that_is_late_already_is_not_begun() -> None:
    """A typed error, and no step; work that is just in time is done."""
    service = Service()
    service.tell(opening(A), judge(A, deadline_s=99.9), judge(A, deadline_s=100.0))
    late, in_time = service.work()
    assert isinstance(late.outcome, DeadlineExceeded)
    assert rows_of(in_time) == fresh_rows(())
    assert service.model.steps == 1


def test_work_that_becomes_late_between_two_steps_is_dropped() -> None:
    """A long prompt that is read in chunks: when its caller's time is over, the rest of it is not read."""
    service = Service(max_batch_tokens=8, max_context=1000)
    prompt = tuple(number % VOCAB_SIZE for number in range(64))
    service.tell(opening(A, prompt), judge(A, base_length=len(prompt), deadline_s=105.0))
    assert service.scheduler.step() == []
    service.clock.now_s = 105.1
    (late,) = service.work()
    assert isinstance(late.outcome, DeadlineExceeded)
    assert (service.model.steps, service.scheduler.waiting) == (1, 0)
    service.tell(judge(A, base_length=len(prompt)))
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((), prompt)


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
    failed, first, second = service.work()
    assert (failed.address, type(failed.outcome)) == (bad.address, kind)
    assert [rows_of(first), rows_of(second)] == [fresh_rows((1, 2)), fresh_rows((5,))]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_fault_of_the_model_fails_its_session_alone(place: int) -> None:
    """Its peer hears that something went wrong, not what, and the session is let go; the others of that step are judged
    as if it had not been there, and go on."""

    def faulty(ids: Sequence[int]) -> Sequence[float]:
        if ids[-1] == 7:
            raise RuntimeError("the secret of token 7")
        return hashed_logits(VOCAB_SIZE)(ids)

    service = Service(logits=faulty)
    addresses = [Address(peer, str(peer), 1) for peer in range(4)]
    service.tell(*map(opening, addresses))
    service.tell(*(judge(address, (7,) if address.peer == place else (1, 2)) for address in addresses))
    service.tell(*(judge(address, (5,)) for address in addresses))
    events = service.work()
    for address in addresses:
        first, second = (event for event in events if event.address == address)
        if address.peer == place:
            assert isinstance(first.outcome, PacelineError)
            assert first.outcome.reason == "INTERNAL"
            assert "secret" not in first.outcome.message
            assert isinstance(second.outcome, SessionNotFound)
        else:
            assert [rows_of(first), rows_of(second)] == [fresh_rows((1, 2)), fresh_rows((5,))]
    assert len(service.sessions) == 3


def test_lost_device_ends_the_service_and_no_session() -> None:
    """Nothing can be computed any more, whoever's it is: the model thread breaks, and with it the replica, whose sessions go
    on elsewhere. Failing them one by one would make it look empty, and draw in all others."""

    def lost(ids: Sequence[int]) -> Sequence[float]:
        raise RuntimeError("the device is gone")

    service = Service(logits=lost)
    service.tell(opening(A), judge(A, (1, 2)))
    with pytest.raises(RuntimeError, match="the device is gone"):
        service.work()


def test_session_that_does_not_fit_is_refused_at_once() -> None:
    """A prompt beyond the context, which is never more than the memory holds, or more sessions than there is room for."""
    service = Service(max_sessions=1, max_context=1000, num_blocks=2)
    (too_long,) = service.tell(opening(A, (0,) * 33))
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


def test_tokens_of_a_prompt_count_from_its_opening_and_then_those_in_memory() -> None:
    """Also those of a draft, until the next one tells that they are rolled back."""
    service = Service(block_size=1)
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


# ---- sessions that come back ----------------------------------------------------------------------------------------


def in_rhythm() -> Service:
    """A target that has served A and B ten times, in steps of 5 ms, and each time had their drafts half a millisecond
    later."""
    service = Service(row_s=0.0025)
    service.tell(opening(A), opening(B))
    for _ in range(10):
        service.tell(*(judge(address, arrived_s=service.clock.now_s) for address in (A, B)))
        assert service.scheduler.patience_s() == 0.0
        service.work()
        service.clock.now_s += 0.0005
    return service


def test_a_step_waits_for_a_session_that_is_about_to_come_back() -> None:
    """Until it has, or its time is over; not with a draft of each there."""
    service = in_rhythm()
    service.clock.now_s -= 0.0004
    service.tell(judge(A, arrived_s=service.clock.now_s))
    assert service.scheduler.patience_s() == pytest.approx(0.0004)
    service.clock.now_s += 0.001
    assert service.scheduler.patience_s() == 0.0
    service.clock.now_s -= 0.001
    service.tell(judge(B, arrived_s=service.clock.now_s))
    assert service.scheduler.patience_s() == 0.0


@pytest.mark.parametrize("ending", ["close", "peer", "idle"])
def test_no_step_waits_for_a_session_that_has_ended(ending: str) -> None:
    """However it has."""
    service = in_rhythm()
    service.clock.now_s -= 0.0004
    service.tell(judge(A, arrived_s=service.clock.now_s))
    assert service.scheduler.patience_s() > 0.0
    if ending == "idle":
        now_s, service.clock.now_s = service.clock.now_s, service.clock.now_s + 2 * IDLE_TTL_S
        service.scheduler.expire_idle()
        service.clock.now_s = now_s
    else:
        service.tell(Close(B) if ending == "close" else PeerGone(B.peer))
    assert service.scheduler.patience_s() == 0.0


def test_a_session_whose_next_draft_is_here_is_not_away() -> None:
    """Its draft came before the verdict on the one before."""
    service = in_rhythm()
    at_s = service.clock.now_s
    service.tell(judge(A, arrived_s=at_s), judge(B, arrived_s=at_s), judge(A, arrived_s=at_s), judge(B, arrived_s=at_s))
    service.scheduler.step()
    assert service.scheduler.waiting == 2
    assert service.scheduler.patience_s() == 0.0


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


@pytest.mark.parametrize(("num_blocks", "block_size"), [(64, 16), (6, 4), (20, 1)])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(history=actions)
def test_no_history_breaks_the_worker_or_a_session_beside_it(
    history: list[Command | str], num_blocks: int, block_size: int
) -> None:
    """150 drawn histories in much memory and in little, of opening, judging and closing, in any order and on any
    lengths, with a model that fails at one token and a drain, while a well-behaved session goes on: only typed errors,
    each for a session that was named, the good one (the oldest) judged at once and as if alone, and at any moment the
    right count of tokens, which ends at 0."""
    service = Service(max_sessions=3, logits=faulty_logits, num_blocks=num_blocks, block_size=block_size)
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
            assert [event.address for event in events].count(A) == pending
            for event in events:
                if event.address == A:
                    assert rows_of(event) == fresh_rows((1, 2), committed)
                    committed, pending = (*committed, 1), False
        service.model.memory.check()
        assert service.sessions.kv_used_tokens == service.model.memory.held_tokens + tokens_to_feed(service)
    assert not pending
    assert {event.address for event in service.said} <= named
    assert all(isinstance(event.outcome, PacelineError | VerdictRows) for event in service.said)
    assert len({held.address.session_id for held in service.sessions}) == len(service.sessions) <= 3
    service.tell(*(Close(held.address) for held in list(service.sessions)))
    service.work()
    assert (len(service.sessions), service.scheduler.has_work()) == (0, False)
    assert service.sessions.kv_used_tokens == 0


def tokens_to_feed(service: Service) -> int:
    """Counted by going through all sessions."""
    return sum(max(0, len(held.state.committed_ids) - held.state.cache.length) for held in service.sessions)


def test_only_so_many_drafts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a draft is refused at once with a hint, and those that wait are judged."""
    monkeypatch.setattr(scheduler, "MAX_QUEUED", 2)
    service = Service()
    service.tell(opening(A))
    said = service.tell(judge(A, (1, 2)), judge(A, (1, 2)), judge(A, (1, 2)))
    assert [type(event.outcome) for event in said] == [QueueFull]
    assert len(service.work()) == 2


# ---- prompts and the token budget -----------------------------------------------------------------------------------


def some_ids(count: int, *, salt: int) -> tuple[int, ...]:
    return tuple(random.Random(salt).choices(range(VOCAB_SIZE), k=count))


def roomy(*, max_batch_tokens: int = 256, block_size: int = 16) -> Service:
    return Service(
        max_sessions=100,
        max_batch_tokens=max_batch_tokens,
        max_context=5000,
        num_blocks=16_384 // block_size,
        block_size=block_size,
    )


def test_a_long_prompt_holds_up_nobody() -> None:
    """A running session has its rows in every step, and the prompt what the budget leaves of it."""
    service = roomy(max_batch_tokens=96)
    prompt = some_ids(300, salt=1)
    service.tell(opening(A), judge(A))
    service.work()
    service.tell(opening(B, prompt), judge(B, (1, 2), base_length=300))
    committed: tuple[int, ...] = PROMPT
    for _ in range(4):
        new = committed[len(PROMPT) :][-1:]
        service.tell(judge(A, (1, 2, 5), base_length=len(committed), committed_ids=new))
        rows = {event.address: rows_of(event) for event in service.scheduler.step()}
        assert rows.pop(A) == fresh_rows((1, 2, 5), committed)
        committed += (0,)
    assert service.model.batches[1:] == [[4, 92]] * 3 + [[26, 4]]
    assert rows == {B: fresh_rows((1, 2), prompt)}


def test_time_in_steps_counts_all_chunks_of_a_prompt() -> None:
    """A verdict's step time is that of each step which the session took part in."""
    service = roomy(max_batch_tokens=20)
    service.tell(opening(A, some_ids(50, salt=1)), judge(A, base_length=50))
    (event,) = service.work()
    assert isinstance(event.outcome, VerdictRows)
    assert len(service.reports) == 3
    assert event.outcome.step_time_s == sum(report.seconds for report in service.reports)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(3, 150), min_size=1, max_size=8),
    draft_length=st.integers(0, 7),
    max_batch_tokens=st.integers(8, 100),
    capacity=st.integers(160, 400),
    block_size=st.sampled_from([1, 4, 16]),
    together=st.booleans(),
)
def test_sessions_are_judged_as_if_alone_whatever_the_budget_and_the_memory(
    lengths: list[int], draft_length: int, max_batch_tokens: int, capacity: int, block_size: int, together: bool
) -> None:
    """40 drawn sets of sessions, three drafts each, some with a beginning in common: no step goes beyond the budget,
    nobody fails, and all memory is free in the end."""
    service = Service(
        max_sessions=8,
        max_batch_tokens=max_batch_tokens,
        max_context=5000,
        num_blocks=-(-capacity // block_size),
        block_size=block_size,
    )
    committed = {
        Address(number % 2, str(number), 1): some_ids(length, salt=number % 3) for number, length in enumerate(lengths)
    }
    service.tell(*(opening(address, ids) for address, ids in committed.items()))
    for round_number in range(3):
        drafted = some_ids(draft_length, salt=round_number)
        expected = {address: fresh_rows(drafted, ids) for address, ids in committed.items()}
        events: list[TargetEvent] = []
        for address, ids in committed.items():
            service.tell(judge(address, drafted, base_length=len(ids), committed_ids=ids[-1:] if round_number else ()))
            if not together:
                events += service.scheduler.step()
        while len(events) < len(committed):
            events += service.work()
            # Sessions that have been served hold on to their memory until they have been silent.
            service.clock.now_s += SILENT_S + 0.1
            for address in committed:
                service.sessions.use(address)
            service.scheduler.expire_idle()
        assert {event.address: rows_of(event) for event in events} == expected
        committed = {address: (*ids, rows_of_row(expected[address])) for address, ids in committed.items()}
    assert max(map(sum, service.model.batches)) <= max_batch_tokens
    service.tell(*map(Close, committed))
    assert_memory_is_free(service)


def rows_of_row(rows: tuple[Row, ...]) -> int:
    return rows[0].token_id


def assert_memory_is_free(service: Service) -> None:
    assert (service.model.memory.held_tokens, service.sessions.kv_used_tokens, len(service.sessions)) == (0, 0, 0)
    service.model.memory.check()


# ---- shared prefixes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1000, 992])
@pytest.mark.parametrize("together", [True, False])
def test_a_prompt_that_several_sessions_have_is_computed_once(length: int, together: bool) -> None:
    """Whether they arrive at once or one after the other; the last tokens, which give the rows, each computes itself."""
    service = roomy()
    prompt = some_ids(length, salt=1)
    addresses = [Address(0, str(number), 1) for number in range(4)]
    for address in addresses:
        service.tell(opening(address, prompt), judge(address, (1, 2), base_length=length))
        if not together:
            service.work()
    service.work()
    assert [rows_of(event) for event in service.said] == [fresh_rows((1, 2), prompt)] * 4
    assert fed_tokens(service) == length + 2 + 3 * (max(1, length % 16) + 2)


def fed_tokens(service: Service) -> int:
    return sum(map(sum, service.model.batches))


def test_a_session_feeds_only_what_it_does_not_share_with_another() -> None:
    """1,000 tokens in common, then another question (C29: with the rows of a cold cache)."""
    service = roomy()
    shared = some_ids(1000, salt=1)
    first, second = (*shared, 1, 2, 3), (*shared, 5, 5, 5, 5)
    service.tell(opening(A, first), judge(A, (7,), base_length=1003))
    service.work()
    before = fed_tokens(service)
    service.tell(opening(B, second), judge(B, (7,), base_length=1004))
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((7,), second)
    assert fed_tokens(service) - before == 1004 + 1 - 992


def test_drafted_tokens_are_never_found_by_another_session() -> None:
    """Neither while their outcome is open nor once they were refused; those that were kept are, once they are committed
    (C29, C36)."""
    service = roomy()
    prompt, drafted = some_ids(32, salt=1), some_ids(48, salt=2)
    service.tell(opening(A, prompt), judge(A, drafted, base_length=32))
    service.work()
    assert found_by_a_new_session(service, (*prompt, *drafted)) == 32
    # 20 of them are kept, and a correction.
    kept = (*drafted[:20], (drafted[20] + 1) % VOCAB_SIZE)
    service.tell(judge(A, drafted, base_length=32 + 21, committed_ids=kept))
    service.work()
    for _ in range(2):
        assert found_by_a_new_session(service, (*prompt, *drafted)) == 48
        assert found_by_a_new_session(service, (*prompt, *kept, *drafted)) == 48
        service.tell(Close(A))


def found_by_a_new_session(service: Service, ids: tuple[int, ...]) -> int:
    """How many of the tokens it need not compute."""
    cache = service.model.new_cache()
    length = service.model.reuse_prefix(cache, ids)
    assert service.model.ids_of(cache) == list(ids[:length])
    service.model.release(cache)
    return length


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_sessions_that_do_not_fit_together_take_turns() -> None:
    """Memory for two of four: the newest give way and are computed again, the oldest is served in every step, nobody
    fails, and all are judged as if alone."""
    service = Service(max_sessions=4, max_context=64, num_blocks=8)
    committed = {Address(0, str(number), 1): some_ids(50, salt=number) for number in range(4)}
    oldest = next(iter(committed))
    service.tell(*(opening(address, ids) for address, ids in committed.items()))
    for _ in range(3):
        # The newest ask first.
        for address, ids in reversed(committed.items()):
            service.tell(judge(address, (1, 2), base_length=len(ids), committed_ids=ids[-1:] if len(ids) > 50 else ()))
        events = list(service.scheduler.step())
        assert oldest in [event.address for event in events]
        while len(events) < 4:
            service.clock.now_s += SILENT_S + 0.1
            service.scheduler.expire_idle()
            events += service.work()
        assert {event.address: rows_of(event) for event in events} == {
            address: fresh_rows((1, 2), ids) for address, ids in committed.items()
        }
        committed = {address: (*ids, 1) for address, ids in committed.items()}
    assert service.scheduler.preemptions > 0


def test_a_newer_session_waits_until_an_older_one_is_silent() -> None:
    """Meanwhile there is no work, rather than one empty step after the other; time is told by the housekeeping."""
    service = Service(max_context=64, num_blocks=4)
    older, newer = some_ids(50, salt=1), some_ids(50, salt=2)
    service.tell(opening(A, older), judge(A, base_length=50))
    service.work()
    service.tell(opening(B, newer), judge(B, (1,), base_length=50))
    assert service.scheduler.has_work()
    assert service.scheduler.step() == []
    assert (service.scheduler.has_work(), service.scheduler.waiting) == (False, 1)
    service.scheduler.expire_idle()
    assert service.work() == []
    service.clock.now_s += SILENT_S + 0.1
    service.scheduler.expire_idle()
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((1,), newer)
    assert (service.model.steps, service.scheduler.preemptions) == (2, 1)


def test_room_that_comes_free_is_used_at_once() -> None:
    """Any command may have brought it."""
    service = Service(max_context=64, num_blocks=4)
    older, newer = some_ids(50, salt=1), some_ids(50, salt=2)
    service.tell(opening(A, older), judge(A, base_length=50))
    service.work()
    service.tell(opening(B, newer), judge(B, (1,), base_length=50))
    assert service.work() == []
    service.tell(Close(A))
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((1,), newer)


def test_draft_of_a_session_that_lost_its_memory_is_judged_as_before() -> None:
    """Its memory was taken between two drafts: the committed tokens are fed again, and nothing of the old draft (C34)."""
    service = Service(max_context=64, num_blocks=5)
    older, newer = some_ids(33, salt=1), some_ids(20, salt=2)
    service.tell(opening(A, older), opening(B, newer), judge(B, (1, 2, 5), base_length=20))
    (event,) = service.work()
    # 2 blocks are B's; A needs 4.
    service.tell(judge(A, some_ids(20, salt=3), base_length=33))
    service.work()
    assert service.scheduler.preemptions == 1
    assert service.sessions.kv_used_tokens == 4 * 16 + 20
    service.tell(Close(A), judge(B, (7,), base_length=22, committed_ids=(1, 6)))
    (event,) = service.work()
    assert rows_of(event) == fresh_rows((7,), (*newer, 1, 6))


@pytest.mark.parametrize("ending", ["closed", "opened again", "idle"])
def test_draft_that_waits_for_room_ends_with_its_session(ending: str) -> None:
    """It has begun, so to say, but takes up no room when its turn comes; its peer hears of it as of any late draft."""
    service = Service(max_context=64, num_blocks=4)
    service.tell(opening(A, some_ids(50, salt=1)), judge(A, base_length=50))
    service.work()
    service.tell(opening(B, some_ids(50, salt=2)), judge(B, (1,), base_length=50))
    assert service.work() == []
    match ending:
        case "closed":
            service.tell(Close(B))
        case "opened again":
            service.tell(opening(Address(B.peer, "b", 2)))
        case "idle":
            service.clock.now_s += IDLE_TTL_S + 1
            service.scheduler.expire_idle()
    events = service.work()
    if ending == "opened again":
        assert (events, service.sessions.stale_items) == ([], 1)
    else:
        assert [type(event.outcome) for event in events] == [SessionNotFound]
    assert (service.scheduler.waiting, service.model.steps) == (0, 1)


ENDINGS = ["closed", "closed with a draft", "peer gone", "idle", "opened again", "taken over", "fault", "refused"]


@pytest.mark.parametrize("block_size", [1, 16])
def test_all_memory_is_free_after_a_thousand_endings_of_every_kind(block_size: int) -> None:
    """1,000 sessions, four at a time in memory for two, which end in every way there is, with a draft of any length
    judged, rolled back or waiting (C37)."""
    service = Service(logits=faulty_logits, max_context=64, num_blocks=128 // block_size, block_size=block_size)
    for number in range(0, 1000, 4):
        ending = ENDINGS[number // 4 % len(ENDINGS)]
        addresses = [Address(7, str(number + index), 1) for index in range(4)]
        prompts = [some_ids(20 + (number + index) % 31, salt=number + index) for index in range(4)]
        service.tell(*map(opening, addresses, prompts))
        for address, prompt in reversed(list(zip(addresses, prompts, strict=True))):
            service.tell(judge(address, some_ids(number % 9, salt=number), base_length=len(prompt)))
        service.work()
        end(service, ending, addresses, prompts)
        assert_memory_is_free(service)
    assert service.scheduler.preemptions > 0


def end(service: Service, ending: str, addresses: list[Address], prompts: list[tuple[int, ...]]) -> None:
    """Let four sessions end in that way; those that may have ended before stay as they are."""
    again = [Address(8, address.session_id, 2) for address in addresses]
    match ending:
        case "closed with a draft":
            service.tell(
                *(judge(each, (1,), base_length=len(ids)) for each, ids in zip(addresses, prompts, strict=True))
            )
        case "peer gone":
            service.tell(PeerGone(7))
        case "idle":
            service.clock.now_s += IDLE_TTL_S + 1
            service.scheduler.expire_idle()
        case "opened again":
            service.tell(*map(opening, again, prompts))
        case "taken over":
            service.tell(*(opening(each, ids[:5]) for each, ids in zip(again, prompts, strict=True)))
            service.tell(*(judge(each, (1, 2), base_length=5) for each in again))
            service.work()
        case "fault":
            service.tell(
                *(
                    judge(each, (FAULTY_TOKEN,), base_length=len(ids))
                    for each, ids in zip(addresses, prompts, strict=True)
                )
            )
            service.work()
        case "refused":
            service.tell(*(judge(each, (), base_length=1) for each in addresses))
            service.tell(
                *(judge(each, (0,) * 64, base_length=len(ids)) for each, ids in zip(addresses, prompts, strict=True))
            )
            service.tell(*(opening(each, (0,) * 65) for each in again))
            service.work()
    service.tell(*map(Close, again), *map(Close, addresses))
    service.work()
