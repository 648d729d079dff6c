"""The target distribution at one row, and the ways to draw from it.

Random tests have fixed seeds, so their outcome does not change from run to run; the odds stated are those of a false
alarm had the seeds been drawn afresh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import noise, sampling
from paceline.errors import PacelineError, PayloadInvalid
from paceline.noise import Purpose
from paceline.sampling import (
    DistributionUnusable,
    SparseDistribution,
    TokenHistory,
    argmax_token,
    coupled_sample,
    draw,
    draw_draft_token,
    raw_log_probs,
    target_log_probs,
    truncate_to_top,
)
from paceline.types import SamplingParams, VerificationRule
from tests.exactness.chi_square import SIGNIFICANCE, chi_square_p_value

INFINITY = math.inf
EMPTY = TokenHistory(())


def target_probs(logits: Tensor | Sequence[float], history: TokenHistory = EMPTY, **params: Any) -> Tensor:
    row = torch.as_tensor(logits, dtype=torch.float64)
    return target_log_probs(row, SamplingParams(**params), history, ()).exp()


def seeded_row(vocab_size: int, *, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


# ---- adjusting logits -----------------------------------------------------------------------------------------------


def test_without_settings_the_row_is_the_softmax() -> None:
    """Nothing set: the log-softmax of the logits, to the bit."""
    row = seeded_row(100)
    assert target_log_probs(row, SamplingParams(), EMPTY, ()).equal(row.log_softmax(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    """A half precision row gives what the same numbers in float32 give."""
    row = seeded_row(1_000).to(dtype)
    params = SamplingParams(temperature=0.7, top_p=0.9)
    log_probs = target_log_probs(row, params, EMPTY, ())
    assert log_probs.dtype == torch.float32
    assert log_probs.equal(target_log_probs(row.float(), params, EMPTY, ()))


def test_float64_logits_stay_float64() -> None:
    """Small cases can be enumerated to 1e-12, since double rows are not rounded."""
    probs = target_probs([math.log(0.5), math.log(0.3), math.log(0.2)], temperature=0.5)
    assert probs.dtype == torch.float64
    assert probs.tolist() == pytest.approx([25 / 38, 9 / 38, 4 / 38], abs=1e-15)


def test_repetition_penalty_looks_at_prompt_and_output() -> None:
    """Positive logits of seen tokens are divided, negative ones multiplied; a token seen twice counts once."""
    history = TokenHistory([0, 0, 1], [1, 2])
    log_probs = target_log_probs(
        torch.tensor([2.0, -2.0, 4.0, 1.0]), SamplingParams(repetition_penalty=2.0), history, ()
    )
    assert log_probs.tolist() == pytest.approx(torch.tensor([1.0, -4.0, 2.0, 1.0]).log_softmax(0).tolist())


def test_presence_and_frequency_penalties_look_at_the_output_alone() -> None:
    """Each occurrence in the output costs the frequency penalty, the first one the presence penalty too; the prompt
    costs nothing."""
    history = TokenHistory([0, 0, 0], [1, 2, 2])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    log_probs = target_log_probs(torch.zeros(4), params, history, (2, 3))
    assert log_probs.tolist() == pytest.approx(torch.tensor([0.0, -0.75, -1.25, -0.75]).log_softmax(0).tolist())


PENALTIES = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.37, frequency_penalty=0.21, min_tokens=4, stop_token_ids=(9,)
)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=8), st.lists(st.integers(0, 30), max_size=8))
def test_drafted_tokens_count_as_output_to_the_bit(output_ids: list[int], drafted: list[int]) -> None:
    """A row behind drafted tokens equals the row once they are committed: draft lengths cannot show in the output
    (C19)."""
    row = seeded_row(31)
    as_draft = target_log_probs(row, PENALTIES, TokenHistory([5, 6], output_ids), drafted)
    as_output = target_log_probs(row, PENALTIES, TokenHistory([5, 6], output_ids + drafted), ())
    assert as_draft.equal(as_output)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), max_size=5), max_size=5))
def test_history_that_grew_equals_history_built_at_once(runs: list[list[int]]) -> None:
    """`extend`, in runs of any length, leads to the history of all tokens together."""
    grown = TokenHistory([1, 2])
    for run in runs:
        grown.extend(run)
    at_once = TokenHistory([1, 2], [token_id for run in runs for token_id in run])
    assert grown.output_length == at_once.output_length
    row = seeded_row(31)
    assert target_log_probs(row, PENALTIES, grown, ()).equal(target_log_probs(row, PENALTIES, at_once, ()))


def test_logit_bias_is_added_to_its_tokens() -> None:
    """A bias moves its token alone, and several on one token add up."""
    log_probs = target_log_probs(torch.zeros(4), SamplingParams(logit_bias=((1, 2.0), (3, -1.0), (1, 0.5))), EMPTY, ())
    assert log_probs.tolist() == pytest.approx(torch.tensor([0.0, 2.5, 0.0, -1.0]).log_softmax(0).tolist())


def test_banned_tokens_have_probability_zero_and_allowed_ones_share_the_rest() -> None:
    """Banned beats allowed, and everything that is not allowed is out."""
    assert target_probs([0.0, 0.0, 0.0, 0.0], banned_token_ids=(1,)).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    probs = target_probs([0.0, 0.0, 0.0, 0.0], banned_token_ids=(1,), allowed_token_ids=(1, 2, 3, 3))
    assert probs.tolist() == pytest.approx([0, 0, 0.5, 0.5])


def test_stop_tokens_are_out_until_min_tokens_are_out() -> None:
    """With min_tokens 3 the stop token is impossible at outputs 0, 1, 2, drafted tokens included, and possible then."""
    params = SamplingParams(min_tokens=3, stop_token_ids=(0,))
    for output_length, drafted_length, is_possible in [(0, 0, False), (1, 1, False), (2, 0, False), (2, 1, True)]:
        history = TokenHistory([0, 0, 0, 0], [1] * output_length)
        log_probs = target_log_probs(torch.zeros(3), params, history, [1] * drafted_length)
        assert math.isfinite(log_probs[0]) == is_possible


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.01),
        PENALTIES,
        SamplingParams(logit_bias=((1, 1.0),), banned_token_ids=(2,), allowed_token_ids=(1, 2, 3)),
    ],
)
def test_inputs_are_never_changed(params: SamplingParams) -> None:
    """Logits and history are as before, whatever the settings."""
    row, history = seeded_row(50), TokenHistory([1, 2], [3])
    before = row.clone()
    log_probs = target_log_probs(row, params, history, (4, 5))
    argmax_token(row, params, history, (4, 5))
    log_probs_before = log_probs.clone()
    coupled_sample(log_probs, 1, 2)
    truncate_to_top(log_probs)
    assert row.equal(before)
    assert log_probs.equal(log_probs_before)
    assert (history.output_length, dict(history.output_counts(()))) == (1, {3: 1})


# ---- temperature ----------------------------------------------------------------------------------------------------


def test_temperature_zero_is_one_hot_at_the_arg_max() -> None:
    """All probability is on the best token, after penalties and bias."""
    assert target_probs([1.0, 3.0, 2.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0]
    assert target_probs([1.0, 3.0, 2.0], temperature=0.0, logit_bias=((0, 5.0),)).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("vocab_size", [4, 100, 151_936])
def test_greedy_takes_the_lowest_id_of_a_tie(vocab_size: int) -> None:
    """An exact tie goes to the lowest id, and a token 1e-6 ahead wins from wherever it is (C18)."""
    greedy = SamplingParams(temperature=0.0)
    row = torch.zeros(vocab_size)
    row[[vocab_size - 1, vocab_size // 2, 2]] = 1.0
    assert argmax_token(row, greedy, EMPTY, ()) == 2
    assert int(target_log_probs(row, greedy, EMPTY, ()).argmax()) == 2
    row[vocab_size - 1] += 1e-6
    assert argmax_token(row, greedy, EMPTY, ()) == vocab_size - 1


def test_the_arg_max_needs_no_softmax_and_agrees_with_it() -> None:
    """`argmax_token` is the token that the temperature 0 distribution puts everything on, with penalties and bans."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, banned_token_ids=(3,), logit_bias=((5, 1.0),))
    for seed in range(50):
        row, history = seeded_row(12, spread=1.0, seed=seed), TokenHistory([], [seed % 12, 7])
        one_hot = target_log_probs(row, params, history, (2,))
        assert argmax_token(row, params, history, (2,)) == int(one_hot.exp().argmax())


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_temperature_and_any_size_of_logits_gives_a_distribution(temperature: float, scale: float) -> None:
    """From logits of 1e-30 to 1e30 at temperatures from 1e-6 to 100: no overflow, no NaN, a sum of 1."""
    row = seeded_row(200) * scale
    row[13] = -INFINITY
    log_probs = target_log_probs(row, SamplingParams(temperature=temperature), EMPTY, ())
    assert float(log_probs.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(log_probs[13]) == -INFINITY
    assert 0 <= coupled_sample(log_probs, 1, 2) < 200


@pytest.mark.parametrize("bad", [math.nan, INFINITY])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("place", [0, 50, 999])
def test_logits_that_are_no_scores_are_refused(bad: float, params: SamplingParams, place: int) -> None:
    """One NaN or +inf anywhere is a typed error that says so, never a token."""
    row = seeded_row(1_000)
    row[place] = bad
    for function in (target_log_probs, argmax_token):
        with pytest.raises(DistributionUnusable, match="no usable scores"):
            function(row, params, EMPTY, ())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5)])
