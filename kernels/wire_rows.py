"""States on the wire: per head row o, then l, relative to 2**e, then e, a whole number in the place of m.

A state that travels gives up its m for e once, when it is packed. Merging wire rows then takes powers of two, which
are exact, and additions in a fixed order: the bits are the same whether or not a compiler contracts them, and whichever
of two states comes first. (Only what falls below the normal range is rounded.) After the last merge rows are unpacked,
and are an ordinary state again. A row without keys is packed as o = 0, l = 0, e = -inf, whatever it held.

Packing and unpacking are compiled without contraction, so that they too have equal bits on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.kernels.compilation import entry, inline, part
from treeattn.kernels.exponential import LN2, LN2_HIGH, LN2_LOW, exp, exp2_double
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.narrow import widened
from treeattn.kernels.wire_storage import (
    KINDS,
    level_of,
    o_bytes,
    power_of_two,
    round_row,
    row_bytes,
    write_empty,
    write_row,
)
from treeattn.wire_form import WireForm

__all__ = [
    "Address",
    "merge_to_state",
    "operator_at",
    "pack_rows",
    "prepare_merge",
    "prepare_pack",
    "prepare_unpack",
    "room",
    "state_at",
]

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Address: TypeAlias = "int | np.int64"

# log2 e in three parts. The first two have 26 bits, so that their products with half of a double's bits are exact.
_LOG2E = 1442695040888963407359924681001892137 * 2**160 // 10**36
LOG2E_HIGH = float(_LOG2E >> 135 << 135) / 2**160
LOG2E_MIDDLE = float((_LOG2E >> 108 << 108) - (_LOG2E >> 135 << 135)) / 2**160
LOG2E_LOW = float(_LOG2E - (_LOG2E >> 108 << 108)) / 2**160
UPPER_HALF = ~((1 << 27) - 1)
"""Mask of the bits of a float64 that leaves its mantissa 26 bits."""

FARTHEST = 64.0
"""Powers of two that a row may be off its e: more only where numbers are so large that they don't tell e from e + 1."""


def prepare_pack(wire: Bytes, form: WireForm) -> Callable[[Array], None]:
    """Give a function that writes the wire rows of a packed state to ``wire`` each time it is called.

    Parameters
    ----------
    wire : uint8 array (form.nbytes,), contiguous
    form : WireForm
        The states' packed arrays are like it, and C-contiguous.
    """
    space, compiled = room(0, form), _PACK[form.o_dtype]()
    to, places = wire.ctypes.data, (form.rows, form.width, space.ctypes.data)

    def pack(packed: Array, kept: Any = (wire, space)) -> None:
        compiled(to, packed.ctypes.data, *places)

    return pack


def prepare_unpack(wire: Bytes, form: WireForm) -> Callable[[Array], None]:
    """Give a function that writes the state of the wire rows at ``wire``, the reverse of `prepare_pack`."""
    space, source, compiled = room(1, form), np.array([wire.ctypes.data]), state_at(form)
    places = source, form.rows, form.width, space.ctypes.data

    def unpack(packed: Array, kept: Any = (wire, space)) -> None:
        compiled(packed.ctypes.data, *places)

    return unpack


def prepare_merge(out: Bytes, sources: Sequence[Bytes], form: WireForm) -> Callable[[], None]:
    """Give a function that merges the wire rows at ``sources``, in this order, to ``out``, which may be one of them.

    None of the three allocates anything when it is called.
    """
    space, compiled = room(len(sources), form), _MERGE[form.o_dtype]()
    addresses = np.array([source.ctypes.data for source in sources])
    places = out.ctypes.data, addresses, form.rows, form.width, space.ctypes.data

    def merge(kept: Any = (out, sources, space)) -> None:
        compiled(*places)

    return merge


def room(sources: int, form: WireForm) -> Array:
    """Give room to work in: three numbers a row, one per row and source, and a row, for sources may be overwritten."""
    return np.empty(form.rows * (sources + 3) + form.width, np.float64)


def state_at(form: WireForm) -> Any:
    """Compiled merge to a state: (state, addresses of the rows, rows, width, address of `room`)."""
    return _UNPACK[form.o_dtype]()


@cache
def operator_at(width: int, o_dtype: str) -> int:
    """Address of a C function (left, right, address of how many rows, anything) that merges rows to ``right``.

    It is what MPI takes for an operator: each pair of rows is merged as `prepare_merge` does, the left one first.
    """
    return int(_operator_of(width, *KINDS[o_dtype])())


