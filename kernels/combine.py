"""Merging and finishing of packed states: rows of Dv numbers of o, then l, then m.

One sequence of operations, in the order of the sources, without contraction: equal inputs give equal bits on every
processor. Source: arXiv 2408.04093, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.kernels.array_objects import check_objects, data_of, length_of
from treeattn.kernels.call import STORAGES
from treeattn.kernels.compilation import entry, inline, part
from treeattn.kernels.exponential import exp, log
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.narrow import narrowed

__all__ = [
    "finish",
    "finish_part_double",
    "finish_part_single",
    "merge",
    "merge_part_double",
    "merge_part_single",
    "prepare_merge",
]

Array: TypeAlias = npt.NDArray[Any]

MERGE = "void(int64, int64, int64, int64, int64, int64)"
"""(out, address of the sources' addresses, number of sources, rows, width, room as `_merge_room` counts it)"""

FINISH = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"
"""(out, index of its type, lse or 0, states with room for one more behind them, sink or 0, rows, heads, tokens, width)

The room is used where out is of 16 bits, to which its rows are rounded.
"""

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = (STORAGES.index(n) for n in ("float32", "float64", "bfloat16", "float16"))


def merge(out: Array, sources: Sequence[Array]) -> None:
    """Write the merge of ``sources``, in this order, to ``out``, which may be one of them.

    Parameters
    ----------
    out : array (..., Dv + 2), float32 or float64, C-contiguous
    sources : sequence of arrays like ``out``
        A row with l = 0 is skipped whole: what its o and m hold does not matter. A row with one other source
        keeps that source's bits.
    """
    prepare_merge(out, sources)()


def prepare_merge(out: Array, sources: Sequence[Array]) -> Callable[[], None]:
    """Give a function that does `merge` to these very arrays each time it is called, and allocates nothing."""
    addresses = np.array([source.ctypes.data for source in sources], dtype=np.int64)
    width = out.shape[-1]
    rows = out.size // width
    room = _merge_room(len(sources), rows, width)
    compiled, places = _merge_at(out.dtype), (out.ctypes.data, addresses, rows, width, room.ctypes.data)

    def merge_again(kept: Any = (out, sources, room)) -> None:
        compiled(*places)

    return merge_again


def _merge_room(sources: int, rows: int, width: int) -> Array:
    """Give room for a merge: a weight per source and row, and a row, since a source may be overwritten."""
    return np.empty(rows * sources + width, np.float64)


def finish(packed: Array, sink: Array | None) -> tuple[Array, Array]:
    """Give (out, lse) of the packed states of all keys.

    Parameters
    ----------
    packed : array (B, Hq, Tq, Dv + 2), float32 or float64, C-contiguous
    sink : array (Hq,) of the same dtype, C-contiguous, or None
        An extra raw logit per head with no value; -inf changes nothing, +inf takes all weight.
    """
    batch, heads, tokens, width = packed.shape
    out = np.empty((batch, heads, tokens, width - 2), packed.dtype)
    lse = np.empty((batch, heads, tokens), packed.dtype)
    _finish_at(packed.dtype)(id(None), id(out), id(lse), id(packed), id(sink))
    return out, lse


def _merge_at(dtype: np.dtype[Any]) -> Any:
    """Compiled merge of states of ``dtype``: (out address, source addresses, rows, width, address of `_merge_room`)."""
    return _merge_double() if dtype.itemsize == 8 else _merge_single()


@cache
def _finish_at(dtype: np.dtype[Any]) -> Any:
    """Compiled finish of states of ``dtype``, of the objects None, out, lse, packed, and sink or None."""
    check_objects()
    return _finish_double() if dtype.itemsize == 8 else _finish_single()


@entry("void(int64, int64[::1], int64, int64, int64)")
def _merge_single(out: int, sources: Array, rows: int, width: int, room: int) -> None:
    _merge_rows(out, sources.ctypes.data, sources.size, rows, width, room, np.float32)


@entry("void(int64, int64[::1], int64, int64, int64)")
def _merge_double(out: int, sources: Array, rows: int, width: int, room: int) -> None:
    _merge_rows(out, sources.ctypes.data, sources.size, rows, width, room, np.float64)


@part(MERGE)
def merge_part_single(out: int, sources: int, count: int, rows: int, width: int, room: int) -> None:
    """Merge in float32."""
    _merge_rows(out, sources, count, rows, width, room, np.float32)


@part(MERGE)
def merge_part_double(out: int, sources: int, count: int, rows: int, width: int, room: int) -> None:
    """Merge in float64."""
    _merge_rows(out, sources, count, rows, width, room, np.float64)


@entry("void(int64, int64, int64, int64, int64)")
def _finish_single(none: int, out: int, lse: int, packed: int, sink: int) -> None:
    _finish_array(none, out, lse, packed, sink, np.float32)


@entry("void(int64, int64, int64, int64, int64)")
def _finish_double(none: int, out: int, lse: int, packed: int, sink: int) -> None:
    _finish_array(none, out, lse, packed, sink, np.float64)


@part(FINISH)
def finish_part_single(
    out: int, storage: int, lse: int, packed: int, sink: int, rows: int, heads: int, tokens: int, width: int
) -> None:
    """Finish states of float32."""
    _finish_rows(out, storage, lse, packed, sink, rows, heads, tokens, width, np.float32)


@part(FINISH)
def finish_part_double(
    out: int, storage: int, lse: int, packed: int, sink: int, rows: int, heads: int, tokens: int, width: int
) -> None:
    """Finish states of float64."""
    _finish_rows(out, storage, lse, packed, sink, rows, heads, tokens, width, np.float64)


@inline
def _merge_rows(out: int, addresses: int, count: int, rows: int, width: int, room: int, dtype: Any) -> None:
    """Merge row by row, each collected apart from ``out``; ``room`` is `_merge_room` bytes."""
    weights, sources = pointer(room, np.float64), pointer(addresses, np.int64)
    size = width * itemsize(dtype)
    merged = pointer(room + 8 * rows * count, dtype)
    for row in range(rows):
        _differences(room + 8 * row * count, sources, count, row * size, width - 2, dtype)
    for each in range(rows * count):  # all at once, so that they vectorise
        weights[each] = exp(weights[each])
    for row in range(rows):
        highest, _ = _highest(sources, count, row * size, width - 1, dtype)
        merged[width - 1] = highest
        _merge_row(merged, sources, count, room + 8 * row * count, row * size, width - 1, dtype)
        target = pointer(out + row * size, dtype)
        for j in range(width):
            target[j] = merged[j]


@inline
def _differences(to: int, sources: Any, count: int, offset: int, at: int, dtype: Any) -> None:
    """Write each source's m less the largest; one live source alone keeps its bits, even where m - m is NaN."""
    highest, live = _highest(sources, count, offset, at + 1, dtype)
    differences = pointer(to, np.float64)
    for index in range(count):
        row = pointer(sources[index] + offset, dtype)
        differences[index] = np.float64(row[at + 1] - highest) if live > 1 else 0.0


@inline
def _merge_row(merged: Any, sources: Any, count: int, weights: int, offset: int, width: int, dtype: Any) -> None:
    # `width` counts o and l, which are summed alike; m stands behind them
    factors = pointer(weights, np.float64)
    started = False
    for index in range(count):
        row = pointer(sources[index] + offset, dtype)
        if row[width - 1] != 0:
            _add_row(merged, row, dtype(factors[index]), width, started)
            started = True
    if not started:
        for j in range(width):
            merged[j] = 0


@inline
def _add_row(merged: Any, row: Any, weight: Any, width: int, started: bool) -> None:
    if started:
        for j in range(width):
            merged[j] += weight * row[j]
    else:  # not added to 0, which would lose the sign of -0
        for j in range(width):
            merged[j] = weight * row[j]


@inline
def _highest(sources: Any, count: int, offset: int, width: int, dtype: Any) -> tuple[Any, int]:
    """Largest m of the sources that hold keys (NaN if one is), and how many they are."""
    highest = dtype(-np.inf)
    live = 0
    for index in range(count):
        row = pointer(sources[index] + offset, dtype)
        if row[width - 1] != 0:
            m = row[width]
            live += 1
            if m > highest or m != m:  # once NaN, nothing compares as larger
                highest = m
    return highest, live


@inline
def _finish_array(none: int, out: int, lse: int, packed: int, sink: int, dtype: Any) -> None:
    heads, tokens, width = length_of(packed, 1), length_of(packed, 2), length_of(packed, 3)
    places = data_of(lse, none), data_of(packed, none), data_of(sink, none)
    rows, storage = length_of(packed, 0) * heads * tokens, FLOAT64 if itemsize(dtype) == 8 else FLOAT32
    _finish_rows(data_of(out, none), storage, *places, rows, heads, tokens, width, dtype)


@inline
def _finish_rows(
    out: int, storage: int, lse: int, packed: int, sink: int, rows: int, heads: int, tokens: int, width: int, dtype: Any
) -> None:
    """Finish row by row; ``storage`` is out's type, an address of 0 means that there is no lse or no sink."""
    sums, sinks = pointer(lse, dtype), pointer(sink, dtype)
    size, room = itemsize(dtype), packed + rows * width * itemsize(dtype)
    for row in range(rows):
        extra = sinks[row // tokens % heads] if sink != 0 else dtype(-np.inf)
        state, at = pointer(packed + row * width * size, dtype), row * (width - 2)
        if storage in (BFLOAT16, FLOAT16):
            total = _finish_row(pointer(room, dtype), state, extra, width - 2, dtype)
            _round_row(pointer(room, dtype), out + 2 * at, storage, width - 2)
        else:
            total = _finish_row(pointer(out + size * at, dtype), state, extra, width - 2, dtype)
        if lse != 0:
            sums[row] = total


@inline
def _round_row(row: Any, target: int, storage: int, width: int) -> None:
    if storage == BFLOAT16:
        for j in range(width):
            pointer(target, np.uint16)[j] = narrowed(np.float32(row[j]), np.uint16)
    else:
        for j in range(width):
            pointer(target, np.int16)[j] = narrowed(np.float32(row[j]), np.int16)


@inline
def _finish_row(target: Any, state: Any, sink: Any, width: int, dtype: Any) -> Any:
    l, m = state[width], state[width + 1]  # noqa: E741 - the field's name
    if l == 0:
        for j in range(width):
            target[j] = 0
        return sink
    if sink == -np.inf:
        for j in range(width):
            target[j] = state[j] / l
        return m + dtype(log(np.float64(l)))
    highest = sink if sink > m else m
    weight = dtype(exp(np.float64(m - highest)))
    # The larger logit weighs 1, even where inf - inf is NaN: a sink of +inf leaves nothing for the keys.
    total = weight * l + (dtype(1) if sink == highest else dtype(exp(np.float64(sink - highest))))
    for j in range(width):
        target[j] = weight * state[j] / total
    return highest + dtype(log(np.float64(total)))
