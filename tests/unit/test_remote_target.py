"""One session at the pool of targets, message by message: what it sends, what it believes, when it moves; no network."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.board import Replica
from orchestrator.loop import TimedRows
from orchestrator.pool import Seat
from orchestrator.remote_target import FailoverLimits, RemoteTarget
from orchestrator.replica_client import PeerSession, TargetClient
from paceline.errors import (
    DeadlineExceeded,
    Draining,
    LengthMismatch,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    SessionNotFound,
    TargetUnavailable,
)
from paceline.prefix import TokenPrefix
from paceline.types import Draft, Row, VerdictRows
from paceline.v1 import target_service_pb2 as target_pb
from paceline.wire import failure_to_proto, verdict_to_proto
from tests.fakes import spec_of

PROMPT = (1, 2, 3, 4)
DRAFT = Draft((5, 6))

Answer = Callable[["FakeClient", target_pb.TargetCommand], None]


def verdict_event(command: target_pb.TargetCommand, *ids: int, epoch: int | None = None) -> target_pb.TargetEvent:
    rows = VerdictRows(base_length=command.verify.base_length, rows=tuple(Row(token_id) for token_id in ids or (7,)))
    return target_pb.TargetEvent(
        session_id=command.session_id,
        epoch=command.epoch if epoch is None else epoch,
        verdict=verdict_to_proto(rows),
    )


def judges(client: FakeClient, command: target_pb.TargetCommand) -> None:
    client.say(verdict_event(command))


def is_lost(client: FakeClient, command: target_pb.TargetCommand) -> None:
    asyncio.get_running_loop().call_soon(client.lose)


def stays_silent(client: FakeClient, command: target_pb.TargetCommand) -> None:
    return None


def fails_with(error: PacelineError) -> Answer:
    def answer(client: FakeClient, command: target_pb.TargetCommand) -> None:
        client.say(target_pb.TargetEvent(session_id="session", epoch=command.epoch, failed=failure_to_proto(error)))

    return answer


@dataclass
class FakeClient:
    """A connection to a target that answers each draft as it is told."""

    name: str
    answers: list[Answer] = field(default_factory=list)  # one a draft; then it judges
    sent: list[target_pb.TargetCommand] = field(default_factory=list)
    stale_items: int = 0
    can_connect: bool = True
    session: PeerSession | None = None

    @property
    def replica(self) -> Replica:
        return Replica(replica_id=self.name, address=f"{self.name}:1")

    @property
    def kinds(self) -> list[tuple[str | None, int]]:
        return [(command.WhichOneof("command"), command.epoch) for command in self.sent]

    async def settle(self) -> bool:
        return self.can_connect

    def attach(self, session_id: str, session: PeerSession) -> None:
        self.session = session

    def detach(self, session_id: str) -> None:
        self.session = None

    def send(self, command: target_pb.TargetCommand) -> None:
        self.sent.append(command)
        if command.WhichOneof("command") == "verify":
            answer = self.answers.pop(0) if self.answers else judges
            answer(self, command)

    def say(self, event: target_pb.TargetEvent) -> None:
        """The event arrives a moment later, if the session still listens."""
        asyncio.get_running_loop().call_soon(self._deliver, event)

    def lose(self) -> None:
        if self.session is not None:
            self.session.on_lost("its stream has ended")

    def _deliver(self, event: target_pb.TargetEvent) -> None:
        if self.session is not None:
            self.session.on_event(event)


@dataclass
class FakeLease:
    replica: Replica
    releases: int = 0

    def release(self) -> None:
        self.releases += 1


class FakeSeats:
    """A pool that gives out seats in a given order; waits for ever when there is none left."""

    def __init__(self, *clients: FakeClient) -> None:
        self.is_connected = self.has_room = True
        self.leases: list[FakeLease] = []
        self.notes: list[tuple[str, str]] = []
        self.moves: list[str] = []
        self._clients = list(clients)

    async def seat(self, session_id: str, session: PeerSession, *, tokens: int) -> Seat[TargetClient]:
        if not self._clients:
            await asyncio.get_running_loop().create_future()
        client: Any = self._clients.pop(0)
        seat: Seat[TargetClient] = Seat(session_id, session, lambda _: None)
        self.leases.append(FakeLease(client.replica))
        seat.take(self.leases[-1], client)
        return seat

    def note_refusal(self, replica: Replica, refusal: PacelineError) -> None:
        self.notes.append((replica.replica_id, type(refusal).__name__))

    def note_late(self, replica: Replica) -> None:
        self.notes.append((replica.replica_id, "late"))

    def note_verdict(self, replica: Replica) -> None:
        self.notes.append((replica.replica_id, "verdict"))

    def count_move(self, reason: str) -> None:
        self.moves.append(reason)

    @property
    def held(self) -> int:
        return sum(not lease.releases for lease in self.leases)


def session_at(
    seats: FakeSeats,
    *,
    timeout_s: float = 0.05,
    max_migrations: int = 8,
    verify_deadline_s: float = 5.0,
    deadline_s: float | None = None,
) -> RemoteTarget:
    return RemoteTarget(
        seats,
        spec_of(prompt_length=len(PROMPT), vocab_size=10),
        FailoverLimits(timeout_s=timeout_s, max_migrations=max_migrations),
        verify_deadline_s=verify_deadline_s,
        deadline_s=deadline_s,
    )


async def in_time(verifying: Coroutine[Any, Any, TimedRows]) -> VerdictRows:
    async with asyncio.timeout(5):
        return (await verifying).rows


async def test_a_session_opens_once_and_then_tells_only_what_is_new() -> None:
    """The prompt travels with the opening; each draft brings the tokens committed since the last."""
    client = FakeClient("a")
    session, prefix = session_at(FakeSeats(client)), TokenPrefix(PROMPT)
    assert (await in_time(session.verify(prefix, Draft()))).rows == (Row(7),)
    prefix.extend([7])
    await in_time(session.verify(prefix, DRAFT))
    session.close()
    assert client.kinds == [("open", 1), ("verify", 1), ("verify", 1), ("close", 1)]
    assert [list(command.verify.committed_ids) for command in client.sent[1:3]] == [[], [7]]
    assert list(client.sent[2].verify.draft_ids) == [5, 6]


@pytest.mark.parametrize("answer", [is_lost, fails_with(Draining("About to stop.")), fails_with(QueueFull("No room."))])
async def test_the_same_round_is_verified_at_another_replica(answer: Answer) -> None:
    """From all committed tokens, with the same draft, under a higher epoch; the old place is given back."""
    first, second = FakeClient("a", [judges, answer]), FakeClient("b")
    seats = FakeSeats(first, second)
    session, prefix = session_at(seats), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, Draft()))
    prefix.extend([7])
    assert (await in_time(session.verify(prefix, DRAFT))).base_length == 5
    assert second.kinds == [("open", 2), ("verify", 2)]
    assert list(second.sent[0].open.committed_ids) == [*PROMPT, 7]
    assert list(second.sent[1].verify.committed_ids) == []
    assert list(second.sent[1].verify.draft_ids) == [5, 6]
    assert [lease.releases for lease in seats.leases] == [1, 0]
    assert len(seats.moves) == 1


async def test_a_verdict_under_an_older_epoch_or_for_another_base_is_not_believed() -> None:
    """Not even one for the very draft that is waited for: whoever sent it may hold other tokens."""

    def answers_wrongly_first(client: FakeClient, command: target_pb.TargetCommand) -> None:
        client.say(verdict_event(command, 9, epoch=command.epoch - 1))
        other = target_pb.TargetCommand.FromString(command.SerializeToString())
        other.verify.base_length += 1
        client.say(verdict_event(other, 9))
        client.say(verdict_event(command, 8))
        client.say(verdict_event(command, 9))

    client = FakeClient("a", [answers_wrongly_first])
    session = session_at(FakeSeats(client))
    assert (await in_time(session.verify(TokenPrefix(PROMPT), DRAFT))).rows == (Row(8),)
    await asyncio.sleep(0)
    assert client.stale_items == 3


async def test_a_replica_that_lost_the_session_is_told_of_it_again() -> None:
    """At the same seat, under a higher epoch; if that does not help, the answer fails."""
    for error in (SessionNotFound("Open it again."), LengthMismatch("Open it again.")):
        client = FakeClient("a", [fails_with(error)])
        await in_time(session_at(FakeSeats(client)).verify(TokenPrefix(PROMPT), DRAFT))
        assert client.kinds == [("open", 1), ("verify", 1), ("open", 2), ("verify", 2)]
        client = FakeClient("a", [fails_with(error)] * 9)
        with pytest.raises(TargetUnavailable):
            await in_time(session_at(FakeSeats(client)).verify(TokenPrefix(PROMPT), DRAFT))


async def test_what_the_session_itself_is_at_fault_for_is_its_error() -> None:
    """Another replica would say the same."""
    seats = FakeSeats(FakeClient("a", [fails_with(PayloadInvalid("An id is out of range."))]), FakeClient("b"))
    with pytest.raises(PayloadInvalid):
        await in_time(session_at(seats).verify(TokenPrefix(PROMPT), DRAFT))


@pytest.mark.parametrize("error", [None, DeadlineExceeded("Too late.")])
async def test_a_late_verdict_moves_the_session_and_its_replica_is_known_for_it(error: PacelineError | None) -> None:
    """Whether the time ran out here or the replica says so. A verdict clears the replica that gave it."""
    answer = fails_with(error) if error is not None else stays_silent
    seats = FakeSeats(FakeClient("a", [answer]), FakeClient("b"))
    await in_time(session_at(seats, verify_deadline_s=0.02).verify(TokenPrefix(PROMPT), DRAFT))
    assert [note for note in seats.notes if note[1] in ("late", "verdict")] == [("a", "late"), ("b", "verdict")]
    assert seats.moves == ["late"]


async def test_a_replica_that_was_late_is_not_asked_twice_for_one_verdict() -> None:
    """It would take as long again: the answer fails."""
    seats = FakeSeats(FakeClient("a", [stays_silent] * 2), FakeClient("a", [stays_silent]))
    with pytest.raises(TargetUnavailable, match="no verdict"):
        await in_time(session_at(seats, verify_deadline_s=0.02).verify(TokenPrefix(PROMPT), DRAFT))


async def test_nothing_is_begun_behind_the_callers_deadline() -> None:
    """Its time is used up, wherever the verdict would come from."""
    late = DeadlineExceeded("Too late.")
    seats = FakeSeats(FakeClient("a", [fails_with(late)]), FakeClient("b"))
    with pytest.raises(DeadlineExceeded):
        await in_time(session_at(seats, deadline_s=time.monotonic()).verify(TokenPrefix(PROMPT), DRAFT))


async def test_a_draining_replica_is_left_behind_the_verdict_in_flight() -> None:
    """The verdict counts; then the place is given back at once, not when the next round begins."""

    def drains_first(client: FakeClient, command: target_pb.TargetCommand) -> None:
        assert client.session is not None
        client.session.on_draining()
        judges(client, command)

    first, second = FakeClient("a", [drains_first]), FakeClient("b")
    seats = FakeSeats(first, second)
    session, prefix = session_at(seats), TokenPrefix(PROMPT)
    assert (await in_time(session.verify(prefix, DRAFT))).rows == (Row(7),)
    assert first.kinds == [("open", 1), ("verify", 1), ("close", 1)]
    assert seats.held == 0
    prefix.extend([7])
    await in_time(session.verify(prefix, DRAFT))
    assert second.kinds == [("open", 2), ("verify", 2)]
    assert seats.moves == ["draining"]


async def test_a_session_between_two_rounds_leaves_a_draining_or_lost_replica_at_once() -> None:
    """Nothing is awaited; the next round opens elsewhere."""
    for end in ("on_draining", "lose"):
        first = FakeClient("a")
        seats = FakeSeats(first, FakeClient("b"))
        session, prefix = session_at(seats), TokenPrefix(PROMPT)
        await in_time(session.verify(prefix, DRAFT))
        if end == "lose":
            first.lose()
        else:
            session.on_draining()
        assert seats.held == 0
        prefix.extend([7])
        await in_time(session.verify(prefix, DRAFT))
        session.close()
        assert seats.held == 0


async def test_a_new_session_is_refused_at_once_where_all_is_full() -> None:
    """One in its middle waits, and goes on where there is room."""
    full = fails_with(QueueFull("No room."))
    seats = FakeSeats(FakeClient("a", [full]), FakeClient("b"))
    seats.has_room = False
    with pytest.raises(QueueFull):
        await in_time(session_at(seats).verify(TokenPrefix(PROMPT), DRAFT))
    assert seats.held == 0
    assert seats.notes == [("a", "QueueFull")]
    seats = FakeSeats(FakeClient("a", [judges, full]), FakeClient("b", [full]), FakeClient("c"))
    seats.has_room = False
    session, prefix = session_at(seats, timeout_s=5), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, Draft()))
    prefix.extend([7])
    await in_time(session.verify(prefix, DRAFT))
    assert [note for note in seats.notes if note[1] == "QueueFull"] == [("a", "QueueFull"), ("b", "QueueFull")]


async def test_a_session_in_its_middle_does_not_wait_for_room_for_ever() -> None:
    """However often it is refused, the waits add up to the limit."""
    full = fails_with(QueueFull("No room."))
    seats = FakeSeats(FakeClient("a", [judges, full]), *(FakeClient(str(number), [full]) for number in range(100)))
    seats.has_room = False
    session, prefix = session_at(seats, timeout_s=0.1), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, Draft()))
    prefix.extend([7])
    with pytest.raises(TargetUnavailable, match="again"):
        await in_time(session.verify(prefix, DRAFT))
    assert seats.held == 0


async def test_migrations_in_a_row_are_bounded_and_a_verdict_starts_the_count_again() -> None:
    """Two allowed: of two replicas lost for one verdict the session makes nothing, three are too many."""
    lost_in_a_row = [FakeClient(name, [is_lost]) for name in "abde"]
    lost_in_a_row.insert(2, FakeClient("c", [judges, is_lost]))
    session, prefix = session_at(FakeSeats(*lost_in_a_row, FakeClient("f")), max_migrations=2), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, DRAFT))
    prefix.extend([7])
    with pytest.raises(TargetUnavailable, match="3 targets in a row"):
        await in_time(session.verify(prefix, DRAFT))
    apart = [FakeClient("a", [is_lost]), FakeClient("b", [judges, is_lost]), FakeClient("c", [is_lost])]
    session, prefix = session_at(FakeSeats(*apart, FakeClient("d")), max_migrations=2), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, DRAFT))
    prefix.extend([7])
    await in_time(session.verify(prefix, DRAFT))


async def test_waiting_for_a_seat_ends_with_a_typed_error_or_the_caller() -> None:
    """No place is left behind either way."""
    seats = FakeSeats()
    with pytest.raises(TargetUnavailable, match="again"):
        await in_time(session_at(seats).verify(TokenPrefix(PROMPT), DRAFT))
    waiting = asyncio.ensure_future(session_at(seats, timeout_s=60).verify(TokenPrefix(PROMPT), DRAFT))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert seats.held == 0


@pytest.mark.parametrize(("is_connected", "error"), [(True, QueueFull), (False, TargetUnavailable)])
async def test_a_new_session_that_waited_in_vain_is_told_whether_all_is_full_or_gone(
    is_connected: bool, error: type[PacelineError]
) -> None:
    """A control plane may have it wait for a place; whoever asks then has to know what to do about it."""
    seats = FakeSeats()
    seats.is_connected, seats.has_room = is_connected, False
    with pytest.raises(error, match="again"):
        await in_time(session_at(seats).verify(TokenPrefix(PROMPT), DRAFT))


async def test_a_replica_that_cannot_be_connected_is_passed_over() -> None:
    """A lease may name one that the orchestrator has no stream to yet."""
    seats = FakeSeats(FakeClient("a", can_connect=False), FakeClient("b"))
    await in_time(session_at(seats).verify(TokenPrefix(PROMPT), DRAFT))
    assert [lease.releases for lease in seats.leases] == [1, 0]
    assert seats.moves == []


# ---- asked ahead ----------------------------------------------------------------------------------------------------


async def asked_ahead(*answers: Answer, others: Sequence[FakeClient] = (), **limits: Any) -> Ahead:
    """A session that has its first verdict, and asks for the next one ahead of time; that is answered as told."""
    client = FakeClient("a", [judges, *answers])
    seats = FakeSeats(client, *others)
    session, prefix = session_at(seats, **limits), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, Draft()))
    prefix.extend([7])
    session.ask(prefix, DRAFT)
    assert client.kinds == [("open", 1), ("verify", 1), ("verify", 1)]
    return Ahead(client, seats, session, prefix)


@dataclass
class Ahead:
    client: FakeClient
    seats: FakeSeats
    session: RemoteTarget
    prefix: TokenPrefix


async def test_a_draft_asked_ahead_is_judged_once_and_its_verdict_keeps_its_moment() -> None:
    """Whenever somebody comes for it: the time in between is not the target's."""
    before_s = time.perf_counter()
    ahead = await asked_ahead()
    asked_s = time.perf_counter()
    await asyncio.sleep(0)  # the verdict comes
    arrived_s = time.perf_counter()
    judged = await ahead.session.verify(ahead.prefix, DRAFT)
    assert judged.rows.base_length == 5
    assert before_s < judged.asked_s <= asked_s <= judged.arrived_s <= arrived_s
    assert len(ahead.client.sent) == 3
    assert list(ahead.client.sent[2].verify.committed_ids) == [7]
    ahead.prefix.extend([7])
    await in_time(ahead.session.verify(ahead.prefix, Draft()))
    assert list(ahead.client.sent[3].verify.committed_ids) == [7]


