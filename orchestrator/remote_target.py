"""One session at the pool of targets: it verifies at a seat, and when that is lost goes on at another.

A target's session is a cache of the committed tokens. So a lost, draining, full or hanging target costs a pause: the
session opens at another replica from the committed tokens, and the round in flight is verified there, with the same
draft and the same noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from orchestrator.board import Replica
from orchestrator.loop import TimedRows
from orchestrator.pool import Seat
from orchestrator.replica_client import PeerSession, TargetClient
from paceline.errors import (
    DeadlineExceeded,
    Draining,
    LengthMismatch,
    PacelineError,
    QueueFull,
    SessionNotFound,
    TargetUnavailable,
)
from paceline.prefix import TokenPrefix
from paceline.types import Draft, SessionSpec
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.wire import failure_from_proto, open_to_proto, verdict_from_proto

logger = structlog.get_logger(__name__)

MAX_REOPENINGS = 3  # at one replica, for one verdict
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0  # between two replicas that have no room

MOVES: dict[type[PacelineError], str] = {
    TargetUnavailable: "lost",
    Draining: "draining",
    QueueFull: "full",
    DeadlineExceeded: "late",
}
"""What makes a session go on elsewhere, with the word for it in metrics and logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverLimits:
    """How long a session tries to get one verdict."""

    timeout_s: float  # without a seat, added up
    max_migrations: int  # replicas lost one after another


