"""Scores of a block of keys, q·k, at the memory's speed: each key is fetched once for up to 8 query rows.

A vector's worth of dot products is summed together. For common widths the loop over a row is written out and queries
stay in registers; all other widths share a kernel that loops over the row.
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
from treeattn.kernels.lookup import LOOKED_UP
from treeattn.kernels.pairs import PAIRS, add_pairs
from treeattn.kernels.vectors import AHEAD_STEP, ASKS_FIRST, DOUBLE, FLOAT, LANES, LINE, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["AS_PAIRS", "FOUND", "SCORES", "WIDENED", "scores_of"]

SCORES = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
"""(rows of q, bytes per row, rows, keys, bytes per key, number of keys, width, scores).

Writes ``scores[row, key]``, of which a row has ``BLOCK``. Rows of q are `padded` with zeros, and in the order in which
keys of the storage type are loaded.
"""

STRIP = 16384
"""Bytes of keys that stay in the first-level cache while one tile of rows after the other uses them."""

HELD = 16 if LANES == 16 else 4
"""Vectors of the queries that are kept in registers."""

WIDENED, FOUND, AS_PAIRS = range(3)
"""How keys are multiplied: widened in registers, looked up (`treeattn.kernels.lookup`), or as pairs of bfloat16."""


class _Products:
    """How a step of a key is multiplied with a step of a query: widened, in working precision."""

    def __init__(self, vectors: Vectors, storage: str, looked_up: bool = False) -> None:
        self.vectors, self.loads = vectors, Loads(vectors, storage, looked_up)
        self.per_step = self.loads.step // vectors.lanes
        self.query = vectors.type

    def key(self, address: Any, count: Any) -> list[Any]:
        """Load a step of a key."""
        return self.loads.load(address, count)

    def add(self, key: Any, query: Any, total: Any) -> Any:
        """Give ``key * query + total``; a total of None is 0."""
        return self.vectors.multiply(key, query) if total is None else self.vectors.add_product(key, query, total)


class _PairProducts(_Products):
    """Two bfloat16 products per lane in one instruction, for queries of that type; it takes denormals as 0."""

    def __init__(self, vectors: Vectors, storage: str) -> None:
        super().__init__(vectors, storage, storage in LOOKED_UP)
        self.per_step, self.query = self.loads.step // (2 * vectors.lanes), PAIRS

    def key(self, address: Any, count: Any) -> list[Any]:
        """Load a step of a key as pairs."""
        return self.loads.pairs(address, count)

    def add(self, key: Any, query: Any, total: Any) -> Any:
        """Give the sum of pairs of products, and ``total``."""
        return add_pairs(self.vectors, key, query, self.vectors.zero if total is None else total)


class _Tile:
    """Writes the dot products of ``rows`` queries with one key after the other.

    ``q`` is the first query's address, and ``q_t`` the bytes from one to the next. ``width`` is a Python number where
    the loop over a row is to be written out, else an int64 value.
    """

    def __init__(self, products: _Products, q: Any, q_t: Any, rows: int, width: Any) -> None:
        self._products, self._vectors = products, products.vectors
        multiply, number = self._vectors.builder.mul, self._vectors.number
        self._rows = [self._vectors.advance(q, multiply(number(row), q_t)) for row in range(rows)]
        self._width, self._held = width, {}
        if isinstance(width, int):
            together = HELD // (-(-width // self._step) * products.per_step)
            places = [(row, at) for row in range(min(rows, together)) for at in range(0, width, self._step)]
            self._held = {place: self._load_query(*place) for place in places}

    @property
    def _step(self) -> int:
        return self._products.loads.step

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, where its width is known."""
        return self._width * self._products.loads.size if isinstance(self._width, int) else 0

    def times(self, key: Any) -> list[Any]:
        """Multiply the key at this address with each query, lane by lane."""
        return self._times_written_out(key) if isinstance(self._width, int) else self._times_in_a_loop(key)

    def _times_written_out(self, key: Any) -> list[Any]:
        totals: list[Any] = [None] * len(self._rows)
        for at in range(0, self._width, self._step):
            rest = self._width - at
            totals = self._add_step(key, at, rest if rest < self._step else None, totals)
            self._vectors.in_order(totals)
        return totals

    def _times_in_a_loop(self, key: Any) -> list[Any]:
        vectors, step = self._vectors, self._vectors.number(self._step)
        whole, rest = vectors.builder.udiv(self._width, step), vectors.builder.urem(self._width, step)
        start = [vectors.zero] * len(self._rows)
        totals = vectors.loop(
            whole, start, lambda i, sums: self._add_step(key, vectors.builder.mul(i, step), None, sums)
        )
        some = vectors.builder.icmp_signed(">", rest, vectors.number(0))
        return vectors.when(
            some, totals, lambda sums: self._add_step(key, vectors.builder.mul(whole, step), rest, sums)
        )

    def _add_step(self, key: Any, at: Any, count: Any, totals: list[Any]) -> list[Any]:
        """Add the products of the step that starts with element ``at``, of which ``count`` or all are read."""
        chunks = self._products.key(self._vectors.advance(key, at, self._products.loads.size), count)
        found = []
        for row, total in enumerate(totals):
            queries = self._held.get((row, at)) if isinstance(at, int) else None
            for chunk, query in zip(chunks, queries or self._load_query(row, at), strict=True):
                total = self._products.add(chunk, query, total)
            found.append(total)
        return found

    def _load_query(self, row: int, at: Any) -> list[Any]:
        """Load a step of a query: as many vectors as a key's step is widened to, one after the other."""
        vectors, per_step = self._vectors, self._products.per_step
        start = vectors.advance(self._rows[row], at, per_step * vectors.bytes // self._step)
        places = [vectors.advance(start, i, vectors.bytes) for i in range(per_step)]
        kind = self._products.query
        return [vectors.builder.load(vectors.pointer(place, kind), align=vectors.size) for place in places]


def _dots(
    typingctx: Any,
    storage: Any,
    how: Any,
    common: Any,
    rows: Any,
    ahead: Any,
    q: Any,
    q_t: Any,
    k: Any,
    k_t: Any,
    keys: Any,
    width: Any,
    scores: Any,
) -> Any:
    """Write the scores of ``rows`` queries and all keys; ``common`` is the width if it is known, else 0.

    With ``ahead`` as 1, keys that come later are fetched: they must lie one behind the other.
    """
    name, fixed, together = STORAGES[storage.literal_value], common.literal_value, rows.literal_value
    way = how.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, q_t, k, k_t, keys, width, scores = args[5:]
        vectors = Vectors(builder, DOUBLE if name == "float64" else FLOAT)
        products = _PairProducts(vectors, name) if way == AS_PAIRS else _Products(vectors, name, way == FOUND)
        tile = _Tile(products, q, q_t, together, fixed or width)
        _for_keys(vectors, tile, together, bool(ahead.literal_value), (k, k_t, keys), scores)
        return context.get_dummy_value()

    return types.void(storage, how, common, rows, ahead, *[types.int64] * 7), codegen


def _for_keys(vectors: Vectors, tile: _Tile, rows: int, ahead: bool, keys: tuple[Any, Any, Any], scores: Any) -> None:
    """Write the loop over groups of keys whose dot products fill a vector; the last key stands in for missing ones."""
    builder, (k, k_t, count), group = vectors.builder, keys, vectors.lanes // rows
    last = builder.sub(count, vectors.number(1))

    def body(index: Any, carried: list[Any]) -> list[Any]:
        first = builder.mul(index, vectors.number(group))

        def address(i: int) -> Any:
            key = builder.add(first, vectors.number(i))
            key = builder.select(builder.icmp_signed("<", key, last), key, last)
            return vectors.advance(k, builder.mul(key, k_t))

        def products(i: int) -> list[Any]:
            if ahead:
                vectors.fetch_ahead(address(i), tile.row_bytes, step=AHEAD_STEP if rows <= 2 else LINE)
            return tile.times(address(i))

        found = _sums(vectors, products, rows, 0, group)
        for row in range(rows):
            at = vectors.advance(vectors.advance(scores, first, vectors.size), row * BLOCK, vectors.size)
            vectors.store(vectors.piece(found, row, group, rows), at)
        return []

    vectors.loop(builder.udiv(builder.add(last, vectors.number(group)), vectors.number(group)), [], body)


def _sums(vectors: Vectors, products: Callable[[int], list[Any]], rows: int, key: int, keys: int) -> Any:
    """Give a vector of the sums over lanes of all products of some keys, row by row within key by key.

    Each key's products are added up as far as they go before the next key is loaded, which frees their registers.
    """
    if keys > 1:
        first = _sums(vectors, products, rows, key, keys // 2)
        second = _sums(vectors, products, rows, key + keys // 2, keys // 2)
        return vectors.fold(first, second, rows * keys // 2)
    width, found = 1, products(key)
    while width < rows:
        found = [vectors.fold(a, b, width) for a, b in zip(found[::2], found[1::2], strict=True)]
        width *= 2
    vectors.in_order(found)
    return found[0]


dots: Any = intrinsic(prefer_literal=True)(_dots)


@cache
def scores_of(storage: str, common: int, how: int) -> Callable[[], int]:
    """Give the part that scores keys of a storage type.

    Parameters
    ----------
    storage : str
    common : int
        The width that it is for, or 0 for any.
    how : int
        `WIDENED`, `FOUND` or `AS_PAIRS`, which is for queries of bfloat16.
    """
    code = STORAGES.index(storage)
    size, itemsize = stored_bytes(storage), 8 if storage == "float64" else 4
    row_bytes = max(1, common * size)
    most, slow = 2 if _in_pairs_of_rows(storage, common, how) else 8, storage not in QUICK or ASKS_FIRST
    eight, four, two = (min(rows, LANES * 4 // itemsize) for rows in (8, 4, 2))

    @part(SCORES)
    def scores(q: int, q_t: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
        if rows == 1 and k_t == common * size:
            dots(code, how, common, 1, 1, q, q_t, k, k_t, keys, width, scores)
            return
        apart = common != 0 and k_t != row_bytes
        # The other rows find these keys in the cache: the memory would rest.
        asks = two if most == 2 and rows >= 2 * two else 0 if ASKS_FIRST else -1
        strip = LANES if most == 2 or apart else max(LANES, STRIP // (width * size) // LANES * LANES)
        for first in range(0, keys, strip):
            row, count = 0, min(strip, keys - first)
            start, into = k + first * k_t, scores + first * itemsize
            if apart:
                fetch_later(row_bytes, start, k_t, count)
            while row < rows:
                at, found = q + row * q_t, into + row * BLOCK * itemsize
                if rows - row >= eight and most == 8:
                    if row == asks and not apart:
                        dots(code, how, common, eight, 1, at, q_t, start, k_t, count, width, found)
                    else:
                        dots(code, how, common, eight, 0, at, q_t, start, k_t, count, width, found)
                    row += eight
                elif rows - row >= four and most == 8:
                    if slow and row == 0 and not apart:  # the processor alone would not ask far enough ahead
                        dots(code, how, common, four, 1, at, q_t, start, k_t, count, width, found)
                    else:
                        dots(code, how, common, four, 0, at, q_t, start, k_t, count, width, found)
                    row += four
                elif rows - row >= two:
                    if row == asks and not apart:
                        dots(code, how, common, two, 1, at, q_t, start, k_t, count, width, found)
                    else:
                        dots(code, how, common, two, 0, at, q_t, start, k_t, count, width, found)
                    row += two
                else:
                    dots(code, how, common, 1, 0, at, q_t, start, k_t, count, width, found)
                    row += 1

    return scores


def _in_pairs_of_rows(storage: str, common: int, how: int) -> bool:
    """Whether two rows at a time are faster than eight: where both queries stay in registers, and widening is quick.

    Keys then come in faster than the memory delivers them, which keeps it busy; the other rows find them in the cache.
    """
    quick = storage in QUICK and how != AS_PAIRS
    vectors = -(-padded(common) * (8 if storage == "float64" else 4) // (LANES * 4))
    return 0 < 2 * vectors <= HELD and quick
