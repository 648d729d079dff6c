"""The values that travel: what is refused at once, how drafts are cut and joined, what the counts mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.types import Draft, DraftOrigin, SamplingParams, SessionSpec, SpeculationStats, VerificationRule

# ---- sampling parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("temperature", [-0.1, 1e-9, 100.1, math.nan, math.inf]),
        ("top_k", [-1]),
        ("top_p", [0.0, -0.5, 1.1, math.nan]),
        ("min_p", [-0.1, 1.0, math.nan]),
        ("repetition_penalty", [0.0, 0.009, -1.0, 100.5, math.nan, math.inf]),
        ("presence_penalty", [-100.5, 100.5, math.nan]),
        ("frequency_penalty", [-100.5, 100.5, math.inf]),
        ("logit_bias", [((0, 1000.5),), ((0, math.nan),), ((-1, 1.0),), ((3, 1.0), (4, -math.inf))]),
        ("allowed_token_ids", [()]),
        ("min_tokens", [-1]),
    ],
)
def test_value_out_of_range_is_refused_by_name(parameter: str, values: list[Any]) -> None:
    """The error names the parameter, both as a field and in its sentence."""
    for value in values:
        with pytest.raises(InvalidRequest, match=parameter) as refusal:
            SamplingParams(**{parameter: value})
        assert refusal.value.parameter == parameter


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 100.0},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -100.0, "frequency_penalty": 100.0},
        {"logit_bias": ((0, 1000.0), (1, -1000.0))},
        {"allowed_token_ids": (0,)},
    ],
)
def test_the_ends_of_each_range_are_taken(params: dict[str, Any]) -> None:
    """Ranges are closed where the protocol says so."""
    SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((10, 1.0),)},
        {"banned_token_ids": (3, 10)},
        {"allowed_token_ids": (10,)},
        {"stop_token_ids": (2**31 - 1,)},
        {"banned_token_ids": (-1,)},
    ],
)
def test_ids_the_model_does_not_have_are_refused_by_name(params: dict[str, Any]) -> None:
    """An id equal to the vocabulary size is outside, and so is every one beyond it or below 0 (C47)."""
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**params).check_vocabulary(10)
    assert refusal.value.parameter == next(iter(params))


@pytest.mark.parametrize(
    "params",
    [
        {"banned_token_ids": (0, 1, 2)},
        {"allowed_token_ids": (0, 1), "banned_token_ids": (0, 1)},
        {"allowed_token_ids": (1,), "stop_token_ids": (1,), "min_tokens": 1},
        {"banned_token_ids": (0, 1), "stop_token_ids": (2,), "min_tokens": 1},
    ],
)
def test_filters_that_leave_no_token_are_refused(params: dict[str, Any]) -> None:
    """Nothing could be drawn from such a row, so the request never starts."""
    with pytest.raises(InvalidRequest, match="leaves no token"):
        SamplingParams(**params).check_vocabulary(3)


def test_filters_that_leave_one_token_are_taken() -> None:
    """Stop tokens are only out of the question while `min_tokens` are not reached; repeated ids count once."""
    SamplingParams(banned_token_ids=(0, 0, 1), stop_token_ids=(2,)).check_vocabulary(3)
    SamplingParams(allowed_token_ids=(0, 1), banned_token_ids=(1, 2)).check_vocabulary(3)


@pytest.mark.parametrize("rule", list(VerificationRule))
def test_temperature_zero_is_greedy_whatever_the_rule(rule: VerificationRule) -> None:
    """All rules agree on a one-hot target, and above temperature 0 the rule asked for holds."""

    def effective_rule(temperature: float) -> VerificationRule:
        sampling = SamplingParams(temperature=temperature)
        spec = SessionSpec(session_id="s", prompt_length=1, sampling=sampling, seed=0, rule=rule, vocab_size=10)
        return spec.effective_rule

    assert effective_rule(0.0) is VerificationRule.GREEDY
    assert effective_rule(0.5) is rule


@pytest.mark.parametrize(
    ("params", "has_penalties"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": ((0, 1.0),), "temperature": 0.3, "top_k": 4}, False),
    ],
)
def test_penalties_are_known_to_be_set(params: dict[str, Any], has_penalties: bool) -> None:
    """Any one of the three is enough, and nothing else counts as one."""
    assert SamplingParams(**params).has_penalties is has_penalties


# ---- drafts ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 9), max_size=6), cut=st.integers(0, 7), is_drawn=st.booleans())
def test_a_draft_cut_anywhere_joins_to_the_whole(ids: list[int], cut: int, is_drawn: bool) -> None:
    """100 drawn cuts: each token keeps the distribution that it was drawn from."""
    rows = tuple(bytes([token_id, place]) for place, token_id in enumerate(ids)) if is_drawn else ()
    draft = Draft(tuple(ids), rows)
    front, rest = draft[:cut], draft[cut:]
    assert len(front) == min(cut, len(ids))
    assert front.joins(rest)
    assert front + rest == draft
    assert all(row[0] == token_id for token_id, row in zip(rest.ids, rest.distributions, strict=False))


def test_deterministic_and_drawn_tokens_are_never_one_draft() -> None:
    """One is judged as one-hot and the other by its row; an empty draft is neither."""
    drawn, deterministic, empty = Draft((1,), (b"row",)), Draft((2,)), Draft()
    assert not drawn.joins(deterministic)
    assert not deterministic.joins(drawn)
    assert drawn.joins(drawn)
    assert deterministic.joins(deterministic)
    assert empty.joins(drawn)
    assert drawn.joins(empty)


def test_a_draft_without_all_its_distributions_is_our_own_mistake() -> None:
    """Peers that send one are refused by `wire` before a `Draft` is made."""
    with pytest.raises(AssertionError):
        Draft((1, 2), (b"row",))


# ---- counts ---------------------------------------------------------------------------------------------------------


def test_counts_and_formulas_of_speculation() -> None:
    """Worked by hand: four drafts of 4, 4, 2 and 1 tokens with 4, 1, 0 and 1 kept, and one plain round."""
    stats = SpeculationStats()
    for draft_length, kept_length in ((4, 4), (0, 0), (4, 1), (2, 0), (1, 1)):
        stats.record_round(draft_length, kept_length)
    assert (stats.rounds, stats.plain_rounds, stats.num_drafts) == (5, 1, 4)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_rejections) == (11, 6, 2)
    assert stats.drafted_per_position == [4, 3, 2, 2]
    assert stats.accepted_per_position == [3, 1, 1, 1]
    assert stats.acceptance_rate == 6 / 11
    assert stats.per_token_acceptance == 6 / 8
    assert stats.mean_acceptance_length == 1 + 6 / 4


def test_rounds_drafted_by_lookup_are_counted_apart_too() -> None:
    """What is left of the totals is the drafter's own: here 3 of 4 tokens, then a whole draft of 2."""
    stats = SpeculationStats()
    for draft_length, kept_length, is_fallback in ((4, 3, False), (4, 1, True), (2, 2, True), (2, 2, False)):
        origin = DraftOrigin.FALLBACK if is_fallback else DraftOrigin.AHEAD
        stats.record_round(draft_length, kept_length, origin=origin)
    assert (stats.num_drafts, stats.num_accepted_tokens, stats.num_rejections) == (4, 8, 2)
    assert (stats.fallback_rounds, stats.fallback_accepted_tokens, stats.fallback_rejections) == (2, 3, 1)


def test_counts_of_an_answer_without_drafts_are_numbers() -> None:
    """Nothing is divided by zero."""
    stats = SpeculationStats()
    assert (stats.acceptance_rate, stats.per_token_acceptance, stats.mean_acceptance_length) == (0.0, 0.0, 1.0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_counts_by_position_add_up(rounds: list[tuple[int, int]]) -> None:
    """100 drawn answers: the sums over positions are the totals, and no position accepts more than it drafted."""
    stats = SpeculationStats()
    for draft_length, kept_length in rounds:
        stats.record_round(draft_length, min(draft_length, kept_length))
    assert sum(stats.drafted_per_position) == stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert all(
        accepted <= drafted
        for accepted, drafted in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
    )
    assert stats.rounds == stats.plain_rounds + stats.num_drafts == len(rounds)
