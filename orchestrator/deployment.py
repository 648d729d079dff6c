"""What the sessions of one orchestrator know together: costs, load, acceptance, and the trials that they make. Pure.

Its targets are taken to be alike, and so are its drafters. Knows nothing of any one session.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from enum import StrEnum

from orchestrator.acceptance import Acceptance, Share
from orchestrator.costs import FARTHEST, Average, DraftCosts, MeasuredRates, VerifyCosts
from orchestrator.draft_length import Choice, RoundCosts
from orchestrator.loop import RoundOutcome
from orchestrator.probing import ProbeBudget, ProbeClock

BRANCHES = (0, 1, 3, 7, 15, 31)  # numbers of branches that are chosen among
_FIRST_BRANCHES = 3  # as an index in BRANCHES: enough to be of use, few enough to be no burden while nothing is known
SHORTEST_STAY = 16  # rounds between two switches of a session
_HITS_EXPECTED = (0.05, 0.25, 0.35, 0.45, 0.5, 0.55)  # probability that one of so many fits, before anything is known
_FIRST_ACCEPTANCE, _FIRST_LOOKUP_ACCEPTANCE = 0.7, 0.4
_BASELINE_ROUNDS = 8  # decoded plainly before anybody speculates
_FIRST_SESSIONS, _LAST_TURN = 4, 8  # so many speculate at once in a group of which nothing is known; the last by then
_LONGEST_ROUND = 4.0  # usual rounds: what is longer is a pause, for which no way to decode is to blame
_KNOWN_ROUNDS = 8  # from which on it is known what is usual
_KNOWN_AFTER = 32  # judged tokens
_PLAIN_PHASE_ROUNDS = 8  # of each session, in one trial of plain decoding


class Mode(StrEnum):
    BASELINE = "baseline"  # the deployment's first rounds
    ON = "on"
    OFF = "off"
    PROBE = "probe"  # off, but tried
    PLAIN_PHASE = "plain phase"  # on, but the deployment tries plain decoding

    @property
    def is_drafting(self) -> bool:
        return self in (Mode.ON, Mode.PROBE)


class Load:
    """What rounds are like now; means over all sessions."""

    def __init__(self) -> None:
        self.sessions = Average(window=64)  # in one step
        self.tokens = Average(window=64)  # of one session in a step
        self.emitted = Average(window=64)
        self.round_s = Average(window=64, farthest=FARTHEST)
        self.queue_steps = Average(window=64)  # steps that a round waits for before its own

    @property
    def all_sessions(self) -> float:
        """In a step or waiting for one."""
        return max(1.0, self.sessions.value) * (1.0 + self.queue_steps.value)


class Group:
    """What the sessions of one drafter, schedule, rule and band of temperatures share."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.acceptance = Acceptance(_FIRST_ACCEPTANCE)
        self.lookup_acceptance = Acceptance(_FIRST_LOOKUP_ACCEPTANCE)
        self.hit_after_full, self.hit_after_plain = Share(0.8), Share(0.5)
        self.branch_hits = tuple(map(Share, _HITS_EXPECTED))
        self.clock = ProbeClock(shortest=32, longest=512)
        self.is_on = True  # as the last session to switch found
        self.branches = _FIRST_BRANCHES  # likewise, as an index in BRANCHES
        self.times_on = 0  # that a session has turned speculation on
        self.draft_length = 1  # as the last session chose
        self._sessions = 0

    def enter(self) -> int:
        """A session begins: its number."""
        self._sessions += 1
        return self._sessions - 1

    def rounds_until_turn(self, number: int) -> int:
        """When a session may speculate: while nobody knows what that is worth, a few try, and then a few more."""
        if self.acceptance.judged >= _KNOWN_AFTER:
            return 0
        return number // _FIRST_SESSIONS % _LAST_TURN * SHORTEST_STAY


