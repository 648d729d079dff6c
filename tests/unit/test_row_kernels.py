"""The compiled passes over a row give what the plain algorithms of `sampling` give, to the bit.

Random rows have fixed seeds, so their outcome does not change from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import noise, row_kernels, sampling
from paceline.noise import Purpose
from paceline.sampling import DistributionUnusable, TokenHistory, argmax_token, coupled_sample, target_log_probs
from paceline.types import SamplingParams

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
INFINITY = math.inf
EMPTY = TokenHistory(())
GREEDY = SamplingParams(temperature=0.0)
LAST_SEED, LAST_POSITION = 2**64 - 1, 2**40


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Rows are short for torch's threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plainly(function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
    """What the function gives where nothing can be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_has_kernels", lambda row: False)
        return function(*args, **kwargs)


def shaped_rows(shape: str, sizes: list[int], seed: int = 0) -> Iterator[Tensor]:
    """One row of each size; [vocab_size] float32."""
    generator = torch.Generator().manual_seed(seed)
    for index, size in enumerate(sizes):
        row = torch.randn(size, generator=generator)
        if shape == "broad":
            row *= 3.0
        elif shape == "flat":
            row.zero_()
        elif shape == "peaked":
            row[index % size] += 25.0
        elif shape == "wide":
            row *= 40.0  # most probabilities underflow in float32
        elif shape == "nearly flat":
            row *= 1e-6
        elif shape == "bfloat16":
            row = (row * 2.0).bfloat16().float()  # many ties
        elif shape == "masked":
            row[torch.rand(size, generator=generator) < 0.95] = -INFINITY
            row[index % size] = 0.0
        elif shape == "masked by a number":
            row[torch.rand(size, generator=generator) < 0.5] = torch.finfo(torch.float32).min
        elif shape == "one possible":
            row.fill_(-INFINITY)[index % size] = 3.0
        yield row


SHAPES = [
    "broad",
    "flat",
    "peaked",
    "wide",
    "nearly flat",
    "bfloat16",
    "masked",
    "masked by a number",
    "one possible",
]
# Around the sizes of blocks and lines, and far from them.
SMALL = [1, 2, 3, 63, 64, 65, 100, 511, 512, 513, 1_000, 1_024, 1_025, 3_333]
LARGE = [49_152, 151_936, 199_999]


# ---- the coupled sample ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_coupled_sample_is_that_of_the_plain_algorithm(shape: str) -> None:
    """283 rows of each shape, 1 to 199,999 tokens, among them the lowest and highest seeds and positions."""
    keys = [(0, 0), (LAST_SEED, 0), (0, LAST_POSITION), (LAST_SEED, LAST_POSITION)]
    keys += [(7919 * index + 2**60, index) for index in range(16)]
    rows = [(row, key) for key in keys for row in shaped_rows(shape, SMALL, seed=key[1] % 1_000)]
    rows += zip(shaped_rows(shape, LARGE), keys, strict=False)
    for row, (seed, position) in rows:
        log_probs = row.log_softmax(0)
        sample = coupled_sample(log_probs, seed, position)
        assert sample == plainly(coupled_sample, log_probs, seed, position)


def test_a_row_need_not_be_normalised() -> None:
    """Scores far from 0 on either side give the sample of the same scores around 0 (60 rows of quarters)."""
    for index, row in enumerate(shaped_rows("broad", [700] * 60)):
        quarters = (row * 4.0).round() / 4.0  # so that adding is exact
        samples = {coupled_sample(quarters + offset, index, 1) for offset in (-64.0, 0.0, 64.0)}
        assert len(samples) == 1


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (LAST_SEED, LAST_POSITION), (2**63, 12_345)])
def test_noise_is_that_of_the_noise_module(seed: int, position: int) -> None:
    """All 53 bits of 2,000 numbers, before they are rounded to float32."""
    key = np.uint64(noise.stream_key(seed, position, Purpose.TARGET_SAMPLE))
    rounded = np.empty(2_000, np.float32)
    row_kernels._complements(key, 0, rounded)
    counters = noise.first_counters(2_000, torch.device("cpu"))
    exact = noise.complements(counters, seed=seed, position=position, purpose=Purpose.TARGET_SAMPLE)
    assert np.array_equal(rounded, exact.numpy().astype(np.float32))


