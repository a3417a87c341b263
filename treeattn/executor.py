"""Following a plan: records, headers and rounds of messages, for a rank that knows nothing about topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.agreement import Header
from treeattn.plan import HEADER_BYTES, Plan, RankRound, Stats
from treeattn.state import PartialState, StateOps
from treeattn.transport import Bytes, Transport

__all__ = ["Exchange", "Tally", "broadcast"]

Array: TypeAlias = npt.NDArray[Any]

LARGEST_MESSAGE = 2**30
"""MPI counts in 32 bits: a longer array is broadcast in pieces of this many bytes."""


class Tally:
    """Counts what this rank sends; `stats` is a snapshot."""

    def __init__(self, hosts: tuple[str, ...], rank: int) -> None:
        self._elsewhere = [host != hosts[rank] for host in hosts]
        self._sent = [0, 0, 0, 0]
        self._rounds = [0, 0]
        self.collectives = 0

    def sent(self, dest: int, size: int) -> None:
        """Count one message."""
        sent = self._sent
        sent[0] += 1
        sent[1] += size
        if self._elsewhere[dest]:
            sent[2] += 1
            sent[3] += size

    def ran(self, plan_rounds: tuple[int, int]) -> None:
        """Count the rounds, in all and between hosts, of a plan."""
        self._rounds[0] += plan_rounds[0]
        self._rounds[1] += plan_rounds[1]

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        (rounds, rounds_between), (messages, size, between, size_between) = self._rounds, self._sent
        return Stats(rounds, messages, size, rounds_between, between, size_between, self.collectives)


class Records:
    """A rank's records, each a header and a packed state, in one host buffer from which messages are cut."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        payload = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.stride = HEADER_BYTES + payload
        self.buffer: Bytes = np.zeros(count * self.stride, np.uint8)
        starts = range(0, count * self.stride, self.stride)
        self.headers = [memoryview(self.buffer)[start : start + HEADER_BYTES] for start in starts]
        self.payloads = [self.buffer[start + HEADER_BYTES : start + self.stride] for start in starts]
        self.states: list[Array] = [each.view(dtype).reshape(shape) for each in self.payloads]
        self._staged: tuple[StateOps, list[Array]] | None = None

    def cut(self, at: int, slots: int) -> Bytes:
        """Give ``slots`` records from ``at`` on, as one message; without any, the header alone."""
        start = at * self.stride
        return self.buffer[start : start + (slots * self.stride or HEADER_BYTES)]

    def load(self, state: PartialState) -> None:
        """Copy a state to record 0."""
        packed = state._packed
        if isinstance(packed, np.ndarray):
            np.copyto(self.states[0], packed)
        else:
            state.ops.to_host(packed, self.payloads[0])

    def merge(self, ops: StateOps, sources: tuple[int, ...], on_host: bool) -> None:
        """Merge records into record 0, in the order given."""
        if on_host:
            ops.merge(self.states[0], [self.states[source] for source in sources])
            return
        arrays = self._device_arrays(ops)
        for source in sources:
            ops.from_host(self.payloads[source], arrays[source])
        ops.merge(arrays[0], [arrays[source] for source in sources])
        ops.to_host(arrays[0], self.payloads[0])

    def _device_arrays(self, ops: StateOps) -> list[Array]:
        """Arrays beside the records, where states live that host memory can't be merged for; made once."""
        if self._staged is None or self._staged[0] is not ops:
            self._staged = ops, [ops.empty(self.shape, self.dtype) for _ in self.states]
        return self._staged[1]

    def store(self, ops: StateOps, out: PartialState | None, on_host: bool) -> PartialState:
        """Copy record 0 to ``out``, or to a new state."""
        if out is None:
            if on_host:
                return PartialState(self.states[0].copy(), ops)
            out = PartialState(ops.empty(self.shape, self.dtype), ops)
        if on_host:
            np.copyto(out._packed, self.states[0])
        else:
            ops.from_host(self.payloads[0], out._packed)
        return out


