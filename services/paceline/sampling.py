"""From logits to a token: the target distribution at one row, and the ways to draw from it.

Drafter and target both use this module; the law of the output fails if they differ. Rows are computed in float32
(float64 rows stay float64, so that small cases can be enumerated exactly), ties go to the lowest id, and no input is
changed. Randomness comes from `noise` alone.

Knows nothing of models, services or accepting and rejecting.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline import noise
from paceline.errors import PacelineError, PayloadInvalid
from paceline.noise import Purpose
from paceline.types import SamplingParams, TopLogprobs, VerificationRule


class DistributionUnusable(PacelineError):
    """There is no token to draw: the logits are not numbers, or nothing is left of the row after bans and masks."""

    reason = "DISTRIBUTION_UNUSABLE"


class TokenHistory:
    """What penalties and `min_tokens` need to know of the committed tokens of a session.

    Grows with the session and never shrinks, as committed tokens do; `extend` costs only its own tokens.
    """

    __slots__ = ("_output_counts", "output_length", "prompt_ids")

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int] = ()) -> None:
        self.prompt_ids = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)  # [distinct]
        self.output_length = 0
        self._output_counts: Counter[int] = Counter()
        self.extend(output_ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Add committed output tokens."""
        ids = list(ids)
        self.output_length += len(ids)
        self._output_counts.update(ids)

    def output_counts(self, drafted: Sequence[int]) -> Counter[int]:
        """How often each token occurs in the output, the `drafted` tokens before the row included."""
        counts = self._output_counts.copy()
        counts.update(drafted)
        return counts


# ---- the target distribution ----------------------------------------------------------------------------------------


def target_log_probs(
    logits: Tensor,  # [vocab_size], any floating type
    params: SamplingParams,
    history: TokenHistory,
    drafted: Sequence[int],
) -> Tensor:  # [vocab_size], float32, or float64 for float64 logits
    """Log-probabilities of the target distribution behind `history` and `drafted`; -inf outside its support.

    In the order of design 3.2: penalties, logit bias, banned and allowed tokens, `min_tokens`, temperature, top-k,
    top-p, min-p. Raises `DistributionUnusable` where no token is left to draw.
    """
    row = _adjusted(logits, params, history, drafted)
    peak = _peak(row)
    if params.is_greedy:
        return torch.full_like(row, -math.inf).index_fill_(0, torch.tensor(_argmax(row), device=row.device), 0.0)
    is_filtered = _is_filtered(params)
    if params.temperature != 1.0 or is_filtered:
        row = (row - peak) / params.temperature  # at most 0, so no temperature can overflow it
    if not is_filtered:
        return row.log_softmax(0)
    if _has_kernels(row) and (log_probs := _filtered_by_kernels(row, params)) is not None:
        return log_probs
    kept_ids = _kept_ids(row, params)
    return torch.full_like(row, -math.inf).index_put_((kept_ids,), row[kept_ids].log_softmax(0))


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _acts_on_logits(params: SamplingParams) -> bool:
    """Whether there is anything in `_adjusted` to be done, at some length or other."""
    changes = params.has_penalties or params.logit_bias or params.banned_token_ids or params.min_tokens
    return bool(changes) or params.allowed_token_ids is not None


def argmax_token(
    logits: Tensor,  # [vocab_size], any floating type
    params: SamplingParams,
    history: TokenHistory,
    drafted: Sequence[int],
) -> int:
    """The token that the target emits at temperature 0: the arg max after penalties, bias and bans, lowest id on a tie.

    Raises `DistributionUnusable` as `target_log_probs` does.
    """
    row = _adjusted(logits, params, history, drafted)
    token_id = _argmax(row)
    _require_usable(float(row[token_id]))
    return token_id


def _adjusted(logits: Tensor, params: SamplingParams, history: TokenHistory, drafted: Sequence[int]) -> Tensor:
    """The row after everything that acts on logits; `logits` itself where nothing is set."""
    row = logits if logits.dtype == torch.float64 else logits.float()
    if params.has_penalties:
        row = _penalised(row, params, history, drafted)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row = row.index_add(0, _ids_like(row, ids), row.new_tensor(biases))
    if params.banned_token_ids:
        row = row.index_fill(0, _ids_like(row, params.banned_token_ids), -math.inf)
    if params.allowed_token_ids is not None:
        allowed_ids = _ids_like(row, params.allowed_token_ids)
        row = torch.full_like(row, -math.inf).index_put_((allowed_ids,), row[allowed_ids])
    if history.output_length + len(drafted) < params.min_tokens:
        row = row.index_fill(0, _ids_like(row, params.stop_token_ids), -math.inf)
    return row


