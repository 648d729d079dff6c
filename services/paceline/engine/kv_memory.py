"""The tensors behind paged memory: keys and values of every layer, by slot.

A slot is one token's place, `block * block_size + offset`; which blocks belong to whom is `block_pool`'s affair. All
layers share one numbering. Knows nothing of models beyond the shapes of their keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.block_pool import BlockCopy


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class KVMemory:
    """Pre-allocated keys and values: `keys[layer]` is [num_slots, kv_heads, key_dim], `values[layer]` likewise.

    There is one block more than sessions can have; tokens that mean nothing go there (`scratch_slot`).

    Allocated once and never grown. It is written to at once, so that the system hands it over now or not at all, and a
    service's resident memory stays what it is after the start.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.scratch_slot = num_blocks * block_size
        slots = self.scratch_slot + block_size

        def allocate(shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
            """One tensor a layer; layers of equal shapes are slices of one allocation."""
            kinds = {
                shape: torch.empty(shapes.count(shape), slots, *shape, dtype=dtype, device=device).zero_()
                for shape in dict.fromkeys(shapes)
            }
            self._stacks += kinds.values()
            slices = {shape: iter(stack) for shape, stack in kinds.items()}
            return [next(slices[shape]) for shape in shapes]

        self._stacks: list[Tensor] = []  # [layers of one kind, slots, kv_heads, dim]
        self.keys = allocate([(layer.kv_heads, layer.key_dim) for layer in layers])
        self.values = allocate([(layer.kv_heads, layer.value_dim) for layer in layers])

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by block, [num_blocks, block_size, kv_heads, dim]."""
        keys, values = (
            stored.view(-1, self.block_size, *stored.shape[1:]) for stored in (self.keys[layer], self.values[layer])
        )
        return keys, values

    def write(
        self,
        layer: int,
        keys: Tensor,  # [tokens, kv_heads, key_dim]
        values: Tensor,  # [tokens, kv_heads, value_dim]
        slots: Tensor,  # [tokens] int64
    ) -> None:
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, in all layers at once."""
        for copy in copies:
            source, destination = (
                slice(block * self.block_size, (block + 1) * self.block_size)
                for block in (copy.source, copy.destination)
            )
            for stack in self._stacks:
                stack[:, destination] = stack[:, source]


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Of keys and values in all layers."""
    return dtype.itemsize * sum(layer.numbers for layer in layers)
