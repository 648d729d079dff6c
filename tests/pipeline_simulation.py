"""A simulated target, drafter and orchestrator: discrete events, no models. Every figure of it is simulated.

Times are in seconds of simulated time. The target takes all waiting sessions into one step, and so does the drafter. A
drafted token is right with probability `acceptance`, and behind a wrong one a branch fits with probability `branch_hit`,
if branches were ordered and the drafter has come that far.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from orchestrator.controller import SessionController
from orchestrator.loop import DraftOrder, RoundOutcome, RoundPlan, RoundPlanner
from paceline.types import DraftOrigin

ENDLESS = 1_000_000  # tokens that may still come


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What everything takes, in seconds."""

    step_s: float = 0.03  # of the target with one token
    session_s: float = 0.0  # more for each session in the step
    token_s: float = 0.0002  # more for each token in the step
    draft_step_s: float = 0.0015
    line_s: float = 0.00002  # more for each line in the drafter's step
    delay_s: float = 0.0  # one way, orchestrator to drafter
    overhead_s: float = 0.0003  # of a round, beside the step
    contention: float = 0.0  # share by which a step takes longer while the drafter works
    branch_hit: float = 0.6
    acceptance: Callable[[float], float] = field(default=lambda now_s: 0.7)  # of the time


class Simulation:
    """Sessions that never end, each with its own planner."""

    def __init__(self, hardware: Hardware, planners: list[RoundPlanner], *, seed: int = 1) -> None:
        self.hardware, self.random, self.now_s = hardware, Random(seed), 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.target, self.drafter = _Target(self), _Drafter(self)
        self.sessions = [_Session(self, planner) for planner in planners]
        for session in self.sessions:
            session.begin_round()

    def at(self, delay_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, do))

    def run(self, until_s: float) -> float:
        """Go on until that time; the tokens per second, of all sessions, since the last call."""
        began_s, tokens = self.now_s, sum(session.length for session in self.sessions)
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        self.now_s = until_s
        return (sum(session.length for session in self.sessions) - tokens) / (until_s - began_s)


class _Target:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[tuple[_Session, int, float]] = []
        self._is_busy = False

    def verify(self, session: _Session, draft_length: int) -> None:
        self._waiting.append((session, draft_length, self._simulation.now_s))
        # All that arrive at the same moment share a step.
        self._simulation.at(0.0, self._step)

    def _step(self) -> None:
        if self._is_busy or not self._waiting:
            return
        batch, self._waiting, self._is_busy = self._waiting, [], True
        hardware, began_s = self._simulation.hardware, self._simulation.now_s
        tokens = sum(draft_length + 1 for _, draft_length, _ in batch)
        step_s = hardware.step_s + hardware.session_s * (len(batch) - 1) + hardware.token_s * (tokens - 1)
        step_s *= 1.0 + hardware.contention * self._simulation.drafter.is_busy

        def end() -> None:
            self._is_busy = False
            for session, draft_length, arrived_s in batch:
                session.on_verdict(draft_length, step_s, began_s - arrived_s, len(batch), tokens)
            self._simulation.at(hardware.overhead_s, self._step)

        self._simulation.at(step_s, end)


class _Drafter:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.is_busy = False
        self.drafting: dict[_Session, _Seat] = {}

    def commit(self, session: _Session, length: int, trunk: int, ahead: int, order: DraftOrder) -> None:
        """`ahead`: tokens of a new trunk that were drafted already, as a branch."""
        seat = self.drafting.setdefault(session, _Seat())
        if seat.trunk != trunk:
            seat.trunk, seat.drafted = trunk, length + ahead
        seat.drafted = max(seat.drafted, length)
        seat.limit, seat.lines = length + order.credit, 1 + order.branches
        self._step()

    def _step(self) -> None:
        batch = [(session, seat) for session, seat in self.drafting.items() if seat.drafted < seat.limit]
        if self.is_busy or not batch:
            return
        self.is_busy = True
        hardware = self._simulation.hardware
        step_s = hardware.draft_step_s + hardware.line_s * (sum(seat.lines for _, seat in batch) - 1)
        trunks = [seat.trunk for _, seat in batch]

        def end() -> None:
            self.is_busy = False
            for (session, seat), trunk in zip(batch, trunks, strict=True):
                if seat.trunk == trunk:
                    seat.drafted += 1
                    session.send_draft(trunk, seat.drafted, seat.lines, step_s)
            self._step()

        self._simulation.at(step_s, end)


class _Seat:
    trunk = -1
    drafted = limit = 0  # lengths
    lines = 1


