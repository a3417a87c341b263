"""float8 numbers as the bfloat16 that they are, looked up in registers (avx512_vbmi).

An instruction looks 64 bytes up among 128, by their lower seven bits; the highest is the sign, in both types. int8
would need twice as many tables, and is widened by arithmetic as fast.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from treeattn.arrays import narrow_dtype
from treeattn.kernels.vectors import Vectors

__all__ = ["LOOKED_UP", "STEP", "as_pairs"]

Table: TypeAlias = npt.NDArray[np.uint8]

LOOKED_UP = ("float8_e4m3fn", "float8_e5m2")
"""Types whose numbers are looked up. Each is a bfloat16 too."""

STEP = 64
"""Numbers that are looked up at once: the bytes of a vector."""

SIGN = 0x80


def as_pairs(vectors: Vectors, storage: str, raw: Any, kind: Any) -> list[Any]:
    """Give `STEP` stored numbers as two vectors of bfloat16, which are of type ``kind``, in their order."""
    builder, (lower, upper) = vectors.builder, (_find(vectors, table, raw) for table in _tables(storage))
    upper = builder.or_(upper, builder.and_(raw, ir.Constant(raw.type, [SIGN] * STEP)))
    both = [number + STEP * byte for number in range(STEP) for byte in range(2)]
    halves = (vectors.shuffle(lower, upper, both[start : start + STEP]) for start in (0, STEP))
    return [builder.bitcast(half, kind) for half in halves]


@cache
def _tables(storage: str) -> tuple[Table, Table]:
    """Give the lower and the upper byte of each number that is not negative, by its bits."""
    numbers = np.arange(SIGN, dtype=np.uint8).view(narrow_dtype(storage)).astype(np.float32)
    upper_half = numbers.view(np.uint32) >> 16
    return (upper_half & 0xFF).astype(np.uint8), (upper_half >> 8).astype(np.uint8)


def _find(vectors: Vectors, table: Table, raw: Any) -> Any:
    signature = ir.FunctionType(raw.type, [raw.type] * 3)
    look_up = vectors.builder.module.declare_intrinsic("llvm.x86.avx512.vpermi2var.qi.512", (), signature)
    first, second = (ir.Constant(raw.type, part.tolist()) for part in (table[:STEP], table[STEP:]))
    return vectors.builder.call(look_up, [first, raw, second])
