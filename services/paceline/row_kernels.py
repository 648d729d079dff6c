"""Compiled passes over one row of scores on a CPU: which tokens a filter keeps, and which can win a coupled sample.

A row is read block by block, small enough for the first cache, and nothing of it is sorted. What comes out is decided
exactly: `sampling` gives the same, to the bit, without this module, only later.

Rows are float32, contiguous, on the CPU and not empty; none holds NaN.

Knows nothing of parameters, models or services. To be imported when a row is there: numba takes a while to load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline import noise
from paceline.compiled import compiled
from paceline.noise import FIRST_FACTOR, INCREMENT, POSITION_STRIDE, SECOND_FACTOR, Purpose, stream_key

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int32]

_BLOCK = 512  # entries; with what is computed from them a few kilobytes


# ---- the coupled sample ---------------------------------------------------------------------------------------------

# A bound on log2(prob / (1 - u)) is two numbers' difference, in units of 2**-23: the logarithm of 1 - u is read off its
# bits as a float32, which is exact at powers of two and on the chord between them, up to 0.087 too low.
_UNITS = 2**23
_UNITS_PER_NAT = np.float32(_UNITS / math.log(2.0))
_SLACK = 2048  # units; far above the rounding of bounds, far below what would let in many contenders
# Noise lies in (-3.7, 36.8), so whoever is this far below the peak is out of the race, by less than int32 can hold.
_HOPELESS = np.float32(-60 * _UNITS)
_NOBODY = np.int32(-(2**31))

_INCREMENT_WORD, _FIRST_WORD, _SECOND_WORD = np.uint64(INCREMENT), np.uint64(FIRST_FACTOR), np.uint64(SECOND_FACTOR)
_STRIDE_WORD, _SAMPLE_WORD = np.uint64(POSITION_STRIDE), np.uint64(Purpose.TARGET_SAMPLE)


def coupled_sample(
    log_probs: Tensor,  # [vocab_size]
    seed: int,
    position: int,
    *,
    peak: float,
) -> int:
    """The arg max of log_probs + `noise.gumbel`, lowest id on a tie; `peak` is the highest of them, and finite.

    Exactly what scoring the whole row in float64 gives: log_prob - log(1 - u) bounds a score from above, the token with
    the highest bound is scored, and then only those whose bound reaches the best score.
    """
    row = log_probs.detach().numpy()
    key = np.uint64(stream_key(seed, position, Purpose.TARGET_SAMPLE))
    highest = np.empty(-(-row.size // _BLOCK), np.int32)
    leader = int(_find_leader(row, np.float32(peak), key, highest))
    best = (float(row[leader]) + noise.gumbel(seed, position, leader), -leader)
    to_reach = _to_reach(best[0] - peak)
    ids, bounds = _contenders(row, np.float32(peak), key, highest, np.int32(to_reach))
    for token_id, bound in zip(ids.tolist(), bounds.tolist(), strict=True):
        if bound >= to_reach and token_id != leader:
            entrant = (float(row[token_id]) + noise.gumbel(seed, position, token_id), -token_id)
            if entrant > best:
                best, to_reach = entrant, _to_reach(entrant[0] - peak)
    return -best[1]


def coupled_rankings(
    log_probs: Tensor,  # [rows, vocab_size]
    seeds: Sequence[int],  # [rows]
    positions: Sequence[int],  # [rows]
    count: int,
) -> tuple[Tensor, Tensor]:  # [rows, count] float64 and int64
    """The `count` highest of log_probs + `noise.gumbel` in each row and their ids: best first, lowest id first on a tie.

    Exactly what scoring whole rows in float64 gives, so the first is the one of `coupled_sample`: only tokens whose bound
    reaches the last of the best so far are scored. Where too few tokens are in the race, the last scores are -inf.
    Each row needs a peak that is finite.
    """
    words = np.array([seeds, positions], np.uint64)
    shape = (len(seeds), min(count, log_probs.shape[1]))
    scores, ids = np.empty(shape, np.float64), np.empty(shape, np.int64)
    _rank_coupled(log_probs.detach().numpy(), log_probs.amax(1).numpy(), words, scores, ids)
    return torch.from_numpy(scores), torch.from_numpy(ids)


@compiled()
def _to_reach(score: float) -> int:
    """The bound without which a token cannot have that score, counted from the peak of the row."""
    # 53, since 2**53 (1 - u) is what stands for 1 - u; 127 is the bias of a float32's exponent.
    return math.floor((score / math.log(2.0) - 53 - 127) * _UNITS) - _SLACK


@compiled()
def _scale(block: _Floats, peak: Any, scaled: _Ints) -> Any:
    """log2(prob) below that of the peak, in units, none less than `_HOPELESS`; returns the highest."""
    highest = _NOBODY
    for entry in range(block.size):
        units = (block[entry] - peak) * _UNITS_PER_NAT
        scaled[entry] = np.int32(max(_HOPELESS, units))
        highest = max(highest, scaled[entry])
    return highest


@compiled()
def _complements(key: Any, first: int, complements: _Floats) -> None:
    """As `noise.complements`, of the indices from `first` on, rounded to float32."""
    start = key + np.uint64(first) * _INCREMENT_WORD
    for entry in range(complements.size):
        word = start + np.uint64(entry) * _INCREMENT_WORD
        word = (word ^ (word >> np.uint64(30))) * _FIRST_WORD
        word = (word ^ (word >> np.uint64(27))) * _SECOND_WORD
        word = ~(word ^ (word >> np.uint64(31)))
        complements[entry] = np.float32(np.int64((word >> np.uint64(11)) | np.uint64(1)))


@compiled()
def _subtract(bounds: _Ints, logarithms: _Ints) -> Any:
    """bounds -= logarithms; returns the highest."""
    highest = _NOBODY
    for entry in range(bounds.size):
        bounds[entry] = np.int32(bounds[entry] - logarithms[entry])
        highest = max(highest, bounds[entry])
    return highest


@compiled()
def _bound_block(row: _Floats, number: int, peak: Any, key: Any, bounds: _Ints, complements: _Floats) -> Any:
    """bounds = those of that block of the row; returns the highest, `_NOBODY` if no token of it can win."""
    block = row[number * _BLOCK : (number + 1) * _BLOCK]
    if _scale(block, peak, bounds[: block.size]) <= np.int32(_HOPELESS):
        return _NOBODY
    _complements(key, number * _BLOCK, complements[: block.size])
    return _subtract(bounds[: block.size], complements[: block.size].view(np.int32))


@compiled()
def _find_leader(row: _Floats, peak: Any, key: Any, highest: _Ints) -> Any:
    """The token with the highest bound; highest = the highest bound of each block."""
    bounds, complements = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    for number in range(highest.size):
        highest[number] = _bound_block(row, number, peak, key, bounds, complements)
    number = int(np.argmax(highest))
    _bound_block(row, number, peak, key, bounds, complements)
    return number * _BLOCK + np.argmax(bounds[: min(_BLOCK, row.size - number * _BLOCK)])


@compiled()
def _contenders(row: _Floats, peak: Any, key: Any, highest: _Ints, to_reach: Any) -> Any:
    """Ids, ascending, of the tokens whose bound is at least `to_reach`, and their bounds."""
    bounds, complements = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    blocks = np.count_nonzero(highest >= to_reach)
    ids, reached = np.empty(blocks * _BLOCK, np.int64), np.empty(blocks * _BLOCK, np.int32)
    count = 0
    for number in range(highest.size):
        if highest[number] >= to_reach:
            _bound_block(row, number, peak, key, bounds, complements)
            for entry in range(min(_BLOCK, row.size - number * _BLOCK)):
                if bounds[entry] >= to_reach:
                    ids[count], reached[count] = number * _BLOCK + entry, bounds[entry]
                    count += 1
    return ids[:count], reached[:count]


@compiled()
def _mixed(word: Any) -> Any:
    """`noise.hashed`'s finaliser."""
    word = (word ^ (word >> np.uint64(30))) * _FIRST_WORD
    word = (word ^ (word >> np.uint64(27))) * _SECOND_WORD
    return word ^ (word >> np.uint64(31))


