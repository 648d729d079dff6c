"""Which drafts enter the next model step, and the commands and events of the target's model thread.

A step takes every session that has a draft to be judged: the rows of all of them go through one forward pass, and what is
left of the token budget is used for prompts. Sessions that are about to come back are waited for where that pays
(`gathering`). Knows nothing of protobuf or streams; a peer is a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

import structlog
from torch import Tensor

from paceline.engine.interface import CacheT, Model
from paceline.engine.pulse import can_step
from paceline.engine.step_plan import Part, StepPlanner, StepReport, Wish
from paceline.errors import DeadlineExceeded, PacelineError, QueueFull, internal_error
from paceline.sessions import Address, Close, Event, Held, Open, PeerGone, SessionTable
from paceline.types import SpeculationStats, VerdictRows
from target_service.gathering import Gathering
from target_service.verifier import DraftToJudge, TargetSession, Verifier

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judge one draft of a session."""

    address: Address
    draft: DraftToJudge
    arrived_s: float  # time.monotonic()
    deadline_s: float | None  # time.monotonic(); work that is late takes part in no further step


Command = Open | Judge | Close | PeerGone

MAX_QUEUED = 16_384  # drafts that wait to be judged
TargetEvent = Event[VerdictRows]


@dataclass(slots=True, eq=False)
class _Job(Generic[CacheT]):
    """A draft that waits; once it has begun, with its session and what is to be fed for it."""

    command: Judge
    begun: _Begun[CacheT] | None = None


@dataclass(slots=True)
class _Begun(Generic[CacheT]):
    held: Held[TargetSession[CacheT]]
    wish: Wish[CacheT]
    started_s: float | None = None  # of the first step that it took part in
    step_time_s: float = 0.0  # of all of them


