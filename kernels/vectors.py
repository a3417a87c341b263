"""Explicit vectors for inner loops: LLVM's generic ones, which become AVX-512, AVX2 or NEON by what the processor has.

The compiler's own vectors are as fast in arithmetic, but its scheduler fetches several rows at once, and the memory
then delivers less than half. Here rows are fetched one after the other, in the order of their addresses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from treeattn.errors import InputError
from treeattn.kernels.target import has_feature, is_zen

__all__ = ["AHEAD", "AHEAD_STEP", "ASKS_FIRST", "DOUBLE", "FLOAT", "LANES", "LINE", "ZEN", "Vectors"]

FLOAT, DOUBLE = ir.FloatType(), ir.DoubleType()
INT, LONG = ir.IntType(32), ir.IntType(64)

NEAR = 2
"""How near to the processor fetched memory is put: 3 is the first-level cache, 2 the second."""

LANES_VARIABLE = "TREEATTN_LANES"
"""Environment variable that sets `LANES`, so that tests can run another processor's code on this one."""


def _lanes() -> int:
    wanted = os.environ.get(LANES_VARIABLE)
    if wanted in ("4", "8", "16"):
        return int(wanted)
    if wanted:
        raise InputError.of(LANES_VARIABLE, expected="4, 8 or 16", got=repr(wanted))
    return 16 if has_feature("avx512f") else 8 if has_feature("avx2") else 4


LANES = _lanes()
"""float32 numbers in one vector."""

LINE = 64
"""Bytes of a cache line, and of the widest vector."""

ZEN = is_zen()
"""Whether to take the ways by which AMD's processors gain, and not those by which Intel's do."""

AHEAD, AHEAD_STEP = 8192, 2 * LINE if ZEN else LINE
"""Bytes that `Vectors.fetch_ahead` asks ahead if nothing else is said, and from one line that it asks for to the next.

Zen fetches every second line by itself where lines are read in order, and is slower when asked for each: too few can
wait at once to keep memory busy. Intel's server processors are slower when asked for every second line only."""

ASKS_FIRST = not ZEN
"""Whether to ask ahead also while rows are read that come from memory: Zen fetches as far ahead then by itself."""


