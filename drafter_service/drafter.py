"""Drafting for many sessions: how far each may draft, what it rolls back, when a draft is pushed.

A session drafts past the draft in flight as far as its credit goes. A commit keeps what agrees with the tokens drafted
already and rolls back the rest. Each step takes all sessions with work. Knows nothing of streams, protobuf, threads, or
of how a method finds its tokens and what fits into one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Generic, Protocol, TypeVar

import structlog

from paceline.engine.interface import Memory
from paceline.engine.step_plan import StepReport
from paceline.errors import ContextTooLong, LengthMismatch, PacelineError, PayloadInvalid, internal_error
from paceline.prefix import TokenPrefix
from paceline.sampling import SparseDistribution
from paceline.sessions import Address, Close, Event, Held, Open, PeerGone, SessionTable
from paceline.types import SessionSpec

logger = structlog.get_logger(__name__)

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """One proposed token, and what it was drawn from where the rule needs it (None: deterministic)."""

    token_id: int
    distribution: SparseDistribution | None = None


class DraftView(Protocol):
    """What a method may see of a session."""

    spec: SessionSpec
    committed_length: int

    @property
    def ids(self) -> Sequence[int]:
        """Committed tokens, then those drafted behind them."""


@dataclass(frozen=True, slots=True)
class DraftWork(Generic[StateT]):
    """What one session wants: up to `max_tokens` tokens that continue its ids; 0: to catch up with the committed ones,
    so that the next draft starts at once."""

    state: StateT
    session: DraftView
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one session.

    `drafted` is what it asked for: up to `max_tokens` tokens, and none also where there is nothing to offer. None: it
    has not got there yet and wants another step. With nothing fed either, it was left out.
    """

    fed_tokens: int = 0
    drafted: Sequence[DraftedToken] | None = None

    @property
    def is_left_out(self) -> bool:
        return self.fed_tokens == 0 and self.drafted is None


Outcome = Progress | PacelineError


class DraftMethod(Protocol[StateT]):
    """A way of drafting. `StateT` is what it keeps for a session, from `open` until `close`."""

    @property
    def max_context(self) -> int: ...

    @property
    def memory(self) -> Memory | None:
        """That of its model; None without one."""

    @property
    def preemptions(self) -> int:
        """How often a session gave up its memory for others, to be computed again; 0 without a model."""

    def open(self, session: DraftView) -> StateT:
        """State for a new session; does no model work and holds no memory."""

    def draft(self, batch: Sequence[DraftWork[StateT]]) -> Sequence[Outcome]:
        """One step for as many of these sessions as it can take, the first ones first; what came of each of them.

        At most one model step. The outcome of a session that cannot go on is its error; an error raised is nobody's in
        particular, and every state is then still good to be tried again.
        """

    def rewind(self, state: StateT, length: int) -> None:
        """Only the first `length` of the session's ids are still what they were."""

    def pending_tokens(self, state: StateT, session: DraftView) -> int:
        """Committed tokens that are yet to be fed; 0 without a model."""

    def close(self, state: StateT) -> None:
        """The session has ended, in whatever way: give back all it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What is committed, and how far to draft."""

    address: Address
    base_length: int
    committed_ids: tuple[int, ...]  # the last of the base_length tokens
    draft_length: int
    credit: int  # tokens beyond base_length that may be drafted


