"""Rounds of one schedule and one draft length, come what may: the baseline, and what a request may ask for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.loop import DraftOrder, RoundOutcome, RoundPlan
from paceline.generation import Schedule
from paceline.types import MAX_CREDIT, VerificationRule

# Of one verdict the drafter hears while the draft behind it is verified and the one after that is on its way.
_DRAFTS_AHEAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlanner:
    """Always the same draft length (`loop.RoundPlanner`); a round waits for a whole draft as long as `patience_s`."""

    schedule: Schedule
    draft_length: int  # tokens
    rule: VerificationRule = VerificationRule.COUPLED  # the effective one
    patience_s: float = 2.0
    branches: int = 0  # pipelined only: most lines besides the likeliest
    fan_out: int = 0  # most guesses at one position
    acceptance: float = 0.7  # of one token, as a drafter is told that may not look at what it draws

    def order(self, *, remaining: int) -> DraftOrder:
        """Sequential credit is one draft. Pipelined, it reaches past the draft in flight, and with branches further: they
        stand on drafts that are not in flight yet.

        Where the bonus token is emitted and compared with the first token of the draft behind, that draft is one longer,
        so that as many are left to verify.
        """
        draft_length = self._draft_length(remaining)
        if draft_length == 0:
            return DraftOrder()
        if self.schedule is not Schedule.PIPELINED:
            return DraftOrder(draft_length=draft_length, credit=draft_length)
        ahead = draft_length if self.rule is VerificationRule.REJECTION else draft_length + 1
        drafts = _DRAFTS_AHEAD if self.branches else 1
        return DraftOrder(
            draft_length=draft_length,
            credit=min(draft_length + drafts * ahead, remaining - 1, MAX_CREDIT),
            branches=self.branches,
            fan_out=self.fan_out,
            acceptance=self.acceptance,
        )

    def plan(self, *, available: int, remaining: int) -> RoundPlan:
        draft_length = self._draft_length(remaining)
        return RoundPlan(
            draft_length=draft_length,
            enough_length=draft_length,
            patience_s=self.patience_s,
            reason=f"fixed at {self.draft_length}",
        )

    def record(self, outcome: RoundOutcome) -> None:
        """Nothing is learned."""

    def _draft_length(self, remaining: int) -> int:
        """Tokens worth drafting: the round adds one more by itself, and nothing beyond the answer's end is needed."""
        if self.schedule is Schedule.PLAIN:
            return 0
        return max(0, min(self.draft_length, remaining - 1))
