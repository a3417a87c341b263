"""A ring in which only states travel: keys and values stay where they are.

Every rank computes the state of its own shard once. Then states go round: what comes from the rank before is merged
with one's own and passed on, so that after P - 1 steps each of the travelling states has been everywhere. The first
message carries what the kernel has computed, so there is no work to do beside a message.

The bits of the result differ from rank to rank in the last places: each state begins at another rank, and meets the
others in the order of the ring from there. Merging in one order everywhere would take all P states on every rank, which
is `gather`.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.ring_query(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

import numpy as np

from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel
from treeattn.state import PartialState
from treeattn.steps.wire import Wire

__all__ = ["RingQuery", "ring_query"]


class RingQuery(Baseline):
    """States travel round a ring."""

    name = "ring_query"
    same_bits = False

    def run(self, call: Call, wire: Wire) -> PartialState:
        """Compute one's own state, then merge it into every one that comes by."""
        rank, size = call.rank, call.size
        own = call.state(wire, Parcel.of(call.args))
        if size == 1:
            return own
        travelling, inbox = own, wire.empty(call.state_shape, call.spec.state_dtype)
        for _ in range(size - 1):
            wire.round(crossing=len(set(wire.hosts)) > 1)
            outbox = np.ascontiguousarray(call.pack(travelling))
            wire.finish(wire.start(sends=[((rank + 1) % size, outbox)], receives=[((rank - 1) % size, inbox)]))
            travelling = call.merged([call.unpack(inbox, own), own])
        return travelling

    def cost(self, problem: Problem) -> Cost:
        """P - 1 rounds of one state per rank; one buffer for the state that comes."""
        size, state = problem.size, problem.state_bytes

        def sent(rank: int) -> list[tuple[int, int]]:
            return [((rank + 1) % size, state)] * (size - 1)

        return problem.cost(size - 1, sent, [state * (size > 1)] * size)


ring_query = RingQuery()
