"""When to try the other way: to speculate where it is off, or to decode plainly where it is on. Pure.

What a trial costs is found out by it. Every step of the deployment earns a small share of a step, every trial spends
what it lost against going on as before, and none begins while more is spent than earned. So in the long run all trials
together cost at most that share, whatever they cost each: over n steps they lose at most `share * n`, what was saved
before, and one trial.
"""

from __future__ import annotations

_SHARE = 0.005  # of all steps
_MOST_SAVED = 8.0  # steps: a long quiet time does not buy a storm of trials


class ProbeBudget:
    """Steps of the target that trials may cost. Shared by all sessions of a deployment."""

    def __init__(self) -> None:
        self._balance = 0.0

    @property
    def allows_probe(self) -> bool:
        return self._balance >= 0.0

    def earn(self, *, sessions: float) -> None:
        """One session's round has ended: its part of a step."""
        self._balance = min(_MOST_SAVED, self._balance + _SHARE / max(1.0, sessions))

    def spend(self, steps: float) -> None:
        """A round of a trial lost so many steps; less than none is a gain, which pays back."""
        self._balance -= steps


class ProbeClock:
    """How often one kind of trial is made, by the steps that have passed; shared by all sessions that it concerns.

    The interval doubles with each trial that changes nothing.
    """

    def __init__(self, *, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, longest
        self._interval = shortest
        self._passed = 0.0

    @property
    def is_due(self) -> bool:
        return self._passed >= self._interval

    def tick(self, *, sessions: float) -> None:
        """One session's round has ended: its part of a step."""
        self._passed += 1.0 / max(1.0, sessions)

    def begin(self) -> None:
        """A trial begins; unless it is found useful, the next one is twice as far away."""
        self._passed = 0.0
        self._interval = min(self._longest, 2.0 * self._interval)

    def hasten(self) -> None:
        """Something has changed: look again soon."""
        self._interval = self._shortest
