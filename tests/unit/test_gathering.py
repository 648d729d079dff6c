"""Waiting for sessions that are about to come back: only where more of them are served, and never for one alone.

Steps and turnarounds are simulated on a clock that passes when told to; every draw is seeded, so nothing here is left to
chance.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from target_service.gathering import Gathering, StepCost, worth_waiting_s

Turnaround = Callable[[random.Random, int], float]
"""From a session's number to the seconds between its verdict and its next draft."""

SIMULATED_S = 6.0


@dataclass(frozen=True)
class Served:
    """What a simulated target did."""

    rounds: int
    steps: int
    waited_s: float


def simulate(
    sessions: int, turnaround: Turnaround, *, fixed_s: float, per_session_s: float = 0.0, is_patient: bool = True
) -> Served:
    """Sessions that come back and back to one target, begun at different times."""
    drawn = random.Random(sessions)
    gathering = Gathering()
    arrivals = [(drawn.uniform(0.0, 0.2), number) for number in range(sessions)]
    heapq.heapify(arrivals)
    ready: list[int] = []
    now_s = waited_s = 0.0
    rounds = steps = 0
    while now_s < SIMULATED_S:
        while arrivals and arrivals[0][0] <= now_s:
            arrived_s, number = heapq.heappop(arrivals)
            gathering.on_draft(str(number), arrived_s=arrived_s)
            ready.append(number)
        if not ready:
            now_s = arrivals[0][0]
            continue
        wait_s = gathering.wait_s(len(ready), now_s=now_s) if is_patient else 0.0
        if wait_s > 0.0:
            until_s = min(now_s + wait_s, arrivals[0][0]) if arrivals else now_s + wait_s
            waited_s += until_s - now_s
            now_s = until_s
            continue
        seconds = fixed_s + per_session_s * len(ready)
        now_s += seconds
        gathering.on_step({str(number) for number in ready}, tokens=len(ready), seconds=seconds, now_s=now_s)
        for number in ready:
            heapq.heappush(arrivals, (now_s + turnaround(drawn, number), number))
        rounds, steps, ready = rounds + len(ready), steps + 1, []
    return Served(rounds, steps, waited_s)


def prompt_return(drawn: random.Random, number: int) -> float:
    return drawn.uniform(0.001, 0.003)


@pytest.mark.parametrize("sessions", [2, 8, 32])
def test_sessions_that_come_back_at_once_share_their_steps(sessions: int) -> None:
    """They would take turns for ever otherwise, and two thirds of that be served, or less."""
    ideal = SIMULATED_S * sessions / (0.030 + 0.003)
    assert simulate(sessions, prompt_return, fixed_s=0.030).rounds > 0.95 * ideal
    assert simulate(sessions, prompt_return, fixed_s=0.030, is_patient=False).rounds < 0.70 * ideal


def test_one_session_never_waits() -> None:
    """There is nobody to wait for, however long it stays away."""
    served = simulate(1, lambda drawn, _: drawn.uniform(0.001, 0.1), fixed_s=0.030)
    assert served.waited_s == 0.0


def test_groups_that_take_turns_are_left_alone_where_steps_grow_with_sessions() -> None:
    """A step costs nothing but its sessions: to idle for others would lose their time."""
    served = simulate(16, prompt_return, fixed_s=0.0001, per_session_s=0.002)
    assert served.waited_s < 0.005 * SIMULATED_S


def test_sessions_that_stay_away_longer_than_a_step_are_not_waited_for() -> None:
    """Two groups of them keep the target busy as it is."""
    served = simulate(8, lambda drawn, _: drawn.uniform(0.040, 0.080), fixed_s=0.030)
    assert served.waited_s < 0.10 * SIMULATED_S


def turnarounds() -> Iterator[tuple[str, Turnaround]]:
    yield "prompt", prompt_return
    yield "spread", lambda drawn, _: drawn.uniform(0.0, 0.060)
    yield "long", lambda drawn, _: drawn.uniform(0.055, 0.065)
    yield "two kinds of round", lambda drawn, _: 0.002 if drawn.random() < 0.7 else 0.040
    yield "a slow client", lambda drawn, number: 0.002 if number else 0.5
    yield "half of the clients slow", lambda drawn, number: drawn.uniform(0.001, 0.004) if number % 2 else 0.2
    yield "heavy tail", lambda drawn, _: 0.001 * drawn.paretovariate(1.0)


@pytest.mark.parametrize("name", [name for name, _ in turnarounds()])
@pytest.mark.parametrize("per_session_s", [0.0, 0.0005, 0.004])
def test_patience_never_serves_fewer(name: str, per_session_s: float) -> None:
    """Whatever the turnarounds and the steps: within three in a hundred of a target that never waits, or above it."""
    turnaround = dict(turnarounds())[name]
    for sessions in (2, 8, 24):
        patient = simulate(sessions, turnaround, fixed_s=0.020, per_session_s=per_session_s)
        impatient = simulate(sessions, turnaround, fixed_s=0.020, per_session_s=per_session_s, is_patient=False)
        assert patient.rounds > 0.97 * impatient.rounds, (sessions, patient, impatient)