def test_a_row_without_any_possible_token_is_refused(params: SamplingParams) -> None:
    """Nothing left after masks: a typed error, never an invalid id (C10)."""
    for function in (target_log_probs, argmax_token):
        with pytest.raises(DistributionUnusable, match="No token is left"):
            function(torch.full((100,), -INFINITY), params, EMPTY, ())


def test_settings_that_forbid_every_token_are_refused() -> None:
    """A stop token that is the only one allowed, and banned by min_tokens, leaves nothing: a typed error."""
    params = SamplingParams(min_tokens=1, stop_token_ids=(1,), allowed_token_ids=(1,))
    with pytest.raises(PacelineError, match="No token is left"):
        target_log_probs(torch.zeros(3), params, EMPTY, ())


# ---- top-k, top-p, min-p --------------------------------------------------------------------------------------------


def test_top_k_keeps_the_k_best_and_the_lowest_ids_of_a_tie() -> None:
    """Of four tokens tied for the last place the lowest id stays."""
    assert target_probs([0.0, 1.0, 0.0, 2.0, 0.0, 0.0], top_k=3).nonzero().flatten().tolist() == [0, 1, 3]
    assert target_probs([0.0] * 6, top_k=2).tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_top_k_beyond_the_possible_tokens_changes_nothing() -> None:
    """k above the vocabulary, or above what masks have left, keeps what there is."""
    row = [0.0, 1.0, -INFINITY, 2.0]
    assert target_probs(row, top_k=9).tolist() == pytest.approx(target_probs(row).tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """The token that crosses top_p stays, the ones behind it go."""
    row = torch.tensor([0.1, 0.2, 0.4, 0.25, 0.05], dtype=torch.float64).log()
    assert target_probs(row, top_p=0.64).tolist() == pytest.approx([0, 0, 0.4 / 0.65, 0.25 / 0.65, 0])
    assert target_probs(row, top_p=0.66).tolist() == pytest.approx([0, 0.2 / 0.85, 0.4 / 0.85, 0.25 / 0.85, 0])
    assert target_probs(row, top_p=1e-9).tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_top_p_is_taken_of_what_top_k_left() -> None:
    """The order is top-k, then top-p on the renormalised rest: 0.4 of 0.65 is above 0.6."""
    row = torch.tensor([0.1, 0.2, 0.4, 0.25, 0.05], dtype=torch.float64).log()
    assert target_probs(row, top_k=2, top_p=0.6).tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_temperature_comes_before_the_filters() -> None:
    """top_p and min_p look at the row after temperature: heating it lets more tokens in."""
    row = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    assert int((target_probs(row, top_p=0.6) > 0).sum()) == 1
    assert int((target_probs(row, top_p=0.6, temperature=2.0) > 0).sum()) == 2
    assert int((target_probs(row, min_p=0.4) > 0).sum()) == 2
    assert int((target_probs(row, min_p=0.4, temperature=2.0) > 0).sum()) == 3


def test_min_p_drops_tokens_below_a_share_of_the_best() -> None:
    """min_p 0.1 with the best at 0.6: no token under 0.06 (C21)."""
    row = torch.tensor([0.6, 0.2, 0.07, 0.065, 0.059, 0.006], dtype=torch.float64).log()
    assert target_probs(row, min_p=0.1).nonzero().flatten().tolist() == [0, 1, 2, 3]


def reference_filter(row: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The kept ids by the plainest means: sort everything, walk from the top."""
    scores = row.double().softmax(0)
    ranked = sorted(range(row.numel()), key=lambda token_id: (-float(row[token_id]), token_id))
    ranked = [token_id for token_id in ranked if float(row[token_id]) > -INFINITY]
    ranked = ranked[:top_k] if top_k else ranked
    mass, needed, kept = sum(float(scores[token_id]) for token_id in ranked), 0.0, []
    for token_id in ranked:
        if top_p < 1.0 and needed >= top_p * mass:
            break
        kept.append(token_id)
        needed += float(scores[token_id])
    return {token_id for token_id in kept if float(row[token_id]) >= float(row[ranked[0]]) + math.log(min_p or 1e-300)}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([2, 5, 64, 300, 1_500]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 12.0]),
    has_ties=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 20, 400]),
    top_p=st.sampled_from([1.0, 0.99901, 0.89917, 0.50023, 0.01001]),  # met exactly by no flat row
    min_p=st.sampled_from([0.0, 0.001, 0.1]),
)
def test_filters_keep_what_sorting_the_whole_row_keeps(
    *, seed: int, vocab_size: int, spread: float, has_ties: bool, top_k: int, top_p: float, min_p: float
) -> None:
    """Flat, peaked and tied rows, in every combination of the three filters: the support of the plain algorithm."""
    row = seeded_row(vocab_size, spread=spread, seed=seed).double()
    # Quarters: many exact ties, and no two candidates that only rounding would order.
    row = (row * 4).round() / 4 if has_ties else row
    row[row < -8.0] = -INFINITY
    row[0] = 0.0
    probs = target_probs(row, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(probs.nonzero().flatten().tolist()) == reference_filter(row, top_k, top_p, min_p)
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("spread", [0.0, 2.0, 4.0])
def test_top_p_over_a_large_vocabulary_has_the_right_mass_and_no_token_too_many(spread: float) -> None:
    """151,936 tokens, from flat to broad, so that every depth of search is used: the kept mass reaches top_p, and
    without the least kept token it would not."""
    row = seeded_row(151_936, spread=spread).double()
    probs, kept = row.softmax(0), target_probs(row, top_p=0.95) > 0
    mass = float(probs[kept].sum())
    assert mass >= 0.95 - 1e-12
    assert mass - float(probs[kept].min()) < 0.95
    assert float(probs[kept].min()) >= float(probs[~kept].max())


# ---- the coupled sample ---------------------------------------------------------------------------------------------


def naive_coupled_sample(log_probs: Tensor, seed: int, position: int) -> int:
    """The definition: every token scored with its Gumbel noise, the highest score, lowest id on a tie."""
    gumbels = [noise.gumbel(seed, position, token_id) for token_id in range(log_probs.numel())]
    scores = [log_prob + gumbel for log_prob, gumbel in zip(log_probs.tolist(), gumbels, strict=True)]
    return scores.index(max(scores))


def shaped_row(shape: str, vocab_size: int, seed: int) -> Tensor:
    """Rows that are easy or nasty to prune; [vocab_size] float32, normalised."""
    row = seeded_row(vocab_size, seed=seed)
    if shape == "flat":
        row = torch.zeros(vocab_size)
    elif shape == "peaked":
        row[seed % vocab_size] += 30.0
    elif shape == "wide":
        row *= 40.0  # most probabilities underflow in float32
    elif shape == "steps":
        row = row.round()
    elif shape == "sparse":
        row[torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.95] = -INFINITY
        row[seed % vocab_size] = 0.0
    elif shape == "one possible":
        row[:] = -INFINITY
        row[seed % vocab_size] = 0.0
    return row.log_softmax(0)


SHAPES = ["normal", "flat", "peaked", "wide", "steps", "sparse", "one possible"]


@pytest.mark.parametrize("scored_first", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 100_000), st.integers(1, 2_000))
def test_the_coupled_sample_is_exactly_the_naive_one(
    scored_first: int, shape: str, seed: int, position: int, vocab_size: int
) -> None:
    """Pruning never changes the winner, for rows of every shape; scoring a single token first puts the whole burden
    on the bound that decides who else may win."""
    log_probs = shaped_row(shape, vocab_size, seed % 1_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_SCORED_FIRST", scored_first)
        assert coupled_sample(log_probs, seed, position) == naive_coupled_sample(log_probs, seed, position)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_coupled_sample_is_exactly_the_naive_one_over_a_large_vocabulary(shape: str) -> None:
    """The same at 151,936 tokens, where the vectorised kernels and the search by blocks are in use."""
    log_probs = shaped_row(shape, 151_936, 3)
    assert coupled_sample(log_probs, 11, 12) == naive_coupled_sample(log_probs, 11, 12)


def test_the_coupled_sample_does_not_depend_on_precision_where_scores_do_not() -> None:
    """A float64 row and its float32 copy with the same numbers give the same token (500 rows)."""
    for seed in range(500):
        log_probs = shaped_row("normal", 300, seed)
        assert coupled_sample(log_probs, seed, 4) == coupled_sample(log_probs.double(), seed, 4)


def test_an_exact_tie_of_scores_goes_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise taken away a flat row is one great tie: token 0 wins (C18)."""
    monkeypatch.setattr(noise, "gumbel", lambda seed, position, index: 0.0)
    assert coupled_sample(torch.zeros(10).log_softmax(0), 1, 2) == 0


@pytest.mark.parametrize("vocab_size", [5, 40, 1_000])
def test_the_coupled_sample_follows_the_distribution(vocab_size: int) -> None:
    """20,000 seeds, small, pruned and sparse rows: chi-square p above 1e-4 over tokens, the rare ones in one cell."""
    log_probs = seeded_row(vocab_size, spread=1.5).log_softmax(0)
    drawn = torch.tensor([coupled_sample(log_probs, seed, 9) for seed in range(20_000)])
    counts, law = torch.bincount(drawn, minlength=vocab_size), log_probs.double().softmax(0)
    is_rare = law * 20_000 < 10
    counts = torch.cat((counts[~is_rare], counts[is_rare].sum(0, keepdim=True)))
    law = torch.cat((law[~is_rare], law[is_rare].sum(0, keepdim=True)))
    assert chi_square_p_value(counts, law) > SIGNIFICANCE


def test_a_row_without_probability_cannot_be_sampled() -> None:
    """A row that is all -inf or holds NaN is a typed error."""
    for row in (torch.full((50,), -INFINITY), torch.tensor([0.0, math.nan, -1.0])):
        with pytest.raises(DistributionUnusable):
            coupled_sample(row, 1, 2)


# ---- drawing by one uniform -----------------------------------------------------------------------------------------

LOWEST_UNIFORM, HIGHEST_UNIFORM = 2.0**-53, 1.0 - 2.0**-53


def test_draw_inverts_the_cumulative_weights() -> None:
    """A uniform just below a boundary gives the entry before it, at the boundary the entry behind it; weights need no
    normalisation."""
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0], dtype=torch.float64)
    boundaries = [(LOWEST_UNIFORM, 0), (0.1249, 0), (0.125, 1), (0.3749, 1), (0.375, 3), (HIGHEST_UNIFORM, 3)]
    assert [draw(weights, number) for number, _ in boundaries] == [index for _, index in boundaries]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1e-17, 0.1, 0.3, 1.0, 7.0, 1e17]), min_size=1, max_size=30).filter(
        any
    ),
    st.integers(0, 2**52 - 1).map(lambda half: (2 * half + 1) * 2.0**-53)
    | st.sampled_from([LOWEST_UNIFORM, HIGHEST_UNIFORM]),
)
def test_draw_never_returns_an_entry_of_weight_zero(weights: list[float], number: float) -> None:
    """Whatever the weights and the uniform, the index is one of positive weight (C09, C11)."""
    index = draw(torch.tensor(weights, dtype=torch.float64), number)
    assert 0 <= index < len(weights)
    assert weights[index] > 0.0


