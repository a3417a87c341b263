"""Ring Attention (Liu et al., arXiv 2310.01889): keys and values travel round a ring, queries stay.

In each of P - 1 steps a rank sends the shard that it has just got to the next rank and receives one from the rank
before, while its kernel works on that shard: two buffers take turns. Shards may be uneven; a buffer has room for the
largest, and only a shard's own bytes travel.

In decoding, a rank keeps the shards' states, which are small, and merges them in rank order at the end, so that all
ranks have the same bits. In prefill, where states are as large as queries and no two ranks have the same rows, each is
merged as it comes.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.ring(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel, Slot
from treeattn.state import PartialState
from treeattn.steps.wire import Wire

__all__ = ["Ring", "ring"]


class Ring(Baseline):
    """Keys and values travel round a ring."""

    name = "ring"
    spreads_queries = True

    def run(self, call: Call, wire: Wire) -> PartialState:
        """Work on one's own shard, then on those that come by."""
        rank, size = call.rank, call.size
        own = Parcel.of(call.args)
        if size == 1:
            return call.state(wire, own)
        held, states = own.sendable(wire), dict[int, PartialState]()
        slots = [Slot(wire, call.manifests) for _ in range(min(2, size - 1))]
        for step in range(size - 1):
            wire.round(crossing=len(set(wire.hosts)) > 1)
            into = slots[step % 2].cut(call.manifests[(rank - step - 1) % size])
            pending = wire.start(sends=held.to((rank + 1) % size), receives=into.to((rank - 1) % size))
            self._work(call, wire, states, held, (rank - step) % size)
            wire.finish(pending)
            held = into
        self._work(call, wire, states, held, (rank + 1) % size)
        return call.merged([states[owner] for owner in sorted(states)]) if states else call.identity(call.state_shape)

    @staticmethod
    def _work(call: Call, wire: Wire, states: dict[int, PartialState], held: Parcel, owner: int) -> None:
        """Add the state of a shard, unless none of its keys can be seen."""
        if not call.sees(call.holdings[call.rank].q_span, owner):
            return
        new = call.state(wire, held)
        if call.replicated:
            states[owner] = new
        else:
            states[0] = call.merged([states[0], new]) if states else new

    def cost(self, problem: Problem) -> Cost:
        """P - 1 rounds; a rank sends every shard but that of the rank after it.

        With GQA and even shards of t tokens that is 2·b·t·d_kv·(P - 1) elements per rank. Two buffers for the
        largest shard, one if P = 2: with its own shard, the paper's 4·b·t·d for two ranks.
        """
        size, shards = problem.size, problem.manifests
        if size == 1:
            return problem.cost(0, lambda rank: [], [0])

        def sent(rank: int) -> list[tuple[int, int]]:
            passed = [shards[(rank - step) % size] for step in range(size - 1)]
            return [((rank + 1) % size, nbytes) for shard in passed for nbytes in shard.sizes]

        return problem.cost(size - 1, sent, [min(2, size - 1) * Slot.nbytes(shards)] * size)


ring = Ring()