async def test_a_verdict_asked_ahead_may_come_while_it_is_waited_for() -> None:
    ahead = await asked_ahead()
    assert (await in_time(ahead.session.verify(ahead.prefix, DRAFT))).rows == (Row(7),)
    assert len(ahead.client.sent) == 3


MOVING = [is_lost, fails_with(Draining("About to stop.")), fails_with(QueueFull("No room.")), stays_silent]


@pytest.mark.parametrize("answer", MOVING)
@pytest.mark.parametrize("comes_first", [False, True])
async def test_what_was_asked_ahead_in_vain_is_asked_at_another_replica(answer: Answer, comes_first: bool) -> None:
    """The same draft, from all committed tokens, under a higher epoch, whether the trouble came before somebody waited for
    the verdict or while he did. When it was asked is told as it was there."""
    other = FakeClient("b")
    ahead = await asked_ahead(answer, others=[other], verify_deadline_s=0.05, timeout_s=1.0)
    if comes_first:
        await asyncio.sleep(0.1)
    waited_s = time.perf_counter()
    judged = await ahead.session.verify(ahead.prefix, DRAFT)
    assert judged.rows.base_length == 5
    assert judged.asked_s >= waited_s
    assert other.kinds == [("open", 2), ("verify", 2)]
    assert list(other.sent[0].open.committed_ids) == [*PROMPT, 7]
    assert list(other.sent[1].verify.draft_ids) == [5, 6]
    assert len(ahead.seats.moves) == ahead.seats.held == 1


