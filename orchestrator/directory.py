"""Which replicas of a pool there are, and one session's place at one of them.

A directory is the control plane as the orchestrator sees it: `StaticDirectory` here for addresses from the settings,
`ray_directory.RayDirectory` for a Serve application. Knows nothing of gRPC or Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from orchestrator.board import PoolBoard, Replica

__all__ = ["Directory", "Lease", "Replica", "StaticDirectory", "StaticLease"]


class Lease(Protocol):
    """One session's place at one replica; what autoscaling, back-pressure and draining of the control plane see."""

    @property
    def replica(self) -> Replica: ...

    def release(self) -> None:
        """Give the place back. Idempotent, never raises, does not block."""


class Directory(Protocol):
    """One for each pool and orchestrator. Used on one event loop."""

    @property
    def board(self) -> PoolBoard:
        """By which it ranks replicas; the pool writes there what it learns of them."""

    async def run(self, on_members: Callable[[Mapping[str, Replica]], None]) -> None:
        """Report the members by replica id, at once and whenever they change, until cancelled.

        A replica that drains or has died is no member.
        """

    async def lease(self, session_id: str, *, tokens: int, on_lost: Callable[[], None]) -> Lease:
        """A place at the best replica there is now, by the pool's board; waits for one if there is none.

        The board is told at once of the session placed and its tokens, so that the next choice sees it.

        Cancelling leaves no lease behind: one that arrives later is released on arrival. `on_lost` is called once, on
        the event loop, if the replica dies or leaves while the lease is held; never before this has returned, and
        never behind `release`. Raises `QueueFull` if too many wait already.
        """


class StaticDirectory:
    """Every address is a member for ever; whether it answers is for the board to know (`directory.Directory`).

    A lease here is only counted: with nobody to start or stop replicas, the connection alone says that one is gone.
    """

    def __init__(self, addresses: Sequence[str], board: PoolBoard) -> None:
        self._members = {address: Replica(replica_id=address, address=address) for address in addresses}
        self.board = board
        self._waiting: set[asyncio.Future[None]] = set()
        self.leases = 0  # held now
        board.watch(self._wake)

    async def run(self, on_members: Callable[[Mapping[str, Replica]], None]) -> None:
        on_members(self._members)
        await asyncio.get_running_loop().create_future()

    async def lease(self, session_id: str, *, tokens: int, on_lost: Callable[[], None]) -> StaticLease:
        while not (ranked := self.board.ranked(self._members.values())):
            await self._next_change()
        self.board.place(ranked[0].replica_id, tokens=tokens)
        return StaticLease(ranked[0], self)

    async def _next_change(self) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(change)
        try:
            await change
        finally:
            self._waiting.discard(change)

    def _wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)


class StaticLease:
    """A place at a replica (`directory.Lease`)."""

    def __init__(self, replica: Replica, directory: StaticDirectory) -> None:
        self.replica, self._directory = replica, directory
        self._is_held = True
        directory.leases += 1

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._directory.leases -= 1