class _Session:
    """Lengths are absolute; a trunk is a run of drafted tokens that has not been refuted."""

    def __init__(self, simulation: Simulation, planner: RoundPlanner) -> None:
        self._simulation, self.planner = simulation, planner
        self.length = 0  # committed
        self._trunk = 0
        self._arrived = 0  # length that the drafted tokens reach to
        self._are_right: dict[int, bool] = {}  # of the trunk, by position
        self._ahead = 0
        self._order, self._plan = DraftOrder(), RoundPlan()
        self._began_s = self._left_s = 0.0
        self._missing_since: float | None = None
        self._waits_for: int | None = None
        self._round = self._available = 0
        self.draft_lengths: list[int] = []
        self.orders: list[DraftOrder] = []
        self.plans: list[RoundPlan] = []

    def begin_round(self) -> None:
        self._began_s = self._simulation.now_s
        self._order = order = self.planner.order(remaining=ENDLESS)
        self.orders.append(order)
        if order.is_due:
            length, trunk, ahead = self.length, self._trunk, self._ahead
            self._simulation.at(
                self._simulation.hardware.delay_s,
                lambda: self._simulation.drafter.commit(self, length, trunk, ahead, order),
            )
            is_missing = order.draft_length > 0 and self._arrived <= self.length
            self._missing_since = self._began_s if is_missing else None
        self._available = max(0, self._arrived - self.length)
        self._plan = self.planner.plan(available=self._available, remaining=ENDLESS)
        self.plans.append(self._plan)
        enough = min(self._plan.enough_length, self._plan.draft_length)
        if enough <= self._available:
            self._verify()
            return
        self._waits_for, number = self.length + enough, self._round

        def end_wait() -> None:
            if self._round == number and self._waits_for is not None:
                self._verify()

        self._simulation.at(self._plan.patience_s, end_wait)

    def send_draft(self, trunk: int, drafted: int, lines: int, step_s: float) -> None:
        def arrive() -> None:
            if isinstance(self.planner, SessionController):
                self.planner.on_draft(tokens=lines, steps=1, seconds=step_s)
            if trunk == self._trunk:
                self._arrive(drafted)

        self._simulation.at(self._simulation.hardware.delay_s, arrive)

    def _arrive(self, drafted: int) -> None:
        self._arrived = max(self._arrived, drafted)
        if self._missing_since is not None and self._arrived > self.length:
            if isinstance(self.planner, SessionController):
                self.planner.on_redraft(first_s=self._simulation.now_s - self._missing_since)
            self._missing_since = None
        if self._waits_for is not None and self._arrived >= self._waits_for:
            self._verify()

    def _verify(self) -> None:
        self._waits_for, self._left_s = None, self._simulation.now_s
        draft_length = min(self._plan.draft_length, max(0, self._arrived - self.length))
        self.draft_lengths.append(draft_length)
        self._simulation.target.verify(self, draft_length)

    def on_verdict(self, draft_length: int, step_s: float, queue_s: float, sessions: int, tokens: int) -> None:
        def arrive() -> None:
            self._end_round(draft_length, step_s, queue_s, sessions, tokens)

        self._simulation.at(self._simulation.hardware.overhead_s, arrive)

    def _end_round(self, draft_length: int, step_s: float, queue_s: float, sessions: int, tokens: int) -> None:
        kept = 0
        while kept < draft_length and self._is_right(self.length + kept):
            kept += 1
        self._commit(kept, draft_length)
        now_s = self._simulation.now_s
        origin = DraftOrigin.AHEAD if self._available else DraftOrigin.REDRAFT
        outcome = RoundOutcome(
            draft_length=draft_length,
            kept_length=kept,
            emitted=kept + 1,
            origin=origin if draft_length else DraftOrigin.NONE,
            waited_s=self._left_s - self._began_s,
            is_rejection=kept < draft_length,
            has_continuation=self._arrived > self.length,
            verify_s=now_s - self._left_s,
            step_s=step_s,
            queue_s=queue_s,
            step_sessions=sessions,
            step_tokens=tokens,
            round_s=now_s - self._began_s,
        )
        self._round += 1
        self.planner.record(outcome)
        self.begin_round()

    def _commit(self, kept: int, draft_length: int) -> None:
        """The kept tokens and one more; where the trunk said another, a branch takes its place or a new trunk begins."""
        position = self.length + kept
        is_trunk = kept == draft_length and self._is_right(position)
        reached = max(self._arrived - position - 1, 0)
        self.length = position + 1
        self._ahead = 0
        if is_trunk:
            return
        self._trunk += 1
        self._are_right.clear()
        if self._order.branches and self._simulation.random.random() < self._simulation.hardware.branch_hit:
            self._ahead = min(reached, self._order.draft_length)
        self._arrived = self.length + self._ahead

    def _is_right(self, position: int) -> bool:
        if position not in self._are_right:
            acceptance = self._simulation.hardware.acceptance(self._simulation.now_s)
            self._are_right[position] = self._simulation.random.random() < acceptance
        return self._are_right[position]
