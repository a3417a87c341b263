"""All states to all ranks in one round, merged by each in rank order: what a plain all-gather would do.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.gather(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel
from treeattn.state import PartialState
from treeattn.steps.wire import Wire

__all__ = ["Gather", "gather"]


class Gather(Baseline):
    """Every state to every rank, or to the root."""

    name = "gather"

    def run(self, call: Call, wire: Wire) -> PartialState | None:
        """Swap states with all others, or send one's own to the root."""
        own = call.state(wire, Parcel.of(call.args))
        if call.size == 1:
            return own
        wants = call.root in (None, call.rank)
        inbox = {rank: wire.empty(call.state_shape, call.spec.state_dtype) for rank in call.others if wants}
        dests = [rank for rank in call.others if call.root in (None, rank)]
        wire.swap([(rank, call.pack(own)) for rank in dests], inbox.items())
        if not wants:
            return None
        return call.merged([own if r == call.rank else call.unpack(inbox[r], own) for r in range(call.size)])

    def cost(self, problem: Problem) -> Cost:
        """One round; a rank sends its state to each of the P - 1 others, or to the root, which has P - 1 buffers."""
        size, state, root = problem.size, problem.state_bytes, problem.call.root

        def sent(rank: int) -> list[tuple[int, int]]:
            return [(dest, state) for dest in range(size) if dest != rank and root in (None, dest)]

        peak = [(size - 1) * state if root in (None, rank) else 0 for rank in range(size)]
        return problem.cost(int(size > 1), sent, peak)


gather = Gather()
