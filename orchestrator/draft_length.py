"""How long a draft pays, and how long to wait for one when none is there. Pure.

A session is seen as a Markov decision process over its rounds (Howard 1960): a round begins either *ahead*, with drafted
tokens there for what is committed, or behind a *miss*, when they must be drafted afresh. Maximised is the tokens per
second of the session, less what its drafted tokens take from the others. With one session, free tokens and without
misses this is the limit of design section 6, `max over g of E(a, g) / max(t_v(g + 1), g t_d)`, but for one more `t_d`
where the bonus token is emitted: the drafter must draft that position too.

Knows nothing of where the figures come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_S = 1e-6  # no round takes less
_LEAST_HIT = 0.01  # a miss is never for ever
_SETTLED = 5e-3  # share of the rate by which it still changes
_ITERATIONS = 6  # at most; two or three are usual
_UNTRIED = 2  # times the draft length: as many tokens as are verified where they are there anyway
_PATIENCE = 4  # longer drafts in a row that are worth less, behind which none is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """What the rounds of one session are expected to cost and to bring."""

    survival: Sequence[float]  # [any draft + 1]: probability that the first k drafted tokens are all accepted
    longest: int  # tokens of the longest draft that may be chosen; at least 1
    plain_s: float  # a round of a session that does not speculate at all
    verify_s: float  # a round without a draft of a session that does
    verify_token_s: float  # more for each drafted token
    draft_token_s: float  # from one drafted token to the next
    redraft_s: float  # from a verdict to the first token that was drafted behind it
    least_wait_s: float = 0.0  # a round that does not begin at once waits so long for the target, whom others keep busy
    token_price: float = 0.0  # tokens that the other sessions lose by each drafted token
    hit_after_full: float = 1.0  # probability that a round begins ahead, behind a draft that was kept whole
    hit_after_rejection: float = 0.0
    hit_after_plain: float = 0.0
    bonus_is_drafted: bool = False  # where the next draft is there, its first token stands in for the bonus


@dataclass(frozen=True, slots=True)
class Wait:
    """With how many drafted tokens a round begins, and how long that will take them to come."""

    enough_length: int  # 0: it begins at once
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best draft length, what it is worth, and what a round is worth with fewer tokens."""

    draft_length: int  # at least 1: what is best if there is to be a draft at all
    rate: float  # tokens per second with it, less what the other sessions lose
    plain_rate: float  # tokens per second without speculation
    round_s: float  # a round that begins ahead
    values: tuple[float, ...]  # by tokens verified: those gained by a round with so many, over the mean of its time
    draft_token_s: float
    redraft_s: float
    least_wait_s: float

    @property
    def gain(self) -> float:
        """How much faster than plain decoding."""
        return self.rate / self.plain_rate

    def wait(self, available: int) -> Wait:
        """What to wait for when `available` drafted tokens are there: the round's value less the time it costs."""
        # What is there already may be more than is worth being drafted for every round; but what many more tokens cost is
        # not known before some more were tried.
        free = min(available, _UNTRIED * self.draft_length, len(self.values) - 1)
        best = max(range(free + 1), key=self.values.__getitem__)
        best_value, best_wait_s = self.values[best], 0.0
        wait_s = self.redraft_s if free == 0 else self.draft_token_s
        for length in range(free + 1, self.draft_length + 1):
            value = self.values[length] - self.rate * max(wait_s, self.least_wait_s)
            if value > best_value:
                best, best_value, best_wait_s = length, value, wait_s
            wait_s += self.draft_token_s
        return Wait(best, best_wait_s)


def choose(costs: RoundCosts, *, guess: float = 0.0) -> Choice:
    """The draft length that maximises tokens per second, by policy iteration over (ahead, miss).

    It is found sooner from a good `guess` of the rate.
    """
    rounds = _Rounds(costs)
    plain_rate = 1.0 / max(costs.plain_s, _LEAST_S)
    rate = guess or plain_rate
    draft_length, loss = 1, 0.0
    for _ in range(_ITERATIONS):
        missed_length, loss = rounds.best_behind_a_miss(rate)
        draft_length = rounds.best_ahead(rate, loss)
        better = rounds.rate(draft_length, missed_length)
        is_settled = abs(better - rate) <= _SETTLED * rate
        rate = max(better, 1e-3 * plain_rate)
        if is_settled:
            break
    return Choice(
        draft_length=draft_length,
        rate=rate,
        plain_rate=plain_rate,
        round_s=rounds.ahead_s[draft_length],
        values=tuple(rounds.value(length, rate, loss) for length in range(len(costs.survival))),
        draft_token_s=costs.draft_token_s,
        redraft_s=costs.redraft_s,
        least_wait_s=costs.least_wait_s,
    )


