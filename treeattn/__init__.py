"""Exact attention decoding over a key/value cache too big for one device, on any MPI cluster.

The method is Tree Attention (arXiv 2408.04093). Importing this package imports NumPy and nothing heavier: numba,
mpi4py and the backends are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treeattn import backends, baselines, errors, kernels, testing
    from treeattn.cache import ShardedKVCache
    from treeattn.comm import TreeComm
    from treeattn.distributed import decode
    from treeattn.local import attention, energy, partial_attention
    from treeattn.prompt import prefill, zigzag
    from treeattn.state import PartialState, merge

__all__ = [
    "PartialState",
    "ShardedKVCache",
    "TreeComm",
    "attention",
    "backends",
    "baselines",
    "decode",
    "energy",
    "errors",
    "kernels",
    "merge",
    "partial_attention",
    "prefill",
    "testing",
    "zigzag",
]

__version__ = "0.1.0"

# No home shares a public function's name: importing `treeattn.x` would hide the function `x`.
_HOMES = {
    "PartialState": "state",
    "ShardedKVCache": "cache",
    "TreeComm": "comm",
    "attention": "local",
    "decode": "distributed",
    "energy": "local",
    "merge": "state",
    "partial_attention": "local",
    "prefill": "prompt",
    "zigzag": "prompt",
}
_SUBMODULES = ("backends", "baselines", "errors", "kernels", "testing")


def __getattr__(name: str) -> Any:
    """Import a public name from its home, on first use."""
    if name in _SUBMODULES:
        return importlib.import_module(f"treeattn.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'treeattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"treeattn.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Name what is public, and what every module has; not what this file itself imports."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