def _penalised(row: Tensor, params: SamplingParams, history: TokenHistory, drafted: Sequence[int]) -> Tensor:
    """Repetition looks at prompt and output, presence and frequency at the output alone (vLLM's convention)."""
    counts = history.output_counts(drafted)
    output_ids = _ids_like(row, list(counts))
    seen_ids = torch.cat((history.prompt_ids.to(row.device), output_ids))
    seen = row[seen_ids]
    repeated = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    # One subtraction of one total, so that a token counts the same, to the bit, whether drafted or committed.
    penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
    return row.index_put((seen_ids,), repeated).index_add_(0, output_ids, -row.new_tensor(penalties))


def _ids_like(row: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=row.device)


def _argmax(row: Tensor) -> int:
    """Where the highest score is, the lowest id on a tie; where NaN is, if there is any."""
    # The same as torch's, which takes ten times as long on a CPU.
    return int(row.detach().numpy().argmax()) if row.device.type == "cpu" else int(row.argmax())


def _peak(row: Tensor) -> float:
    """The highest score; NaN anywhere in the row shows up in it."""
    peak = float(row.amax())
    _require_usable(peak)
    return peak


def _require_usable(peak: float) -> None:
    if math.isfinite(peak):
        return
    if peak == -math.inf:
        raise DistributionUnusable("No token is left to draw; the bans, masks and model rule out the whole vocabulary.")
    raise DistributionUnusable(f"The highest logit is {peak}; the model computed no usable scores.")


def raw_log_probs(
    logits: Tensor,  # [vocab_size], any floating type
    token_ids: Sequence[int],
    *,
    top: int,
) -> tuple[list[float], TopLogprobs]:
    """The model's own log-probabilities of the tokens, in their order, and its `top` most probable ones.

    In float32, before everything that shapes the target distribution (vLLM's `raw_logprobs`). There are fewer most
    probable tokens where fewer have any probability.
    """
    log_probs = logits.float().log_softmax(0)
    named = log_probs[_ids_like(log_probs, token_ids)].tolist()
    if top == 0:
        return named, ()
    leading, ids = _ranked(log_probs, top)
    ranked = zip(ids.tolist(), leading.tolist(), strict=True)
    return named, tuple([(token_id, log_prob) for token_id, log_prob in ranked if log_prob > -math.inf])


def warm_up() -> None:
    """Sample a row or two, so that no request waits for what is compiled at first use."""
    row, history = torch.linspace(0.0, 1.0, 4096), TokenHistory(())
    for params in (SamplingParams(top_k=50), SamplingParams(top_p=0.5), SamplingParams()):
        coupled_sample(target_log_probs(row, params, history, ()), seed=0, position=0)
    for rule in (VerificationRule.GREEDY, VerificationRule.COUPLED):
        choose_draft_tokens([DraftRow(row[None], history, (), 0, 0)], params=SamplingParams(), rule=rule, guesses=1)


# ---- top-k, top-p, min-p --------------------------------------------------------------------------------------------

# The nucleus is sorted out of the tokens at most this far (in logits) below the best: mostly few, in the end all.
_NUCLEUS_DEPTHS = (8.0, 10.0, 12.0, 16.0, math.inf)


def _kept_ids(row: Tensor, params: SamplingParams) -> Tensor:
    """Ids, in ascending order, that survive top-k, top-p and min-p; `row` is [vocab_size] with a peak of 0."""
    if params.top_k > 0:
        leading, _ = _highest(row, params.top_k)
        leading = leading[leading > -math.inf]
        kept_ids = _largest_ids(row, leading[: _nucleus_size(leading, leading.logsumexp(0), params.top_p)])
    elif params.top_p < 1.0:
        kept_ids = _largest_ids(row, _nucleus(row, params.top_p))
    else:
        kept_ids = (row > -math.inf).nonzero().flatten()
    if params.min_p > 0.0:
        kept_ids = kept_ids[row[kept_ids] >= math.log(params.min_p)]
    return kept_ids