def test_a_bound_is_above_the_score_and_no_further_than_stated() -> None:
    """Of 5,000 tokens: a score reaches its bound but for the slack, and lies, where noise is large, within 0.087 * log
    2 of it; both are differences of logarithms to base 2."""
    log_probs = next(shaped_rows("broad", [5_000])).log_softmax(0)
    key = np.uint64(noise.stream_key(5, 6, Purpose.TARGET_SAMPLE))
    bounds, complements = np.empty(512, np.int32), np.empty(512, np.float32)
    for block in range(9):
        row_kernels._bound_block(log_probs.numpy(), block, np.float32(0.0), key, bounds, complements)
        for entry, bound in enumerate(bounds.tolist()):
            gumbel = noise.gumbel(5, 6, 512 * block + entry)
            to_reach = row_kernels._to_reach(float(log_probs[512 * block + entry]) + gumbel)
            assert bound >= to_reach
            if gumbel > 6.0:
                assert bound - to_reach < 0.09 * 2**23


@pytest.mark.parametrize("row", [[-INFINITY] * 600, [0.0, math.nan, 1.0], [0.0] * 700 + [math.nan], [0.0, INFINITY]])
def test_what_is_no_distribution_is_refused(row: list[float]) -> None:
    """Nothing possible, NaN anywhere, or an infinite score: the error of the plain algorithm."""
    for call in (
        lambda: coupled_sample(torch.tensor(row), 1, 2),
        lambda: target_log_probs(torch.tensor(row), SamplingParams(top_p=0.9), EMPTY, ()),
        lambda: argmax_token(torch.tensor(row), GREEDY, EMPTY, ()),
    ):
        with pytest.raises(DistributionUnusable):
            call()
        with pytest.raises(DistributionUnusable):
            plainly(call)


# ---- top-k, top-p, min-p --------------------------------------------------------------------------------------------

FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.95, "temperature": 0.8},
    {"top_p": 0.5},
    {"top_p": 0.999999},
    {"top_p": 1e-6, "temperature": 1e-3},
    {"top_k": 1},
    {"top_k": 50, "temperature": 0.8},
    {"top_k": 600, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 10**6, "temperature": 100.0},
    {"min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.3},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_filtered_rows_are_those_of_the_plain_algorithm(shape: str, params: dict[str, Any]) -> None:
    """14 rows of 1 to 3,333 tokens and one of 10,001, of each shape, with each filter: the same bits, -inf included."""
    for row in shaped_rows(shape, [*SMALL, 10_001]):
        log_probs = target_log_probs(row, SamplingParams(**params), EMPTY, ())
        assert log_probs.equal(plainly(target_log_probs, row, SamplingParams(**params), EMPTY, ()))


@pytest.mark.parametrize("vocab_size", LARGE)
@pytest.mark.parametrize("shape", ["broad", "bfloat16"])
def test_filtered_rows_of_large_vocabularies_are_those_of_the_plain_algorithm(shape: str, vocab_size: int) -> None:
    """One row of each shape and size."""
    for row in shaped_rows(shape, [vocab_size], seed=4):
        for params in (SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(top_k=50)):
            log_probs = target_log_probs(row, params, EMPTY, ())
            assert log_probs.equal(plainly(target_log_probs, row, params, EMPTY, ()))


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False)
        | st.floats(-(2.0**-125), 2.0**-125, width=32)
        | st.sampled_from([0.0, -0.0, 1.0, -1.0, -INFINITY]),
        min_size=1,
        max_size=40,
    ),
    params=st.sampled_from(FILTERS),
)
def test_no_float_is_too_odd(scores: list[float], params: dict[str, Any]) -> None:
    """Denormal differences, both zeros, the largest numbers: the same bits, or the same error."""
    row = torch.tensor([*scores, 0.0])
    log_probs = target_log_probs(row, SamplingParams(**params), EMPTY, ())
    assert log_probs.equal(plainly(target_log_probs, row, SamplingParams(**params), EMPTY, ()))


@pytest.mark.parametrize("shape", ["flat", "broad", "bfloat16"])
def test_a_sum_that_ends_on_the_limit_is_left_to_the_plain_algorithm(shape: str) -> None:
    """With the very sum of the first 20 for a limit, and its neighbours, the last bit decides whether one more is kept
    (3 limits for each of 14 rows)."""
    for row in shaped_rows(shape, [100 + 77 * index for index in range(14)]):
        scores = row - row.amax()
        sums = (scores.sort(descending=True).values - scores.logsumexp(0)).double().exp().cumsum(0)
        limit = float(sums[19])
        for top_p in (limit, math.nextafter(limit, 0.0), math.nextafter(limit, 1.0)):
            assert row_kernels.nucleus_cutoff(scores, top_p) is None
            params = SamplingParams(top_p=top_p)
            log_probs = target_log_probs(row, params, EMPTY, ())
            assert log_probs.equal(plainly(target_log_probs, row, params, EMPTY, ()))


