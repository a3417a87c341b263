"""Stored keys and values, of any dtype and strides, widened block by block into a contiguous working copy.

The copy is one block and stays in the cache. Rows that are already contiguous and in working precision are read
where they lie and never come here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types as _types
from numba.extending import intrinsic, overload

from treeattn.kernels.call import STORAGES
from treeattn.kernels.compilation import inline, part
from treeattn.kernels.loads import Loads
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.vectors import DOUBLE, FLOAT, LANES, Vectors

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["WIDEN", "widen_double", "widen_rows_of", "widen_single"]

FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8 = (STORAGES.index(name) for name in STORAGES[:5])

WIDEN = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
"""(storage, source, bytes per token, bytes per element, tokens, width, target, table of the 256 float8 values)

Rows of the target are `padded` with zeros.
"""


# 2**112: turns a half's bits, moved to a single's place, into its value; the exponents differ by 112.
HALF_TO_SINGLE = np.float32(2.0**112)


@part(WIDEN)
def widen_single(
    storage: int, source: int, row: int, step: int, tokens: int, width: int, target: int, table: int
) -> None:
    """Widen to float32."""
    _widen(storage, source, row, step, tokens, width, target, table, np.float32)


@part(WIDEN)
def widen_double(
    storage: int, source: int, row: int, step: int, tokens: int, width: int, target: int, table: int
) -> None:
    """Widen to float64."""
    _widen(storage, source, row, step, tokens, width, target, table, np.float64)


def _widen_row(typingctx: Any, storage: Any, source: Any, width: Any, target: Any) -> Any:
    """Widen a contiguous row in registers, in whole steps."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, source, width, target = args
        name = STORAGES[storage.literal_value]
        vectors = Vectors(builder, DOUBLE if name == "float64" else FLOAT)
        loads, number = Loads(vectors, name), vectors.number
        bytes_of_step = loads.step * vectors.size

        def step(index: Any, places: list[Any]) -> list[Any]:
            vectors.store_all(loads.load(places[0]), places[1])
            return [vectors.advance(places[0], loads.step, loads.size), vectors.advance(places[1], bytes_of_step)]

        whole, rest = builder.udiv(width, number(loads.step)), builder.urem(width, number(loads.step))
        source, target = vectors.loop(whole, [source, target], step)

        def last(values: list[Any]) -> list[Any]:
            vectors.store_all(loads.load(source, rest), target)
            return values

        vectors.when(builder.icmp_signed(">", rest, number(0)), [], last)
        return context.get_dummy_value()

    return types.void(storage, types.int64, types.int64, types.int64), codegen


widen_row: Any = intrinsic(prefer_literal=True)(_widen_row)


@cache
def widen_rows_of(storage: str) -> Callable[[], int]:
    """Give the part that widens contiguous rows of a storage type in registers, in the order in which they come."""
    code, itemsize = STORAGES.index(storage), 8 if storage == "float64" else 4

    @part(WIDEN)
    def widen_rows(
        _storage: int, source: int, row: int, _step: int, tokens: int, width: int, target: int, _table: int
    ) -> None:
        target_row = -(-width // (2 * LANES)) * 2 * LANES * itemsize
        for t in range(tokens):
            widen_row(code, source + t * row, width, target + t * target_row)

    return widen_rows


@inline
def _widen(
    storage: int, source: int, row: int, step: int, tokens: int, width: int, target: int, table: int, dtype: Any
) -> None:
    values, target_row = pointer(table, np.float32), -(-width // (2 * LANES)) * 2 * LANES
    for t in range(tokens):
        start, into = source + t * row, pointer(target + t * target_row * itemsize(dtype), dtype)
        for j in range(width, target_row):
            into[j] = 0
        if storage == FLOAT32:
            _row(np.float32, start, step, width, into, dtype, values)
        elif storage == FLOAT64:
            _row(np.float64, start, step, width, into, dtype, values)
        elif storage == BFLOAT16:
            _row(np.uint16, start, step, width, into, dtype, values)
        elif storage == FLOAT16:
            _row(np.int16, start, step, width, into, dtype, values)
        elif storage == INT8:
            _row(np.int8, start, step, width, into, dtype, values)
        else:
            _row(np.uint8, start, step, width, into, dtype, values)


@inline
def _row(kind: Any, start: int, step: int, width: int, into: Any, dtype: Any, values: Any) -> None:
    if step == itemsize(kind):  # apart, because only this loop can be vectorised
        row = pointer(start, kind)
        for j in range(width):
            into[j] = dtype(_number(row[j], values))
    else:
        for j in range(width):
            into[j] = dtype(_number(pointer(start + j * step, kind)[0], values))


def _number(stored: Any, values: Any) -> Any:
    """Value of a stored element; its type says what it is: uint16 is a bfloat16, int16 a half, uint8 a float8."""


@overload(_number)
def _number_of(stored: Any, values: Any) -> Any:
    # Functions can't be arguments here: code that holds their addresses can't be kept on disk.
    return {types.uint16: _bfloat16, types.int16: _half, types.uint8: _float8}.get(stored, _same)


def _same(stored: Any, values: Any) -> Any:
    return stored


def _float8(stored: Any, values: Any) -> Any:
    return values[stored]


def _bfloat16(stored: Any, values: Any) -> Any:
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


def _half(stored: Any, values: Any) -> Any:
    magnitude = np.uint32(np.uint32(stored) & np.uint32(0x7FFF)) << np.uint32(13)
    number = np.float32(np.uint32(magnitude).view(np.float32) * HALF_TO_SINGLE)
    special = np.uint32(0x7F800000) if magnitude >= np.uint32(0x7C00 << 13) else np.uint32(0)
    sign = np.uint32(np.uint32(stored) & np.uint32(0x8000)) << np.uint32(16)
    return np.uint32(number.view(np.uint32) | special | sign).view(np.float32)
