"""Every law vector, reproduced by enumeration and by sampling through the functions that serve requests.

Enumeration runs over all drafts and outcomes in float64: law and acceptance equal to 1e-12. Sampling runs a round per
seed: draft, judge, walk, and a plain round behind it where one position is still missing. Seeds are fixed, so the
outcome of a test never changes; had they been drawn afresh, each chi-square test would raise a false alarm once in
10,000 runs. In the default run a vector gets the draws it takes to see its bug, 2,000 to 21,601 (`draws_of`); the runs
marked `slow` give every vector 200,000.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline import noise
from paceline.noise import Purpose
from paceline.rejection import is_accepted, judge_draft, judge_siblings, walk
from paceline.sampling import SparseDistribution, draw, draw_draft_token
from paceline.types import Row, VerificationRule
from tests.exactness import laws
from tests.exactness.chi_square import SIGNIFICANCE, chi_square_p_value
from tests.exactness.laws import NO_HISTORY, LawVector, Prefix

VECTORS = laws.load()
BASE_LENGTH = 5
EXACT = 1e-12

each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.id)
each_coupled_vector = pytest.mark.parametrize(
    "vector", [vector for vector in VECTORS if vector.expected_accept_coupled], ids=lambda vector: vector.id
)
each_size = pytest.mark.parametrize(
    "is_full",
    [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.timeout(1_800)])],
    ids=["default", "200000"],
)


# ---- enumeration ----------------------------------------------------------------------------------------------------


@each_vector
def test_filters_give_the_rows_of_the_vector(vector: LawVector) -> None:
    """Raw rows become the target and draft rows through `target_log_probs`, temperature, top-k and top-p included."""
    for prefix, expected in vector.filtered_target_probs.items():
        assert torch.allclose(vector.target_probs(prefix), expected, rtol=0.0, atol=EXACT)
    for prefix, expected in vector.filtered_draft_probs.items():
        assert torch.allclose(vector.draft_probs(prefix), expected, rtol=0.0, atol=EXACT)


@each_vector
def test_enumerated_law_and_acceptance_are_exact(vector: LawVector) -> None:
    """All drafts, all outcomes: the emitted law is the target's, and acceptance is what the vector says, to 1e-12."""
    law = torch.zeros_like(vector.expected_law)
    accept = dict.fromkeys(vector.expected_accept, 0.0)
    for token_id, probability, was_accepted in outcomes(vector, ()):
        for name in ("any", "first"):
            if name in accept:
                accept[name] += probability * was_accepted
        if vector.shape == "single":
            law[token_id] += probability
            continue
        for next_id, next_probability, next_was_accepted in outcomes(vector, (token_id,), is_drafted=was_accepted):
            law[token_id, next_id] += probability * next_probability
            if "both" in accept:
                accept["both"] += probability * next_probability * next_was_accepted
    assert torch.allclose(law, vector.expected_law, rtol=0.0, atol=EXACT)
    assert accept == pytest.approx(vector.expected_accept, rel=0.0, abs=EXACT)


def outcomes(vector: LawVector, prefix: Prefix, *, is_drafted: bool = True) -> Iterator[tuple[int, float, bool]]:
    """Every (token, probability, whether a draft token was accepted) at the position behind `prefix`."""
    target = vector.target_probs(prefix)
    every_draft = vector.possible_siblings(prefix) if is_drafted else [laws.Siblings([], [])]
    for siblings in every_draft:
        if vector.rule == "sample_match":
            for token_id, probability in enumerate(target.tolist()):
                yield token_id, siblings.probability * probability, token_id in siblings.ids
            continue
        judgement = judge_siblings(target, siblings.ids, siblings.distributions)
        reached = siblings.probability
        for sibling_id, ratio in zip(siblings.ids, judgement.ratios, strict=True):
            yield sibling_id, reached * min(1.0, ratio), True
            reached *= 1.0 - min(1.0, ratio)
        for token_id, probability in enumerate(law_of_draw(judgement.residual)):
            yield token_id, reached * probability, False


def law_of_draw(weights: Tensor) -> list[float]:
    """The law of `draw` over all uniforms: it must give the entry whose share of the unit interval it falls in."""
    law = (weights / weights.sum()).tolist()
    left = 0.0
    for index, share in enumerate(law):
        if share > EXACT:
            assert draw(weights, left + share / 2) == index
        left += share
    return law


