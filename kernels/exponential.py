"""The project's own exp, exp2 and log: one fixed sequence of additions and multiplications for each.

A merged state must have the same bits on every rank, whatever processor or GPU it runs on, and library functions
differ between them. These use nothing but IEEE additions, multiplications, divisions and integer operations on the
exponent, without contraction, and no table; a compiler may vectorise them, which changes no bit.

Largest errors found against extended precision, in units in the last place (the tests hold them to it): ``exp`` 1.01,
``exp2`` and ``log`` 1.25. Results below the normal range lose bits gradually, as IEEE arithmetic does. NaN passes
through.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from treeattn.kernels.compilation import inline

__all__ = ["LOG2E", "exp", "exp2", "exp2_double", "exp2_single", "log"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# ln 2 in two parts; the first has 21 trailing zero bits, so that its product with an exponent is exact.
LN2_HIGH = math.floor(LN2 * 2**32) / 2**32
LN2_LOW = 1.9082149292705877e-10
# Adding and subtracting this rounds to the nearest integer, and leaves that integer in the sum's low bits.
ROUNDER = 1.5 * 2.0**52
ROUNDER_BITS = int(np.float64(ROUNDER).view(np.int64))
ROUNDER_SINGLE = np.float32(1.5 * 2**23)
ROUNDER_SINGLE_BITS = int(ROUNDER_SINGLE.view(np.int32))
# exp(r) = 1 + r + sum of r**k / k! for |r| <= ln(2) / 2, where the first term left out is below 2**-57.
EXP_TERMS = tuple(1 / math.factorial(k) for k in range(13, 1, -1))
# 2**f = sum of (f ln 2)**k / k! for |f| <= 1/2, where the first term left out is below 2**-27.
EXP2_TERMS = tuple(np.float32(LN2**k / math.factorial(k)) for k in range(7, -1, -1))
# log((1 + s) / (1 - s)) - 2 s = 2 s (z / 3 + z**2 / 5 + ...), z = s**2 <= 0.0295; the first left out is below 2**-60.
LOG_TERMS = tuple(2 / (2 * k + 1) for k in range(11, 0, -1))
SQRT_HALF_BITS = int(np.float64(math.sqrt(0.5)).view(np.int64))


@inline
def exp(x: Any) -> Any:
    """e**x in float64; exp(0) is 1 exactly, exp(-inf) is 0."""
    x = -746.0 if x < -746.0 else x
    x = 710.0 if x > 710.0 else x
    shifted = x * LOG2E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    return _scaled(_exp_of_small(r), np.float64(shifted).view(np.int64) - ROUNDER_BITS)


def exp2(x: Any) -> Any:
    """2**x in the precision of ``x``, for the softmax of compiled kernels; exact at whole numbers."""


@overload(exp2)
def _exp2_of(x: Any) -> Any:
    # One call deeper: an overload is compiled with its caller's flags, and reordering would undo the rounding.
    def single(x: Any) -> Any:
        return exp2_single(x)

    def double(x: Any) -> Any:
        return exp2_double(x)

    return single if x == types.float32 else double


@inline
def exp2_double(x: Any) -> Any:
    """2**x in float64."""
    x = -1076.0 if x < -1076.0 else x
    x = 1024.0 if x > 1024.0 else x
    shifted = x + ROUNDER
    f = x - (shifted - ROUNDER)
    return _scaled(_exp_of_small(f * LN2), np.float64(shifted).view(np.int64) - ROUNDER_BITS)


@inline
def exp2_single(x: Any) -> Any:
    """2**x in float32."""
    x = np.float32(-151.0) if x < np.float32(-151.0) else x
    x = np.float32(128.0) if x > np.float32(128.0) else x
    shifted = x + ROUNDER_SINGLE
    f = x - (shifted - ROUNDER_SINGLE)
    p = EXP2_TERMS[0]
    p = p * f + EXP2_TERMS[1]
    p = p * f + EXP2_TERMS[2]
    p = p * f + EXP2_TERMS[3]
    p = p * f + EXP2_TERMS[4]
    p = p * f + EXP2_TERMS[5]
    p = p * f + EXP2_TERMS[6]
    p = p * f + EXP2_TERMS[7]
    n = np.float32(shifted).view(np.int32) - np.int32(ROUNDER_SINGLE_BITS)
    half = n >> np.int32(1)
    return p * _power_single(half) * _power_single(n - half)


@inline
def log(x: Any) -> Any:
    """Natural logarithm in float64; log(0) is -inf, and NaN below."""
    if x <= 0.0:
        return -np.inf if x == 0.0 else np.nan
    if not x < np.inf:
        return x
    shift = 0
    if x < 2.2250738585072014e-308:
        x *= 18014398509481984.0
        shift = -54
    bits = np.float64(x).view(np.int64)
    n = (bits - SQRT_HALF_BITS) >> 52
    f = np.int64(bits - (n << 52)).view(np.float64) - 1.0
    exponent = np.float64(n + shift)
    return exponent * LN2_HIGH + (_log_of_near_one(f) + exponent * LN2_LOW)


@inline
def _exp_of_small(r: Any) -> Any:
    """Even and odd terms apart: the two chains run side by side, which halves the time of a single call."""
    z = r * r
    odd, even = EXP_TERMS[0], EXP_TERMS[1]
    for k in range(2, len(EXP_TERMS), 2):
        odd = odd * z + EXP_TERMS[k]
        even = even * z + EXP_TERMS[k + 1]
    return 1.0 + (r + z * (even + odd * r))


@inline
def _scaled(p: Any, n: Any) -> Any:
    """``p * 2**n`` in two exact powers, so that results below the normal range round once."""
    half = n >> 1
    return p * _power(half) * _power(n - half)


@inline
def _power(n: Any) -> Any:
    return np.int64((n + 1023) << 52).view(np.float64)


@inline
def _power_single(n: Any) -> Any:
    return np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


@inline
def _log_of_near_one(f: Any) -> Any:
    """log(1 + f) for 1 + f between the square roots of 1/2 and 2: f - s (f - R), where only s and R are rounded."""
    s = f / (2.0 + f)
    z = s * s
    p = LOG_TERMS[0]
    for k in range(1, len(LOG_TERMS)):
        p = p * z + LOG_TERMS[k]
    return f - s * (f - p * z)
