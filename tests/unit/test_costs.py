"""What rounds and drafts cost, as measured."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.costs import Average, DraftCosts, LeastSquares, MeasuredRates, VerifyCosts


def step_s(sessions: int, tokens: int, is_drafting: bool = False) -> float:
    return 0.02 + 0.001 * sessions + 0.0004 * tokens + 0.003 * is_drafting


def measured(rounds: int = 400, seed: int = 1) -> VerifyCosts:
    """Steps of 1 to 8 sessions with 1 to 6 tokens each, 2 % noise."""
    costs, random = VerifyCosts(), Random(seed)
    for _ in range(rounds):
        sessions, is_drafting = random.randint(1, 8), random.random() < 0.7
        tokens = sum(random.randint(1, 6) if is_drafting else 1 for _ in range(sessions))
        noise = random.uniform(0.98, 1.02)
        costs.record(
            noise * step_s(sessions, tokens, is_drafting), sessions=sessions, tokens=tokens, is_drafting=is_drafting
        )
    return costs


def test_verify_costs_are_found_from_mixed_steps() -> None:
    """Within 5 % at the corners of what was seen; one fixed seed, 400 steps with 2 % noise."""
    costs = measured()
    for sessions, tokens, is_drafting in ((1, 1, False), (1, 6, True), (8, 8, False), (8, 48, True)):
        predicted_s = costs.step_s(sessions=sessions, tokens=tokens, is_drafting=is_drafting)
        assert predicted_s == pytest.approx(step_s(sessions, tokens, is_drafting), rel=0.05)


def test_a_token_is_cheap_until_it_is_seen_to_be_dear() -> None:
    """Of steps that are all alike, the constant explains nearly everything."""
    costs = VerifyCosts()
    for index in range(50):
        costs.record(0.03 + 1e-9 * index, sessions=1, tokens=1, is_drafting=False)
    assert costs.step_s(sessions=1, tokens=9, is_drafting=False) == pytest.approx(0.03, rel=0.02)


def test_a_step_counts_once_for_all_its_sessions() -> None:
    """Eight sessions that report the same step are one measurement."""
    costs = VerifyCosts()
    for _ in range(8):
        costs.record(0.03, sessions=8, tokens=8, is_drafting=False)
    assert costs.count == 1


def test_a_hiccup_moves_little() -> None:
    """One step of ten times the length changes the prediction by less than a tenth."""
    costs = measured()
    before_s = costs.step_s(sessions=4, tokens=8, is_drafting=True)
    for index in range(4):
        costs.record((10.0 if index == 0 else 1.0) * before_s + 1e-9 * index, sessions=4, tokens=8, is_drafting=True)
    assert costs.step_s(sessions=4, tokens=8, is_drafting=True) == pytest.approx(before_s, rel=0.1)


def test_a_lasting_change_is_followed() -> None:
    """A target that becomes six times slower is predicted within 10 % after 400 steps."""
    costs = measured()
    for index in range(400):
        costs.record(0.18 + 1e-9 * index, sessions=2, tokens=4, is_drafting=True)
    assert costs.step_s(sessions=2, tokens=4, is_drafting=True) == pytest.approx(0.18, rel=0.1)


def test_coefficients_are_never_negative() -> None:
    """Steps that get shorter with more tokens are noise, or something that no token explains."""
    squares = LeastSquares((100.0, 0.1))
    for tokens in (1.0, 5.0, 9.0) * 20:
        squares.add((1.0, tokens), 0.03 - 0.001 * tokens)
    assert min(squares.coefficients) >= 0.0


def test_a_drafters_step_grows_with_its_lines() -> None:
    """Learned from proposals with and without branches."""
    costs = DraftCosts()
    for index in range(640):
        lines = 1 if index // 32 % 2 else 8
        costs.on_draft(tokens=lines, steps=1, seconds=0.002 + 0.0001 * lines)
    assert costs.step_s(1.0) == pytest.approx(0.0021, rel=0.05)
    assert costs.step_s(8.0) == pytest.approx(0.0028, rel=0.05)


def test_a_redraft_is_at_least_a_step_away() -> None:
    """Before any was seen, the drafter's own step is all that is known of it; then it is what was seen."""
    costs = DraftCosts()
    assert not costs.is_known
    costs.on_draft(tokens=4, steps=4, seconds=0.008)
    assert costs.is_known
    assert costs.redraft_s == pytest.approx(0.002, rel=0.01)
    costs.on_redraft(first_s=0.03)
    assert costs.redraft_s == pytest.approx(0.03)


def test_what_does_not_come_is_expected_later() -> None:
    """Each wait in vain raises the expectation, until nobody waits for it."""
    costs = DraftCosts()
    costs.on_redraft(first_s=0.01)
    for _ in range(20):
        before_s = costs.redraft_s
        costs.on_late_draft(waited_s=1.5 * before_s)
        assert costs.redraft_s > before_s


def test_rates_tell_a_loss_only_when_it_is_more_than_chance() -> None:
    """A round that brings two tokens in twice the time gains nothing; how sure that is grows with the rounds."""
    rates = MeasuredRates()
    random = Random(3)
    for _ in range(16):
        rates.record(sessions=1.0, kind=None, tokens=1, seconds=0.03)
    assert rates.highest_gain(sessions=1.0, kind="a") is None
    bounds = []
    for index in range(1, 513):
        rates.record(sessions=1.0, kind="a", tokens=random.choice((1, 3)), seconds=0.08)
        rates.record(sessions=1.0, kind="b", tokens=3, seconds=0.01)  # says nothing of the other kind
        if index in (64, 512):
            bounds.append(rates.highest_gain(sessions=1.0, kind="a"))
    assert bounds[0] is not None
    assert bounds[1] is not None
    assert 0.75 < bounds[1] < bounds[0] < 1.0
    assert rates.highest_gain(sessions=9.0, kind="a") is None  # another load


def test_an_average_follows_and_bounds_what_is_far_off() -> None:
    """One value a hundred times as long counts as twice as long."""
    average = Average(window=16, farthest=2.0)
    for _ in range(40):
        average.add(1.0)
    average.add(100.0)
    assert average.value == pytest.approx(1.0 + 1.001 / 16)
