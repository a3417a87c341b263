"""States on the wire: per head row o and l, relative to 2**e, and e, a whole number in the place of m.

A state that travels gives up its m for e once, when it is packed. Merging wire rows then takes powers of two, which
are exact, and additions in a fixed order: the bits are the same whether or not a compiler contracts them, and whichever
of two states comes first. (Only what falls below the normal range is rounded.) After the last merge rows are unpacked,
and are an ordinary state again. A row without keys is packed as o = 0, l = 0, e = -inf, whatever it held.

Packing and unpacking are compiled without contraction, so that they too have equal bits on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.exponential import LN2, LN2_HIGH, LN2_LOW, exp, exp2_double
from treeattn.kernels.memory import itemsize, pointer
from treeattn.wire_form import WireForm

__all__ = ["merge_to_state", "pack_rows", "prepare_merge", "prepare_pack", "prepare_unpack", "room"]

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]

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
    space, compiled = room(0, form), _pack_at(form)
    to, places = wire.ctypes.data, (form.rows, form.width, space.ctypes.data)

    def pack(packed: Array, kept: Any = (wire, space)) -> None:
        compiled(to, packed.ctypes.data, *places)

    return pack


def prepare_unpack(wire: Bytes, form: WireForm) -> Callable[[Array], None]:
    """Give a function that writes the state of the wire rows at ``wire``, the reverse of `prepare_pack`."""
    space, source, compiled = room(1, form), np.array([wire.ctypes.data]), _state_at(form)
    places = source, form.rows, form.width, space.ctypes.data

    def unpack(packed: Array, kept: Any = (wire, space)) -> None:
        compiled(packed.ctypes.data, *places)

    return unpack


def prepare_merge(out: Bytes, sources: Sequence[Bytes], form: WireForm) -> Callable[[], None]:
    """Give a function that merges the wire rows at ``sources``, in this order, to ``out``, which may be one of them.

    None of the three allocates anything when it is called.
    """
    space, compiled = room(len(sources), form), _merge_at(form)
    addresses = np.array([source.ctypes.data for source in sources])
    places = out.ctypes.data, addresses, form.rows, form.width, space.ctypes.data

    def merge(kept: Any = (out, sources, space)) -> None:
        compiled(*places)

    return merge


def room(sources: int, form: WireForm) -> Array:
    """Give room to work in: two numbers per row, one per row and source, and a row, for sources may be overwritten."""
    return np.empty(form.rows * (sources + 2) + form.width, np.float64)


def _state_at(form: WireForm) -> Any:
    """Compiled merge of wire rows to a state: (state, addresses of the rows, rows, width, address of `room`)."""
    return _state_double() if form.dtype == "float64" else _state_single()


def _merge_at(form: WireForm) -> Any:
    return _merge_double() if form.dtype == "float64" else _merge_single()


def _pack_at(form: WireForm) -> Any:
    return _pack_double() if form.dtype == "float64" else _pack_single()


@entry("void(int64, int64, int64, int64, int64)")
def _pack_single(wire: int, packed: int, rows: int, width: int, space: int) -> None:
    pack_rows(wire, packed, rows, width, space, np.float32)


@entry("void(int64, int64, int64, int64, int64)")
def _pack_double(wire: int, packed: int, rows: int, width: int, space: int) -> None:
    pack_rows(wire, packed, rows, width, space, np.float64)


@entry("void(int64, int64[::1], int64, int64, int64)")
def _merge_single(out: int, sources: Array, rows: int, width: int, space: int) -> None:
    merge_rows(out, sources, rows, width, space, np.float32)


@entry("void(int64, int64[::1], int64, int64, int64)")
def _merge_double(out: int, sources: Array, rows: int, width: int, space: int) -> None:
    merge_rows(out, sources, rows, width, space, np.float64)


@entry("void(int64, int64[::1], int64, int64, int64)")
def _state_single(out: int, sources: Array, rows: int, width: int, space: int) -> None:
    merge_to_state(out, sources, rows, width, space, np.float32)


@entry("void(int64, int64[::1], int64, int64, int64)")
def _state_double(out: int, sources: Array, rows: int, width: int, space: int) -> None:
    merge_to_state(out, sources, rows, width, space, np.float64)


@inline
def pack_rows(wire: int, packed: int, rows: int, width: int, space: int, dtype: Any) -> None:
    """Write the wire rows of a state; ``space`` is `room`."""
    size = width * itemsize(dtype)
    exponents, scales = pointer(space, np.float64), pointer(space + 8 * rows, np.float64)
    for row in range(rows):
        scales[row] = np.float64(pointer(packed + row * size, dtype)[width - 1])
    for row in range(rows):  # apart from the others, so that it vectorises
        exponents[row], scales[row] = _exponent_and_scale(scales[row], dtype)
    for row in range(rows):
        target, source = pointer(wire + row * size, dtype), pointer(packed + row * size, dtype)
        if source[width - 2] == 0:
            _write_empty(target, width)
        else:
            _scale_row(target, source, dtype(scales[row]), width - 1)
            target[width - 1] = dtype(exponents[row])


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
def _write_empty(target: Any, width: int) -> None:
    for j in range(width - 1):
        target[j] = 0
    target[width - 1] = -np.inf


@inline
def _scale_row(target: Any, source: Any, scale: Any, width: int) -> None:
    for j in range(width):
        target[j] = scale * source[j]


@inline
def merge_rows(out: int, sources: Array, rows: int, width: int, space: int, dtype: Any) -> None:
    """Merge wire rows; ``space`` is `room`."""
    size, count = width * itemsize(dtype), sources.size
    exponents, merged = pointer(space, np.float64), pointer(space + 8 * rows * (count + 2), dtype)
    _weigh(sources, rows, width, space, dtype)
    for row in range(rows):
        _sum_row(merged, sources, space + 8 * (rows * 2 + row * count), row * size, width - 1, dtype)
        target = pointer(out + row * size, dtype)
        for j in range(width - 1):
            target[j] = merged[j]
        target[width - 1] = dtype(exponents[row])


@inline
def merge_to_state(out: int, sources: Array, rows: int, width: int, space: int, dtype: Any) -> None:
    """Merge wire rows to a state, with the bits that `merge_rows` and then unpacking have."""
    size, count = width * itemsize(dtype), sources.size
    exponents, scales = pointer(space, np.float64), pointer(space + 8 * rows, np.float64)
    merged = pointer(space + 8 * rows * (count + 2), dtype)
    _weigh(sources, rows, width, space, dtype)
    for row in range(rows):  # apart from the others, so that it vectorises
        exponents[row], scales[row] = _reference_and_scale(exponents[row], dtype)
    for row in range(rows):
        _sum_row(merged, sources, space + 8 * (rows * 2 + row * count), row * size, width - 1, dtype)
        target = pointer(out + row * size, dtype)
        if merged[width - 2] == 0:
            _write_empty(target, width)
        else:
            _scale_row(target, merged, dtype(scales[row]), width - 1)
            target[width - 1] = dtype(exponents[row])


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
def _weigh(sources: Array, rows: int, width: int, space: int, dtype: Any) -> None:
    """Write each row's largest e, NaN if one is, and the power of two that each source weighs in it."""
    exponents, count, size = pointer(space, np.float64), sources.size, width * itemsize(dtype)
    for row in range(rows):
        weights = pointer(space + 8 * (rows * 2 + row * count), np.float64)
        highest = -np.inf
        for index in range(count):
            e = np.float64(pointer(sources[index] + row * size, dtype)[width - 1])
            weights[index] = e
            if e > highest or e != e:  # once NaN, nothing compares as larger
                highest = e
        exponents[row] = highest
        for index in range(count):
            weights[index] = _power(0.0 if weights[index] == highest else weights[index] - highest)


