"""exp2 and tanh of whole vectors, for the softmax inside a block.

Unlike those of `treeattn.kernels.exponential`, these may be contracted: what must agree between machines comes later.
NaN passes through both.
"""

from __future__ import annotations

import math
from typing import Any

from treeattn.kernels.exponential import LOG2E
from treeattn.kernels.vectors import FLOAT, Vectors

__all__ = ["exp2", "tanh"]


class _Format:
    """What differs between float32 and float64."""

    def __init__(self, vectors: Vectors) -> None:
        single = vectors.element is FLOAT
        self.fraction_bits, self.exponent_bias = (23, 127) if single else (52, 1023)
        # 2**f = sum of (f ln 2)**k / k! for |f| <= 1/2, where the first term left out is below half a unit.
        self.terms = [math.log(2) ** k / math.factorial(k) for k in range(7 if single else 13, -1, -1)]
        self.lowest = -151.0 if single else -1076.0  # of its powers of two, the largest that is 0
        self.shift = 64 if single else 512  # keeps exponents in the normal range
        # Adding and subtracting this rounds to the nearest integer, and leaves it in the sum's low bits.
        self.rounder = 1.5 * 2.0**self.fraction_bits


def exp2(vectors: Vectors, x: Any) -> Any:
    """Give 2**x for x <= 0; denormal results are rounded once."""
    builder, form = vectors.builder, _Format(vectors)
    lowest = vectors.constant(form.lowest)
    x = vectors.where("<", x, lowest, lowest, x)
    fraction, power = _split(vectors, form, x, form.shift)
    p = _polynomial(vectors, form.terms, fraction)
    shifted = builder.bitcast(builder.add(builder.bitcast(p, vectors.integers), power), vectors.type)
    return vectors.multiply(shifted, vectors.constant(2.0**-form.shift))


def tanh(vectors: Vectors, x: Any) -> Any:
    """Give tanh(x) = t / (t + 2) with t = exp(2 |x|) - 1 = 2**n g + (2**n - 1), which loses no bits near 0."""
    builder, form = vectors.builder, _Format(vectors)
    sign_bit = vectors.whole(-(1 << 8 * vectors.size - 1))
    bits = builder.bitcast(x, vectors.integers)
    sign, size = builder.and_(bits, sign_bit), builder.bitcast(builder.and_(bits, builder.not_(sign_bit)), vectors.type)
    enough = vectors.constant(20.0)
    size = vectors.where(">", size, enough, enough, size)
    fraction, power = _split(vectors, form, vectors.multiply(size, vectors.constant(2 * LOG2E)), form.exponent_bias)
    g = vectors.multiply(_polynomial(vectors, form.terms[:-1], fraction), fraction)
    power = builder.bitcast(power, vectors.type)
    t = vectors.add_product(power, g, vectors.add(power, vectors.constant(-1.0)))
    result = builder.fdiv(t, vectors.add(t, vectors.constant(2.0)))
    return builder.bitcast(builder.or_(builder.bitcast(result, vectors.integers), sign), vectors.type)


def _split(vectors: Vectors, form: _Format, x: Any, shift: int) -> tuple[Any, Any]:
    """Give x - n for the nearest integer n, and n + shift at the place of an exponent."""
    builder, rounder = vectors.builder, vectors.constant(form.rounder + shift)
    rounded = builder.fadd(x, rounder)
    fraction = builder.fsub(x, builder.fsub(rounded, rounder))
    bits = builder.bitcast(rounded, vectors.integers)
    return fraction, builder.shl(bits, vectors.whole(form.fraction_bits))


def _polynomial(vectors: Vectors, terms: list[float], x: Any) -> Any:
    result = vectors.constant(terms[0])
    for term in terms[1:]:
        result = vectors.add_product(result, x, vectors.constant(term))
    return result
