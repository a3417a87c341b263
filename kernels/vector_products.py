"""The two matrix products of a block for contiguous rows of whole vectors, at the memory's speed.

Scores: each key is fetched once for up to 8 query rows, and the dot products of a vector's worth of (row, key) pairs
are summed together. Values: a strip of keys that fits the first-level cache is fetched in order by the first pair of
rows; the other pairs find it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding
from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels.call import BLOCK
from treeattn.kernels.compilation import inline, part
from treeattn.kernels.products import SCORES, VALUES
from treeattn.kernels.vectors import LANES, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["SCORES_OF", "VALUES_OF", "vectorised"]

STRIP = 16384
"""Bytes of values that stay in the first-level cache while pair after pair of rows uses them."""

STORED = {
    types.float32: ("float32", 4),
    types.uint16: ("bfloat16", 2),
    types.int16: ("float16", 2),
    types.int8: ("int8", 1),
    types.uint8: ("float8_e5m2", 1),
    types.uint32: ("float8_e4m3fn", 1),
}
"""Storage types and their bytes, by what stands for them in compiled code, where numba has no narrow floats."""


def vectorised(storage: str, width: int, stride: int) -> bool:
    """Whether rows of ``storage`` are whole vectors, contiguous, and of a type that this processor can widen."""
    if (storage, stride) not in STORED.values() or width % LANES:
        return False
    halves = storage in ("float16", "float8_e5m2")
    return not halves or bool(binding.get_host_cpu_features().get("f16c", True))


def _dots(typingctx: Any, kind: Any, rows: Any, q: Any, k: Any, k_t: Any, last: Any, width: Any, scores: Any) -> Any:
    """Write the scores of ``rows`` queries and the next ``LANES / rows`` keys; keys behind ``last`` are not read."""
    (storage, size), together = STORED[kind.dtype], min(rows.literal_value, LANES)
    keys = LANES // together

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, k, k_t, last, width, scores = args[2:]
        vectors = Vectors(builder)
        found = [_dots_of_key(vectors, storage, size, together, q, k, k_t, last, width, key) for key in range(keys)]
        total = vectors.sums([found[key][row] for row in range(together) for key in range(keys)])
        for row in range(together):
            at = builder.add(scores, vectors.number(row * BLOCK * 4))
            vectors.store(vectors.piece(total, row * keys, keys), at)
        return context.get_dummy_value()

    return types.void(kind, rows, *[types.int64] * 6), codegen


def _dots_of_key(
    vectors: Vectors, storage: str, size: int, rows: int, q: Any, k: Any, k_t: Any, last: Any, width: Any, key: int
) -> list[Any]:
    """Multiply one key with each query, lane by lane."""
    k = vectors.advance(k, vectors.product(vectors.smaller(vectors.number(key), last), k_t))

    def step(index: Any, totals: list[Any]) -> list[Any]:
        chunk = vectors.load(vectors.advance(k, index, LANES * size), storage)
        q_chunk = vectors.advance(q, index, LANES * 4)
        starts = [vectors.advance(q_chunk, vectors.product(width, vectors.number(row * 4))) for row in range(rows)]
        return [
            vectors.add_product(chunk, vectors.load(start), total) for start, total in zip(starts, totals, strict=True)
        ]

    return vectors.loop(vectors.quotient(width, LANES), [vectors.zero] * rows, step)


def _add_keys(
    typingctx: Any,
    kind: Any,
    rows: Any,
    chunks: Any,
    hidden: Any,
    p: Any,
    v: Any,
    v_t: Any,
    keys: Any,
    sums: Any,
    width: Any,
) -> Any:
    """Add ``keys`` weighted values to ``chunks`` vectors of the sums of ``rows`` rows, which stay in registers."""
    storage, size = STORED[kind.dtype]
    together, count, masked = rows.literal_value, chunks.literal_value, bool(hidden.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        p, v, v_t, keys, sums, width = args[4:]
        vectors = Vectors(builder)
        starts = [vectors.advance(sums, vectors.product(width, vectors.number(row * 4))) for row in range(together)]
        places = [vectors.advance(start, vectors.number(i), LANES * 4) for start in starts for i in range(count)]

        def step(index: Any, totals: list[Any]) -> list[Any]:
            weight_at = vectors.advance(p, index, 4)
            offsets = [vectors.number(row * BLOCK * 4) for row in range(together)]
            weights = [vectors.broadcast(vectors.advance(weight_at, offset)) for offset in offsets]
            row_at = vectors.advance(v, vectors.product(index, v_t))
            values = [
                vectors.load(vectors.advance(row_at, vectors.number(i * LANES * size)), storage) for i in range(count)
            ]
            return [
                _add(vectors, weights[i // count], values[i % count], total, masked) for i, total in enumerate(totals)
            ]

        for place, total in zip(places, vectors.loop(keys, [vectors.load(at) for at in places], step), strict=True):
            vectors.store(total, place)
        return context.get_dummy_value()

    return types.void(kind, rows, chunks, hidden, *[types.int64] * 6), codegen


def _add(vectors: Vectors, weight: Any, value: Any, total: Any, masked: bool) -> Any:
    added = vectors.add_product(weight, value, total)
    return vectors.unless_hidden(weight, added, total) if masked else added


def _stored_bytes(typingctx: Any, kind: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, STORED[kind.dtype][1])

    return types.int64(kind), codegen


stored_bytes: Any = intrinsic(_stored_bytes)
dots: Any = intrinsic(prefer_literal=True)(_dots)
add_keys: Any = intrinsic(prefer_literal=True)(_add_keys)


@inline
def _scores(kind: Any, q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    row = 0
    while row < rows:
        together = 8 if rows - row >= 8 and LANES >= 8 else 4 if rows - row >= 4 else 2 if rows - row >= 2 else 1
        for key in range(0, keys, LANES // together):
            q_at, k_at, at = q + row * width * 4, k + key * k_t, scores + (row * BLOCK + key) * 4
            last = keys - 1 - key
            if together == 8:
                dots(kind, 8, q_at, k_at, k_t, last, width, at)
            elif together == 4:
                dots(kind, 4, q_at, k_at, k_t, last, width, at)
            elif together == 2:
                dots(kind, 2, q_at, k_at, k_t, last, width, at)
            else:
                dots(kind, 1, q_at, k_at, k_t, last, width, at)
        row += together


@inline
def _values(kind: Any, p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    strip = max(4, STRIP // (width * stored_bytes(kind)))
    for key in range(0, keys, strip):
        count = min(strip, keys - key)
        for row in range(0, rows, 2):
            at = p + (row * BLOCK + key) * 4
            start = sums + row * width * 4
            if hidden:
                _strip_hidden(kind, min(2, rows - row), at, v + key * v_t, v_t, count, width, start)
            else:
                _strip(kind, min(2, rows - row), at, v + key * v_t, v_t, count, width, start)


@inline
def _strip(kind: Any, rows: int, p: int, v: int, v_t: int, keys: int, width: int, sums: int) -> None:
    """Add a strip of values to one row or two, so many columns at a time as registers hold."""
    column = 0
    while column < width:
        at, start = v + column * stored_bytes(kind), sums + column * 4
        if width - column >= 8 * LANES:
            if rows == 2:
                add_keys(kind, 2, 8, 0, p, at, v_t, keys, start, width)
            else:
                add_keys(kind, 1, 8, 0, p, at, v_t, keys, start, width)
            column += 8 * LANES
        elif width - column >= 4 * LANES:
            if rows == 2:
                add_keys(kind, 2, 4, 0, p, at, v_t, keys, start, width)
            else:
                add_keys(kind, 1, 4, 0, p, at, v_t, keys, start, width)
            column += 4 * LANES
        else:
            if rows == 2:
                add_keys(kind, 2, 1, 0, p, at, v_t, keys, start, width)
            else:
                add_keys(kind, 1, 1, 0, p, at, v_t, keys, start, width)
            column += LANES


@inline
def _strip_hidden(kind: Any, rows: int, p: int, v: int, v_t: int, keys: int, width: int, sums: int) -> None:
    """Do the same where some weights are marks of hidden keys, one row at a time."""
    for row in range(rows):
        weights, total = p + row * BLOCK * 4, sums + row * width * 4
        column = 0
        while column < width:
            at, start = v + column * stored_bytes(kind), total + column * 4
            if width - column >= 8 * LANES:
                add_keys(kind, 1, 8, 1, weights, at, v_t, keys, start, width)
                column += 8 * LANES
            else:
                add_keys(kind, 1, 1, 1, weights, at, v_t, keys, start, width)
                column += LANES


@part(SCORES)
def _scores_float32(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    _scores(np.float32, q, rows, k, k_t, keys, width, scores)


@part(SCORES)
def _scores_bfloat16(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    _scores(np.uint16, q, rows, k, k_t, keys, width, scores)


@part(SCORES)
def _scores_float16(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    _scores(np.int16, q, rows, k, k_t, keys, width, scores)


@part(SCORES)
def _scores_int8(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    _scores(np.int8, q, rows, k, k_t, keys, width, scores)


@part(SCORES)
def _scores_float8_e5m2(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    _scores(np.uint8, q, rows, k, k_t, keys, width, scores)


@part(SCORES)
def _scores_float8_e4m3fn(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    _scores(np.uint32, q, rows, k, k_t, keys, width, scores)


@part(VALUES)
def _values_float32(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    _values(np.float32, p, rows, v, v_t, keys, width, sums, hidden)


@part(VALUES)
def _values_bfloat16(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    _values(np.uint16, p, rows, v, v_t, keys, width, sums, hidden)


@part(VALUES)
def _values_float16(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    _values(np.int16, p, rows, v, v_t, keys, width, sums, hidden)


@part(VALUES)
def _values_int8(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    _values(np.int8, p, rows, v, v_t, keys, width, sums, hidden)


@part(VALUES)
def _values_float8_e5m2(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    _values(np.uint8, p, rows, v, v_t, keys, width, sums, hidden)


@part(VALUES)
def _values_float8_e4m3fn(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    _values(np.uint32, p, rows, v, v_t, keys, width, sums, hidden)


SCORES_OF: dict[str, Callable[[], int]] = {
    "float32": _scores_float32,
    "bfloat16": _scores_bfloat16,
    "float16": _scores_float16,
    "int8": _scores_int8,
    "float8_e5m2": _scores_float8_e5m2,
    "float8_e4m3fn": _scores_float8_e4m3fn,
}
VALUES_OF: dict[str, Callable[[], int]] = {
    "float32": _values_float32,
    "bfloat16": _values_bfloat16,
    "float16": _values_float16,
    "int8": _values_int8,
    "float8_e5m2": _values_float8_e5m2,
    "float8_e4m3fn": _values_float8_e4m3fn,
}
