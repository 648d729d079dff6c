"""How likely each token at a position is to be the right one, given that all before it are. Pure.

It decides where a session drafts: behind which of the other tokens, and how far. What was drafted is never judged by it.

Knows nothing of sessions, lines or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST_LIKELIHOOD = 0.01  # of the answer going there; below, nothing is drafted behind a guess

_FLOOR = 1e-6  # estimates are at least this: a method may be sure and wrong
_LOWEST, _HIGHEST = 0.1, 3.0  # exponents
_STEP, _LARGEST_STEP = 0.03, 0.1

_LOWEST_ACCEPTANCE, _HIGHEST_ACCEPTANCE = 0.05, 0.98
# Given a rejection: that the first guess is right, and how much less likely each further one is.
_FIRST_GUESS, _FALL = 0.4, 0.55


class Sharpness:
    """How far a method's estimates are to be trusted: likelihoods are the estimates to the power of `exponent`, scaled to
    add up to 1 with what they leave.

    A drafter that is surer of itself than its target bears out gets an exponent below 1. Each committed token is one
    step of gradient ascent on its log-likelihood (logistic regression with one weight, fed as it comes).
    """

    __slots__ = ("exponent",)

    def __init__(self) -> None:
        self.exponent = 1.0

    def likelihoods(
        self,
        estimates: Sequence[float],  # of each token named at the position; at most 1 in all
    ) -> list[float]:
        """One for each of them; what is left to 1 is any other token's."""
        weights = [max(estimate, _FLOOR) ** self.exponent for estimate in (*estimates, 1.0 - sum(estimates))]
        total = sum(weights)
        return [weight / total for weight in weights[:-1]]

    def observe(
        self,
        estimates: Sequence[float],
        place: int,  # of the right token among them; as many as there are: another one
    ) -> None:
        """Learn from the token that was committed."""
        logs = _logs(estimates)
        expected = sum(share * log for share, log in zip(self._shares(logs), logs, strict=True))
        step = _STEP * (logs[place] - expected)
        self.exponent += max(-_LARGEST_STEP, min(_LARGEST_STEP, step))
        self.exponent = max(_LOWEST, min(_HIGHEST, self.exponent))

    def _shares(self, logs: Sequence[float]) -> list[float]:
        weights = [math.exp(self.exponent * log) for log in logs]
        total = sum(weights)
        return [weight / total for weight in weights]


def _logs(estimates: Sequence[float]) -> list[float]:
    return [math.log(max(estimate, _FLOOR)) for estimate in (*estimates, 1.0 - sum(estimates))]


def static_likelihoods(
    acceptance: float,  # expected, per token
    guesses: int,
) -> list[float]:
    """Of the drafted token, then of each guess, whichever tokens they are: what `rejection` must go by (design 3.3).

    A position is as likely as any other to be rejected, and the further down a guess stands the less it is the one.
    """
    kept = max(_LOWEST_ACCEPTANCE, min(_HIGHEST_ACCEPTANCE, acceptance))
    return [kept, *((1.0 - kept) * _FIRST_GUESS * _FALL**rank for rank in range(guesses))]