def _operator_of(width: int, dtype: Any, kind: Any) -> Any:
    @part("void(int64, int64, int64, int64)")
    def operator(left: int, right: int, length: int, datatype: int) -> None:
        rows = pointer(length, np.int32)[0]
        space = np.empty(2 + 5 * rows + width, np.int64)  # `room` of two sources, behind their addresses
        sources = space[:2]  # passed as an array, which keeps the room alive until rows are merged
        sources[0], sources[1] = left, right
        merge_rows(right, sources, rows, width, space.ctypes.data + 16, dtype, kind)

    return operator


def _pack_of(dtype: Any, kind: Any) -> Any:
    @entry("void(int64, int64, int64, int64, int64)")
    def pack(wire: int, packed: int, rows: int, width: int, space: int) -> None:
        pack_rows(wire, packed, rows, width, space, dtype, kind)

    return pack


def _merge_of(dtype: Any, kind: Any) -> Any:
    @entry("void(int64, int64[::1], int64, int64, int64)")
    def merge(out: int, sources: Array, rows: int, width: int, space: int) -> None:
        merge_rows(out, sources, rows, width, space, dtype, kind)

    return merge


def _unpack_of(dtype: Any, kind: Any) -> Any:
    @entry("void(int64, int64[::1], int64, int64, int64)")
    def unpack(out: int, sources: Array, rows: int, width: int, space: int) -> None:
        merge_to_state(out, sources, rows, width, space, dtype, kind)

    return unpack


_PACK = {name: _pack_of(*both) for name, both in KINDS.items()}
_MERGE = {name: _merge_of(*both) for name, both in KINDS.items()}
_UNPACK = {name: _unpack_of(*both) for name, both in KINDS.items()}


@inline
def pack_rows(wire: int, packed: Address, rows: int, width: int, space: int, dtype: Any, kind: Any) -> None:
    """Write the wire rows of a state; ``space`` is `room`."""
    size, wire_size = width * itemsize(dtype), row_bytes(width, dtype, kind)
    exponents, scales = pointer(space, np.float64), pointer(space + 8 * rows, np.float64)
    for row in range(rows):
        scales[row] = np.float64(pointer(packed + row * size, dtype)[width - 1])
    for row in range(rows):  # apart from the others, so that it vectorises
        exponents[row], scales[row] = _exponent_and_scale(scales[row], dtype)
    for row in range(rows):
        source, scale = pointer(packed + row * size, dtype), dtype(scales[row])
        if source[width - 2] == 0:
            write_empty(wire + row * wire_size, width, dtype, kind)
        else:
            l = scale * source[width - 2]  # noqa: E741 - the field's name
            write_row(wire + row * wire_size, source, scale, l, exponents[row], width, dtype, kind)


@inline
def _exponent_and_scale(m: Any, dtype: Any) -> Any:
    """Give e and s with exp(m) = s * 2**e, both in float64: e a whole number that ``dtype`` holds, 1/2 < s <= 1."""
    high = np.int64(np.float64(m).view(np.int64) & UPPER_HALF).view(np.float64)
    low = m - high
    most = high * LOG2E_HIGH
    rest = (high * LOG2E_MIDDLE + low * LOG2E_HIGH) + (low * LOG2E_MIDDLE + m * LOG2E_LOW)
    e = np.float64(dtype(np.ceil(most + rest)))
    off = (most - e) + rest
    off = FARTHEST if off > FARTHEST else off
    off = -FARTHEST if off < -FARTHEST else off
    is_finite = m - m == 0.0
    return e if is_finite else m, exp2_double(off if is_finite else 0.0)


@inline
def merge_rows(out: int, sources: Array, rows: int, width: int, space: int, dtype: Any, kind: Any) -> None:
    """Merge wire rows; ``space`` is `room`."""
    size, count = row_bytes(width, dtype, kind), sources.size
    exponents, sums = pointer(space, np.float64), pointer(space + 16 * rows, np.float64)
    weights = space + 24 * rows
    merged = pointer(weights + 8 * rows * count, dtype)
    _weigh(sources, rows, width, space, dtype, kind)
    for row in range(rows):
        _sum_row(merged, sources, weights + 8 * row * count, row * size, width - 2, dtype, kind)
        write_row(out + row * size, merged, dtype(1), dtype(sums[row]), exponents[row], width, dtype, kind)


