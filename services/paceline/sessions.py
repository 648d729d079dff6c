"""The sessions that a model service holds: fencing by epoch, the peer that owns each one, room, expiry of idle ones.

A session belongs to the stream that opened it last, under the highest epoch. Items of older epochs are dropped and
counted. Of what a session is it knows only how many tokens it has yet to feed. Used by the model thread; the
figures may be read from any other. Knows nothing of how items travel.
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

REMEMBERED_ENDINGS = 4096  # sessions


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
class PeerGone:
    """Let go of the sessions that still belong to a stream which has ended for good."""

    peer: int


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
    pending_tokens: int = 0  # as counted last


class SessionTable(Generic[StateT]):
    """Invariant: at most `max_sessions` sessions, one a session id, each under the highest epoch seen for it.

    `held_tokens` says how many tokens' keys and values the memory holds for all of them, and `pending_tokens_of` how
    many committed tokens of a session are yet to be fed. New sessions are taken while all that fits into
    `kv_capacity_tokens` (0: any number does). A session that is held is never refused or cut off for want of room: it
    may grow beyond, and be opened again.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        idle_ttl_s: float,
        pending_tokens_of: Callable[[StateT], int] = lambda _: 0,
        held_tokens: Callable[[], int] = lambda: 0,
        kv_capacity_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions: dict[str, Held[StateT]] = {}  # most recently used last
        self._ended: dict[str, int] = {}  # the highest epoch that ended, of the sessions that ended last
        self._idle_ttl_s, self._clock = idle_ttl_s, clock
        self._pending_tokens_of, self._held_tokens = pending_tokens_of, held_tokens
        self._pending_tokens = 0  # of all sessions
        self.max_sessions, self.kv_capacity_tokens = max_sessions, kv_capacity_tokens
        self.stale_items = 0
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def kv_used_tokens(self) -> int:
        """Tokens whose keys and values are held, or will be once all sessions have fed what is committed."""
        return self._held_tokens() + self._pending_tokens

    def __iter__(self) -> Iterator[Held[StateT]]:
        return iter(self._sessions.values())

    def find(self, session_id: str) -> Held[StateT] | None:
        return self._sessions.get(session_id)

    def open(
        self, address: Address, make: Callable[[Held[StateT] | None], StateT]
    ) -> tuple[Held[StateT] | None, list[Event[Any]]]:
        """Hold a new session, or the same one under a higher epoch; None if the opening is stale.

        `make` builds its state from what was held before. The events tell a peer that the session was taken from it.
        Raises `QueueFull` when there is no room, `Draining` when no new session is taken; all is then as it was before.
        """
        previous = self._sessions.get(address.session_id)
        newest_epoch = previous.address.epoch if previous else self._ended.get(address.session_id, -1)
        if address.epoch <= newest_epoch:
            self.count_stale()
            return None, []
        if previous is None:
            self._require_a_place()
        held = Held(address, make(previous), self._clock())
        if previous is None:
            self._require_room(self._pending_tokens_of(held.state))
        else:
            self._remove(previous)
        self._sessions[address.session_id] = held
        self.recount(held)
        if previous is None or previous.address.peer == address.peer:
            return held, []
        error = StaleEpoch(f"Session {address.session_id} was opened again under a newer epoch; let go of it.")
        return held, [Event(previous.address, error)]

    def recount(self, held: Held[StateT]) -> None:
        """Count again what a session has to feed; to be called when that has changed. Nothing if it is no longer held."""
        if self._sessions.get(held.address.session_id) is held:
            pending_tokens = self._pending_tokens_of(held.state)
            self._pending_tokens += pending_tokens - held.pending_tokens
            held.pending_tokens = pending_tokens

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
        """Let go of a session; returns what was held, or None if there is nothing to close or the item is stale.

        An opening under the same or an older epoch that arrives later, late or for a second time, is stale.
        """
        held = self._sessions.get(address.session_id)
        if held is None:
            self._remember_ending(address)
            return None
        # A newer epoch may close whatever became of its opening; the same one only through the stream that opened it.
        if address.epoch < held.address.epoch or (address.epoch == held.address.epoch and address != held.address):
            self.count_stale()
            return None
        self._remove(held)
        self._remember_ending(address)
        return held

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
            self._remove(held)
            self._remember_ending(held.address)
            expired.append(held)
        return expired

    def pop_of_peer(self, peer: int) -> list[Held[StateT]]:
        """Remove and return the sessions that a stream opened last; one that was opened again elsewhere stays."""
        orphans = [held for held in self._sessions.values() if held.address.peer == peer]
        for held in orphans:
            self._remove(held)
            self._remember_ending(held.address)
        return orphans

    def _require_a_place(self) -> None:
        if self.is_draining:
            raise Draining("This replica is about to stop and takes no new sessions; open the session elsewhere.")
        if len(self._sessions) >= self.max_sessions:
            raise QueueFull(f"This replica holds {self.max_sessions} sessions already; try again in a moment.")

    def _require_room(self, tokens: int) -> None:
        free_tokens = max(0, self.kv_capacity_tokens - self.kv_used_tokens)
        if self.kv_capacity_tokens and tokens > free_tokens:
            raise QueueFull(
                f"The session's {tokens} tokens do not fit into the {free_tokens} that are free of this replica's "
                f"{self.kv_capacity_tokens}; try again in a moment or elsewhere, or raise --kv-budget-tokens."
            )

    def _remove(self, held: Held[StateT]) -> None:
        del self._sessions[held.address.session_id]
        self._pending_tokens -= held.pending_tokens

    def _remember_ending(self, address: Address) -> None:
        epoch = max(address.epoch, self._ended.pop(address.session_id, -1))
        self._ended[address.session_id] = epoch
        if len(self._ended) > REMEMBERED_ENDINGS:
            del self._ended[next(iter(self._ended))]
