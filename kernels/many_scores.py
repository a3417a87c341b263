"""Scores of many query rows: rows lie in the lanes of vectors, and each number of a key is multiplied with all of them.

From about 9 rows on computing takes longer than reading. This form of a matrix product keeps the multipliers busy: a
tile of keys has one vector of sums each, which stay in registers, and no sum over lanes is left in the end. While it
computes, the memory is asked for the values that are needed next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels.compilation import part
from treeattn.kernels.pairs import add_pair_at
from treeattn.kernels.vectors import DOUBLE, FLOAT, LANES, ZEN, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["KEYS", "KINDS", "MANY_SCORES", "many_scores_of"]

MANY_SCORES = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)"
"""(queries, bytes per column, vectors of rows, keys, bytes per key, number of keys, columns, scores, ahead, step).

Queries and scores are transposed: a column of queries holds one number of every row (or two, see `KINDS`), and a line
of scores all rows' of one key. A column and a line have the same number of bytes. ``ahead`` is memory that will be
needed next, of which ``step`` bytes are fetched with each column of each tile of keys.
"""

KINDS = ("float32", "float64", "pairs of bfloat16")
"""What a column is: a float32 or float64, or two bfloat16 whose products are added in one instruction."""

KEYS = 8 if LANES == 8 else 16
"""Keys in a tile: AVX2 has 16 registers, the others 32."""

STRIP = 64
"""Columns that are summed for themselves before they are added to the others: two levels lose fewer bits."""

APART = 4
"""Keys that are addressed from one register, by their distance to it."""

TOGETHER = 4 if LANES == 16 and not ZEN else 1
"""Columns that a key is multiplied with before the next key is. Intel's processors split a multiply-add in two where
its operand's address is a sum of registers, and two threads may share a core there, which is then short of
instructions: an address in a register of its own, computed once, serves so many."""


class _Tile:
    """Writes the loops over columns that sum the products of one vector of rows and each of some keys.

    Each loop carries the addresses of the next column, of the line to fetch and of the keys, and the sums.
    """

    def __init__(self, vectors: Vectors, kind: str, q_c: Any, k_t: Any, step: Any) -> None:
        self._vectors, self._kind, self._q_c, self._k_t, self._step = vectors, kind, q_c, k_t, step
        self._strides = [vectors.builder.mul(k_t, vectors.number(i)) for i in range(APART)]

    def sums(self, q: Any, ahead: Any, k: Any, columns: Any, keys: int) -> list[Any]:
        """Give a vector of sums for each key."""
        vectors, builder, totals = self._vectors, self._vectors.builder, [self._vectors.zero] * keys
        if TOGETHER > 1:
            whole, columns = (divide(columns, vectors.number(TOGETHER)) for divide in (builder.udiv, builder.urem))
            q, ahead, k, *totals = vectors.loop(whole, [q, ahead, k, *totals], self._add_columns)
        bases = [builder.add(k, builder.mul(self._k_t, vectors.number(i))) for i in range(0, keys, APART)]
        return vectors.loop(columns, [q, ahead, *bases, *totals], partial(self._add_column, keys))[-keys:]

    def _add_columns(self, index: Any, carried: list[Any]) -> list[Any]:
        vectors, builder = self._vectors, self._vectors.builder
        query, next_of, first, *totals = carried
        rows, key, found = [], first, []
        for _ in range(TOGETHER):
            vectors.fetch(next_of)
            rows.append(vectors.load(query))
            query, next_of = builder.add(query, self._q_c), builder.add(next_of, self._step)
        for total in totals:
            key = vectors.in_register(key)
            for i, row in enumerate(rows):
                total = _product(vectors, self._kind, vectors.advance(key, i, vectors.size), row, total)
            found.append(total)
            key = builder.add(key, self._k_t)
        return [query, next_of, vectors.advance(first, TOGETHER, vectors.size), *found]

    def _add_column(self, keys: int, index: Any, carried: list[Any]) -> list[Any]:
        vectors, builder, size = self._vectors, self._vectors.builder, self._vectors.number(self._vectors.size)
        query, next_of, bases, totals = carried[0], carried[1], carried[2:-keys], carried[-keys:]
        vectors.fetch(next_of)
        row = vectors.load(query)
        found = [
            _product(vectors, self._kind, builder.add(bases[i // APART], self._strides[i % APART]), row, total)
            for i, total in enumerate(totals)
        ]
        onward = [builder.add(base, size) for base in bases]
        return [builder.add(query, self._q_c), builder.add(next_of, self._step), *onward, *found]


def _add_tile(
    typingctx: Any,
    kind: Any,
    tile: Any,
    more: Any,
    q: Any,
    q_c: Any,
    k: Any,
    k_t: Any,
    columns: Any,
    scores: Any,
    ahead: Any,
    step: Any,
) -> Any:
    """Write the scores of one vector of rows and ``tile`` keys; ``more`` adds to what is there."""
    name, keys = KINDS[kind.literal_value], tile.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, q_c, k, k_t, columns, scores, ahead, step = args[3:]
        vectors = Vectors(builder, DOUBLE if name == "float64" else FLOAT)
        tile = _Tile(vectors, name, q_c, k_t, step)
        for i, total in enumerate(tile.sums(q, ahead, k, columns, keys)):
            place = builder.add(scores, builder.mul(q_c, vectors.number(i)))
            vectors.store(vectors.add(vectors.load(place), total) if more.literal_value else total, place)
        return context.get_dummy_value()

    return types.void(kind, tile, more, *[types.int64] * 8), codegen


def _product(vectors: Vectors, kind: str, key: Any, row: Any, total: Any) -> Any:
    """Add the products of one column of a key with that of all rows."""
    if kind in ("float32", "float64"):
        return vectors.add_product(vectors.broadcast(key), row, total)
    return add_pair_at(vectors, key, row, total)


add_tile: Any = intrinsic(prefer_literal=True)(_add_tile)


@cache
def many_scores_of(kind: str) -> Callable[[], int]:
    """Give the part that scores keys of one of the `KINDS`."""
    code, size = KINDS.index(kind), 8 if kind == "float64" else 4
    row_bytes = LANES * 4

    @part(MANY_SCORES)
    def many_scores(
        q: int, q_c: int, vectors: int, k: int, k_t: int, keys: int, columns: int, scores: int, ahead: int, step: int
    ) -> None:
        for key in range(0, keys, KEYS):
            # The last tile begins early enough to be whole: some scores are computed twice, to the same bits.
            first = max(0, min(key, keys - KEYS))
            for vector in range(vectors):
                for column in range(0, columns, STRIP):
                    count, at = min(STRIP, columns - column), q + vector * row_bytes + column * q_c
                    source, into = k + first * k_t + column * size, scores + first * q_c + vector * row_bytes
                    if keys < KEYS:
                        for i in range(keys):
                            if column == 0:
                                add_tile(code, 1, 0, at, q_c, source + i * k_t, k_t, count, into + i * q_c, ahead, 0)
                            else:
                                add_tile(code, 1, 1, at, q_c, source + i * k_t, k_t, count, into + i * q_c, ahead, 0)
                    elif column == 0:
                        add_tile(code, KEYS, 0, at, q_c, source, k_t, count, into, ahead, step)
                    else:
                        add_tile(code, KEYS, 1, at, q_c, source, k_t, count, into, ahead, step)
                    ahead += step * count

    return many_scores
