"""Ragged batches: every token at its position and in its slot, whatever is packed beside it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.batch import pack
from paceline.engine.block_pool import BlockPool
from paceline.engine.interface import Extension

SHORT = 3


@given(
    sessions=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_every_token_is_fed_where_it_belongs(sessions: list[tuple[int, int, int]], block_size: int) -> None:
    """For each session, by its place in the batch: its ids, its positions, the slots its blocks say, its last rows."""
    pool = BlockPool(200, block_size=block_size)
    batch, next_id = [], 0
    for context, count, rows in sessions:
        table = pool.new_table()
        assert pool.reserve(table, context + count) == []
        pool.extend(table, context)
        batch.append(Extension(table, range(next_id, next_id + count), min(rows, count)))
        next_id += count

    packed = pack(batch, [extension.cache for extension in batch], block_size=block_size, short=SHORT)

    assert sorted(packed.order) == list(range(len(batch)))
    counts = [len(batch[index].ids) for index in packed.order]
    assert [count <= SHORT for count in counts] == sorted((count <= SHORT for count in counts), reverse=True)
    assert packed.short_rows == sum(count for count in counts if count <= SHORT)
    logit_rows = torch.split(packed.logit_rows, list(packed.logit_counts))
    for place, index in enumerate(packed.order):
        extension, start, count = batch[index], int(packed.first_rows[place]), int(packed.row_counts[place])
        table, length = extension.cache, extension.cache.length
        fed = slice(start, start + count)
        assert packed.context_lengths[place] == length
        assert packed.ids[fed].tolist() == list(extension.ids)
        positions = list(range(length, length + count))
        assert packed.positions[fed].tolist() == positions
        slots = [table.blocks[position // block_size] * block_size + position % block_size for position in positions]
        assert packed.slots[fed].tolist() == slots
        assert packed.block_tables[place, : len(table.blocks)].tolist() == table.blocks
        assert logit_rows[index].tolist() == list(range(start + count - extension.rows, start + count))
    assert len(set(packed.slots.tolist())) == len(packed.slots)
