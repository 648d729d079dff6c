"""Attention over paged blocks on a CPU, for a few query rows of many sessions at once (decoding and verification).

Keys and values are read where they lie; no copy is longer than a tile, a few tokens. The softmax is accumulated tile by
tile (Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1), in float32. What one session gets is a
function of its own rows, keys and values alone: not of the batch, nor of the number of threads.

The kernel is compiled by numba at its first call and kept on disk where that can be written. What LLVM does not turn
into vector code by itself (a transposition, the two matrix products) is given to it as such, 16 numbers at a time.

Knows nothing of models, or of who holds which block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils as _untyped_cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from paceline.compiled import c_function, compiled
from paceline.engine.torch_threads import available_threads, run

_IntArray = NDArray[np.int32]
_FloatArray = NDArray[np.float32]

_cgutils: Any = _untyped_cgutils

_LANES = 16  # numbers in a vector; LLVM splits it where the hardware's are shorter
_TILE = 64  # tokens between two looks at the running maximum
_LOWEST = np.float32(-1e30)  # below any score, yet finite: the difference of two of them is a number
_LOG2_E = math.log2(math.e)

# Cost of a token for a key-value head, in query rows: reading and transposing it costs as much as this many rows do.
_TOKEN_COST = 4
# Multiplications below which one thread is done before the others have begun.
_LEAST_SHARED_WORK = 400_000
_NUMBERS = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16)}  # as numpy sees them
_WORDS = 19  # in the description of the work for all threads


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Who attends to what in one step; the same for all layers. Made by `plan_rows`, which checks it."""

    block_tables: _IntArray  # [sessions, max_blocks]
    first_row: _IntArray  # [sessions], where the session's rows begin in the query
    row_count: _IntArray  # [sessions]
    context_length: _IntArray  # [sessions], tokens before the session's first row
    block_size: int
    token_count: int  # rows that the query must have at least
    block_count: int  # blocks that keys and values must have at least
    pairs: int  # of a row and a token, over all sessions: how much work this is


