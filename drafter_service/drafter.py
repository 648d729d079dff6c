"""Drafting for many sessions: who is served in a step and with how many lines, and what becomes of it.

Each step takes all sessions with work: the likeliest line of each, then branches. A commit keeps what agrees with the
tokens drafted already and rolls back the rest. Knows nothing of streams, protobuf, threads, or of how a method finds its
tokens and what fits into one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import structlog

from drafter_service.likelihood import Sharpness
from drafter_service.lines import Bud, Line
from drafter_service.method import BranchingMethod, DraftMethod, DraftWork, Outcome, Progress, StateT
from drafter_service.session import Commit, Drafted, DraftSession, Urgency
from paceline.engine.step_plan import StepReport
from paceline.errors import ContextTooLong, PacelineError, PayloadInvalid, internal_error
from paceline.sessions import Address, Close, Event, Held, Open, PeerGone, SessionTable
from paceline.types import VerificationRule

logger = structlog.get_logger(__name__)

Command = Open | Commit | Close | PeerGone
DrafterEvent = Event[Drafted]


@dataclass(slots=True)
class Entry(Generic[StateT]):
    """What the session table holds for a drafter."""

    session: DraftSession[StateT]
    queued_as: Urgency | None = None
    last_turn: int = 0  # the step that served it last, or after which it began to wait

    @property
    def state(self) -> StateT:
        """The method's, of the likeliest line."""
        return self.session.trunk.state

    @property
    def view(self) -> Line[StateT]:
        """What the method sees of the likeliest line."""
        return self.session.trunk


class _Turn(NamedTuple, Generic[StateT]):
    """One line's part in a step."""

    held: Held[Entry[StateT]]
    line: Line[StateT]
    work: DraftWork[StateT]


_TURN_STEPS = 8  # so often a step begins with the session that was left out longest
_STEP_LINES = 32  # so many are filled up with branches, which must not make a step much longer