# ---- one decision ---------------------------------------------------------------------------------------------------


def test_a_wait_pays_while_the_missing_ones_outweigh_the_idle_time() -> None:
    """One step of 30 ms, sessions that all come back after 4 ms: `w (2 n + m) < c m` says when."""
    back_s = [0.004] * 10
    assert worth_waiting_s(1, {0.0: 1}, back_s, 0.030) == pytest.approx(0.004)
    assert worth_waiting_s(3, {0.0: 1}, back_s, 0.030) == pytest.approx(0.004)  # 28 < 30
    assert worth_waiting_s(4, {0.0: 1}, back_s, 0.030) == 0.0  # 36 > 30
    assert worth_waiting_s(8, {0.0: 3}, back_s, 0.030) == pytest.approx(0.004)  # 76 < 90
    assert worth_waiting_s(1, {0.0: 1}, back_s, 0.004) == 0.0
    assert worth_waiting_s(1, {0.003: 1}, back_s, 0.004) == pytest.approx(0.001)


def test_only_those_are_waited_for_that_will_come_in_time() -> None:
    """Half come back at once and half much later: a wait for all of them does not pay, one for the half does."""
    back_s = [0.002] * 5 + [0.025] * 5
    assert worth_waiting_s(1, {0.0: 4}, back_s, 0.030) == pytest.approx(0.002)
    assert worth_waiting_s(1, {0.010: 4}, back_s, 0.030) == pytest.approx(0.015)
    assert worth_waiting_s(4, {0.010: 4}, back_s, 0.030) == 0.0
    assert worth_waiting_s(1, {0.026: 4}, back_s, 0.030) == 0.0


# ---- what a step costs ----------------------------------------------------------------------------------------------


def test_the_fixed_part_of_a_step_is_what_does_not_grow() -> None:
    """Found to a tenth from steps of very different sizes, and all of it where every step is alike."""
    drawn = random.Random(1)
    cost, alike = StepCost(), StepCost()
    assert cost.fixed_s == 0.0
    for _ in range(200):
        tokens = drawn.randrange(1, 64)
        cost.observe(tokens, 0.020 + 0.0005 * tokens + drawn.gauss(0.0, 0.001))
        alike.observe(16, 0.028 + drawn.gauss(0.0, 0.001))
    assert cost.fixed_s == pytest.approx(0.020, rel=0.1)
    assert alike.fixed_s == pytest.approx(0.028, rel=0.05)


def test_steps_that_cost_less_the_more_they_hold_are_taken_for_noise() -> None:
    """The fixed part is never more than a step."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(1, 0.040)
        cost.observe(40, 0.020)
    assert 0.020 < cost.fixed_s < 0.040


# ---- who is waited for ----------------------------------------------------------------------------------------------


def experienced(turnaround_s: float = 0.002) -> Gathering:
    """Ten steps of 30 ms for two sessions that came back after `turnaround_s`; the next step would be at 10.0."""
    gathering = Gathering()
    for step in range(10):
        for session in "ab":
            gathering.on_draft(session, arrived_s=step + turnaround_s - 1)
        gathering.on_step({"a", "b"}, tokens=2, seconds=0.030, now_s=float(step))
    return gathering


def test_a_session_that_was_just_served_is_waited_for_until_it_comes() -> None:
    """As long as it used to stay away."""
    gathering = experienced()
    gathering.on_draft("a", arrived_s=9.001)
    assert gathering.wait_s(1, now_s=9.001) == pytest.approx(0.001)
    gathering.on_draft("b", arrived_s=9.0015)
    assert gathering.wait_s(2, now_s=9.0015) == 0.0


def test_a_session_that_has_ended_is_not_waited_for() -> None:
    """Nor one that has been away for longer than it used to."""
    gathering = experienced()
    gathering.on_draft("a", arrived_s=9.001)
    assert gathering.wait_s(1, now_s=9.003) == 0.0
    assert gathering.wait_s(1, now_s=9.001) > 0.0
    gathering.forget("b")
    gathering.forget("never seen")
    assert gathering.wait_s(1, now_s=9.001) == 0.0


def test_nobody_is_waited_for_before_something_is_known() -> None:
    """The first rounds of a target are begun at once."""
    gathering = Gathering()
    gathering.on_step({"a", "b"}, tokens=2, seconds=0.030, now_s=0.0)
    gathering.on_draft("a", arrived_s=0.001)
    assert gathering.wait_s(1, now_s=0.001) == 0.0


def test_a_step_is_never_put_off_for_longer_than_half_of_its_fixed_part() -> None:
    """However many are missing, and however often the question is asked."""
    gathering = experienced(turnaround_s=0.020)
    gathering.on_step({str(number) for number in range(50)}, tokens=50, seconds=0.030, now_s=10.0)
    gathering.on_draft("0", arrived_s=10.001)
    assert gathering.wait_s(1, now_s=10.001) == pytest.approx(0.015, rel=0.01)
    assert gathering.wait_s(1, now_s=10.011) == pytest.approx(0.005, rel=0.05)
    assert gathering.wait_s(1, now_s=10.017) == 0.0
