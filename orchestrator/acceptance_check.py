"""Whether a drafter is as good as its training recorded, and whether it drafts at all, by the counts of answers. Pure.

A drafter that is loaded in another quantisation, under another chat template or beside another target than it was
trained for does not fail: it is accepted less, and nobody hears of it. What is compared is the `a` of design section 6,
accepted / (accepted + rounds ended by a rejection), with what the drafter's own evaluation recorded at that
temperature. Knows nothing of who drafted, of logs or of metrics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.types import SamplingParams

FLOOR_SHARE = 0.6
"""Warned is of a drafter whose acceptance is proven to lie below this share of the recorded one.

Workloads differ, and so do the rules (`coupled` costs up to a tenth): a healthy drafter stays well above it.
"""

ERROR_ODDS = 1e-6
"""Of one comparison that proves what is not so. A window makes at most eight: fewer than 1e-5 wrong ones a window."""

FIRST_ANSWERS = 16
"""Fewer answers prove nothing: the tokens of one answer are alike, and one odd prompt must not speak for a drafter."""

FIRST_TOKENS, LAST_TOKENS = 128, 16_384
"""Judged tokens at the first comparison of a window, and at its end; it compares again at every doubling."""

UNUSED_AFTER = 64
"""Answers in a row without a single draft of the drafter's, behind which it counts as unused."""

Record = Sequence[tuple[float, float]]
"""What a drafter's evaluation recorded: (temperature, acceptance) each."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a drafter should reach at one temperature."""

    band: float  # the nearest temperature of the record, the lower one at equal distance
    acceptance: float  # 0 to 1


def expected_at(record: Record, temperature: float) -> Expectation | None:
    """Interpolated between the two recorded temperatures around it; None outside their range, where nothing is known."""
    known = sorted(record)
    index = bisect_left(known, temperature, key=lambda entry: entry[0])
    if index == len(known):
        return None
    above, acceptance_above = known[index]
    if above == temperature:
        return Expectation(above, acceptance_above)
    if index == 0:
        return None
    below, acceptance_below = known[index - 1]
    share = (temperature - below) / (above - below)
    band = below if share <= 0.5 else above
    return Expectation(band, acceptance_below + share * (acceptance_above - acceptance_below))


def is_comparable(sampling: SamplingParams) -> bool:
    """Whether nothing but the temperature shapes the target's distribution, as in the recorded evaluation."""
    return sampling == SamplingParams(temperature=sampling.temperature, stop_token_ids=sampling.stop_token_ids)


def proves_below(accepted: int, judged: int, floor: float, *, error_odds: float = ERROR_ODDS) -> bool:
    """Whether the upper confidence bound of the acceptance lies below `floor`, 0 to 1.

    Chernoff's bound in the form of Garivier and Cappé 2011 (KL-UCB): the odds of so few accepted of `judged` tokens are
    at most exp(-judged KL(accepted / judged, floor)) if each is accepted with probability `floor` or more, whatever
    came before it: the tokens of a round may depend on one another.
    """
    return accepted < floor * judged and _surprise(accepted, judged, floor) >= -math.log(error_odds)


def proves_above(accepted: int, judged: int, floor: float, *, error_odds: float = ERROR_ODDS) -> bool:
    """Whether the lower confidence bound of the acceptance lies above `floor`, likewise."""
    return accepted > floor * judged and _surprise(accepted, judged, floor) >= -math.log(error_odds)


def _surprise(accepted: int, judged: int, acceptance: float) -> float:
    """`judged` times the Kullback-Leibler divergence of two coins: the share accepted, and `acceptance`."""
    rejected = judged - accepted
    return _surprise_of(accepted, judged * acceptance) + _surprise_of(rejected, judged * (1.0 - acceptance))


def _surprise_of(count: int, expected: float) -> float:
    if count == 0:
        return 0.0
    return count * math.log(count / expected) if expected > 0.0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One comparison of a drafter's acceptance with its record."""

    measured: float  # acceptance, 0 to 1
    expected: float  # the mean over the judged tokens
    judged_tokens: int
    answers: int
    is_below: bool  # the standing behind it: that of before, unless this comparison proves the other one


class AcceptanceWindow:
    """The standing of one drafter at one band of temperatures.

    Answers are gathered until they prove that the drafter is below the floor, or above it, or there are `LAST_TOKENS`;
    then a new window begins. So old rounds never hide what a drafter has become, and between the two proofs the
    standing stays. Invariant: no window is left in which something is proven.
    """

    def __init__(self) -> None:
        self._is_below = False
        self._begin()

    def _begin(self) -> None:
        self._answers = self._accepted = self._judged = 0
        self._expected = 0.0  # tokens accepted, were the drafter as recorded
        self._next_at = FIRST_TOKENS

    def add(self, *, accepted: int, rejections: int, expected: float) -> Comparison | None:
        """Take in one answer: draft tokens accepted, rounds ended by a rejection, and the acceptance to be expected.

        None where it is too early to compare (again).
        """
        judged = accepted + rejections
        if judged == 0:
            return None
        self._answers += 1
        self._accepted += accepted
        self._judged += judged
        self._expected += expected * judged
        if self._answers < FIRST_ANSWERS or self._judged < self._next_at:
            return None
        return self._compare()

    def _compare(self) -> Comparison:
        expected = self._expected / self._judged
        floor = FLOOR_SHARE * expected
        is_decided = True
        if proves_below(self._accepted, self._judged, floor):
            self._is_below = True
        elif proves_above(self._accepted, self._judged, floor):
            self._is_below = False
        else:
            is_decided = False
        comparison = Comparison(
            measured=self._accepted / self._judged,
            expected=expected,
            judged_tokens=self._judged,
            answers=self._answers,
            is_below=self._is_below,
        )
        if is_decided or self._judged >= LAST_TOKENS:
            self._begin()
        else:
            self._next_at = 2 * self._judged
        return comparison


class UsageCount:
    """Answers in a row that a drafter was there for and drafted nothing of."""

    def __init__(self) -> None:
        self.answers_without = 0

    def add(self, *, has_drafted: bool) -> None:
        self.answers_without = 0 if has_drafted else self.answers_without + 1

    @property
    def is_unused(self) -> bool:
        return self.answers_without >= UNUSED_AFTER
