"""Numbers of 8 bits as the bfloat16 that each of them is, looked up in registers (avx512_vbmi).

An instruction looks 64 bytes up among 128, by their lower seven bits; the highest is the sign, in float8. Whole numbers
are looked up by their magnitude.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from treeattn.arguments.arrays import narrow_dtype
from treeattn.kernels.vectors import Vectors

__all__ = ["LOOKED_UP", "STEP", "as_pairs"]

Table: TypeAlias = npt.NDArray[np.uint8]

LOOKED_UP = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Types whose numbers are looked up. Each is a bfloat16 too."""

STEP = 64
"""Numbers that are looked up at once: the bytes of a vector."""

SIGN = 0x80


def as_pairs(vectors: Vectors, storage: str, raw: Any, kind: Any) -> list[Any]:
    """Give `STEP` stored numbers as two vectors of bfloat16, which are of type ``kind``.

    The first has every other eight of them from the first eight on, the second those between.
    """
    find = _find_whole if storage == "int8" else _find_signed
    lower, upper = find(vectors, _tables(storage), raw)
    halves = ([first + at for first in range(start, STEP, 16) for at in range(8)] for start in (0, 8))
    both = ([place for number in half for place in (number, STEP + number)] for half in halves)
    return [vectors.builder.bitcast(vectors.shuffle(lower, upper, lanes), kind) for lanes in both]


@cache
def _tables(storage: str) -> tuple[Table, Table]:
    """Give the lower and the upper byte of each number that is not negative, by its bits."""
    numbers = np.arange(SIGN, dtype=np.uint8).view(narrow_dtype(storage)).astype(np.float32)
    upper_half = numbers.view(np.uint32) >> 16
    return (upper_half & 0xFF).astype(np.uint8), (upper_half >> 8).astype(np.uint8)


def _find_signed(vectors: Vectors, tables: tuple[Table, Table], raw: Any) -> tuple[Any, Any]:
    """Give the lower and upper bytes of float8 numbers, whose signs are where a bfloat16 has its own."""
    lower, upper = (_find(vectors, table, raw) for table in tables)
    return lower, vectors.builder.or_(upper, vectors.builder.and_(raw, _bytes(raw, SIGN)))


def _find_whole(vectors: Vectors, tables: tuple[Table, Table], raw: Any) -> tuple[Any, Any]:
    """Give those of whole numbers; -128, whose magnitude has an eighth bit, is found as 0, and differs in one byte."""
    builder, nothing = vectors.builder, _bytes(raw, 0)
    below = builder.icmp_signed("<", raw, nothing)
    magnitude = builder.select(below, builder.sub(nothing, raw), raw)
    lower, upper = (_find(vectors, table, magnitude) for table in tables)
    upper = builder.or_(upper, builder.and_(raw, _bytes(raw, SIGN)))
    lowest = builder.icmp_signed("==", raw, _bytes(raw, SIGN))
    return lower, builder.select(lowest, _bytes(raw, int(np.float32(-SIGN).view(np.uint32)) >> 24), upper)


def _find(vectors: Vectors, table: Table, index: Any) -> Any:
    signature = ir.FunctionType(index.type, [index.type] * 3)
    look_up = vectors.builder.module.declare_intrinsic("llvm.x86.avx512.vpermi2var.qi.512", (), signature)
    first, second = (ir.Constant(index.type, part.tolist()) for part in (table[:STEP], table[STEP:]))
    return vectors.builder.call(look_up, [first, index, second])


def _bytes(like: Any, value: int) -> Any:
    return ir.Constant(like.type, [int(value)] * STEP)
