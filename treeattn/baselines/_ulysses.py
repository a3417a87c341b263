"""DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): from shards of the sequence to shards of the heads, and back.

In one all-to-all every rank gets all tokens of its share of the heads; it attends with those alone, and a second
exchange brings the heads' results together. Whole heads are dealt out, so there must be one per rank. With GQA that
means KV heads, unless they may be replicated: ``treeattn.baselines.Ulysses(replicate_kv=True)`` sends a KV head to
every rank that has query heads of its group.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.ulysses(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.spec import Spec
from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel, Slot
from treeattn.errors import InputError
from treeattn.state import PartialState
from treeattn.steps.wire import Wire

__all__ = ["Share", "Ulysses", "ulysses"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Share:
    """Query heads of one rank, and the KV heads that they need."""

    q: slice
    kv: slice

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.q.stop - self.q.start)

    def jobs(self, group: int) -> list[tuple[slice, slice]]:
        """Cut the share, from its own first heads on, into parts whose query heads fill whole groups, or share one."""
        first = self.kv.start * group
        if self.q.start == first and self.q.stop == self.kv.stop * group:
            return [(slice(0, self.q.stop - first), slice(0, self.kv.stop - self.kv.start))]
        found = []
        for head in range(self.kv.start, self.kv.stop):
            start, stop = max(self.q.start, head * group), min(self.q.stop, (head + 1) * group)
            at = head - self.kv.start
            found.append((slice(start - self.q.start, stop - self.q.start), slice(at, at + 1)))
        return found


class Ulysses(Baseline):
    """Heads are dealt out for the time of one attention.

    Parameters
    ----------
    replicate_kv : bool
        Whether one KV head may go to several ranks.
    """

    def __init__(self, *, replicate_kv: bool = False) -> None:
        self.replicate_kv = replicate_kv
        self.name = "ulysses_gqa" if replicate_kv else "ulysses"

    def refusal(self, spec: Spec, size: int) -> InputError | None:
        """Ask for a head per rank."""
        expected = f"at least {size} heads, since ulysses deals whole heads to {size} ranks"
        if spec.q_heads < size:
            return InputError.of("q", expected=expected, got=spec.q_heads)
        if spec.kv_heads < size and not self.replicate_kv:
            hint = "treeattn.baselines.Ulysses(replicate_kv=True) sends a KV head to several ranks"
            return InputError.of("k", expected=expected, got=spec.kv_heads, hint=hint)
        return None

    def shares(self, spec: Spec, size: int) -> list[Share]:
        """Deal the heads out, as evenly as they go."""
        heads, group = (spec.q_heads, 1) if self.replicate_kv else (spec.kv_heads, spec.group)
        bounds = [group * (heads * rank // size) for rank in range(size + 1)]
        return [Share(slice(a, b), slice(a // spec.group, -(-b // spec.group))) for a, b in pairwise(bounds)]

    def run(self, call: Call, wire: Wire) -> PartialState | None:
        """Exchange shards for heads, attend, and exchange results."""
        own = Parcel.of(call.args)
        if call.size == 1:
            return call.state(wire, own)
        shares = self.shares(call.spec, call.size)
        mine = shares[call.rank]
        parcels = self._shards_for_heads(call, wire, own, shares)
        states = [self._state(call, wire, parcels, mine, job) for job in mine.jobs(call.spec.group)]
        heads = np.concatenate([call.pack(state) for state in states], axis=1)
        return self._heads_together(call, wire, heads, shares, states[0])

    @staticmethod
    def _shards_for_heads(call: Call, wire: Wire, own: Parcel, shares: list[Share]) -> list[Parcel]:
        """Give every rank's shard of this rank's heads, by rank."""
        mine = shares[call.rank]
        coming = {rank: call.manifests[rank].heads(mine.q, mine.kv) for rank in call.others}
        parcels = {rank: Slot(wire, [manifest]).cut(manifest) for rank, manifest in coming.items()}
        parcels[call.rank] = own.heads(mine.q, mine.kv)
        going = {rank: own.heads(shares[rank].q, shares[rank].kv).sendable(wire) for rank in call.others}
        sends = [message for rank, parcel in going.items() for message in parcel.to(rank)]
        wire.swap(sends, [message for rank in call.others for message in parcels[rank].to(rank)])
        return [parcels[rank] for rank in range(call.size)]

    @staticmethod
    def _state(call: Call, wire: Wire, parcels: list[Parcel], share: Share, job: tuple[slice, slice]) -> PartialState:
        """Attend with some of one's heads over all shards."""
        heads, kv_heads = job
        q = call.args.q[:, share.q][:, heads]
        rows = slice(0, call.spec.q_tokens)
        return call.merged([call.state(wire, p.heads(heads, kv_heads), rows, q, call.args.q_pos) for p in parcels])

    @staticmethod
    def _heads_together(
        call: Call, wire: Wire, heads: Array, shares: list[Share], like: PartialState
    ) -> PartialState | None:
        """Put the heads' states together on every rank, or on the root."""
        wants = call.root in (None, call.rank)
        batch, _, tokens, width = call.state_shape
        shapes = [(batch, share.heads, tokens, width) for share in shares]
        inbox = {rank: wire.empty(shapes[rank], call.spec.state_dtype) for rank in call.others if wants}
        wire.swap([(rank, heads) for rank in call.others if call.root in (None, rank)], inbox.items())
        if not wants:
            return None
        every = [heads if rank == call.rank else inbox[rank] for rank in range(call.size)]
        return call.unpack(np.concatenate(every, axis=1), like)

    def cost(self, problem: Problem) -> Cost:
        """Two rounds; per rank about 2·b·t·d_kv·(P - 1) / P elements and (P - 1) states of 1 / P of the heads.

        Buffers: the others' shards of one's own heads, their results, and, with several batch rows, copies of the
        heads that one sends.
        """
        size, spec, root = problem.size, problem.call.spec, problem.call.root
        shares, shards = self.shares(spec, size), problem.manifests
        state = [problem.state_bytes // spec.q_heads * share.heads for share in shares]

        def sent(rank: int) -> list[tuple[int, int]]:
            others = [dest for dest in range(size) if dest != rank]
            parts = [(dest, shards[rank].heads(shares[dest].q, shares[dest].kv)) for dest in others]
            results = [(dest, state[rank]) for dest in others if root in (None, dest)]
            return [*((dest, nbytes) for dest, part in parts for nbytes in part.sizes), *results]

        def peak(rank: int) -> int:
            others, mine = [other for other in range(size) if other != rank], shares[rank]
            coming = sum(shards[other].heads(mine.q, mine.kv).nbytes for other in others)
            copies = sum(shards[rank].copied(shares[other].q, shares[other].kv) for other in others)
            return coming + copies + sum(state[other] for other in others if root in (None, rank))

        return problem.cost(2 * (size > 1), sent, [peak(rank) for rank in range(size)])


ulysses = Ulysses()
