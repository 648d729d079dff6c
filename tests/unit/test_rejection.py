"""Judging a draft row by row, and the walk from rows to a verdict.

The laws themselves are in `tests/exactness/test_laws.py`; here are the edges, the field cases and the refusals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import noise, rejection
from paceline.errors import InvalidRequest, PayloadInvalid
from paceline.noise import Purpose
from paceline.rejection import emitted_logprobs, judge_draft, judge_siblings, walk
from paceline.sampling import (
    DistributionUnusable,
    SparseDistribution,
    TokenHistory,
    coupled_sample,
    draw_draft_token,
    target_log_probs,
    truncate_to_top,
)
from paceline.types import Origin, Row, RowLogprobs, SamplingParams, TokenLogprobs, Verdict, VerificationRule

GREEDY, REJECTION, COUPLED = VerificationRule.GREEDY, VerificationRule.REJECTION, VerificationRule.COUPLED
LOWEST_UNIFORM, HIGHEST_UNIFORM = 2.0**-53, 1.0 - 2.0**-53


def log_row(*probs: float) -> Tensor:
    return torch.tensor(probs, dtype=torch.float64).log()


def seeded_rows(count: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2.0


def distribution(**probs: float) -> SparseDistribution:
    """A draft distribution by token: `distribution(t0=0.2, t2=0.8)`."""
    return SparseDistribution(
        torch.tensor([int(name[1:]) for name in probs]), torch.tensor(list(probs.values()), dtype=torch.float64)
    )


def judge(
    logits: Tensor,
    draft_ids: Sequence[int],
    distributions: Sequence[SparseDistribution] | None = None,
    *,
    rule: VerificationRule,
    history: TokenHistory | None = None,
    seed: int = 1,
    base_length: int = 10,
    logprobs: int | None = None,
    **params: Any,
) -> tuple[Row, ...]:
    return judge_draft(
        logits,
        rule=rule,
        params=SamplingParams(**params),
        history=history or TokenHistory(()),
        draft_ids=draft_ids,
        draft_distributions=distributions,
        seed=seed,
        base_length=base_length,
        logprobs=logprobs,
    )


def always(number: float) -> Callable[[int], float]:
    return lambda _position: number


def accept_uniforms(seed: int) -> Callable[[int], float]:
    return lambda position: noise.uniform(seed, position, Purpose.ACCEPT)


Model = Callable[[Sequence[int]], Tensor]  # from a prefix to the logits behind it


def hashing_model(vocab_size: int, salt: int) -> Model:
    """Logits that depend on the last two tokens and the length, as of a model with an opinion."""

    def model(prefix: Sequence[int]) -> Tensor:
        key = noise.hashed(salt, len(prefix) % 7, Purpose.TARGET_SAMPLE, sum(prefix[-1:]) + 100 * sum(prefix[-2:]))
        return torch.randn(vocab_size, generator=torch.Generator().manual_seed(key % 2**63)) * 1.5

    return model


def draft_from(
    drafter: Model, prefix: Sequence[int], draft_length: int, *, params: SamplingParams, seed: int
) -> list[int]:
    """A coupled draft behind the prefix, which is all output."""
    drafted: list[int] = []
    for index in range(draft_length):
        token_id, _ = draw_draft_token(
            drafter([*prefix, *drafted]),
            params=params,
            rule=COUPLED,
            history=TokenHistory((), prefix),
            drafted=drafted,
            seed=seed,
            position=len(prefix) + index,
        )
        drafted.append(token_id)
    return drafted


def generate(target: Model, drafter: Model | None, *, params: SamplingParams, seed: int, length: int) -> list[int]:
    """A whole coupled generation, with draft lengths that vary from round to round; without drafter, plain."""
    output: list[int] = []
    history = TokenHistory(())
    while len(output) < length:
        draft_ids = draft_from(drafter, output, len(output) % 4, params=params, seed=seed) if drafter else []
        rows = judge_draft(
            torch.stack([target([*output, *draft_ids[:kept]]) for kept in range(len(draft_ids) + 1)]),
            rule=COUPLED,
            params=params,
            history=history,
            draft_ids=draft_ids,
            draft_distributions=None,
            seed=seed,
            base_length=len(output),
        )
        verdict = walk(draft_ids, rows, accept_uniform=accept_uniforms(seed), base_length=len(output))
        assert verdict.next_token is not None
        run = [*draft_ids[: verdict.kept_length], verdict.next_token]
        history.extend(run)
        output += run
    return output[:length]


# ---- the walk -------------------------------------------------------------------------------------------------------


def test_matching_tokens_are_kept_up_to_the_first_mismatch() -> None:
    """Under greedy and coupled the emitted token behind the kept ones is the target's own sample (C05)."""
    rows = (Row(5), Row(6), Row(9))
    assert walk([5, 6, 7], rows, accept_uniform=always(0.5), base_length=3) == Verdict(2, 9, Origin.CORRECTION)


