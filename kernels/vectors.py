"""Explicit vectors for inner loops: LLVM's generic ones, which become AVX-512, AVX2 or NEON by what the processor has.

The compiler's own vectors are as fast in arithmetic, but its scheduler fetches several rows at once, and the memory
then delivers less than half. Here each row is fetched by a loop of its own, in the order of its addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir

__all__ = ["LANES", "Vectors"]

FLOAT, HALF = ir.FloatType(), ir.HalfType()
BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _lanes() -> int:
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


LANES = _lanes()
"""float32 numbers in one vector."""


class Vectors:
    """Writes vector instructions at an LLVM builder's place; addresses are int64 values, offsets Python numbers."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.type = ir.VectorType(FLOAT, LANES)
        self.zero = ir.Constant(self.type, [0.0] * LANES)

    def number(self, value: int) -> Any:
        """Give an int64 constant."""
        return ir.Constant(LONG, value)

    def advance(self, address: Any, count: Any, size: int = 1) -> Any:
        """Give ``address + count * size``."""
        step = self._builder.mul(count, self.number(size)) if size != 1 else count
        return self._builder.add(address, step)

    def product(self, a: Any, b: Any) -> Any:
        """Give ``a * b``."""
        return self._builder.mul(a, b)

    def quotient(self, a: Any, divisor: int) -> Any:
        """Give ``a // divisor`` of what is not negative."""
        return self._builder.udiv(a, self.number(divisor))

    def smaller(self, a: Any, b: Any) -> Any:
        """Give the smaller of two integers."""
        return self._builder.select(self._builder.icmp_signed("<", a, b), a, b)

    def load(self, address: Any, storage: str = "float32") -> Any:
        """Load the next ``LANES`` elements of ``storage`` and widen them to float32."""
        return {
            "float32": lambda: self._fetch(address, FLOAT, 4),
            "float16": lambda: self._builder.fpext(self._fetch(address, HALF, 2), self.type),
            "bfloat16": lambda: self._bits(self._extend(address, SHORT, 2), 16),
            "int8": lambda: self._builder.sitofp(self._fetch(address, BYTE, 1), self.type),
            "float8_e5m2": lambda: self._e5m2(address),
            "float8_e4m3fn": lambda: self._e4m3fn(address),
        }[storage]()

    def store(self, vector: Any, address: Any) -> None:
        """Store a vector of any length."""
        self._builder.store(vector, self._builder.inttoptr(address, vector.type.as_pointer()), align=4)

    def broadcast(self, address: Any) -> Any:
        """Load one float32 into all lanes."""
        pointer = self._builder.inttoptr(address, FLOAT.as_pointer())
        one = self._builder.insert_element(
            ir.Constant(self.type, ir.Undefined), self._builder.load(pointer), ir.Constant(INT, 0)
        )
        return self._shuffle(one, one, [0] * LANES)

    def add_product(self, a: Any, b: Any, total: Any) -> Any:
        """Give ``a * b + total``, contracted where the processor can."""
        product = self._builder.fmul(a, b, flags=["contract"])
        return self._builder.fadd(product, total, flags=["contract"])

    def unless_hidden(self, weight: Any, new: Any, old: Any) -> Any:
        """Give ``new``, or ``old`` where the weight is the mark of a hidden key, -inf."""
        mark = ir.Constant(self.type, [float("-inf")] * LANES)
        return self._builder.select(self._builder.fcmp_ordered("==", weight, mark), old, new)

    def sums(self, vectors: Sequence[Any]) -> Any:
        """Give one vector whose lane i is the sum of the lanes of ``vectors[i]``; there are ``LANES`` of them.

        A tree of shuffles: step by step, two vectors become one that holds partial sums of both.
        """
        width, current = 1, list(vectors)
        while len(current) > 1:
            first = [LANES + i - width if i // width % 2 else i for i in range(LANES)]
            second = [LANES + i if i // width % 2 else i + width for i in range(LANES)]
            pairs = zip(current[::2], current[1::2], strict=True)
            current = [self._builder.fadd(self._shuffle(a, b, first), self._shuffle(a, b, second)) for a, b in pairs]
            width *= 2
        return current[0]

    def piece(self, vector: Any, start: int, length: int) -> Any:
        """Give ``length`` lanes from ``start`` on."""
        return self._shuffle(vector, vector, list(range(start, start + length)))

    def loop(self, count: Any, start: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
        """Carry the values ``start`` through ``body(index, values)``, ``count`` times; ``count`` is at least 1."""
        builder, before = self._builder, self._builder.block
        inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        index, carried = builder.phi(LONG), [builder.phi(value.type) for value in start]
        values = list(body(index, carried))
        following = builder.add(index, self.number(1))
        for phi, first, value in zip([index, *carried], [self.number(0), *start], [following, *values], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return values

    def _fetch(self, address: Any, element: Any, size: int) -> Any:
        kind = ir.VectorType(element, LANES)
        return self._builder.load(self._builder.inttoptr(address, kind.as_pointer()), align=size)

    def _extend(self, address: Any, element: Any, size: int) -> Any:
        return self._builder.zext(self._fetch(address, element, size), ir.VectorType(INT, LANES))

    def _bits(self, integers: Any, shift: int) -> Any:
        """Shift integers to where a float32 has its bits, and read them as that."""
        shifted = self._builder.shl(integers, ir.Constant(integers.type, [shift] * LANES))
        return self._builder.bitcast(shifted, self.type)

    def _e5m2(self, address: Any) -> Any:
        """Widen the upper half of a float16."""
        shorts = self._builder.zext(self._fetch(address, BYTE, 1), ir.VectorType(SHORT, LANES))
        shifted = self._builder.shl(shorts, ir.Constant(shorts.type, [8] * LANES))
        return self._builder.fpext(self._builder.bitcast(shifted, ir.VectorType(HALF, LANES)), self.type)

    def _e4m3fn(self, address: Any) -> Any:
        """Move the bits to a float32's place, where the exponent is 120 too small; all ones are NaN."""
        builder, integers = self._builder, self._extend(address, BYTE, 1)

        def all_lanes(value: int) -> Any:
            return ir.Constant(integers.type, [value] * LANES)

        magnitude, sign = builder.and_(integers, all_lanes(0x7F)), builder.and_(integers, all_lanes(0x80))
        number = builder.fmul(self._bits(magnitude, 20), ir.Constant(self.type, [2.0**120] * LANES))
        nan = ir.Constant(self.type, [float("nan")] * LANES)
        number = builder.select(builder.icmp_unsigned("==", magnitude, all_lanes(0x7F)), nan, number)
        signed = builder.or_(builder.bitcast(number, integers.type), builder.shl(sign, all_lanes(24)))
        return builder.bitcast(signed, self.type)

    def _shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self._builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))
