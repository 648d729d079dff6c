"""The accept and reject laws: what the target says of each row of a draft, and the walk from rows to a verdict.

Whatever the draft, the tokens that come out have the target's own law:

* `greedy`, `coupled`: the target's own sample is emitted, and a draft token counts as accepted if it is the same
  (Daliri et al. 2024 for the shared Gumbel noise).
* `rejection`: accept with probability min(1, target/draft), else draw from the normalised max(0, target - draft)
  (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2 and theorem 1). A deterministic draft token is one
  drawn from a one-hot distribution, and siblings of a tree are judged one after another, each by what the last one left.

Every rule takes every draft, drawn or deterministic (arg max, lookup); under `rejection` a drawn one needs exactly the
distribution it was drawn from.

Knows nothing of models, caches, services or the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline import noise
from paceline.errors import InvalidRequest, PayloadInvalid
from paceline.noise import Purpose
from paceline.sampling import (
    SparseDistribution,
    TokenHistory,
    argmax_token,
    coupled_sample,
    draw,
    raw_log_probs,
    target_log_probs,
)
from paceline.types import (
    AcceptUniform,
    Origin,
    Row,
    RowLogprobs,
    SamplingParams,
    TokenLogprobs,
    Verdict,
    VerificationRule,
)


def judge_draft(
    logits: Tensor,  # [draft_length + 1, vocab_size]: row i stands behind i drafted tokens
    *,
    rule: VerificationRule,
    params: SamplingParams,
    history: TokenHistory,
    draft_ids: Sequence[int],
    draft_distributions: Sequence[SparseDistribution] | None,
    seed: int,
    base_length: int,
    logprobs: int | None = None,
) -> tuple[Row, ...]:
    """What the target says of a draft on `base_length` tokens, up to and including the first row that ends it.

    Row i decides the absolute position `base_length + i`; `history` holds the tokens the draft stands on. `rule` is the
    effective one (`SessionSpec.effective_rule`). Without `draft_distributions` the draft is deterministic; they are
    read under `rejection` alone. `logprobs` (`SessionSpec.logprobs`) adds the model's own log-probabilities. Raises `PayloadInvalid` for a draft that does not fit the vocabulary or its own
    distributions, and `DistributionUnusable` for a row that leaves no token to draw.
    """
    assert logits.ndim == 2
    assert logits.shape[0] == len(draft_ids) + 1
    if rule is VerificationRule.GREEDY and not params.is_greedy:
        raise InvalidRequest("The rule greedy needs temperature 0; ask for coupled or rejection.", parameter="rule")
    _check_ids(draft_ids, logits.shape[1])
    distributions: Sequence[SparseDistribution | None] = [None] * len(draft_ids)
    if rule is VerificationRule.REJECTION:
        distributions = _drawn_from(draft_ids, draft_distributions, logits.shape[1])
    accept_uniform = partial(_accept_uniform, seed)
    rows: list[Row] = []
    for kept_length, distribution in enumerate([*distributions, None]):
        position = base_length + kept_length
        drafted = draft_ids[:kept_length]
        if rule is VerificationRule.GREEDY:
            row = Row(argmax_token(logits[kept_length], params, history, drafted))
        else:
            log_probs = target_log_probs(logits[kept_length], params, history, drafted)
            if distribution is None:
                row = Row(coupled_sample(log_probs, seed, position))
            else:
                row = _row_by_ratio(log_probs, draft_ids[kept_length], distribution, seed=seed, position=position)
        rows.append(row)
        if kept_length == len(draft_ids) or not is_accepted(row, draft_ids[kept_length], position, accept_uniform):
            break
    if logprobs is None:
        return tuple(rows)
    return tuple(
        replace(row, logprobs=_row_logprobs(logits[index], row, draft_ids[index : index + 1], top=logprobs))
        for index, row in enumerate(rows)
    )


def walk(
    draft_ids: Sequence[int],
    rows: Sequence[Row],
    *,
    accept_uniform: AcceptUniform,
    base_length: int,
    bonus_is_drafted: bool = False,
) -> Verdict:
    """How much of the draft is kept, and the next token: keep while accepted, at the first rejection take that row's
    correction, behind a draft that is kept whole the bonus token.

    `bonus_is_drafted`: under `rejection` the next draft already stands on this one, and its first token is judged in
    the bonus token's place, whose value nobody looks at (design 3.6). Raises `PayloadInvalid` if the rows do not fit
    the draft.
    """
    _check_rows(rows, len(draft_ids))
    for kept_length, draft_id in enumerate(draft_ids):
        row = _row_at(rows, kept_length)
        if not is_accepted(row, draft_id, base_length + kept_length, accept_uniform):
            return Verdict(kept_length, row.token_id, Origin.CORRECTION)
    if bonus_is_drafted:
        return Verdict(len(draft_ids), None, Origin.BONUS)
    bonus = _row_at(rows, len(draft_ids))
    return Verdict(len(draft_ids), bonus.token_id, Origin.BONUS if draft_ids else Origin.PLAIN)


def emitted_logprobs(draft_ids: Sequence[int], rows: Sequence[Row], verdict: Verdict) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of the tokens that a verdict emits: of the kept ones, then of the next token if there is one.

    `verdict` is what `walk` read from these rows. Raises `PayloadInvalid` if they carry no log-probabilities.
    """
    ids = [*draft_ids[: verdict.kept_length], *([] if verdict.next_token is None else [verdict.next_token])]
    emitted: list[TokenLogprobs] = []
    for index, (token_id, row) in enumerate(zip(ids, rows, strict=False)):
        if row.logprobs is None:
            raise PayloadInvalid("The target gave no log-probabilities, though it was asked for them.")
        # Where tokens are compared a kept one is the row's own; where ratios decide it may be another.
        is_drafted = index < verdict.kept_length and row.ratio is not None
        logprob = row.logprobs.drafted if is_drafted else row.logprobs.sampled
        if logprob is None:
            raise PayloadInvalid("The target gave no log-probability of a drafted token that is accepted.")
        emitted.append(TokenLogprobs(token_id, logprob, row.logprobs.top))
    return tuple(emitted)


