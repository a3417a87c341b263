"""Records in a card's memory, for an MPI that takes it: a state goes from card to card, and only headers to the host.

An MPI that can't take a device pointer ends the process, so this way is taken only where every rank's MPI says that it
can (`treeattn.transports.gpu_mpi`). Each rank may be on it or not, whatever the others do: a message is the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from treeattn.execution.records import Records, Share
from treeattn.execution.rounds import MessageRound
from treeattn.execution.tally import Tally
from treeattn.state import PartialState
from treeattn.state_ops import StateOps
from treeattn.wire_form import WireForm

__all__ = ["DeviceRecords", "DirectOps", "DirectRound"]


class DirectOps(StateOps, Protocol):
    """What a backend whose ``direct`` names its memory can do beside: wire rows stay on its device.

    ``prepare_pack`` and ``prepare_unpack`` then take wire rows that are there.
    """

    def memory(self, size: int) -> Any:
        """Allocate bytes on the device: they can be cut like an array's, and MPI takes them."""

    def prepare_merge_rows(self, out: Any, sources: Sequence[Any], form: WireForm) -> Callable[[], None]:
        """Give a function that merges wire rows, in this order, to ``out``, which may be one of them."""

    def mark(self) -> Callable[[], bool]:
        """Give a function that tells whether what was started on the current stream so far is done."""


class DeviceRecords(Records):
    """A rank's records on its card; their headers have copies on the host, which `push` and `pull` keep in step."""

    def __init__(self, count: int, form: WireForm, ops: DirectOps) -> None:
        self._device, self._left = ops, _done
        super().__init__(count, form)

    def _allocate(self, size: int) -> Any:
        return self._device.memory(size)

    def _header(self, data: Any) -> memoryview:
        return memoryview(np.zeros(data.size, np.uint8).data)

    def push(self) -> None:
        """Write record 0's header on the card, and wait for the stream: MPI may read and write there afterwards."""
        self._device.from_host(np.frombuffer(self.headers[0], np.uint8), self.cut(0, 0))

    def pull(self, places: Sequence[int]) -> None:
        """Read the headers of these records."""
        for at in places:
            self._device.to_host(self.cut(at, 0), np.frombuffer(self.headers[at], np.uint8))

    def merger(self, payloads: Sequence[Any]) -> Callable[[], None]:
        """Give what merges ``payloads`` into record 0, on the card."""
        return self._device.prepare_merge_rows(self.payloads[0], payloads, self.form)

    def load(self, state: PartialState) -> None:
        """Pack a state to record 0, once the last result has been read from there, on whatever stream that was."""
        self.settle()
        if state.ops is self._device:
            super().load(state)
        else:
            wire = np.empty(self.form.nbytes, np.uint8)
            state.ops.prepare_pack(wire, self.form)(state._packed)
            self._device.from_host(wire, self.payloads[0])

    def store(self, out: PartialState) -> None:
        """Unpack record 0, where ``out`` lives."""
        if out.ops is self._device:
            super().store(out)
            self.leave()
            return
        wire = np.empty(self.form.nbytes, np.uint8)
        self._device.to_host(self.payloads[0], wire)
        out.ops.prepare_unpack(wire, self.form)(out._packed)

    def leave(self) -> None:
        """Take note that everything that reads the records has been started."""
        self._left = self._device.mark()

    def settle(self) -> None:
        """Wait until that has been done."""
        while not self._left():
            pass


def _done() -> bool:
    return True


class DirectRound(MessageRound):
    """A round of messages from card to card; the other ranks may be on it or not."""

    def __init__(self, share: Share, records: DeviceRecords, tally: Tally, busy: set[tuple[int, int]]) -> None:
        super().__init__(share, tally, busy)
        self._mirrored, self._places = records, [at for step in share.steps for _, _, at in step.receives]

    def post(self, full: bool) -> None:
        """Send, and ask for what is to come, once the header is on the card."""
        self._mirrored.push()
        super().post(full)

    def headers(self) -> Sequence[memoryview]:
        """Give the headers that came, from the card."""
        self._mirrored.pull(self._places)
        return super().headers()