async def test_a_session_that_was_lost_under_what_was_asked_ahead_is_opened_again() -> None:
    """At the same seat, as for any other draft."""
    ahead = await asked_ahead(fails_with(SessionNotFound("Open it again.")))
    await asyncio.sleep(0)
    await in_time(ahead.session.verify(ahead.prefix, DRAFT))
    assert ahead.client.kinds[3:] == [("open", 2), ("verify", 2)]


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_draining_replica_does_not_wait_until_somebody_comes_for_what_was_asked_ahead(
    is_answered: bool,
) -> None:
    """The place is given back with the verdict, or at once where that is here; and the verdict counts."""
    ahead = await asked_ahead(others=[FakeClient("b")])
    if is_answered:
        await asyncio.sleep(0)
    ahead.session.on_draining()
    assert ahead.seats.held == (0 if is_answered else 1)
    await asyncio.sleep(0)
    assert ahead.seats.held == 0
    assert ahead.client.kinds[3:] == [("close", 1)]
    assert (await in_time(ahead.session.verify(ahead.prefix, DRAFT))).base_length == 5
    assert ahead.seats.moves == []
    ahead.prefix.extend([7])
    await in_time(ahead.session.verify(ahead.prefix, DRAFT))
    assert ahead.seats.moves == ["draining"]