def test_a_draft_kept_whole_is_followed_by_the_bonus_token() -> None:
    """All rows agree: everything is kept and the last row's sample comes on top."""
    rows = (Row(5), Row(6), Row(7))
    assert walk([5, 6], rows, accept_uniform=always(0.5), base_length=3) == Verdict(2, 7, Origin.BONUS)


def test_no_draft_yields_one_plain_token() -> None:
    """An absent draft is an empty list, and its one row is the next token."""
    assert walk([], (Row(4),), accept_uniform=always(0.5), base_length=0) == Verdict(0, 4, Origin.PLAIN)


def test_a_bonus_that_is_already_drafted_is_left_unseen() -> None:
    """Under `rejection` with the next draft there, nothing is emitted in the bonus token's place (design 3.6)."""
    rows = (Row(8, 1.0), Row(7))
    verdict = walk([5], rows, accept_uniform=always(0.5), base_length=3, bonus_is_drafted=True)
    assert verdict == Verdict(1, None, Origin.BONUS)
    rejected = walk([5], (Row(8, 0.1),), accept_uniform=always(0.5), base_length=3, bonus_is_drafted=True)
    assert rejected == Verdict(0, 8, Origin.CORRECTION)


def test_each_position_is_accepted_by_its_own_uniform() -> None:
    """The uniform asked for is that of the absolute position, once a judged row."""
    asked: list[int] = []

    def accept_uniform(position: int) -> float:
        asked.append(position)
        return {20: 0.3, 21: 0.6}[position]

    rows = (Row(1, 0.5), Row(2, 0.5))
    verdict = walk([7, 8, 9], rows, accept_uniform=accept_uniform, base_length=20)
    assert (verdict, asked) == (Verdict(1, 2, Origin.CORRECTION), [20, 21])


def test_impossible_tokens_are_never_accepted_and_certain_ones_always() -> None:
    """Ratio 0 loses to the lowest uniform the noise can give, ratio 1 beats the highest (C11)."""
    assert walk([5], (Row(8, 0.0),), accept_uniform=always(LOWEST_UNIFORM), base_length=0).kept_length == 0
    assert walk([5], (Row(8, 1.0), Row(9)), accept_uniform=always(HIGHEST_UNIFORM), base_length=0).kept_length == 1


@pytest.mark.parametrize("draft_length", range(1, 6))
def test_every_kept_length_reads_its_own_row(draft_length: int) -> None:
    """Kept 0 takes the token of row 0 and never of the last row, kept `draft_length` the bonus, and so between (C40)."""
    for kept_length in range(draft_length + 1):
        ratios = [1.0] * kept_length + [0.0] * (draft_length - kept_length)
        rows = [Row(100 + index, ratio) for index, ratio in enumerate([*ratios, None])][: kept_length + 1]
        verdict = walk(list(range(draft_length)), rows, accept_uniform=always(0.5), base_length=0)
        assert (verdict.kept_length, verdict.next_token) == (kept_length, 100 + kept_length)


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (Row(5),),
        (Row(5), Row(6)),
        (Row(5), Row(6), Row(7), Row(8)),
        (Row(5, 1.0), Row(6), Row(7)),
        (Row(5, math.nan),),
        (Row(5, math.inf), Row(6, 1.0), Row(7)),
        (Row(5, -0.1),),
        (Row(5, 1.0), Row(6, 1.0)),
        (Row(5, 1.0), Row(6, 1.0), Row(7, 1.0)),
    ],
)
def test_rows_that_do_not_fit_the_draft_are_refused(rows: tuple[Row, ...]) -> None:
    """Missing, surplus, mixed or non-numeric rows of a broken peer are a typed error, never a token."""
    with pytest.raises(PayloadInvalid):
        walk([5, 6], rows, accept_uniform=always(0.5), base_length=0)


