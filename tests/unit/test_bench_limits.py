"""The limit and its neighbours, by values computed by hand, and by what must hold for any."""

from __future__ import annotations

import random

import pytest

from paceline.bench.limits import (
    Costs,
    Limit,
    Progress,
    estimated_acceptance,
    expected_tokens,
    limit,
    pipelined_speed,
    sequential_speed,
    sessions_to_fill,
    share_of,
)

# t_v(n) = 0.020 + 0.002 n, t_d = 0.004, R = 0.010: t_v(5) = 0.030, and drafting four takes 0.016.
COSTS = Costs(verify_s=lambda tokens: 0.020 + 0.002 * tokens, draft_step_s=0.004, round_trip_s=0.010)


@pytest.mark.parametrize(
    ("acceptance", "draft_length", "tokens"),
    [(0.5, 0, 1.0), (0.5, 3, 1.875), (0.8, 4, 3.3616), (1.0, 7, 8.0), (0.0, 9, 1.0)],
)
def test_a_round_yields_the_geometric_sum(acceptance: float, draft_length: int, tokens: float) -> None:
    """(1 - a^(g+1)) / (1 - a), also where that is 0 / 0."""
    assert expected_tokens(acceptance, draft_length) == pytest.approx(tokens)


def test_tokens_behind_a_rejection_do_not_lower_the_acceptance() -> None:
    """Rounds of four that keep 4, 1 and 0: five accepted, two rejections, whatever was drafted behind those."""
    assert estimated_acceptance(accepted=5, rejections=2) == pytest.approx(5 / 7)
    assert estimated_acceptance(accepted=0, rejections=0) == 0.0


def test_the_estimate_finds_the_acceptance_that_made_the_rounds() -> None:
    """20,000 rounds of draft length 4 at a = 0.7: the standard error is 0.0024, so 0.012 fails once in 2 million."""
    generator = random.Random(1)
    accepted = rejections = 0
    for _ in range(20_000):
        kept = next((position for position in range(4) if generator.random() >= 0.7), 4)
        accepted += kept
        rejections += kept < 4
    assert estimated_acceptance(accepted, rejections) == pytest.approx(0.7, abs=0.012)


def test_sequential_rounds_pay_for_everything_in_turn() -> None:
    """E(0.8, 4) = 3.3616 tokens in 0.016 + 0.030 + 0.010 s."""
    assert sequential_speed(0.8, 4, COSTS) == pytest.approx(3.3616 / 0.056)


def test_a_pipeline_pays_for_the_slower_side_and_for_misses() -> None:
    """a = 0.8, g = 4, h = 0.75: 0.2 [ 0.030 / (1 - 0.4096) + 0.25 (0.010 + 0.016) ] seconds a token."""
    expected_s = 0.2 * (0.030 / 0.5904 + 0.25 * 0.026)
    assert pipelined_speed(0.8, 4, COSTS, hit_rate=0.75) == pytest.approx(1 / expected_s)


def test_a_pipeline_that_is_always_right_runs_at_its_slower_side() -> None:
    """With a = 1 nothing is ever missed: four tokens in each step of 0.030 s."""
    assert pipelined_speed(1.0, 4, COSTS, hit_rate=0.0) == pytest.approx(4 / 0.030)


def test_sessions_in_turn_fill_the_target() -> None:
    """While one session waits 0.026 s for its draft, others may be verified, 0.030 s each."""
    assert sessions_to_fill(4, COSTS) == pytest.approx(1 + 0.026 / 0.030)


def test_the_limit_is_the_best_draft_length() -> None:
    """At a = 0.5: E / max(t_v, g t_d) is 1/0.022, 1.5/0.024, 1.75/0.026, 1.875/0.028, 1.9375/0.030, ..."""
    best = limit(0.5, COSTS, longest=8)
    assert best.draft_length == 2
    assert best.tokens_per_second == pytest.approx(1.75 / 0.026)
    assert best.tokens_per_step == pytest.approx(1.75)
    assert best.step_s == pytest.approx(0.026)


def test_a_slow_drafter_bounds_the_limit() -> None:
    """With t_d = 0.020 and a = 0.9, two drafted tokens take 0.040 s: 2.71 / 0.040 = 67.8 is less than 1.9 / 0.024 = 79.2."""
    slow = Costs(verify_s=COSTS.verify_s, draft_step_s=0.020)
    best = limit(0.9, slow)
    assert best.draft_length == 1
    assert best.tokens_per_second == pytest.approx(1.9 / 0.024)


def test_without_acceptance_plain_decoding_is_the_limit() -> None:
    """Then every drafted token only makes the step longer."""
    best = limit(0.0, COSTS)
    assert best.draft_length == 0
    assert best.tokens_per_second == pytest.approx(1 / 0.022)


def test_sessions_share_the_step_of_the_limit() -> None:
    """Sixteen sessions, t_v(16, 16 n) = 0.020 + 0.001 x 16 + 0.0005 x 16 n, at a = 0.6 and any g."""
    costs = Costs(verify_s=lambda tokens: 0.036 + 0.008 * tokens, draft_step_s=0.002)
    best = limit(0.6, costs, sessions=16)
    by_hand = max(
        16 * sum(0.6**kept for kept in range(length + 1)) / (0.036 + 0.008 * (length + 1)) for length in range(20)
    )
    assert best.tokens_per_second == pytest.approx(by_hand)


def test_the_three_factors_multiply_to_the_share_of_the_limit() -> None:
    """Whatever was measured: 200 random runs, without any tolerance beyond rounding."""
    generator = random.Random(2)
    for _ in range(200):
        bound = limit(generator.random(), COSTS, sessions=generator.randint(1, 16))
        elapsed_s = generator.uniform(1, 60)
        progress = Progress(
            elapsed_s=elapsed_s,
            busy_s=elapsed_s * generator.uniform(0.1, 1),
            steps=generator.uniform(1, 2000),
            tokens=generator.randint(1, 5000),
        )
        share = share_of(bound, progress)
        assert share.total == pytest.approx(progress.tokens_per_second / bound.tokens_per_second, rel=1e-12)


def test_the_factors_say_where_speed_is_lost() -> None:
    """Busy 3 of 4 s, two tokens a step where four were possible, in steps of 25 ms where 30 were allowed for."""
    bound = Limit(draft_length=5, tokens_per_step=4.0, step_s=0.030, tokens_per_second=4.0 / 0.030)
    share = share_of(bound, Progress(elapsed_s=4.0, busy_s=3.0, steps=120, tokens=240))
    assert share.busy == pytest.approx(0.75)
    assert share.tokens == pytest.approx(0.5)
    assert share.step_time == pytest.approx(0.030 / 0.025)