def _nucleus(row: Tensor, top_p: float) -> Tensor:
    """The scores, in descending order, of the smallest set of most probable tokens with at least `top_p` (Holtzman et
    al. 2020)."""
    log_total = row.logsumexp(0)
    for depth in _NUCLEUS_DEPTHS:
        near_peak = row[row > -depth]
        if float((near_peak - log_total).double().exp().sum()) >= top_p:
            break
    leading = near_peak.sort(descending=True).values
    return leading[: _nucleus_size(leading, log_total, top_p)]


def _nucleus_size(leading: Tensor, log_total: Tensor, top_p: float) -> int:
    """How many of the leading scores (descending) it takes to reach `top_p`; one more than there are if they do not."""
    if top_p == 1.0:
        return leading.numel()
    cumulative = (leading - log_total).double().exp().cumsum(0)
    return 1 + int(torch.searchsorted(cumulative, top_p))


def _largest_ids(row: Tensor, leading: Tensor) -> Tensor:
    """Ids of as many largest scores as `leading` (the scores themselves, descending) has; the lowest ids of a tie."""
    cutoff = leading[-1]
    ids = (row >= cutoff).nonzero().flatten()
    excess = ids.numel() - leading.numel()
    if excess == 0:
        return ids
    tied_ids = ids[row[ids] == cutoff]
    return torch.cat((ids[row[ids] > cutoff], tied_ids[:-excess])).sort().values


def _filtered_by_kernels(row: Tensor, params: SamplingParams) -> Tensor | None:
    """What the plain algorithm gives, to the bit; None where a kernel cannot tell what is kept."""
    from paceline import row_kernels  # noqa: PLC0415 - see `_has_kernels`

    cutoff: row_kernels.Cutoff | None = row_kernels.EVERYTHING_POSSIBLE
    if params.top_k > 0:
        cutoff = row_kernels.top_k_cutoff(row, params.top_k)
        if cutoff is not None and params.top_p < 1.0:
            leading = row_kernels.kept_scores(row, cutoff).sort(descending=True).values
            size = _nucleus_size(leading, leading.logsumexp(0), params.top_p)
            cutoff = row_kernels.cutoff_behind(row, leading[:size])
    elif params.top_p < 1.0:
        cutoff = row_kernels.nucleus_cutoff(row, params.top_p)
    if cutoff is None:
        return None
    if params.min_p > 0.0:
        cutoff = cutoff.raised_to(math.log(params.min_p))
    # All scores move by one number, and the highest of them was 0.
    moved_by = row_kernels.kept_scores(row, cutoff).log_softmax(0).amax()
    return row_kernels.shift_kept(row, cutoff, float(moved_by))


def _has_kernels(row: Tensor) -> bool:
    """Whether `row_kernels` takes this row. Not imported above: it loads numba, and many who import this module never
    sample, or on a GPU."""
    is_plain = row.dtype == torch.float32 and row.device.type == "cpu" and row.is_contiguous()
    return is_plain and row.numel() > 0 and _can_compile()


@cache
def _can_compile() -> bool:
    try:
        importlib.import_module("paceline.row_kernels")
    except (ImportError, OSError):  # no numba for this machine
        return False
    return True


_BLOCK = 64  # entries; the sweet spot for 16 to 64 leaders of 50,000 to 150,000


