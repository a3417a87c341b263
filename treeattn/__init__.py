"""Exact attention decoding over a key/value cache too big for one device, on any MPI cluster.

The method is Tree Attention (arXiv 2408.04093). On one process, `attention` takes arrays and gives the output. On MPI
ranks, each with a shard of the keys and values, `decode` gives all of them the output; `TreeComm` says how they are
joined, and `ShardedKVCache` deals new tokens out to them. What both are made of is public too: `partial_attention`
gives a `PartialState`, and `merge` merges states of different keys. docs/reference.md lists what each class has.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 8, n, 64), dtype=np.float32) for n in (1, 1000, 1000))
>>> treeattn.decode(q, k, v, comm=None).shape  # k and v of this rank; comm=None is all ranks under mpirun
(1, 8, 1, 64)

Importing this package imports NumPy and nothing heavier: numba, mpi4py and the backends are imported when they are
first used.
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