@pytest.mark.parametrize("vocab_size", [100, 8_193, 151_936])
def test_draw_from_a_long_row_stays_on_its_support(vocab_size: int) -> None:
    """One possible token among zeros, first, last or between, is found at both ends of the unit interval (C09)."""
    for place in (0, vocab_size // 2, vocab_size - 1):
        weights = torch.zeros(vocab_size, dtype=torch.float64)
        weights[place] = 1e-12
        assert {draw(weights, LOWEST_UNIFORM), draw(weights, 0.5), draw(weights, HIGHEST_UNIFORM)} == {place}


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, math.nan], [1.0, INFINITY]])
def test_weights_that_are_no_distribution_are_refused(weights: list[float]) -> None:
    """All zero, NaN or infinite weights are a typed error, not an index (C10)."""
    with pytest.raises(DistributionUnusable):
        draw(torch.tensor(weights, dtype=torch.float64), 0.5)


# ---- drafting -------------------------------------------------------------------------------------------------------


def test_probability_is_the_share_of_the_sum_and_zero_elsewhere() -> None:
    """Probabilities are normalised by their own sum in float64."""
    distribution = SparseDistribution(torch.tensor([7, 2]), torch.tensor([0.3, 0.1]))
    total = distribution.probs.double().sum()
    assert distribution.probability(7) == float(distribution.probs[0].double() / total)
    assert distribution.probability(7) + distribution.probability(2) == pytest.approx(1.0, abs=1e-15)
    assert distribution.probability(3) == 0.0


