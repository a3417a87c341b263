"""Stored rows in registers: how each storage type is loaded, a few vectors at a time, and widened."""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import binding, ir
from numba import types as _types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from treeattn.kernels.compilation import inline
from treeattn.kernels.lookup import STEP, as_pairs
from treeattn.kernels.pairs import PAIRS
from treeattn.kernels.target import has_feature
from treeattn.kernels.vectors import AHEAD, DOUBLE, FLOAT, INT, LANES, LINE, ZEN, Vectors

cgutils: Any = _cgutils  # untyped
types: Any = _types  # untyped: so are the functions made of it

__all__ = [
    "EIGHTS",
    "EVENS",
    "PAIRED",
    "QUICK",
    "UNITS",
    "Loads",
    "can_widen",
    "fetch_later",
    "order",
    "padded",
    "stored_bytes",
]

Count: TypeAlias = Any  # of elements: a Python number, an int64 value, or None for all

BIT, BYTE, SHORT, HALF = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.HalfType()

ELEMENTS = {
    "float32": (FLOAT, 4),
    "float64": (DOUBLE, 8),
    "float16": (HALF, 2),
    "bfloat16": (SHORT, 2),
    "int8": (BYTE, 1),
    "float8_e4m3fn": (BYTE, 1),
    "float8_e5m2": (BYTE, 1),
}
"""LLVM's type for each storage type, and its bytes."""

PAIRED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types of which two elements are loaded into each lane. All even elements of a step come first, then all odd ones."""

QUICK = ("float32", "float64", "bfloat16") if ZEN else ("float64",) if LANES == 16 else ("float32", "float64")
"""Types that are taken two rows at a time: they are widened in no time beside their products. Four rows at a time read
each line once, which is faster on Intel's processors: for bfloat16, and with AVX-512 for float32."""

UNITS = {"float8_e4m3fn": 2.0**8}
"""What the numbers that `Loads` gives have to be multiplied with, where that isn't 1; sums can be just as well."""