Command = Open | Commit | Close | PeerGone


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A draft ready to be pushed, continuing the prefix of `base_length` tokens with that digest."""

    base_length: int
    prefix_digest: int
    tokens: tuple[DraftedToken, ...]
    vocab_size: int  # of the target
    draft_time_s: float  # of all steps that the session took part in for it


DrafterEvent = Event[Drafted]


class Urgency(Enum):
    """Which sessions are served first."""

    WAITING = auto()  # nothing of the next draft is out yet: an orchestrator may be waiting
    AHEAD = auto()  # drafting past the draft in flight
    INGEST = auto()  # no credit, but committed tokens that the method has not seen


class DraftSession:
    """One session. Invariant: `committed_length <= sent_length <= len(prefix)`; `unsent` are the tokens behind the last.

    Drafted tokens are those of `prefix` behind `committed_length`; none is at or beyond `limit` when drafting begins.
    """

    def __init__(self, spec: SessionSpec, committed_ids: Sequence[int]) -> None:
        self.spec = spec
        self.prefix = TokenPrefix(committed_ids)
        self.committed_length = len(committed_ids)
        self.sent_length = self.committed_length
        self.unsent: list[DraftedToken] = []
        self.limit = 0
        self.draft_length = 1
        self.has_nothing = False  # the method had no continuation of exactly this prefix
        self.needs_ingest = True
        self.draft_time_s = 0.0

    @property
    def ids(self) -> Sequence[int]:
        return self.prefix.ids

    def commit(self, command: Commit, max_context: int) -> int:
        """Take over committed tokens and credit; returns how many leading ids are unchanged.

        Raises `LengthMismatch` if the tokens do not join on; the session is then as it was.
        """
        base_length, ids = command.base_length, command.committed_ids
        start = base_length - len(ids)
        if not 0 <= start <= self.committed_length:
            raise LengthMismatch(
                f"{len(ids)} tokens up to length {base_length} do not continue the {self.committed_length} committed "
                "ones; open the session again from its tokens."
            )
        unchanged = start
        for known, committed in zip(islice(self.ids, start, None), ids, strict=False):
            if known != committed:
                break
            unchanged += 1
        if unchanged < self.committed_length:
            raise LengthMismatch(
                f"The tokens up to length {base_length} contradict those committed before; open the session again."
            )
        if unchanged < base_length:
            self.prefix.truncate(unchanged)
            self.prefix.extend(ids[unchanged - start :])
            self.sent_length, self.unsent = base_length, []
        elif base_length > self.sent_length:
            del self.unsent[: base_length - self.sent_length]
            self.sent_length = base_length
        self.needs_ingest |= base_length > self.committed_length
        self.committed_length = base_length
        self.draft_length = max(1, command.draft_length)
        self.limit = min(base_length + command.credit, max_context)
        self.has_nothing = False
        return unchanged if unchanged < base_length else len(self.prefix)

    @property
    def room(self) -> int:
        """How many tokens may be drafted now."""
        return 0 if self.has_nothing else max(0, self.limit - len(self.prefix))

    @property
    def urgency(self) -> Urgency | None:
        """What the session waits for, if anything."""
        if not self.room:
            return Urgency.INGEST if self.needs_ingest else None
        return Urgency.WAITING if self.sent_length == self.committed_length else Urgency.AHEAD

    def extend(self, tokens: Sequence[DraftedToken]) -> None:
        self.prefix.extend(token.token_id for token in tokens)
        self.unsent += tokens
        self.has_nothing = not tokens

    def take_draft(self) -> Drafted | None:
        """What is to be pushed now, if anything: a whole draft, or what there is when drafting cannot go on."""
        is_whole = self.sent_length == self.committed_length and len(self.unsent) >= self.draft_length
        is_last = not self.room
        if not is_whole and not (is_last and (self.unsent or self.has_nothing)):
            return None
        drafted = Drafted(
            base_length=self.sent_length,
            prefix_digest=self.prefix.digest(self.sent_length),
            tokens=tuple(self.unsent),
            vocab_size=self.spec.vocab_size,
            draft_time_s=self.draft_time_s,
        )
        self.sent_length, self.unsent, self.draft_time_s = len(self.prefix), [], 0.0
        return drafted


@dataclass(slots=True)
class Entry(Generic[StateT]):
    """What the session table holds for a drafter."""

    session: DraftSession
    state: StateT
    queued_as: Urgency | None = None
    last_turn: int = 0  # the step that served it last, or after which it began to wait


_TURN_STEPS = 8  # so often a step begins with the session that was left out longest


class Drafter(Generic[StateT]):
    """The worker of the drafter's model thread. Invariant: a session stands in the queue of its urgency, or in none.

    A step is offered all sessions with work: in the order of their urgency, then of waiting. Where it cannot take all,
    each of n sessions that go on wanting something is the first in one of `_TURN_STEPS` x n steps. `on_step` hears of
    each step, on the model thread.
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
        turn, preemptions = self._in_order(), self._method.preemptions
        batch = [DraftWork(held.state.state, held.state.session, held.state.session.room) for held in turn]
        started_s = self._clock()
        outcomes = self._attempt(batch)
        seconds = self._clock() - started_s
        report = _report(outcomes, seconds)
        self._waits_for_room = report.sessions == 0
        if report.sessions:
            self._on_step(report)
        events: list[DrafterEvent] = []
        for held, outcome in zip(turn, outcomes, strict=True):
            events += self._settle(held, outcome, seconds)
        if self._method.preemptions > preemptions:
            self._recount_all()
        return events

    def expire_idle(self) -> Sequence[DrafterEvent]:
        self._waits_for_room = False  # time alone may have brought some
        for held in self._sessions.pop_idle():
            self._end(held)
            logger.info("an idle session was closed", session_id=held.address.session_id)
        return []

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
            logger.exception("a session's draft step failed", session_id=batch[0].session.spec.session_id)
            return [error if isinstance(error, PacelineError) else internal_error()]

    def _settle(self, held: Held[Entry[StateT]], outcome: Outcome, seconds: float) -> Sequence[DrafterEvent]:
        """Take in what a step did for a session."""
        if isinstance(outcome, PacelineError):
            self._let_go(held.address)
            return [Event(held.address, outcome)]
        if outcome.is_left_out:
            return []
        entry, session = held.state, held.state.session
        entry.last_turn = self._steps
        is_drafting, drafted = session.room > 0, None
        if is_drafting:
            session.draft_time_s += seconds
        if outcome.drafted is not None:
            # One token is left for the next draft to feed; more where the draft was found without the model.
            session.needs_ingest = is_drafting and self._method.pending_tokens(entry.state, session) > 1
            if is_drafting:
                session.extend(outcome.drafted)
                drafted = session.take_draft()
        self._sessions.recount(held)
        self._requeue(held)
        return [Event(held.address, drafted)] if drafted else []

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
        session = DraftSession(command.spec, command.committed_ids)
        return Entry(session, self._method.open(session))

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
        before = len(session.prefix)
        unchanged = session.commit(command, self._method.max_context)
        if unchanged < before:
            self._method.rewind(held.state.state, unchanged)
        self._sessions.recount(held)
        # With less credit than before, no step may follow that would push what is drafted already.
        drafted = session.take_draft()
        self._requeue(held)
        return [Event(command.address, drafted)] if drafted else []

    def _recount_all(self) -> None:
        """A session that gave up its memory has its tokens to feed again, whether it has work now or not."""
        for held in self._sessions:
            self._sessions.recount(held)

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
        self._method.close(held.state.state)

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


def _report(outcomes: Sequence[Outcome], seconds: float) -> StepReport:
    served = [outcome for outcome in outcomes if isinstance(outcome, PacelineError) or not outcome.is_left_out]
    tokens = sum(outcome.fed_tokens for outcome in served if isinstance(outcome, Progress))
    return StepReport(len(served), tokens, seconds)