class Scheduler(Generic[CacheT]):
    """The worker of the target's model thread.

    Invariant: drafts are begun in the order of their arrival, and of a session's drafts only the first has begun.
    `on_step` hears of each step, on the model thread.
    """

    def __init__(
        self,
        model: Model[CacheT],
        sessions: SessionTable[TargetSession[CacheT]],
        *,
        max_batch_tokens: int,
        on_step: Callable[[StepReport], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._sessions, self._on_step, self._clock = model, sessions, on_step, clock
        self._verifier = Verifier(model, clock=clock)
        self._planner = StepPlanner(
            model, holders=lambda: (held.state for held in sessions), max_batch_tokens=max_batch_tokens
        )
        self._gathering = Gathering()
        self._jobs: list[_Job[CacheT]] = []
        self._waits_for_room = False

    @property
    def outcomes(self) -> SpeculationStats:
        """The drafts of all sessions of which it is known what was kept."""
        return self._verifier.outcomes

    @property
    def preemptions(self) -> int:
        return self._planner.preemptions

    def accept(self, command: Command) -> Sequence[TargetEvent]:
        self._waits_for_room = False
        try:
            match command:
                case PeerGone():
                    self._release(self._sessions.pop_of_peer(command.peer))
                case Open():
                    return self._open(command)
                case Judge():
                    self._enqueue(command)
                case Close():
                    self._close(command.address)
        except PacelineError as error:
            assert not isinstance(command, PeerGone)
            return [Event(command.address, error)]
        return []

    def has_work(self) -> bool:
        return bool(self._jobs) and not self._waits_for_room

    def patience_s(self) -> float:
        """How long the next step should wait for more drafts, in seconds; 0: begin it now."""
        return self._gathering.wait_s(len(self._jobs), now_s=self._clock())

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def step(self) -> Sequence[TargetEvent]:
        events, preemptions = self._begin_jobs(), self._planner.preemptions
        begun = {job.begun.held.state.opened: job for job in self._jobs if job.begun is not None}
        parts = self._planner.plan([job.begun.wish for job in begun.values() if job.begun is not None])
        # Room can come free without any command to tell of it: housekeeping asks again.
        self._waits_for_room = bool(self._jobs) and not parts
        if parts:
            events += self._run({part.wish.feeder.opened: part for part in parts}, begun)
        # A session without a draft may have given up its memory; else only those with one have changed.
        changed = self._sessions if self._planner.preemptions > preemptions else _held_by(begun.values())
        for held in changed:
            self._sessions.recount(held)
        return events

    def expire_idle(self) -> Sequence[TargetEvent]:
        self._waits_for_room = False
        for held in self._sessions.pop_idle():
            self._let_go(held)
            logger.info("an idle session was closed", session_id=held.address.session_id)
        return []

    def _begin_jobs(self) -> list[TargetEvent]:
        """Begin each session's first draft, and drop those that have become pointless."""
        events: list[TargetEvent] = []
        jobs, self._jobs = self._jobs, []
        busy: set[str] = set()
        for job in jobs:
            address = job.command.address
            try:
                if address.session_id in busy or self._is_alive(job):
                    self._jobs.append(job)
                    busy.add(address.session_id)
            except PacelineError as error:
                events.append(Event(address, error))
        return events

    def _is_alive(self, job: _Job[CacheT]) -> bool:
        """Whether the draft is still wanted; begins it if need be. Raises `DeadlineExceeded` once nobody waits for it."""
        address, deadline_s = job.command.address, job.command.deadline_s
        if deadline_s is not None and self._clock() > deadline_s:
            raise DeadlineExceeded("The caller's time was used up before the draft could be judged.")
        if job.begun is None:
            job.begun = self._begin(job.command)
            return job.begun is not None
        return self._sessions.use(address) is job.begun.held

    def _begin(self, command: Judge) -> _Begun[CacheT] | None:
        held = self._sessions.use(command.address)
        if held is None:
            return None
        if held.state.is_stale(command.draft.base_length):
            self._sessions.count_stale()
            return None
        return _Begun(held, self._verifier.begin(held.state, command.draft))

    def _run(self, parts: dict[int, Part[CacheT]], begun: dict[int, _Job[CacheT]]) -> list[TargetEvent]:
        started_s = self._clock()
        try:
            rows = self._model.step([part.extension() for part in parts.values()])
        except Exception:
            if len(parts) == 1:
                if not can_step(self._model):
                    raise  # the device is lost: whoever starts this replica again, the sessions go on elsewhere
                return self._fail(next(iter(begun[key] for key in parts)))
            # A fault of the model's or ours, met over one session's work: it must not take the others with it.
            logger.exception("a step of many sessions failed; they are taken one by one", sessions=len(parts))
            return [event for key, part in parts.items() for event in self._run({key: part}, begun)]
        tokens = sum(part.count for part in parts.values())
        report = StepReport(len(parts), tokens, self._clock() - started_s)
        self._on_step(report)
        self._planner.share_prefixes(parts.values())
        events: list[TargetEvent] = []
        for (key, part), logits in zip(parts.items(), rows, strict=True):
            events += self._after_step(begun[key], part, logits, report, started_s=started_s)
        self._note_step(report, events)
        return events

    def _note_step(self, report: StepReport, events: Sequence[TargetEvent]) -> None:
        busy = {job.command.address.session_id for job in self._jobs}
        served = {event.address.session_id for event in events if isinstance(event.outcome, VerdictRows)} - busy
        self._gathering.on_step(served, tokens=report.tokens, seconds=report.seconds, now_s=self._clock())

    def _after_step(
        self, job: _Job[CacheT], part: Part[CacheT], logits: Tensor, report: StepReport, *, started_s: float
    ) -> Sequence[TargetEvent]:
        begun, command = job.begun, job.command
        assert begun is not None
        begun.step_time_s += report.seconds
        if begun.started_s is None:
            begun.started_s = started_s
        if part.wish.remaining > 0:
            return []
        self._jobs.remove(job)
        try:
            rows = self._verifier.judge(begun.held.state, command.draft, logits)
        except PacelineError as error:
            return [Event(command.address, error)]
        except Exception:
            logger.exception("a draft could not be judged", session_id=command.address.session_id)
            self._close(command.address)
            return [Event(command.address, internal_error())]
        verdict = VerdictRows(
            base_length=command.draft.base_length,
            rows=rows,
            step_time_s=begun.step_time_s,
            queue_time_s=max(0.0, begun.started_s - command.arrived_s),
            step_sessions=report.sessions,
            step_tokens=report.tokens,
        )
        return [Event(command.address, verdict)]

    def _fail(self, job: _Job[CacheT]) -> list[TargetEvent]:
        address = job.command.address
        logger.exception("a verify step failed", session_id=address.session_id)
        self._jobs.remove(job)
        self._close(address)
        return [Event(address, internal_error())]

    def _enqueue(self, command: Judge) -> None:
        if len(self._jobs) >= MAX_QUEUED:
            raise QueueFull("Too many drafts wait to be judged here; try again in a moment.")
        self._jobs.append(_Job(command))
        self._gathering.on_draft(command.address.session_id, arrived_s=command.arrived_s)

    def _open(self, command: Open) -> Sequence[TargetEvent]:
        _, events = self._sessions.open(
            command.address,
            lambda previous: self._verifier.open(
                command.spec, command.committed_ids, previous.state if previous else None
            ),
        )
        return events

    def _close(self, address: Address) -> None:
        held = self._sessions.close(address)
        if held is not None:
            self._let_go(held)

    def _release(self, orphans: Sequence[Held[TargetSession[CacheT]]]) -> None:
        for held in orphans:
            self._let_go(held)

    def _let_go(self, held: Held[TargetSession[CacheT]]) -> None:
        self._verifier.close(held.state)
        self._gathering.forget(held.address.session_id)


def _held_by(jobs: Iterable[_Job[CacheT]]) -> list[Held[TargetSession[CacheT]]]:
    """The sessions of drafts that have begun."""
    return [job.begun.held for job in jobs if job.begun is not None]