@pytest.mark.parametrize(
    "vector",
    [vector for vector in VECTORS if vector.served_rule is VerificationRule.REJECTION],
    ids=lambda vector: vector.id,
)
def test_judged_rows_carry_the_enumerated_ratios(vector: LawVector) -> None:
    """What `judge_draft` sends for every possible single draft is the ratio that the enumeration used."""
    logits = vector.target_rows[()].repeat(2, 1)
    for siblings in vector.possible_siblings(()):
        ids, distributions = siblings.ids[:1], siblings.distributions[:1]
        row = judge(vector, logits, ids, distributions, seed=0, base_length=BASE_LENGTH)[0]
        (ratio,) = judge_siblings(vector.target_probs(()), ids, distributions).ratios
        assert row.ratio == pytest.approx(ratio, rel=EXACT, abs=0.0)


@each_coupled_vector
def test_coupled_acceptance_is_that_of_the_formula(vector: LawVector) -> None:
    """Shared noise accepts with the sum over x of 1 / sum over y of max(target(y)/target(x), draft(y)/draft(x))
    (Daliri et al. 2024, the Gumbel coupling)."""
    target, draft = vector.target_probs(()), vector.draft_probs(())
    accepted = 0.0
    for token_id in range(vector.vocab_size):
        if target[token_id] > 0 and draft[token_id] > 0:
            accepted += 1.0 / float(torch.maximum(target / target[token_id], draft / draft[token_id]).sum())
    assert [accepted] == pytest.approx(list(vector.expected_accept_coupled.values()), rel=0.0, abs=EXACT)


# ---- sampling -------------------------------------------------------------------------------------------------------


def draws_of(vector: LawVector, *, is_full: bool) -> int:
    """How many seeds to run: at least 2,000 and enough that the bug adds 60 to the chi-square, or 200,000.

    A bug adds draws * sum of difference**2 / its probability; what it cannot emit at all is refused at the first sight.
    """
    if is_full:
        return 200_000
    is_possible = vector.bug_law > 0.0
    difference, bug = (vector.expected_law - vector.bug_law)[is_possible], vector.bug_law[is_possible]
    return max(2_000, math.ceil(60 / float((difference**2 / bug).sum())))


@each_size
@each_vector
def test_sampled_tokens_follow_the_law_and_not_the_bug(vector: LawVector, is_full: bool) -> None:
    """Tokens (pairs of tokens) drawn through the serving functions: chi-square p above 1e-4 under the law, nothing of
    probability 0, acceptance within 4.5 standard errors (and 0.001, for drafts are rounded to float16); and the same
    draws are refused, p below 1e-4, under the law of the bug."""
    draws = draws_of(vector, is_full=is_full)
    counts, accepted = sample(vector, draws)
    assert chi_square_p_value(counts, vector.expected_law) > SIGNIFICANCE
    assert chi_square_p_value(counts, vector.bug_law) < SIGNIFICANCE
    expected = vector.expected_accept
    if vector.is_sampled and vector.expected_accept_coupled:
        expected = vector.expected_accept_coupled
    for name, probability in expected.items():
        margin = 4.5 * math.sqrt(probability * (1.0 - probability) / draws) + 0.001
        assert accepted[name] / draws == pytest.approx(probability, abs=margin)


@each_size
@each_coupled_vector
def test_coupled_output_keeps_its_law_with_drafts_drawn_from_other_noise(vector: LawVector, is_full: bool) -> None:
    """Drafts that do not share the noise cost acceptance, never the law: chi-square p above 1e-4, and acceptance that
    of independent draws."""
    draws = draws_of(vector, is_full=is_full)
    counts, accepted = sample(vector, draws, drafting_rule=VerificationRule.REJECTION)
    assert chi_square_p_value(counts, vector.expected_law) > SIGNIFICANCE
    for name, probability in vector.expected_accept.items():
        margin = 4.5 * math.sqrt(probability * (1.0 - probability) / draws) + 0.001
        assert accepted[name] / draws == pytest.approx(probability, abs=margin)


def sample(
    vector: LawVector, draws: int, *, drafting_rule: VerificationRule | None = None
) -> tuple[Tensor, dict[str, int]]:
    """Counts of emitted tokens, shaped as the law, and of acceptances, over the seeds 0 to `draws - 1`."""
    cells = [0] * vector.expected_law.numel()
    accepted = {"any": 0, "first": 0, "both": 0}
    play = (
        play_tree if vector.rule == "tree_siblings" else partial(play_chain, rule=drafting_rule or vector.served_rule)
    )
    for seed in range(draws):
        emitted, kept_length = play(vector, seed)
        while len(emitted) < vector.expected_law.ndim:
            emitted.append(plain_token(vector, emitted, seed))
        first, *second = emitted[: vector.expected_law.ndim]
        cells[first * vector.vocab_size + second[0] if second else first] += 1
        accepted["any"] += kept_length > 0
        accepted["first"] += kept_length > 0
        accepted["both"] += kept_length > 1
    return torch.tensor(cells).view(vector.expected_law.shape), accepted


