"""Tree Attention as its paper writes it (arXiv 2408.04093, Algorithm 3): three all-reduces per decode step.

The largest logit by "max"; then, relative to it, numerators and denominators by "sum". The tree is left to whoever
does the all-reduce: MPI where the ranks are MPI's, else `Wire.allreduce`. MPI chooses the order of a sum, and does not
promise that every rank gets the same bits.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.allreduce3(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel
from treeattn.state import PartialState
from treeattn.steps.wire import Wire

__all__ = ["Allreduce3", "allreduce3"]


class Allreduce3(Baseline):
    """Three all-reduces."""

    name = "allreduce3"
    same_bits = False

    def run(self, call: Call, wire: Wire) -> PartialState:
        """Reduce the maximum, then numerators and denominators."""
        own = call.state(wire, Parcel.of(call.args))
        if call.size == 1:
            return own
        packed, dtype = call.pack(own), call.spec.state_dtype
        rows, width = packed.shape[:3], packed.shape[3] - 2
        largest, below, above = (wire.empty(shape, dtype) for shape in (rows, rows, (*rows, width)))
        largest[...] = packed[..., -1]
        wire.allreduce(largest, "max")
        with np.errstate(invalid="ignore"):  # a NaN that is seen is to stay one
            share = np.where(packed[..., -2] == 0, 0, np.exp(packed[..., -1] - largest))
            below[...] = share * packed[..., -2]
            above[...] = np.where(share[..., None] == 0, 0, share[..., None] * packed[..., :-2])
        wire.allreduce(above, "sum")
        wire.allreduce(below, "sum")
        return call.unpack(np.concatenate([above, below[..., None], largest[..., None]], axis=-1), own)

    def cost(self, problem: Problem) -> Cost:
        """Three calls of the runtime's all-reduce; else two rounds each, as `Wire.allreduce` says.

        The paper counts 2 (p - 1) / p (b·d + 2·b·n_h) elements per rank, and so it comes out where p divides the
        rows. Buffers hold the three arrays and, while one of them is reduced, P - 1 parts of it.
        """
        size, item, rows = problem.size, problem.itemsize, problem.rows
        width = problem.call.spec.v_head_dim
        if size == 1:
            return problem.cost(0, lambda rank: [], [0])
        if problem.native_allreduce:
            return replace(problem.cost(0, lambda rank: [], [problem.state_bytes] * size), collectives=3)

        def part(count: int, rank: int) -> int:
            return item * (count // size + (rank < count % size))

        def sent(rank: int) -> list[tuple[int, int]]:
            others = [other for other in range(size) if other != rank]
            counts = (rows, rows * width, rows)
            return [(o, part(count, whose)) for count in counts for o in others for whose in (o, rank)]

        peak = [problem.state_bytes + (size - 1) * part(rows * width, rank) for rank in range(size)]
        return problem.cost(6, sent, peak)


allreduce3 = Allreduce3()
