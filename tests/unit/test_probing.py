"""When to try the other way."""

from __future__ import annotations

import pytest

from orchestrator.probing import ProbeBudget, ProbeClock


@pytest.mark.parametrize("lost_steps", [0.1, 2.0, 8.0])
def test_trials_cost_at_most_their_share_whatever_each_costs(lost_steps: float) -> None:
    """Over 20,000 steps, with a trial whenever one is allowed: half a percent, and one trial."""
    budget, spent, steps = ProbeBudget(), 0.0, 20_000
    for _ in range(steps):
        budget.earn(sessions=1.0)
        if budget.allows_probe:
            budget.spend(lost_steps)
            spent += lost_steps
    assert spent <= 0.005 * steps + lost_steps


def test_a_quiet_time_buys_no_storm_of_trials() -> None:
    """What is saved is bounded."""
    budget = ProbeBudget()
    for _ in range(100_000):
        budget.earn(sessions=1.0)
    trials = 0
    while budget.allows_probe:
        budget.spend(2.0)
        trials += 1
    assert trials <= 5


def test_trials_get_rarer_until_something_changes() -> None:
    """The interval doubles from trial to trial, up to the longest one."""
    clock = ProbeClock(shortest=4, longest=16)
    intervals = []
    for _ in range(4):
        steps = 0
        while not clock.is_due:
            clock.tick(sessions=1.0)
            steps += 1
        intervals.append(steps)
        clock.begin()
    assert intervals == [4, 8, 16, 16]
    clock.hasten()
    for _ in range(4):
        clock.tick(sessions=1.0)
    assert clock.is_due


def test_many_sessions_share_one_clock() -> None:
    """32 sessions reach the next trial after as many steps as one: each of their rounds is a part of a step."""
    clock = ProbeClock(shortest=10, longest=10)
    for _ in range(32 * 10 - 1):
        clock.tick(sessions=32.0)
    assert not clock.is_due
    clock.tick(sessions=32.0)
    assert clock.is_due
