"""How much each session drafts, round by round, from what was measured: speculation that does not pay turns itself off.

Each session chooses for itself (`draft_length.choose`), at a price for what its drafted tokens cost the others, so that
all choose what is best for the deployment. Knows nothing of gRPC, text, models or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

from orchestrator.acceptance import Acceptance, Share
from orchestrator.deployment import BRANCHES, SHORTEST_STAY, Deployment, Mode
from orchestrator.draft_length import Choice, RoundCosts, choose
from orchestrator.loop import DraftOrder, RoundOutcome, RoundPlan
from paceline.generation import Schedule
from paceline.types import MAX_CREDIT, MAX_DRAFT_LENGTH, DraftOrigin, VerificationRule

_ON_ABOVE, _OFF_BELOW = 1.03, 1.0  # times plain decoding
_ROUNDS_PER_CHOICE = 12  # one choice serves so many rounds; sessions choose by turns, each knowing what others chose
_FIRST_ROUNDS, _ROUNDS_PER_FIRST_CHOICE = 48, 4  # of a session, in which its figures move more
_ROUNDS_PER_CHOICE_OFF = 48  # while nothing is drafted little is learned, and each choice takes time from all sessions
_SETTLING_ROUNDS = 2  # behind a switch, whose times are neither the one's nor the other's
_LONGEST_STAY = 1024  # rounds between two switches of a session; they double with each, from the shortest
_PROBE_ROUNDS = 4  # with a draft, of one trial of speculation
_PROBE_ROUNDS_AT_MOST = 12  # in which those must come: the drafter has to catch up first
_PROBE_LENGTH = 2  # tokens: enough to see what is accepted
_SURPRISE = 0.05  # more acceptance than before a trial, behind which it goes on
_DOUBT = 0.25  # of what was counted before a session's speculation was off is kept
_MISSES_UNTIL_GONE = 8  # drafts that were wanted while the drafter sent nothing, behind which the lookup has to do
_LENGTHENED = 8  # tokens by which all sessions together may lengthen their drafts at once
_FIRST_LENGTH = 4  # tokens, while no draft's cost is known
_PATIENCE, _PATIENCE_MARGIN_S = 1.5, 1e-3  # a draft is waited for so many times as long as is expected, and this
_MOST_LINES = 64  # of all sessions together: every branch costs the orchestrator time too
_SLOWER_AT_MOST = 1.75  # times a step with one line
_DISTURBED_AT_MOST = 0.05  # of a round: what the target loses while drafters work, before branches are given up


class SessionController:
    """One session's rounds (`loop.RoundPlanner`, `remote_drafts.DraftCostMeter`)."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        group: Hashable,
        schedule: Schedule = Schedule.PIPELINED,
        rule: VerificationRule = VerificationRule.COUPLED,
        max_branches: int = BRANCHES[-1],
        max_fan_out: int = 8,
    ) -> None:
        """`group`: sessions of one drafter, schedule, rule and band of temperatures, which begin with what the others saw."""
        self._deployment, self._group = deployment, deployment.group(group)
        self._is_pipelined = schedule is Schedule.PIPELINED
        self._bonus_is_drafted = rule is VerificationRule.REJECTION
        self._max_fan_out = max_fan_out if self._is_pipelined else 0
        self._max_branches = max_branches if self._max_fan_out else 0
        self._acceptance = Acceptance(self._group.acceptance)
        self._lookup_acceptance = Acceptance(self._group.lookup_acceptance)
        self._hit_after_full, self._hit_after_plain = (
            Share(self._group.hit_after_full),
            Share(self._group.hit_after_plain),
        )
        self._branch_hits = tuple(map(Share, self._group.branch_hits))
        self._number = self._group.enter()
        self._is_on, self._times_on = self._group.is_on, self._group.times_on
        self._stay, self._rounds_in_place = SHORTEST_STAY, SHORTEST_STAY
        self._probe_drafts = self._probe_rounds = 0  # that are left of a trial
        self._rate_before = 0.0  # acceptance at the beginning of a trial
        self._missing = 0  # drafts in a row that were wanted and did not come
        self._mode = Mode.BASELINE
        self._rounds_in_mode = 0
        self._rounds = 0
        self._branches = self._group.branches if self._max_branches else 0  # index in BRANCHES
        self._choice: Choice | None = None
        self._reason = ""
        self._plan = RoundPlan()  # the last one
        # What follows from the mode and the choice, made once for both.
        self._order: DraftOrder | None = None
        self._plans: dict[int, RoundPlan] = {}  # by the tokens that are there

    # ---- loop.RoundPlanner

    def order(self, *, remaining: int) -> DraftOrder:
        self._enter(self._next_mode())
        if self._choice is None and self._mode is Mode.ON and self._deployment.draft.is_known:
            self._choose()
            self._enter(self._next_mode())
        if remaining <= MAX_CREDIT:
            return self._ordered(remaining)
        if self._order is None:
            self._order = self._ordered(remaining)
        return self._order

    def plan(self, *, available: int, remaining: int) -> RoundPlan:
        if remaining <= MAX_DRAFT_LENGTH:
            self._plan = self._planned(available, remaining - 1)
            return self._plan
        plan = self._plans.get(available)
        if plan is None:
            plan = self._plans[available] = self._planned(available, MAX_DRAFT_LENGTH)
        self._plan = plan
        return plan

    def record(self, outcome: RoundOutcome) -> None:
        self._rounds += 1
        self._rounds_in_mode += 1
        self._rounds_in_place += 1
        if self._rounds == 1:
            return  # the prompt's
        if self._mode is Mode.ON and self._choice is None:
            self._rounds_in_mode = 0
        is_settled = self._rounds_in_mode > _SETTLING_ROUNDS or self._mode is Mode.BASELINE
        self._deployment.record(outcome, group=self._group, mode=self._mode, is_settled=is_settled)
        if self._mode.is_drafting:
            self._learn(outcome)
        if self._mode is Mode.PROBE:
            self._count_probe(outcome)
        elif self._mode is Mode.PLAIN_PHASE:
            self._deployment.charge(outcome, is_alone=False)
        elif self._mode is Mode.OFF:
            self._group.clock.tick(sessions=self._deployment.load.all_sessions)
        if (self._rounds + self._number) % self._rounds_per_choice == 0 and self._mode is not Mode.BASELINE:
            self._choose()

    @property
    def _rounds_per_choice(self) -> int:
        if self._mode is Mode.OFF:
            return _ROUNDS_PER_CHOICE_OFF
        return _ROUNDS_PER_CHOICE if self._rounds > _FIRST_ROUNDS else _ROUNDS_PER_FIRST_CHOICE

    # ---- remote_drafts.DraftCostMeter

    def on_draft(self, *, tokens: int, steps: int, seconds: float) -> None:
        self._missing = 0
        self._deployment.draft.on_draft(tokens=tokens, steps=steps, seconds=seconds)

    def on_redraft(self, *, first_s: float) -> None:
        # Behind a pause the drafter reads all that it has missed: that is no measure of the next rounds.
        if self._mode is Mode.ON and self._rounds_in_mode > _SETTLING_ROUNDS:
            self._deployment.draft.on_redraft(first_s=first_s)

    # ---- what is learned

    def _learn(self, outcome: RoundOutcome) -> None:
        if outcome.origin is DraftOrigin.FALLBACK:
            self._lookup_acceptance.record(draft_length=outcome.draft_length, kept_length=outcome.kept_length)
        elif outcome.draft_length:
            self._acceptance.record(draft_length=outcome.draft_length, kept_length=outcome.kept_length)
        if self._rounds_in_mode > _SETTLING_ROUNDS or self._choice is None:
            self._learn_missing(outcome)
        if self._rounds_in_mode > _SETTLING_ROUNDS:
            self._learn_hits(outcome)

    def _learn_missing(self, outcome: RoundOutcome) -> None:
        if outcome.origin not in (DraftOrigin.FALLBACK, DraftOrigin.NONE):
            self._missing = 0
        elif self._plan.enough_length or self._choice is None:
            self._missing += 1
            if self._is_gone and outcome.origin is DraftOrigin.NONE:
                self._lookup_acceptance.record(draft_length=1, kept_length=0)  # it found nothing
            if self._plan.patience_s and outcome.waited_s >= self._plan.patience_s:
                self._deployment.draft.on_late_draft(waited_s=outcome.waited_s)

    def _learn_hits(self, outcome: RoundOutcome) -> None:
        if outcome.draft_length == 0:
            self._hit_after_plain.add(outcome.has_continuation)
        elif outcome.is_rejection:
            self._branch_hits[self._branches].add(outcome.has_continuation)
        else:
            self._hit_after_full.add(outcome.has_continuation)

    @property
    def _is_gone(self) -> bool:
        """No drafter serves this session now."""
        return self._missing >= _MISSES_UNTIL_GONE

    def _count_probe(self, outcome: RoundOutcome) -> None:
        self._deployment.charge(outcome, is_alone=True)
        self._probe_rounds -= 1
        self._probe_drafts -= outcome.draft_length > 0
        if self._probe_drafts > 0 and self._probe_rounds > 0:
            return
        is_better = self._acceptance.rate > self._rate_before + _SURPRISE
        self._probe_drafts = self._probe_rounds = 0
        self._choose()
        if is_better and not self._is_on:
            self._group.clock.hasten()
            self._probe()

    # ---- on or off

    def _next_mode(self) -> Mode:
        if self._deployment.is_baseline:
            return Mode.BASELINE
        if self._is_on:
            if self._rounds < self._group.rounds_until_turn(self._number):
                return Mode.OFF
            return Mode.PLAIN_PHASE if self._deployment.is_plain_phase else Mode.ON
        if self._probe_rounds == 0 and self._group.clock.is_due and self._deployment.budget.allows_probe:
            self._group.clock.begin()
            self._probe()
        return Mode.PROBE if self._probe_rounds else Mode.OFF

    def _enter(self, mode: Mode) -> None:
        if mode is self._mode:
            return
        if not mode.is_drafting or not self._mode.is_drafting:
            self._rounds_in_mode = 0
        self._mode = mode
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._order = None
        self._plans.clear()

    def _probe(self) -> None:
        """Begin a trial, or go on with one that has found the text to be another than before."""
        self._probe_drafts, self._probe_rounds = _PROBE_ROUNDS, _PROBE_ROUNDS_AT_MOST
        self._acceptance.doubt(_DOUBT)
        self._hit_after_full.doubt(_DOUBT)
        self._rate_before = self._acceptance.rate

    def _choose(self) -> None:
        """The best draft length now, and whether it is worth it."""
        deployment = self._deployment
        if not deployment.draft.is_known and not self._is_gone:
            return
        if self._times_on != self._group.times_on:  # what others find now is worth more than what this one found then
            self._times_on = self._group.times_on
            self._acceptance.doubt(_DOUBT)
        self._choice = choice = self._choose_branches() if self._mode is Mode.ON else self._best(self._branches)
        self._forget_plans()
        self._group.draft_length, self._group.branches = choice.draft_length, self._branches
        gain = deployment.gain(choice, self._group)
        self._reason = f"{choice.rate:.1f} tok/s predicted, plain {choice.plain_rate:.1f}"
        if self._rounds_in_place >= self._stay and self._mode is not Mode.PLAIN_PHASE:
            self._switch(gain > (_OFF_BELOW if self._is_on else _ON_ABOVE))
        if self._mode is Mode.ON:
            deployment.begin_plain_phase_if_due()

    def _best(self, branches: int) -> Choice:
        guess = self._choice.rate if self._choice is not None else 0.0
        return choose(self._costs(branches), guess=guess)

    def _costs(self, branches: int) -> RoundCosts:
        if self._is_gone:
            survival, hits = self._lookup_acceptance.survival(), (0.0, 0.0, 0.0)
        else:
            survival = self._acceptance.survival()
            hits = (self._hit_after_full.value, self._branch_hits[branches].value, self._hit_after_plain.value)
        # Longer by little at a time: the others lengthen theirs too, and the price of a token is known only behind that.
        longer = max(1, round(_LENGTHENED / self._deployment.load.all_sessions))
        costs = self._deployment.round_costs(
            survival=survival,
            longest=self._group.draft_length + longer,
            hits=hits,
            lines=1.0 + BRANCHES[branches],
            bonus_is_drafted=self._bonus_is_drafted,
        )
        return replace(costs, draft_token_s=0.0, redraft_s=0.0) if self._is_gone else costs

    def _choose_branches(self) -> Choice:
        """As many branches as the drafter has time for, one more or fewer than now at most: how long a step with many lines
        takes is known only behind some."""
        more = self._branches + 1
        if more < len(BRANCHES) and self._has_time_for(more):
            self._branches = more
        elif self._branches and not self._has_time_for(self._branches):
            self._branches -= 1
        return self._best(self._branches)

    def _has_time_for(self, branches: int) -> bool:
        """Whether a step with so many lines is not much longer than with one, and the likeliest line still grows by what a
        round takes of it. Where a drafter at work slows the target down, no branch is free, and most come to nothing."""
        if BRANCHES[branches] > self._max_branches or self._is_crowded(branches):
            return False
        draft, load, verify = self._deployment.draft, self._deployment.load, self._deployment.verify
        if branches and verify.beside_s > _DISTURBED_AT_MOST * load.round_s.value:
            return False
        step_s = draft.step_s(1.0 + BRANCHES[branches])
        is_slow = step_s > _SLOWER_AT_MOST * draft.step_s(1.0)
        return not is_slow and (load.emitted.value + 1.0) * step_s < load.round_s.value

    def _switch(self, is_on: bool) -> None:
        if is_on == self._is_on:
            return
        self._is_on = self._group.is_on = is_on
        self._group.times_on += is_on
        if is_on:
            self._group.clock.hasten()
        self._times_on = self._group.times_on
        self._probe_drafts = self._probe_rounds = 0
        self._stay = min(2 * self._stay, _LONGEST_STAY)
        self._rounds_in_place = 0
        self._missing = 0

    # ---- how much

    def _ordered(self, remaining: int) -> DraftOrder:
        if self._mode is Mode.BASELINE:
            return DraftOrder()  # the drafter reads the prompt meanwhile
        if not self._mode.is_drafting or remaining < 2:
            return DraftOrder(is_due=False)
        draft_length = min(self._draft_length, remaining - 1)
        branches = BRANCHES[self._branches] if self._mode is Mode.ON and not self._is_crowded(self._branches) else 0
        return DraftOrder(
            draft_length=draft_length,
            credit=min(self._credit(draft_length), remaining - 1, MAX_CREDIT),
            branches=branches,
            fan_out=min((branches + 1) // 2, self._max_fan_out),
            acceptance=self._acceptance.rate,
        )

    @property
    def _draft_length(self) -> int:
        if self._mode is Mode.PROBE:
            return _PROBE_LENGTH
        return self._choice.draft_length if self._choice is not None else _FIRST_LENGTH

    def _credit(self, draft_length: int) -> int:
        """Enough to draft on until the drafter hears of the verdict."""
        if not self._is_pipelined:
            return draft_length
        choice = self._choice
        late = math.ceil(choice.redraft_s / choice.round_s) if choice is not None else 1
        return draft_length * (2 + min(late, MAX_CREDIT)) + 1

    def _is_crowded(self, branches: int) -> bool:
        return branches > 0 and self._deployment.load.all_sessions * (1 + BRANCHES[branches]) > _MOST_LINES

    def _planned(self, available: int, most: int) -> RoundPlan:
        if not self._mode.is_drafting or most <= 0:
            return RoundPlan(reason=f"{self._mode.value}: {self._reason}")
        if self._mode is Mode.PROBE:
            return RoundPlan(draft_length=min(available, _PROBE_LENGTH, most), reason="probe")
        choice = self._choice
        if choice is None:
            return RoundPlan(draft_length=min(_FIRST_LENGTH, most), reason="nothing measured yet")
        wait = choice.wait(available)
        if wait.enough_length == 0:
            return RoundPlan(reason=f"not worth waiting: {self._reason}")
        if wait.wait_s == 0.0:
            length = min(wait.enough_length, most)
            return RoundPlan(draft_length=length, enough_length=length, reason=f"draft {length}: {self._reason}")
        return RoundPlan(
            draft_length=min(max(choice.draft_length, available), most),
            enough_length=min(wait.enough_length, most),
            patience_s=_PATIENCE * wait.wait_s + _PATIENCE_MARGIN_S,
            reason=f"wait for {wait.enough_length}, {1e3 * wait.wait_s:.1f} ms: {self._reason}",
        )
