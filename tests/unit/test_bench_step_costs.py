"""What a target step costs, from samples: medians where there are enough, a line where there are not."""

from __future__ import annotations

import pytest

from paceline.bench.step_costs import StepSample, adjusted, step_costs


def seen(sessions: int, tokens: int, seconds: float, *, times: int = 5) -> list[StepSample]:
    return [StepSample(sessions, tokens, seconds)] * times


def test_lengths_that_were_seen_cost_their_median() -> None:
    """One hiccup among them changes nothing."""
    costs = step_costs([*seen(1, 1, 0.020), *seen(1, 5, 0.030), StepSample(1, 5, 9.0)])
    assert costs.seconds(1, 5) == pytest.approx(0.030)


def test_lengths_between_are_in_proportion() -> None:
    """A step of three tokens lies half way from one to five."""
    costs = step_costs([*seen(1, 1, 0.020), *seen(1, 5, 0.030)])
    assert costs.seconds(1, 3) == pytest.approx(0.025)


def test_lengths_beyond_go_on_at_the_slope_of_the_line() -> None:
    """Nothing longer than five was seen; each token more costs what the line says."""
    costs = step_costs([*seen(1, 1, 0.020), *seen(1, 3, 0.025), *seen(1, 5, 0.030)])
    assert costs.seconds(1, 9) == pytest.approx(0.040)


def test_more_tokens_never_cost_less() -> None:
    """What seems to is evened out: two tokens in 50 ms and three in 26 ms are both taken for 38 ms."""
    costs = step_costs([*seen(1, 1, 0.020), *seen(1, 2, 0.050), *seen(1, 3, 0.026)])
    assert [costs.seconds(1, tokens) for tokens in (1, 2, 3)] == pytest.approx([0.020, 0.038, 0.038])


def test_what_is_evened_out_counts_as_often_as_it_was_seen() -> None:
    """Fifteen steps in 30 ms weigh three times as much as five in 20 ms."""
    costs = step_costs([*seen(1, 2, 0.030, times=15), *seen(1, 3, 0.020)])
    assert costs.seconds(1, 2) == costs.seconds(1, 3) == pytest.approx(0.0275)


def test_a_length_seen_once_is_not_taken_at_its_word() -> None:
    """It counts for the line, and a step of that length lies between its neighbours."""
    costs = step_costs([*seen(1, 1, 0.020), StepSample(1, 3, 0.5), *seen(1, 5, 0.030)])
    assert costs.seconds(1, 3) == pytest.approx(0.025)


def test_steps_of_many_sessions_follow_the_line() -> None:
    """0.010 + 0.002 a session + 0.0005 a token is found from four points that it goes through."""
    points = [(1, 1), (4, 4), (4, 12), (16, 48)]
    costs = step_costs(
        sample
        for sessions, tokens in points
        for sample in seen(sessions, tokens, 0.010 + 0.002 * sessions + 0.0005 * tokens)
    )
    assert costs.seconds(8, 40) == pytest.approx(0.010 + 0.016 + 0.020)


def test_no_part_of_the_line_is_below_nothing() -> None:
    """Times that fall with the number of sessions give that part the value 0."""
    costs = step_costs([*seen(1, 4, 0.030), *seen(4, 4, 0.020), *seen(2, 8, 0.040), *seen(4, 16, 0.060)])
    assert min(costs.line.base_s, costs.line.per_session_s, costs.line.per_token_s) >= 0


def test_sessions_and_tokens_that_go_together_are_one_cost() -> None:
    """Plain decoding alone cannot tell them apart; the steps that were seen still come out right."""
    costs = step_costs([*seen(1, 1, 0.020), *seen(4, 4, 0.026), *seen(16, 16, 0.050)])
    assert costs.seconds(8, 8) == pytest.approx(0.034)


def test_without_a_step_there_are_no_costs() -> None:
    """Nothing is made up."""
    with pytest.raises(ValueError, match="no step"):
        step_costs([])


def test_a_slower_hour_makes_every_length_slower() -> None:
    """Three tokens take twice their usual 25 ms, so five are taken for 60 ms, and three for what was seen."""
    usual = step_costs([*seen(1, 1, 0.020), *seen(1, 3, 0.025), *seen(1, 5, 0.030)])
    now = adjusted(usual, seen(1, 3, 0.050))
    assert [now.seconds(1, tokens) for tokens in (1, 3, 5)] == pytest.approx([0.040, 0.050, 0.060])


def test_a_slower_hour_makes_steps_of_many_slower() -> None:
    """By the ratio to the line."""
    usual = step_costs([*seen(1, 1, 0.020), *seen(4, 4, 0.026), *seen(16, 16, 0.050)])
    assert adjusted(usual, seen(4, 4, 0.039)).seconds(16, 16) == pytest.approx(0.075)


def test_without_news_costs_are_the_usual() -> None:
    """Nothing was seen since."""
    usual = step_costs(seen(1, 1, 0.020))
    assert adjusted(usual, []) == usual
