"""Clients kept in step with the directory, seats and their leases, and the drafters' waiting sessions; no network."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from orchestrator import pool as pool_module
from orchestrator.board import Load, PoolBoard, most_room_first, nearest_first
from orchestrator.directory import Lease, Replica, StaticDirectory
from orchestrator.drafter_pool import DrafterPool
from orchestrator.pool import Pool, Seat
from orchestrator.target_pool import check_alike
from paceline.errors import Draining, ModelMismatch, PacelineError, QueueFull
from paceline.telemetry import PoolMetrics
from tests.fakes import FakeModel, fake_info, hashed_logits, spec_of

INFO = fake_info(FakeModel(hashed_logits(10), vocab_size=10))


def replica(name: str) -> Replica:
    return Replica(replica_id=name, address=f"{name}:1")


class FakeClient:
    """A connection that is made and lost by the test (as far as a pool looks, `replica_client.ReplicaClient`)."""

    def __init__(self, replica: Replica, board: PoolBoard) -> None:
        self.replica, self._board = replica, board
        self.info = INFO
        self.refusal: PacelineError | None = None
        self.stale_items = 0
        self.is_connected = False
        self.sessions: dict[str, Any] = {}
        self.is_running = False
        self.drain_notices = 0

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.is_running = False
            self._board.lose(self.replica.replica_id)

    def connect(self) -> None:
        self.is_connected = True
        self._board.connect(self.replica.replica_id)

    def refuse(self, error: PacelineError) -> None:
        self.refusal = error
        self._board.refuse(self.replica.replica_id)

    def attach(self, session_id: str, session: Any) -> None:
        self.sessions[session_id] = session

    def detach(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    def announce_draining(self) -> None:
        self.drain_notices += 1
        for session in list(self.sessions.values()):
            session.on_draining()


@dataclass
class FakeLease:
    replica: Replica
    on_lost: Callable[[], None]
    directory: FakeDirectory
    is_held: bool = True

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            self.directory.held.remove(self)


class FakeDirectory:
    """A control plane in the hands of the test: members as it says, leases when it grants them."""

    def __init__(self, board: PoolBoard) -> None:
        self.board = board
        self.held: list[FakeLease] = []
        self.waiting: dict[str, asyncio.Future[Replica]] = {}
        self.failure: PacelineError | None = None
        self.refused = 0
        self._on_members: Callable[[Mapping[str, Replica]], None] = lambda _: None

    async def run(self, on_members: Callable[[Mapping[str, Replica]], None]) -> None:
        self._on_members = on_members
        on_members({})
        await asyncio.get_running_loop().create_future()

    async def lease(self, session_id: str, *, tokens: int, on_lost: Callable[[], None]) -> Lease:
        if self.failure is not None:
            self.refused += 1
            raise self.failure
        granted = self.waiting[session_id] = asyncio.get_running_loop().create_future()
        try:
            chosen = await granted
        finally:
            del self.waiting[session_id]
        self.board.place(chosen.replica_id, tokens=tokens)
        lease = FakeLease(chosen, on_lost, self)
        self.held.append(lease)
        return lease

    def announce(self, *names: str) -> None:
        self._on_members({name: replica(name) for name in names})

    async def grant(self, session_id: str, name: str) -> None:
        await settle()
        self.waiting[session_id].set_result(replica(name))
        await settle()


@dataclass
class FakeSession:
    """Notes what it hears, and leaves its seat where a session would."""

    heard: list[str] = field(default_factory=list)
    seat: Seat[Any] | None = None
    leaves_when_draining: bool = True
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)

    def on_event(self, event: Any) -> None:
        self.heard.append("event")

    def on_lost(self, reason: str) -> None:
        self.heard.append("lost")
        self.is_lost.set()
        self.leave()

    def on_draining(self) -> None:
        self.heard.append("draining")
        if self.leaves_when_draining:
            self.leave()

    def on_seat(self, seat: Seat[Any]) -> None:
        self.heard.append("seat")
        self.seat = seat

    def leave(self) -> None:
        if self.seat is not None:
            self.seat.release()


class FakePool(Pool[Any]):
    """A pool of connections that the test makes."""

    name = "target"

    def __init__(self, directory: Any) -> None:
        super().__init__(directory, silence_limit_s=5, metrics=PoolMetrics(CollectorRegistry()))
        self.clients: dict[str, FakeClient] = {}

    def _new_client(self, replica: Replica) -> Any:
        client = self.clients[replica.replica_id] = FakeClient(replica, self.board)
        return client


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@asynccontextmanager
async def kept(pool: Pool[Any]) -> AsyncIterator[None]:
    """The pool runs until the end of the block."""
    task = asyncio.ensure_future(pool.run())
    await settle()
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def fake_pool() -> AsyncIterator[tuple[FakePool, FakeDirectory]]:
    directory = FakeDirectory(PoolBoard(most_room_first))
    pool = FakePool(directory)
    async with kept(pool):
        yield pool, directory


async def seated(pool: Pool[Any], directory: FakeDirectory, session_id: str, name: str) -> FakeSession:
    """A session with a seat at the replica of that name."""
    session = FakeSession()
    asking = asyncio.ensure_future(pool.seat(session_id, session, tokens=7))
    await directory.grant(session_id, name)
    session.seat = await asking
    return session


# ---- members --------------------------------------------------------------------------------------------------------


async def test_every_member_has_a_client_until_it_leaves() -> None:
    """One each, started when the directory names it and stopped when it names it no more; nothing of it is kept."""
    async with fake_pool() as (pool, directory):
        directory.announce("a", "b")
        await settle()
        assert [pool.clients[name].is_running for name in ("a", "b")] == [True, True]
        pool.clients["a"].stale_items = 3
        directory.announce("b")
        await settle()
        assert [pool.clients[name].is_running for name in ("a", "b")] == [False, True]
        assert pool.stale_items == 3
        assert [status.replica_id for status in pool.status().replicas] == ["b"]
        assert pool.board.rank(replica("a")) == PoolBoard(most_room_first).rank(replica("a"))


async def test_a_member_that_leaves_keeps_its_client_until_its_sessions_have_left() -> None:
    """They are told to leave, and may still hear their verdict in flight."""
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        session = FakeSession(leaves_when_draining=False)
        asking = asyncio.ensure_future(pool.seat("session", session, tokens=7))
        await directory.grant("session", "a")
        session.seat = await asking
        directory.announce()
        await settle()
        assert session.heard == ["draining"]
        assert pool.clients["a"].is_running
        assert pool.status().replicas[0].is_draining
        session.leave()
        await settle()
        assert not pool.clients["a"].is_running


async def test_a_member_that_leaves_goes_with_the_last_session_that_leaves_at_once() -> None:
    """Sessions between two verdicts give their seats back while they are told to, and the others hear of it too."""
    async with fake_pool() as (pool, directory):
        directory.announce("a", "b", "c")
        sessions = [await seated(pool, directory, f"session {number}", name) for number, name in enumerate("aab")]
        directory.announce("c")
        await settle()
        assert [session.heard for session in sessions] == [["draining"]] * 3
        assert [pool.clients[name].is_running for name in "abc"] == [False, False, True]
        assert [status.replica_id for status in pool.status().replicas] == ["c"]


async def test_a_lease_may_name_a_replica_before_the_directory_does() -> None:
    """It is used at once, and is no member that has left because the members known before do not include it."""
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        session = await seated(pool, directory, "session", "new")
        assert pool.clients["new"].is_running
        directory.announce("a")
        await settle()
        assert session.heard == []
        directory.announce("a", "new")
        session.leave()
        await settle()
        assert pool.clients["new"].is_running


async def test_a_lease_of_a_replica_that_has_begun_to_leave_is_left_at_once() -> None:
    """The notice to leave came before the session did."""
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        first = FakeSession(leaves_when_draining=False)
        asking = asyncio.ensure_future(pool.seat("first", first, tokens=1))
        await directory.grant("first", "a")
        first.seat = await asking
        directory.announce()
        late = await seated(pool, directory, "late", "a")
        await settle()
        assert late.heard == ["draining"]


# ---- seats ----------------------------------------------------------------------------------------------------------


async def test_a_seat_counts_where_it_is_until_it_is_given_back() -> None:
    """Once, however often it is released; the lease goes with it, and the session hears no more of the client."""
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        session = await seated(pool, directory, "session", "a")
        standing = pool.board.standing("a")
        assert (pool.seats, standing.placed_sessions, standing.placed_tokens) == (1, 1, 7)
        assert list(pool.clients["a"].sessions) == ["session"]
        assert session.seat is not None
        session.seat.release()
        session.seat.release()
        assert (pool.seats, pool.board.standing("a").placed_sessions, directory.held) == (0, 0, [])
        assert list(pool.clients["a"].sessions) == []


async def test_giving_up_the_wait_for_a_seat_leaves_nothing_behind() -> None:
    """Neither a lease nor a place in the directory's queue."""
    async with fake_pool() as (pool, directory):
        asking = asyncio.ensure_future(pool.seat("session", FakeSession(), tokens=1))
        await settle()
        assert list(directory.waiting) == ["session"]
        asking.cancel()
        await settle()
        assert (directory.waiting, directory.held, pool.seats) == ({}, [], 0)


