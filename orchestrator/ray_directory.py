"""The directory of a pool on Ray Serve: replicas found, chosen and leased by Serve's own primitives.

A lease is a call to a replica that lasts as long as a session does and says nothing after its first item. So Serve's
autoscaler counts sessions, its back-pressure bounds them, its draining waits for them, and the end of a replica ends
its leases, although the sessions' traffic never passes through Serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from orchestrator.board import PoolBoard, Replica
from orchestrator.membership import Members, membership_of
from paceline.errors import QueueFull

logger = structlog.get_logger(__name__)

LEASE_METHOD = "lease"
_TURN_S = 0.05  # a choice takes a few milliseconds where there is room
_RETRY_S = 0.1


class PoolRouter(FIFOMixin, RequestRouter):
    """Ranks a pool's replicas by what this orchestrator's board knows of them, and publishes who they are."""

    def initialize_state(self, **kwargs: Any) -> None:
        """`pool` names the board and the membership, which live in modules that this process shares."""
        self._pool: str = kwargs["pool"]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        found = (_replica_of(running) for running in replicas)
        membership_of(self._pool).publish({replica.replica_id: replica for replica in found if replica is not None})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Best first, each a rank of its own; a replica that this orchestrator has lost is left out."""
        running = {candidate.replica_id.unique_id: candidate for candidate in candidate_replicas}
        replicas = [replica for candidate in candidate_replicas if (replica := _replica_of(candidate)) is not None]
        board = membership_of(self._pool).board
        ranked = replicas if board is None else board.ranked(replicas)
        return [[running[replica.replica_id]] for replica in ranked]


def _replica_of(running: RunningReplica) -> Replica | None:
    return _from_metadata(
        running.replica_id.unique_id,
        running.replica_metadata,
        node_id=running.node_id,
    )


def _from_metadata(replica_id: str, metadata: Mapping[str, Any], *, node_id: str) -> Replica | None:
    address = metadata.get("grpc_address")
    if not isinstance(address, str):
        return None
    # Serve knows of no zones by itself.
    return Replica(replica_id=replica_id, address=address, node_id=node_id, zone=str(metadata.get("zone", "")))


class RayLease:
    """One session's place at one replica (`directory.Lease`)."""

    def __init__(self, replica: Replica, stream: Any, on_lost: Callable[[], None]) -> None:
        self.replica, self._stream = replica, stream
        self._is_released = False
        self._watch = asyncio.ensure_future(self._until_lost(on_lost))

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._watch.cancel()
            self._stream.cancel()

    async def _until_lost(self, on_lost: Callable[[], None]) -> None:
        try:
            async for _ in self._stream:
                pass
        except asyncio.CancelledError:
            if self._is_released:
                raise
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the replica is gone
            logger.info("a lease ended", replica=self.replica.replica_id, why=type(error).__name__)
        on_lost()


class _Turns:
    """One choice at a time, so that each sees what the one before it has placed.

    A turn is short, whatever comes of it: where all replicas are full, Serve is to see how many sessions wait.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for the turn; call what comes out of it to end it early."""
        await self._lock.acquire()
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._lock.release()

        timer = asyncio.get_running_loop().call_later(_TURN_S, end)
        try:
            yield end
        finally:
            timer.cancel()
            end()


class RayDirectory:
    """The replicas of one deployment (`directory.Directory`)."""

    def __init__(self, handle: DeploymentHandle[Any], pool: str, board: PoolBoard, *, is_always_there: bool) -> None:
        """`is_always_there`: the pool never scales to zero, so it may be looked at without starting a replica."""
        self._handle = handle.options(method_name=LEASE_METHOD, stream=True)
        self._pool, self._is_always_there = pool, is_always_there
        self.board = board
        membership_of(pool).board = board
        self._turns = _Turns()
        # A request for a lease that nobody waits for any more keeps its place in Serve's queue until its turn comes.
        self._late: set[asyncio.Task[RayLease]] = set()

    async def run(self, on_members: Callable[[Members], None]) -> None:
        loop = asyncio.get_running_loop()

        def follower(members: Members) -> None:
            loop.call_soon_threadsafe(on_members, members)

        membership = membership_of(self._pool)
        on_members(membership.follow(follower))
        try:
            if self._is_always_there:
                await self._wake_router()
            await asyncio.Event().wait()
        finally:
            membership.unfollow(follower)

    async def lease(self, session_id: str, *, tokens: int, on_lost: Callable[[], None]) -> RayLease:
        acquiring = asyncio.ensure_future(self._acquire(session_id, tokens, on_lost))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            self._late.add(acquiring)
            acquiring.add_done_callback(self._give_back)
            raise

    async def _acquire(self, session_id: str, tokens: int, on_lost: Callable[[], None]) -> RayLease:
        while True:
            try:
                return await self._acquire_once(session_id, tokens, on_lost)
            except BackPressureError as error:
                raise QueueFull(f"Every {self._pool} is full and others wait already; try again shortly.") from error
            except (RayError, RayServeException, StopAsyncIteration) as error:
                # Chosen, and gone before it could say yes: the next choice is another.
                logger.info("a lease failed", pool=self._pool, why=type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    async def _acquire_once(self, session_id: str, tokens: int, on_lost: Callable[[], None]) -> RayLease:
        async with self._turns.take() as end_turn, self._handle.choose_replica(session_id) as selection:
            self.board.place(selection.replica_id, tokens=tokens)
            end_turn()
            try:
                stream: Any = self._handle.dispatch(selection, session_id)
                # Serve counts the call from its first item on, so the choice must not be let go of before.
                await anext(stream)
            except BaseException:
                self.board.free(selection.replica_id)
                raise
        replica = _from_metadata(
            selection.replica_id,
            selection.replica_metadata,
            node_id=selection.node_id,
        )
        assert replica is not None, "the router offers replicas with an address only"
        return RayLease(replica, stream, on_lost)

    async def _wake_router(self) -> None:
        """Handles are lazy: without a first call nobody hears of members."""
        while True:
            try:
                async with self._handle.choose_replica("wake"):
                    return
            except (RayError, RayServeException) as error:
                logger.info("no first look at a pool", pool=self._pool, why=type(error).__name__)
                await asyncio.sleep(_RETRY_S)

    def _give_back(self, acquiring: asyncio.Task[RayLease]) -> None:
        self._late.discard(acquiring)
        with suppress(asyncio.CancelledError):
            if acquiring.exception() is None:
                lease = acquiring.result()
                lease.release()
                self.board.free(lease.replica.replica_id)
