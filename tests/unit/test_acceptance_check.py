"""The comparison of a drafter's acceptance with its record: what it proves, how often it errs, and what it forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from orchestrator.acceptance_check import (
    ERROR_ODDS,
    FIRST_ANSWERS,
    FIRST_TOKENS,
    FLOOR_SHARE,
    LAST_TOKENS,
    UNUSED_AFTER,
    AcceptanceWindow,
    Comparison,
    Expectation,
    UsageCount,
    expected_at,
    is_comparable,
    proves_above,
    proves_below,
)
from paceline.types import SamplingParams

RECORD = ((0.0, 0.8), (0.7, 0.6), (1.0, 0.3))
SIZES = (FIRST_TOKENS, 1000, LAST_TOKENS)
FLOORS = (0.03, 0.3, 0.6, 0.9)


# ---- what is expected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.0, Expectation(0.0, 0.8)),
        (0.35, Expectation(0.0, 0.7)),
        (0.7, Expectation(0.7, 0.6)),
        (0.8, Expectation(0.7, 0.5)),
        (0.9, Expectation(1.0, 0.4)),
        (1.0, Expectation(1.0, 0.3)),
    ],
)
def test_expectation_lies_on_the_line_between_its_neighbours(temperature: float, expected: Expectation) -> None:
    """And belongs to the nearer one's band, in whatever order they were recorded."""
    for record in (RECORD, RECORD[::-1]):
        found = expected_at(record, temperature)
        assert found is not None
        assert found.band == expected.band
        assert found.acceptance == pytest.approx(expected.acceptance)


@pytest.mark.parametrize(
    ("record", "temperature"), [(RECORD, 1.01), (RECORD[1:], 0.5), ((), 0.0), (((0.7, 0.5),), 0.71)]
)
def test_nothing_is_expected_outside_the_record(record: tuple[tuple[float, float], ...], temperature: float) -> None:
    """A drafter is not blamed for temperatures that nobody evaluated it at."""
    assert expected_at(record, temperature) is None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_end_tokens_and_temperature_are_all_that_may_be_set(temperature: float) -> None:
    """Whatever else shapes the target's distribution was not there in the evaluation."""
    plain = SamplingParams(temperature=temperature, stop_token_ids=(2,))
    assert is_comparable(plain)
    shaped = [
        replace(plain, top_k=40),
        replace(plain, top_p=0.9),
        replace(plain, min_p=0.05),
        replace(plain, repetition_penalty=1.1),
        replace(plain, presence_penalty=0.5),
        replace(plain, frequency_penalty=0.5),
        replace(plain, logit_bias=((1, 5.0),)),
        replace(plain, banned_token_ids=(1,)),
        replace(plain, allowed_token_ids=(1,)),
        replace(plain, min_tokens=5),
    ]
    assert not any(is_comparable(sampling) for sampling in shaped)


# ---- what is proven -------------------------------------------------------------------------------------------------


def odds_of(counts: Iterable[int], judged: int, acceptance: float) -> float:
    """That one of these numbers of tokens is accepted of `judged`, by the binomial law."""
    log_odds = (
        math.lgamma(judged + 1)
        - math.lgamma(count + 1)
        - math.lgamma(judged - count + 1)
        + count * math.log(acceptance)
        + (judged - count) * math.log(1.0 - acceptance)
        for count in counts
    )
    return math.fsum(map(math.exp, log_odds))


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("judged", SIZES)
def test_odds_of_a_wrong_proof_are_bounded(judged: int, floor: float) -> None:
    """Exactly, by the binomial law, for a drafter that lies on the floor itself; and no more than 1000 times smaller."""
    few = [count for count in range(judged + 1) if proves_below(count, judged, floor)]
    many = [count for count in range(judged + 1) if proves_above(count, judged, floor)]
    assert bool(few) == ((1.0 - floor) ** judged <= ERROR_ODDS)
    assert bool(many) == (floor**judged <= ERROR_ODDS)
    for counts in filter(None, (few, many)):
        assert ERROR_ODDS / 1000 < odds_of(counts, judged, floor) <= ERROR_ODDS


def test_a_drafter_far_below_is_found_at_once() -> None:
    """Recorded 0.9, gives 0.1: the first comparison misses it with odds under 1e-10; of one that gives 0.2, under 1e-2."""
    floor = FLOOR_SHARE * 0.9
    missed = [count for count in range(FIRST_TOKENS + 1) if not proves_below(count, FIRST_TOKENS, floor)]
    assert odds_of(missed, FIRST_TOKENS, 0.1) < 1e-10
    assert odds_of(missed, FIRST_TOKENS, 0.2) < 1e-2


def test_floors_at_the_ends_are_no_error() -> None:
    """A drafter of which nothing is expected is never below; one that must accept everything is, with one rejection."""
    assert not proves_below(0, 1000, 0.0)
    assert proves_below(999, 1000, 1.0)
    assert not proves_below(1000, 1000, 1.0)


# ---- windows --------------------------------------------------------------------------------------------------------


def answers_at(acceptance: Callable[[], float], *, drawn: random.Random, judged: int = 40) -> Iterable[tuple[int, int]]:
    """Accepted and rejected tokens of one answer after the other, each with its own acceptance."""
    while True:
        each = acceptance()
        accepted = sum(drawn.random() < each for _ in range(judged))
        yield accepted, judged - accepted


