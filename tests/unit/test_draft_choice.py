"""A draft token with guesses: the token is the one that is drawn without them, the guesses are the next best."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline import noise
from paceline.sampling import (
    DistributionUnusable,
    DraftChoice,
    TokenHistory,
    choose_draft_token,
    coupled_sample,
    draw_draft_token,
    target_log_probs,
)
from paceline.types import SamplingParams, VerificationRule

RULES = list(VerificationRule)


def logits_of(vocab_size: int, *, seed: int, scale: float = 2.5, dtype: torch.dtype = torch.float32) -> Tensor:
    return scale * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def params_of(rule: VerificationRule, **changes: float) -> SamplingParams:
    return SamplingParams(temperature=0.0) if rule is VerificationRule.GREEDY else SamplingParams(**changes)  # type: ignore[arg-type]


def choose(logits: Tensor, rule: VerificationRule, guesses: int, *, position: int = 9) -> DraftChoice:
    return choose_draft_token(
        logits,
        params=params_of(rule),
        rule=rule,
        history=TokenHistory(()),
        drafted=(),
        seed=3,
        position=position,
        guesses=guesses,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", [3, 700, 20_000])
@pytest.mark.parametrize("guesses", [0, 1, 8])
def test_the_token_and_its_distribution_do_not_depend_on_guesses(
    rule: VerificationRule, vocab_size: int, guesses: int
) -> None:
    """12 rows, from almost flat to almost certain, in both precisions: drafter and target must agree to the bit."""
    for seed in range(12):
        dtype = torch.float64 if seed % 4 == 3 else torch.float32
        logits = logits_of(vocab_size, seed=seed, scale=(0.1, 1.0, 2.5, 8.0)[seed % 4], dtype=dtype)
        token_id, distribution = draw_draft_token(
            logits, params=params_of(rule), rule=rule, history=TokenHistory(()), drafted=(), seed=3, position=seed
        )
        choice = choose(logits, rule, guesses, position=seed)
        assert choice.token_id == token_id
        assert (choice.distribution is None) == (distribution is None)
        if distribution is not None and choice.distribution is not None:
            assert choice.distribution.shares == distribution.shares
        named = [token_id, *(guess for guess, _ in choice.guesses)]
        assert len(set(named)) == len(named) <= guesses + 1
        assert all(0 <= named_id < vocab_size for named_id in named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coupled_guesses_are_the_next_best_of_log_probability_and_noise(dtype: torch.dtype) -> None:
    """Found without scoring the whole row, which is what this compares with, over 20 rows of 3,000 tokens; with a kernel
    and without one."""
    for seed in range(20):
        logits = logits_of(3000, seed=seed, scale=(0.5, 2.0, 4.0)[seed % 3], dtype=dtype)
        log_probs = target_log_probs(logits, SamplingParams(), TokenHistory(()), ()).tolist()
        scores = [log_prob + noise.gumbel(3, seed, token_id) for token_id, log_prob in enumerate(log_probs)]
        ranked = sorted(range(3000), key=lambda token_id: -scores[token_id])
        choice = choose(logits, VerificationRule.COUPLED, 4, position=seed)
        assert [choice.token_id, *(guess for guess, _ in choice.guesses)] == ranked[:5]
        weights = [math.exp(scores[token_id]) for token_id in ranked[:8]]
        estimates = [choice.likelihood, *(likelihood for _, likelihood in choice.guesses)]
        assert estimates == pytest.approx([weight / sum(weights) for weight in weights[:5]], rel=1e-4)


def test_greedy_guesses_are_the_next_scores() -> None:
    """With what the model itself makes of them."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -math.inf])
    choice = choose(logits, VerificationRule.GREEDY, 9)
    assert choice.token_id == 1
    assert [guess for guess, _ in choice.guesses] == [3, 2, 0]
    shares = torch.tensor([3.0, 2.0, 1.0, 0.0]).softmax(0).tolist()
    assert [choice.likelihood, *(likelihood for _, likelihood in choice.guesses)] == pytest.approx(shares)


@pytest.mark.parametrize("vocab_size", [3, 50])
def test_rejection_names_as_many_guesses_whatever_is_drawn(vocab_size: int) -> None:
    """200 draws of each row, flat and certain: how many lines there are must not depend on a drawn token (3.3)."""
    for logits in (torch.zeros(vocab_size), 30.0 * torch.arange(vocab_size), logits_of(vocab_size, seed=1)):
        choices = [choose(logits, VerificationRule.REJECTION, 4, position=position) for position in range(200)]
        assert {len(choice.guesses) for choice in choices} == {min(4, vocab_size - 1)}
        assert all(choice.token_id not in dict(choice.guesses) for choice in choices)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_without_a_token_is_a_typed_error(rule: VerificationRule) -> None:
    """As without guesses."""
    with pytest.raises(DistributionUnusable):
        choose(torch.full((50,), -math.inf), rule, 3)


def test_the_coupled_token_of_long_rows_is_the_coupled_sample() -> None:
    """100 rows of 3,000 tokens, where several blocks compete."""
    for seed in range(100):
        logits = logits_of(3000, seed=seed, scale=0.5)
        log_probs = target_log_probs(logits, SamplingParams(), TokenHistory(()), ())
        assert choose(logits, VerificationRule.COUPLED, 3, position=seed).token_id == coupled_sample(log_probs, 3, seed)
