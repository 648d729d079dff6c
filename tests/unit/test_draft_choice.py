"""A draft token with guesses: the token is the one that is drawn without them, the guesses are the next best."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline import noise
from paceline.sampling import (
    DistributionUnusable,
    DraftedToken,
    DraftRow,
    TokenHistory,
    choose_draft_tokens,
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


def choose(logits: Tensor, rule: VerificationRule, guesses: int, *, position: int = 9) -> DraftedToken:
    (choice,) = choose_draft_tokens(
        [DraftRow(logits[None], TokenHistory(()), (), 3, position)], params=params_of(rule), rule=rule, guesses=guesses
    )
    return choice


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
        named = [token_id, *choice.guess_ids]
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
        assert [choice.token_id, *choice.guess_ids] == ranked[:5]
        weights = [math.exp(scores[token_id]) for token_id in ranked[:8]]
        assert choice.estimates == pytest.approx([weight / sum(weights) for weight in weights[:5]], rel=1e-4)


def test_greedy_guesses_are_the_next_scores() -> None:
    """With what the model itself makes of them."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -math.inf])
    choice = choose(logits, VerificationRule.GREEDY, 9)
    assert choice.token_id == 1
    assert choice.guess_ids == (3, 2, 0)
    shares = torch.tensor([3.0, 2.0, 1.0, 0.0]).softmax(0).tolist()
    assert choice.estimates == pytest.approx(shares)


@pytest.mark.parametrize("vocab_size", [3, 50])
def test_rejection_names_as_many_guesses_whatever_is_drawn(vocab_size: int) -> None:
    """200 draws of each row, flat and certain: how many lines there are must not depend on a drawn token (3.3)."""
    for logits in (torch.zeros(vocab_size), 30.0 * torch.arange(vocab_size), logits_of(vocab_size, seed=1)):
        choices = [choose(logits, VerificationRule.REJECTION, 4, position=position) for position in range(200)]
        assert {len(choice.guess_ids) for choice in choices} == {min(4, vocab_size - 1)}
        assert all(choice.token_id not in choice.guess_ids for choice in choices)


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.3}, {"top_k": 5}, {"repetition_penalty": 1.3, "top_p": 0.9}])
@pytest.mark.parametrize("vocab_size", [3, 700, 20_000])
@pytest.mark.parametrize("guesses", [0, 6])
def test_rows_drawn_together_are_what_each_is_alone(
    rule: VerificationRule, changes: dict[str, float], vocab_size: int, guesses: int
) -> None:
    """9 rows, the last two with ties and with tokens ruled out, each with a prefix and a position of its own: to the bit."""
    logits = [logits_of(vocab_size, seed=seed, scale=(0.1, 2.5, 8.0)[seed % 3]) for seed in range(7)]
    logits += [
        logits_of(vocab_size, seed=8, scale=1.0).round(),
        logits_of(vocab_size, seed=7).index_fill_(0, torch.tensor([0]), -math.inf),
    ]
    rows = [
        DraftRow(row[None], TokenHistory([1], [2] * (number % 2)), [0] * (number % 3), number % 4, 9 * number)
        for number, row in enumerate(logits)
    ]
    params = params_of(rule, **changes)
    together = choose_draft_tokens(rows, params=params, rule=rule, guesses=guesses)
    alone = [choose_draft_tokens([row], params=params, rule=rule, guesses=guesses)[0] for row in rows]
    assert [plain(choice) for choice in together] == [plain(choice) for choice in alone]
    for row, choice in zip(rows, together, strict=True):
        token_id, _ = draw_draft_token(
            row.logits[0],
            params=params,
            rule=rule,
            history=row.history,
            drafted=row.drafted,
            seed=row.seed,
            position=row.position,
        )
        assert choice.token_id == token_id


def plain(choice: DraftedToken) -> tuple[object, ...]:
    shares = None if choice.distribution is None else choice.distribution.shares
    return choice.token_id, shares, choice.estimates, choice.guess_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [12, 3000])
def test_the_lowest_id_comes_first_on_a_tie(vocab_size: int, dtype: torch.dtype) -> None:
    """With a kernel and without one, also where not all that are equal are named."""
    logits = torch.zeros(vocab_size, dtype=dtype)
    logits[[7, 9]] = 1.0
    choice = choose(logits, VerificationRule.GREEDY, 4)
    assert [choice.token_id, *choice.guess_ids] == [7, 9, 0, 1, 2]


def test_no_temperature_overflows_rows_drawn_together() -> None:
    """Scores near the end of float32, at a temperature that takes them past it: each row's token is that of its peak."""
    peaks = [2, 5, 11]
    logits = [torch.zeros(20).index_fill_(0, torch.tensor([peak]), 3e38) for peak in peaks]
    rows = [DraftRow(row[None], TokenHistory(()), (), 3, number) for number, row in enumerate(logits)]
    params = SamplingParams(temperature=0.1)
    choices = choose_draft_tokens(rows, params=params, rule=VerificationRule.COUPLED, guesses=2)
    assert [choice.token_id for choice in choices] == peaks