@inline
def _power(n: Any) -> Any:
    """2**n for a whole n of at most 0, in float64; 0 where that is below the normal range."""
    kept = n if n > -1023.0 else -1023.0
    power = np.int64((np.int64(kept) + 1023) << 52).view(np.float64)
    return power if n == n else n


@inline
def _sum_row(merged: Any, sources: Array, weights: int, offset: int, width: int, dtype: Any) -> None:
    """Sum o and l of one row in the order of the sources, two at a time."""
    weight, count = pointer(weights, np.float64), sources.size
    first = pointer(sources[0] + offset, dtype)
    if count == 1:
        _scale_row(merged, first, dtype(weight[0]), width)
    else:
        second = pointer(sources[1] + offset, dtype)
        _sum_two(merged, first, second, dtype(weight[0]), dtype(weight[1]), width)
    for index in range(2, count - 1, 2):
        first, second = pointer(sources[index] + offset, dtype), pointer(sources[index + 1] + offset, dtype)
        _add_two(merged, first, second, dtype(weight[index]), dtype(weight[index + 1]), width)
    if count > 2 and count % 2:
        _add_one(merged, pointer(sources[count - 1] + offset, dtype), dtype(weight[count - 1]), width)


@inline
def _sum_two(merged: Any, first: Any, second: Any, a: Any, b: Any, width: int) -> None:
    for j in range(width):
        merged[j] = a * first[j] + b * second[j]


@inline
def _add_two(merged: Any, first: Any, second: Any, a: Any, b: Any, width: int) -> None:
    for j in range(width):
        merged[j] = (merged[j] + a * first[j]) + b * second[j]


@inline
def _add_one(merged: Any, row: Any, weight: Any, width: int) -> None:
    for j in range(width):
        merged[j] += weight * row[j]
