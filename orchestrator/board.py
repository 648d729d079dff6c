"""What one orchestrator knows of a pool's replicas, and which of them a session should go to. Pure.

Written on the event loop alone. Ranking may run on any thread: it reads one mapping of frozen values, which a change
replaces and never mutates.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

SUSPICION_S = 30.0
"""So long a replica that was late with a verdict is used only where there is nothing better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One running replica of a pool, as the control plane knows it."""

    replica_id: str  # where the control plane starts replicas: another for each start
    address: str  # HOST:PORT of its gRPC server
    node_id: str = ""  # empty: unknown
    zone: str = ""  # empty: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica said of itself last (`session.proto`, LoadReport)."""

    sessions: int = 0
    max_sessions: int = 0  # 0: not told
    queued: int = 0  # items that wait for a model step
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0  # 0: not told
    num_draft_tokens: int = 0  # judged since the replica's start; targets only
    num_accepted_tokens: int = 0
    step_busy_share: float = 0.0  # of the last second
    is_draining: bool = False
    stale_items: int = 0
    preemptions: int = 0  # since its start


_KV_PARTS = 32


class Link(StrEnum):
    """How the orchestrator stands with a replica."""

    UNKNOWN = "unknown"  # not tried yet
    CONNECTED = "connected"
    LOST = "lost"  # its stream has ended, or it does not answer
    REFUSED = "refused"  # it answers, but its model does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All that is known of one replica."""

    link: Link = Link.UNKNOWN
    load: Load = field(default_factory=Load)
    has_left: bool = False  # the members; it may still finish what it holds
    is_refusing: bool = False  # it refused a session since its last report
    suspect_until_s: float = -math.inf  # on the board's clock: it was late with a verdict, and has given none since
    placed_sessions: int = 0  # by this orchestrator since that report, less those that ended; may be negative
    placed_tokens: int = 0  # likewise, tokens of the sessions placed

    @property
    def is_draining(self) -> bool:
        return self.has_left or self.load.is_draining

    @property
    def is_usable(self) -> bool:
        return self.link in (Link.UNKNOWN, Link.CONNECTED) and not self.is_draining

    @property
    def sessions(self) -> int:
        """Sessions that the replica should hold by now."""
        return max(0, self.load.sessions + self.placed_sessions)

    @property
    def free_kv_tokens(self) -> float:
        """Tokens of KV memory that should be free by now; infinite if the replica does not tell."""
        if not self.load.kv_capacity_tokens:
            return math.inf
        return self.load.kv_capacity_tokens - self.load.kv_used_tokens - self.placed_tokens

    @property
    def free_kv_parts(self) -> float:
        """Free KV memory in whole thirty-seconds of all there is, rounded up."""
        if not self.load.kv_capacity_tokens:
            return math.inf
        return math.ceil(_KV_PARTS * self.free_kv_tokens / self.load.kv_capacity_tokens)

    @property
    def is_full(self) -> bool:
        is_at_limit = 0 < self.load.max_sessions <= self.sessions
        return self.is_refusing or is_at_limit or self.free_kv_tokens <= 0


class Distance(IntEnum):
    """From the orchestrator to a replica, near to far."""

    SAME_NODE = 0
    SAME_ZONE = 1
    FAR = 2  # or unknown


Rank = tuple[float, ...]
"""Lower is better."""

Order = Callable[[Standing, Distance], Rank]
"""How a pool weighs its usable replicas, once those that are full or unknown stand behind the others."""


def most_room_first(standing: Standing, distance: Distance) -> Rank:
    """Targets: most free KV memory, then fewest sessions, then nearest.

    Memory is compared in thirty-seconds of a replica's: what is known of it may be a second old, and a difference of a
    few ended answers says less than who has fewer sessions.
    """
    return (-standing.free_kv_parts, standing.sessions, distance)


def nearest_first(standing: Standing, distance: Distance) -> Rank:
    """Drafters: nearest, for every round trip counts; then least busy."""
    return (distance, standing.sessions + standing.load.queued, standing.load.step_busy_share)


