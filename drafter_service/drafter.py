"""Drafting for many sessions: how far each may draft, what it rolls back, when a draft is pushed.

A session drafts past the draft in flight as far as its credit goes. A commit keeps what agrees with the tokens drafted
already and rolls back the rest. Knows nothing of streams, protobuf, threads, or of how a method finds its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Generic, Protocol, TypeVar

import structlog

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


class DraftMethod(Protocol[StateT]):
    """A way of drafting. `StateT` is what it keeps for a session; it is dropped when the session ends."""

    @property
    def max_context(self) -> int: ...

    def open(self, session: DraftView) -> StateT:
        """State for a new session; does no model work."""

    def ingest(self, state: StateT, session: DraftView) -> None:
        """Catch up with the committed tokens, so that the next draft starts at once."""

    def draft(self, state: StateT, session: DraftView, max_tokens: int) -> Sequence[DraftedToken]:
        """Up to `max_tokens` tokens that continue the session's ids, one model step at most; none: nothing to offer."""

    def rewind(self, state: StateT, length: int) -> None:
        """Only the first `length` of the session's ids are still what they were."""

    def kv_tokens(self, state: StateT, session: DraftView) -> int:
        """Tokens whose keys and values the state holds, or will once it has caught up; 0 without a model."""


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
    draft_time_s: float


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
    def urgency(self) -> Urgency | None:
        """What the session waits for, if anything."""
        if self.has_nothing or len(self.prefix) >= self.limit:
            return Urgency.INGEST if self.needs_ingest else None
        return Urgency.WAITING if self.sent_length == self.committed_length else Urgency.AHEAD

    def extend(self, tokens: Sequence[DraftedToken]) -> None:
        self.prefix.extend(token.token_id for token in tokens)
        self.unsent += tokens
        self.has_nothing = not tokens

    def take_draft(self) -> Drafted | None:
        """What is to be pushed now, if anything: a whole draft, or what there is when drafting cannot go on."""
        is_whole = self.sent_length == self.committed_length and len(self.unsent) >= self.draft_length
        is_last = self.has_nothing or len(self.prefix) >= self.limit
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


class Drafter(Generic[StateT]):
    """The worker of the drafter's model thread. Invariant: a session stands in the queue of its urgency, or in none."""

    def __init__(self, method: DraftMethod[StateT], sessions: SessionTable[Entry[StateT]]) -> None:
        self._method, self._sessions = method, sessions
        self._queues: dict[Urgency, dict[str, None]] = {urgency: {} for urgency in Urgency}

    def accept(self, command: Command) -> Sequence[DrafterEvent]:
        if isinstance(command, PeerGone):
            for orphan in self._sessions.pop_of_peer(command.peer):
                self._dequeue(orphan)
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
        return any(self._queues.values())

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def step(self) -> Sequence[DrafterEvent]:
        """Serve the most urgent session that has waited longest: at most one model step."""
        session_id = next(iter(next(queue for queue in self._queues.values() if queue)))
        held = self._sessions.find(session_id)
        assert held is not None, "a queued session is held"
        try:
            drafted = self._serve(held.state)
        except PacelineError as error:
            self._let_go(held.address)
            return [Event(held.address, error)]
        except Exception:
            # A fault of ours or the method's, met in one session's step: it must not take the others with it.
            logger.exception("a draft step failed", session_id=session_id)
            self._let_go(held.address)
            return [Event(held.address, internal_error())]
        self._sessions.recount(held)
        self._requeue(held)
        return [Event(held.address, drafted)] if drafted else []

    def expire_idle(self) -> Sequence[DrafterEvent]:
        for held in self._sessions.pop_idle():
            self._dequeue(held)
            logger.info("an idle session was closed", session_id=held.address.session_id)
        return []

    def _serve(self, entry: Entry[StateT]) -> Drafted | None:
        session = entry.session
        if session.urgency is Urgency.INGEST:
            self._method.ingest(entry.state, session)
            session.needs_ingest = False
            return None
        started_s = time.perf_counter()
        tokens = self._method.draft(entry.state, session, session.limit - len(session.prefix))
        session.draft_time_s += time.perf_counter() - started_s
        session.needs_ingest = False
        session.extend(tokens)
        return session.take_draft()

    def _open(self, command: Open) -> Sequence[DrafterEvent]:
        self._require_room(len(command.committed_ids))
        previous = self._sessions.find(command.address.session_id)
        held, events = self._sessions.open(command.address, lambda _: self._new_entry(command))
        if held is not None:
            if previous is not None:
                self._dequeue(previous)
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

    def _require_room(self, length: int) -> None:
        if length > self._method.max_context:
            raise ContextTooLong(
                f"{length} tokens do not fit into the drafter's context of {self._method.max_context}; "
                "decode without it."
            )

    def _let_go(self, address: Address) -> None:
        held = self._sessions.close(address)
        if held is not None:
            self._dequeue(held)

    def _requeue(self, held: Held[Entry[StateT]]) -> None:
        entry, urgency = held.state, held.state.session.urgency
        if urgency is entry.queued_as:
            return
        self._dequeue(held)
        if urgency is not None:
            self._queues[urgency][held.address.session_id] = None
            entry.queued_as = urgency

    def _dequeue(self, held: Held[Entry[StateT]]) -> None:
        if held.state.queued_as is not None:
            self._queues[held.state.queued_as].pop(held.address.session_id, None)
            held.state.queued_as = None