def is_accepted(row: Row, draft_id: int, position: int, accept_uniform: AcceptUniform) -> bool:
    """Whether the row keeps the draft token at that absolute position.

    By ratio the comparison is strict: a token that the target cannot emit (ratio 0) is never accepted, and one with a
    ratio of 1 always, since the uniforms lie strictly inside (0, 1).
    """
    return row.token_id == draft_id if row.ratio is None else accept_uniform(position) < row.ratio


@dataclass(frozen=True, slots=True, eq=False)
class SiblingJudgement:
    """What the target says of alternatives for one position: `ratios[i]` decides on sibling i once all before it are
    rejected, and `residual` is what a correction is drawn from once all of them are."""

    ratios: tuple[float, ...]
    residual: Tensor  # [vocab_size] float64, normalised


def judge_siblings(
    target_probs: Tensor,  # [vocab_size] float64, normalised
    sibling_ids: Sequence[int],
    distributions: Sequence[SparseDistribution],
) -> SiblingJudgement:
    """Judges draft tokens for one position in their order, each against what the rejection of the last one left.

    One sibling is Leviathan et al. 2023, algorithm 1, and Chen et al. 2023, algorithm 2; several are its repetition
    (multi-step speculative sampling, Miao et al. 2024). `distributions[i]` is what sibling i was drawn from,
    given those before it, and has probability above 0 there.
    """
    ratios: list[float] = []
    row = target_probs
    for sibling_id, distribution in zip(sibling_ids, distributions, strict=True):
        ratios.append(float(row[sibling_id]) / distribution.probability(sibling_id))
        row = _residual(row, distribution)
    return SiblingJudgement(tuple(ratios), row)


