"""The replicas of one pool: a connection to each, kept in step with the directory, and seats at them for sessions.

Knows nothing of what a session does with its seat, or of how the directory finds replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from orchestrator.board import Link, Replica
from orchestrator.directory import Directory, Lease
from orchestrator.replica_client import PeerSession, ReplicaClient
from paceline.errors import Draining, PacelineError, QueueFull
from paceline.generation import PoolStatus, ReplicaStatus
from paceline.telemetry import PoolMetrics

logger = structlog.get_logger(__name__)

LEASE_GRACE_S = 1.0
"""What a session still awaits of a replica whose lease has ended may take so long: it may only be draining."""

ClientT = TypeVar("ClientT", bound=ReplicaClient[Any, Any])


class Seat(Generic[ClientT]):
    """One session's place at one replica: the lease, and the connection. Invariant: given back once.

    Until then the session hears from the client, and of the end of the lease as if the replica drained, then was gone.
    """

    def __init__(self, session_id: str, session: PeerSession, give_back: Callable[[Seat[ClientT]], None]) -> None:
        self.session_id = session_id
        self._session, self._give_back = session, give_back
        self._lease: Lease | None = None
        self._client: ClientT | None = None
        self._is_held = True
        self._has_lost_lease = False

    @property
    def client(self) -> ClientT:
        assert self._client is not None, "a seat is handed out with its client"
        return self._client

    @property
    def replica(self) -> Replica:
        return self.client.replica

    def take(self, lease: Lease, client: ClientT) -> None:
        """The directory has granted the place."""
        self._lease, self._client = lease, client
        client.attach(self.session_id, self._session)
        if self._has_lost_lease:
            asyncio.get_running_loop().call_soon(self._leave_soon)

    def release(self) -> None:
        """Give the place back; nothing of it reaches the session afterwards."""
        if self._is_held:
            self._is_held = False
            self.client.detach(self.session_id)
            if self._lease is not None:
                self._lease.release()
            self._give_back(self)

    def on_lease_lost(self) -> None:
        """The control plane says that the replica has died or is leaving; which of the two it does not say."""
        self._has_lost_lease = True
        if self._lease is not None:
            self._leave_soon()

    def leave_when_idle(self) -> None:
        """Have the session leave as soon as it awaits nothing here."""
        if self._is_held:
            self._session.on_draining()

    def _leave_soon(self) -> None:
        self.leave_when_idle()
        if self._is_held:
            asyncio.get_running_loop().call_later(LEASE_GRACE_S, self._leave_now)

    def _leave_now(self) -> None:
        if self._is_held:
            self._session.on_lost("its lease has ended")


@dataclass(slots=True)
class _Member(Generic[ClientT]):
    """A replica with a connection."""

    client: ClientT
    task: asyncio.Task[None]
    is_announced: bool = False  # by the directory; a lease may name a replica earlier
    seats: int = 0


class Pool(ABC, Generic[ClientT]):
    """One client a replica, from when the directory or a lease names it until it has left and no session is seated.

    Invariant: a replica that sessions are seated at has a client.
    """

    name: str

    def __init__(self, directory: Directory, *, silence_limit_s: float, metrics: PoolMetrics) -> None:
        self.board = directory.board
        self._directory, self._silence_limit_s, self._metrics = directory, silence_limit_s, metrics
        self._members: dict[str, _Member[ClientT]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._stale_items_of_gone = 0
        self.board.watch(self._changed.set)
        metrics.connected_replicas.labels(pool=self.name).set_function(lambda: len(self._connected()))

    async def run(self) -> None:
        """Keep the connections until cancelled; raises what the directory raises."""
        async with asyncio.TaskGroup() as self._group:
            await self._directory.run(self._on_members)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a replica can be used; False if there is none in time. Raises if every replica is refused."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_connected:
                    self.raise_refusal()
                    self._changed.clear()
                    await self._changed.wait()
        self.raise_refusal()
        return self.is_connected

    async def seat(self, session_id: str, session: PeerSession, *, tokens: int) -> Seat[ClientT]:
        """A place at the best replica for a session of that many tokens; waits for one. Raises `QueueFull`.

        The replica may not be connected yet. Cancelling leaves nothing behind.
        """
        seat = Seat[ClientT](session_id, session, self._on_given_back)
        lease = await self._directory.lease(session_id, tokens=tokens, on_lost=seat.on_lease_lost)
        member = self._members.get(lease.replica.replica_id) or self._add(lease.replica)
        member.seats += 1
        seat.take(lease, member.client)
        if self.board.standing(lease.replica.replica_id).is_draining:
            # It has begun to drain while the lease was on its way, and will not say so again.
            asyncio.get_running_loop().call_soon(seat.leave_when_idle)
        return seat

    def note_refusal(self, replica: Replica, refusal: PacelineError) -> None:
        """A session was not taken there: the next ones should go elsewhere."""
        if isinstance(refusal, Draining):
            self.board.drain(replica.replica_id)
        elif isinstance(refusal, QueueFull):
            self.board.fill(replica.replica_id)

    def count_move(self, reason: str) -> None:
        """A session went on at another seat."""
        self._metrics.migrations.labels(pool=self.name, reason=reason).inc()

    # ---- what there is

    @property
    def is_connected(self) -> bool:
        return bool(self._connected())

    @property
    def has_room(self) -> bool:
        """Whether some replica should take another session."""
        return self.board.has_room(self._members)

    @property
    def seats(self) -> int:
        """Held now, by the sessions of this orchestrator."""
        return sum(member.seats for member in self._members.values())

    @property
    def stale_items(self) -> int:
        """Items dropped, of all replicas there have been."""
        return self._stale_items_of_gone + sum(member.client.stale_items for member in self._members.values())

    def raise_refusal(self) -> None:
        """Raise why no replica is used, if there are some and every one was refused."""
        refusals = [member.client.refusal for member in self._members.values()]
        if refusals and all(refusals) and refusals[0] is not None:
            raise refusals[0].with_traceback(None)  # it is raised again and again, and must not remember by whom

    @property
    def last_failures(self) -> tuple[str, ...]:
        """How the last attempts to reach replicas ended, each said once."""
        failures = (member.client.last_failure for member in self._members.values())
        return tuple(dict.fromkeys(failure for failure in failures if failure))

    def status(self) -> PoolStatus:
        return PoolStatus(
            name=self.name, replicas=tuple(self._replica_status(member) for member in self._members.values())
        )

    # ---- members

    @abstractmethod
    def _new_client(self, replica: Replica) -> ClientT: ...

    def _on_members(self, members: Mapping[str, Replica]) -> None:
        for replica_id, replica in members.items():
            member = self._members.get(replica_id) or self._add(replica)
            member.is_announced = True
            self.board.join(replica_id)
        for replica_id, member in list(self._members.items()):
            if member.is_announced and replica_id not in members:
                member.is_announced = False
                self.board.leave(replica_id)
                member.client.announce_draining()
                self._remove_if_unused(replica_id)

    def _add(self, replica: Replica) -> _Member[ClientT]:
        assert self._group is not None, "seats are given while the pool runs"
        client = self._new_client(replica)
        task = self._group.create_task(client.run(), name=f"{self.name} {replica.address}")
        member = self._members[replica.replica_id] = _Member(client, task)
        return member

    def _on_given_back(self, seat: Seat[ClientT]) -> None:
        replica_id = seat.replica.replica_id
        self._members[replica_id].seats -= 1
        self.board.free(replica_id)
        self._remove_if_unused(replica_id)

    def _remove_if_unused(self, replica_id: str) -> None:
        member = self._members.get(replica_id)  # None: it went with the last seat, given back on its notice of leaving
        if member is None or member.is_announced or member.seats:
            return
        del self._members[replica_id]
        self._stale_items_of_gone += member.client.stale_items
        member.task.add_done_callback(lambda _: self._forget(replica_id))
        member.task.cancel()

    def _forget(self, replica_id: str) -> None:
        if replica_id not in self._members:
            self.board.forget(replica_id)

    def _connected(self) -> list[ClientT]:
        # Metrics are read on another thread, while members come and go.
        return [member.client for member in list(self._members.values()) if member.client.is_connected]

    def _replica_status(self, member: _Member[ClientT]) -> ReplicaStatus:
        replica, info, refusal = member.client.replica, member.client.info, member.client.refusal
        standing = self.board.standing(replica.replica_id)
        load = standing.load
        return ReplicaStatus(
            replica_id=replica.replica_id,
            address=replica.address,
            node_id=replica.node_id,
            model_id=info.model_id if info else "",
            sessions=load.sessions,
            max_sessions=load.max_sessions,
            queued=load.queued,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=load.kv_capacity_tokens,
            acceptance_rate=load.num_accepted_tokens / load.num_draft_tokens if load.num_draft_tokens else None,
            is_draining=standing.is_draining,
            is_connected=standing.link is Link.CONNECTED,
            version=info.version if info else "",
            refusal=refusal.message if refusal and standing.link is Link.REFUSED else "",
            preemptions=load.preemptions,
        )
