"""Numbers of 16 bits and back: bits moved by integer operations, the same on every processor.

A narrow number's type says what it is, as in `treeattn.kernels.widen`: uint16 is a bfloat16, int16 a float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

__all__ = ["narrowed", "widened"]

# 2**112: turns a float16's bits, moved to a float32's place, into its value; the exponents differ by 112.
HALF_TO_SINGLE = np.float32(2.0**112)
SINGLE_BITS = np.uint32(112 << 23)
SMALLEST_HALF = np.uint32(113 << 23)
"""Bits of 2**-14, the smallest normal float16."""
PAST_HALF = np.uint32(143 << 23)
"""Bits of 2**16, which float16 has no number for any more."""
INFINITY = np.uint32(0x7F800000)


def widened(stored: Any) -> Any:
    """Give the float32 that a stored number is; float32 and float64 are themselves."""


def narrowed(number: Any, kind: Any) -> Any:
    """Round a float32 to the nearest number of ``kind``, ties to even."""


@overload(widened)
def _widened(stored: Any) -> Any:
    # Functions can't be arguments here: code that holds their addresses can't be kept on disk.
    return {types.uint16: _of_bfloat16, types.int16: _of_half}.get(stored, _same)


@overload(narrowed)
def _narrowed(number: Any, kind: Any) -> Any:
    return {types.uint16: _to_bfloat16, types.int16: _to_half}.get(kind.dtype, _as_it_is)


def _same(stored: Any) -> Any:
    return stored


def _as_it_is(number: Any, kind: Any) -> Any:
    return number


def _of_bfloat16(stored: Any) -> Any:
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


def _of_half(stored: Any) -> Any:
    magnitude = np.uint32(np.uint32(stored) & np.uint32(0x7FFF)) << np.uint32(13)
    number = np.float32(np.uint32(magnitude).view(np.float32) * HALF_TO_SINGLE)
    special = INFINITY if magnitude >= np.uint32(0x7C00 << 13) else np.uint32(0)
    sign = np.uint32(np.uint32(stored) & np.uint32(0x8000)) << np.uint32(16)
    return np.uint32(number.view(np.uint32) | special | sign).view(np.float32)


def _to_bfloat16(number: Any, kind: Any) -> Any:
    bits = np.float32(number).view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1)))
    kept = rounded if number == number else np.uint32(bits | np.uint32(0x400000))  # a NaN stays one
    return np.uint16(kept >> np.uint32(16))


def _to_half(number: Any, kind: Any) -> Any:
    bits = np.float32(number).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    even = np.uint32(magnitude >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(magnitude - SINGLE_BITS + np.uint32(0xFFF) + even) >> np.uint32(13)
    # Adding 1/2 leaves the multiples of 2**-24 in the sum's low bits, rounded as they must be.
    small = np.uint32(np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5)).view(np.uint32)) - np.uint32(
        126 << 23
    )
    found = small if magnitude < SMALLEST_HALF else normal
    found = np.uint32(0x7C00) if magnitude >= PAST_HALF else found
    found = np.uint32(0x7E00) if magnitude > INFINITY else found
    return np.int16(np.uint32(found | np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))))