class Vectors:
    """Writes vector instructions at an LLVM builder's place; addresses are int64 values, offsets Python numbers.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    element : FLOAT or DOUBLE
        What the vectors are of. They have the same number of bytes either way.
    """

    def __init__(self, builder: Any, element: Any = FLOAT) -> None:
        self.builder, self.element = builder, element
        self.size = 4 if element is FLOAT else 8
        self.lanes = LANES * 4 // self.size
        self.bytes = self.lanes * self.size
        self.type = ir.VectorType(element, self.lanes)
        self.integers = ir.VectorType(ir.IntType(8 * self.size), self.lanes)
        self.zero = self.constant(0.0)

    def constant(self, value: float) -> Any:
        """Give the same number in all lanes."""
        nearest = float(np.float32(value)) if self.element is FLOAT else value
        return ir.Constant(self.type, [nearest] * self.lanes)

    def whole(self, value: int) -> Any:
        """Give the same integer in all lanes."""
        return ir.Constant(self.integers, [value] * self.lanes)

    def number(self, value: int) -> Any:
        """Give an int64 constant."""
        return ir.Constant(LONG, value)

    def advance(self, address: Any, count: Any, size: int = 1) -> Any:
        """Give ``address + count * size``; ``count`` may be a Python number."""
        if isinstance(count, int):
            return self.builder.add(address, self.number(count * size)) if count else address
        return self.builder.add(address, self.builder.mul(count, self.number(size)) if size != 1 else count)

    def pointer(self, address: Any, kind: Any) -> Any:
        """Give an address as a pointer to ``kind``."""
        return self.builder.inttoptr(address, kind.as_pointer())

    def load(self, address: Any) -> Any:
        """Load a vector."""
        return self.builder.load(self.pointer(address, self.type), align=self.size)

    def store(self, vector: Any, address: Any) -> None:
        """Store a vector of any length, or one number."""
        self.builder.store(vector, self.pointer(address, vector.type), align=self.size)

    def store_all(self, vectors: Sequence[Any], address: Any) -> None:
        """Store vectors one after the other."""
        for i, vector in enumerate(vectors):
            self.store(vector, self.advance(address, i, self.bytes))

    def load_number(self, address: Any) -> Any:
        """Load one number."""
        return self.builder.load(self.pointer(address, self.element), align=self.size)

    def spread(self, number: Any) -> Any:
        """Give one number in all lanes."""
        one = self.builder.insert_element(ir.Constant(self.type, ir.Undefined), number, ir.Constant(INT, 0))
        return self.shuffle(one, one, [0] * self.lanes)

    def broadcast(self, address: Any) -> Any:
        """Load one number into all lanes."""
        return self.spread(self.load_number(address))

    def add(self, a: Any, b: Any) -> Any:
        """Give ``a + b``."""
        return self.builder.fadd(a, b, flags=["contract"])

    def multiply(self, a: Any, b: Any) -> Any:
        """Give ``a * b``."""
        return self.builder.fmul(a, b, flags=["contract"])

    def add_product(self, a: Any, b: Any, total: Any) -> Any:
        """Give ``a * b + total``, contracted where the processor can."""
        return self.add(self.multiply(a, b), total)

    def where(self, relation: str, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
        """Give ``then`` where ``a`` and ``b`` are in this relation, and ``otherwise`` elsewhere and beside a NaN."""
        return self.builder.select(self.builder.fcmp_ordered(relation, a, b), then, otherwise)

    def fold(self, a: Any, b: Any, width: int) -> Any:
        """Add one half of ``a`` to the other, and of ``b``, so that groups of ``width`` lanes are of either in turn.

        As many vectors as there are lanes, folded with widths of 1, 2, 4 and so on, end as their sums, in their order.
        Numbers change places inside blocks of 16 bytes, or whole blocks do: a processor takes longer for all else.
        """
        block = 16 // self.size

        def source(lane: int, half: int) -> int:
            start, rest = lane // block * block, lane % block
            if width < block:
                group = rest // width
                return group % 2 * self.lanes + start + half * block // 2 + group // 2 * width + rest % width
            return 2 * start // self.lanes * self.lanes + 2 * start % self.lanes + half * block + rest

        halves = (self.shuffle(a, b, [source(lane, half) for lane in range(self.lanes)]) for half in (0, 1))
        return self.add(*halves)

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine all lanes into one number."""
        lanes = self.lanes
        while lanes > 1:
            lanes //= 2
            vector = combine(self.piece(vector, 0, lanes), self.piece(vector, lanes, lanes))
        return self.builder.extract_element(vector, ir.Constant(INT, 0))

    def piece(self, vector: Any, start: int, length: int, step: int = 1) -> Any:
        """Give every ``step``-th lane from ``start`` on, ``length`` of them."""
        return self.shuffle(vector, vector, list(range(start, start + length * step, step)))

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Give the named lanes of ``a`` and ``b``, those of ``b`` counted on from those of ``a``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))

    def fetch(self, address: Any) -> None:
        """Ask the memory for the line at an address, which may be any: nobody waits for it."""
        pointer = self.pointer(address, ir.IntType(8))
        kinds = [pointer.type, INT, INT, INT]
        prefetch = self.builder.module.declare_intrinsic("llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), kinds))
        self.builder.call(prefetch, [pointer, *(ir.Constant(INT, each) for each in (0, NEAR, 1))])

    def fetch_ahead(self, address: Any, length: int, ahead: Any = AHEAD, step: int = AHEAD_STEP) -> None:
        """Ask for what will be read some time after the ``length`` bytes at an address: ``ahead`` bytes later."""
        for at in range(0, length, step):
            self.fetch(self.advance(self.advance(address, ahead), at))

    def in_order(self, values: Sequence[Any] = ()) -> None:
        """Keep what is loaded after this from being fetched before ``values`` are computed; costs no instruction."""
        signature = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        self.builder.asm(signature, "", ",".join([*["X"] * len(values), "~{memory}"]), values, True)

    def in_register(self, address: Any) -> Any:
        """Give an address that is computed once, and not as a part of each instruction that it is for."""
        signature = ir.FunctionType(LONG, [LONG])
        return self.builder.asm(signature, "", "=r,0", [address], False)

    def loop(self, count: Any, start: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
        """Carry the values ``start`` through ``body(index, values)``, ``count`` times, which may be 0."""
        builder, before = self.builder, self.builder.block
        head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        index, carried = builder.phi(LONG), [builder.phi(value.type) for value in start]
        builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
        builder.position_at_end(inside)
        following = [*body(index, carried)]
        following.insert(0, builder.add(index, self.number(1)))
        for phi, first, value in zip([index, *carried], [self.number(0), *start], following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        return carried

    def for_row(
        self, row: Any, count: Any, start: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]
    ) -> list[Any]:
        """Carry ``start`` through ``body(address, values)`` for each vector of a row of ``count`` numbers."""
        up = self.builder.add(count, self.number(self.lanes - 1))
        vectors = self.builder.udiv(up, self.number(self.lanes))
        return self.loop(vectors, start, lambda index, values: body(self.advance(row, index, self.bytes), values))

    def when(self, condition: Any, values: Sequence[Any], body: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        """Give ``body(values)`` where the bit ``condition`` is set, else ``values``."""
        builder, before = self.builder, self.builder.block
        inside, after = (builder.append_basic_block(name) for name in ("inside", "after"))
        builder.cbranch(condition, inside, after)
        builder.position_at_end(inside)
        changed, end = list(body(list(values))), builder.block
        builder.branch(after)
        builder.position_at_end(after)
        merged = [builder.phi(value.type) for value in values]
        for phi, old, new in zip(merged, values, changed, strict=True):
            phi.add_incoming(old, before)
            phi.add_incoming(new, end)
        return merged
