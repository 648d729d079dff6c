"""The sessions that a model service holds: fencing by epoch, the peer that owns each one, expiry of idle ones.

A session belongs to the stream that opened it last, under the highest epoch. Items of older epochs are dropped and
counted. Knows nothing of what a session holds, or of how items travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.errors import Draining, PacelineError, QueueFull, SessionNotFound, StaleEpoch
from paceline.types import SessionSpec

StateT = TypeVar("StateT")
OutcomeT = TypeVar("OutcomeT")


@dataclass(frozen=True, slots=True)
class Address:
    """Whom an item is from, or for."""

    peer: int  # number of the stream at this service
    session_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Open:
    """Hold a session on these tokens."""

    address: Address
    spec: SessionSpec
    committed_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Let go of a session."""

    address: Address


@dataclass(frozen=True, slots=True)
class Event(Generic[OutcomeT]):
    """What one session's peer hears: a result, or why the session cannot go on here."""

    address: Address
    outcome: OutcomeT | PacelineError


@dataclass(slots=True)
class Held(Generic[StateT]):
    """One session as the table sees it."""

    address: Address
    state: StateT
    last_used_s: float


class SessionTable(Generic[StateT]):
    """Invariant: at most `max_sessions` sessions, one a session id, each under the highest epoch seen for it."""

    def __init__(self, *, max_sessions: int, idle_ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions: dict[str, Held[StateT]] = {}  # most recently used last
        self._max_sessions, self._idle_ttl_s, self._clock = max_sessions, idle_ttl_s, clock
        self.stale_items = 0
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Held[StateT]]:
        return iter(self._sessions.values())

    def find(self, session_id: str) -> Held[StateT] | None:
        return self._sessions.get(session_id)

    def open(
        self, address: Address, make: Callable[[Held[StateT] | None], StateT]
    ) -> tuple[Held[StateT] | None, list[Event[Any]]]:
        """Hold a new session, or the same one under a higher epoch; None if the opening is stale.

        `make` builds its state from what was held before. The events tell a peer that the session was taken from it.
        Raises `QueueFull` when there is no room.
        """
        previous = self._sessions.get(address.session_id)
        if previous is not None and address.epoch <= previous.address.epoch:
            self.count_stale()
            return None, []
        if previous is None and self.is_draining:
            raise Draining("This replica is about to stop and takes no new sessions; open the session elsewhere.")
        if previous is None and len(self._sessions) >= self._max_sessions:
            raise QueueFull(f"This replica holds {self._max_sessions} sessions already; try again in a moment.")
        held = Held(address, make(previous), self._clock())
        self._sessions.pop(address.session_id, None)
        self._sessions[address.session_id] = held
        if previous is None or previous.address.peer == address.peer:
            return held, []
        error = StaleEpoch(f"Session {address.session_id} was opened again under a newer epoch; let go of it.")
        return held, [Event(previous.address, error)]

    def use(self, address: Address) -> Held[StateT] | None:
        """The session an item is for, or None if the item is stale; raises `SessionNotFound`.

        Stale is an older epoch, and a stream that the session does not belong to. An item of a newer epoch than was
        opened here means that the opening was lost, so it is not found either.
        """
        held = self._sessions.get(address.session_id)
        if held is None or address.epoch > held.address.epoch:
            raise SessionNotFound(
                f"Session {address.session_id} is not open here under epoch {address.epoch}; open it again."
            )
        if address != held.address:
            self.count_stale()
            return None
        held.last_used_s = self._clock()
        self._sessions[address.session_id] = self._sessions.pop(address.session_id)
        return held

    def close(self, address: Address) -> Held[StateT] | None:
        """Let go of a session; returns what was held, or None if there is nothing to close or the item is stale."""
        held = self._sessions.get(address.session_id)
        if held is None:
            return None
        # A newer epoch may close whatever became of its opening; the same one only through the stream that opened it.
        if address.epoch < held.address.epoch or (address.epoch == held.address.epoch and address != held.address):
            self.count_stale()
            return None
        return self._sessions.pop(address.session_id)

    def count_stale(self) -> None:
        self.stale_items += 1

    def pop_idle(self) -> list[Held[StateT]]:
        """Remove and return the sessions nobody has used for longer than the idle time."""
        expired = []
        oldest_allowed_s = self._clock() - self._idle_ttl_s
        while self._sessions:
            held = next(iter(self._sessions.values()))
            if held.last_used_s >= oldest_allowed_s:
                break
            expired.append(self._sessions.pop(held.address.session_id))
        return expired