@inline
def merge_to_state(out: Address, sources: Array, rows: int, width: int, space: int, dtype: Any, kind: Any) -> None:
    """Merge wire rows to a state, with the bits that `merge_rows` and then unpacking have."""
    size, wire_size, count = width * itemsize(dtype), row_bytes(width, dtype, kind), sources.size
    exponents, scales = pointer(space, np.float64), pointer(space + 8 * rows, np.float64)
    sums, weights = pointer(space + 16 * rows, np.float64), space + 24 * rows
    merged = pointer(weights + 8 * rows * count, dtype)
    _weigh(sources, rows, width, space, dtype, kind)
    for row in range(rows):  # apart from the others, so that it vectorises
        level = level_of(sums[row], kind)
        exponents[row], scales[row] = _reference_and_scale(exponents[row] + level, dtype)
        scales[row] *= power_of_two(-level)
    for row in range(rows):
        target, scale = pointer(out + row * size, dtype), dtype(scales[row])
        if sums[row] == 0:
            for j in range(width):
                target[j] = 0 if j < width - 1 else -np.inf
        else:
            _sum_row(merged, sources, weights + 8 * row * count, row * wire_size, width - 2, dtype, kind)
            round_row(merged, dtype(sums[row]), width - 2, kind)
            for j in range(width - 2):
                target[j] = scale * merged[j]
            target[width - 2], target[width - 1] = scale * dtype(sums[row]), dtype(exponents[row])


@inline
def _reference_and_scale(e: Any, dtype: Any) -> Any:
    """Give m and s with 2**e = s * exp(m), both in float64: m as near as ``dtype`` can, and s for what it can't."""
    m = np.float64(dtype(e * LN2))
    off = (e * LN2_HIGH - m) + e * LN2_LOW
    off = 1.0 if off > 1.0 else off
    off = -1.0 if off < -1.0 else off
    is_finite = e - e == 0.0
    return m if is_finite else e, exp(off if is_finite else 0.0)


@inline
def _weigh(sources: Array, rows: int, width: int, space: int, dtype: Any, kind: Any) -> None:
    """Write each row's largest e, NaN if one is, its sum of l, and the power of two that each source weighs in it."""
    exponents, sums = pointer(space, np.float64), pointer(space + 16 * rows, np.float64)
    count, size, behind = sources.size, row_bytes(width, dtype, kind), o_bytes(width, kind)
    for row in range(rows):
        weights = pointer(space + 8 * (rows * 3 + row * count), np.float64)
        highest, total = -np.inf, 0.0
        for index in range(count):
            e = np.float64(pointer(sources[index] + row * size + behind, dtype)[1])
            weights[index] = e
            if e > highest or e != e:  # once NaN, nothing compares as larger
                highest = e
        for index in range(count):
            weight = power_of_two(0.0 if weights[index] == highest else weights[index] - highest)
            total += weight * np.float64(pointer(sources[index] + row * size + behind, dtype)[0])
            weights[index] = weight
        exponents[row], sums[row] = highest, np.float64(dtype(total))


@inline
def _sum_row(merged: Any, sources: Array, weights: int, offset: int, count: int, dtype: Any, kind: Any) -> None:
    """Sum o of one row, ``count`` numbers, in the order of the sources, two sources at a time."""
    weight, rows = pointer(weights, np.float64), sources.size
    first = pointer(sources[0] + offset, kind)
    if rows == 1:
        for j in range(count):
            merged[j] = dtype(weight[0]) * widened(first[j])
    else:
        _sum_two(merged, first, pointer(sources[1] + offset, kind), dtype(weight[0]), dtype(weight[1]), count)
    for index in range(2, rows - 1, 2):
        first, second = pointer(sources[index] + offset, kind), pointer(sources[index + 1] + offset, kind)
        _add_two(merged, first, second, dtype(weight[index]), dtype(weight[index + 1]), count)
    if rows > 2 and rows % 2:
        _add_one(merged, pointer(sources[rows - 1] + offset, kind), dtype(weight[rows - 1]), count)


@inline
def _sum_two(merged: Any, first: Any, second: Any, a: Any, b: Any, count: int) -> None:
    for j in range(count):
        merged[j] = a * widened(first[j]) + b * widened(second[j])


@inline
def _add_two(merged: Any, first: Any, second: Any, a: Any, b: Any, count: int) -> None:
    for j in range(count):
        merged[j] = (merged[j] + a * widened(first[j])) + b * widened(second[j])


@inline
def _add_one(merged: Any, row: Any, weight: Any, count: int) -> None:
    for j in range(count):
        merged[j] += weight * widened(row[j])
