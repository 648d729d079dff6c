"""Attention over paged memory, attached to transformers' models through their public attention interface.

A model that is told to use the implementation `IMPLEMENTATION` calls `_forward` in each layer with the new tokens' queries,
keys and values, laid end to end. What happens then is up to the `Attention` object that came with the forward pass:
write the keys and values into their slots, and let every row see its own session's tokens up to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.engine import cpu_attention
from paceline.engine.batch import RaggedBatch
from paceline.engine.kv_memory import KVMemory, LayerShape

IMPLEMENTATION = "paceline_paged"
KEYWORD = "paged_attention"  # under which the forward pass hands an `Attention` down to the layers
SHORT_ROWS = 16  # tokens; above, one matrix product a session beats reading the blocks in place


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer turns products of queries and keys into scores."""

    scale: float
    sliding_window: int | None  # a row sees the last so many tokens, itself included; None: all
    softcap: float | None


class Attention(Protocol):
    """What a forward pass does in each layer."""

    def attend(
        self,
        layer: int,
        query: Tensor,  # [rows, heads, key_dim]
        key: Tensor,  # [rows, kv_heads, key_dim]
        value: Tensor,  # [rows, kv_heads, value_dim]
        scoring: Scoring,
    ) -> Tensor:  # [rows, heads, value_dim]
        ...


def _forward(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, key_dim]
    key: Tensor,  # [1, kv_heads, rows, key_dim]
    value: Tensor,  # [1, kv_heads, rows, value_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_attention: Attention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # [1, rows, heads, value_dim]
    if paged_attention is None:
        raise TypeError("its layers do not hand the arguments of the forward pass down to their attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return paged_attention.attend(layer, query, key, value, Scoring(scale, sliding_window, softcap))[None], None


AttentionInterface.register(IMPLEMENTATION, _forward)


class ShapeRecorder:
    """Finds out what each layer keeps, from one forward pass whose output means nothing."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}
        self.has_softcap = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self._shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.has_softcap |= scoring.softcap is not None
        return query.new_zeros(*query.shape[:2], value.shape[2])

    @property
    def shapes(self) -> list[LayerShape]:
        """By layer; empty unless the layers are numbered from 0 without a gap."""
        numbers = sorted(self._shapes)
        return [self._shapes[number] for number in numbers] if numbers == list(range(len(numbers))) else []


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Many rows of one session, for attention by matrix products."""

    first_row: int
    row_count: int
    context_length: int
    blocks: Tensor  # [blocks] int64
    block_size: int
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.row_count)

    @property
    def total_length(self) -> int:
        return self.context_length + self.row_count

    def first_block(self, sliding_window: int | None) -> int:
        """The first block that any row sees."""
        if sliding_window is None:
            return 0
        return max(0, self.context_length + 1 - sliding_window) // self.block_size

    def gather(self, stored: Tensor, sliding_window: int | None) -> Tensor:
        """The stored keys or values that the rows may see: [1, kv_heads, tokens, dim]."""
        first = self.first_block(sliding_window)
        blocks = stored.view(-1, self.block_size, *stored.shape[1:])[self.blocks[first:]]
        tokens = blocks.flatten(0, 1)[: self.total_length - first * self.block_size]
        return tokens.transpose(0, 1)[None]

    def mask(self, sliding_window: int | None) -> Tensor | None:
        """Which row sees which of the gathered tokens, [rows, tokens]; None where the plain causal one does."""
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._make_mask(sliding_window)
        return self._masks[sliding_window]

    def _make_mask(self, sliding_window: int | None) -> Tensor | None:
        is_plain = self.context_length == 0 and (sliding_window is None or sliding_window >= self.total_length)
        if is_plain:
            return None
        device, first = self.blocks.device, self.first_block(sliding_window) * self.block_size
        seen = torch.arange(first, self.total_length, device=device)
        row = torch.arange(self.context_length, self.total_length, device=device)[:, None]
        mask = seen <= row
        return mask if sliding_window is None else mask & (seen > row - sliding_window)


