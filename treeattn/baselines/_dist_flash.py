"""DistFlashAttn (Li et al., arXiv 2310.03294): a folded schedule, half the steps of a ring, with even work.

Every rank owns a block of query rows and a shard of keys. Block i meets shard j either at i, which fetches the
shard, or at j, which helps: it computes the state for i's rows and sends that back. Pairs up to half way round the ring
are fetched, the others helped with; of an even number of ranks, the pair just opposite is shared, half the rows each.
So P // 2 steps do, and with a causal mask over shards in order, where half of all pairs are hidden and skipped, every
rank has the same work. What the next step needs travels while this one is computed.

In decoding, where all ranks have all rows, the rows are dealt out in order and their results come together at the end.

>>> import numpy as np, treeattn
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
>>> np.allclose(treeattn.baselines.dist_flash(q, k, v, comm=None), treeattn.attention(q, k, v))
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import narrow_dtype
from treeattn.baselines._baseline import Baseline, Cost, Problem
from treeattn.baselines._call import Call
from treeattn.baselines._parcel import Parcel, Slot
from treeattn.baselines._schedule import Schedule
from treeattn.state import PartialState
from treeattn.steps.wire import Pending, Wire

__all__ = ["DistFlash", "dist_flash"]

Array: TypeAlias = npt.NDArray[Any]


class Folded:
    """One run of the schedule on one rank.

    Parameters
    ----------
    call : Call
    wire : Wire
    """

    def __init__(self, call: Call, wire: Wire) -> None:
        self.call, self.wire, self.schedule = call, wire, Schedule(call, wire.hosts)
        self.own = Parcel.of(call.args).sendable(wire)
        self.mine = self.schedule.rows[call.rank]
        turns = min(2, self.schedule.steps)
        self.slots = [Slot(wire, call.manifests) for _ in range(turns)]
        self.guests = [] if call.replicated else [Guest(call, wire) for _ in range(turns)]
        self.inbox = wire.empty(self._shape(self.mine), call.spec.state_dtype)
        self.state = call.identity(self._shape(self.mine))

    def run(self) -> PartialState:
        """Go through the steps; give the state of this rank's rows."""
        steps, rank = self.schedule.steps, self.call.rank
        coming = self._start(1)
        if self.schedule.meets(rank, self.mine, rank):
            self._add(self.call.state(self.wire, self.own, self.mine))
        for step in range(1, steps + 1):
            self.wire.finish(coming)
            if step < steps:
                coming = self._start(step + 1)
            self._compute(step)
        self.wire.round(crossing=self.schedule.crosses(steps))  # of the last states that come back
        return self.state

    def _start(self, step: int) -> Pending:
        """Start what a step needs: a shard from behind, one's own ahead, and queries the same way where they differ."""
        call, schedule, rank = self.call, self.schedule, self.call.rank
        ahead, behind = (rank + step) % call.size, (rank - step) % call.size
        sends: list[tuple[int, Array]] = []
        receives: list[tuple[int, Array]] = []
        if schedule.fetches(ahead, step):
            sends += self.own.to(ahead)
        if schedule.fetches(rank, step):
            receives += self._slot(step, behind).to(behind)
        if self.guests and schedule.is_helped(rank, step):
            sends += [(ahead, array) for array in self.guests[0].own()]
        if self.guests and schedule.is_helped(behind, step):
            receives += [(behind, array) for array in self.guests[step % len(self.guests)].room(behind)]
        self.wire.round(crossing=schedule.crosses(step))
        return self.wire.start(sends=sends, receives=receives)

    def _slot(self, step: int, owner: int) -> Parcel:
        return self.slots[step % len(self.slots)].cut(self.call.manifests[owner])

    def _compute(self, step: int) -> None:
        """Do the pair that was fetched and the pair of another rank, and send and receive the states of the latter."""
        call, schedule, rank = self.call, self.schedule, self.call.rank
        ahead, behind = (rank + step) % call.size, (rank - step) % call.size
        sends, receives, parts = [], [], []
        if schedule.is_helped(behind, step):
            sends.append((behind, self._help(step, behind)))
        inbox = self._part(schedule.helped(rank, step))
        if schedule.is_helped(rank, step):
            receives.append((ahead, inbox))
        returning = self.wire.start(sends=sends, receives=receives)
        if schedule.fetches(rank, step):
            parts.append(call.state(self.wire, self._slot(step, behind), schedule.fetched(rank, step)))
        self.wire.finish(returning)
        self._take(parts, inbox if receives else None)

    def _help(self, step: int, owner: int) -> Array:
        """Compute another rank's rows over one's own keys."""
        rows, q, q_pos = self.schedule.helped(owner, step), None, None
        if self.guests:
            q, q_pos = self.guests[step % len(self.guests)].rows(owner, rows)
        return np.ascontiguousarray(self.call.pack(self.call.state(self.wire, self.own, rows, q, q_pos)))

    def _take(self, fetched: list[PartialState], helped: Array | None) -> None:
        """Merge in a step's states: of all rows each, or of one half each, which are first put together."""
        halves = [] if helped is None else [self.call.unpack(helped, self.state)]
        states = [*fetched, *halves]
        if all(state.shape[2] == self.mine.stop - self.mine.start for state in states):
            for state in states:
                self._add(state)
        else:
            packed = np.concatenate([self.call.pack(state) for state in states], axis=2)
            self._add(self.call.unpack(packed, self.state))

    def _add(self, state: PartialState) -> None:
        self.state = self.call.merged([self.state, state])

    def _shape(self, rows: slice) -> tuple[int, int, int, int]:
        batch, heads, _, width = self.call.state_shape
        return batch, heads, rows.stop - rows.start, width

    def _part(self, rows: slice) -> Array:
        """Cut room for the states of some rows from the buffer for all of one's own."""
        shape = self._shape(rows)
        return self.inbox.reshape(-1)[: int(np.prod(shape))].reshape(shape)


