"""How many drafted tokens are accepted, and how often a draft is there in time, as counted. Pure.

A session begins with what the deployment has seen of the same drafter, rule and band of temperatures, and soon goes by
its own text. Old rounds fade.
"""

from __future__ import annotations

from paceline.types import MAX_DRAFT_LENGTH

_HALF_LIFE = 64.0  # rounds
_FADE = 0.5 ** (1.0 / _HALF_LIFE)
_PRIOR_WEIGHT = 8.0  # tokens (or rounds) that a prior counts for
_SHAPE_WEIGHT = 32.0  # tokens at a position that its mean over all positions counts for
_HIGHEST = 0.995
_LEAST_SURVIVAL = 0.005  # longer drafts than that are never of use


class Share:
    """How often something happens."""

    def __init__(self, prior: Share | float) -> None:
        self._prior = prior
        self._happened = self._count = 0.0

    @property
    def value(self) -> float:
        prior = self._prior if isinstance(self._prior, float) else self._prior.value
        return (self._happened + _PRIOR_WEIGHT * prior) / (self._count + _PRIOR_WEIGHT)

    def add(self, happened: bool) -> None:
        self._happened = self._happened * _FADE + happened
        self._count = self._count * _FADE + 1.0
        if isinstance(self._prior, Share):
            self._prior.add(happened)

    def doubt(self, share: float) -> None:
        """Keep only that share of what was counted."""
        self._happened *= share
        self._count *= share


class Acceptance:
    """The `a` of design section 6, accepted / (accepted + rounds ended by a rejection), and how it falls with the position.

    How it falls is the drafter's nature, and counted over all sessions; how high it is, is the text's.
    """

    def __init__(self, prior: Acceptance | float) -> None:
        self._prior = prior
        self._accepted = self._judged = 0.0
        # By position, of a deployment alone.
        self._accepted_at = [0.0] * MAX_DRAFT_LENGTH
        self._judged_at = [0.0] * MAX_DRAFT_LENGTH

    @property
    def rate(self) -> float:
        """Of one token, 0 to 1."""
        prior = self._prior if isinstance(self._prior, float) else self._prior.rate
        return (self._accepted + _PRIOR_WEIGHT * prior) / (self._judged + _PRIOR_WEIGHT)

    def record(self, *, draft_length: int, kept_length: int) -> None:
        """One round with a draft."""
        if isinstance(self._prior, Acceptance):
            self._prior.record(draft_length=draft_length, kept_length=kept_length)
        else:
            self._record_positions(draft_length, kept_length)
        self._accepted = self._accepted * _FADE + kept_length
        self._judged = self._judged * _FADE + kept_length + (kept_length < draft_length)

    @property
    def judged(self) -> float:
        """Tokens that the rate rests on; old ones count less."""
        return self._judged

    def doubt(self, share: float) -> None:
        """Keep only that share of what was counted of this session."""
        self._accepted *= share
        self._judged *= share

    def survival(self) -> list[float]:
        """The probability that the first k tokens are all accepted, for k from 0 to the longest draft worth a thought."""
        rate = self.rate
        shape = self._prior if isinstance(self._prior, Acceptance) else self
        survival = [1.0]
        for accepted, judged in zip(shape._accepted_at, shape._judged_at, strict=True):
            at_position = rate
            if judged:
                pooled = max(shape.rate, 0.01)
                at_position *= (accepted + _SHAPE_WEIGHT * pooled) / (judged + _SHAPE_WEIGHT) / pooled
            survival.append(survival[-1] * min(_HIGHEST, at_position))
            if survival[-1] < _LEAST_SURVIVAL:
                break
        return survival

    def _record_positions(self, draft_length: int, kept_length: int) -> None:
        for position in range(min(draft_length, kept_length + 1)):
            self._accepted_at[position] = self._accepted_at[position] * _FADE + (position < kept_length)
            self._judged_at[position] = self._judged_at[position] * _FADE + 1.0