def play_chain(vector: LawVector, seed: int, *, rule: VerificationRule) -> tuple[list[int], int]:
    """One round: what it emits, and how many draft tokens were kept. `rule` is the one that drafts are drawn by."""
    draft_ids: list[int] = []
    distributions: list[SparseDistribution] = []
    while len(draft_ids) < vector.draft_length:
        if not vector.is_sampled:
            draft_ids += vector.given_siblings(tuple(draft_ids))
            continue
        token_id, distribution = draw_draft_token(
            vector.draft_rows[tuple(draft_ids)],
            params=vector.draft_params,
            rule=rule,
            history=NO_HISTORY,
            drafted=draft_ids,
            seed=seed,
            position=BASE_LENGTH + len(draft_ids),
        )
        draft_ids.append(token_id)
        distributions += [distribution] if distribution else []
    # The row behind the last position of a vector is not in it; its own last row stands in, and is not counted.
    prefixes = [tuple(draft_ids[:kept_length]) for kept_length in range(len(draft_ids) + 1)]
    logits = torch.stack([vector.target_rows.get(prefix, vector.target_rows[()]) for prefix in prefixes])
    rows = judge(vector, logits, draft_ids, distributions or None, seed=seed, base_length=BASE_LENGTH)
    verdict = walk(draft_ids, rows, accept_uniform=partial(accept_uniform, seed), base_length=BASE_LENGTH)
    assert verdict.next_token is not None
    return [*draft_ids[: verdict.kept_length], verdict.next_token], verdict.kept_length


def play_tree(vector: LawVector, seed: int) -> tuple[list[int], int]:
    """One walk down a tree of siblings, judged node by node with the function that judges a single draft token."""
    emitted: list[int] = []
    while len(emitted) < vector.expected_law.ndim:
        position = BASE_LENGTH + len(emitted)
        ids, distributions = drawn_siblings(vector, tuple(emitted), seed, position)
        if not ids:
            break
        judgement = judge_siblings(vector.target_probs(tuple(emitted)), ids, distributions)
        for index, (sibling_id, ratio) in enumerate(zip(ids, judgement.ratios, strict=True)):
            if is_accepted(Row(0, ratio), sibling_id, position, partial(accept_uniform, seed, index=index)):
                emitted.append(sibling_id)
                break
        else:
            correction = draw(judgement.residual, noise.uniform(seed, position, Purpose.CORRECTION))
            return [*emitted, correction], len(emitted)
    return emitted, len(emitted)


def drawn_siblings(
    vector: LawVector, prefix: Prefix, seed: int, position: int
) -> tuple[Sequence[int], list[SparseDistribution]]:
    """The siblings of one seed: given, or drawn one after another, each with a number of its own."""
    if not vector.is_sampled:
        ids = vector.given_siblings(prefix)
        return ids, [SparseDistribution.one_hot(token_id) for token_id in ids]
    drawn_ids: list[int] = []
    distributions: list[SparseDistribution] = []
    for index in range(vector.draft["siblings"]):
        distribution = laws.exact_distribution(vector.left_to_draw(vector.draft_probs(prefix), drawn_ids))
        number = noise.uniform(seed, position, Purpose.DRAFT_SAMPLE, index)
        drawn_ids.append(int(distribution.ids[draw(distribution.probs, number)]))
        distributions.append(distribution)
    return drawn_ids, distributions


def plain_token(vector: LawVector, emitted: Sequence[int], seed: int) -> int:
    """The next round's first token: a round without a draft, behind what was emitted."""
    base_length = BASE_LENGTH + len(emitted)
    rows = judge(vector, vector.target_rows[tuple(emitted)][None], [], None, seed=seed, base_length=base_length)
    verdict = walk([], rows, accept_uniform=partial(accept_uniform, seed), base_length=base_length)
    assert verdict.next_token is not None
    return verdict.next_token


def judge(
    vector: LawVector,
    logits: Tensor,
    draft_ids: Sequence[int],
    distributions: Sequence[SparseDistribution] | None,
    *,
    seed: int,
    base_length: int,
) -> tuple[Row, ...]:
    return judge_draft(
        logits,
        rule=vector.served_rule,
        params=vector.target_params,
        history=NO_HISTORY,
        draft_ids=draft_ids,
        draft_distributions=distributions,
        seed=seed,
        base_length=base_length,
    )


def accept_uniform(seed: int, position: int, *, index: int = 0) -> float:
    return noise.uniform(seed, position, Purpose.ACCEPT, index)
