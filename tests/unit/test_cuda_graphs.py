"""Graphs of small steps, all but the capturing: a step goes into the inputs of the next larger size, and comes out whole."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.engine.batch import RaggedBatch, pack
from paceline.engine.block_pool import BlockPool
from paceline.engine.cuda_graphs import SIZES, DecodeInputs, GraphedSteps, Replay, Run
from paceline.engine.interface import Extension

BLOCK_SIZE, MAX_BLOCKS, SCRATCH_SLOT = 4, 6, 999


def batch_of(lengths: list[int], *, counts: int = 1, rows: int = 1) -> RaggedBatch:
    """Sessions of so many cached tokens, each of which feeds `counts` more."""
    pool, extensions = BlockPool(100, block_size=BLOCK_SIZE), []
    for number, length in enumerate(lengths):
        table = pool.new_table()
        pool.reserve(table, length + counts)
        pool.extend(table, length)
        extensions.append(Extension(table, [number + 1] * counts, rows))
    tables = [extension.cache for extension in extensions]
    return pack(extensions, tables, block_size=BLOCK_SIZE, short=0)


def told(inputs: DecodeInputs) -> Tensor:
    """A row for each place, of all that it was given."""
    columns = (inputs.ids, inputs.positions, inputs.slots, inputs.total_lengths)
    return torch.cat((torch.stack([column.long() for column in columns], dim=1), inputs.block_tables.long()), dim=1)


class Recorder:
    """Stands in for capturing: remembers the sizes, and replays by running again."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def capture(self, run: Run, inputs: DecodeInputs) -> Replay:
        def replay() -> Tensor:
            self.replayed.append(len(inputs.ids))
            return run(inputs)

        return replay


def prepared(max_sessions: int) -> tuple[GraphedSteps, Recorder, list[DecodeInputs]]:
    recorder, seen = Recorder(), list[DecodeInputs]()

    def run(inputs: DecodeInputs) -> Tensor:
        seen.append(inputs)
        return told(inputs)

    graphs = GraphedSteps(
        run, max_blocks=MAX_BLOCKS, scratch_slot=SCRATCH_SLOT, device=torch.device("cpu"), capture=recorder.capture
    )
    assert list(graphs.prepare(max_sessions)) == [size for size in SIZES if size < 2 * max_sessions]
    return graphs, recorder, seen


def test_each_session_finds_its_own_inputs_and_gets_its_own_row() -> None:
    """Id, position, slot, length and blocks, in the order of the batch."""
    graphs, recorder, _ = prepared(8)
    batch = batch_of([0, 5, 11])
    assert graphs.takes(batch)
    rows = graphs.logits(batch)
    assert recorder.replayed == [4]
    assert rows.shape[0] == 3
    assert rows[:, 0].tolist() == [1, 2, 3]
    assert rows[:, 1].tolist() == [0, 5, 11]
    assert rows[:, 2].tolist() == batch.slots.tolist()
    assert rows[:, 3].tolist() == [1, 6, 12]
    for row, blocks in zip(rows[:, 4:], batch.block_tables, strict=True):
        assert row[: len(blocks)].tolist() == blocks.tolist()


def test_places_left_over_write_where_nobody_reads() -> None:
    """Also those that a larger step before has used."""
    graphs, _, seen = prepared(4)
    graphs.logits(batch_of([7, 7, 7, 7]))
    graphs.logits(batch_of([7, 7, 7]))
    left_over = told(seen[-1])[3]
    assert left_over[:4].tolist() == [0, 0, SCRATCH_SLOT, 1]


def test_steps_of_another_shape_are_not_taken() -> None:
    """Blocks, prompts, steps without rows, too many sessions, and contexts beyond the tables."""
    graphs, _, _ = prepared(2)
    assert graphs.takes(batch_of([1, 2]))
    assert not graphs.takes(batch_of([1, 2, 3]))
    assert not graphs.takes(batch_of([1], counts=2))
    assert not graphs.takes(batch_of([1], rows=0))
    assert not graphs.takes(batch_of([BLOCK_SIZE * MAX_BLOCKS]))