@pytest.mark.parametrize(
    ("ids", "probs"),
    [
        ([], []),
        ([1, 2], [1.0]),
        ([1, 1], [0.5, 0.5]),
        ([1, 2], [0.0, 0.0]),
        ([1, 2], [0.5, -0.1]),
        ([1], [math.nan]),
        ([1], [INFINITY]),
    ],
)
def test_what_is_no_distribution_is_refused(ids: list[int], probs: list[float]) -> None:
    """Empty, misshapen, with an id twice, negative, zero or non-finite: a typed error that concerns this payload."""
    with pytest.raises(PayloadInvalid):
        SparseDistribution(torch.tensor(ids, dtype=torch.int64), torch.tensor(probs))


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("max_entries", [1, 64, 5_000])
def test_truncated_distributions_survive_the_wire_unchanged(spread: float, max_entries: int) -> None:
    """Every probability is a normal float16 number, so packing as float16 changes nothing of what was drawn from, and
    they add up to 1 but for rounding."""
    distribution = truncate_to_top(seeded_row(5_000, spread=spread).log_softmax(0), max_entries)
    assert 1 <= distribution.ids.numel() <= max_entries
    assert distribution.probs.half().to(distribution.probs.dtype).equal(distribution.probs)
    assert float(distribution.probs.min()) >= 2.0**-14
    assert float(distribution.probs.double().sum()) == pytest.approx(1.0, abs=1e-3)


