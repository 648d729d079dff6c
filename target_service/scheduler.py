"""Which work enters the next model step, and the commands and events of the target's model thread.

Drafts are judged in the order of their arrival, one session a step, until the engine takes many at once.
Knows nothing of protobuf or streams; a peer is a number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import structlog

from paceline.errors import DeadlineExceeded, PacelineError, QueueFull, internal_error
from paceline.sessions import Address, Close, Event, Open, PeerGone, SessionTable
from paceline.types import VerdictRows
from target_service.verifier import CacheT, DraftToJudge, TargetSession, Verifier

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judge one draft of a session."""

    address: Address
    draft: DraftToJudge
    arrived_s: float  # time.monotonic()
    deadline_s: float | None  # time.monotonic(); work that is late already is not begun


Command = Open | Judge | Close | PeerGone

MAX_QUEUED = 16_384  # drafts that wait to be judged
TargetEvent = Event[VerdictRows]


class Scheduler(Generic[CacheT]):
    """The worker of the target's model thread. Invariant: drafts are judged in the order of their arrival."""

    def __init__(
        self,
        verifier: Verifier[CacheT],
        sessions: SessionTable[TargetSession[CacheT]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verifier, self._sessions, self._clock = verifier, sessions, clock
        self._queue: deque[Judge] = deque()

    def accept(self, command: Command) -> Sequence[TargetEvent]:
        if isinstance(command, PeerGone):
            self._sessions.pop_of_peer(command.peer)
            return []
        try:
            match command:
                case Open():
                    return self._open(command)
                case Judge():
                    self._enqueue(command)
                case Close():
                    self._sessions.close(command.address)
        except PacelineError as error:
            return [Event(command.address, error)]
        return []

    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def step(self) -> Sequence[TargetEvent]:
        job = self._queue.popleft()
        try:
            return self._judge(job)
        except PacelineError as error:
            return [Event(job.address, error)]
        except Exception:
            # A fault of ours or the model's, met in one session's step: it must not take the others with it.
            logger.exception("a verify step failed", session_id=job.address.session_id)
            self._sessions.close(job.address)
            return [Event(job.address, internal_error())]

    def expire_idle(self) -> Sequence[TargetEvent]:
        for held in self._sessions.pop_idle():
            logger.info("an idle session was closed", session_id=held.address.session_id)
        return []

    def _judge(self, job: Judge) -> Sequence[TargetEvent]:
        started_s = self._clock()
        if job.deadline_s is not None and started_s > job.deadline_s:
            raise DeadlineExceeded("The caller's time was used up before the draft could be judged.")
        held = self._sessions.use(job.address)
        if held is None:
            return []
        if held.state.is_stale(job.draft.base_length):
            self._sessions.count_stale()
            return []
        try:
            verdict = self._verifier.judge(held.state, job.draft)
        finally:
            self._sessions.recount(held)
        return [Event(job.address, replace(verdict, queue_time_s=max(0.0, started_s - job.arrived_s)))]

    def _enqueue(self, command: Judge) -> None:
        if len(self._queue) >= MAX_QUEUED:
            raise QueueFull("Too many drafts wait to be judged here; try again in a moment.")
        self._queue.append(command)

    def _open(self, command: Open) -> Sequence[TargetEvent]:
        _, events = self._sessions.open(
            command.address,
            lambda previous: self._verifier.open(
                command.spec, command.committed_ids, previous.state if previous else None
            ),
        )
        return events
