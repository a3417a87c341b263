"""One rank's part in one round of a plan, with its buffers, requests and merges prepared: by messages, or in a window.

Both kinds of round have the same methods, which `treeattn.executor` calls in turn: ``post`` sends and asks for what
is to come, ``arrived`` says whether all of it is here, ``wait`` waits until it is, ``headers`` gives the headers that
came, and ``merge`` merges what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.counting import Count
from treeattn.plan import HEADER_BYTES, LARGEST_MESSAGE, RankRound, Stats, Usage
from treeattn.state import PartialState, StateOps
from treeattn.transport import Bytes, Meanwhile, Silence, Transport, Usual, nothing
from treeattn.waiting import nap
from treeattn.window import Window, compiled
from treeattn.wire_form import WireForm, merger, own_pages

__all__ = ["MessageRound", "Records", "Tally", "WindowRound"]

Array: TypeAlias = npt.NDArray[Any]

TAGS = 4096
"""Tags of rounds and pieces; a message's second part has a tag that is higher by as much, and so on.

Requests that are started together are started in any order, so that parts under one tag could take each other's place.
"""

SPINS, YIELDS = 100, 4
"""How often compiled code looks at a flag before it gives up the core, and does both before we look at the clock."""

SLEEP = np.array([0, 5_000_000], np.int64)
"""Seconds and nanoseconds that a rank sleeps at most before it looks at the clock, and for a calling of the roll."""


class Tally:
    """Counts what this rank sends; `stats` is a snapshot."""

    def __init__(self, hosts: tuple[str, ...], rank: int) -> None:
        self._elsewhere = [host != hosts[rank] for host in hosts]
        self._sent = [0, 0, 0, 0]
        self.all_rounds, self._rounds_between = Count(), 0
        self.collectives = 0
        self.usage = Usage()

    def sent(self, dest: int, size: int) -> None:
        """Count one message."""
        self.sent_all(self.total(((dest, size),)))

    def sent_all(self, total: Sequence[int]) -> None:
        """Count what `total` has added up."""
        sent = self._sent
        for at in range(4):
            sent[at] += total[at]

    def total(self, messages: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
        """Add up messages (dest, size) that are often sent together."""
        sizes = [size for _, size in messages]
        away = [size for dest, size in messages if self._elsewhere[dest]]
        return len(sizes), sum(sizes), len(away), sum(away)

    def rounds(self, number: int, between: int) -> None:
        """Count rounds, and those of them in which any message goes between hosts."""
        self.all_rounds.value += number
        self._rounds_between += between

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        rounds, (messages, size, between, size_between) = self.all_rounds.value, self._sent
        return Stats(rounds, messages, size, self._rounds_between, between, size_between, self.collectives)


class Records:
    """A rank's records, each a header and a state's wire rows, in one host buffer from which messages are cut.

    Parameters
    ----------
    count : int
    form : WireForm
    pinnable : bool
        Whether a card's driver may want to pin the buffer.
    """

    def __init__(self, count: int, form: WireForm, pinnable: bool = False) -> None:
        self.form, self.payload_bytes, self.pinnable = form, form.nbytes, pinnable
        self.stride = HEADER_BYTES + self.payload_bytes
        self.buffer = self._allocate(count * self.stride)
        starts = range(0, count * self.stride, self.stride)
        self.headers = [self._header(self.buffer[start : start + HEADER_BYTES]) for start in starts]
        self.payloads = [self.buffer[start + HEADER_BYTES : start + self.stride] for start in starts]
        self._ops: StateOps | None = None

    def _allocate(self, size: int) -> Bytes:
        return own_pages(size)[:size] if self.pinnable else np.zeros(size, np.uint8)

    def _header(self, data: Bytes) -> memoryview:
        return memoryview(data.data)

    def cut(self, at: int, slots: int) -> Bytes:
        """Give ``slots`` records from ``at`` on, as one message; without any, the header alone."""
        start = at * self.stride
        return self.buffer[start : start + (slots * self.stride or HEADER_BYTES)]

    def load(self, state: PartialState) -> None:
        """Pack a state to record 0."""
        self._prepare(state.ops)
        self._pack(state._packed)

    def _prepare(self, ops: StateOps) -> None:
        if ops is not self._ops:
            self._pack = ops.prepare_pack(self.payloads[0], self.form)
            self._unpack = ops.prepare_unpack(self.payloads[0], self.form)
            self._ops = ops

    def merger(self, payloads: Sequence[Bytes]) -> Callable[[], None]:
        """Give what merges ``payloads`` into record 0, in the order given."""
        return merger(self.payloads[0], payloads, self.form)

    def store(self, out: PartialState) -> None:
        """Unpack record 0 to ``out``."""
        self._prepare(out.ops)
        self._unpack(out._packed)


class MessageRound:
    """A round of messages between this rank and others.

    Parameters
    ----------
    steps : sequence of RankRound
        One of each piece that this rank has to do with.
    parts : sequence of Records
        By piece.
    transport : Transport
    tally : Tally
    busy : set of (piece, record)
        Records that receives can't be started for a step ahead, since they are in use until this round begins.

    Attributes
    ----------
    ahead : list
        Receives to start a step ahead.
    """

    def __init__(
        self,
        steps: Sequence[RankRound],
        parts: Sequence[Records],
        transport: Transport,
        tally: Tally,
        busy: set[tuple[int, int]],
    ) -> None:
        self._transport, self._tally, self._number = transport, tally, steps[0].number
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._late: list[Any] = []
        self.ahead: list[Any] = []
        self._sizes: list[tuple[int, int]] = []
        self._alone: list[tuple[int, Bytes, int]] = []
        self._headers: list[memoryview] = []
        self._mergers: list[Callable[[], None]] = []
        for step in steps:
            records, tag = parts[step.piece], self._number * len(parts) + step.piece
            self._prepare_sends(step, records, tag)
            self._prepare_receives(step, records, tag, busy)
            self._mergers += [records.merger([records.payloads[at] for at in sources]) for sources in step.merges]
        self._both, self._total = [*self._receives, *self._sends], tally.total(self._sizes)
        self._awaited: list[Any] = []
        self._usual = Usual()

    def _prepare_sends(self, step: RankRound, records: Records, tag: int) -> None:
        for dest, slots in step.sends:
            for number, data in enumerate(_parts(records.cut(0, slots))):
                self._sends.append(self._transport.send_init(data, dest, tag + number * TAGS))
                self._sizes.append((dest, data.size))
                alone = data[: 0 if number else HEADER_BYTES]  # what a rank with no payload sends of it
                self._alone.append((dest, alone, tag + number * TAGS))

    def _prepare_receives(self, step: RankRound, records: Records, tag: int, busy: set[tuple[int, int]]) -> None:
        for source, slots, at in step.receives:
            parts = enumerate(_parts(records.cut(at, slots)))
            requests = [self._transport.recv_init(data, source, tag + number * TAGS) for number, data in parts]
            late = not busy.isdisjoint((step.piece, place) for place in places_of((source, slots, at)))
            (self._late if late else self.ahead).extend(requests)
            self._receives += requests
            self._headers.append(records.headers[at])

    def post(self, full: bool) -> None:
        """Send, and ask for what is to come; without a payload, ``full`` false, headers alone are sent."""
        if self._late:
            self._transport.start(self._late)
        if full:
            if self._sends:
                self._transport.start(self._sends)
            self._awaited = self._both
            self._tally.sent_all(self._total)
        else:
            self._awaited = [*self._receives, *(self._send_header(*each) for each in self._alone)]

    def arrived(self) -> bool:
        """Whether all is here; `wait` then only hands it over."""
        return self._transport.progress(self._awaited)

    def wait(self, meanwhile: Meanwhile) -> None:
        """Wait until all is here."""
        try:
            self._transport.wait(self._awaited, meanwhile, self._usual)
        except Silence as silence:
            silence.round = self._number
            raise

    def headers(self) -> Sequence[memoryview]:
        """Give the headers that came."""
        return self._headers

    def _send_header(self, dest: int, header: Bytes, tag: int) -> Any:
        self._tally.sent(dest, header.size)
        return self._transport.isend(header, dest, tag)

    def merge(self) -> None:
        """Merge what came."""
        for merge in self._mergers:
            merge()


class WindowRound:
    """A round in the window of this rank's host.

    Parameters
    ----------
    steps : sequence of RankRound
        One of each piece that this rank has to do with.
    parts : sequence of Records
        By piece.
    transport : Transport
        Its deadline is this round's too.
    window : Window
    ordinal : int
        Which of the plan's rounds in windows it is.
    """

    ahead: tuple[Any, ...] = ()

    def __init__(
        self,
        steps: Sequence[RankRound],
        parts: Sequence[Records],
        transport: Transport,
        window: Window,
        ordinal: int,
    ) -> None:
        code = compiled()
        self._steps, self._parts, self._transport, self._window = steps, parts, transport, window
        self._publish, self._collect, self._waiting = code.publish_at(), code.collect_at(), code.WAITING
        self._sleep = code.sleep_at()
        self._different, self._ordinal, self.published = code.DIFFERENT, ordinal, False
        self._found, self._number, self._usual = code.WAITING, steps[0].number, Usual()
        self._places = _places([records.payload_bytes for records in parts])
        self._sent = [step.piece for step in steps if any(slots for _, slots in step.sends)]
        self._speaks = any(step.sends for step in steps)
        alone = all(step.merges or not step.receives for step in steps)  # else record 0 has to hold this rank's state
        self._in_place = alone and bool(self._sent) and len(parts) == 1
        self._taken, self._ops = False, None
        sources = list(dict.fromkeys(source for step in steps for source, _, _ in step.receives))
        self._slots = [np.array([window.address(rank, use) for rank in sources], np.int64) for use in (0, 1)]
        self._headers = [[window.header(rank, use) for rank in sources] for use in (0, 1)]
        self._mergers = [[merge for step in steps for merge in self._prepare(step, use)] for use in (0, 1)]
        self._mergers_taken = [[m for step in steps for m in self._prepare(step, use, True)] for use in (0, 1)]
        self._own = parts[0].buffer.ctypes.data, parts[0].payloads[0].ctypes.data

    @property
    def _use(self) -> int:
        return self._window.uses.value + self._ordinal

    def _payload(self, rank: int, use: int, piece: int) -> Bytes:
        """Rows of a piece in a slot."""
        at = self._places[piece]
        return self._window.payload(rank, use, at.stop)[at]

    def _prepare(self, step: RankRound, use: int, taken: bool = False) -> list[Callable[[], None]]:
        """Make ready to merge, straight out of the window; what is not merged is copied to its record."""
        records, piece = self._parts[step.piece], step.piece
        found = {at: self._payload(rank, use, piece) for rank, slots, at in step.receives if slots}
        if not step.merges:
            return [_copier(records.payloads[at], payload) for at, payload in found.items()]
        mergers = []
        own = self._payload(self._transport.rank, use, piece) if taken else records.payloads[0]
        for sources in step.merges:
            places = {0: own, **found}
            mergers.append(records.merger([places[at] for at in sources]))
            own = records.payloads[0]  # where what was merged is
        return mergers

    def take(self, state: PartialState) -> bool:
        """Let a card copy a state straight to this rank's slot, before `post`; False where it has to go to record 0."""
        self._taken = False
        if not self._in_place or isinstance(state._packed, np.ndarray):
            return False
        if state.ops is not self._ops:
            form, rank = self._parts[0].form, self._transport.rank
            self._packs = [state.ops.prepare_pack(self._payload(rank, use, 0), form) for use in (0, 1)]
            self._ops = state.ops
        self._packs[self._use % 2](state._packed)
        self._taken = True
        return True

    def post(self, full: bool) -> None:
        """Publish; without a payload, ``full`` false, the header alone."""
        if self._speaks and not self.published:
            use, (header, payload), rank = self._use, self._own, self._transport.rank
            size = self._places[0].stop if full and self._sent and not self._taken else 0
            if size and len(self._parts) > 1:  # rows that are not beside each other here, but are there
                size = 0
                for piece in self._sent:
                    np.copyto(self._payload(rank, use, piece), self._parts[piece].payloads[0])
            self._publish(self._window.address(rank, use), header, payload, size, use)
        self.published = False

    def arrived(self) -> bool:
        """Whether the others have published."""
        return self._look(1, 0)

    def _look(self, spins: int, yields: int) -> bool:
        use = self._use
        self._found = self._collect(self._slots[use % 2], self._own[0], use, spins, yields)
        return bool(self._found != self._waiting)

    def wait(self, meanwhile: Meanwhile) -> None:
        """Wait until the others have published."""
        slots, use = self._slots[self._use % 2], self._use

        def published() -> bool:
            if self._look(SPINS, YIELDS):
                return True
            meanwhile()
            return False

        def sleep() -> None:
            self._sleep(slots, use, SLEEP.ctypes.data)

        try:  # asleep, a rank would not move on what else is in flight
            self._transport.wait_for(published, sleep if meanwhile is nothing else nap, self._usual)
        except Silence as silence:
            silence.round = self._number
            raise

    def headers(self) -> Sequence[memoryview]:
        """Give the headers of the others, or none where all are this rank's own."""
        return self._headers[self._use % 2] if self._found == self._different else ()

    def merge(self) -> None:
        """Merge what came."""
        for merge in (self._mergers_taken if self._taken else self._mergers)[self._use % 2]:
            merge()


def _parts(data: Bytes) -> list[Bytes]:
    """Cut a message that is too long for one."""
    return [data[start : start + LARGEST_MESSAGE] for start in range(0, data.size, LARGEST_MESSAGE)]


def _places(sizes: Sequence[int]) -> list[slice]:
    """Give where each piece's bytes are in a slot."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _copier(to: Bytes, payload: Bytes) -> Callable[[], None]:
    return lambda: np.copyto(to, payload)


def places_of(receive: tuple[int, int, int]) -> range:
    """Give the records that a receive (source, slots, at) fills."""
    _, slots, at = receive
    return range(at, at + max(slots, 1))