async def test_a_lost_lease_gives_the_session_a_moment_and_then_its_replica_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control plane does not say whether the replica died or drains: the verdict in flight may still come."""
    monkeypatch.setattr(pool_module, "LEASE_GRACE_S", 0.01)
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        session = await seated(pool, directory, "session", "a")
        session.leaves_when_draining = False
        directory.held[0].on_lost()
        assert session.heard == ["draining"]
        await asyncio.wait_for(session.is_lost.wait(), 5)
        assert directory.held == []


async def test_a_lease_that_is_lost_while_it_is_handed_over_is_not_overlooked() -> None:
    """The directory's answer and its end may come in one breath."""
    session, given_back = FakeSession(), list[Seat[Any]]()
    seat: Seat[Any] = Seat("session", session, given_back.append)
    board = PoolBoard(most_room_first)
    lease = FakeLease(replica("a"), lambda: None, FakeDirectory(board))
    lease.directory.held.append(lease)
    seat.on_lease_lost()
    seat.take(lease, FakeClient(replica("a"), board))
    session.seat = seat
    await settle()
    assert session.heard == ["draining"]
    assert given_back == [seat]
    assert not lease.is_held


async def test_a_released_seat_says_nothing_to_its_session() -> None:
    """It may sit elsewhere by then."""
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        session = await seated(pool, directory, "session", "a")
        lease = directory.held[0]
        session.leave()
        lease.on_lost()
        directory.announce()
        await settle()
        assert session.heard == []


