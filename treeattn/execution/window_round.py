"""One rank's part in one round in the memory that the ranks of its host share; see `treeattn.execution.rounds`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from treeattn.execution.records import Share
from treeattn.execution.window import Window, compiled
from treeattn.planning.plan import RankRound
from treeattn.state import PartialState
from treeattn.transports.base import Bytes, Meanwhile, Silence, Usual, nothing
from treeattn.transports.waiting import nap

__all__ = ["SPINS", "WindowRound"]

SPINS, YIELDS = 100, 4
"""How often compiled code looks at a flag before it gives up the core, and does both before we look at the clock."""

SLEEP = np.array([0, 5_000_000], np.int64)
"""Seconds and nanoseconds that a rank sleeps at most before it looks at the clock, and for a calling of the roll."""


class WindowRound:
    """A round in the window of this rank's host.

    Parameters
    ----------
    share : Share
    window : Window
    ordinal : int
        Which of the plan's rounds in windows it is.
    """

    ahead: tuple[Any, ...] = ()

    def __init__(self, share: Share, window: Window, ordinal: int) -> None:
        code, steps, parts = compiled(), share.steps, share.parts
        self._parts, self._transport, self._window = parts, share.transport, window
        self._publish, self._collect, self._waiting = code.publish_at(), code.collect_at(), code.WAITING
        self._sleep = code.sleep_at()
        self._different, self._ordinal, self.published = code.DIFFERENT, ordinal, False
        self._found, self._number, self._usual = code.WAITING, share.number, Usual()
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


def _places(sizes: Sequence[int]) -> list[slice]:
    """Give where each piece's bytes are in a slot."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _copier(to: Bytes, payload: Bytes) -> Callable[[], None]:
    return lambda: np.copyto(to, payload)