class Guest:
    """Room for another rank's queries, one rank's at a time, and where they stand."""

    def __init__(self, call: Call, wire: Wire) -> None:
        self._call = call
        spec, most = call.spec, max(holding.q_tokens for holding in call.holdings)
        self._q = wire.empty(spec.batch * spec.q_heads * most * spec.head_dim, narrow_dtype(spec.q_dtype))
        self._q_pos = wire.empty(spec.batch * most if call.args.q_pos is not None else 0, np.int64)

    def room(self, owner: int) -> list[Array]:
        """Give arrays for the queries of a rank."""
        spec, tokens = self._call.spec, self._call.holdings[owner].q_tokens
        shape = spec.batch, spec.q_heads, tokens, spec.head_dim
        arrays: list[Array] = [self._q[: int(np.prod(shape))].reshape(shape)]
        if self._q_pos.size:
            arrays.append(self._q_pos[: spec.batch * tokens].reshape(spec.batch, tokens))
        return arrays

    def own(self) -> list[Array]:
        """Give this rank's queries, as they travel."""
        args = self._call.args
        return [np.ascontiguousarray(array) for array in (args.q, args.q_pos) if array is not None]

    def rows(self, owner: int, rows: slice) -> tuple[Array, Array | None]:
        """View some of the queries that have come."""
        q, *q_pos = self.room(owner)
        return q[:, :, rows], q_pos[0][:, rows] if q_pos else None

    @staticmethod
    def sizes(call: Call, tokens: int) -> list[int]:
        """Bytes of so many queries, and of where they stand."""
        spec = call.spec
        width = spec.q_heads * spec.head_dim * narrow_dtype(spec.q_dtype).itemsize
        return [spec.batch * tokens * each for each in (width, 8 * (call.args.q_pos is not None))]


