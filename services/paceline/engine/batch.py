"""Ragged batches: the tokens of many sessions laid end to end in one sequence, without padding.

A batch says, as flat tensors, which tokens are fed, at which positions, into which slots of the paged memory, and from
which of them logits are wanted. Sessions that feed few tokens come first, so that attention can take all of those at
once. Knows nothing of networks; attention reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.engine.interface import CacheT, Extension

Ints = npt.NDArray[np.int32]


class Paged(Protocol):
    """A cache whose tokens lie in blocks (`block_pool.BlockTable`)."""

    @property
    def length(self) -> int: ...

    @property
    def blocks(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """One step's tokens; sessions in the order of `order`, which maps them to the extensions they came from.

    Session i feeds rows `first_rows[i]` to `first_rows[i] + row_counts[i] - 1` behind `context_lengths[i]` cached tokens,
    and `block_tables[i]` are its blocks (the rest of that row means nothing). The first `short_sessions` sessions, with
    `short_rows` rows in all, feed at most the limit that `pack` was given.
    """

    ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64
    logit_rows: Tensor  # [logit rows] int64, in the order of the extensions
    logit_counts: tuple[int, ...]  # one an extension
    order: tuple[int, ...]
    first_rows: Ints  # [sessions]
    row_counts: Ints  # [sessions]
    context_lengths: Ints  # [sessions]
    block_tables: Ints  # [sessions, max_blocks]
    block_size: int
    short_sessions: int
    short_rows: int


def pack(batch: Sequence[Extension[CacheT]], tables: Sequence[Paged], *, block_size: int, short: int) -> RaggedBatch:
    """Lay extensions end to end, those of at most `short` tokens first; `tables[i]` has room for extension i."""
    counts = [len(extension.ids) for extension in batch]
    order = sorted(range(len(batch)), key=lambda index: counts[index] > short)  # stable
    short_sessions = sum(count <= short for count in counts)
    row_counts = np.array([counts[index] for index in order], dtype=np.int32)
    context_lengths = np.array([tables[index].length for index in order], dtype=np.int32)
    first_rows = np.cumsum(row_counts, dtype=np.int32) - row_counts
    block_tables = _stack([tables[index].blocks for index in order])
    session_of_row = np.repeat(np.arange(len(order)), row_counts)
    positions = (context_lengths - first_rows)[session_of_row] + np.arange(len(session_of_row))
    slots = block_tables[session_of_row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ends = np.empty(len(batch), dtype=np.int64)  # by extension
    ends[list(order)] = first_rows + row_counts
    logit_counts = [extension.rows for extension in batch]
    ids = np.fromiter(chain.from_iterable([batch[index].ids for index in order]), np.int64, len(positions))
    return RaggedBatch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        logit_rows=torch.from_numpy(_last_rows(ends, logit_counts)),
        logit_counts=tuple(logit_counts),
        order=tuple(order),
        first_rows=first_rows,
        row_counts=row_counts,
        context_lengths=context_lengths,
        block_tables=block_tables,
        block_size=block_size,
        short_sessions=short_sessions,
        short_rows=int(row_counts[:short_sessions].sum()),
    )


def _stack(tables: Sequence[Sequence[int]]) -> Ints:
    # Row by row: one long table among short ones must not cost its length for each of them.
    stacked = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, blocks in zip(stacked, tables, strict=True):
        row[: len(blocks)] = blocks
    return stacked


def _last_rows(
    ends: npt.NDArray[np.int64],  # [extensions], where the rows of each end
    counts: Sequence[int],  # [extensions], how many are wanted of each
) -> npt.NDArray[np.int64]:  # [sum of counts]
    counted = np.cumsum(counts)
    return np.repeat(ends - counted, counts) + np.arange(counted[-1])
