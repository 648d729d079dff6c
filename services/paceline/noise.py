"""Random numbers without state: each is a pure function of (seed, position, purpose, index).

Counter-based (Salmon et al. 2011): integers are mixed first, which is bit-exact on every device, and only then become
a uniform or Gumbel number. Who asks, in which order, in which batch or on which replica makes no difference, so a
session can be replayed from its seed alone. The purposes are disjoint streams: no number serves two of them, or two
positions.

Knows nothing of distributions or drafts. Test vectors: `tests/vectors/noise.json`.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a number is for. Part of every key, so a value must never change or be used again."""

    TARGET_SAMPLE = 0  # one for each vocabulary entry: the Gumbel noise of `coupled`, of bonus and plain tokens
    DRAFT_SAMPLE = 1  # draws the draft token under `rejection`
    ACCEPT = 2  # decides whether a draft token is kept under `rejection`; the index tells siblings apart
    CORRECTION = 3  # draws the correction from the residual


_WORD = 2**64 - 1
INCREMENT = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, made odd: neighbouring counters land far apart
FIRST_FACTOR = 0xBF58476D1CE4E5B9  # the finaliser "variant 13" of SplitMix64 (Steele et al. 2014)
SECOND_FACTOR = 0x94D049BB133111EB
POSITION_STRIDE = 16  # room for purposes below a position, so that (position, purpose) is one counter


def hashed(seed: int, position: int, purpose: Purpose, index: int = 0) -> int:
    """The 64-bit integer behind every number of that key; `seed` is 0 to 2**64 - 1, and 0 is a seed like any other."""
    return _mixed(stream_key(seed, position, purpose) + index * INCREMENT)


def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """A uniform number strictly inside (0, 1): an odd 53-bit numerator over 2**53, so 0 and 1 cannot occur."""
    return _numerator(hashed(seed, position, purpose, index)) * 2.0**-53


def gumbel(seed: int, position: int, index: int) -> float:
    """Standard Gumbel noise `-log(-log u)` of TARGET_SAMPLE at one vocabulary entry; the same bits on every host."""
    return -reproducible_log(-reproducible_log(uniform(seed, position, Purpose.TARGET_SAMPLE, index)))


def counters(
    indices: Tensor,  # [count] int64
) -> Tensor:  # [count] int64
    """Indices, spaced out over all 64 bits, as `complements` takes them; worth keeping where they are used often."""
    return indices * _signed(INCREMENT)


@lru_cache(maxsize=8)
def first_counters(count: int, device: torch.device) -> Tensor:  # [count] int64
    """The counters of the indices from 0 on. Shared between callers, so not to be changed."""
    return counters(torch.arange(count, device=device))


def complements(
    index_counters: Tensor,  # [count] int64, from `counters`
    *,
    seed: int,
    position: int,
    purpose: Purpose,
) -> Tensor:  # [count] int64
    """2**53 * (1 - uniform) at many indices: exact integers, 1 to 2**53 - 1, the same on every device.

    The complement and not the uniform, since noise is large, and precision matters, where the uniform is close to 1.
    """
    words = index_counters + _signed(stream_key(seed, position, purpose))
    shifted = torch.empty_like(words)
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
        words.bitwise_xor_(_shift_right(words, shift, out=shifted)).mul_(_signed(factor))
    words.bitwise_xor_(_shift_right(words, 31, out=shifted))
    # 2**53 - (n | 1) is (2**53 - 1 - n) | 1: with all 53 bits of n turned over, and the lowest one set again.
    return _shift_right(words.bitwise_not_(), 11, out=shifted).bitwise_or_(1)


def reproducible_log(value: float) -> float:
    """The natural logarithm of a positive, normal double, within 1 unit in the last place or so.

    Built from operations that IEEE 754 rounds exactly, since the C library's logarithm differs between hosts. With
    value = 2**e (1 + f), s = f / (2 + f) and the series 2 atanh(s) = 2 s + s R: log(1 + f) = f - s (f - R).
    """
    mantissa, exponent = math.frexp(value)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    excess = mantissa - 1.0
    ratio = excess / (2.0 + excess)
    square = ratio * ratio
    series = 0.0
    for coefficient in _ATANH_COEFFICIENTS:
        series = (series + coefficient) * square
    return exponent * _LN2_HIGH - ((ratio * (excess - series) - exponent * _LN2_LOW) - excess)


_SQRT_HALF = 0.7071067811865476
_ATANH_COEFFICIENTS = tuple(2.0 / odd for odd in range(21, 1, -2))  # ten terms: the next is below 2**-60 of the result
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits of log 2, so that a product with any exponent is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")  # and the rest


def stream_key(seed: int, position: int, purpose: Purpose) -> int:
    """What all numbers of one purpose at one position have in common; `hashed` mixes the index into it."""
    return _mixed(_mixed(seed + INCREMENT) + (position * POSITION_STRIDE + purpose) * INCREMENT)


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ (word >> 30)) * FIRST_FACTOR & _WORD
    word = (word ^ (word >> 27)) * SECOND_FACTOR & _WORD
    return word ^ (word >> 31)


def _numerator(word: int) -> int:
    return (word >> 11) | 1


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def _shift_right(words: Tensor, bits: int, *, out: Tensor) -> Tensor:
    """A logical shift: int64 shifts in copies of the sign, which the mask takes away again."""
    return torch.bitwise_right_shift(words, bits, out=out).bitwise_and_(2 ** (64 - bits) - 1)
