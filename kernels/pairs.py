"""Pairs of bfloat16 that the processor multiplies and adds up in one instruction (avx512_bf16)."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir

from treeattn.kernels.vectors import LANES, LONG, Vectors

__all__ = ["PAIRS", "add_pair_at", "add_pairs"]


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
"""A vector of pairs, one in each lane."""


def add_pairs(vectors: Vectors, a: Any, b: Any, total: Any) -> Any:
    """Give ``total`` and, lane by lane, both products of a pair of ``a`` and one of ``b``; denormals count as 0."""
    signature = ir.FunctionType(vectors.type, [vectors.type, PAIRS, PAIRS])
    dot = vectors.builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), signature)
    return vectors.builder.call(dot, [total, a, b])


def add_pair_at(vectors: Vectors, address: Any, pairs: Any, total: Any) -> Any:
    """Give ``total`` and, lane by lane, both products of the pair at an address and one of ``pairs``.

    As assembly: LLVM would spread the pair with an instruction for floats, after which this one is slower by a third.
    """
    binding.initialize_native_asmparser()  # numba doesn't, for it has no assembly
    kinds = ir.FunctionType(vectors.type, [vectors.type, LONG, vectors.type])
    spread = f"{{1to{LANES}}}"
    return vectors.builder.asm(kinds, f"vdpbf16ps ($2){spread}, $1, $0", "=v,v,r,0", [pairs, address, total], False)
