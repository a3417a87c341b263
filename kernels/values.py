"""Weighted sums of a block of values, o += p·v, at the memory's speed.

A strip of values that fits the first-level cache is fetched in order for the first rows; the others find it there,
already widened where that takes more than one instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels.call import BLOCK, STORAGES
from treeattn.kernels.compilation import part
from treeattn.kernels.loads import Loads, padded, stored_bytes
from treeattn.kernels.vectors import DOUBLE, FLOAT, LANES, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["STRIP", "VALUES", "strip_keys", "values_of", "values_of_any_width"]

VALUES = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)"
"""(weights, rows, values, bytes per key, number of keys, width, sums, bytes per row, marked, room for a strip).

``sums[row] += weights[row, key] * values[key]``. Where ``marked``, a weight of -inf marks a hidden key, whose value is
not used. Rows of sums are `padded`, in the order in which values of the storage type are loaded.
"""

STRIP, STRIP_KEYS = 16384, 16
"""Bytes of values that stay in the first-level cache while one pair of rows after the other uses them; and at most so
many keys, since the memory rests while the other pairs are at work. A strip is summed for itself before it is added to
the other strips: two levels lose fewer bits."""

ACCUMULATORS = 8 if LANES == 8 else 24
"""Vectors of sums that registers hold; AVX2 has half as many."""

KEPT = ("float8_e4m3fn",)
"""Types whose widened values are kept for the next pair of rows."""

LATER, FIRST, ALONE = range(3)
"""Turns of rows at a strip."""


def strip_keys(row_bytes: int) -> int:
    """Values in a strip whose widened rows have so many bytes."""
    return min(STRIP_KEYS, max(4, STRIP // row_bytes))


def _add_strip(
    typingctx: Any,
    storage: Any,
    width: Any,
    rows: Any,
    marked: Any,
    turn: Any,
    p: Any,
    v: Any,
    v_t: Any,
    keys: Any,
    sums: Any,
    sums_t: Any,
    room: Any,
) -> Any:
    """Add a strip of weighted values, of a ``width`` known here, to the sums of ``rows`` rows.

    ``turn`` says who else uses the strip: `ALONE` nobody, and its values lie one behind the other; `FIRST` others will;
    `LATER` others have.
    """
    name, together = STORAGES[storage.literal_value], rows.literal_value
    flags = bool(marked.literal_value), turn.literal_value == FIRST and name in KEPT
    ahead = turn.literal_value == ALONE and name in ("float32", "float64")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loads = Loads(Vectors(builder, DOUBLE if name == "float64" else FLOAT), name)
        for panel in _panels(loads, width.literal_value, together):
            _add_panel(loads, panel, together, (*flags, ahead), args[5:])
        return context.get_dummy_value()

    return types.void(storage, width, rows, marked, turn, *[types.int64] * 7), codegen


def _panels(loads: Loads, width: int, rows: int) -> list[tuple[int, int]]:
    """Cut the width into even panels whose sums registers hold."""
    steps = -(-width // loads.step)
    vectors = steps * loads.step // loads.vectors.lanes * rows
    size = -(-steps // -(-vectors // ACCUMULATORS)) * loads.step
    return [(first, min(width, first + size)) for first in range(0, width, size)]


def _add_panel(loads: Loads, panel: tuple[int, int], rows: int, flags: tuple[bool, bool, bool], given: Any) -> None:
    """Sum a panel's elements of all keys in registers, then add them to ``sums``."""
    p, v, v_t, keys, sums, sums_t, room = given
    vectors, (first, stop), (marked, keep, ahead) = loads.vectors, panel, flags
    at, v = first * vectors.size, vectors.advance(v, first, loads.size)

    def step(index: Any, totals: list[Any]) -> list[Any]:
        weight_at = vectors.advance(p, index, vectors.size)
        weights = [vectors.broadcast(vectors.advance(weight_at, row * BLOCK, vectors.size)) for row in range(rows)]
        value = vectors.advance(v, vectors.builder.mul(index, v_t))
        if ahead:
            vectors.fetch_ahead(value, (stop - first) * loads.size)
        values = loads.load_row(value, stop - first)
        if keep:
            vectors.store_all(values, vectors.advance(vectors.advance(room, at), vectors.builder.mul(index, sums_t)))
        pairs = [(weight, value) for weight in weights for value in values]
        return [_add(vectors, *pair, total, marked) for pair, total in zip(pairs, totals, strict=True)]

    places = [
        vectors.advance(vectors.advance(sums, vectors.builder.mul(vectors.number(row), sums_t)), at + i * vectors.bytes)
        for row in range(rows)
        for i in range(-(-(stop - first) // loads.step) * loads.step // vectors.lanes)
    ]
    for place, total in zip(places, vectors.loop(keys, [vectors.zero] * len(places), step), strict=True):
        vectors.store(vectors.add(vectors.load(place), total), place)


def _add(vectors: Vectors, weight: Any, value: Any, total: Any, marked: bool) -> Any:
    added = vectors.add_product(weight, value, total)
    return vectors.where("==", weight, vectors.constant(float("-inf")), total, added) if marked else added


add_strip: Any = intrinsic(prefer_literal=True)(_add_strip)


@cache
def values_of(storage: str, common: int) -> Callable[[], int]:
    """Give the part that sums values of a storage type and a width that it is written out for."""
    code, size, itemsize = STORAGES.index(storage), stored_bytes(storage), 8 if storage == "float64" else 4
    kept = storage in KEPT
    after, row_bytes = STORAGES.index("float32") if kept else code, padded(common) * itemsize
    strip = strip_keys(row_bytes)
    first = 2 if 2 * row_bytes <= ACCUMULATORS * 4 * LANES else 1
    after_width = padded(common) if kept else common

    @part(VALUES)
    def values(
        p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, sums_t: int, marked: int, room: int
    ) -> None:
        for key in range(0, keys, strip):
            count, at, weights = min(strip, keys - key), v + key * v_t, p + key * itemsize
            if marked:
                for row in range(rows):
                    row_weights, total = weights + row * BLOCK * itemsize, sums + row * sums_t
                    add_strip(code, common, 1, 1, LATER, row_weights, at, v_t, count, total, sums_t, room)
                continue
            row = min(first, rows)
            if rows == 1 and v_t == common * size:
                add_strip(code, common, 1, 0, ALONE, weights, at, v_t, count, sums, sums_t, room)
            elif row == 1:
                add_strip(code, common, 1, 0, FIRST, weights, at, v_t, count, sums, sums_t, room)
            else:
                add_strip(code, common, 2, 0, FIRST, weights, at, v_t, count, sums, sums_t, room)
            source, step = (room, sums_t) if kept else (at, v_t)
            while row < rows:
                row_weights, total = weights + row * BLOCK * itemsize, sums + row * sums_t
                if rows - row >= 2:
                    add_strip(after, after_width, 2, 0, LATER, row_weights, source, step, count, total, sums_t, room)
                else:
                    add_strip(after, after_width, 1, 0, LATER, row_weights, source, step, count, total, sums_t, room)
                row += 2

    return values


@cache
def values_of_any_width(dtype: str) -> Callable[[], int]:
    """Give the part that sums a strip of values of any width, widened to ``dtype`` and padded already."""
    code, itemsize = STORAGES.index(dtype), 8 if dtype == "float64" else 4
    wide, narrow = 8 * LANES * 4 // itemsize, 2 * LANES

    @part(VALUES)
    def values(
        p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, sums_t: int, marked: int, room: int
    ) -> None:
        for row in range(0, rows, 1 if marked else 2):
            column, pair = 0, rows - row >= 2 and not marked
            while column * itemsize < sums_t:
                at, weights = v + column * itemsize, p + row * BLOCK * itemsize
                total = sums + row * sums_t + column * itemsize
                if marked:
                    add_strip(code, narrow, 1, 1, LATER, weights, at, v_t, keys, total, sums_t, room)
                    column += narrow
                elif (column + wide) * itemsize > sums_t:
                    if pair:
                        add_strip(code, narrow, 2, 0, LATER, weights, at, v_t, keys, total, sums_t, room)
                    else:
                        add_strip(code, narrow, 1, 0, LATER, weights, at, v_t, keys, total, sums_t, room)
                    column += narrow
                else:
                    if pair:
                        add_strip(code, wide, 2, 0, LATER, weights, at, v_t, keys, total, sums_t, room)
                    else:
                        add_strip(code, wide, 1, 0, LATER, weights, at, v_t, keys, total, sums_t, room)
                    column += wide

    return values
