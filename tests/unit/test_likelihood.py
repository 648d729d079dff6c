"""How likely each token is to be the right one: estimates sharpened by what is committed, or set by depth and rank."""

from __future__ import annotations

import math
import random

import pytest

from drafter_service.likelihood import Sharpness, static_likelihoods


def test_estimates_are_taken_as_they_are_until_something_is_learned() -> None:
    """With what they leave they add up to 1."""
    assert Sharpness().likelihoods([0.5, 0.2, 0.1]) == pytest.approx([0.5, 0.2, 0.1])


@pytest.mark.parametrize("truth", [0.4, 1.0, 2.0])
def test_the_exponent_of_the_truth_is_found(truth: float) -> None:
    """From 4,000 tokens that are right with the estimates to the power of that exponent.

    Steps are of fixed size, so the exponent goes on swaying: over 400 further tokens its mean strays from the truth by
    0.06 at most in 200 seeds; 0.2 is asked for.
    """
    randomness, sharpness = random.Random(1), Sharpness()
    late = []
    for number in range(4400):
        weights = [randomness.random() ** 3 + 1e-3 for _ in range(5)]
        estimates = [weight / sum(weights) for weight in weights]
        powers = [estimate**truth for estimate in estimates]
        place = randomness.choices(range(5), powers)[0]
        sharpness.observe(estimates[:4], place)
        if number >= 4000:
            late.append(sharpness.exponent)
    assert sum(late) / len(late) == pytest.approx(truth, abs=0.2)


@pytest.mark.parametrize(("place", "is_higher"), [(0, True), (3, False)])
def test_the_exponent_stays_within_bounds(place: int, is_higher: bool) -> None:
    """However often a method is right, or wrong, and however sure it was; every likelihood stays a number above 0."""
    sharpness = Sharpness()
    for _ in range(1000):
        sharpness.observe([0.9, 0.06, 0.04], place)
    assert (sharpness.exponent > 1.0) == is_higher
    assert 0.1 <= sharpness.exponent <= 3.0
    for estimates in ([1.0], [1.0, 0.0], [0.0, 0.0], [0.4, 0.3, 0.3]):
        likelihoods = sharpness.likelihoods(estimates)
        assert all(0.0 < likelihood <= 1.0 for likelihood in likelihoods)
        assert math.fsum(likelihoods) <= 1.0 + 1e-12


def test_static_likelihoods_fall_with_the_rank_and_leave_something() -> None:
    """The drafted token has what acceptance it is told, within bounds; the guesses share the rest."""
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        kept, *guesses = static_likelihoods(acceptance, 16)
        assert kept == min(0.98, max(0.05, acceptance))
        assert guesses == sorted(guesses, reverse=True)
        assert min(guesses) > 0.0
        assert kept + sum(guesses) < 1.0
    assert static_likelihoods(0.7, 0) == [0.7]