def comparisons(window: AcceptanceWindow, answers: Iterable[tuple[int, int]], *, count: int) -> list[Comparison]:
    """Of so many answers, where 0.5 is expected."""
    made = []
    for _, (accepted, rejections) in zip(range(count), answers, strict=False):
        comparison = window.add(accepted=accepted, rejections=rejections, expected=0.5)
        made += [comparison] if comparison else []
    return made


def test_healthy_drafter_never_warns() -> None:
    """200 drafters, 400 answers each of 40 judged tokens, with acceptance 0.5 from answer to answer by 0.15 up or down.

    The seed is fixed; with others a false alarm has odds under 1e-6.
    """
    drawn = random.Random(1)
    for _ in range(200):
        answers = answers_at(lambda: min(1.0, max(0.0, drawn.gauss(0.5, 0.15))), drawn=drawn)
        made = comparisons(AcceptanceWindow(), answers, count=400)
        assert made
        assert not any(comparison.is_below for comparison in made)


def test_drafter_on_the_floor_never_warns() -> None:
    """One window each of 30 drafters at exactly 0.6 of what is expected: odds of a false alarm under 30 * 1e-5."""
    drawn = random.Random(2)
    for _ in range(30):
        made = comparisons(AcceptanceWindow(), answers_at(lambda: 0.3, drawn=drawn, judged=200), count=82)
        assert len(made) <= 8
        assert not any(comparison.is_below for comparison in made)


def test_slightly_bad_drafter_is_found_within_the_window() -> None:
    """Acceptance 0.25 where 0.5 is recorded, so a sixth below the floor: 20 drafters, each found; odds against it 1e-9."""
    drawn = random.Random(3)
    for _ in range(20):
        made = comparisons(AcceptanceWindow(), answers_at(lambda: 0.25, drawn=drawn), count=LAST_TOKENS // 40 + 1)
        assert made[-1].is_below


def test_comparison_says_what_it_stands_on() -> None:
    """Measured and expected are means over the judged tokens, not over the answers."""
    window = AcceptanceWindow()
    for _ in range(FIRST_ANSWERS - 1):
        assert window.add(accepted=30, rejections=10, expected=0.8) is None
    comparison = window.add(accepted=0, rejections=200, expected=0.4)
    assert comparison is not None
    assert (comparison.judged_tokens, comparison.answers) == (800, FIRST_ANSWERS)
    assert comparison.measured == pytest.approx(450 / 800)
    assert comparison.expected == pytest.approx((600 * 0.8 + 200 * 0.4) / 800)


def test_few_answers_prove_nothing() -> None:
    """However many tokens they have; and an answer without a judged token is none."""
    window = AcceptanceWindow()
    for _ in range(FIRST_ANSWERS - 1):
        assert window.add(accepted=0, rejections=1000, expected=0.9) is None
        assert window.add(accepted=0, rejections=0, expected=0.9) is None
    comparison = window.add(accepted=0, rejections=1000, expected=0.9)
    assert comparison is not None
    assert comparison.is_below


def test_few_tokens_prove_nothing() -> None:
    """However many answers they are from."""
    window = AcceptanceWindow()
    for _ in range(FIRST_TOKENS - 1):
        assert window.add(accepted=0, rejections=1, expected=0.9) is None
    assert window.add(accepted=0, rejections=1, expected=0.9) is not None


def test_undecided_window_compares_at_every_doubling_and_then_begins_anew() -> None:
    """So that a bounded number of comparisons shares the odds of an error."""
    window = AcceptanceWindow()
    sizes = [
        comparison.judged_tokens
        for _ in range(2 * 20_480 // 10)
        if (comparison := window.add(accepted=3, rejections=7, expected=0.5))
    ]
    one_window = [160, 320, 640, 1280, 2560, 5120, 10240, 20480]
    assert sizes == one_window * 2


def test_standing_follows_what_later_rounds_prove() -> None:
    """Below after a bad start, well again soon after it recovers, below again when it breaks: old rounds hide nothing."""
    drawn = random.Random(4)
    window = AcceptanceWindow()
    standings = []
    for acceptance in (0.1, 0.5, 0.1):
        made = comparisons(window, answers_at(lambda: acceptance, drawn=drawn), count=200)  # noqa: B023
        standings.append(made[1].is_below)  # by the second comparison, at the latest
    assert standings == [True, False, True]


def test_standing_stays_while_nothing_else_is_proven() -> None:
    """A drafter that hovers at the floor neither clears the warning nor raises it anew."""
    drawn = random.Random(5)
    window = AcceptanceWindow()
    assert comparisons(window, answers_at(lambda: 0.1, drawn=drawn), count=20)[-1].is_below
    hovering = comparisons(window, iter([(12, 28)] * 200), count=200)
    assert len(hovering) > 3
    assert all(comparison.is_below for comparison in hovering)


def test_unused_is_who_drafts_nothing_for_many_answers_in_a_row() -> None:
    """One draft in between begins the count again."""
    usage = UsageCount()
    for has_drafted in (*[False] * (UNUSED_AFTER - 1), True, *[False] * (UNUSED_AFTER - 1)):
        usage.add(has_drafted=has_drafted)
        assert not usage.is_unused
    usage.add(has_drafted=False)
    assert usage.is_unused
    usage.add(has_drafted=True)
    assert not usage.is_unused