# ---- judging --------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    base_length=st.integers(0, 10_000),
    draft_length=st.integers(0, 6),
    rule=st.sampled_from([REJECTION, COUPLED]),
    is_deterministic=st.booleans(),
)
def test_rows_end_exactly_where_the_walk_ends(
    *, seed: int, base_length: int, draft_length: int, rule: VerificationRule, is_deterministic: bool
) -> None:
    """The target stops behind the first row that ends the draft, and the walk never lacks one nor ignores one."""
    vocab_size = 6
    logits = seeded_rows(draft_length + 1, vocab_size, seed=seed % 1_000)
    drawn = [
        draw_draft_token(
            row * 0.5,
            params=SamplingParams(),
            rule=REJECTION,
            history=TokenHistory(()),
            drafted=(),
            seed=seed,
            position=base_length + index,
        )
        for index, row in enumerate(logits[:draft_length])
    ]
    draft_ids = [token_id for token_id, _ in drawn]
    distributions = None if is_deterministic else [sent for _, sent in drawn if sent is not None]
    rows = judge(logits, draft_ids, distributions, rule=rule, seed=seed, base_length=base_length)
    verdict = walk(draft_ids, rows, accept_uniform=accept_uniforms(seed), base_length=base_length)
    assert len(rows) == verdict.kept_length + 1
    assert verdict.next_token == rows[-1].token_id


