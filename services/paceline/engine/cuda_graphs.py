"""Steps of one token a session, replayed as CUDA graphs: a small model's step is mostly launches, and a graph is one.

A graph repeats exactly what was captured, on the same memory. So there is one for each of a few batch sizes; a step is
copied into the inputs of the next larger one, and the places left over write to a scratch slot that nobody reads. Knows
nothing of sessions; what is captured is handed in, so that all but the capturing can be tried without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.batch import RaggedBatch

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # sessions


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """One token of each of `size` sessions, as tensors that stay where they are."""

    ids: Tensor  # [size] int64
    positions: Tensor  # [size] int64
    slots: Tensor  # [size] int64
    total_lengths: Tensor  # [size] int32, tokens of each session with the new one
    block_tables: Tensor  # [size, max_blocks] int32

    @classmethod
    def empty(cls, size: int, *, max_blocks: int, scratch_slot: int, device: torch.device) -> DecodeInputs:
        """Inputs of which every place is left over: one token at position 0, in the scratch slot."""

        def filled(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            ids=filled(0, torch.int64, size),
            positions=filled(0, torch.int64, size),
            slots=filled(scratch_slot, torch.int64, size),
            total_lengths=filled(1, torch.int32, size),
            block_tables=filled(0, torch.int32, size, max_blocks),
        )

    def take(self, batch: RaggedBatch, *, scratch_slot: int) -> None:
        """Copy a step in, in front; nobody waits for the device."""
        count, blocks = len(batch.order), batch.block_tables.shape[1]
        totals = torch.from_numpy(batch.context_lengths + batch.row_counts)
        for place, values in (
            (self.ids[:count], batch.ids),
            (self.positions[:count], batch.positions),
            (self.slots[:count], batch.slots),
            (self.total_lengths[:count], totals),
            (self.block_tables[:count, :blocks], torch.from_numpy(batch.block_tables)),
        ):
            place.copy_(values, non_blocking=True)
        self.ids[count:] = 0
        self.positions[count:] = 0
        self.slots[count:] = scratch_slot
        self.total_lengths[count:] = 1


Run = Callable[[DecodeInputs], Tensor]
"""From inputs to the logits of their tokens, [size, vocab_size]; without waiting for the device."""

Replay = Callable[[], Tensor]
"""Runs again on the inputs as they are now; the result is overwritten by the next replay."""


def capture(run: Run, inputs: DecodeInputs) -> Replay:
    """The run as a CUDA graph, on the device of its inputs."""
    with torch.cuda.device(inputs.ids.device):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is set up at first use must not be captured
            for _ in range(2):
                run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run(inputs)

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


class GraphedSteps:
    """The graphs of a model, by batch size; each is captured when `prepare` first comes to it."""

    def __init__(
        self,
        run: Run,
        *,
        max_blocks: int,
        scratch_slot: int,
        device: torch.device,
        capture: Callable[[Run, DecodeInputs], Replay] = capture,
    ) -> None:
        self._run, self._capture = run, capture
        self._max_blocks, self._scratch_slot, self._device = max_blocks, scratch_slot, device
        self._graphs: dict[int, tuple[DecodeInputs, Replay]] = {}

    def prepare(self, max_sessions: int) -> Iterator[int]:
        """Capture the sizes that up to `max_sessions` sessions need; yields each one when it is there."""
        for size in SIZES:
            inputs = DecodeInputs.empty(
                size, max_blocks=self._max_blocks, scratch_slot=self._scratch_slot, device=self._device
            )
            self._graphs[size] = inputs, self._capture(self._run, inputs)
            yield size
            if size >= max_sessions:
                return

    def takes(self, batch: RaggedBatch) -> bool:
        """Whether the batch is one token a session, each with its row, and there is a graph that holds it."""
        count = len(batch.order)
        return (
            count <= max(self._graphs, default=0)
            and len(batch.ids) == count
            and set(batch.logit_counts) == {1}
            and batch.block_tables.shape[1] <= self._max_blocks
        )

    def logits(self, batch: RaggedBatch) -> Tensor:
        """[sessions, vocab_size], good until the next call; for a batch that `takes` allows."""
        count = len(batch.order)
        inputs, replay = self._graphs[min(size for size in self._graphs if size >= count)]
        inputs.take(batch, scratch_slot=self._scratch_slot)
        return replay()[:count]
