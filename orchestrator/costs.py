"""What rounds and drafts cost, as measured. Pure.

All figures follow the last measurements, and none is moved far by a single one: prompts share a target's steps, and
every machine has its hiccups. Knows nothing of what is decided by them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_DRIFT = 1e-5  # of a coefficient's spread, at each measurement: a constant is followed within some 30 measurements
_DRAFT_DRIFT = 1e-4  # within some 10: a drafter's first steps say little of the following ones
_TRUSTED_AFTER = 8  # measurements, behind which one that is far off counts as a hiccup
FARTHEST = 2.0  # times what was expected: as more than that no measurement counts
_STEPS_AT_ONCE = 8  # of a drafter, whose mean is one measurement: they are many, and short
_STEPS_ALONE = 32  # of a target, each a measurement; then so many at once:
_STEPS_TOGETHER = 4
_HEAVIEST = 1e100  # the sums begin anew before they overflow: once in some 170,000 rounds
_HICCUP_FLOOR_S = 1e-3  # so much above what is usual is no hiccup, whatever the ratio


class Average:
    """The mean of the last `window` values, the older the less."""

    def __init__(self, *, window: int = 32, farthest: float = math.inf) -> None:
        """`farthest`: of a time, as how many times the mean a longer one counts."""
        self._window, self._farthest = window, farthest
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        if self.count >= _TRUSTED_AFTER:
            value = min(value, self._farthest * self.value + _HICCUP_FLOOR_S)
        self.count = min(self.count + 1, self._window)
        self.value += (value - self.value) / self.count


class LeastSquares:
    """`y = sum of coefficients * features`, all coefficients at least 0, as a Kalman filter of coefficients that drift.

    Of features that never change apart, the one with the largest `spread` explains what is seen. Where no measurement
    looks, a coefficient stays as it is, and is learned the more quickly once one does.
    """

    def __init__(self, spreads: Sequence[float], *, drift: float = _DRIFT) -> None:
        """`spreads`: how far each coefficient may be from 0 before anything is measured, against one another; `drift`:
        the share of that by which it may change between two measurements."""
        self.coefficients = [0.0] * len(spreads)
        self._spreads, self._drift = tuple(spreads), drift
        self._uncertainty = [
            [spread if row == column else 0.0 for column in range(len(spreads))] for row, spread in enumerate(spreads)
        ]
        self.count = 0

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, features))

    def add(self, features: Sequence[float], value: float) -> None:
        """One measurement. One that is far too long counts as less so, and a lasting change is followed by steps; a machine
        hiccups, but is never faster than it is."""
        expected = self.predict(features)
        if self.count >= _TRUSTED_AFTER and expected > 0.0:
            value = min(value, expected * FARTHEST)
        self.count += 1
        seen = [sum(map(float.__mul__, row, features)) for row in self._uncertainty]
        weight = 1.0 / (1.0 + sum(map(float.__mul__, seen, features)))
        step = (value - expected) * weight
        for index, (row, part, spread) in enumerate(zip(self._uncertainty, seen, self._spreads, strict=True)):
            self.coefficients[index] = max(0.0, self.coefficients[index] + step * part)
            share = weight * part
            row[:] = [entry - share * other for entry, other in zip(row, seen, strict=True)]
            row[index] = min(spread, row[index] + self._drift * spread)


class VerifyCosts:
    """Seconds of a target's step, by the sessions and tokens in it and by whether drafters work beside it.

    The last is what both cost each other where they share a machine; it is 0 where they do not.
    """

    def __init__(self) -> None:
        # What never changes counts as the constant, so that a token looks cheap until it is seen to be dear.
        self._steps = LeastSquares((100.0, 0.1, 0.1, 10.0))
        self._last: tuple[float, int] | None = None
        self._pending = [0.0] * 5  # steps, sessions, tokens, with drafters, seconds

    @property
    def count(self) -> int:
        return self._steps.count

    @property
    def token_s(self) -> float:
        """What one more token adds."""
        return self._steps.coefficients[2]

    @property
    def beside_s(self) -> float:
        """What a step takes longer while drafters work beside it."""
        return self._steps.coefficients[3]

    def record(self, step_s: float, *, sessions: int, tokens: int, is_drafting: bool) -> None:
        """One step. All sessions in it report the same; it counts once."""
        if (step_s, tokens) == self._last:
            return
        self._last = (step_s, tokens)
        # A mean of steps lies on the same plane as the steps, and the filter is the dearest part of a round.
        pending = self._pending
        pending[0] += 1.0
        pending[1] += sessions
        pending[2] += tokens
        pending[3] += is_drafting
        pending[4] += step_s
        steps = pending[0]
        if steps >= _STEPS_TOGETHER or self._steps.count < _STEPS_ALONE:
            self._steps.add((1.0, pending[1] / steps, pending[2] / steps, pending[3] / steps), pending[4] / steps)
            self._pending = [0.0] * 5

    def step_s(self, *, sessions: float, tokens: float, is_drafting: bool) -> float:
        return self._steps.predict((1.0, sessions, tokens, float(is_drafting)))


class DraftCosts:
    """Seconds of a drafter's step by the lines of a session in it, and how long drafts take that are made afresh."""

    def __init__(self) -> None:
        self._steps = LeastSquares((100.0, 0.1), drift=_DRAFT_DRIFT)
        self._redraft = Average(window=16, farthest=FARTHEST)
        self._tokens = self._pending = 0
        self._seconds = 0.0

    @property
    def is_known(self) -> bool:
        return self._steps.count > 0 or self._redraft.count > 0

    @property
    def redraft_s(self) -> float:
        """From a verdict behind which nothing was there to the first token: the round trip, a step, and queueing."""
        return self._redraft.value if self._redraft.count else self.step_s(1.0)

    def on_draft(self, *, tokens: int, steps: int, seconds: float) -> None:
        """So many tokens, branches included, took the drafter so many steps of that many seconds in all."""
        self._tokens += tokens
        self._pending += steps
        self._seconds += seconds
        if self._pending >= (_STEPS_AT_ONCE if self._steps.count >= _TRUSTED_AFTER else 1):
            self._steps.add((1.0, max(1.0, self._tokens / self._pending)), self._seconds / self._pending)
            self._tokens, self._pending, self._seconds = 0, 0, 0.0

    def on_redraft(self, *, first_s: float) -> None:
        """Nothing was there for the committed tokens; the first token came so long after the drafter was told of them."""
        self._redraft.add(first_s)

    def on_late_draft(self, *, waited_s: float) -> None:
        """Nothing came in that time: what is expected is at least that."""
        self._redraft.add(max(2.0 * waited_s, self.redraft_s))

    def step_s(self, lines: float) -> float:
        return self._steps.predict((1.0, lines))