def _residual(target_probs: Tensor, distribution: SparseDistribution) -> Tensor:
    """The normalised max(0, target - draft), in probabilities: in log space small differences would be lost.

    Where nothing is left the two are the same and a rejection has no probability; the target itself is then the one
    row that can only yield possible tokens.
    """
    ids = torch.tensor(list(distribution.shares), device=target_probs.device)
    shares = target_probs.new_tensor(list(distribution.shares.values()))
    weights = target_probs.index_add(0, ids, -shares).clamp_(min=0.0)
    total = weights.sum()
    return weights.div_(total) if float(total) > 0.0 else target_probs


def _row_logprobs(
    logits: Tensor,  # [vocab_size]
    row: Row,
    drafted: Sequence[int],  # the token judged by the row, if there is one
    *,
    top: int,
) -> RowLogprobs:
    named_ids = [row.token_id] if row.ratio is None else [row.token_id, *drafted]
    (sampled, *others), most_probable = raw_log_probs(logits, named_ids, top=top)
    return RowLogprobs(sampled, others[0] if others else None, most_probable)


def _row_by_ratio(
    log_probs: Tensor, draft_id: int, distribution: SparseDistribution, *, seed: int, position: int
) -> Row:
    judgement = judge_siblings(log_probs.double().softmax(0), [draft_id], [distribution])
    correction = draw(judgement.residual, noise.uniform(seed, position, Purpose.CORRECTION))
    return Row(correction, judgement.ratios[0])


def _accept_uniform(seed: int, position: int) -> float:
    return noise.uniform(seed, position, Purpose.ACCEPT)


def _drawn_from(
    draft_ids: Sequence[int], distributions: Sequence[SparseDistribution] | None, vocab_size: int
) -> list[SparseDistribution]:
    """What each draft token was drawn from: one-hot for a deterministic draft."""
    if not distributions:
        return [SparseDistribution.one_hot(draft_id) for draft_id in draft_ids]
    if len(distributions) != len(draft_ids):
        raise PayloadInvalid(f"{len(draft_ids)} draft tokens came with {len(distributions)} distributions.")
    for draft_id, distribution in zip(draft_ids, distributions, strict=True):
        if min(distribution.shares) < 0 or max(distribution.shares) >= vocab_size:
            raise PayloadInvalid(f"A draft distribution names ids outside the vocabulary of {vocab_size} tokens.")
        if distribution.probability(draft_id) == 0.0:
            raise PayloadInvalid(f"Token {draft_id} cannot have been drawn from the distribution sent with it.")
    return list(distributions)


def _check_ids(draft_ids: Sequence[int], vocab_size: int) -> None:
    for draft_id in draft_ids:
        if not 0 <= draft_id < vocab_size:
            raise PayloadInvalid(f"Draft token {draft_id} is outside the vocabulary of {vocab_size} tokens.")


def _check_rows(rows: Sequence[Row], draft_length: int) -> None:
    if len(rows) > draft_length + 1:
        raise PayloadInvalid(f"A draft of {draft_length} tokens was answered with {len(rows)} rows.")
    ratios = [row.ratio for row in rows[:draft_length]]
    if len(rows) > draft_length and rows[draft_length].ratio is not None:
        raise PayloadInvalid("The row behind the draft carries a ratio, but there is no draft token to accept by it.")
    if any(ratio is not None and not 0.0 <= ratio < math.inf for ratio in ratios):
        raise PayloadInvalid(f"Ratios must be finite and not negative, but are {ratios}.")
    if None in ratios and any(ratio is not None for ratio in ratios):
        raise PayloadInvalid("Some rows of one verdict carry a ratio and some do not.")


def _row_at(rows: Sequence[Row], index: int) -> Row:
    if index >= len(rows):
        raise PayloadInvalid(f"The verdict ends after {len(rows)} rows, though the draft is accepted that far.")
    return rows[index]
