"""The systems that Tree Attention is compared with, exact and on the same kernels, ranks and counters.

Each is called like `treeattn.decode` and gives what that gives. ``BASELINES`` names them all.

>>> import treeattn
>>> sorted(treeattn.baselines.BASELINES)
['allreduce3', 'dist_flash', 'gather', 'megatron_sp', 'ring', 'ring_query', 'ulysses']
"""

from __future__ import annotations

from treeattn.baselines._allreduce3 import allreduce3
from treeattn.baselines._baseline import Baseline, Cost, Prepared, Problem, RankCost
from treeattn.baselines._dist_flash import dist_flash
from treeattn.baselines._gather import gather
from treeattn.baselines._megatron_sp import megatron_sp
from treeattn.baselines._ring import ring
from treeattn.baselines._ring_query import ring_query
from treeattn.baselines._ulysses import Ulysses, ulysses

__all__ = [
    "BASELINES",
    "Baseline",
    "Cost",
    "Prepared",
    "Problem",
    "RankCost",
    "Ulysses",
    "allreduce3",
    "dist_flash",
    "gather",
    "megatron_sp",
    "ring",
    "ring_query",
    "ulysses",
]

BASELINES: dict[str, Baseline] = {
    each.name: each for each in (ring, ring_query, dist_flash, megatron_sp, ulysses, allreduce3, gather)
}
"""Every baseline by name, in the order in which tables show them."""