def test_rows_behind_a_rejection_are_never_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is rejected at once costs one row, under every rule."""
    evaluated: list[int] = []

    def counting(logits: Tensor, params: SamplingParams, history: TokenHistory, drafted: Sequence[int]) -> Tensor:
        evaluated.append(len(drafted))
        return target_log_probs(logits, params, history, drafted)

    monkeypatch.setattr(rejection, "target_log_probs", counting)
    logits = log_row(0.0, 1.0, 0.0).repeat(5, 1)
    for rule in (REJECTION, COUPLED):
        assert len(judge(logits, [2, 1, 1, 1], rule=rule)) == 1
    assert evaluated == [0, 0]


def test_the_emitted_token_is_the_target_sample_of_its_row() -> None:
    """Coupled: every row's token is the target's own sample there, mismatch or not, with any draft (C05; 200 seeds)."""
    logits = seeded_rows(4, 50)
    for seed in range(200):
        rows = judge(logits, [1, 2, 3], rule=COUPLED, seed=seed)
        for index, row in enumerate(rows):
            log_probs = target_log_probs(logits[index], SamplingParams(), TokenHistory(()), ())
            assert row == Row(coupled_sample(log_probs, seed, 10 + index))


@pytest.mark.parametrize("rule", [REJECTION, COUPLED])
def test_distributions_of_a_coupled_draft_are_not_read(rule: VerificationRule) -> None:
    """Only `rejection` looks at them: under `coupled` even a wrong one changes nothing."""
    logits, wrong = seeded_rows(2, 5), [distribution(t1=1.0)]
    if rule is COUPLED:
        assert judge(logits, [3], wrong, rule=rule) == judge(logits, [3], None, rule=rule)
    else:
        with pytest.raises(PayloadInvalid):
            judge(logits, [3], wrong, rule=rule)


def test_an_arg_max_draft_is_judged_as_one_hot() -> None:
    """Target (.5, .3, .2), deterministic draft 2: the ratio is the target's .2 itself, not .2 / .5 of the row the arg
    max came from, and the correction is never the draft (C02, C03, vector B)."""
    logits = log_row(0.5, 0.3, 0.2).repeat(2, 1)
    for seed in range(300):
        row = judge(logits, [2], rule=REJECTION, seed=seed)[0]
        assert row.ratio == pytest.approx(0.2, abs=1e-15)
        assert row.token_id in {0, 1}


@pytest.mark.parametrize("rule", list(VerificationRule))
@pytest.mark.parametrize("seed", range(10))
def test_at_temperature_zero_the_arg_max_is_emitted_whatever_the_draft(rule: VerificationRule, seed: int) -> None:
    """Target row (.5, .3, .2): drafts 1 and 2 are always rejected and token 0 comes out, draft 0 is always kept; the
    seed changes nothing, nor whether the draft was drawn or deterministic (C02, C08, C12)."""
    logits = log_row(0.5, 0.3, 0.2).repeat(2, 1)
    sent = [distribution(t0=0.2, t1=0.3, t2=0.5)]
    for draft_id in range(3):
        for distributions in (None, sent):
            rows = judge(logits, [draft_id], distributions, rule=rule, seed=seed, temperature=0.0)
            verdict = walk([draft_id], rows, accept_uniform=accept_uniforms(seed), base_length=10)
            assert (verdict.kept_length, verdict.next_token) == (int(draft_id == 0), 0)


@pytest.mark.parametrize("rule", [GREEDY, REJECTION, COUPLED])
def test_a_tie_goes_to_the_lowest_id_at_every_row(rule: VerificationRule) -> None:
    """Exact ties along a chain: the lowest id is the only one accepted; 1e-6 behind is behind (C18)."""
    tied = torch.tensor([0.0, 1.0, 1.0, 1.0])
    nearly = torch.tensor([0.0, 1.0 - 1e-6, 1.0, 0.0])
    logits = torch.stack((tied, nearly, tied))
    for draft_ids, kept_length, next_token in [([1, 2], 2, 1), ([2, 2], 0, 1), ([1, 1], 1, 2)]:
        rows = judge(logits, draft_ids, rule=rule, temperature=0.0)
        verdict = walk(draft_ids, rows, accept_uniform=accept_uniforms(1), base_length=10)
        assert (verdict.kept_length, verdict.next_token) == (kept_length, next_token)


@pytest.mark.parametrize("rule", [REJECTION, COUPLED])
def test_top_k_one_emits_the_arg_max_sequence(rule: VerificationRule) -> None:
    """Temperature 1, top_k 1, four drafts sampled from a flat row, 1,000 runs: always the arg max at every position,
    not at the bonus alone (C06)."""
    logits = seeded_rows(5, 8)
    best = logits.argmax(1).tolist()
    flat = SparseDistribution(torch.arange(8), torch.ones(8))
    for seed in range(1_000):
        draft_ids = [
            int(noise.uniform(seed, 10 + index, Purpose.DRAFT_SAMPLE) * 8) if seed % 2 else best[index]
            for index in range(4)
        ]
        rows = judge(logits, draft_ids, [flat] * 4, rule=rule, seed=seed, top_k=1)
        verdict = walk(draft_ids, rows, accept_uniform=accept_uniforms(seed), base_length=10)
        assert [*draft_ids[: verdict.kept_length], verdict.next_token] == best[: verdict.kept_length + 1]


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-6])
def test_residuals_keep_small_differences(share: float) -> None:
    """float32 target row, draft/target = 1e-9, 0.5 and 1 - 1e-6 at one token: its residual weight equals target - draft
    in float64 within 1e-6 relative (C07)."""
    target = torch.tensor([0.3, 0.2, 0.5]).log().log_softmax(0).double().softmax(0)
    draft_at_token = float(target[1]) * share
    draft = SparseDistribution(
        torch.tensor([0, 1]), torch.tensor([1.0 - draft_at_token, draft_at_token], dtype=torch.float64)
    )
    residual = judge_siblings(target, [0], [draft]).residual
    weights = {1: float(target[1]) - draft.probability(1), 2: float(target[2])}
    assert float(residual[0]) == 0.0
    assert float(residual[1]) == pytest.approx(weights[1] / sum(weights.values()), rel=1e-6, abs=0.0)


@pytest.mark.parametrize("vocab_size", [100, 8_193, 151_936])
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_residual_of_only_zeros_falls_back_to_the_target(vocab_size: int, is_deterministic: bool) -> None:
    """Target one-hot on the draft token and rejection forced: the one possible token comes out, in the vocabulary
    (C09)."""
    token_id = vocab_size - 2
    logits = torch.full((2, vocab_size), -math.inf)
    logits[:, token_id] = 0.0
    distributions = None if is_deterministic else [SparseDistribution(torch.tensor([token_id]), torch.ones(1))]
    rows = judge(logits, [token_id], distributions, rule=REJECTION)
    forced = walk([token_id], rows, accept_uniform=always(1.0), base_length=10)
    assert forced == Verdict(0, token_id, Origin.CORRECTION)


@pytest.mark.parametrize("rule", list(VerificationRule))
def test_a_row_that_cannot_be_drawn_ends_in_an_error(rule: VerificationRule) -> None:
    """A hundred rounds with an unusable row raise a hundred typed errors: never a token, never a round without
    progress (C10)."""
    logits = torch.full((2, 20), math.nan)
    for seed in range(100):
        with pytest.raises(DistributionUnusable):
            judge(logits, [1], rule=rule, seed=seed, temperature=0.0 if rule is GREEDY else 1.0)


@pytest.mark.parametrize("rule", list(VerificationRule))
def test_penalties_act_at_drafted_positions(rule: VerificationRule) -> None:
    """Draft [1, 1, 1], token 1 ahead of token 15 by one on each row: frequency penalty 1.5 gives [1, 15], penalty 0.7
    gives [1, 1, 15] (C19)."""
    logits = torch.full((4, 20), -50.0)
    logits[:, 1], logits[:, 15] = 1.0, 0.0
    for penalty, expected in [(1.5, [1, 15]), (0.7, [1, 1, 15])]:
        rows = judge(logits, [1, 1, 1], rule=rule, temperature=0.0, frequency_penalty=penalty)
        verdict = walk([1, 1, 1], rows, accept_uniform=accept_uniforms(1), base_length=10)
        assert [*[1, 1, 1][: verdict.kept_length], verdict.next_token] == expected


@pytest.mark.parametrize("rule", [REJECTION, COUPLED])
def test_logit_bias_and_min_p_act_at_every_position(rule: VerificationRule) -> None:
    """A bias of -100 on token 15 keeps it out though every draft is full of it, and min_p 0.1 with the best at 0.6 keeps
    out everything under 0.06; 500 seeds, every position (C21)."""
    probs = torch.full((5, 16), 0.02)
    probs[:, 3], probs[:, 15] = 0.6, 0.1
    logits = (probs / probs.sum(1, keepdim=True)).log()
    flat = SparseDistribution(torch.arange(16), torch.ones(16))
    cases: list[tuple[dict[str, Any], list[int], set[int]]] = [
        ({"logit_bias": ((15, -100.0),)}, [15, 15, 15, 15], {15}),
        ({"min_p": 0.1}, [3, 4, 15, 5], set(range(16)) - {3, 15}),
    ]
    for params, drafted, forbidden in cases:
        for seed in range(500):
            rows = judge(logits, drafted, [flat] * 4, rule=rule, seed=seed, **params)
            verdict = walk(drafted, rows, accept_uniform=accept_uniforms(seed), base_length=10)
            assert forbidden.isdisjoint([*drafted[: verdict.kept_length], verdict.next_token])


# ---- whole generations ----------------------------------------------------------------------------------------------

BUSY = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    logit_bias=((3, 1.0),),
    min_tokens=5,
    stop_token_ids=(0,),
)


@pytest.mark.parametrize("params", [SamplingParams(), BUSY])
@pytest.mark.parametrize("seed", range(5))
def test_coupled_output_depends_on_the_seed_and_not_on_the_draft(params: SamplingParams, seed: int) -> None:
    """40 tokens are the same with no draft, a random one, the target's own and a noisy one, at draft lengths that vary:
    the output is a function of target, prompt, parameters and seed alone."""
    target, stranger = hashing_model(30, salt=1), hashing_model(30, salt=2)

    def noisy(prefix: Sequence[int]) -> Tensor:
        return target(prefix) + 0.5 * stranger(prefix)

    plain = generate(target, None, params=params, seed=seed, length=40)
    for drafter in (stranger, target, noisy):
        assert generate(target, drafter, params=params, seed=seed, length=40) == plain
    assert len(set(plain)) > 5


@pytest.mark.parametrize("rule", [GREEDY, REJECTION, COUPLED])
def test_a_drafter_equal_to_the_target_is_always_accepted(rule: VerificationRule) -> None:
    """200 rounds with drafts from the target's own rows: nothing is rejected under greedy and coupled, and under
    `rejection` only what truncating and rounding the draft distribution costs (below 1 in 100)."""
    params = SamplingParams(temperature=0.0 if rule is GREEDY else 1.0)
    rejected = 0
    for seed in range(200):
        logits = seeded_rows(5, 40, seed=seed)
        drawn = [
            draw_draft_token(
                row,
                params=params,
                rule=rule,
                history=TokenHistory(()),
                drafted=(),
                seed=seed,
                position=10 + index,
            )
            for index, row in enumerate(logits[:4])
        ]
        draft_ids = [token_id for token_id, _ in drawn]
        distributions = [sent for _, sent in drawn if sent is not None]
        rows = judge_draft(
            logits,
            rule=rule,
            params=params,
            history=TokenHistory(()),
            draft_ids=draft_ids,
            draft_distributions=distributions or None,
            seed=seed,
            base_length=10,
        )
        verdict = walk(draft_ids, rows, accept_uniform=accept_uniforms(seed), base_length=10)
        rejected += verdict.kept_length < 4
    assert rejected <= (2 if rule is REJECTION else 0)


# ---- siblings -------------------------------------------------------------------------------------------------------


def test_a_duplicate_of_a_rejected_sibling_is_never_accepted() -> None:
    """Siblings (2, 2, 0): the second 2 has ratio 0, and 0 is judged by the row without 2 (C04, TS1)."""
    target = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    judgement = judge_siblings(target, [2, 2, 0], [SparseDistribution.one_hot(token_id) for token_id in (2, 2, 0)])
    assert judgement.ratios == pytest.approx((0.2, 0.0, 0.625), abs=1e-15)
    assert judgement.residual.tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-15)
    assert target.tolist() == [0.5, 0.3, 0.2]


def test_no_sibling_leaves_the_target_row() -> None:
    """Without any sibling the correction is a plain draw."""
    target = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert judge_siblings(target, [], []).residual.equal(target)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_id", [100, -1, 2**31 - 1])
@pytest.mark.parametrize("rule", list(VerificationRule))
def test_draft_ids_outside_the_vocabulary_are_refused(bad_id: int, rule: VerificationRule) -> None:
    """The vocabulary size itself, -1 and 2**31 - 1 are typed errors wherever they stand in the draft (C47)."""
    temperature = 0.0 if rule is GREEDY else 1.0
    for draft_ids in ([bad_id, 1], [1, bad_id]):
        with pytest.raises(PayloadInvalid, match="outside the vocabulary"):
            judge(torch.zeros(3, 100), draft_ids, rule=rule, temperature=temperature)


@pytest.mark.parametrize(
    "distributions",
    [
        [distribution(t1=1.0)],
        [distribution(t1=1.0), distribution(t2=0.0, t3=1.0)],
        [distribution(t1=1.0), distribution(t2=0.5, t100=0.5)],
        [distribution(t1=1.0), distribution(t2=1.0), distribution(t1=1.0)],
    ],
)
def test_distributions_that_do_not_fit_the_draft_are_refused(distributions: list[SparseDistribution]) -> None:
    """Too few or too many, a draft token that cannot have been drawn, or an id outside the vocabulary (C01)."""
    logits = torch.zeros(3, 100)
    assert judge(logits, [1, 2], [distribution(t1=1.0), distribution(t1=0.5, t2=0.5)], rule=REJECTION)
    with pytest.raises(PayloadInvalid):
        judge(logits, [1, 2], distributions, rule=REJECTION)


def test_greedy_above_temperature_zero_is_refused() -> None:
    """The greedy rule would not follow the law of a warm target: the error names the parameter."""
    with pytest.raises(InvalidRequest, match="temperature 0"):
        judge(torch.zeros(1, 10), [], rule=GREEDY, temperature=0.5)


def test_judging_changes_none_of_its_inputs() -> None:
    """Logits and distributions can be shared between sessions."""
    logits = seeded_rows(3, 50)
    sent = [truncate_to_top(row.log_softmax(0)) for row in logits[:2]]
    draft_ids = [int(each.ids[0]) for each in sent]
    before = logits.clone(), [(each.ids.clone(), each.probs.clone()) for each in sent]
    for seed in range(20):
        judge(logits, draft_ids, sent, rule=REJECTION, seed=seed, temperature=0.7, top_k=20, presence_penalty=0.5)
    assert logits.equal(before[0])
    for each, (ids, probs) in zip(sent, before[1], strict=True):
        assert each.ids.equal(ids)
        assert each.probs.equal(probs)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def plain_logprobs(logits: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """What plain decoding reports at that row, in the simplest way."""
    log_probs = logits.float().log_softmax(0).tolist()
    ranked = sorted(range(len(log_probs)), key=lambda other: (-log_probs[other], other))
    return TokenLogprobs(token_id, log_probs[token_id], tuple((other, log_probs[other]) for other in ranked[:top]))


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize(("rule", "temperature"), [(GREEDY, 0.0), (COUPLED, 0.8), (REJECTION, 0.8)])
def test_each_emitted_token_has_the_log_probability_of_plain_decoding(
    rule: VerificationRule, temperature: float, *, is_deterministic: bool, top: int
) -> None:
    """Accepted, correction, bonus and plain tokens (200 seeds, all four come up), and a draft whose bonus is left to the
    next one: the raw value of the very row that decides the token, whatever penalties and filters made of it."""
    params = SamplingParams(temperature=temperature, top_k=5, frequency_penalty=0.5, logit_bias=((2, 1.0),))
    seen: set[Origin] = set()
    for seed in range(200):
        draft_length = seed % 4
        logits = seeded_rows(draft_length + 1, 8, seed=seed)
        drawn: list[tuple[int, SparseDistribution | None]] = []
        for index in range(draft_length):
            history, drafted = TokenHistory(()), [token_id for token_id, _ in drawn]
            drawn.append(
                draw_draft_token(
                    logits[index] + 0.3 * seeded_rows(1, 8, seed=seed + 1000)[0],
                    params=params, rule=rule, history=history, drafted=drafted, seed=seed, position=10 + index,
                )
            )  # fmt: skip
        draft_ids = [token_id for token_id, _ in drawn]
        sent = [distribution for _, distribution in drawn if distribution is not None]
        rows = judge_draft(
            logits, rule=rule, params=params, history=TokenHistory(()), draft_ids=draft_ids,
            draft_distributions=None if is_deterministic else sent, seed=seed, base_length=10, logprobs=top,
        )  # fmt: skip
        for bonus_is_drafted in (False, True) if draft_ids else (False,):
            verdict = walk(
                draft_ids, rows, accept_uniform=accept_uniforms(seed), base_length=10, bonus_is_drafted=bonus_is_drafted
            )
            next_ids = [] if verdict.next_token is None else [verdict.next_token]
            ids = draft_ids[: verdict.kept_length] + next_ids
            seen |= {verdict.next_origin} | ({Origin.DRAFT} if verdict.kept_length else set())
            assert emitted_logprobs(draft_ids, rows, verdict) == tuple(
                plain_logprobs(row, token_id, top) for row, token_id in zip(logits, ids, strict=False)
            )
    assert seen == set(Origin)


def test_accepted_draft_token_has_its_own_log_probability_under_rejection() -> None:
    """Not that of the correction which its row carries besides."""
    rows = (
        Row(4, 1.0, RowLogprobs(-4.0, -1.0, ((1, -1.0),))),
        Row(5, 0.0, RowLogprobs(-5.0, -math.inf, ((5, -5.0),))),
    )
    verdict = walk([1, 2], rows, accept_uniform=always(0.5), base_length=3)
    assert emitted_logprobs([1, 2], rows, verdict) == (
        TokenLogprobs(1, -1.0, ((1, -1.0),)),
        TokenLogprobs(5, -5.0, ((5, -5.0),)),
    )


@pytest.mark.parametrize("row", [Row(4, 1.0), Row(4, 1.0, RowLogprobs(-4.0))])
def test_rows_without_the_log_probabilities_that_are_needed_are_refused(row: Row) -> None:
    """A target that was asked and gives none must not look as if nothing had been asked for."""
    rows = (row, Row(5, None, RowLogprobs(-5.0)))
    verdict = walk([1], rows, accept_uniform=always(0.5), base_length=3)
    with pytest.raises(PayloadInvalid, match="log-probabilit"):
        emitted_logprobs([1], rows, verdict)


def test_log_probabilities_cost_nothing_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is looked at for them, and none carries any."""
    monkeypatch.setattr(rejection, "raw_log_probs", None)
    assert all(row.logprobs is None for row in judge(seeded_rows(3, 9), [1, 2], rule=COUPLED))