@pytest.mark.parametrize("answer", [judges, stays_silent, is_lost, fails_with(SessionNotFound("Open it again."))])
async def test_nobody_has_to_come_for_what_was_asked_ahead(answer: Answer) -> None:
    """The client may leave: the place is given back, and neither a verdict nor an error that is still to come troubles
    anybody."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    ahead = await asked_ahead(answer)
    await asyncio.sleep(0)
    ahead.session.close()
    assert ahead.seats.held == 0
    verdict = verdict_event(ahead.client.sent[2])
    ahead.session.on_event(verdict)
    del ahead
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


async def test_what_cannot_be_sent_ahead_is_sent_when_it_is_waited_for() -> None:
    """Without a seat, at a seat that was lost, and where the replica does not read; none of it is an error."""
    client, prefix = FakeClient("a"), TokenPrefix(PROMPT)
    session = session_at(FakeSeats(client, FakeClient("b")))
    session.ask(prefix, DRAFT)
    assert client.sent == []
    await in_time(session.verify(prefix, DRAFT))
    client.lose()
    session.ask(prefix, DRAFT)
    assert client.kinds == [("open", 1), ("verify", 1), ("close", 1)]
    await in_time(session.verify(prefix, DRAFT))

    def reads_not(client: FakeClient, command: target_pb.TargetCommand) -> None:
        raise QueueFull("The peer does not read its stream.")

    client = FakeClient("a", [judges, reads_not])
    session = session_at(FakeSeats(client))
    await in_time(session.verify(prefix, DRAFT))
    prefix.extend([7])
    session.ask(prefix, DRAFT)
    await in_time(session.verify(prefix, DRAFT))
    assert list(client.sent[-1].verify.committed_ids) == [7]


async def test_each_draft_has_the_whole_time_to_be_judged() -> None:
    """One timer serves them all: it runs from the first, and the second is late by its own time."""
    seats = FakeSeats(FakeClient("a", [judges, stays_silent]), FakeClient("b"))
    session, prefix = session_at(seats, verify_deadline_s=0.2), TokenPrefix(PROMPT)
    await in_time(session.verify(prefix, Draft()))
    await asyncio.sleep(0.15)
    asked_s = time.perf_counter()
    await in_time(session.verify(prefix, DRAFT))
    assert time.perf_counter() - asked_s >= 0.2
    assert seats.moves == ["late"]
