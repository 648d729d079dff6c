"""Noise is a pure function of its key: published numbers, the same on tensors and ints, uniform and independent.

The statistical tests use fixed seeds, so they give the same result on every run; the odds stated are those of a false
alarm had the seeds been drawn afresh.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import noise
from paceline.noise import Purpose
from paceline.types import MAX_SEED

VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).parents[1].joinpath("vectors/noise.json").read_text())[
    "vectors"
]

seeds = st.integers(0, MAX_SEED)
positions = st.integers(0, 2**40)
purposes = st.sampled_from(Purpose)
indices = st.integers(0, 2**31)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['seed']}-{vector['purpose']}")
def test_published_vectors_are_reproduced(vector: dict[str, Any]) -> None:
    """Anyone who implements the noise elsewhere can check it, bit for bit, against these numbers."""
    key = int(vector["seed"]), vector["position"], Purpose[vector["purpose"]], vector["index"]
    assert noise.hashed(*key) == int(vector["hash"], 16)
    assert noise.uniform(*key) == float.fromhex(vector["uniform"])
    if "gumbel" in vector:
        assert noise.gumbel(key[0], key[1], key[3]) == float.fromhex(vector["gumbel"])


@settings(deadline=None)
@given(seeds, positions, purposes, st.lists(indices, min_size=1, max_size=40))
def test_many_indices_at_once_give_the_same_numbers(
    seed: int, position: int, purpose: Purpose, some_indices: list[int]
) -> None:
    """The tensor version equals the integer version at every key, whatever else is in the tensor."""
    complements = noise.complements(
        noise.counters(torch.tensor(some_indices)), seed=seed, position=position, purpose=purpose
    )
    expected = [noise.uniform(seed, position, purpose, index) for index in some_indices]
    assert [(2**53 - complement) * 2.0**-53 for complement in complements.tolist()] == expected


def test_a_whole_vocabulary_at_once_gives_the_same_numbers() -> None:
    """Long tensors take the vectorised kernels; every one of 151,936 numbers still equals the integer version."""
    counters = noise.first_counters(151_936, torch.device("cpu"))
    complements = noise.complements(counters, seed=MAX_SEED, position=4095, purpose=Purpose.TARGET_SAMPLE)
    expected = [
        2**53 - (noise.hashed(MAX_SEED, 4095, Purpose.TARGET_SAMPLE, index) >> 11 | 1) for index in range(151_936)
    ]
    assert complements.tolist() == expected


def test_counters_are_left_alone() -> None:
    """Counters can be shared and cached: computing with them does not change them."""
    counters = noise.first_counters(100, torch.device("cpu"))
    noise.complements(counters, seed=1, position=2, purpose=Purpose.TARGET_SAMPLE)
    assert counters.equal(noise.counters(torch.arange(100)))


@settings(deadline=None)
@given(seeds, positions, purposes, indices)
def test_uniforms_lie_strictly_inside_the_unit_interval(seed: int, position: int, purpose: Purpose, index: int) -> None:
    """Neither 0 nor 1 can occur: the numerator over 2**53 is odd (C11)."""
    number = noise.uniform(seed, position, purpose, index)
    assert 0.0 < number < 1.0
    assert (number * 2**53) % 2 == 1


def test_the_extreme_words_still_give_numbers_inside_the_unit_interval() -> None:
    """The lowest and the highest word there is become 2**-53 and 1 - 2**-53, and finite Gumbel noise (C11)."""
    lowest, highest = noise._numerator(0) * 2.0**-53, noise._numerator(2**64 - 1) * 2.0**-53
    assert (lowest, highest) == (2.0**-53, 1.0 - 2.0**-53)
    lowest_noise, highest_noise = (-noise.reproducible_log(-noise.reproducible_log(u)) for u in (lowest, highest))
    assert lowest_noise == pytest.approx(-math.log(53 * math.log(2)))
    assert highest_noise == pytest.approx(53 * math.log(2))


@settings(deadline=None)
@given(st.floats(min_value=2.3e-308, allow_infinity=False) | st.floats(0.4, 2.5))
def test_the_logarithm_is_right_to_the_last_bit_or_so(value: float) -> None:
    """Within 1.5 units in the last place of the exact logarithm, computed with 60 decimal digits."""
    with localcontext(prec=60):
        exact = Decimal(value).ln()
        error = abs(Decimal(noise.reproducible_log(value)) - exact)
        assert error <= Decimal("1.5") * Decimal(math.ulp(float(exact)))


@settings(deadline=None)
@given(st.integers(0, 2**52 - 1))
def test_gumbel_noise_is_accurate_over_the_whole_range_of_uniforms(half_numerator: int) -> None:
    """-log(-log u) within 4 units in the last place of 1, or of itself if larger, for every u the noise can give."""
    number = (2 * half_numerator + 1) * 2.0**-53
    with localcontext(prec=60):
        exact = -(-Decimal(number).ln()).ln()
        error = abs(Decimal(-noise.reproducible_log(-noise.reproducible_log(number))) - exact)
        assert error <= 4 * Decimal(math.ulp(max(1.0, abs(float(exact)))))


def test_seed_zero_is_a_seed_like_any_other() -> None:
    """Seed 0 has noise of its own that repeats, and does not mean "draw one"."""
    numbers = [noise.uniform(0, position, Purpose.ACCEPT) for position in range(100)]
    assert numbers == [noise.uniform(0, position, Purpose.ACCEPT) for position in range(100)]
    assert len(set(numbers)) == 100
    assert set(numbers).isdisjoint(noise.uniform(1, position, Purpose.ACCEPT) for position in range(100))


def test_two_replicas_draw_the_same_numbers_in_any_order() -> None:
    """There is no state: asked forwards or backwards, with other calls between, a key has one number (C14)."""
    keys = [(7, position, purpose, index) for position in range(20) for purpose in Purpose for index in range(5)]
    forwards = {key: noise.uniform(*key) for key in keys}
    backwards = {key: noise.uniform(*key) for key in reversed(keys)}
    assert forwards == backwards


def test_no_two_keys_share_a_number() -> None:
    """Purposes, positions, seeds and indices are disjoint streams: 400,000 keys, 400,000 words (a fair 64-bit hash
    would show a collision once in 230 million runs)."""
    every_index = torch.arange(5_000)
    words = {
        noise.hashed(seed, position, purpose, int(index))
        for seed in (0, 1, 2, 2**32, MAX_SEED)
        for position in (0, 1, 2, 1_000)
        for purpose in Purpose
        for index in every_index.tolist()
    }
    assert len(words) == 5 * 4 * len(Purpose) * 5_000


def _numbers(axis: str, count: int) -> torch.Tensor:
    """`count` uniforms along one coordinate of the key, the others fixed; [count] float64."""
    keys: dict[str, Any] = {
        "index": lambda i: (3, 5, Purpose.TARGET_SAMPLE, i),
        "position": lambda i: (3, i, Purpose.ACCEPT, 0),
        "seed": lambda i: (i, 5, Purpose.ACCEPT, 0),
        "high seed bits": lambda i: (i << 40, 5, Purpose.ACCEPT, 0),
        "purpose and position": lambda i: (3, i // len(Purpose), Purpose(i % len(Purpose)), 0),
    }
    return torch.tensor([noise.uniform(*keys[axis](i)) for i in range(count)], dtype=torch.float64)


AXES = ["index", "position", "seed", "high seed bits", "purpose and position"]


@pytest.mark.parametrize("axis", AXES)
def test_numbers_are_uniform_along_every_coordinate(axis: str) -> None:
    """Chi-square over 256 cells of 50,000 numbers, in their high bits and in the bits 20 places below: each statistic
    is at most 5 standard deviations above its mean (false alarm: about 1 in 100,000 each)."""
    numbers = _numbers(axis, 50_000)
    for shift in (0, 20):
        cells = torch.bincount(((numbers * 2.0**shift) % 1.0 * 256).long(), minlength=256).double()
        expected = 50_000 / 256
        statistic = float(((cells - expected) ** 2 / expected).sum())
        assert abs(statistic - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("axis", AXES)
def test_neighbouring_numbers_are_uncorrelated(axis: str) -> None:
    """Lags 1 to 32 over 50,000 numbers: every correlation is within 5 standard errors of 0 (false alarm: 1 in 50,000
    an axis)."""
    centred = (_numbers(axis, 50_000) - 0.5) * math.sqrt(12.0)
    for lag in range(1, 33):
        correlation = float((centred[lag:] * centred[:-lag]).mean())
        assert abs(correlation) < 5 / math.sqrt(50_000 - lag)


@pytest.mark.parametrize("purpose", [purpose for purpose in Purpose if purpose is not Purpose.ACCEPT])
def test_purposes_are_uncorrelated_at_one_position(purpose: Purpose) -> None:
    """The draw of a draft says nothing about its acceptance: 50,000 positions, within 5 standard errors of 0 (false
    alarm: 1 in 1.7 million)."""
    accept, other = (
        torch.tensor([noise.uniform(3, position, p) - 0.5 for position in range(50_000)], dtype=torch.float64) * 12**0.5
        for p in (Purpose.ACCEPT, purpose)
    )
    assert abs(float((accept * other).mean())) < 5 / math.sqrt(50_000)