def plan_rows(
    block_tables: ArrayLike,  # [sessions, max_blocks]
    *,
    first_row: ArrayLike,  # [sessions]
    row_count: ArrayLike,  # [sessions]
    context_length: ArrayLike,  # [sessions]
    block_size: int,
) -> RowPlan:
    """The plan of a step; row i of a session sees its first `context_length + i + 1` tokens.

    Entries of a block table behind the session's last token may be anything. Raises ValueError for shapes that do not
    fit each other, negative counts, and tables too short for their sessions.
    """
    tables = np.ascontiguousarray(block_tables, np.int32)
    first, rows, context = (np.ascontiguousarray(each, np.int32) for each in (first_row, row_count, context_length))
    if tables.ndim != 2 or any(each.shape != tables.shape[:1] for each in (first, rows, context)):
        raise ValueError("block_tables must be [sessions, max_blocks] and all else [sessions]")
    if block_size < 1 or any((each < 0).any() for each in (first, rows, context)):
        raise ValueError("block_size must be positive, and no row or length negative")
    lengths = np.where(rows > 0, context + rows, 0)
    blocks = -(-lengths // block_size)
    if (blocks > tables.shape[1]).any():
        raise ValueError(f"{blocks.max()} blocks are needed, and block_tables has {tables.shape[1]}")
    used = tables[np.arange(tables.shape[1]) < blocks[:, None]]
    if (used < 0).any():
        raise ValueError("a block below 0 among those in use")
    return RowPlan(
        block_tables=tables,
        first_row=first,
        row_count=rows,
        context_length=context,
        block_size=block_size,
        token_count=int((first + rows).max(initial=0)),
        block_count=int(used.max(initial=-1)) + 1,
        pairs=int(np.dot(rows.astype(np.int64), lengths)),
    )


def is_supported(dtype: torch.dtype) -> bool:
    """Whether `attend` takes queries, keys and values of this type."""
    return dtype in _NUMBERS


def prepare(dtype: torch.dtype) -> None:
    """Compile, or read from the disk, what `attend` needs for this type, so that no caller waits for it."""
    _region(_NUMBERS[dtype])


def attend(
    query: Tensor,  # [tokens, heads, head_dim]
    keys: Tensor,  # [num_slots, kv_heads, head_dim]; slot = block * block_size + offset
    values: Tensor,  # [num_slots, kv_heads, head_dim]
    plan: RowPlan,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [tokens, heads, head_dim]
    """Causal attention of every session's rows to its own tokens, the rows' own among them, in the query's dtype.

    Each row sees the last `sliding_window` of its tokens, itself included; scores are capped at `softcap * tanh(score /
    softcap)`. Query heads share key-value heads in order, `heads / kv_heads` to each. Rows of no session are left
    undefined. May be called by several threads at once. Raises ValueError for shapes or types that do not fit.
    """
    _check(query, keys, values, plan)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    query_array, key_array, value_array = _as_array(query.contiguous()), _as_array(keys), _as_array(values)
    # Rounded by the kernel: torch would do so with threads of its own, which wait busily for each other.
    output = torch.empty(query.shape, dtype=query.dtype)
    output_array = _as_array(output)
    work = plan.pairs * query.shape[1] * query.shape[2]
    threads = available_threads() if work >= _LEAST_SHARED_WORK else 1
    if threads == 1:
        # fmt: off
        _attend_part(
            query_array, key_array, value_array, plan.block_tables, plan.first_row, plan.row_count, plan.context_length,
            plan.block_size, np.float32(scale), sliding_window or 0, np.float32(softcap or 0.0), output_array, 0, 1,
        )
        # fmt: on
    else:
        arrays = (
            query_array,
            key_array,
            value_array,
            output_array,
            plan.block_tables,
            plan.first_row,
            plan.row_count,
            plan.context_length,
        )
        integers = (0, threads, plan.block_size, sliding_window or 0)
        _attend_on_all_threads(arrays, integers, (scale, softcap or 0.0), threads)
    return output


def _attend_on_all_threads(
    arrays: Sequence[NDArray[Any]], integers: Sequence[int], numbers: Sequence[float], threads: int
) -> None:
    """`_attend_part` for all parts at once; the values go to `_claim_parts` in one array of words."""
    query, keys = arrays[:2]
    shapes = (*query.shape, keys.shape[0], keys.shape[1], *arrays[4].shape)
    words = np.array([*integers, *shapes, *(array.ctypes.data for array in arrays)], np.int64)
    floats = np.array(numbers, np.float32)
    words_and_floats = np.array([words.ctypes.data, floats.ctypes.data], np.int64)
    run(_region(query.dtype), words_and_floats.ctypes.data, threads)


def _check(query: Tensor, keys: Tensor, values: Tensor, plan: RowPlan) -> None:
    if not is_supported(query.dtype) or not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"unsupported types: {query.dtype}, {keys.dtype}, {values.dtype}")
    if query.ndim != 3 or keys.ndim != 3 or keys.shape != values.shape or query.shape[2] != keys.shape[2]:
        raise ValueError(f"shapes do not fit: {tuple(query.shape)}, {tuple(keys.shape)}, {tuple(values.shape)}")
    if keys.shape[1] == 0 or query.shape[1] % keys.shape[1]:
        raise ValueError(f"{query.shape[1]} heads cannot share {keys.shape[1]} key-value heads")
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError("keys and values must be contiguous: they are never copied")
    if query.shape[0] < plan.token_count or keys.shape[0] < plan.block_count * plan.block_size:
        raise ValueError("the plan has more rows than the query, or more blocks than keys and values")


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory; numpy has no bfloat16, whose bits stand for it."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor.detach()).numpy()


# Vector code. Each of these emits the instructions for the types it is called with.


class _Emitter:
    """LLVM instructions in the place of one call; arrays and numbers are named by their place among its arguments."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder = builder
        self.arguments = arguments
        self._context = context
        self._types = signature.args
        self.number = ir.FloatType()
        self.vector = ir.VectorType(self.number, _LANES)

    def add(self, value: Any, constant: int) -> Any:
        return self.builder.add(value, ir.Constant(value.type, constant))

    def pointer(self, array: int, *indices: Any) -> Any:
        kind = self._types[array]
        made = self._context.make_array(kind)(self._context, self.builder, self.arguments[array])
        return _cgutils.get_item_pointer(self._context, self.builder, kind, made, indices)

    def load(self, array: int, *indices: Any) -> Any:
        return self.builder.load(self.pointer(array, *indices))

    def load_vector(self, array: int, *indices: Any) -> Any:
        pointer = self.pointer(array, *indices)
        kind = ir.VectorType(pointer.type.pointee, _LANES)
        loaded = self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()))
        loaded.align = 2 if pointer.type.pointee == ir.IntType(16) else 4
        return loaded

    def store_vector(self, vector: Any, array: int, *indices: Any) -> None:
        pointer = self.builder.bitcast(self.pointer(array, *indices), self.vector.as_pointer())
        self.builder.store(vector, pointer).align = 4

    def widen(self, vector: Any) -> Any:
        """The vector as float32; 16 bits are those of a bfloat16, the upper half of a float32."""
        if vector.type == self.vector:
            return vector
        words = ir.VectorType(ir.IntType(32), _LANES)
        shifted = self.builder.shl(self.builder.zext(vector, words), ir.Constant(words, [16] * _LANES))
        return self.builder.bitcast(shifted, self.vector)

    def shuffle(self, first: Any, second: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), lanes))

    def repeat(self, number: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, undefined, [0] * _LANES)

    def multiply_add(self, first: Any, second: Any, third: Any) -> Any:
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fmuladd.v{_LANES}f32"
        return self.builder.call(
            _cgutils.get_or_insert_function(self.builder.module, kind, name), [first, second, third]
        )

    def larger(self, first: Any, second: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", first, second), first, second)

    def fold(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        for distance in (8, 4, 2, 1):
            turned = [(lane + distance) % _LANES for lane in range(_LANES)]
            vector = combine(vector, self.shuffle(vector, vector, turned))
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


# numba's decorator, typed as what it makes: a function without the leading typing context.
_intrinsic = cast(Callable[[Callable[..., Any]], Callable[..., Any]], intrinsic)
_index = numba.types.intp


@_intrinsic
def _widen_vector(typing: Any, cells: Any, slot: Any, head: Any, column: Any, target: Any, row: Any) -> Any:
    """target[row, 0, column :] = cells[slot, head, column :], of one vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Emitter(context, builder, signature, arguments)
        _, slot, head, column, _, row = arguments
        code.store_vector(code.widen(code.load_vector(0, slot, head, column)), 4, row, ir.Constant(row.type, 0), column)
        return context.get_dummy_value()

    return numba.types.void(cells, _index, _index, _index, target, _index), emit


@_intrinsic
def _widen_number(typing: Any, number: Any) -> Any:
    """The number as float32, an element of keys, values or query."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (number,) = arguments
        if number.type == ir.FloatType():
            return number
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(number, word), ir.Constant(word, 16)), ir.FloatType())

    return numba.types.float32(number), emit


@_intrinsic
def _round_into(typing: Any, target: Any, token: Any, head: Any, column: Any, number: Any) -> Any:
    """target[token, head, column] = the number, to the nearest bfloat16, or the even one of two, if that is its type."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Emitter(context, builder, signature, arguments)
        *_, number = arguments
        pointer = code.pointer(0, *arguments[1:4])
        if pointer.type.pointee == ir.IntType(16):
            bits = builder.bitcast(number, ir.IntType(32))
            upper = builder.lshr(bits, ir.Constant(bits.type, 16))
            is_odd = builder.and_(upper, ir.Constant(bits.type, 1))
            rounded = builder.lshr(builder.add(code.add(bits, 0x7FFF), is_odd), ir.Constant(bits.type, 16))
            is_nan = builder.fcmp_unordered("uno", number, number)
            chosen = builder.select(is_nan, ir.Constant(bits.type, 0x7FC0), rounded)
            number = builder.trunc(chosen, ir.IntType(16))
        builder.store(number, pointer)
        return context.get_dummy_value()

    return numba.types.void(target, _index, _index, _index, numba.types.float32), emit


@_intrinsic
def _transpose_square(typing: Any, cells: Any, slots: Any, token: Any, head: Any, column: Any, target: Any) -> Any:
    """target[column + i, token + j] = cells[slots[token + j], head, column + i], for i and j of one vector."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Emitter(context, builder, signature, arguments)
        _, _, token, head, column, _ = arguments
        rows = [code.load_vector(0, code.load(1, code.add(token, lane)), head, column) for lane in range(_LANES)]
        for size in (8, 4, 2, 1):  # swaps the off-diagonal squares of this size
            upper = [lane if not lane & size else _LANES + lane - size for lane in range(_LANES)]
            lower = [lane + size if not lane & size else _LANES + lane for lane in range(_LANES)]
            for at in range(_LANES):
                if not at & size:
                    pair = rows[at], rows[at + size]
                    rows[at], rows[at + size] = code.shuffle(*pair, upper), code.shuffle(*pair, lower)
        for lane, row in enumerate(rows):
            code.store_vector(code.widen(row), 5, code.add(column, lane), ir.Constant(token.type, 0), token)
        return context.get_dummy_value()

    return numba.types.void(cells, slots, _index, _index, _index, target), emit


_ROWS, _VECTORS = 4, 2  # of sums that are kept in registers


@_intrinsic
def _multiply_tile(
    typing: Any,
    sums: Any,
    weights: Any,
    cells: Any,
    slots: Any,
    head: Any,
    sums_row: Any,
    weights_row: Any,
    column: Any,
    count: Any,
    rows: Any,
    vectors: Any,
) -> Any:
    """As `_multiply`, of so many rows and vectors from `column` on; no more than are kept in registers."""

    def emit_tile(code: _Emitter, rows: int, vectors: int) -> None:
        builder = code.builder
        _, _, _, _, head, sums_row, weights_row, column, count, _, _ = code.arguments
        columns = [code.add(column, _LANES * vector) for vector in range(vectors)]
        places = [(code.add(sums_row, row), each) for row in range(rows) for each in columns]
        totals = [_cgutils.alloca_once_value(builder, code.load_vector(0, *place)) for place in places]
        with _cgutils.for_range(builder, count) as loop:
            slot = code.load(3, loop.index)
            factors = [code.widen(code.load_vector(2, slot, head, each)) for each in columns]
            for row in range(rows):
                weight = code.repeat(code.load(1, code.add(weights_row, row), loop.index))
                for factor, total in zip(factors, totals[row * vectors :], strict=False):
                    builder.store(code.multiply_add(weight, factor, builder.load(total)), total)
        for place, total in zip(places, totals, strict=True):
            code.store_vector(builder.load(total), 0, *place)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Emitter(context, builder, signature, arguments)
        *_, rows, vectors = arguments
        for some_rows in range(1, _ROWS + 1):
            for some_vectors in range(1, _VECTORS + 1):
                fits = builder.and_(
                    builder.icmp_signed("==", rows, ir.Constant(rows.type, some_rows)),
                    builder.icmp_signed("==", vectors, ir.Constant(vectors.type, some_vectors)),
                )
                with builder.if_then(fits):
                    emit_tile(code, some_rows, some_vectors)
        return context.get_dummy_value()

    return numba.types.void(sums, weights, cells, slots, *[_index] * 7), emit


@_intrinsic
def _prefetch_line(typing: Any, cells: Any, slot: Any, head: Any, column: Any) -> Any:
    """Ask for the cache line of cells[slot, head, column], which is soon read."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Emitter(context, builder, signature, arguments)
        word = ir.IntType(32)
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        prefetch = _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read; into the second cache, as a tile of all heads may exceed the first; data.
        hints = [ir.Constant(word, hint) for hint in (0, 2, 1)]
        builder.call(prefetch, [builder.bitcast(code.pointer(0, *arguments[1:]), byte), *hints])
        return context.get_dummy_value()

    return numba.types.void(cells, _index, _index, _index), emit


def _emit_fold(name: str, context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    code = _Emitter(context, builder, signature, arguments)
    _, row, width = arguments
    combine = code.larger if name == "larger" else builder.fadd
    total = _cgutils.alloca_once_value(builder, code.load_vector(0, row, ir.Constant(row.type, 0)))
    step = ir.Constant(width.type, _LANES)
    with _cgutils.for_range_slice(builder, step, width, step) as (column, _):
        builder.store(combine(code.load_vector(0, row, column), builder.load(total)), total)
    return code.fold(builder.load(total), combine)


@_intrinsic
def _row_maximum(typing: Any, array: Any, row: Any, width: Any) -> Any:
    """The largest of array[row, : width], whole vectors; unspecified among NaN."""
    return numba.types.float32(array, _index, _index), functools.partial(_emit_fold, "larger")


@_intrinsic
def _row_sum(typing: Any, array: Any, row: Any, width: Any) -> Any:
    """The sum of array[row, : width], whole vectors."""
    return numba.types.float32(array, _index, _index), functools.partial(_emit_fold, "add")


# The kernel.


# No flag lets LLVM reorder sums or assume that there is no NaN.
_compile = compiled(fastmath=("contract", "nsz"))


@_compile
def _read_rows(cells: Any, slots: Any, count: int, head: int, target: _FloatArray) -> None:
    """target[:count] = cells[slots[:count], head]."""
    head_dim = cells.shape[2]
    for row in range(count):
        for column in range(0, head_dim - _LANES + 1, _LANES):
            _widen_vector(cells, slots[row], head, column, target, row)
        for column in range(head_dim // _LANES * _LANES, head_dim):
            target[row, 0, column] = _widen_number(cells[slots[row], head, column])


@_compile
def _read_columns(cells: Any, slots: Any, count: int, head: int, target: _FloatArray) -> None:
    """target[:, :count] = cells[slots[:count], head].T, count being of whole vectors."""
    head_dim = cells.shape[2]
    for token in range(0, count, _LANES):
        for column in range(0, head_dim - _LANES + 1, _LANES):
            _transpose_square(cells, slots, token, head, column, target)
    for column in range(head_dim // _LANES * _LANES, head_dim):
        for token in range(count):
            target[column, 0, token] = _widen_number(cells[slots[token], head, column])


@_compile
def _multiply(
    sums: _FloatArray,  # [*, width or more]
    sums_row: int,
    weights: _FloatArray,  # [*, count or more]
    weights_row: int,
    cells: Any,  # [num_slots, kv_heads, width or more]
    slots: Any,  # [count or more]
    head: int,
    rows: int,
    count: int,
    width: int,
) -> None:
    """sums[sums_row :] += weights[weights_row :] @ cells[slots, head], `rows` rows of them; width in whole vectors."""
    for column in range(0, width, _LANES * _VECTORS):
        vectors = min(_VECTORS, (width - column) // _LANES)
        for row in range(0, rows, _ROWS):
            some = min(_ROWS, rows - row)
            _multiply_tile(
                sums, weights, cells, slots, head, sums_row + row, weights_row + row, column, count, some, vectors
            )


@_compile
def _prefetch(cells: Any, slots: Any, count: int, first_head: int, end_head: int) -> None:
    """Ask for the cells of these slots and heads, which lie side by side."""
    head_dim = cells.shape[2]
    line = 64 // cells.itemsize
    for token in range(count):
        for column in range(0, (end_head - first_head) * head_dim, line):
            _prefetch_line(cells, slots[token], first_head, column)


@_compile
def _power_of_two(exponent: Any) -> Any:
    """2 ** exponent for an exponent of at most 0, to 1e-7 of it; 0 below -126, NaN for NaN.

    The exponent's whole part becomes that of the result by its bits: a large number's last bits are whole numbers.
    """
    bounded = np.float32(-126.0) if exponent < np.float32(-126.0) else exponent  # noqa: FURB136 (hides NaN)
    shifted = bounded + np.float32(12582912.0)  # 1.5 * 2**23
    rest = bounded - (shifted - np.float32(12582912.0))
    # Taylor series of 2 ** rest for |rest| <= 1/2, coefficients adjusted for the least error (minimax).
    result = np.float32(1.535336188319500e-4)
    result = result * rest + np.float32(1.339887440266574e-3)
    result = result * rest + np.float32(9.618437357674640e-3)
    result = result * rest + np.float32(5.550332471162809e-2)
    result = result * rest + np.float32(2.402264791363012e-1)
    result = result * rest + np.float32(6.931472028550421e-1)
    result = result * rest + np.float32(1.0)
    whole = np.int32((np.float32(shifted).view(np.int32) << np.int32(23)) + np.int32(127 << 23)).view(np.float32)
    return np.float32(0.0) if exponent < np.float32(-126.0) else result * whole


@_compile
def _hide(scores: _FloatArray, row: int, first: int, end: int, width: int) -> None:
    """Leave only the scores first .. end - 1 of the row's `width`."""
    for token in range(min(first, width)):
        scores[row, token] = -np.inf
    for token in range(end, width):
        scores[row, token] = -np.inf


@_compile
def _weigh(scores: _FloatArray, row: int, width: int, highest: Any) -> None:
    """Scores, in powers of two, become weights: 1 for the highest."""
    for token in range(width):
        scores[row, token] = _power_of_two(scores[row, token] - highest)


@_compile
def _cap(scores: _FloatArray, row: int, width: int, cap: Any) -> None:
    for token in range(width):
        scores[row, token] = cap * np.float32(math.tanh(scores[row, token]))


@_compile
def _whole_vectors(count: int) -> int:
    """The count, rounded up to whole vectors."""
    return (count + _LANES - 1) // _LANES * _LANES


@_compile
def _find_slots(table: _IntArray, block_size: int, first: int, count: int, slots: Any) -> None:
    """Slots of the tokens first .. first + count - 1; the last again up to a whole vector, so that all can be read."""
    block, offset = first // block_size, first % block_size
    for token in range(count):
        slots[token] = table[block] * block_size + offset
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0
    for token in range(count, _whole_vectors(count)):
        slots[token] = slots[count - 1]


@_compile
def _first_seen(context_length: int, window: int) -> int:
    """The first token that a session's first row sees, and with it any row."""
    return max(0, context_length + 1 - window) if window > 0 else 0


@_compile
def _read_queries(
    query: Any, first_row: int, head: int, group: int, rows: int, factor: Any, queries: _FloatArray, start: int
) -> None:
    """queries[start :] = factor * the session's `rows` rows of the query heads that share this key-value head."""
    for row in range(rows):
        token, query_head = first_row + row // group, head * group + row % group
        for column in range(query.shape[2]):
            queries[start + row, column] = _widen_number(query[token, query_head, column]) * factor


@_compile
def _soften(
    scores: _FloatArray, row: int, width: int, sums: _FloatArray, highest: Any, totals: Any, sums_row: int
) -> None:
    """The row's scores become weights against its highest score so far; what was summed up before shrinks to match."""
    top = max(highest[sums_row], _row_maximum(scores, row, width))
    if top > highest[sums_row]:
        shrink = _power_of_two(highest[sums_row] - top)
        highest[sums_row] = top
        totals[sums_row] *= shrink
        for column in range(sums.shape[1]):
            sums[sums_row, column] *= shrink
    _weigh(scores, row, width, top)
    totals[sums_row] += _row_sum(scores, row, width)


@_compile
def _prefetch_next(
    keys: Any,  # [num_slots, kv_heads, head_dim]
    values: Any,  # [num_slots, kv_heads, head_dim]
    block_tables: _IntArray,  # [sessions, max_blocks]
    row_count: _IntArray,  # [sessions]
    context_length: _IntArray,  # [sessions]
    block_size: int,
    window: int,
    session: int,
    first: int,
    first_head: int,
    end_head: int,
    slots: Any,
) -> None:
    """Ask for the tile that begins at token `first`, or if the session has none there, for the next session's first."""
    if first >= context_length[session] + row_count[session]:
        session += 1
        if session == row_count.size or row_count[session] == 0:
            return
        first, first_head, end_head = _first_seen(context_length[session], window), 0, keys.shape[1]
    count = min(_TILE, context_length[session] + row_count[session] - first)
    _find_slots(block_tables[session], block_size, first, count, slots)
    _prefetch(keys, slots, count, first_head, end_head)
    _prefetch(values, slots, count, first_head, end_head)


@_compile
def _score(
    scores: _FloatArray,
    queries: _FloatArray,
    start: int,
    key_columns: _FloatArray,
    in_order: Any,
    rows: int,
    width: int,
    cap: Any,  # 0: none
) -> None:
    """scores[:rows, :width] = the products of queries[start :] and key_columns, capped."""
    scores[:rows, :width] = np.float32(0.0)
    _multiply(scores, 0, queries, start, key_columns, in_order, 0, rows, queries.shape[1], width)
    if cap > 0:
        for row in range(rows):
            _cap(scores, row, width, cap)


@_compile
def _write(
    output: Any, token: int, head: int, group: int, rows: int, sums: _FloatArray, totals: Any, start: int
) -> None:
    """The `rows` sums from `start` on, divided by their weights' totals, go where their queries came from."""
    for row in range(rows):
        share = np.float32(1.0) / totals[start + row]
        for column in range(output.shape[2]):
            number = sums[start + row, column] * share
            _round_into(output, token + row // group, head * group + row % group, column, number)


@_compile
def _owned_heads(cost_before: int, cost: int, whole_cost: int, kv_heads: int, part: int, parts: int) -> tuple[int, int]:
    """The session's heads, first and end, whose middle in the line of all work lies in this part."""
    first, end = kv_heads, 0
    for head in range(kv_heads):
        if (2 * (cost_before + head * cost) + cost) * parts // (2 * whole_cost) == part:
            first, end = min(first, head), head + 1
    return first, end


@_compile
def _session_cost(context_length: int, row_count: int, group: int) -> int:
    """What one key-value head of a session costs, in no particular unit."""
    if row_count == 0:
        return 0
    return (context_length + row_count) * (_TOKEN_COST + row_count * group)


@_compile
def _attend_part(
    query: Any,  # [tokens, heads, head_dim]
    keys: Any,  # [num_slots, kv_heads, head_dim]
    values: Any,  # [num_slots, kv_heads, head_dim]
    block_tables: _IntArray,  # [sessions, max_blocks]
    first_row: _IntArray,  # [sessions]
    row_count: _IntArray,  # [sessions]
    context_length: _IntArray,  # [sessions]
    block_size: int,
    scale: Any,
    window: int,  # 0: none
    softcap: Any,  # 0: none
    output: Any,  # [tokens, heads, head_dim]
    part: int,
    parts: int,
) -> None:
    """One of `parts` shares of about equal cost; an item of work is one key-value head of one session.

    A session's items in this share go through its tokens together, as the heads of a token lie side by side.
    """
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group = query.shape[1] // kv_heads
    padded = _whole_vectors(head_dim)
    most_rows, whole_cost, cost_before = 0, 0, 0
    for session in range(row_count.size):
        most_rows = max(most_rows, row_count[session] * group)
        whole_cost += kv_heads * _session_cost(context_length[session], row_count[session], group)

    queries = np.zeros((kv_heads * most_rows, head_dim), np.float32)
    sums = np.zeros((kv_heads * most_rows, padded), np.float32)
    highest = np.zeros(kv_heads * most_rows, np.float32)
    totals = np.zeros(kv_heads * most_rows, np.float32)
    scores = np.zeros((most_rows, _TILE), np.float32)
    key_columns = np.zeros((head_dim, 1, _TILE), np.float32)
    value_rows = np.zeros((_TILE, 1, padded), np.float32)
    in_order = np.arange(max(head_dim, _TILE))
    slots, next_slots = np.zeros(_TILE, np.int64), np.zeros(_TILE, np.int64)
    factor = scale / softcap if softcap > 0 else scale * np.float32(_LOG2_E)

    for session in range(row_count.size):
        cost = _session_cost(context_length[session], row_count[session], group)
        if cost == 0:
            continue
        first_head, end_head = _owned_heads(cost_before, cost, whole_cost, kv_heads, part, parts)
        cost_before += kv_heads * cost
        if first_head >= end_head:
            continue
        rows, context = row_count[session] * group, context_length[session]
        end = context + row_count[session]
        for head in range(first_head, end_head):
            _read_queries(query, first_row[session], head, group, rows, factor, queries, head * rows)
        sums[:], highest[:], totals[:] = np.float32(0.0), _LOWEST, np.float32(0.0)

        for first in range(_first_seen(context, window), end, _TILE):
            count = min(_TILE, end - first)
            width = _whole_vectors(count)
            _find_slots(block_tables[session], block_size, first, count, slots)
            _prefetch_next(
                keys,
                values,
                block_tables,
                row_count,
                context_length,
                block_size,
                window,
                session,
                first + _TILE,
                first_head,
                end_head,
                next_slots,
            )
            for head in range(first_head, end_head):
                start = head * rows
                _read_columns(keys, slots, width, head, key_columns)
                _score(scores, queries, start, key_columns, in_order, rows, width, softcap * np.float32(_LOG2_E))
                for row in range(rows):
                    seen = context + row // group + 1 - first
                    _hide(scores, row, seen - window if window > 0 else 0, max(0, seen), width)
                    _soften(scores, row, width, sums, highest, totals, start + row)
                if rows <= _ROWS and padded == head_dim:  # each value is needed once: no copy pays
                    _multiply(sums, start, scores, 0, values, slots, head, rows, count, padded)
                else:
                    _read_rows(values, slots, count, head, value_rows)
                    _multiply(sums, start, scores, 0, value_rows, in_order, 0, rows, count, padded)

        for head in range(first_head, end_head):
            _write(output, first_row[session], head, group, rows, sums, totals, head * rows)


# The same on all threads of a pool: each claims one part after another.


@_intrinsic
def _pointer_to(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _cgutils.voidptr_t)

    return numba.types.voidptr(numba.types.int64), emit


@_intrinsic
def _claim(typing: Any, words: Any) -> Any:
    """The first word, and raises it by one; no two threads get the same."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = _Emitter(context, builder, signature, arguments)
        pointer = code.pointer(0, ir.Constant(context.get_value_type(_index), 0))
        return builder.atomic_rmw("add", pointer, ir.Constant(pointer.type.pointee, 1), "monotonic")

    return numba.types.int64(words), emit


@_compile
def _claim_parts(words: Any, floats: Any, query: Any, keys: Any, values: Any, output: Any) -> None:
    """Parts of the work that `_attend_on_all_threads` describes, until all are claimed."""
    sessions, max_blocks = words[9], words[10]
    block_tables = carray(_pointer_to(words[15]), (sessions, max_blocks), np.int32)
    first_row = carray(_pointer_to(words[16]), sessions, np.int32)
    row_count = carray(_pointer_to(words[17]), sessions, np.int32)
    context_length = carray(_pointer_to(words[18]), sessions, np.int32)
    parts, block_size, window = words[1], words[2], words[3]
    part = _claim(words)
    while part < parts:
        _attend_part(
            query,
            keys,
            values,
            block_tables,
            first_row,
            row_count,
            context_length,
            block_size,
            floats[0],
            window,
            floats[1],
            output,
            part,
            parts,
        )
        part = _claim(words)


# Two of these, since the type of an array must be known when it is compiled.


def _claim_parts_of_float32(data: Any) -> None:
    addresses = carray(data, 2, np.int64)
    words = carray(_pointer_to(addresses[0]), _WORDS, np.int64)
    floats = carray(_pointer_to(addresses[1]), 2, np.float32)
    query = carray(_pointer_to(words[11]), (words[4], words[5], words[6]), np.float32)
    keys = carray(_pointer_to(words[12]), (words[7], words[8], words[6]), np.float32)
    values = carray(_pointer_to(words[13]), (words[7], words[8], words[6]), np.float32)
    output = carray(_pointer_to(words[14]), (words[4], words[5], words[6]), np.float32)
    _claim_parts(words, floats, query, keys, values, output)


def _claim_parts_of_bfloat16(data: Any) -> None:
    addresses = carray(data, 2, np.int64)
    words = carray(_pointer_to(addresses[0]), _WORDS, np.int64)
    floats = carray(_pointer_to(addresses[1]), 2, np.float32)
    query = carray(_pointer_to(words[11]), (words[4], words[5], words[6]), np.uint16)
    keys = carray(_pointer_to(words[12]), (words[7], words[8], words[6]), np.uint16)
    values = carray(_pointer_to(words[13]), (words[7], words[8], words[6]), np.uint16)
    output = carray(_pointer_to(words[14]), (words[4], words[5], words[6]), np.uint16)
    _claim_parts(words, floats, query, keys, values, output)


@functools.cache
def _region(number: Any) -> int:
    """The address of the C function for queries, keys and values of that type."""
    function = _claim_parts_of_bfloat16 if number == np.uint16 else _claim_parts_of_float32
    return int(c_function(function).address)