@pytest.mark.parametrize("refusal", [QueueFull("No room."), Draining("About to stop.")])
async def test_a_refusal_sends_the_next_sessions_elsewhere(refusal: PacelineError) -> None:
    """Before the replica's next report says so."""
    async with fake_pool() as (pool, directory):
        directory.announce("a", "b")
        for name in ("a", "b"):
            pool.clients[name].connect()
        pool.board.report("b", Load(sessions=5))
        replicas = [replica("a"), replica("b")]
        assert pool.board.ranked(replicas)[0].replica_id == "a"
        pool.note_refusal(replica("a"), refusal)
        assert pool.board.ranked(replicas)[0].replica_id == "b"


# ---- being connected ------------------------------------------------------------------------------------------------


async def test_one_replica_that_can_be_used_is_enough() -> None:
    """Another is refused, for which the pool is not; the refusal counts once there is nothing else."""
    async with fake_pool() as (pool, directory):
        assert not await pool.wait_connected(0.01)
        directory.announce("a", "b")
        waiting = asyncio.ensure_future(pool.wait_connected(5))
        await settle()
        pool.clients["a"].refuse(ModelMismatch("Another model."))
        await settle()
        assert not waiting.done()
        pool.clients["b"].connect()
        assert await waiting
        assert pool.is_connected
        pool.raise_refusal()


async def test_a_pool_whose_replicas_are_all_refused_says_why() -> None:
    """At once, for waiting will not help."""
    async with fake_pool() as (pool, directory):
        directory.announce("a")
        waiting = asyncio.ensure_future(pool.wait_connected(60))
        await settle()
        pool.clients["a"].refuse(ModelMismatch("Another model."))
        with pytest.raises(ModelMismatch):
            await asyncio.wait_for(waiting, 5)
        for _ in range(10):
            with pytest.raises(ModelMismatch) as caught:
                pool.raise_refusal()
        assert len(list(traceback.walk_tb(caught.value.__traceback__))) < 5, "it remembers who has met it"


@pytest.mark.parametrize(
    ("field_name", "value", "word"),
    [("tokenizer_sha256", "f" * 64, "tokenizer"), ("vocab_size", 11, "vocabulary"), ("max_context", 5, "context")],
)
def test_targets_of_one_pool_must_be_alike(field_name: str, value: Any, word: str) -> None:
    """An answer may go on at any of them; a stranger is refused by its address and by what differs."""
    info = fake_info(FakeModel(hashed_logits(10), vocab_size=10))
    check_alike(replica("a"), info, INFO)
    object.__setattr__(info, field_name, value)
    with pytest.raises(ModelMismatch, match=rf"a:1 .*{word}"):
        check_alike(replica("a"), info, INFO)


# ---- the drafters' queue --------------------------------------------------------------------------------------------


class FakeDrafterPool(DrafterPool):
    """The real queue, before connections that the test makes."""

    def __init__(self, directory: Any) -> None:
        metrics = PoolMetrics(CollectorRegistry())
        super().__init__(directory, target_info=INFO, silence_limit_s=5, metrics=metrics)

    def _new_client(self, replica: Replica) -> Any:
        return FakeClient(replica, self.board)