class PoolBoard:
    """What one orchestrator knows of one pool.

    Invariant: the mapping of standings is replaced with every change, so a reader on another thread sees one moment.
    """

    def __init__(
        self, order: Order, *, node_id: str = "", zone: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`node_id` and `zone` are where this orchestrator runs; empty if that is not known."""
        self._order, self._clock = order, clock
        self._node_id, self._zone = node_id, zone
        self._standings: Mapping[str, Standing] = {}
        self._watchers: tuple[Callable[[], None], ...] = ()

    # ---- reading, from any thread

    def standing(self, replica_id: str) -> Standing:
        return self._standings.get(replica_id, _NOTHING_KNOWN)

    def rank(self, replica: Replica) -> Rank | None:
        """Where the replica stands among the others, lower is better; None if it must not be used.

        Replicas with room come first, then those not heard of yet, then full and suspect ones: what is known of them
        may be a second old, so where there is nothing better they are asked.
        """
        standing = self.standing(replica.replica_id)
        if not standing.is_usable:
            return None
        # Of the suspect ones, the first to fall under suspicion comes first: the last has just failed somebody.
        suspicion = standing.suspect_until_s if self._is_suspect(standing) else 0.0
        group = 2 if suspicion or standing.is_full else 1 if standing.link is Link.UNKNOWN else 0
        # Orchestrators on different nodes break ties differently, so that they do not all take the same replica.
        tie = zlib.crc32(f"{self._node_id}/{replica.replica_id}".encode())
        return (group, suspicion, *self._order(standing, self._distance(replica)), tie)

    def ranked(self, replicas: Iterable[Replica]) -> list[Replica]:
        """The replicas that may be used, best first."""
        ranks = [(self.rank(replica), replica) for replica in replicas]
        usable = [(rank, replica) for rank, replica in ranks if rank is not None]
        return [replica for _, replica in sorted(usable, key=lambda entry: (entry[0], entry[1].replica_id))]

    def has_room(self, replica_ids: Iterable[str]) -> bool:
        """Whether one of these replicas could take another session."""
        standings = [self.standing(replica_id) for replica_id in replica_ids]
        return any(
            standing.is_usable and not standing.is_full and not self._is_suspect(standing) for standing in standings
        )

    # ---- writing, on the event loop

    def connect(self, replica_id: str) -> None:
        """Its stream is open; nothing that was known of its load holds any more."""
        self._set(replica_id, Standing(link=Link.CONNECTED, has_left=self.standing(replica_id).has_left))

    def report(self, replica_id: str, load: Load) -> None:
        """It has said how busy it is; what was placed there since the last time is part of that."""
        before = self.standing(replica_id)
        self._set(replica_id, replace(before, load=load, is_refusing=False, placed_sessions=0, placed_tokens=0))

    def lose(self, replica_id: str) -> None:
        """Its stream has ended, or it does not answer."""
        self._set(replica_id, replace(self.standing(replica_id), link=Link.LOST))

    def refuse(self, replica_id: str) -> None:
        """Its model does not fit."""
        self._set(replica_id, replace(self.standing(replica_id), link=Link.REFUSED))

    def join(self, replica_id: str) -> None:
        """It is a member of the pool."""
        self._set(replica_id, replace(self.standing(replica_id), has_left=False))

    def leave(self, replica_id: str) -> None:
        """It is no member any more; sessions there should move."""
        self._set(replica_id, replace(self.standing(replica_id), has_left=True))

    def forget(self, replica_id: str) -> None:
        """It is gone, and no session is there."""
        self._replace({known: standing for known, standing in self._standings.items() if known != replica_id})

    def place(self, replica_id: str, *, tokens: int) -> None:
        """A session of that many tokens was sent there."""
        before = self.standing(replica_id)
        sessions, placed_tokens = before.placed_sessions + 1, before.placed_tokens + tokens
        self._set(replica_id, replace(before, placed_sessions=sessions, placed_tokens=placed_tokens))

    def free(self, replica_id: str) -> None:
        """A session has left it. Its tokens count until the next report, which says what became of their memory."""
        before = self.standing(replica_id)
        self._set(replica_id, replace(before, placed_sessions=before.placed_sessions - 1, is_refusing=False))

    def fill(self, replica_id: str) -> None:
        """It refused a session for want of room, which holds until it reports again or a session leaves it."""
        self._set(replica_id, replace(self.standing(replica_id), is_refusing=True))

    def drain(self, replica_id: str) -> None:
        """It refused a session because it is about to stop, ahead of the report that says so."""
        before = self.standing(replica_id)
        self._set(replica_id, replace(before, load=replace(before.load, is_draining=True)))

    def suspect(self, replica_id: str) -> None:
        """A verdict that was asked of it has not come in time, though it gives signs of life.

        Its sessions leave, which makes it look idle: for a while it is used only where there is nothing better.
        """
        until_s = self._clock() + SUSPICION_S
        self._set(replica_id, replace(self.standing(replica_id), suspect_until_s=until_s))

    def trust(self, replica_id: str) -> None:
        """It has given a verdict."""
        standing = self.standing(replica_id)
        if standing.suspect_until_s != -math.inf:
            self._set(replica_id, replace(standing, suspect_until_s=-math.inf))

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` behind every change, on the event loop."""
        self._watchers = (*self._watchers, on_change)

    # ----

    def _is_suspect(self, standing: Standing) -> bool:
        return standing.suspect_until_s > self._clock()

    def _distance(self, replica: Replica) -> Distance:
        if self._node_id and replica.node_id == self._node_id:
            return Distance.SAME_NODE
        if self._zone and replica.zone == self._zone:
            return Distance.SAME_ZONE
        return Distance.FAR

    def _set(self, replica_id: str, standing: Standing) -> None:
        self._replace({**self._standings, replica_id: standing})

    def _replace(self, standings: Mapping[str, Standing]) -> None:
        self._standings = standings
        for on_change in self._watchers:
            on_change()


_NOTHING_KNOWN = Standing()