class TargetSeats(Protocol):
    """Where seats come from (`target_pool.TargetPool`)."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def has_room(self) -> bool: ...

    async def seat(self, session_id: str, session: PeerSession, *, tokens: int) -> Seat[TargetClient]: ...

    def note_refusal(self, replica: Replica, refusal: PacelineError) -> None: ...

    def note_late(self, replica: Replica) -> None: ...

    def note_verdict(self, replica: Replica) -> None: ...

    def count_move(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Trouble:
    """What has gone wrong since the last verdict."""

    reopenings: int = 0
    migrations: int = 0
    refusals: int = 0
    seatless_s: float = 0.0
    late_replica_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Question:
    """A draft that a replica has been asked about."""

    seat: Seat[TargetClient]
    draft: Draft
    base_length: int
    asked_s: float
    answer: asyncio.Future[TimedRows]


class RemoteTarget:
    """One session at the targets (`loop.Target`).

    Invariant: at most one seat, and at most one draft being judged there; the epoch rises with every opening, whichever
    the replica, so that what an earlier one still sends is never taken for an answer.
    """

    def __init__(
        self,
        seats: TargetSeats,
        spec: SessionSpec,
        limits: FailoverLimits,
        *,
        verify_deadline_s: float,
        deadline_s: float | None,
    ) -> None:
        self._seats, self._spec, self._limits = seats, spec, limits
        self._verify_deadline_s, self._deadline_s = verify_deadline_s, deadline_s
        self._epoch = 0
        self._seat: Seat[TargetClient] | None = None
        self._is_open = False  # at the seat
        self._is_leaving = False  # as soon as the verdict in flight is here
        self._left_because = ""
        self._sent_length = 0  # committed tokens that the replica has been told
        self._has_verdict = False
        self._question: _Question | None = None  # until `verify` has had its answer
        self._timer: asyncio.TimerHandle | None = None  # for the question that is open, or was when it was set

    def ask(self, prefix: TokenPrefix, draft: Draft) -> None:
        """Send the draft at once where the session is held; `verify` then awaits that verdict, and asks elsewhere if there
        is none."""
        if self._seat is not None and self._is_open:
            with contextlib.suppress(QueueFull):
                self._ask(self._seat, prefix, draft)

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        """Ask for a verdict, at another replica if this one is lost; opens the session first where it is not held.

        Raises `TargetUnavailable` if no replica gives one within the limits, and `QueueFull` if the session has no
        verdict yet and every replica is full.
        """
        trouble = _Trouble()
        question = self._question
        assert question is None or question.draft is draft, "what was asked ahead is what is verified next"
        while True:
            seat = question.seat if question is not None else await self._take_seat(prefix, trouble)
            try:
                question = question or self._ask(seat, prefix, draft)
                return await question.answer
            except (SessionNotFound, LengthMismatch) as error:
                self._open_again(error, trouble)
            except tuple(MOVES) as error:
                await self._move(seat, error, trouble)
            finally:
                question = self._question = None

    def close(self) -> None:
        """End the session where it is open, and give the seat back."""
        self._leave("")
        self._question = None  # nobody will come for the answer
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what the replica says

    def on_event(self, event: target_pb.TargetEvent) -> None:
        question = self._question
        if event.epoch != self._epoch or question is None or question.answer.done():
            self._count_stale()
        elif event.WhichOneof("event") == "failed":
            self._fail(question, failure_from_proto(event.failed))
        elif event.verdict.base_length != question.base_length:
            self._count_stale()
        else:
            self._answer(question, event.verdict)

    def on_lost(self, reason: str) -> None:
        self._leave(MOVES[TargetUnavailable])
        if self._question is not None and not self._question.answer.done():
            self._fail(self._question, TargetUnavailable(f"The target is gone ({reason}); ask again in a moment."))

    def on_draining(self) -> None:
        """Leave now, or behind the verdict in flight: a client that reads slowly must not hold the replica up."""
        if self._question is None or self._question.answer.done():
            self._leave(MOVES[Draining])
        else:
            self._is_leaving = True

    # ---- seats

    async def _take_seat(self, prefix: TokenPrefix, trouble: _Trouble) -> Seat[TargetClient]:
        """The seat, or a new one; raises `TargetUnavailable` or `QueueFull` if there is none in time."""
        if self._seat is not None:
            return self._seat
        started_s = time.monotonic()
        remaining_s = self._limits.timeout_s - trouble.seatless_s
        try:
            if remaining_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(remaining_s):
                seat = await self._connected_seat(prefix)
        except TimeoutError:
            raise self._seatless_error() from None
        finally:
            trouble.seatless_s += time.monotonic() - started_s
        if seat.replica.replica_id in trouble.late_replica_ids:
            raise TargetUnavailable(
                f"The target gave no verdict within {self._verify_deadline_s:g} s, and there is no other; "
                "ask again in a moment."
            )
        if self._left_because:
            self._seats.count_move(self._left_because)
            logger.info("session moved", session_id=self._spec.session_id, why=self._left_because)
            self._left_because = ""
        return seat

    def _seatless_error(self) -> PacelineError:
        limit = f"within {self._limits.timeout_s:g} s; ask again in a moment."
        if not self._has_verdict and self._seats.is_connected and not self._seats.has_room:
            return QueueFull(f"Every target is full, and none had room {limit}")
        return TargetUnavailable(f"No target was there to go on with the answer {limit}")

    async def _connected_seat(self, prefix: TokenPrefix) -> Seat[TargetClient]:
        while True:
            try:
                seat = self._seat = await self._seats.seat(self._spec.session_id, self, tokens=len(prefix))
            except QueueFull:
                if not self._has_verdict:
                    raise
                await asyncio.sleep(_LONGEST_PAUSE_S)
                continue
            if await seat.client.settle() and self._seat is seat:
                return seat
            self._leave("")

    async def _move(self, seat: Seat[TargetClient], error: PacelineError, trouble: _Trouble) -> None:
        """Give the seat back and see whether another is worth asking for; raises if not."""
        self._leave(MOVES[type(error)])
        self._seats.note_refusal(seat.replica, error)
        if isinstance(error, QueueFull):
            await self._wait_for_room(error, trouble)
            return
        if isinstance(error, DeadlineExceeded):
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                raise error
            self._seats.note_late(seat.replica)
            trouble.late_replica_ids.add(seat.replica.replica_id)
        trouble.migrations += 1
        if trouble.migrations > self._limits.max_migrations:
            raise TargetUnavailable(
                f"{trouble.migrations} targets in a row were lost before they gave a verdict; ask again in a moment."
            ) from error

    async def _wait_for_room(self, error: QueueFull, trouble: _Trouble) -> None:
        """A new session is refused at once where all is full; one in mid-answer waits for a while."""
        if not self._has_verdict and not self._seats.has_room:
            raise error
        pause_s = min(_FIRST_PAUSE_S * 2**trouble.refusals, _LONGEST_PAUSE_S)
        trouble.refusals += 1
        trouble.seatless_s += pause_s
        await asyncio.sleep(pause_s)

    def _leave(self, reason: str) -> None:
        if self._seat is None:
            return
        seat, self._seat = self._seat, None
        if self._is_open:
            self._left_because = reason
            with contextlib.suppress(QueueFull):  # a replica that does not read lets the session idle out
                seat.client.send(self._command(close=session_pb.CloseSession()))
        self._is_open = self._is_leaving = False
        seat.release()

    # ---- one draft

    def _ask(self, seat: Seat[TargetClient], prefix: TokenPrefix, draft: Draft) -> _Question:
        """Send the draft, behind an opening where that is needed. Raises `QueueFull`, and nothing has been asked."""
        if not self._is_open:
            self._open(seat, prefix)
        loop = asyncio.get_running_loop()
        self._question = question = _Question(seat, draft, len(prefix), time.perf_counter(), loop.create_future())
        try:
            seat.client.send(
                self._command(
                    # A mapping, not a message: that would be made first and then copied.
                    verify={
                        "base_length": len(prefix),
                        "committed_ids": prefix.ids[self._sent_length :],
                        "draft_ids": draft.ids,
                        "draft_distributions": draft.distributions,
                        "budget_ms": self._budget_ms(),
                    }
                )
            )
        except QueueFull:
            self._question = None
            raise
        self._sent_length = len(prefix)
        if self._timer is None:
            self._timer = loop.call_later(self._verify_deadline_s, self._on_time)
        return question

    def _on_time(self) -> None:
        """The time of some draft is used up: of the one that is being judged, or of one before it. Setting a timer for each
        would be among the dearest things of a round."""
        self._timer = None
        question = self._question
        if question is None or question.answer.done():
            return
        left_s = question.asked_s + self._verify_deadline_s - time.perf_counter()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._on_time)
        else:
            limit = f"within {self._verify_deadline_s:g} s"
            self._fail(question, DeadlineExceeded(f"The target gave no verdict {limit}."))

    def _answer(self, question: _Question, message: target_pb.VerdictRows) -> None:
        arrived_s = time.perf_counter()
        try:
            rows = verdict_from_proto(message, vocab_size=self._spec.vocab_size)
        except PacelineError as error:
            self._fail(question, error)
            return
        question.answer.set_result(TimedRows(rows, question.asked_s, arrived_s))
        self._has_verdict = True
        self._seats.note_verdict(question.seat.replica)
        self._leave_if_due()

    def _fail(self, question: _Question, error: PacelineError) -> None:
        question.answer.set_exception(error)
        # Whoever asked ahead may never come for it, and asyncio would say so in the log.
        question.answer.exception()
        self._leave_if_due()

    def _leave_if_due(self) -> None:
        if self._is_leaving:
            self._leave(MOVES[Draining])

    def _budget_ms(self) -> int:
        budget_s = self._verify_deadline_s
        if self._deadline_s is not None:
            budget_s = min(budget_s, self._deadline_s - time.monotonic())
        return max(1, int(budget_s * 1000))

    def _open(self, seat: Seat[TargetClient], prefix: TokenPrefix) -> None:
        self._epoch += 1
        seat.client.send(self._command(open=open_to_proto(self._spec, prefix.ids)))
        self._is_open = True
        self._sent_length = len(prefix)

    def _open_again(self, error: PacelineError, trouble: _Trouble) -> None:
        """The replica has lost the session, or part of it: open it there once more."""
        self._is_open = False
        trouble.reopenings += 1
        if trouble.reopenings >= MAX_REOPENINGS:
            raise TargetUnavailable("The target lost the session again and again; ask once more.") from error
        logger.warning("session opened again at the target", session_id=self._spec.session_id, why=error.message)

    def _count_stale(self) -> None:
        if self._seat is not None:
            self._seat.client.stale_items += 1

    def _command(self, **command: Any) -> target_pb.TargetCommand:
        return target_pb.TargetCommand(session_id=self._spec.session_id, epoch=self._epoch, **command)