@asynccontextmanager
async def drafter_pool() -> AsyncIterator[tuple[FakeDrafterPool, FakeDirectory]]:
    directory = FakeDirectory(PoolBoard(nearest_first))
    pool = FakeDrafterPool(directory)
    async with kept(pool):
        yield pool, directory


async def test_one_lease_is_asked_for_at_a_time() -> None:
    """The others wait in the order of asking, and asking twice gives one seat."""
    async with drafter_pool() as (pool, directory):
        sessions = {name: FakeSession() for name in ("first", "second", "third")}
        for name, session in sessions.items():
            pool.ask(name, session, tokens=1)
            pool.ask(name, session, tokens=1)
        for name, session in sessions.items():
            await settle()
            assert list(directory.waiting) == [name]
            await directory.grant(name, "drafter")
            assert session.heard == ["seat"]
        await settle()
        assert directory.waiting == {}
        assert pool.seats == 3


async def test_a_session_that_has_ended_leaves_the_queue() -> None:
    """One whose lease is on the way gives it back on arrival: the control plane may keep the place of one who has gone."""
    async with drafter_pool() as (pool, directory):
        ended, waiting, gone = FakeSession(), FakeSession(), FakeSession()
        for name, session in (("ended", ended), ("gone", gone), ("waiting", waiting)):
            pool.ask(name, session, tokens=1)
        await settle()
        pool.withdraw("ended")
        pool.withdraw("gone")
        await settle()
        assert list(directory.waiting) == ["ended"]
        await directory.grant("ended", "drafter")
        assert (ended.heard, pool.seats, directory.held) == ([], 0, [])
        assert list(directory.waiting) == ["waiting"]
        await directory.grant("waiting", "drafter")
        assert (waiting.heard, gone.heard, pool.seats) == (["seat"], [], 1)


async def test_a_directory_that_refuses_costs_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue goes on when it has recovered."""
    monkeypatch.setattr("orchestrator.drafter_pool._FULL_PAUSE_S", 0.01)
    async with drafter_pool() as (pool, directory):
        directory.failure = QueueFull("Too many wait.")
        session = FakeSession()
        pool.ask("session", session, tokens=1)
        async with asyncio.timeout(30):
            while not directory.refused:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)
            directory.failure = None
            while "session" not in directory.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await directory.grant("session", "drafter")
        assert session.heard == ["seat"]


async def test_sessions_that_want_drafts_are_counted_with_or_without_a_seat() -> None:
    """They are what a pool of drafters is scaled by, also one that is empty."""
    async with drafter_pool() as (pool, directory):
        spec = spec_of(prompt_length=1, vocab_size=10)
        with pool.session(spec):
            await settle()
            assert (pool.speculating_sessions, pool.seats) == (1, 0)
        assert pool.speculating_sessions == 0
        await directory.grant(spec.session_id, "drafter")
        assert (pool.seats, directory.held) == (0, [])


# ---- the directory without a control plane --------------------------------------------------------------------------


async def test_static_lease_waits_until_an_address_can_be_used() -> None:
    """And is counted until it is released, once."""
    board = PoolBoard(most_room_first)
    directory = StaticDirectory(["a:1", "b:1"], board)
    for address in ("a:1", "b:1"):
        board.lose(address)
    asking = asyncio.ensure_future(directory.lease("session", tokens=1, on_lost=lambda: None))
    await settle()
    assert not asking.done()
    board.connect("b:1")
    lease = await asyncio.wait_for(asking, 5)
    assert (lease.replica.address, directory.leases) == ("b:1", 1)
    lease.release()
    lease.release()
    assert directory.leases == 0


async def test_static_wait_can_be_given_up() -> None:
    """At any time: a lease that could be granted by then is not taken."""
    board = PoolBoard(most_room_first)
    directory = StaticDirectory(["a:1"], board)
    board.lose("a:1")
    for connects_meanwhile in (False, True):
        asking = asyncio.ensure_future(directory.lease("session", tokens=1, on_lost=lambda: None))
        await settle()
        if connects_meanwhile:
            board.connect("a:1")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert directory.leases == 0


async def test_static_leases_spread_over_equal_replicas() -> None:
    """Nothing has been reported yet, so what was placed is all there is to go by."""
    board = PoolBoard(most_room_first)
    directory = StaticDirectory(["a:1", "b:1", "c:1"], board)
    pool = FakePool(directory)
    async with kept(pool):
        for client in pool.clients.values():
            client.connect()
        seats = [await pool.seat(f"session-{number}", FakeSession(), tokens=1) for number in range(6)]
        assert sorted(seat.replica.address for seat in seats) == ["a:1", "a:1", "b:1", "b:1", "c:1", "c:1"]
