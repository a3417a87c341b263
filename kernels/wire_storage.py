"""Rows on the wire as bytes: o in one of several precisions, then l and e.

o may travel in 16 bit. Each row is then scaled by a power of two that brings its largest number near to 2**15, as far
as l, which is scaled alike, stays below 2**100. Nothing overflows then, and what is rounded off is at most 2**-8 of a
number (bfloat16), or 2**-11 of it, 2**-39 of the row's largest or 2**-125 of l (float16). A merged row is rounded
again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from treeattn.kernels.compilation import inline
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.narrow import narrowed, widened

__all__ = [
    "KINDS",
    "level_of",
    "o_bytes",
    "power_of_two",
    "round_row",
    "row_bytes",
    "write_empty",
    "write_row",
]

KINDS = {
    "float32": (np.float32, np.float32),
    "float64": (np.float64, np.float64),
    "bfloat16": (np.float32, np.uint16),
    "float16": (np.float32, np.int16),
}
"""Types of l and e and of the stored o, by what o travels in; see `treeattn.kernels.narrow`."""

LARGEST_L = 100
"""Where o travels in 16 bit, l may grow to 2**100; it can't become too small, for o / l is an average of values."""


@inline
def power_of_two(n: Any) -> Any:
    """2**n for a whole n below 1024, in float64; 0 where that is below the normal range."""
    kept = n if n > -1023.0 else -1023.0
    power = np.int64((np.int64(kept) + 1023) << 52).view(np.float64)
    return power if n == n else n


@inline
def o_bytes(width: int, kind: Any) -> Any:
    """Bytes of a row's o, so many that l behind it can be read as what it is."""
    return ((width - 2) * itemsize(kind) + 3) // 4 * 4


@inline
def row_bytes(width: int, dtype: Any, kind: Any) -> Any:
    """Bytes of a row."""
    return o_bytes(width, kind) + 2 * itemsize(dtype)


@inline
def write_row(at: int, o: Any, scale: Any, l: Any, e: Any, width: int, dtype: Any, kind: Any) -> None:  # noqa: E741
    """Write o, times ``scale``, and l and e, which are as they are."""
    shift = _shift(o, scale, l, width - 2, kind)
    target, behind, factor = pointer(at, kind), pointer(at + o_bytes(width, kind), dtype), dtype(power_of_two(shift))
    for j in range(width - 2):
        target[j] = narrowed((scale * o[j]) * factor, kind)
    behind[0], behind[1] = l * factor, dtype(e - shift)


@inline
def write_empty(at: int, width: int, dtype: Any, kind: Any) -> None:
    """Write the row of no keys."""
    target, behind = pointer(at, kind), pointer(at + o_bytes(width, kind), dtype)
    for j in range(width - 2):
        target[j] = 0
    behind[0], behind[1] = 0, -np.inf


def _shift(o: Any, scale: Any, l: Any, count: int, kind: Any) -> Any:  # noqa: E741
    """Give the power of two that a row, o times ``scale``, is to be multiplied by before it is stored."""


def round_row(o: Any, l: Any, count: int, kind: Any) -> None:  # noqa: E741
    """Round a row's o as storing does."""


def level_of(l: Any, kind: Any) -> Any:  # noqa: E741
    """Give the power of two that a merged row's l is to be divided by, so that it is an ordinary state's."""


def _is_narrow(kind: Any) -> bool:
    return kind.dtype in (types.uint16, types.int16)


@overload(_shift)
def _shift_of(o: Any, scale: Any, l: Any, count: int, kind: Any) -> Any:  # noqa: E741
    return _shift_into_range if _is_narrow(kind) else _no_shift


@overload(round_row)
def _round_row_of(o: Any, l: Any, count: int, kind: Any) -> Any:  # noqa: E741
    return _round_all if _is_narrow(kind) else _round_none


@overload(level_of)
def _level_of(l: Any, kind: Any) -> Any:  # noqa: E741
    return _own_level if _is_narrow(kind) else _no_level


def _no_shift(o: Any, scale: Any, l: Any, count: int, kind: Any) -> Any:  # noqa: E741
    return 0.0


def _shift_into_range(o: Any, scale: Any, l: Any, count: int, kind: Any) -> Any:  # noqa: E741
    largest: Any = 0
    for j in range(count):
        bits = np.int32(np.float32(scale * o[j]).view(np.int32) & 0x7FFFFFFF)
        largest = max(largest, bits if bits < 0x7F800000 else 0)
    if largest == 0 or not l < np.inf:  # an e that is not finite can't take a power of two back
        return 0.0
    shift, level = 14 - ((largest >> 23) - 127), (np.float32(l).view(np.int32) >> 23) - 127
    return np.float64(min(shift, LARGEST_L - level, 126))


def _round_none(o: Any, l: Any, count: int, kind: Any) -> None:  # noqa: E741
    pass


def _round_all(o: Any, l: Any, count: int, kind: Any) -> None:  # noqa: E741
    shift = _shift(o, np.float32(1), l, count, kind)
    factor, back = np.float32(power_of_two(shift)), np.float32(power_of_two(-shift))
    for j in range(count):
        o[j] = widened(narrowed(o[j] * factor, kind)) * back


def _no_level(l: Any, kind: Any) -> Any:  # noqa: E741
    return 0.0


def _own_level(l: Any, kind: Any) -> Any:  # noqa: E741
    exponent = ((np.float64(l).view(np.int64) >> 52) & 0x7FF) - 1023
    return np.float64(exponent) if 0.0 < l < np.inf else 0.0
