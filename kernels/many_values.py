"""Weighted sums of values for many query rows: a tile of sums stays in registers while keys go by.

Rows have their sums in vectors along the width, as for a few rows; what differs is the tile, whose loads are few beside
its products, and that the memory is asked for the keys that are needed next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels.call import STORAGES
from treeattn.kernels.compilation import part
from treeattn.kernels.loads import PAIRED, Loads, stored_bytes
from treeattn.kernels.vectors import DOUBLE, FLOAT, LANES, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["MANY_VALUES", "READ", "ROWS", "fits_panels", "many_values_of"]

MANY_VALUES = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)"
"""(weights, bytes per key of them, rows, values, bytes per key, keys, width, sums, bytes per row, marked, ahead, step).

Weights are the transposed scores. Where ``marked``, a weight of -inf marks a hidden key, whose value is not used.
Sums have whole tiles of ``ROWS`` rows, in the order in which values of the storage type are loaded. ``ahead`` is memory
that will be needed next, of which ``step`` bytes are fetched with each key of each tile.
"""

ROWS = 4 if LANES == 8 else 8
"""Rows in a tile: AVX2 has 16 registers, the others 32."""

PANEL = 2
"""Vectors of a row in a tile."""


READ = ("float32", "float64", "bfloat16")
"""Types that are read where they lie. Others take longer to widen, which is then done once for all tiles of rows."""


def fits_panels(storage: str, width: int) -> bool:
    """Whether values of a contiguous storage type are read where they lie, in whole vectors."""
    lanes = LANES * 4 // (8 if storage == "float64" else 4)
    return storage in READ and width % (lanes * (2 if storage in PAIRED else 1)) == 0


def _add_tile(
    typingctx: Any,
    storage: Any,
    panel: Any,
    marked: Any,
    p: Any,
    p_t: Any,
    v: Any,
    v_t: Any,
    keys: Any,
    sums: Any,
    sums_t: Any,
    ahead: Any,
    step: Any,
) -> Any:
    """Add the weighted values of ``panel`` vectors of the width to the sums of ``ROWS`` rows."""
    name, width, marks = STORAGES[storage.literal_value], panel.literal_value, bool(marked.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        p, p_t, v, v_t, keys, sums, sums_t, ahead, step = args[3:]
        vectors = Vectors(builder, DOUBLE if name == "float64" else FLOAT)
        loads = Loads(vectors, name)

        def add_key(index: Any, carried: list[Any]) -> list[Any]:
            weight_at, value_at, next_of, *totals = carried
            vectors.fetch(next_of)
            values = loads.load_row(value_at, width * vectors.lanes)
            weights = [vectors.broadcast(vectors.advance(weight_at, row, vectors.size)) for row in range(ROWS)]
            pairs = [(weight, value) for weight in weights for value in values]
            found = [_add(vectors, *pair, total, marks) for pair, total in zip(pairs, totals, strict=True)]
            return [builder.add(weight_at, p_t), builder.add(value_at, v_t), builder.add(next_of, step), *found]

        totals = vectors.loop(keys, [p, v, ahead, *[vectors.zero] * (ROWS * width)], add_key)[3:]
        for i, total in enumerate(totals):
            row = vectors.advance(sums, builder.mul(sums_t, vectors.number(i // width)))
            place = vectors.advance(row, i % width, vectors.bytes)
            vectors.store(vectors.add(vectors.load(place), total), place)
        return context.get_dummy_value()

    return types.void(storage, panel, marked, *[types.int64] * 9), codegen


def _add(vectors: Vectors, weight: Any, value: Any, total: Any, marked: bool) -> Any:
    added = vectors.add_product(weight, value, total)
    return vectors.where("==", weight, vectors.constant(float("-inf")), total, added) if marked else added


add_tile: Any = intrinsic(prefer_literal=True)(_add_tile)


@cache
def many_values_of(storage: str) -> Callable[[], int]:
    """Give the part that sums values of a storage type, contiguous and of a width that `fits_panels`."""
    code, size, itemsize = STORAGES.index(storage), stored_bytes(storage), 8 if storage == "float64" else 4
    lanes = LANES * 4 // itemsize
    wide, rest = PANEL * lanes, PANEL if storage in PAIRED else 1

    @part(MANY_VALUES)
    def many_values(
        p: int,
        p_t: int,
        rows: int,
        v: int,
        v_t: int,
        keys: int,
        width: int,
        sums: int,
        sums_t: int,
        marked: int,
        ahead: int,
        step: int,
    ) -> None:
        for row in range(0, rows, ROWS):
            column = 0
            while column < width:
                at, weights, total = v + column * size, p + row * itemsize, sums + row * sums_t + column * itemsize
                if width - column < wide:
                    if marked:
                        add_tile(code, rest, 1, weights, p_t, at, v_t, keys, total, sums_t, ahead, step)
                    else:
                        add_tile(code, rest, 0, weights, p_t, at, v_t, keys, total, sums_t, ahead, step)
                elif marked:
                    add_tile(code, PANEL, 1, weights, p_t, at, v_t, keys, total, sums_t, ahead, step)
                else:
                    add_tile(code, PANEL, 0, weights, p_t, at, v_t, keys, total, sums_t, ahead, step)
                column += wide
                ahead += step * keys

    return many_values
