"""How often everything occurred that was ever said, up to a number of tokens, and what most often came next.

A suffix tree with counts, cut at a depth (`suffix_kernels`), and the choice of a draft from it after Oliaro et al. 2024,
"SuffixDecoding" (arXiv 2411.04975). Knows nothing of sessions and tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.lookup import suffix_kernels as kernels

_FIRST_CAPACITY = 32  # nodes and tokens
_SHRINKS_ABOVE = 4096  # nodes: what a smaller tree could give back is not worth the work
_FIXED_BYTES = 4096  # objects of Python, and the first arrays


@dataclass(frozen=True, slots=True)
class SuffixProposal:
    """Tokens to come next.

    `score` is how many of them are expected to be accepted, by the frequencies of what was seen alone; `match_length`
    how many last tokens of the context were found.
    """

    ids: tuple[int, ...] = ()
    score: float = 0.0
    match_length: int = 0


NOTHING = SuffixProposal()


class SuffixTree:
    """Sequences of tokens, the last of which is open, and the counts of their windows of up to `max_depth` tokens.

    To append a token, and to look up a draft, costs some operations a level, whatever the history. Memory: 4 bytes a
    token and 56 a node (allocated up to twice as much, as arrays double, and up to four times behind evictions); a text
    that never repeats itself has one node a token, any other more, but never more than `max_depth` a token.
    """

    def __init__(self, *, max_depth: int) -> None:
        self._max_depth = max_depth
        self._nodes = np.zeros(_FIRST_CAPACITY, kernels.NODE)
        self._table = np.zeros(2 * _FIRST_CAPACITY, np.int32)
        self._ring = np.empty(_FIRST_CAPACITY, np.int32)
        self._state = np.zeros(1, kernels.STATE)
        self._state["used"] = self._state["live"] = 1
        self._active = np.zeros(max_depth + 1, np.int32)
        self._found = np.empty(max_depth, np.int32)

    @property
    def is_empty(self) -> bool:
        return bool(self._state["first"][0] == self._state["length"][0])

    @property
    def held_bytes(self) -> int:
        """What it takes to hold the nodes and tokens in use."""
        tokens = int(self._state["length"][0] - self._state["first"][0])
        node_bytes = kernels.NODE.itemsize + 2 * self._table.itemsize
        return _FIXED_BYTES + int(self._state["live"][0]) * node_bytes + tokens * self._ring.itemsize

    def extend(self, ids: Sequence[int] | kernels.Ints) -> None:
        """Append tokens to the open sequence."""
        tokens = np.array(ids, np.int32)
        self._make_room(len(tokens))
        appended = 0
        while True:
            appended = kernels.extend(
                self._nodes, self._table, self._ring, self._state, self._active, tokens, appended, self._max_depth
            )
            if appended == len(tokens):
                return
            self._double_nodes()

    def close_sequence(self) -> None:
        """The next token begins another sequence, and no window spans the two."""
        self._make_room(1)
        kernels.close_sequence(self._ring, self._state)

    def evict_oldest(self) -> int:
        """Forget the oldest closed sequence, and what the counts owe to it; returns its number of tokens."""
        tokens = int(kernels.evict_oldest(self._nodes, self._table, self._ring, self._state, self._max_depth))
        if self._nodes.size > _SHRINKS_ABOVE and 4 * int(self._state["live"][0]) < self._nodes.size:
            self._shrink()
        return tokens

    def tokens_from(self, start: int) -> list[int]:
        """The tokens behind the first `start` of an only sequence."""
        positions = np.arange(start, self._state["length"][0])
        ids: list[int] = self._ring[positions & (self._ring.size - 1)].tolist()
        return ids

    def propose(
        self, context: Sequence[int], max_tokens: int, *, max_spec_factor: float, min_token_prob: float
    ) -> SuffixProposal:
        """The best draft behind the context, of which the last `max_depth` - 1 tokens are looked at.

        For each number of last tokens that occurred before, the way on takes the most frequent token at each step (of
        equals the latest), at most `max_spec_factor` tokens for each that matched, and none whose probability, with
        all before it, is below `min_token_prob`. The draft with the highest score is returned; of equals, the one with
        the longest match. Frequencies become probabilities by dividing by how often the tokens so far occurred with
        another behind them, at the match plus one: what comes next may be new. Leaves the tree as it is.
        """
        length, score, match_length = kernels.look_up(
            self._nodes,
            self._table,
            self._ring,
            self._state,
            np.array(context[-(self._max_depth - 1) :], np.int32),
            self._found,
            self._max_depth,
            max_tokens,
            max_spec_factor,
            min_token_prob,
        )
        return SuffixProposal(tuple(self._found[:length].tolist()), score, match_length) if length else NOTHING

    def _make_room(self, tokens: int) -> None:
        """For so many more tokens in the ring."""
        first, length = int(self._state["first"][0]), int(self._state["length"][0])
        capacity = self._ring.size
        while length - first + tokens > capacity:
            capacity *= 2
        if capacity > self._ring.size:
            held = np.arange(first, length)
            ring = np.empty(capacity, np.int32)
            ring[held & (capacity - 1)] = self._ring[held & (self._ring.size - 1)]
            self._ring = ring

    def _shrink(self) -> None:
        """Count what is left anew, in arrays of its size: else a tree would for ever take what it once took."""
        positions = np.arange(self._state["first"][0], self._state["length"][0])
        ids = self._ring[positions & (self._ring.size - 1)]
        *closed, opened = np.split(ids, np.flatnonzero(ids == kernels.SEPARATOR) + 1)
        fresh = SuffixTree(max_depth=self._max_depth)
        for sequence in closed:
            fresh.extend(sequence[:-1])
            fresh.close_sequence()
        fresh.extend(opened)
        self._nodes, self._table, self._ring = fresh._nodes, fresh._table, fresh._ring
        self._state, self._active = fresh._state, fresh._active

    def _double_nodes(self) -> None:
        self._nodes = np.concatenate([self._nodes, np.zeros_like(self._nodes)])
        self._table = np.zeros(2 * self._table.size, np.int32)
        kernels.rehash(self._nodes, self._table, self._state)


def prepare() -> None:
    """Have everything compiled that a tree runs, or read from the disk where it was before."""
    tree = SuffixTree(max_depth=2)
    tree.extend(range(_FIRST_CAPACITY + 1))  # so that the arrays grow, once
    tree.close_sequence()
    tree.propose([0], 1, max_spec_factor=1.0, min_token_prob=0.0)
    tree.evict_oldest()