@compiled()
def _sample_key(seed: Any, position: Any) -> Any:
    """`noise.stream_key` of TARGET_SAMPLE."""
    return _mixed(_mixed(seed + _INCREMENT_WORD) + (position * _STRIDE_WORD + _SAMPLE_WORD) * _INCREMENT_WORD)


@compiled()
def _uniform(key: Any, index: Any) -> Any:
    """`noise.uniform` of the stream."""
    word = _mixed(key + np.uint64(index) * _INCREMENT_WORD)
    return np.float64(np.int64((word >> np.uint64(11)) | np.uint64(1))) * 2.0**-53


_log = compiled()(noise.reproducible_log)


@compiled()
def _rank_coupled(log_probs: _Floats, peaks: _Floats, words: Any, scores: Any, ids: Any) -> None:
    """`words` are the seed and the position of each row."""
    bounds, complements = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.float32)
    for number in range(peaks.size):
        key = _sample_key(words[0, number], words[1, number])
        _rank_row(log_probs[number], peaks[number], key, bounds, complements, scores[number], ids[number])


@compiled()
def _rank_row(row: _Floats, peak: Any, key: Any, bounds: _Ints, complements: _Floats, scores: Any, ids: Any) -> None:
    """scores, ids = the best of the row, of the tokens that are in the race."""
    scores[:], ids[:] = -np.inf, 0
    held, to_reach = 0, int(_NOBODY) + 1
    for number in range(-(-row.size // _BLOCK)):
        if _bound_block(row, number, peak, key, bounds, complements) < to_reach:
            continue
        for entry in range(min(_BLOCK, row.size - number * _BLOCK)):
            token_id = number * _BLOCK + entry
            if bounds[entry] >= to_reach and (row[token_id] - peak) * _UNITS_PER_NAT > _HOPELESS:
                score = row[token_id] - _log(-_log(_uniform(key, token_id)))
                held = _insert(scores, ids, held, score, token_id)
                if held == scores.size:
                    to_reach = _to_reach(scores[held - 1] - peak)


@compiled()
def _insert(scores: Any, ids: Any, held: int, score: Any, token_id: int) -> int:
    """Enter a token, whose id is above all others', among the `held` best, if it belongs there; returns how many there
    are now."""
    if held == scores.size:
        if not score > scores[held - 1]:
            return held
        held -= 1
    place = held
    while place > 0 and scores[place - 1] < score:
        scores[place], ids[place] = scores[place - 1], ids[place - 1]
        place -= 1
    scores[place], ids[place] = score, token_id
    return held + 1


# ---- the highest scores ---------------------------------------------------------------------------------------------


def highest(
    scores: Tensor,  # [rows, entries]
    count: int,
) -> tuple[Tensor, Tensor]:  # [rows, count] float32 and int64
    """The `count` highest of each row and where they are: best first, lowest place first on a tie; all if there are
    fewer."""
    shape = (scores.shape[0], min(count, scores.shape[1]))
    leading, places = np.empty(shape, np.float32), np.empty(shape, np.int64)
    _lead(scores.detach().numpy(), leading, places)
    return torch.from_numpy(leading), torch.from_numpy(places)


@compiled()
def _lead(scores: _Floats, leading: _Floats, places: Any) -> None:
    for number in range(scores.shape[0]):
        row, best, ids, held = scores[number], leading[number], places[number], 0
        for first in range(0, row.size, _LINE):
            line = row[first : first + _LINE]
            found = np.int32(0)
            if held == best.size:
                for entry in range(line.size):
                    found += np.int32(line[entry] > best[held - 1])
            if held < best.size or found > 0:
                for entry in range(line.size):
                    held = _insert(best, ids, held, line[entry], first + entry)


# ---- top-k, top-p, min-p --------------------------------------------------------------------------------------------

_BUCKETS = 1024
_DEPTH = np.float32(32.0)  # scores further below the highest share a bucket, until it turns out that they matter
_NARROWEST = np.float32(1e-30)  # range of scores that can be spread over buckets
_LINE = 64  # entries that are passed over together where none of them is of interest
# Sums of up to a million probabilities differ by less with their order, and with the last bits of `exp`.
_UNCERTAINTY = 1e-10


@dataclass(frozen=True, slots=True)
class Cutoff:
    """Which tokens of a row are kept: those above `score`, and of those equal to it the ids up to `last_tied_id`."""

    score: float
    last_tied_id: int

    def raised_to(self, score: float) -> Cutoff:
        """The same, without tokens whose score is lower than this one, which is rounded to float32."""
        rounded = float(np.float32(score))
        return Cutoff(rounded, _EVERY_ID) if rounded > self.score else self


_EVERY_ID = 2**62
EVERYTHING_POSSIBLE = Cutoff(-math.inf, -1)  # all that is above -inf


def top_k_cutoff(
    row: Tensor,  # [vocab_size], with a peak of 0
    top_k: int,
) -> Cutoff | None:
    """The `top_k` highest scores, of a tie the lowest ids; everything above -inf if that is less. None where scores lie
    too close to be told."""
    return _cutoff(row, _cut(row.detach().numpy(), np.empty(0, np.float32), np.float32(0.0), float(top_k), 0.0))


def nucleus_cutoff(
    row: Tensor,  # [vocab_size], with a peak of 0
    top_p: float,
) -> Cutoff | None:
    """The smallest set of highest scores with at least `top_p` of the probability; of a tie the lowest ids.

    Probabilities are those of `sampling`: exp(score - log_total) in float64, of a total and a difference in float32.
    None where rounding decides, or if all of them together do not reach `top_p`.
    """
    weights = row.exp()
    total = weights.sum()
    log_total = float(total.log())  # that of `logsumexp`, to the bit, as the peak is 0
    scores, masses = row.detach().numpy(), weights.mul_(math.exp(-log_total)).detach().numpy()
    return _cutoff(row, _cut(scores, masses, np.float32(log_total), top_p, _UNCERTAINTY))


def _cutoff(row: Tensor, cut: tuple[float, int, bool]) -> Cutoff | None:
    score, ties, is_certain = cut
    if not is_certain:
        return None
    if ties == 0:
        return EVERYTHING_POSSIBLE
    return Cutoff(score, _last_tied_id(row.detach().numpy(), np.float32(score), ties))


def cutoff_behind(
    row: Tensor,  # [vocab_size]
    leading: Tensor,  # [kept], the highest scores of the row, descending
) -> Cutoff:
    """As many highest scores as `leading` has; the lowest ids of a tie."""
    score = float(leading[-1])
    return Cutoff(score, _last_tied_id(row.detach().numpy(), np.float32(score), int((leading == score).sum())))


def kept_scores(
    row: Tensor,  # [vocab_size]
    cutoff: Cutoff,
) -> Tensor:  # [kept]
    """The scores that are kept, in ascending order of their ids."""
    scores = row.detach().numpy()
    kept = np.empty(scores.size, np.float32)
    return torch.from_numpy(kept[: _keep(scores, np.float32(cutoff.score), cutoff.last_tied_id, kept)])


def shift_kept(
    row: Tensor,  # [vocab_size]
    cutoff: Cutoff,
    shift: float,
) -> Tensor:  # [vocab_size]
    """The scores that are kept, with `shift` added to each; -inf elsewhere."""
    shifted = torch.empty_like(row)
    _shift(row.detach().numpy(), np.float32(cutoff.score), cutoff.last_tied_id, np.float32(shift), shifted.numpy())
    return shifted


@compiled()
def _as_float(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@compiled()
def _extent(scores: _Floats, depth: Any) -> Any:
    """The highest score, the lowest, and the lowest one that is at most `depth` below 0; no score is above 0."""
    # Numbers of one sign are ordered as their bits are, and among integers LLVM finds the largest with vectors.
    signless, deepest = np.int32(0x7FFFFFFF), np.float32(depth).view(np.int32)
    bits = scores.view(np.int32)
    least, most, most_above = signless, np.int32(0), np.int32(0)
    for entry in range(bits.size):
        size = np.int32(bits[entry] & signless)
        least, most = min(least, size), max(most, size)
        most_above = max(most_above, size if size <= deepest else np.int32(0))
    return -_as_float(least), -_as_float(most), -_as_float(most_above)


@compiled()
def _bucket(score: Any, highest: Any, scale: Any) -> Any:
    """The score's bucket, 0 for the highest; `_BUCKETS` for all far below."""
    place = (highest - score) * scale
    return np.int32(min(np.float32(_BUCKETS), place))


@compiled(fastmath=("contract",))
def _exp(exponent: Any) -> Any:
    """exp of a float64 of at most 1, within 1e-14 of it; 0 or next to nothing far below.

    2**whole * exp(rest), by the Taylor series; the whole part becomes the result's by its bits.
    """
    bounded = max(-700.0, exponent)
    shifted = bounded * 1.4426950408889634 + 6755399441055744.0  # 1.5 * 2**52: the last bits are whole numbers
    whole = shifted - 6755399441055744.0
    rest = bounded - whole * 0.6931471803691238  # log 2 in two parts; the product with the first one is exact
    rest = rest - whole * 1.9082149292705877e-10
    result = 1.0 / 39916800.0
    result = result * rest + 1.0 / 3628800.0
    result = result * rest + 1.0 / 362880.0
    result = result * rest + 1.0 / 40320.0
    result = result * rest + 1.0 / 5040.0
    result = result * rest + 1.0 / 720.0
    result = result * rest + 1.0 / 120.0
    result = result * rest + 1.0 / 24.0
    result = result * rest + 1.0 / 6.0
    result = result * rest + 0.5
    result = result * rest + 1.0
    result = result * rest + 1.0
    power = np.int64((np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)).view(np.float64)
    return result * power


@compiled()
def _sum_buckets(scores: _Floats, weights: _Floats, highest: Any, scale: Any, totals: Any) -> None:
    """totals = the sum of the weights in each bucket, or their number if there are none."""
    buckets = np.empty(_BLOCK, np.int32)
    totals[:] = 0.0
    for first in range(0, scores.size, _BLOCK):
        block, block_weights = scores[first : first + _BLOCK], weights[first : first + _BLOCK]
        for entry in range(block.size):
            buckets[entry] = _bucket(block[entry], highest, scale)
        if weights.size == 0:
            for entry in range(block.size):
                totals[buckets[entry]] += 1.0
        else:
            for entry in range(block.size):
                totals[buckets[entry]] += block_weights[entry]


@compiled(fastmath=("contract", "reassoc"))
def _mass_before(scores: _Floats, log_total: Any, highest: Any, scale: Any, bucket: int) -> float:
    """The sum of exp(score - log_total) over the buckets before that one."""
    mass = 0.0
    for entry in range(scores.size):
        one = _exp(np.float64(np.float32(scores[entry] - log_total)))
        mass += one if _bucket(scores[entry], highest, scale) < bucket else 0.0
    return mass


@compiled()
def _split(scores: _Floats, log_total: Any, highest: Any, scale: Any, bucket: int) -> Any:
    """How many scores, and what mass, are in the buckets before that one; and the scores in it, without -inf."""
    within = np.empty(scores.size, np.float32)
    count, count_before, mass_before = 0, 0, 0.0
    for first in range(0, scores.size, _LINE):
        line = scores[first : first + _LINE]
        before, found = np.int32(0), np.int32(0)
        for entry in range(line.size):
            place = _bucket(line[entry], highest, scale)
            before += np.int32(place < bucket)
            found += np.int32(place == bucket)
        if before > 0:
            count_before += int(before)
            mass_before += _mass_before(line, log_total, highest, scale, bucket)
        if found > 0:
            for entry in range(line.size):
                within[count] = line[entry]
                count += (_bucket(line[entry], highest, scale) == bucket) & (line[entry] > -np.inf)
    return count_before, mass_before, within[:count]


@compiled()
def _masses(scores: _Floats, log_total: Any) -> Any:
    """exp(score - log_total), the difference rounded to float32 as `sampling` does."""
    masses = np.empty(scores.size, np.float64)
    for entry in range(scores.size):
        masses[entry] = _exp(np.float64(np.float32(scores[entry] - log_total)))
    return masses


@compiled()
def _cut(scores: _Floats, weights: _Floats, log_total: Any, target: float, uncertainty: float) -> Any:
    """Where the masses of the scores, or without `weights` their number, first reach the target from the highest (0)
    down: the last score taken, how many equal ones are taken, 0 if all together do not reach it, and whether that is
    certain.

    The bucket in which it happens is spread over buckets again, until all scores in one are equal. `weights` are masses
    to the precision of float32, good enough to find a bucket; what lies before it is then added up in float64.
    """
    is_mass = weights.size > 0
    totals = np.empty(_BUCKETS + 1, np.float64)
    highest, lowest, lowest_above = _extent(scores, _DEPTH)
    before = 0.0
    while lowest < highest:
        scale = np.float32(_BUCKETS - 1) / max(highest - lowest_above, _NARROWEST)
        _sum_buckets(scores, weights, highest, scale, totals)
        bucket, reached = 0, before
        while bucket < _BUCKETS and reached + totals[bucket] < target:
            reached += totals[bucket]
            bucket += 1
        count_before, mass_before, within = _split(scores, log_total, highest, scale, bucket)
        if within.size in (0, scores.size):  # the end of the row, or scores too close for buckets
            return highest, 0, within.size == 0 and not is_mass
        before += mass_before if is_mass else count_before
        scores = within
        if is_mass:
            weights = _masses(scores, log_total).astype(np.float32)
        highest, lowest, lowest_above = _extent(scores, np.float32(np.inf))
    weight = _masses(scores[:1], log_total)[0] if is_mass else 1.0
    taken = max(1, int(np.ceil((target - before) / weight)))
    if taken > scores.size:
        return highest, 0, not is_mass
    is_certain = before + (taken - 1) * weight < target - uncertainty
    return highest, taken, is_certain and before + taken * weight >= target + uncertainty


@compiled()
def _last_tied_id(scores: _Floats, score: Any, ties: int) -> int:
    """The id of the last of so many entries that are equal to that score, from the first one on."""
    for first in range(0, scores.size, _BLOCK):
        block = scores[first : first + _BLOCK]
        found = np.int32(0)
        for entry in range(block.size):
            found += np.int32(block[entry] == score)
        if found >= ties:
            for entry in range(block.size):
                ties -= int(block[entry] == score)
                if ties == 0:
                    return first + entry
        ties -= int(found)
    return scores.size


@compiled()
def _keep(scores: _Floats, cutoff: Any, last_tied_id: int, kept: _Floats) -> int:
    """The scores that are kept, side by side; returns how many they are."""
    count = 0
    above = np.nextafter(cutoff, np.float32(np.inf))
    for first in range(0, scores.size, _LINE):
        block = scores[first : first + _LINE]
        least = cutoff if first <= last_tied_id else above
        found = np.int32(0)
        for entry in range(block.size):
            found += np.int32(block[entry] >= least)
        if first <= last_tied_id < first + block.size - 1:
            for entry in range(block.size):
                kept[count] = block[entry]
                count += (block[entry] > cutoff) | ((block[entry] == cutoff) & (first + entry <= last_tied_id))
        elif found == block.size:
            kept[count : count + found] = block
            count += int(found)
        elif found > 0:
            for entry in range(block.size):
                kept[count] = block[entry]
                count += block[entry] >= least
    return count


@compiled()
def _shift(scores: _Floats, cutoff: Any, last_tied_id: int, shift: Any, shifted: _Floats) -> None:
    for entry in range(scores.size):
        is_kept = (scores[entry] > cutoff) | ((scores[entry] == cutoff) & (entry <= last_tied_id))
        shifted[entry] = np.float32(scores[entry] + shift) if is_kept else np.float32(-np.inf)
