"""Following a plan: records, headers and rounds of messages, for a rank that knows nothing about topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.agreement import Header
from treeattn.plan import HEADER_BYTES, Plan, RankRound, Stats, Usage
from treeattn.state import PartialState, StateOps
from treeattn.transport import Bytes, Transport

__all__ = ["Exchange", "Tally"]

Array: TypeAlias = npt.NDArray[Any]


class Tally:
    """Counts what this rank sends; `stats` is a snapshot."""

    def __init__(self, hosts: tuple[str, ...], rank: int) -> None:
        self._elsewhere = [host != hosts[rank] for host in hosts]
        self._sent = [0, 0, 0, 0]
        self._rounds = [0, 0]
        self.collectives = 0
        self.usage = Usage()

    def sent(self, dest: int, size: int) -> None:
        """Count one message."""
        sent = self._sent
        sent[0] += 1
        sent[1] += size
        if self._elsewhere[dest]:
            sent[2] += 1
            sent[3] += size

    def ran(self, plan: Plan) -> None:
        """Count the rounds of a plan, in all and between hosts."""
        self.rounds(len(plan.rounds), plan.rounds_between)

    def rounds(self, number: int, between: int) -> None:
        """Count rounds, and those of them in which any message goes between hosts."""
        self._rounds[0] += number
        self._rounds[1] += between

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
        self.headers = [memoryview(self.buffer.data)[start : start + HEADER_BYTES] for start in starts]
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

    def merge(self, state: PartialState, sources: tuple[int, ...]) -> None:
        """Merge records into record 0, in the order given, by the operations that ``state`` carries."""
        ops = state.ops
        if isinstance(state._packed, np.ndarray):
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

    def store(self, like: PartialState, out: PartialState | None) -> PartialState:
        """Copy record 0 to ``out``, or to a new state of the backend that ``like`` has."""
        if out is None:
            out = PartialState(like.ops.empty(self.shape, self.dtype), like.ops)
        if isinstance(out._packed, np.ndarray):
            np.copyto(out._packed, self.states[0])
        else:
            out.ops.from_host(self.payloads[0], out._packed)
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
        self._usage = Usage(self._records.buffer.nbytes)
        self._alone = self._records.cut(0, 0)  # record 0's header, the whole message of a rank with no payload
        self._rounds = [self._prepare(step) for step in plan.steps(transport.rank)]

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

    def run(self, own: Header, state: PartialState | None) -> Header:
        """Follow the plan and give the header that all ranks' headers combine to.

        A rank whose header so far is not clean sends headers alone: its payload, if it has one, is worth nothing
        to anybody. Receives have room for a full message in any case.

        Parameters
        ----------
        own : Header
            This rank's; a status means that it has no payload.
        state : PartialState or None
            What was loaded; its operations do the merging.
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
            if header.status == 0 and state is not None:
                for sources in step.merges:
                    self._records.merge(state, sources)
        self._tally.ran(self.plan)
        self._tally.usage = self._usage
        return header

    def _swap(self, step: _Round, full: bool) -> None:
        transport, tag = self._transport, step.tag
        requests = [transport.irecv(data, source, tag) for source, data in step.receives]
        for dest, data in step.sends:
            message = data if full else self._alone
            requests.append(transport.isend(message, dest, tag))
            self._tally.sent(dest, message.size)
        transport.wait(requests, step.peers)

    def result(self, state: PartialState, out: PartialState | None) -> PartialState | None:
        """Give the merged state, after a clean `run`, to the ranks that are to have it."""
        if self.plan.root not in (None, self._transport.rank):
            return None
        return self._records.store(state, out)