class RaggedAttention:
    """Attention of one step on any device: a kernel that reads the blocks in place for sessions with few rows, where
    the batch was packed with any, and matrix products session by session for the rest.
    """

    def __init__(self, memory: KVMemory, batch: RaggedBatch, slots: Tensor) -> None:
        self._memory, self._slots, self._short_rows = memory, slots, batch.short_rows
        self._plan = _row_plan(batch) if batch.short_rows else None
        self._chunks = _chunks(batch, slots.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self._memory.write(layer, key, value, self._slots)
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        parts = [_attend_chunk(query[chunk.rows], keys, values, chunk, scoring) for chunk in self._chunks]
        if self._plan is not None:
            parts.insert(0, _attend_in_place(query[: self._short_rows], keys, values, self._plan, scoring))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@lru_cache(maxsize=1)
def fused_kernel() -> Callable[..., Any] | None:
    """torch's attention over blocks on a GPU; None where torch is too old to have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - older than the torch that has it
    except ImportError:
        return None
    kernel: Callable[..., Any] = varlen_attn
    return kernel if "block_table" in signature(kernel).parameters else None


class FusedAttention:
    """Attention of one step on a GPU: one kernel over all sessions, reading the blocks in place.

    Nothing here waits for the device, and all that changes from step to step are the contents of the tensors, so a step
    can be captured as a graph.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        slots: Tensor,  # [rows] int64
        row_borders: Tensor,  # [sessions + 1] int32, where the rows of each session begin, and the end
        total_lengths: Tensor,  # [sessions] int32, tokens with the new ones
        block_tables: Tensor,  # [sessions, max_blocks] int32
        most_rows: int,
        longest: int,
    ) -> None:
        self._memory, self._slots = memory, slots
        self._row_borders, self._total_lengths, self._block_tables = row_borders, total_lengths, block_tables
        self._most_rows, self._longest = most_rows, longest

    @classmethod
    def of_batch(cls, memory: KVMemory, batch: RaggedBatch, slots: Tensor) -> FusedAttention:
        totals = batch.context_lengths + batch.row_counts

        def on_device(numbers: Any) -> Tensor:
            return torch.as_tensor(numbers, dtype=torch.int32).to(slots.device, non_blocking=True)

        return cls(
            memory,
            slots=slots,
            row_borders=on_device([0, *batch.row_counts.cumsum().tolist()]),
            total_lengths=on_device(totals),
            block_tables=on_device(batch.block_tables),
            most_rows=int(batch.row_counts.max()),
            longest=int(totals.max()),
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        memory = self._memory
        memory.write(layer, key, value, self._slots)
        keys, values = memory.blocks(layer)
        window = -1 if scoring.sliding_window is None else scoring.sliding_window - 1
        kernel = fused_kernel()
        assert kernel is not None, "chosen only where there is one"
        attended: Tensor = kernel(
            query,
            keys,
            values,
            self._row_borders,
            None,
            self._most_rows,
            self._longest,
            scale=scoring.scale,
            window_size=(window, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self._total_lengths,
            block_table=self._block_tables,
        )
        return attended


def _row_plan(batch: RaggedBatch) -> cpu_attention.RowPlan:
    count = batch.short_sessions
    return cpu_attention.plan_rows(
        batch.block_tables[:count],
        first_row=batch.first_rows[:count],
        row_count=batch.row_counts[:count],
        context_length=batch.context_lengths[:count],
        block_size=batch.block_size,
    )


def _attend_in_place(
    query: Tensor, keys: Tensor, values: Tensor, plan: cpu_attention.RowPlan, scoring: Scoring
) -> Tensor:
    return cpu_attention.attend(
        query,
        keys,
        values,
        plan,
        scale=scoring.scale,
        sliding_window=scoring.sliding_window,
        softcap=scoring.softcap,
    )


def _chunks(batch: RaggedBatch, device: torch.device) -> list[_Chunk]:
    chunks = []
    for session in range(batch.short_sessions, len(batch.order)):
        start, count = int(batch.first_rows[session]), int(batch.row_counts[session])
        context_length = int(batch.context_lengths[session])
        used = -(-(context_length + count) // batch.block_size)
        blocks = torch.from_numpy(batch.block_tables[session, :used].astype("int64")).to(device)
        chunks.append(_Chunk(start, count, context_length, blocks, batch.block_size))
    return chunks


def _attend_chunk(query: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk, scoring: Scoring) -> Tensor:
    seen_keys, seen_values = (chunk.gather(stored, scoring.sliding_window) for stored in (keys, values))
    mask = chunk.mask(scoring.sliding_window)
    rows = query.transpose(0, 1)[None]  # [1, heads, rows, dim]
    if scoring.softcap is not None:
        attended = _attend_capped(rows, seen_keys, seen_values, mask, scoring, scoring.softcap)
    else:
        attended = scaled_dot_product_attention(
            rows,
            seen_keys,
            seen_values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scale,
            enable_gqa=rows.shape[1] != seen_keys.shape[1],
        )
    return attended[0].transpose(0, 1)


def _attend_capped(
    query: Tensor,  # [1, heads, rows, dim]
    keys: Tensor,  # [1, kv_heads, tokens, dim]
    values: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    softcap: float,
) -> Tensor:
    """Scores squeezed into (-softcap, softcap) by tanh (Gemma 2), which no fused kernel does."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (states.repeat_interleave(group, dim=1) for states in (keys, values))
    scores = (query @ keys.transpose(-1, -2)).float() * scoring.scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return probs.to(values.dtype) @ values