@pytest.mark.parametrize("shape", ["broad", "peaked", "nearly flat", "bfloat16", "masked"])
def test_hardly_any_row_is_left_to_the_plain_algorithm(shape: str) -> None:
    """40 rows of 20,000 tokens are all decided; the odds against are about 1 in 10,000 for each, where float32 finds the
    wrong bucket."""
    for row in shaped_rows(shape, [20_000] * 40):
        scores = row - row.amax()
        assert row_kernels.nucleus_cutoff(scores, 0.95) is not None
        assert row_kernels.top_k_cutoff(scores, 50) is not None


def test_the_exponential_is_precise() -> None:
    """10,000 exponents from -100 to 0, and some far below."""
    exponents = np.random.default_rng(1).uniform(-100.0, 0.0, 10_000)
    values = np.array([row_kernels._exp(exponent) for exponent in exponents])
    assert np.abs(values / np.exp(exponents) - 1.0).max() < 1e-14
    assert row_kernels._exp(0.0) == 1.0
    assert 0.0 <= row_kernels._exp(-INFINITY) < 1e-300


# ---- the arg max ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_arg_max_is_that_of_torch(shape: str, dtype: torch.dtype) -> None:
    """15 rows of each shape and type, with many ties among them: the same id by both doors."""
    for row in shaped_rows(shape, [*SMALL, LARGE[0]]):
        logits = row.clamp(min=-6e4).to(dtype)
        token_id = int(logits.double().argmax())
        assert argmax_token(logits, GREEDY, EMPTY, ()) == token_id
        assert int(target_log_probs(logits, GREEDY, EMPTY, ()).argmax()) == token_id


def test_zeros_of_either_sign_are_a_tie() -> None:
    """Which the lowest id wins."""
    assert argmax_token(torch.tensor([-1.0, -0.0, 0.0, -0.0]), GREEDY, EMPTY, ()) == 1


# ---- who is served --------------------------------------------------------------------------------------------------


def test_kernels_take_rows_of_float32_that_lie_side_by_side() -> None:
    """All else is left to torch, with the same samples."""
    row = next(shaped_rows("broad", [800])).log_softmax(0)
    assert sampling._has_kernels(row)
    strided = torch.stack((row, row), 1)[:, 0]
    for other in (row.double(), row.half(), row.bfloat16(), strided, row.to("meta"), row[:0]):
        assert not sampling._has_kernels(other)
    assert coupled_sample(row, 3, 4) == coupled_sample(strided, 3, 4) == coupled_sample(row.double(), 3, 4)


def test_inputs_are_not_changed() -> None:
    """Not even where a row is read in place."""
    row = next(shaped_rows("broad", [800]))
    before = row.clone()
    for params in FILTERS:
        log_probs = target_log_probs(row, SamplingParams(**params), EMPTY, ())
        kept = log_probs.clone()
        coupled_sample(log_probs, 1, 2)
        assert row.equal(before)
        assert log_probs.equal(kept)


def test_a_coupled_ranking_scores_as_the_noise_does() -> None:
    """40 rows of 1,500 tokens, flat and certain, compared to the bit with scores computed one by one in Python."""
    generator = torch.Generator().manual_seed(5)
    for position in range(40):
        log_probs = ((0.1, 2.0, 9.0)[position % 3] * torch.randn(1500, generator=generator)).log_softmax(0)
        scored = [
            (float(log_prob) + noise.gumbel(8, position, token_id), -token_id)
            for token_id, log_prob in enumerate(log_probs)
        ]
        scores, ids = row_kernels.coupled_rankings(log_probs[None], [8], [position], 9)
        expected = sorted(scored, reverse=True)[:9]
        assert list(zip(scores[0].tolist(), ids[0].neg().tolist(), strict=True)) == expected


def test_tokens_out_of_the_race_are_not_ranked() -> None:
    """Far below the peak, or impossible: the scores in their places are -inf."""
    log_probs = torch.full((600,), -math.inf)
    log_probs[[5, 590, 30]] = torch.tensor([-0.1, -2.4, -90.0])
    scores, ids = row_kernels.coupled_rankings(log_probs[None], [1], [2], 4)
    assert sorted(ids[0, :2].tolist()) == [5, 590]
    assert scores[0, 2:].tolist() == [-math.inf, -math.inf]