@dataclass(slots=True)
class _Sums:
    """Over rounds of one kind, each with its weight."""

    rounds: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0  # of the tokens of each round
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float, weight: float) -> None:
        self.rounds += weight
        self.tokens += weight * tokens
        self.squares += weight * tokens * tokens
        self.seconds += weight * seconds

    @property
    def doubt(self) -> float:
        """The standard error of the mean tokens of a round, times the root of the number of rounds, over that mean."""
        mean = self.tokens / self.rounds
        return math.sqrt(max(0.0, self.squares / self.rounds - mean * mean)) / mean


class _Band:
    """Rounds at one load. Instead of old rounds counting less, each new one counts more."""

    def __init__(self) -> None:
        self.weight = 1.0  # of the last round
        self.plain = _Sums()
        self.drafted: dict[Hashable, _Sums] = {}  # by kind


class MeasuredRates:
    """Tokens per second of sessions of each kind that speculate, and of any that does not, as they turned out at each load.

    This counts what no prediction knows of. What is old fades: half of it in `half_life` rounds at that load.
    """

    def __init__(self, *, half_life: float = 512.0) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._bands: dict[int, _Band] = {}

    def record(self, *, sessions: float, kind: Hashable | None, tokens: int, seconds: float) -> None:
        """A round of a session that speculates, of that kind; None: of one that does not."""
        key = _band(sessions)
        band = self._bands.get(key)
        if band is None or band.weight > _HEAVIEST:
            band = self._bands[key] = _Band()
        band.weight *= self._growth
        sums = band.plain if kind is None else band.drafted.setdefault(kind, _Sums())
        sums.add(tokens, seconds, band.weight)

    def highest_gain(
        self, *, sessions: float, kind: Hashable, least_rounds: float = 48.0, least_plain: float = 3.0
    ) -> float | None:
        """How much faster speculation of that kind was at that load, at the upper end of what so few rounds leave open.

        None where too little is measured. A few rounds tell the speed of plain decoding: each brings one token.
        """
        band = self._bands.get(_band(sessions))
        if band is None or kind not in band.drafted:
            return None
        drafted, plain = band.drafted[kind], band.plain
        drafted_rounds, plain_rounds = drafted.rounds / band.weight, plain.rounds / band.weight
        if drafted_rounds < least_rounds or plain_rounds < least_plain or not drafted.seconds or not plain.seconds:
            return None
        gain = (drafted.tokens / drafted.seconds) / (plain.tokens / plain.seconds)
        return gain * (1.0 + drafted.doubt / math.sqrt(drafted_rounds) + plain.doubt / math.sqrt(plain_rounds))


def _band(sessions: float) -> int:
    """Loads that differ by less than a factor of two are alike."""
    return round(sessions).bit_length()
