"""Megatron-LM's sequence parallelism (Korthikanti et al., arXiv 2205.05198): all-gather keys and values, then attend.

Every rank sends its shard to every other in one round, and computes attention over all keys by itself, shard by shard
in rank order.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.megatron_sp(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel, Slot
from treeattn.state import PartialState
from treeattn.steps.wire import Wire

__all__ = ["MegatronSP", "megatron_sp"]


class MegatronSP(Baseline):
    """Every shard to every rank, then local attention."""

    name = "megatron_sp"
    spreads_queries = True

    def run(self, call: Call, wire: Wire) -> PartialState:
        """Gather the parcels, then work on all of them."""
        own = Parcel.of(call.args)
        if call.size == 1:
            return call.state(wire, own)
        own = own.sendable(wire)
        parcels = {rank: Slot(wire, [call.manifests[rank]]).cut(call.manifests[rank]) for rank in call.others}
        sends = [message for rank in call.others for message in own.to(rank)]
        wire.swap(sends, [message for rank, parcel in parcels.items() for message in parcel.to(rank)])
        seen = [rank for rank in range(call.size) if call.sees(call.holdings[call.rank].q_span, rank)]
        states = [call.state(wire, parcels.get(rank, own)) for rank in seen]
        return call.merged(states) if states else call.identity(call.state_shape)

    def cost(self, problem: Problem) -> Cost:
        """One round; a rank sends its shard P - 1 times and has room for the shards of all others."""
        size, shards = problem.size, problem.manifests

        def sent(rank: int) -> list[tuple[int, int]]:
            return [(dest, nbytes) for dest in range(size) if dest != rank for nbytes in shards[rank].sizes]

        total = sum(shard.nbytes for shard in shards)
        return problem.cost(int(size > 1), sent, [total - shard.nbytes for shard in shards])


megatron_sp = MegatronSP()