class DistFlash(Baseline):
    """The folded schedule."""

    name = "dist_flash"
    spreads_queries = True

    def run(self, call: Call, wire: Wire) -> PartialState | None:
        """Fold; in decoding, put the rows together afterwards."""
        if call.size == 1:
            return call.state(wire, Parcel.of(call.args))
        folded = Folded(call, wire)
        state = folded.run()
        return self._rows_together(call, wire, folded.schedule, state) if call.replicated else state

    @staticmethod
    def _rows_together(call: Call, wire: Wire, schedule: Schedule, state: PartialState) -> PartialState | None:
        wants = call.root in (None, call.rank)
        batch, heads, _, width = call.state_shape
        sizes = [rows.stop - rows.start for rows in schedule.rows]
        inbox = {r: wire.empty((batch, heads, sizes[r], width), call.spec.state_dtype) for r in call.others if wants}
        own = np.ascontiguousarray(call.pack(state))
        wire.swap([(rank, own) for rank in call.others if call.root in (None, rank)], inbox.items())
        if not wants:
            return None
        every = [own if rank == call.rank else inbox[rank] for rank in range(call.size)]
        return call.unpack(np.concatenate(every, axis=2), state)

    def cost(self, problem: Problem) -> Cost:
        """P // 2 rounds, one for the last states that come back, and in decoding one for the rows' results.

        With all pairs visible and P odd a rank sends (P - 1) / 2 shards, half of what a ring rank does, and as many
        states of a block of rows. Buffers: two shards and two blocks of queries in turn (one if there is one step),
        a block's state, and, in decoding, the results of the others' rows.
        """
        call, size = problem.call, problem.size
        if size == 1:
            return problem.cost(0, lambda rank: [], [0])
        schedule = Schedule(call, problem.hosts)
        costs = FoldedCost(problem, schedule)
        between = sum(schedule.crosses(step) for step in range(1, schedule.steps + 1))
        crossing = len(set(problem.hosts)) > 1
        found = problem.cost(schedule.steps + 1 + call.replicated, costs.sent, [costs.peak(r) for r in range(size)])
        last = schedule.crosses(schedule.steps) + (call.replicated and crossing)
        return Cost(found.rounds, between + last, found.ranks)


@dataclass(frozen=True)
class FoldedCost:
    """What each rank sends and has room for."""

    problem: Problem
    schedule: Schedule

    def sent(self, rank: int) -> list[tuple[int, int]]:
        """Give (destination, bytes) of each array."""
        call, schedule, size = self.problem.call, self.schedule, self.problem.size
        own, found = self.problem.manifests[rank], []
        for step in range(1, schedule.steps + 1):
            ahead, behind = (rank + step) % size, (rank - step) % size
            if schedule.fetches(ahead, step):
                found += [(ahead, nbytes) for nbytes in own.sizes]
            if schedule.is_helped(rank, step) and not call.replicated:
                found += [(ahead, nbytes) for nbytes in Guest.sizes(call, call.holdings[rank].q_tokens)]
            if schedule.is_helped(behind, step):
                found.append((behind, self._state_bytes(schedule.helped(behind, step))))
        if call.replicated:
            dests = [dest for dest in range(size) if dest != rank and call.root in (None, dest)]
            found += [(dest, self._state_bytes(schedule.rows[rank])) for dest in dests]
        return found

    def _state_bytes(self, rows: slice) -> int:
        spec = self.problem.call.spec
        row = spec.batch * spec.q_heads * (spec.v_head_dim + 2) * self.problem.itemsize
        return row * int(rows.stop - rows.start)

    def peak(self, rank: int) -> int:
        """Give the bytes of a rank's buffers, all of which it has to the end."""
        call, turns = self.problem.call, min(2, self.schedule.steps)
        found = turns * Slot.nbytes(self.problem.manifests) + self._state_bytes(self.schedule.rows[rank])
        if not call.replicated:
            return found + turns * sum(Guest.sizes(call, max(holding.q_tokens for holding in call.holdings)))
        others = [rows for other, rows in enumerate(self.schedule.rows) if other != rank]
        return found + sum(self._state_bytes(rows) for rows in others if call.root in (None, rank))


dist_flash = DistFlash()
