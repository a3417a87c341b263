"""The processor for which numba compiles: this one, unless numba's settings say otherwise.

LLVM ends the process over vectors that its target has no registers for, so what kernels are made of is asked here, and
not of the processor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding
from numba.core import codegen as _codegen
from numba.core import config as _config

codegen: Any = _codegen
config: Any = _config  # its settings appear at run time, out of a type checker's sight

__all__ = ["has_feature", "is_zen", "target"]

GENERATIONS = "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw"
"""Features of which LLVM takes away the later ones too with an earlier one."""


def target() -> str:
    """Name the processor and its features as LLVM is told them: all that compiled code depends on."""
    return f"{_name()} {_features()}"


def is_zen() -> bool:
    """Whether numba compiles for an AMD processor of 2017 or later, which gains by other things than Intel's."""
    return _name().startswith("znver")


def has_feature(name: str) -> bool:
    """Whether what numba compiles for has ``name``, as LLVM calls it; what LLVM is not told of counts as missing."""
    told = _told(_features())
    earlier = GENERATIONS[: GENERATIONS.index(name)] if name in GENERATIONS else GENERATIONS
    return told.get(name, False) and all(told.get(each, True) for each in earlier)


def _name() -> str:
    return str(config.CPU_NAME or binding.get_host_cpu_name())


def _features() -> str:
    return str(codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES)


@cache
def _told(features: str) -> dict[str, bool]:
    """Read a list of features, of which the last word on each counts."""
    told: dict[str, bool] = {}
    for sign, name in ((each[0], each[1:]) for each in features.split(",") if each):
        taken = GENERATIONS[GENERATIONS.index(name) :] if sign == "-" and name in GENERATIONS else ()
        told |= {name: sign == "+", **dict.fromkeys(taken, False)}
    return told
