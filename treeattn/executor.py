"""Following a plan: records, headers and rounds of messages, for a rank that knows nothing about topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.agreement import Header
from treeattn.plan import HEADER_BYTES, Plan, RankRound, Stats
from treeattn.state import PartialState, StateOps
from treeattn.transport import Bytes, Silence, Transport

__all__ = ["Exchange", "Tally"]

Array: TypeAlias = npt.NDArray[Any]


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

    def ran(self, plan: Plan) -> None:
        """Count the rounds of a plan, in all and between hosts."""
        self._rounds[0] += len(plan.rounds)
        self._rounds[1] += plan.rounds_between

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

    def merger(self, ops: StateOps, on_host: bool, sources: tuple[int, ...]) -> Callable[[], None]:
        """Give what merges records into record 0, in the order given, by ``ops``."""
        if on_host:
            return ops.prepare_merge(self.states[0], [self.states[source] for source in sources])
        arrays = {source: ops.empty(self.shape, self.dtype) for source in {0, *sources}}
        merge = ops.prepare_merge(arrays[0], [arrays[source] for source in sources])

        def merge_on_device() -> None:
            for source in sources:
                ops.from_host(self.payloads[source], arrays[source])
            merge()
            ops.to_host(arrays[0], self.payloads[0])

        return merge_on_device

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
    """One round with its buffers and prepared requests.

    ``late`` are those of the receives that can't be started a step ahead, since their place is in use until this
    round begins: record 0 holds what is sent, and a tree of several rounds receives more than once in one place.
    """

    tag: int
    dests: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    sends: list[Any]
    receives: list[Any]
    late: list[Any]
    both: list[Any]
    headers: tuple[memoryview, ...]
    merges: tuple[tuple[int, ...], ...]


class Exchange:
    """One plan at one payload size on one rank: buffers allocated once, requests prepared once.

    Receives are started a step ahead, so that what comes finds its place whenever it comes.

    Parameters
    ----------
    plan : Plan
    transport : Transport
        Of this plan alone.
    shape : tuple of int
        Of the packed state.
    dtype : str
    tally : Tally
        Counts what is sent.
    """

    def __init__(self, plan: Plan, transport: Transport, shape: tuple[int, ...], dtype: str, tally: Tally) -> None:
        self.plan, self.transport, self._tally = plan, transport, tally
        self._records = Records(plan.records(transport.rank), shape, dtype)
        self._alone = self._records.cut(0, 0)  # record 0's header, the whole message of a rank with no payload
        steps = plan.steps(transport.rank)
        landings = Counter(place for step in steps for each in step.receives for place in _places(each))
        self._busy = {0, *(place for place, times in landings.items() if times > 1)}
        self._rounds = [self._prepare(step) for step in steps]
        self._ahead = [each for step in self._rounds for each in step.receives if each not in step.late]
        self._ops: StateOps | None = None
        self._mergers: list[list[Callable[[], None]]] = [[] for _ in steps]
        transport.start(self._ahead)

    def _prepare(self, step: RankRound) -> _Round:
        cut, records, transport = self._records.cut, self._records, self.transport
        sent = [(dest, cut(0, slots)) for dest, slots in step.sends]
        sends = [transport.send_init(data, dest, step.number) for dest, data in sent]
        receives = [transport.recv_init(cut(at, slots), source, step.number) for source, slots, at in step.receives]
        return _Round(
            step.number,
            tuple(dest for dest, _ in sent),
            tuple(data.size for _, data in sent),
            sends,
            receives,
            [r for r, each in zip(receives, step.receives, strict=True) if self._busy.intersection(_places(each))],
            [*receives, *sends],
            tuple(records.headers[at] for _, _, at in step.receives),
            step.merges,
        )

    def load(self, state: PartialState) -> None:
        """Take this rank's state, before `run`."""
        self._records.load(state)
        if state.ops is not self._ops:
            on_host = isinstance(state._packed, np.ndarray)
            merger = self._records.merger
            self._mergers = [[merger(state.ops, on_host, each) for each in step.merges] for step in self._rounds]
            self._ops = state.ops

    def run(self, own: Header) -> Header:
        """Follow the plan and give the header that all ranks' headers combine to.

        A rank whose header so far is not clean sends headers alone: its payload, if it has one, is worth nothing
        to anybody. Receives have room for a full message in any case.

        Parameters
        ----------
        own : Header
            This rank's; a status means that nothing was loaded.
        """
        header, packed = own, own.pack()
        mine = self._records.headers[0]
        mine[:] = packed
        for step, mergers in zip(self._rounds, self._mergers, strict=True):
            self._swap(step, full=header.status == 0)
            for received in step.headers:
                if received != packed:
                    header = header.combine(Header.unpack(received))
            if header is not own:
                packed = header.pack()
                mine[:] = packed
            if header.status == 0:
                for merge in mergers:
                    merge()
        if self._ahead:
            self.transport.start(self._ahead)
        self._tally.ran(self.plan)
        return header

    def _swap(self, step: _Round, full: bool) -> None:
        transport = self.transport
        if step.late:
            transport.start(step.late)
        if full:
            if step.sends:
                transport.start(step.sends)
            awaited, sizes = step.both, step.sent_bytes
        else:
            alone, tag = self._alone, step.tag
            awaited = [*step.receives, *(transport.isend(alone, dest, tag) for dest in step.dests)]
            sizes = (alone.size,) * len(step.dests)
        for dest, size in zip(step.dests, sizes, strict=True):
            self._tally.sent(dest, size)
        try:
            transport.wait(awaited)
        except Silence as silence:
            silence.round = step.tag
            raise

    def result(self, state: PartialState, out: PartialState | None) -> PartialState | None:
        """Give the merged state, after a clean `run`, to the ranks that are to have it."""
        if self.plan.root not in (None, self.transport.rank):
            return None
        return self._records.store(state, out)


def _places(receive: tuple[int, int, int]) -> range:
    _, slots, at = receive
    return range(at, at + max(slots, 1))
