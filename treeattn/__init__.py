"""Exact attention decoding over a key/value cache too big for one device, on any MPI cluster.

The method is Tree Attention (arXiv 2408.04093). Importing this package imports NumPy and nothing heavier: numba,
mpi4py and the backends are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeattn.lazy import lazily

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
    "backends": "backends",
    "baselines": "baselines",
    "decode": "distributed",
    "energy": "local",
    "errors": "errors",
    "kernels": "kernels",
    "merge": "state",
    "partial_attention": "local",
    "prefill": "prompt",
    "testing": "testing",
    "zigzag": "prompt",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