class Drafter(Generic[StateT]):
    """The worker of the drafter's model thread. Invariant: a session stands in the queue of its urgency, or in none.

    A step is offered all sessions with work: in the order of their urgency, then of waiting. Where it cannot take all,
    each of n sessions that go on wanting something is the first in one of `_TURN_STEPS` x n steps. Behind all of them come
    branches, the likeliest first. `on_step` hears of each step, on the model thread.
    """

    def __init__(
        self,
        method: DraftMethod[StateT],
        sessions: SessionTable[Entry[StateT]],
        *,
        on_step: Callable[[StepReport], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._method, self._sessions, self._on_step, self._clock = method, sessions, on_step, clock
        self._fork_state = method.fork if isinstance(method, BranchingMethod) else None
        self._sharpness = {rule: Sharpness() for rule in VerificationRule}
        self._queues: dict[Urgency, dict[str, None]] = {urgency: {} for urgency in Urgency}
        self._steps = 0
        self._waits_for_room = False  # the last step could serve nobody, and nothing has happened since

    def accept(self, command: Command) -> Sequence[DrafterEvent]:
        self._waits_for_room = False
        if isinstance(command, PeerGone):
            for orphan in self._sessions.pop_of_peer(command.peer):
                self._end(orphan)
            return []
        try:
            match command:
                case Open():
                    return self._open(command)
                case Commit():
                    return self._commit(command)
                case Close():
                    self._let_go(command.address)
        except PacelineError as error:
            return [Event(command.address, error)]
        return []

    def has_work(self) -> bool:
        return not self._waits_for_room and any(self._queues.values())

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def preemptions(self) -> int:
        """How often a session gave up its memory for others."""
        return self._method.preemptions

    def step(self) -> Sequence[DrafterEvent]:
        """Serve all sessions with work, as far as one model step can."""
        self._steps += 1
        preemptions = self._method.preemptions
        turns = self._turns()
        started_s = self._clock()
        outcomes = self._attempt([turn.work for turn in turns])
        seconds = self._clock() - started_s
        served = _served(turns, outcomes)
        report = StepReport(len(served), _fed_tokens(outcomes), seconds)
        self._waits_for_room = report.sessions == 0
        if report.sessions:
            self._on_step(report)
        events: list[DrafterEvent] = []
        for turn, outcome in zip(turns, outcomes, strict=True):
            events += self._settle(turn, outcome)
        for held, is_drafting in served:
            events += self._finish(held, is_drafting=is_drafting, seconds=seconds)
        if self._method.preemptions > preemptions:
            self._note_preemptions()
        return events

    def expire_idle(self) -> Sequence[DrafterEvent]:
        self._waits_for_room = False  # time alone may have brought some
        for held in self._sessions.pop_idle():
            self._end(held)
            logger.info("an idle session was closed", session_id=held.address.session_id)
        return []

    def _turns(self) -> list[_Turn[StateT]]:
        """Who is offered a part in the next step: the likeliest line of each session, then branches."""
        order = self._in_order()
        turns = []
        for held in order:
            session = held.state.session
            turn = _turn(held, session.trunk)
            # To grow, or to catch up.
            if turn.work.max_tokens or session.needs_ingest:
                turns.append(turn)
        return turns + self._branch_turns(order, at_most=max(0, _STEP_LINES - len(turns)))

    def _branch_turns(self, order: Sequence[Held[Entry[StateT]]], *, at_most: int) -> list[_Turn[StateT]]:
        """The likeliest branches of all these sessions; those behind a guess are opened now."""
        wishes = [(held, wish) for held in order for wish in held.state.session.branch_wishes()]
        wishes.sort(key=lambda pair: pair[1].likelihood, reverse=True)
        lines = [
            (held, self._open_line(held.state.session, wish) if isinstance(wish, Bud) else wish)
            for held, wish in wishes[:at_most]
        ]
        # One that was to grow may have given its place to another.
        return [_turn(held, line) for held, line in lines if line.is_open]

    def _open_line(self, session: DraftSession[StateT], bud: Bud[StateT]) -> Line[StateT]:
        assert self._fork_state is not None, "only sessions of methods that branch have buds"
        if len(session.tree.branches) >= session.branches:
            self._close_line(session, session.tree.least_likely())
        return session.tree.fork(bud, self._fork_state)

    def _in_order(self) -> list[Held[Entry[StateT]]]:
        """All sessions with work, in the order in which they are to be served."""
        order = []
        for queue in self._queues.values():
            for session_id in queue:
                held = self._sessions.find(session_id)
                assert held is not None, "a queued session is held"
                order.append(held)
        if self._steps % _TURN_STEPS:
            return order
        neglected = min(order, key=lambda held: held.state.last_turn)
        # Whether it is served or cannot be, the next turn is another's.
        neglected.state.last_turn = self._steps
        return sorted(order, key=lambda held: held is not neglected)

    def _attempt(self, batch: Sequence[DraftWork[StateT]]) -> Sequence[Outcome]:
        """One step for all; if it fails as a whole, one step for each, so that only the culprit's fails."""
        try:
            return self._method.draft(batch)
        except Exception as error:
            if len(batch) > 1:
                logger.exception("a draft step failed; its sessions are tried one by one", sessions=len(batch))
                return [outcome for work in batch for outcome in self._attempt([work])]
            if not isinstance(error, PacelineError) and not self._method.can_step():
                raise  # the device is lost: sessions draft elsewhere, and whoever starts this replica again
            logger.exception("a session's draft step failed", session_id=batch[0].session.spec.session_id)
            return [error if isinstance(error, PacelineError) else internal_error()]

    def _settle(self, turn: _Turn[StateT], outcome: Outcome) -> Sequence[DrafterEvent]:
        """Take in what a step did for a line. A session ends with its likeliest line alone, a branch by itself."""
        held, line, session = turn.held, turn.line, turn.held.state.session
        if not line.is_open or not self._is_held(held):
            return []
        is_trunk = line is session.trunk
        if isinstance(outcome, PacelineError):
            if not is_trunk:
                self._close_line(session, line)
                return []
            self._let_go(held.address)
            return [Event(held.address, outcome)]
        if outcome.drafted is None:
            return []
        is_drafting = turn.work.max_tokens > 0
        if is_trunk:
            # One token is left for the next draft to feed; more where the draft was found without the model.
            session.needs_ingest = is_drafting and self._method.pending_tokens(line.state, line) > 1
        if is_drafting:
            session.extend(line, outcome.drafted)
        return []

    def _finish(self, held: Held[Entry[StateT]], *, is_drafting: bool, seconds: float) -> Sequence[DrafterEvent]:
        """A step has served a session, with one line or several."""
        if not self._is_held(held):
            return []
        held.state.last_turn = self._steps
        if is_drafting:
            held.state.session.note_step(seconds)
        self._sessions.recount(held)
        events = self._push(held)
        self._requeue(held)
        return events

    def _push(self, held: Held[Entry[StateT]]) -> list[DrafterEvent]:
        return [Event(held.address, drafted) for drafted in held.state.session.take_drafted()]

    def _open(self, command: Open) -> Sequence[DrafterEvent]:
        self._require_room(len(command.committed_ids))
        previous = self._sessions.find(command.address.session_id)
        held, events = self._sessions.open(command.address, lambda _: self._new_entry(command))
        if held is not None:
            if previous is not None:
                self._end(previous)
            self._requeue(held)
        return events

    def _new_entry(self, command: Open) -> Entry[StateT]:
        return Entry(DraftSession(command.spec, command.committed_ids, self._method.open, self._sharpness))

    def _commit(self, command: Commit) -> Sequence[DrafterEvent]:
        held = self._sessions.use(command.address)
        if held is None:
            return []
        session = held.state.session
        if command.base_length < session.committed_length:
            self._sessions.count_stale()
            return []
        self._require_room(command.base_length)
        if max(command.committed_ids, default=0) >= session.spec.vocab_size:
            raise PayloadInvalid(f"The committed tokens must be ids of the target, below {session.spec.vocab_size}.")
        can_branch = self._fork_state is not None
        committed = session.commit(command, self._method.max_context, can_branch=can_branch)
        # A session's own line last: each that is closed before it would make another one that.
        for state in reversed(committed.closed):
            self._method.close(state)
        if committed.rewound_to is not None:
            self._method.rewind(session.trunk.state, committed.rewound_to)
        while len(session.tree.branches) > session.branches:
            self._close_line(session, session.tree.least_likely())
        self._sessions.recount(held)
        # With less credit than before, no step may follow that would push what is drafted already.
        events = self._push(held)
        self._requeue(held)
        return events

    def _close_line(self, session: DraftSession[StateT], line: Line[StateT]) -> None:
        for state in session.tree.close(line):
            self._method.close(state)

    def _note_preemptions(self) -> None:
        """A session that gave up its memory has its tokens to feed again, whether it has work now or not.

        A branch that gave up its own is not worth that.
        """
        for held in self._sessions:
            session = held.state.session
            for line in session.tree.branches:
                if line.is_open and self._method.pending_tokens(line.state, line) > 0:
                    self._close_line(session, line)
            self._sessions.recount(held)
            self._requeue(held)

    def _is_held(self, held: Held[Entry[StateT]]) -> bool:
        return self._sessions.find(held.address.session_id) is held

    def _require_room(self, length: int) -> None:
        if length > self._method.max_context:
            raise ContextTooLong(
                f"{length} tokens do not fit into the drafter's context of {self._method.max_context}; "
                "decode without it."
            )

    def _let_go(self, address: Address) -> None:
        held = self._sessions.close(address)
        if held is not None:
            self._end(held)

    def _end(self, held: Held[Entry[StateT]]) -> None:
        """Forget the work and the memory of a session that is no longer held."""
        self._dequeue(held)
        for line in reversed(held.state.session.tree.lines):
            self._method.close(line.state)

    def _requeue(self, held: Held[Entry[StateT]]) -> None:
        entry, urgency = held.state, held.state.session.urgency
        if urgency is entry.queued_as:
            return
        if entry.queued_as is None:
            entry.last_turn = self._steps
        self._dequeue(held)
        if urgency is not None:
            self._queues[urgency][held.address.session_id] = None
            entry.queued_as = urgency

    def _dequeue(self, held: Held[Entry[StateT]]) -> None:
        if held.state.queued_as is not None:
            self._queues[held.state.queued_as].pop(held.address.session_id, None)
            held.state.queued_as = None


def _turn(held: Held[Entry[StateT]], line: Line[StateT]) -> _Turn[StateT]:
    session = held.state.session
    return _Turn(held, line, DraftWork(line.state, line, session.room_of(line), session.fan_out))


def _is_left_out(outcome: Outcome) -> bool:
    return isinstance(outcome, Progress) and outcome.is_left_out


def _served(turns: Sequence[_Turn[StateT]], outcomes: Sequence[Outcome]) -> list[tuple[Held[Entry[StateT]], bool]]:
    """The sessions that a step served, and whether with a line that was to grow."""
    drafting: dict[str, bool] = {}
    held_by_id = {}
    for turn, outcome in zip(turns, outcomes, strict=True):
        if not _is_left_out(outcome):
            session_id = turn.held.address.session_id
            held_by_id[session_id] = turn.held
            drafting[session_id] = drafting.get(session_id, False) or turn.work.max_tokens > 0
    return [(held_by_id[session_id], is_drafting) for session_id, is_drafting in drafting.items()]


def _fed_tokens(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.fed_tokens for outcome in outcomes if isinstance(outcome, Progress))