def padded(width: int) -> int:
    """Elements that a row takes in a working buffer: whole vectors, and whole pairs of them."""
    return -(-width // (2 * LANES)) * 2 * LANES


EVENS, EIGHTS = 1, 2
"""Bits that say how elements of a row are out of their order in registers: of two vectors of numbers the even ones come
first; before that, of each `STEP` numbers every other eight come first, for those are looked up."""


@inline
def order(j: int, how: int) -> int:
    """Give the place of element ``j`` among those that a row's steps load; ``how`` is a sum of `EVENS` and `EIGHTS`."""
    if how & EIGHTS:
        rest = j % STEP
        j += rest // 16 * 8 + rest // 8 % 2 * (STEP // 2) + rest % 8 - rest
    if how & EVENS:
        rest = j % (2 * LANES)
        j += rest // 2 + rest % 2 * LANES - rest
    return j


def stored_bytes(storage: str) -> int:
    """Bytes of one element."""
    return ELEMENTS[storage][1]


def can_widen(storage: str) -> bool:
    """Whether this processor widens the type in registers: all but halves, and what is read as halves, on old ones."""
    missing = "f16c" in binding.get_host_cpu_features() and not has_feature("f16c")  # which ARM's need not have
    return storage not in ("float16", "float8_e4m3fn", "float8_e5m2") or not missing


def _fetch_later(typingctx: Any, row_bytes: Any, row: Any, stride: Any, count: Any) -> Any:
    """Ask the memory for ``count`` rows of so many bytes, `AHEAD` bytes of rows behind the one at an address.

    For rows that are ``stride`` bytes apart, whose order a processor does not guess.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, length = Vectors(builder), row_bytes.literal_value

        def fetch(index: Any, carried: list[Any]) -> list[Any]:
            for at in range(0, length, LINE):
                vectors.fetch(vectors.advance(carried[0], at))
            return [builder.add(carried[0], args[2])]

        first = builder.add(args[1], builder.mul(args[2], vectors.number(AHEAD // length)))
        vectors.loop(args[3], [first], fetch)
        return context.get_dummy_value()

    return types.void(row_bytes, types.int64, types.int64, types.int64), codegen


fetch_later: Any = intrinsic(prefer_literal=True)(_fetch_later)


class Loads:
    """Loads one storage type.

    Parameters
    ----------
    vectors : Vectors
        float32, or float64 for storage of that type.
    storage : str
    looked_up : bool
        Whether its numbers are looked up as the bfloat16 that they are (`treeattn.kernels.lookup`).
    """

    def __init__(self, vectors: Vectors, storage: str, looked_up: bool = False) -> None:
        self.vectors, self._builder, self._storage, self._looked_up = vectors, vectors.builder, storage, looked_up
        self._element, self.size = ELEMENTS[storage]
        self.step = STEP if looked_up else vectors.lanes * (2 if storage in PAIRED else 1)

    def load(self, address: Any, count: Count = None) -> list[Any]:
        """Load the next ``step`` elements, of which only ``count`` are read and the others 0."""
        if self._looked_up:
            return [half for pairs in self.pairs(address, count) for half in self._bfloat16(pairs)]
        raw = self._fetch(address, count)
        widen = {
            "float16": lambda: [self._builder.fpext(raw, self.vectors.type)],
            "bfloat16": lambda: self._bfloat16(raw),
            "int8": lambda: [self._builder.sitofp(raw, self.vectors.type)],
            "float8_e5m2": lambda: self._e5m2(raw),
            "float8_e4m3fn": lambda: self._e4m3fn(raw),
        }
        return widen[self._storage]() if self._storage in widen else [raw]

    def load_row(self, address: Any, width: int) -> list[Any]:
        """Load ``width`` elements; what fills the last vector up is 0."""
        found = []
        for at in range(0, width, self.step):
            rest = width - at
            found += self.load(self.vectors.advance(address, at, self.size), rest if rest < self.step else None)
        return found

    def pairs(self, address: Any, count: Count) -> list[Any]:
        """Load a step of numbers that are bfloat16, or looked up as such, as pairs of them."""
        raw = self._fetch(address, count)
        return (
            as_pairs(self.vectors, self._storage, raw, PAIRS)
            if self._looked_up
            else [self._builder.bitcast(raw, PAIRS)]
        )

    def _fetch(self, address: Any, count: Count) -> Any:
        kind = ir.VectorType(self._element, self.step)
        pointer = self.vectors.pointer(address, kind)
        if count is None:
            return self._builder.load(pointer, align=self.size)
        mask = ir.VectorType(BIT, self.step)
        signature = ir.FunctionType(kind, [pointer.type, INT, mask, kind])
        name = f"llvm.masked.load.v{self.step}{self._element.intrinsic_name}.p0"
        load = cgutils.get_or_insert_function(self._builder.module, signature, name)
        nothing = ir.Constant(kind, None)
        return self._builder.call(load, [pointer, ir.Constant(INT, self.size), self._below(count), nothing])

    def _below(self, count: Count) -> Any:
        """Give a mask of the lanes whose index is below ``count``."""
        if isinstance(count, int):
            return ir.Constant(ir.VectorType(BIT, self.step), [int(i < count) for i in range(self.step)])
        numbers, builder = ir.VectorType(INT, self.step), self._builder
        first = builder.insert_element(
            ir.Constant(numbers, ir.Undefined), builder.trunc(count, INT), ir.Constant(INT, 0)
        )
        spread = self.vectors.shuffle(first, first, [0] * self.step)
        return builder.icmp_signed("<", ir.Constant(numbers, list(range(self.step))), spread)

    def _bfloat16(self, raw: Any) -> list[Any]:
        """Shift the even ones to where a float32 has its upper half, and clear the even ones below the odd."""
        vectors, builder = self.vectors, self._builder
        pairs = builder.bitcast(raw, vectors.integers)
        found = (builder.shl(pairs, vectors.whole(16)), builder.and_(pairs, vectors.whole(-(1 << 16))))
        return [builder.bitcast(bits, vectors.type) for bits in found]

    def _e5m2(self, raw: Any) -> list[Any]:
        """Take each as the upper half of a float16."""
        pairs, builder = self._shorts(raw), self._builder
        return self._halves(builder.shl(pairs, self._short(8)), builder.and_(pairs, self._short(-(1 << 8))))

    def _e4m3fn(self, raw: Any) -> list[Any]:
        """Move the bits to a float16's place, where the exponent is 8 too small (`UNITS`); all ones are NaN."""
        pairs, builder = self._shorts(raw), self._builder
        return self._halves(*(self._e4m3fn_half(x) for x in (builder.shl(pairs, self._short(8)), pairs)))

    def _e4m3fn_half(self, upper: Any) -> Any:
        """Only for NaN does adding 1 to the magnitude reach bit 14, which with the others makes a float16's NaN."""
        builder = self._builder
        bits = builder.and_(builder.ashr(upper, self._short(1)), self._short(0xBF80 - (1 << 16)))
        nan = builder.and_(builder.add(bits, self._short(0x80)), self._short(0x4000))
        return builder.or_(bits, nan)

    def _shorts(self, raw: Any) -> Any:
        return self._builder.bitcast(raw, ir.VectorType(SHORT, self.vectors.lanes))

    def _short(self, value: int) -> Any:
        return ir.Constant(ir.VectorType(SHORT, self.vectors.lanes), [value] * self.vectors.lanes)

    def _halves(self, *found: Any) -> list[Any]:
        halves = ir.VectorType(HALF, self.vectors.lanes)
        return [self._builder.fpext(self._builder.bitcast(bits, halves), self.vectors.type) for bits in found]
