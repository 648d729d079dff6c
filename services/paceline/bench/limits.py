"""How fast speculation can be: the formulas that measurements are held against. Pure.

Words and symbols: `acceptance` a, the probability that one drafted token is kept; `draft_length` g; `verify_s` t_v(n), a
target step over n tokens of a session, of which n = 1 is the plain step T1; `draft_step_s` t_d, a drafter step, which
drafts one token of each line; `round_trip_s` R, to the drafter and back; `hit_rate` h, the probability that a branch fits
where a draft was rejected. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.types import MAX_DRAFT_LENGTH

VerifyTime = Callable[[int], float]
"""t_v: tokens of one session in a target step -> seconds of that step."""


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """E(a, g) = (1 - a^(g+1)) / (1 - a): tokens of a round whose draft has full length, the next token included.

    Leviathan et al. 2023, equation 1, as the sum of a^k for k = 0 to g, which holds for a = 1 too.
    """
    return sum(acceptance**kept for kept in range(draft_length + 1))


def estimated_acceptance(accepted: int, rejections: int) -> float:
    """a = accepted / (accepted + rounds ended by a rejection); 0 where nothing was judged.

    Not accepted / drafted: tokens behind a rejection were never judged.
    """
    judged = accepted + rejections
    return accepted / judged if judged else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one session's round is made of."""

    verify_s: VerifyTime
    draft_step_s: float
    round_trip_s: float = 0.0

    def slower_side_s(self, draft_length: int) -> float:
        """max(t_v(g+1), g t_d): a round when target and drafter compute at the same time."""
        return max(self.verify_s(draft_length + 1), draft_length * self.draft_step_s)


def sequential_speed(acceptance: float, draft_length: int, costs: Costs) -> float:
    """Tokens per second of draft, wait, verify, wait: E / (g t_d + t_v(g+1) + R)."""
    drafting_s = draft_length * costs.draft_step_s
    round_s = drafting_s + costs.verify_s(draft_length + 1) + costs.round_trip_s
    return expected_tokens(acceptance, draft_length) / round_s


def pipelined_speed(acceptance: float, draft_length: int, costs: Costs, *, hit_rate: float) -> float:
    """Tokens per second of a pipeline with branches, for g >= 1.

    One over the seconds per token (1-a) [ max(t_v, g t_d) / (1-a^g) + (1-h)(R + g t_d) ]: rounds as long as the slower
    side, and behind each rejection that no branch fits a draft made afresh.
    """
    rounds_per_token = 1.0 / expected_tokens(acceptance, draft_length - 1)  # (1-a) / (1-a^g)
    redraft_s = costs.round_trip_s + draft_length * costs.draft_step_s
    misses_per_token = (1.0 - acceptance) * (1.0 - hit_rate)
    return 1.0 / (rounds_per_token * costs.slower_side_s(draft_length) + misses_per_token * redraft_s)


def sessions_to_fill(draft_length: int, costs: Costs) -> float:
    """Sequential sessions that keep a target full between them: 1 + (g t_d + R) / t_v(g+1)."""
    waiting_s = draft_length * costs.draft_step_s + costs.round_trip_s
    return 1.0 + waiting_s / costs.verify_s(draft_length + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The best draft length, and what it would give if no draft were ever late."""

    draft_length: int  # 0: plain decoding is best
    tokens_per_step: float  # of all sessions: sessions x E
    step_s: float  # of the slower side
    tokens_per_second: float


def limit(acceptance: float, costs: Costs, *, sessions: int = 1, longest: int = MAX_DRAFT_LENGTH) -> Limit:
    """max over g of S E(a,g) / max(t_v(g+1), g t_d), for S sessions that share each step, g from 0 to `longest`.

    `costs` are those of a step that all S sessions are in.
    """
    return max(
        (_at(draft_length, acceptance, costs, sessions) for draft_length in range(longest + 1)),
        key=lambda candidate: candidate.tokens_per_second,
    )


def _at(draft_length: int, acceptance: float, costs: Costs, sessions: int) -> Limit:
    tokens = sessions * expected_tokens(acceptance, draft_length)
    step_s = costs.slower_side_s(draft_length)
    return Limit(draft_length=draft_length, tokens_per_step=tokens, step_s=step_s, tokens_per_second=tokens / step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a target did within a time in which it always had the same sessions."""

    elapsed_s: float
    busy_s: float  # of it in model steps
    steps: float
    tokens: int  # that these steps added to the answers

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitShare:
    """F = measured / limit, as the product of three factors."""

    busy: float  # share of the time in which the target computes
    tokens: float  # tokens of a step against those of the limit
    step_time: float  # the limit's step time against the measured one; above 1 where shorter drafts are verified

    @property
    def total(self) -> float:
        return self.busy * self.tokens * self.step_time


def share_of(limit: Limit, progress: Progress) -> LimitShare:
    """Where speed is lost: the target waits, its steps yield less than E, or they take longer.

    (busy / elapsed) x (tokens / steps / E) x (ideal step / measured step) = (tokens / elapsed) / limit. `progress` has at
    least one step.
    """
    return LimitShare(
        busy=progress.busy_s / progress.elapsed_s,
        tokens=progress.tokens / progress.steps / limit.tokens_per_step,
        step_time=limit.step_s / (progress.busy_s / progress.steps),
    )