def expected_tokens(survival: Sequence[float], draft_length: int) -> float:
    """`E` of design section 6: tokens of a round, with the one that it adds by itself."""
    return sum(survival[: draft_length + 1])


class _Rounds:
    """Tokens, seconds and the odds of beginning the next one ahead, of a round with 0, 1, 2... drafted tokens."""

    def __init__(self, costs: RoundCosts) -> None:
        self._rewards: list[float] = []  # tokens, less what the others lose
        self._hits: list[float] = []
        self._verify_s: list[float] = []
        self._missed_s: list[float] = []  # with the wait for tokens drafted afresh
        self._longest = min(costs.longest, len(costs.survival) - 1)
        self.ahead_s: list[float] = []  # with tokens drafted while the last round went on
        tokens, lost_s = 0.0, 0.0
        for length, survival in enumerate(costs.survival):
            tokens += survival
            is_taken = costs.hit_after_full if costs.bonus_is_drafted and length else 0.0
            self._rewards.append(tokens - survival * is_taken - costs.token_price * length)
            self._hits.append(_hit(costs, length, survival))
            verify_s = max(costs.verify_s + length * costs.verify_token_s, _LEAST_S)
            self._verify_s.append(verify_s)
            # Where the bonus token is emitted, the draft behind it begins one token later: the drafter makes that too.
            drafted = length if costs.bonus_is_drafted or not length else length + 1
            self.ahead_s.append(max(verify_s, drafted * costs.draft_token_s))
            self._missed_s.append(verify_s + lost_s)
            lost_s = max(costs.redraft_s + length * costs.draft_token_s, costs.least_wait_s)

    def value(self, length: int, rate: float, loss: float) -> float:
        """Tokens of a round whose draft is there, less its time at `rate` and the odds of a miss behind it."""
        return self._rewards[length] - rate * self._verify_s[length] - (1.0 - self._hits[length]) * loss

    def best_behind_a_miss(self, rate: float) -> tuple[int, float]:
        """How many tokens to wait for, and how many tokens worse off than ahead that leaves the session."""
        best, least = 0, float("inf")
        worse = 0
        for length, hit in enumerate(self._hits[: self._longest + 1]):
            loss = (rate * self._missed_s[length] - self._rewards[length]) / hit
            best, least, worse = (length, loss, 0) if loss < least else (best, least, worse + 1)
            if worse == _PATIENCE:
                break
        return best, max(0.0, least)

    def best_ahead(self, rate: float, loss: float) -> int:
        best, most = 1, float("-inf")
        worse = 0
        for length in range(1, self._longest + 1):
            value = self._rewards[length] - rate * self.ahead_s[length] - (1.0 - self._hits[length]) * loss
            best, most, worse = (length, value, 0) if value > most else (best, most, worse + 1)
            if worse == _PATIENCE:
                break
        return best

    def rate(self, length: int, missed_length: int) -> float:
        """Tokens per second in the long run, with so many tokens ahead and so many behind a miss."""
        misses = 1.0 - self._hits[length]
        ahead = self._hits[missed_length] / (self._hits[missed_length] + misses)
        tokens = ahead * self._rewards[length] + (1.0 - ahead) * self._rewards[missed_length]
        return tokens / (ahead * self.ahead_s[length] + (1.0 - ahead) * self._missed_s[missed_length])


def _hit(costs: RoundCosts, length: int, survival: float) -> float:
    if length == 0:
        return max(costs.hit_after_plain, _LEAST_HIT)
    return max(survival * costs.hit_after_full + (1.0 - survival) * costs.hit_after_rejection, _LEAST_HIT)
