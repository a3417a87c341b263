"""A rank's records in host memory, and its share of a round: what is to become of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeattn.planning.plan import HEADER_BYTES, RankRound
from treeattn.state import PartialState
from treeattn.state_ops import StateOps
from treeattn.transports.base import Bytes, Transport
from treeattn.wire_form import WireForm, merger, own_pages

__all__ = ["Records", "Share", "places_of"]


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

    def address(self, at: int) -> int:
        """Give the address of a record's rows, right behind its header; NumPy has another for none."""
        return int(self.buffer.ctypes.data) + at * self.stride + HEADER_BYTES

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


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a round.

    Parameters
    ----------
    steps : sequence of RankRound
        One of each piece that this rank has to do with.
    parts : sequence of Records
        By piece.
    rounds : int
        How many the plan has.
    transport : Transport
        Its deadline is that of the round.
    """

    steps: Sequence[RankRound]
    parts: Sequence[Records]
    rounds: int
    transport: Transport

    @property
    def number(self) -> int:
        """The round's number in its plan."""
        return self.steps[0].number

    def tag(self, piece: int, part: int) -> int:
        """Give the tag of a part of a message: requests that are started together are started in any order.

        Those of a plan are below its `treeattn.planning.plan.Plan.tags`.
        """
        return (part * self.rounds + self.number) * len(self.parts) + piece


def places_of(receive: tuple[int, int, int]) -> range:
    """Give the records that a receive (source, slots, at) fills."""
    _, slots, at = receive
    return range(at, at + max(slots, 1))