def test_truncation_keeps_the_most_probable_tokens() -> None:
    """The kept entries are the top of the row, in proportion to it, and a -inf token is never among them."""
    row = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05]).log()
    assert truncate_to_top(row, 2).ids.tolist() == [0, 1]
    assert truncate_to_top(row, 2).probability(0) == pytest.approx(0.625, abs=1e-3)
    assert sorted(truncate_to_top(row).ids.tolist()) == [0, 1, 3, 4]
    assert truncate_to_top(torch.tensor([-INFINITY, 0.0])).ids.tolist() == [1]


DRAFT_RULES = list(VerificationRule)


def draft(row: Tensor, rule: VerificationRule, seed: int, **params: Any) -> tuple[int, SparseDistribution | None]:
    return draw_draft_token(
        row, params=SamplingParams(**params), rule=rule, history=EMPTY, drafted=(), seed=seed, position=6
    )


def test_only_rejection_sends_a_distribution_and_it_holds_the_draft() -> None:
    """Greedy and coupled drafts are ids alone; a rejection draft has probability above 0 in what is sent with it and
    nothing outside the allowed set does (C01)."""
    row = seeded_row(500)
    for seed in range(100):
        assert draft(row, VerificationRule.GREEDY, seed, temperature=0.0) == (int(row.argmax()), None)
        assert draft(row, VerificationRule.COUPLED, seed)[1] is None
        token_id, distribution = draft(row, VerificationRule.REJECTION, seed, top_k=5)
        assert distribution is not None
        assert distribution.probability(token_id) > 0.0
        assert sum(distribution.shares.values()) == pytest.approx(1.0, abs=1e-12)
        assert set(distribution.ids.tolist()) <= set(row.topk(5).indices.tolist())


