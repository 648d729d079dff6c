"""The arithmetic of `paceline bench`, on answers made by hand: a wrong ratio would look like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.bench.figures import (
    Repeats,
    draft_step_seconds,
    progress_of,
    result_of,
    round_trip_seconds,
    speeds_of,
    step_samples,
)
from paceline.bench.measure import Answer, Wave
from paceline.bench.plan import PLAIN, Condition, Delay, DrafterVariant, Setting
from paceline.bench.step_costs import StepSample, step_costs
from paceline.generation import Schedule, SpeculationUsage
from paceline.rounds import RoundRecord
from paceline.types import DraftOrigin, VerificationRule

SEQUENTIAL, PIPELINED = Setting(Schedule.SEQUENTIAL, 2), Setting(Schedule.PIPELINED, 2)
CONDITION = Condition(
    drafter=DrafterVariant(), temperature=0.0, rule=VerificationRule.GREEDY, delay=Delay(), concurrency=1
)
STEPS = step_costs(StepSample(1, tokens, 0.09 + 0.01 * tokens) for tokens in (1, 2, 3, 4) for _ in range(5))


def record(number: int, ended_s: float, *, emitted: int, step_s: float = 0.1, sessions: int = 1) -> RoundRecord:
    return RoundRecord(
        session_id="r",
        number=number,
        committed_length=10,
        began_s=ended_s - 0.2,
        draft_s=ended_s - 0.15,
        verdict_s=ended_s,
        ended_s=ended_s,
        step_time_s=step_s,
        step_sessions=sessions,
        step_tokens=sessions * emitted,
        emitted=emitted,
    )


def answer(
    ends_s: Sequence[float],
    counts: Sequence[int],
    *,
    usage: SpeculationUsage | None = None,
    first_id: int = 0,
    **of_rounds: float,
) -> Answer:
    """Deliveries of so many tokens at those moments, each of a round of its own; sent at 0."""
    rounds = tuple(
        record(number, ended_s, emitted=count, **of_rounds)  # type: ignore[arg-type]
        for number, (ended_s, count) in enumerate(zip(ends_s, counts, strict=True))
    )
    return Answer(
        sent_s=0.0,
        arrivals_s=tuple(ends_s),
        token_counts=tuple(counts),
        token_ids=tuple(range(first_id, first_id + sum(counts))),
        usage=usage or SpeculationUsage(rounds=len(counts), plain_rounds=len(counts), elapsed_s=1.0),
        rounds=rounds,
    )


def wave(*answers: Answer) -> Wave:
    return Wave(answers=answers, cpu_s={"target": 0.5, "client": 0.1}, link_bytes={"drafter": 1200})


PLAIN_WAVE = wave(answer([1.0, 1.1, 1.2, 1.3, 1.4], [1, 1, 1, 1, 1]))  # ten a second
USAGE = SpeculationUsage(
    num_drafts=4,
    num_draft_tokens=8,
    num_accepted_tokens=5,
    num_accepted_tokens_per_pos=(3, 2),
    num_draft_tokens_per_pos=(4, 4),
    num_rejections=2,
    branch_hits=1,
    num_received_draft_tokens=25,
    rounds=5,
    plain_rounds=1,
    ahead_rounds=2,
    branch_rounds=1,
    redraft_rounds=1,
    draft_wait_s=0.25,
    elapsed_s=1.0,
)
FAST_WAVE = wave(answer([1.0, 1.2, 1.4], [1, 2, 2], usage=USAGE))  # also ten a second


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def test_speed_is_that_behind_the_first_token() -> None:
    """Four tokens in 0.4 s, however long the prompt took."""
    assert speeds_of([[PLAIN_WAVE]]) == [pytest.approx(10.0)]


def test_speed_of_many_is_that_while_all_run() -> None:
    """The first has begun at 1 s, the second at 2 s, and one ends at 4 s: within these 2 s come 2 + 4 tokens."""
    together = wave(
        answer([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1]),
        answer([2.0, 3.0, 4.0, 5.0, 9.0], [1, 2, 2, 1, 1]),
    )
    assert speeds_of([[together]]) == [pytest.approx(6 / 2)]


def test_waves_of_a_repeat_count_by_their_length() -> None:
    """4 tokens in 0.4 s and 1 in 0.6 s are 5 in a second, not the mean of two speeds."""
    slow = wave(answer([1.0, 1.6], [1, 1]))
    assert speeds_of([[PLAIN_WAVE, slow]]) == [pytest.approx(5.0)]


def test_shared_steps_count_once() -> None:
    """Two sessions report the same three steps of 0.1 s, the first of which made the first tokens."""
    shared = wave(*(answer([1.0, 1.2, 1.4], [1, 2, 1], sessions=2) for _ in range(2)))
    progress = progress_of([shared])
    assert progress.steps == pytest.approx(2)
    assert progress.busy_s == pytest.approx(0.2)
    assert progress.tokens == 6
    assert progress.elapsed_s == pytest.approx(0.4)


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def test_steps_that_read_prompts_are_no_samples() -> None:
    """The first round of a session says nothing about verification."""
    assert step_samples([record(0, 1.0, emitted=1), record(1, 1.2, emitted=3)]) == [StepSample(1, 3, 0.1)]


def test_a_drafter_step_is_its_share_of_the_draft() -> None:
    """0.06 s for three."""
    drafted = replace(record(1, 1.0, emitted=1), draft_time_s=0.06, draft_steps=3)
    assert draft_step_seconds([drafted, record(2, 1.2, emitted=1)]) == [pytest.approx(0.02)]


def test_the_round_trip_is_what_is_left_of_a_wait() -> None:
    """From the verdict at 0.8 s to the arrival at 0.9 s, less 0.06 s of drafting; drafts that were there tell nothing."""
    waited = replace(
        record(1, 1.0, emitted=1), draft_origin=DraftOrigin.REDRAFT, draft_arrived_s=0.9, draft_time_s=0.06
    )
    ahead = replace(waited, draft_origin=DraftOrigin.AHEAD)
    assert round_trip_seconds([waited, ahead]) == [pytest.approx(0.04)]


# ---------------------------------------------------------------------------------------------------------------------
# One condition


def test_ratios_are_of_repeats_side_by_side() -> None:
    """The machine halves its speed in the second repeat, and no ratio sees it."""
    slower = [wave(answer([1.0, 1.2, 1.4], [1, 1, 1]))], [wave(answer([1.0, 1.4, 1.8], [1, 2, 2]))]
    results: dict[Setting, Repeats] = {PLAIN: [[PLAIN_WAVE], slower[0]], PIPELINED: [[FAST_WAVE], slower[1]]}
    _, pipelined = result_of(CONDITION, results, STEPS, delay_s=0.0, usual_draft_step_s=0.02).cells
    assert pipelined.figures.ratio_to_plain == pytest.approx(1.0)
    assert (pipelined.figures.slowest_repeat, pipelined.figures.fastest_repeat) == pytest.approx((5.0, 10.0))
    assert pipelined.figures.ratio_to_sequential is None


def test_drafts_are_counted_once_each() -> None:
    """Acceptance, hits, waste and origins of the usage above; per token, of five."""
    results: dict[Setting, Repeats] = {PLAIN: [[PLAIN_WAVE]], PIPELINED: [[FAST_WAVE]]}
    _, pipelined = result_of(CONDITION, results, STEPS, delay_s=0.0, usual_draft_step_s=0.02).cells
    figures = pipelined.figures
    assert figures.acceptance == pytest.approx(5 / 7)
    assert figures.acceptance_by_position == pytest.approx((0.75, 0.5))
    assert figures.hit_rate == pytest.approx(0.5)
    assert figures.verified_in_vain == pytest.approx(3 / 5)
    assert figures.drafted_in_vain == pytest.approx(20 / 5)
    assert figures.mean_draft_length == pytest.approx(2.0)
    assert figures.tokens_per_round == pytest.approx(1.0)
    assert figures.draft_wait == pytest.approx(0.25)
    assert figures.link_bytes_per_token == {"drafter": pytest.approx(240)}
    assert figures.cpu_s_per_token["target"] == pytest.approx(0.1)
    assert figures.rounds_by_origin == pytest.approx(
        {"ahead": 0.4, "branch": 0.2, "redraft": 0.2, "fallback": 0.0, "none": 0.2}
    )


def test_the_factors_are_those_of_the_limit_of_the_condition() -> None:
    """a = 5/7, t_v(n) = 0.09 + 0.01 n, t_d = 0.02: whatever length is best, F is speed over limit."""
    results: dict[Setting, Repeats] = {PLAIN: [[PLAIN_WAVE]], PIPELINED: [[FAST_WAVE]]}
    whole = result_of(CONDITION, results, STEPS, delay_s=0.0, usual_draft_step_s=0.02)
    assert whole.costs.acceptance == pytest.approx(5 / 7)
    assert whole.costs.plain_step_s == pytest.approx(0.10)
    assert whole.costs.draft_step_s == pytest.approx(0.02)
    assert whole.costs.round_trip_s is None
    for cell in whole.cells:
        speed = cell.figures.tokens_per_second
        assert cell.figures.limit_share.total == pytest.approx(speed / whole.limit.tokens_per_second)
    assert whole.cells[0].figures.predicted_tokens_per_second == pytest.approx(10.0)


def test_the_acceptance_of_the_limit_is_that_of_sequential_drafts() -> None:
    """Where there are any: what a pipeline verifies depends on what came in time."""
    poor = replace(USAGE, num_accepted_tokens=2)
    results: dict[Setting, Repeats] = {
        PLAIN: [[PLAIN_WAVE]],
        SEQUENTIAL: [[wave(answer([1.0, 1.2], [1, 2], usage=poor))]],
        PIPELINED: [[FAST_WAVE]],
    }
    whole = result_of(CONDITION, results, STEPS, delay_s=0.0, usual_draft_step_s=0.02)
    assert whole.costs.acceptance == pytest.approx(0.5)


@pytest.mark.parametrize(("rule", "share"), [(VerificationRule.COUPLED, 0.5), (VerificationRule.REJECTION, None)])
def test_texts_are_compared_where_they_must_agree(rule: VerificationRule, share: float | None) -> None:
    """One of two answers has other tokens; under `rejection` that is no fault."""
    other = wave(answer([1.0, 1.2, 1.4], [1, 2, 2], usage=USAGE, first_id=7))
    results: dict[Setting, Repeats] = {PLAIN: [[PLAIN_WAVE, PLAIN_WAVE]], PIPELINED: [[FAST_WAVE, other]]}
    condition = replace(CONDITION, temperature=1.0, rule=rule)
    _, pipelined = result_of(condition, results, STEPS, delay_s=0.0, usual_draft_step_s=0.02).cells
    assert pipelined.figures.same_text == share