@dataclass(frozen=True, slots=True)
class _Round:
    """One round with its buffers: what a rank needs to hand to its transport."""

    tag: int
    sends: tuple[tuple[int, Bytes], ...]
    receives: tuple[tuple[int, Bytes], ...]
    headers: tuple[memoryview, ...]
    peers: tuple[int, ...]
    merges: tuple[tuple[int, ...], ...]


class Exchange:
    """One plan at one payload size on one rank, its buffers allocated once.

    Parameters
    ----------
    plan : Plan
    transport : Transport
    shape : tuple of int
        Of the packed state.
    dtype : str
    tally : Tally
        Counts what is sent.
    """

    def __init__(self, plan: Plan, transport: Transport, shape: tuple[int, ...], dtype: str, tally: Tally) -> None:
        self.plan = plan
        self._transport, self._tally = transport, tally
        self._records = Records(plan.records(transport.rank), shape, dtype)
        self._alone = self._records.cut(0, 0)  # record 0's header, the whole message of a rank with no payload
        self._rounds = [self._prepare(step) for step in plan.steps(transport.rank)]
        predicted = plan.predict(0).total
        self._round_counts = predicted.rounds, predicted.rounds_between

    def _prepare(self, step: RankRound) -> _Round:
        cut, headers = self._records.cut, self._records.headers
        return _Round(
            step.number,
            tuple((dest, cut(0, slots)) for dest, slots in step.sends),
            tuple((source, cut(at, slots)) for source, slots, at in step.receives),
            tuple(headers[at] for _, _, at in step.receives),
            (*(source for source, _, _ in step.receives), *(dest for dest, _ in step.sends)),
            step.merges,
        )

    def load(self, state: PartialState) -> None:
        """Take this rank's state, before `run`."""
        self._records.load(state)

    def run(self, own: Header, ops: StateOps | None, on_host: bool) -> Header:
        """Follow the plan and give the header that all ranks' headers combine to.

        A rank whose header so far is not clean sends headers alone: its payload, if it has one, is worth nothing
        to anybody. Receives have room for a full message in any case.

        Parameters
        ----------
        own : Header
            This rank's; a status means that it has no payload.
        ops : StateOps or None
            Who merges; None only without a payload.
        on_host : bool
            Whether states are NumPy arrays.
        """
        header, packed = own, own.pack()
        mine = self._records.headers[0]
        mine[:] = packed
        for step in self._rounds:
            self._swap(step, full=header.status == 0)
            for received in step.headers:
                if received != packed:
                    header = header.combine(Header.unpack(received))
            if header is not own:
                packed = header.pack()
                mine[:] = packed
            if header.status == 0 and ops is not None:
                for sources in step.merges:
                    self._records.merge(ops, sources, on_host)
        self._tally.ran(self._round_counts)
        return header

    def _swap(self, step: _Round, full: bool) -> None:
        transport, tag = self._transport, step.tag
        requests = [transport.irecv(data, source, tag) for source, data in step.receives]
        for dest, data in step.sends:
            message = data if full else self._alone
            requests.append(transport.isend(message, dest, tag))
            self._tally.sent(dest, message.size)
        transport.wait(requests, step.peers)

    def result(self, ops: StateOps, out: PartialState | None, on_host: bool) -> PartialState:
        """Give the merged state, after a clean `run`."""
        return self._records.store(ops, out, on_host)


def broadcast(plan: Plan, transport: Transport, data: Bytes, tally: Tally) -> None:
    """Send the root's ``data`` down the plan's tree, into ``data`` on the other ranks."""
    steps = plan.steps(transport.rank)
    predicted = plan.predict(0).total
    for start in range(0, max(data.size, 1), LARGEST_MESSAGE):
        piece = data[start : start + LARGEST_MESSAGE]
        for step in steps:
            requests = [transport.irecv(piece, source, step.number) for source, _, _ in step.receives]
            requests += [transport.isend(piece, dest, step.number) for dest, _ in step.sends]
            transport.wait(requests, [*(r[0] for r in step.receives), *(dest for dest, _ in step.sends)])
            for dest, _ in step.sends:
                tally.sent(dest, piece.size)
        tally.ran((predicted.rounds, predicted.rounds_between))