def test_rejection_drafts_follow_the_distribution_sent_with_them() -> None:
    """20,000 drafts from a row of 300 tokens: chi-square p above 1e-4 against the truncated, rounded distribution."""
    row = seeded_row(300, spread=1.0)
    drawn = torch.tensor([draft(row, VerificationRule.REJECTION, seed)[0] for seed in range(20_000)])
    _, distribution = draft(row, VerificationRule.REJECTION, 0)
    assert distribution is not None
    law = torch.tensor([distribution.probability(token_id) for token_id in range(300)], dtype=torch.float64)
    assert chi_square_p_value(torch.bincount(drawn, minlength=300), law) > SIGNIFICANCE


def test_a_coupled_drafter_equal_to_the_target_guesses_its_sample() -> None:
    """Drafter and target share the noise: from the same row they draw the same token, for 300 seeds and with filters."""
    row, params = seeded_row(2_000), SamplingParams(temperature=0.8, top_p=0.9)
    for seed in range(300):
        token_id, _ = draft(row, VerificationRule.COUPLED, seed, temperature=0.8, top_p=0.9)
        assert token_id == coupled_sample(target_log_probs(row, params, EMPTY, ()), seed, 6)


@pytest.mark.parametrize("rule", DRAFT_RULES)
def test_at_temperature_zero_the_seed_changes_nothing(rule: VerificationRule) -> None:
    """Seeds 0 to 9 give ten identical drafts at temperature 0, under whatever rule (C12)."""
    row = seeded_row(1_000)
    drafted = {draft(row, rule, seed, temperature=0.0)[0] for seed in range(10)}
    assert drafted == {int(row.argmax())}