def _highest(row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest values of a row, descending, and where they are; all of them if there are fewer.

    As `topk`, but several times faster on long rows: the leaders lie in the blocks with the highest maxima.
    """
    if row.numel() <= 4 * _BLOCK * count:
        values, indices = row.topk(min(count, row.numel()))
        return values, indices
    blocks = pad(row, (0, -row.numel() % _BLOCK), value=-math.inf).view(-1, _BLOCK)
    leading_blocks = blocks.amax(1).topk(count).indices
    values, places = blocks[leading_blocks].flatten().topk(count)
    return values, leading_blocks[places // _BLOCK] * _BLOCK + places % _BLOCK


# ---- drawing --------------------------------------------------------------------------------------------------------

_NO_DISTRIBUTION = "There is no token to draw; the row holds no probability, or values that are NaN."
_SCORED_FIRST = 8  # tokens scored before asking whether any other can win; one row in 2**8 has more contenders
_SLACK = 1e-4  # relative; far above the rounding of the float32 bounds, far below what would let in many contenders


def coupled_sample(
    log_probs: Tensor,  # [vocab_size], normalised
    seed: int,
    position: int,
) -> int:
    """The arg max of log_probs + Gumbel noise, lowest id on a tie: a draw that drafter and target share through the
    seed (Daliri et al. 2024, the Gumbel coupling).

    Exactly what scoring the whole vocabulary in float64 gives, at a fraction of the cost. It is the arg max of
    prob / -log u, too, and prob / (1 - u) bounds that from above without a logarithm. So the tokens with the highest
    bounds are scored exactly, and then only those whose bound reaches the best score. Raises `DistributionUnusable`
    where there is no distribution.
    """
    if _has_kernels(log_probs):
        return _coupled_by_kernels(log_probs, seed, position)
    probs = log_probs.softmax(0, dtype=torch.float32)
    possible_ids = _possible_ids(probs)
    bounds = _bounds(probs, possible_ids, seed, position)
    leading, leaders = _highest(bounds, _SCORED_FIRST)
    contest = _Contest(log_probs, probs, seed, position)
    # In the order of their bounds, one or two leaders decide almost every row.
    for bound, token_id in zip(leading.tolist(), _ids_at(leaders, possible_ids).tolist(), strict=True):
        if bound < contest.to_reach:
            return contest.winner
        contest.enter(token_id)
    for token_id in _ids_at((bounds >= contest.to_reach).nonzero().flatten(), possible_ids).tolist():
        contest.enter(token_id)
    return contest.winner


def _coupled_by_kernels(log_probs: Tensor, seed: int, position: int) -> int:
    from paceline import row_kernels  # noqa: PLC0415 - see `_has_kernels`

    peak = float(log_probs.amax())
    if not math.isfinite(peak):
        raise DistributionUnusable(_NO_DISTRIBUTION)
    return row_kernels.coupled_sample(log_probs, seed, position, peak=peak)


class _Contest:
    """The best of the tokens scored so far: highest score, lowest id on a tie. Nobody whose bound is below `to_reach`
    can win any more.

    Scored on the host in Python: for a few tokens that is the fastest, and the same on every device.
    """

    def __init__(self, log_probs: Tensor, probs: Tensor, seed: int, position: int) -> None:
        self._log_probs, self._probs = log_probs, probs
        self._seed, self._position = seed, position
        self._best = (-math.inf, 0)  # score and, negative so that the lowest wins, id
        self.to_reach = 0.0

    @property
    def winner(self) -> int:
        return -self._best[1]

    def enter(self, token_id: int) -> None:
        gumbel = noise.gumbel(self._seed, self._position, token_id)
        entrant = (float(self._log_probs[token_id]) + gumbel, -token_id)
        if entrant > self._best:
            self._best = entrant
            self.to_reach = float(self._probs[token_id]) * math.exp(gumbel) * 2.0**-53 * (1.0 - _SLACK)


def _possible_ids(probs: Tensor) -> Tensor | None:
    """The tokens able to win, those of probability above 0; None for all, where choosing would save little.

    A probability that underflowed to 0 in float32 (below exp(-103)) is out of the race: noise lies in (-3.7, 36.8).
    """
    lowest = float(probs.amin())
    if math.isnan(lowest):
        raise DistributionUnusable(_NO_DISTRIBUTION)
    if lowest > 0.0 or 8 * int(probs.count_nonzero()) > probs.numel():
        return None
    return probs.nonzero().flatten()


def _bounds(probs: Tensor, possible_ids: Tensor | None, seed: int, position: int) -> Tensor:
    """prob / (1 - u) of each possible token, times 2**-53."""
    if possible_ids is None:
        counters = noise.first_counters(probs.numel(), probs.device)
    else:
        counters, probs = noise.counters(possible_ids), probs[possible_ids]
    return probs / noise.complements(counters, seed=seed, position=position, purpose=Purpose.TARGET_SAMPLE).float()


def _ids_at(places: Tensor, possible_ids: Tensor | None) -> Tensor:
    return places if possible_ids is None else possible_ids[places]


def draw(
    weights: Tensor,  # [entries] float64, not negative
    uniform: float,
) -> int:
    """The index that `uniform` in (0, 1) falls on when the weights are laid end to end; never one of weight 0.

    Raises `DistributionUnusable` if no weight is positive, or one is not finite.
    """
    assert 0.0 < uniform < 1.0
    # On the CPU, where the sum runs from left to right: monotone, so no gap can be hit, and the same on every host.
    cumulative = weights.double().cpu().cumsum(0)
    total = float(cumulative[-1])
    if not 0.0 < total < math.inf:
        raise DistributionUnusable(f"There is no token to draw; the weights add up to {total}.")
    point = min(uniform * total, math.nextafter(total, 0.0))  # rounding must not carry it past the last weight
    return int(torch.searchsorted(cumulative, point, right=True))


# ---- drafting -------------------------------------------------------------------------------------------------------

_SMALLEST_NORMAL_HALF = 2.0**-14


@dataclass(frozen=True, slots=True, eq=False)
class SparseDistribution:
    """The distribution that a draft token was drawn from: probability 0 outside `ids`.

    `probs` need not add up to 1; probabilities are shares of their sum. Raises `PayloadInvalid` if they are none, or if
    an id comes twice.
    """

    ids: Tensor  # [entries] int64
    probs: Tensor  # [entries], floating
    shares: Mapping[int, float] = field(init=False, repr=False)  # the same, normalised in float64, by id

    def __post_init__(self) -> None:
        ids, probs = self.ids.tolist(), self.probs.tolist()
        if not len(ids) == len(set(ids)) == len(probs) > 0:
            raise PayloadInvalid("A draft distribution needs distinct ids, at least one, and a probability for each.")
        total = sum(probs)
        if not (min(probs) >= 0.0 and 0.0 < total < math.inf):
            raise PayloadInvalid("A draft distribution needs finite probabilities that are not negative nor all zero.")
        shares = {token_id: prob / total for token_id, prob in zip(ids, probs, strict=True)}
        object.__setattr__(self, "shares", shares)

    @classmethod
    def one_hot(cls, token_id: int) -> SparseDistribution:
        """What a deterministic draft token was drawn from."""
        return cls(torch.tensor([token_id]), torch.ones(1, dtype=torch.float64))

    def probability(self, token_id: int) -> float:
        """The normalised probability of one token; 0.0 outside `ids`."""
        return self.shares.get(token_id, 0.0)


def truncate_to_top(
    log_probs: Tensor,  # [vocab_size]
    max_entries: int = 64,
) -> SparseDistribution:
    """The most probable entries, rounded to float16, so that the wire carries exactly what is drawn from.

    Entries that float16 cannot hold as normal numbers (below 2**-14 of the leaders' mass) are dropped, and what is left
    adds up to 1 but for the rounding.
    """
    leading, ids = _highest(log_probs, max_entries)
    probs = leading.softmax(0)
    is_kept = probs >= min(_SMALLEST_NORMAL_HALF, float(probs[0]))
    return SparseDistribution(ids[is_kept], leading[is_kept].softmax(0).half().float())


def draw_draft_token(
    logits: Tensor,  # [vocab_size], the drafter's own
    *,
    params: SamplingParams,
    rule: VerificationRule,
    history: TokenHistory,
    drafted: Sequence[int],
    seed: int,
    position: int,
    max_entries: int = 64,
) -> tuple[int, SparseDistribution | None]:
    """One draft token for the absolute `position`, and under `rejection` the distribution it was drawn from.

    `rule` is the effective one (`SessionSpec.effective_rule`).
    """
    if rule is VerificationRule.GREEDY:
        return argmax_token(logits, params, history, drafted), None
    log_probs = target_log_probs(logits, params, history, drafted)
    if rule is VerificationRule.COUPLED:
        return coupled_sample(log_probs, seed, position), None
    return _draw_from_top(log_probs, seed, position, max_entries)


def _draw_from_top(log_probs: Tensor, seed: int, position: int, max_entries: int) -> tuple[int, SparseDistribution]:
    distribution = truncate_to_top(log_probs, max_entries)
    entry = draw(distribution.probs.double(), noise.uniform(seed, position, Purpose.DRAFT_SAMPLE))
    return int(distribution.ids[entry]), distribution


# A tuple rather than a dataclass, which takes twice as long to make: each line of each step of a drafter takes one.
class DraftedToken(NamedTuple):
    """One proposed token, what it was drawn from where the rule needs it (None: deterministic), and other tokens that may
    turn out to be the right one in its place.

    `estimates` says how likely the token itself is to be the right one if all before it are, then the same of each of
    `guess_ids`, likeliest first; what they leave to 1 is any other token's. Under `rejection` guesses are the most probable
    tokens besides the drawn one, and as many as asked for, whatever was drawn.
    """

    token_id: int
    distribution: SparseDistribution | None = None
    estimates: tuple[float, ...] = (1.0,)
    guess_ids: tuple[int, ...] = ()


class DraftRow(NamedTuple):
    """One place for a draft token: the drafter's row of logits there, and what the token continues."""

    logits: Tensor  # [1, vocab_size], the drafter's own
    history: TokenHistory
    drafted: Sequence[int]
    seed: int
    position: int  # absolute


def choose_draft_tokens(
    rows: Sequence[DraftRow],  # of one vocabulary and type
    *,
    params: SamplingParams,
    rule: VerificationRule,
    max_entries: int = 64,
    guesses: int,
) -> list[DraftedToken]:
    """For each row the token of `draw_draft_token`, with up to `guesses` others; the same in whatever company.

    `greedy` ranks by the scores, `coupled` by log-probability + Gumbel noise, which the target shares: where it differs
    from the drafter, it most often emits one of the next in this order. Each is as likely as its share of exp(rank score),
    as if what drafter and target differ by were Gumbel noise again. Raises `DistributionUnusable` if one row holds no
    token.
    """
    # Long rows one by one: to copy them together would take longer than what it saves.
    together = max(1, _ENTRIES_TOGETHER // max(1, rows[0].logits.numel())) if rows else 1
    if guesses == 0 and together == 1:
        return [_draw(row, params, rule, max_entries) for row in rows]
    return [
        token
        for first in range(0, len(rows), together)
        for token in _draw_with_guesses(rows[first : first + together], params, rule, max_entries, guesses)
    ]


_RANKED = 8  # tokens at least, among which likelihood is shared out
_SPARE = 4  # more tokens are scored: the less noise one has, the further its bound lies above its score
_ENTRIES_TOGETHER = 2**15

_Rankings = tuple[Tensor, Tensor]  # scores and ids, [rows, count]: best first, and the lowest id first among equals


def _draw(row: DraftRow, params: SamplingParams, rule: VerificationRule, max_entries: int) -> DraftedToken:
    token_id, distribution = draw_draft_token(
        row.logits[0],
        params=params,
        rule=rule,
        history=row.history,
        drafted=row.drafted,
        seed=row.seed,
        position=row.position,
        max_entries=max_entries,
    )
    return DraftedToken(token_id, distribution)


def _draw_with_guesses(
    rows: Sequence[DraftRow], params: SamplingParams, rule: VerificationRule, max_entries: int, guesses: int
) -> list[DraftedToken]:
    if rule is VerificationRule.REJECTION:
        return _drawn_among(_log_probs_of(rows, params), rows, max_entries, guesses)
    count = max(_RANKED, guesses + 1) if guesses else 1
    if rule is VerificationRule.GREEDY:
        scores, ids = _rankings(_adjusted_rows(rows, params), count)
    else:
        scores, ids = _coupled_rankings(_log_probs_of(rows, params), rows, count)
    shares = scores.double().softmax(1)[:, : guesses + 1]
    return [
        DraftedToken(named[0], None, estimates, named[1 : len(estimates)])
        for named, estimates in zip(map(tuple, ids.tolist()), map(_possible, shares.tolist()), strict=True)
    ]


def _possible(shares: Sequence[float]) -> tuple[float, ...]:
    """Those above 0; the first always is, and none is higher than the one before."""
    return tuple(shares) if shares[-1] > 0.0 else tuple([share for share in shares if share > 0.0])


def _drawn_among(
    log_probs: Tensor,  # [rows, vocab_size]
    rows: Sequence[DraftRow],
    max_entries: int,
    guesses: int,
) -> list[DraftedToken]:
    """For `rejection`: the guesses are the most probable tokens besides the drawn one."""
    leading, ids = _rankings(log_probs, guesses + 1)
    tokens = []
    for row, log_probs_of_row, scores, named in zip(rows, log_probs, leading.tolist(), ids.tolist(), strict=True):
        token_id, distribution = _draw_from_top(log_probs_of_row, row.seed, row.position, max_entries)
        others = [(other, math.exp(score)) for other, score in zip(named, scores, strict=True) if other != token_id]
        del others[guesses:]
        estimates = (distribution.probability(token_id), *[estimate for _, estimate in others])
        tokens.append(DraftedToken(token_id, distribution, estimates, tuple([other for other, _ in others])))
    return tokens


def _adjusted_rows(rows: Sequence[DraftRow], params: SamplingParams) -> Tensor:  # [rows, vocab_size]
    if _acts_on_logits(params):
        adjusted = torch.stack([_adjusted(row.logits[0], params, row.history, row.drafted) for row in rows])
    else:
        joined = torch.cat([row.logits for row in rows]) if len(rows) > 1 else rows[0].logits
        adjusted = joined if joined.dtype == torch.float64 else joined.float()
    for peak in adjusted.amax(1).tolist():
        _require_usable(peak)
    return adjusted


def _log_probs_of(rows: Sequence[DraftRow], params: SamplingParams) -> Tensor:  # [rows, vocab_size]
    """As `target_log_probs`, to the bit."""
    if _is_filtered(params):
        return torch.stack([target_log_probs(row.logits[0], params, row.history, row.drafted) for row in rows])
    scores = _adjusted_rows(rows, params)
    if params.temperature != 1.0:
        scores = (scores - scores.amax(1, keepdim=True)) / params.temperature
    return scores.log_softmax(1)


def _rankings(scores: Tensor, count: int) -> _Rankings:
    """The highest of each row."""
    if _has_kernels(scores):
        from paceline import row_kernels  # noqa: PLC0415 - see `_has_kernels`

        return row_kernels.highest(scores, count)
    return _side_by_side([_ranked(row, count) for row in scores])


def _coupled_rankings(log_probs: Tensor, rows: Sequence[DraftRow], count: int) -> _Rankings:
    """The highest of log_probs + Gumbel noise: first of all the tokens of `coupled_sample`."""
    if _has_kernels(log_probs):
        from paceline import row_kernels  # noqa: PLC0415 - see `_has_kernels`

        seeds, positions = [row.seed for row in rows], [row.position for row in rows]
        return row_kernels.coupled_rankings(log_probs, seeds, positions, count)
    return _side_by_side(
        [
            _coupled_ranking(log_probs_of_row, row.seed, row.position, count)
            for log_probs_of_row, row in zip(log_probs, rows, strict=True)
        ]
    )


def _side_by_side(rankings: Sequence[tuple[Tensor, Tensor]]) -> _Rankings:
    scores, ids = zip(*rankings, strict=True)
    return torch.stack(scores), torch.stack(ids)


def _ranked(row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores of a row and their ids, best first, the lowest ids of a tie."""
    leading, _ = _highest(row, count)
    ids = _largest_ids(row, leading)  # ascending, so that a stable sort leaves the lowest first
    order = row[ids].sort(descending=True, stable=True).indices
    return row[ids[order]], ids[order]


def _coupled_ranking(log_probs: Tensor, seed: int, position: int, count: int) -> tuple[Tensor, Tensor]:
    token_id = coupled_sample(log_probs, seed, position)
    _, leaders = _highest(_bounds(log_probs.softmax(0, dtype=torch.float32), None, seed, position), count + _SPARE)
    scored = [
        (float(log_probs[other]) + noise.gumbel(seed, position, other), -other)
        for other in {token_id, *leaders.tolist()}
    ]
    best = sorted(scored, reverse=True)[: min(count, log_probs.numel())]
    scores, ids = zip(*best, strict=True)
    return torch.tensor(scores, dtype=torch.float64), -torch.tensor(ids)
