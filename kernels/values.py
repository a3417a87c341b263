"""Weighted sums of a block of values, o += p·v, at the memory's speed.

A strip of values that fits the first-level cache is fetched for the first rows; the others find it there. Types that
are not `QUICK` are taken four rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels.call import BLOCK, STORAGES
from treeattn.kernels.compilation import part
from treeattn.kernels.loads import QUICK, Loads, fetch_later, padded, stored_bytes
from treeattn.kernels.vectors import AHEAD, AHEAD_STEP, ASKS_FIRST, DOUBLE, FLOAT, LANES, LINE, ZEN, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["STRIP", "VALUES", "strip_keys", "values_of", "values_of_any_width"]

VALUES = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64)"
"""(weights, rows, values, bytes per key, number of keys, width, sums, bytes per row, marked).

``sums[row] += weights[row, key] * values[key]``. Where ``marked``, a weight of -inf marks a hidden key, whose value is
not used. Rows of sums are `padded`, in the order in which values of the storage type are loaded.
"""

STRIP, STRIP_KEYS = 16384, 16
"""Bytes of values that stay in the first-level cache while one pair of rows after the other uses them; and at most so
many keys, since the memory rests while the other pairs are at work. A strip is summed for itself before it is added to
the other strips: two levels lose fewer bits."""

ACCUMULATORS = 8 if LANES == 8 else 24
"""Vectors of sums that registers hold; AVX2 has half as many."""

FOUR, FOUR_KEYS, FOUR_BYTES = 4, 64, 16384 if ZEN else 8192
"""Rows for which a value of the other types is read, and widened, once; registers hold sums of a part of the width
then, one part after the other. Keys and bytes in a strip of theirs at most. Meanwhile the memory is asked for each line
of the next strip, since the processor would not guess that order."""


def strip_keys(row_bytes: int) -> int:
    """Values in a strip whose widened rows have so many bytes."""
    return min(STRIP_KEYS, max(4, STRIP // row_bytes))


def _four_keys(storage: str, width: int) -> int:
    """Values in a strip of four rows."""
    return min(FOUR_KEYS, FOUR_BYTES // (width * stored_bytes(storage)))


def _add_strip(
    typingctx: Any,
    storage: Any,
    width: Any,
    rows: Any,
    marked: Any,
    ahead: Any,
    p: Any,
    v: Any,
    v_t: Any,
    keys: Any,
    sums: Any,
    sums_t: Any,
) -> Any:
    """Add a strip of weighted values, of a ``width`` known here, to the sums of ``rows`` rows.

    With ``ahead`` as 1, values that come later are fetched: they must lie one behind the other.
    """
    code, together = storage.literal_value, rows.literal_value
    name = STORAGES[abs(code) - 1]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, step = Vectors(builder, DOUBLE if name == "float64" else FLOAT), args[7]
        distance = vectors.number(AHEAD) if ahead.literal_value else None
        if together == FOUR:
            distance = builder.mul(step, vectors.number(_four_keys(name, width.literal_value)))
        loads = Loads(vectors, name, looked_up=code < 0)
        for panel in _panels(loads, width.literal_value, together):
            _add_panel(loads, panel, together, bool(marked.literal_value), distance, args[5:])
        return context.get_dummy_value()

    return types.void(storage, width, rows, marked, ahead, *[types.int64] * 6), codegen


def _panels(loads: Loads, width: int, rows: int) -> list[tuple[int, int]]:
    """Cut the width into even panels whose sums registers hold."""
    steps = -(-width // loads.step)
    vectors = steps * loads.step // loads.vectors.lanes * rows
    size = -(-steps // -(-vectors // ACCUMULATORS)) * loads.step
    return [(first, min(width, first + size)) for first in range(0, width, size)]


def _add_panel(loads: Loads, panel: tuple[int, int], rows: int, marked: bool, ahead: Any, given: Any) -> None:
    """Sum a panel's elements of all keys in registers, then add them to ``sums``.

    Those that are ``ahead`` so many bytes are fetched, unless it is None.
    """
    p, v, v_t, keys, sums, sums_t = given
    vectors, (first, stop) = loads.vectors, panel
    at, v = first * vectors.size, vectors.advance(v, first, loads.size)

    def step(index: Any, totals: list[Any]) -> list[Any]:
        weight_at = vectors.advance(p, index, vectors.size)
        weights = [vectors.broadcast(vectors.advance(weight_at, row * BLOCK, vectors.size)) for row in range(rows)]
        value = vectors.advance(v, vectors.builder.mul(index, v_t))
        if ahead is not None:
            vectors.fetch_ahead(value, (stop - first) * loads.size, ahead, LINE if rows == FOUR else AHEAD_STEP)
        values = loads.load_row(value, stop - first)
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
def values_of(storage: str, common: int, looked_up: bool) -> Callable[[], int]:
    """Give the part that sums values of a storage type and a width that it is written out for.

    ``looked_up`` says whether values are widened by looking them up (`treeattn.kernels.lookup`).
    """
    code = (STORAGES.index(storage) + 1) * (-1 if looked_up else 1)
    size, itemsize, wide = stored_bytes(storage), 8 if storage == "float64" else 4, storage in ("float32", "float64")
    sums_row, row_bytes, quick = padded(common) * itemsize, common * size, storage in QUICK
    most, strip = (2, strip_keys(sums_row)) if quick else (FOUR, _four_keys(storage, common))
    first = 1 if quick and 2 * sums_row > ACCUMULATORS * 4 * LANES else most

    @part(VALUES)
    def values(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, sums_t: int, marked: int) -> None:
        apart = v_t != row_bytes
        alone = (wide or ASKS_FIRST) and rows == 1 and not apart
        # The other rows find these values in the cache: the memory would rest.
        asks = first if quick and rows >= first + 2 else 0 if ASKS_FIRST else -1
        for key in range(0, keys, strip):
            count, at, row, together = min(strip, keys - key), v + key * v_t, 0, first
            if apart:
                fetch_later(row_bytes, at, v_t, count)
            while row < rows:
                weights, total = p + key * itemsize + row * BLOCK * itemsize, sums + row * sums_t
                together = min(together, rows - row)
                if marked:
                    add_strip(code, common, 1, 1, 0, weights, at, v_t, count, total, sums_t)
                    together = 1
                elif row == asks and 2 <= together < FOUR and not apart:
                    add_strip(code, common, 2, 0, 1, weights, at, v_t, count, total, sums_t)
                    together = 2
                elif together == most:
                    add_strip(code, common, most, 0, 0, weights, at, v_t, count, total, sums_t)
                elif together >= 2:
                    add_strip(code, common, 2, 0, 0, weights, at, v_t, count, total, sums_t)
                    together = 2
                elif alone:
                    add_strip(code, common, 1, 0, 1, weights, at, v_t, count, total, sums_t)
                else:
                    add_strip(code, common, 1, 0, 0, weights, at, v_t, count, total, sums_t)
                row += together
                together = most

    return values


@cache
def values_of_any_width(dtype: str) -> Callable[[], int]:
    """Give the part that sums a strip of values of any width, widened to ``dtype`` and padded already."""
    code, itemsize = STORAGES.index(dtype) + 1, 8 if dtype == "float64" else 4
    wide, narrow = 8 * LANES * 4 // itemsize, 2 * LANES

    @part(VALUES)
    def values(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, sums_t: int, marked: int) -> None:
        for row in range(0, rows, 1 if marked else 2):
            column, pair = 0, rows - row >= 2 and not marked
            while column * itemsize < sums_t:
                at, weights = v + column * itemsize, p + row * BLOCK * itemsize
                total = sums + row * sums_t + column * itemsize
                if marked:
                    add_strip(code, narrow, 1, 1, 0, weights, at, v_t, keys, total, sums_t)
                    column += narrow
                elif (column + wide) * itemsize > sums_t:
                    if pair:
                        add_strip(code, narrow, 2, 0, 0, weights, at, v_t, keys, total, sums_t)
                    else:
                        add_strip(code, narrow, 1, 0, 0, weights, at, v_t, keys, total, sums_t)
                    column += narrow
                else:
                    if pair:
                        add_strip(code, wide, 2, 0, 0, weights, at, v_t, keys, total, sums_t)
                    else:
                        add_strip(code, wide, 1, 0, 0, weights, at, v_t, keys, total, sums_t)
                    column += wide

    return values