def test_acceptance_and_correction_do_not_read_the_numbers_of_the_draft() -> None:
    """The draft is drawn with the DRAFT_SAMPLE number of its position, and of no other purpose."""
    row = seeded_row(300, spread=1.0)
    token_id, distribution = draft(row, VerificationRule.REJECTION, 77)
    assert distribution is not None
    number = noise.uniform(77, 6, Purpose.DRAFT_SAMPLE)
    assert token_id == int(distribution.ids[draw(distribution.probs.double(), number)])


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [7, 40_000])
def test_most_probable_tokens_are_ordered_and_ties_go_to_the_lowest_ids(vocab_size: int) -> None:
    """Also where the tie goes on behind the last that is asked for."""
    logits = torch.zeros(vocab_size)
    logits[[5, 1, 3]] = torch.tensor([2.0, 1.0, 2.0])
    named, top = raw_log_probs(logits, [6, 5], top=5)
    log_probs = logits.log_softmax(0).tolist()
    assert named == [log_probs[6], log_probs[5]]
    assert top == tuple((token_id, log_probs[token_id]) for token_id in (3, 5, 1, 0, 2))


def test_tokens_without_any_probability_are_never_among_the_most_probable() -> None:
    """There are fewer, then, also where the vocabulary is smaller than what is asked for."""
    logits = torch.tensor([0.0, -math.inf, 0.0])
    assert raw_log_probs(logits, [1], top=20)[0] == [-math.inf]
    assert [token_id for token_id, _ in raw_log_probs(logits, [0], top=20)[1]] == [0, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_float32(dtype: torch.dtype) -> None:
    """Whatever the model computes in, so that the wire carries exactly what the target reports."""
    logits = torch.randn(100, generator=torch.Generator().manual_seed(3)).to(dtype)
    named, _ = raw_log_probs(logits, range(100), top=0)
    assert torch.equal(torch.tensor(named, dtype=torch.float32), logits.float().log_softmax(0))