class Deployment:
    """What all sessions of one orchestrator have measured, and the trials that they make together."""

    def __init__(self) -> None:
        self.verify, self.draft, self.rates = VerifyCosts(), DraftCosts(), MeasuredRates()
        self.budget = ProbeBudget()
        self.load = Load()
        # Of a round beside the step; True: it speculates.
        self._overhead = {is_drafting: Average(farthest=FARTHEST) for is_drafting in (True, False)}
        self._groups: dict[Hashable, Group] = {}
        self._plain_clock = ProbeClock(shortest=256, longest=2048)
        self._plain_phase_left = 0.0  # rounds of all sessions
        self._baseline_left = _BASELINE_ROUNDS

    def group(self, key: Hashable) -> Group:
        if key not in self._groups:
            self._groups[key] = Group(key)
        return self._groups[key]

    @property
    def is_baseline(self) -> bool:
        return self._baseline_left > 0

    @property
    def is_plain_phase(self) -> bool:
        return self._plain_phase_left > 0

    def record(self, outcome: RoundOutcome, *, group: Group, mode: Mode, is_settled: bool) -> None:
        """The round of a session of that group has ended. Times count only once what was measured before a switch is over."""
        self._count_down(mode)
        sessions = max(1, outcome.step_sessions)
        own_tokens = outcome.draft_length + 1
        tokens = max(outcome.step_tokens, own_tokens)
        if not is_settled or tokens > 2 * sessions * max(own_tokens, self.load.tokens.value) + 16:
            return  # there are prompts in the step
        self.verify.record(outcome.step_s, sessions=sessions, tokens=tokens, is_drafting=mode.is_drafting)
        # Who waits for a draft comes too late for the step that the others are in, which is counted with the wait.
        queue_s = outcome.queue_s if outcome.waited_s > outcome.queue_s else 0.0
        overhead_s = max(0.0, outcome.round_s - outcome.waited_s - outcome.step_s - queue_s)
        self._overhead[mode.is_drafting].add(overhead_s)
        if mode is not Mode.PROBE:
            self.rates.record(
                sessions=self.load.all_sessions,
                kind=group.key if mode.is_drafting else None,
                tokens=outcome.emitted,
                seconds=self._without_pause(outcome.round_s),
            )
        if mode not in (Mode.PROBE, Mode.PLAIN_PHASE):
            self._record_load(outcome, sessions, tokens)

    def _without_pause(self, round_s: float) -> float:
        usual = self.load.round_s
        return min(round_s, _LONGEST_ROUND * usual.value) if usual.count >= _KNOWN_ROUNDS else round_s

    def _record_load(self, outcome: RoundOutcome, sessions: int, tokens: int) -> None:
        load = self.load
        load.sessions.add(sessions)
        load.tokens.add(tokens / sessions)
        load.emitted.add(outcome.emitted)
        load.round_s.add(outcome.round_s)
        load.queue_steps.add(min(1.0, outcome.queue_s / outcome.step_s) if outcome.step_s else 0.0)

    def _count_down(self, mode: Mode) -> None:
        self._baseline_left -= mode is Mode.BASELINE
        self._plain_phase_left -= mode is Mode.PLAIN_PHASE
        self.budget.earn(sessions=self.load.all_sessions)
        if mode is Mode.ON:
            self._plain_clock.tick(sessions=self.load.all_sessions)

    def charge(self, outcome: RoundOutcome, *, is_alone: bool) -> None:
        """A round of a trial: it lost what the usual round brings in the same time, and brought its own tokens.

        `is_alone`: the others go on as before, in steps as long as this one's.
        """
        load = self.load
        if not load.round_s.value or not load.emitted.value:
            return
        rounds = min(outcome.round_s / load.round_s.value, _LONGEST_ROUND)
        own = (rounds - outcome.emitted / load.emitted.value) / load.all_sessions
        others = (rounds - 1.0) * (1.0 - 1.0 / load.all_sessions) if is_alone else 0.0
        self.budget.spend(own + others)

    def begin_plain_phase_if_due(self) -> None:
        """Decode plainly for a while, all sessions at once: what drafting costs beside the step shows only then."""
        if self._plain_clock.is_due and self.budget.allows_probe and not self.is_plain_phase:
            self._plain_clock.begin()
            self._plain_phase_left = math.ceil(_PLAIN_PHASE_ROUNDS * self.load.all_sessions)

    # ---- what a session's rounds cost

    def round_costs(
        self,
        *,
        survival: list[float],
        longest: int,
        hits: tuple[float, float, float],
        lines: float,
        bonus_is_drafted: bool,
    ) -> RoundCosts:
        """For one session, the others being as they are."""
        load, token_s = self.load, self.verify.token_s
        others = max(0.0, load.sessions.value - 1.0)
        all_others = max(0.0, load.all_sessions - 1.0)
        price = token_s * all_others * load.emitted.value / load.round_s.value if load.round_s.value else 0.0
        return RoundCosts(
            survival=survival,
            longest=longest,
            plain_s=self._round_s(others, is_drafting=False),
            verify_s=self._round_s(others, is_drafting=True),
            verify_token_s=token_s,
            draft_token_s=self.draft.step_s(lines),
            redraft_s=self.draft.redraft_s,
            least_wait_s=self._step_s(others, is_drafting=True) * (1.0 - 1.0 / load.all_sessions),
            token_price=price,
            hit_after_full=hits[0],
            hit_after_rejection=hits[1],
            hit_after_plain=hits[2],
            bonus_is_drafted=bonus_is_drafted,
        )

    def _round_s(self, others: float, *, is_drafting: bool) -> float:
        """A round without a draft, from a verdict to the next."""
        measured = self._overhead[is_drafting]
        overhead = measured if measured.count else self._overhead[not is_drafting]
        return self._step_s(others, is_drafting=is_drafting) + overhead.value

    def _step_s(self, others: float, *, is_drafting: bool) -> float:
        tokens = others * self.load.tokens.value + 1.0
        return self.verify.step_s(sessions=others + 1.0, tokens=tokens, is_drafting=is_drafting)

    def gain(self, choice: Choice, group: Group) -> float:
        """How much faster than plain decoding: as predicted, but no more than what was measured leaves open."""
        measured = self.rates.highest_gain(sessions=self.load.all_sessions, kind=group.key)
        return choice.gain if measured is None else min(choice.gain, measured)
