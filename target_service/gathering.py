"""How long the next step is worth delaying for sessions that were served lately and are about to come back.

The sessions of a step come back within milliseconds of one another: verdicts out, drafts in. Were the first one to begin
a step by itself, the others would wait for it, and then it for them: two groups take turns, and every step costs its
fixed part for half of the sessions.

Let `n` sessions be ready and `m` more come back within `w` seconds, in steps of `c + d * tokens` seconds. Without waiting the
late ones miss every second step, so `n + m / 2` sessions are served in the time of one step; with waiting all are, in `w`
more. A session's own `d * tokens` is spent in whichever step it takes part, so only the fixed part counts: waiting serves
more sessions a second where

    w * (2 * n + m) < c * m,

that is, hardly ever where few are missing or where steps grow with what they hold, so that groups which take turns
there are left alone; and never where nobody is missing. How many come back by when is taken from the turnarounds seen
last, so sessions that often stay away (their drafts are late, their clients slow) are not waited for.

Knows nothing of drafts, models or threads; times are seconds on one clock that never runs backwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

_REMEMBERED_TURNAROUNDS = 128
_FEWEST_TURNAROUNDS = 8  # of which something can be said
_DECILES = 10
_SHORTEST_WAIT_S = 50e-6  # a thread takes as long to wake up
_LONGEST_WAIT_SHARE = 0.5  # of a step's fixed part, from the first draft that was ready: what a wrong guess may cost
_STEP_MEMORY = 0.95  # weight of a step against the next one
_LEAST_SPREAD = 0.1  # of steps' tokens, relative to their mean: with less, no growth can be told from noise


def worth_waiting_s(ready: int, away_s: Mapping[float, int], turnarounds_s: Sequence[float], fixed_s: float) -> float:
    """How long to wait for sessions that are away, in seconds; 0 where that serves no more sessions a second.

    `away_s` counts them by how long they have been away, `turnarounds_s` is an ascending sample of how long sessions stay
    away, `fixed_s` the fixed part of a step.
    """
    best_s, best_gain = 0.0, 0.0
    for wait_s in {turnaround_s - gone_s for gone_s in away_s for turnaround_s in turnarounds_s}:
        if not _SHORTEST_WAIT_S <= wait_s < fixed_s:
            continue
        back = sum(count * _share_back(gone_s, wait_s, turnarounds_s) for gone_s, count in away_s.items())
        gain = fixed_s * back - wait_s * (2 * ready + back)
        if gain > best_gain:
            best_s, best_gain = wait_s, gain
    return best_s


def _share_back(gone_s: float, wait_s: float, turnarounds_s: Sequence[float]) -> float:
    """The probability that a session which is away so long is back after the wait."""
    longer = len(turnarounds_s) - bisect_right(turnarounds_s, gone_s)
    # A rounding error must not leave out the very turnaround that the wait was made for.
    still_away = len(turnarounds_s) - bisect_right(turnarounds_s, gone_s + wait_s + 1e-9)
    return (longer - still_away) / longer if longer else 0.0


class StepCost:
    """The fixed part of a step's time, by a least-squares line through the steps seen, the last ones weighing most.

    Where steps are much alike, growth cannot be told from noise, and nearly all of their time counts as fixed.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0  # the latter two: weighted means
        self._variance = self._covariance = 0.0  # likewise

    def observe(self, tokens: int, seconds: float) -> None:
        self._weight = _STEP_MEMORY * self._weight + 1.0
        share = 1.0 / self._weight
        tokens_off, seconds_off = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * tokens_off
        self._seconds += share * seconds_off
        self._variance += share * (tokens_off * (tokens - self._tokens) - self._variance)
        self._covariance += share * (tokens_off * (seconds - self._seconds) - self._covariance)

    @property
    def fixed_s(self) -> float:
        """0 before the first step."""
        spread = self._variance + (_LEAST_SPREAD * self._tokens) ** 2
        per_token_s = max(0.0, self._covariance / spread) if spread else 0.0
        return max(0.0, self._seconds - per_token_s * self._tokens)


class Gathering:
    """Who was served and has not come back, and whether the next step should wait for them.

    Invariant: `_away` counts, by the time of their step, the sessions in `_served_s` that may still be waited for.
    """

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}  # by session: when its last verdict left
        self._away: Counter[float] = Counter()
        self._recent_s: deque[float] = deque(maxlen=_REMEMBERED_TURNAROUNDS)
        self._turnarounds_s: tuple[float, ...] = ()  # deciles of the recent ones
        self._cost = StepCost()
        self._since_s: float | None = None  # when the first draft of the next step was ready

    def on_step(self, session_ids: Collection[str], *, tokens: int, seconds: float, now_s: float) -> None:
        """A step has ended; the sessions given got verdicts, and none of them has another draft here."""
        self._cost.observe(tokens, seconds)
        self._since_s = None
        self._turnarounds_s = _deciles(self._recent_s)
        # Behind the ninth decile hardly anybody comes back soon, and few groups keep `wait_s` cheap.
        longest_s = self._turnarounds_s[-2] if self._turnarounds_s else 0.0
        self._away = Counter({at_s: count for at_s, count in self._away.items() if now_s - at_s <= longest_s})
        for session_id in session_ids:
            self.forget(session_id)
            self._served_s[session_id] = now_s
        if session_ids:
            self._away[now_s] += len(session_ids)

    def on_draft(self, session_id: str, *, arrived_s: float) -> None:
        """A session has come back, or come for the first time."""
        served_s = self._served_s.get(session_id)
        if served_s is not None:
            self._recent_s.append(max(0.0, arrived_s - served_s))
        self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """The session has ended, or need not be waited for."""
        served_s = self._served_s.pop(session_id, None)
        if served_s is not None and served_s in self._away:
            self._away[served_s] -= 1
            if self._away[served_s] == 0:
                del self._away[served_s]

    def wait_s(self, ready: int, *, now_s: float) -> float:
        """How long the next step should wait, with so many sessions ready; 0: begin now."""
        if not self._away or not self._turnarounds_s or ready == 0:
            return 0.0
        if self._since_s is None:
            self._since_s = now_s
        fixed_s = self._cost.fixed_s
        limit_s = self._since_s + _LONGEST_WAIT_SHARE * fixed_s - now_s
        if limit_s < _SHORTEST_WAIT_S:
            return 0.0
        away_s = {now_s - at_s: count for at_s, count in self._away.items()}
        return min(limit_s, worth_waiting_s(ready, away_s, self._turnarounds_s, fixed_s))


def _deciles(sample: Collection[float]) -> tuple[float, ...]:
    """Ascending, from the first to the longest; empty while the sample says little."""
    if len(sample) < _FEWEST_TURNAROUNDS:
        return ()
    ordered = sorted(sample)
    return tuple(ordered[-(-len(ordered) * tenth // _DECILES) - 1] for tenth in range(1, _DECILES + 1))
