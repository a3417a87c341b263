"""Cards of one host that read each other's memory: the plan "p2p".

Each rank leaves its state in memory of its card that the cards of the others have mapped. Headers go as ever; then each
card merges all states in rank order, in one launch, straight out of the others' memory. Whether cards can do that is
not asked of the driver, whose yes has been wrong on consumer cards: before the first state, each card reads patterns
from every other's by the very kernel that will merge, and the host compares what came.

Nothing here has run on a card yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from treeattn.arguments.devices import DeviceView
from treeattn.errors import BackendError
from treeattn.execution.agreement import Header
from treeattn.execution.executor import Exchange
from treeattn.execution.tally import Tally
from treeattn.execution.window import Window
from treeattn.gpu.cards import NAP, Consult, Wait, reasons_of, refuse_wrong_bytes, this_card
from treeattn.planning.plan import Plan
from treeattn.state import PartialState
from treeattn.steps.lanes import IN_FLIGHT
from treeattn.transports.base import Bytes, Transport
from treeattn.wire_form import WireForm

__all__ = ["PeerCard", "PeerExchange", "Peers", "open_peers"]

STATE_BYTES = 2**20
"""Room for a state in each slot; larger ones go by messages."""

SLOTS = 2 * (1 + IN_FLIGHT)
"""Two for each session that a communicator may have, which takes them in turn."""

ROOM = SLOTS * STATE_BYTES
PATTERN = (1, 16, 1, STATE_BYTES // 64)


class PeerCard(Protocol):
    """What a rank's backend does towards reading other cards' memory: part of a GPU backend's ``ops``."""

    def export(self, size: int) -> tuple[Any, bytes]:
        """Allocate bytes that other processes' cards can map; give them, and the name under which they do."""

    def attach(self, name: bytes, size: int) -> Any:
        """Map what another process on this host has exported."""

    def detach(self, memory: Any) -> None:
        """Unmap it."""

    def merge(self, out: Any, sources: list[Any]) -> None:
        """Merge packed states, on the card."""

    def mark(self) -> Callable[[], bool]:
        """Give a function that tells whether what was started on the current stream so far is done."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate a packed state."""

    def to_host(self, packed: Any, out: Bytes) -> None:
        """Copy to the host."""

    def from_host(self, data: Bytes, packed: Any) -> None:
        """Copy from the host."""


class Peers:
    """The cards of one host's ranks, each with memory that the others have mapped.

    Parameters
    ----------
    card : PeerCard
        This rank's.
    memories : sequence of device bytes
        By rank, `ROOM` bytes each.
    rank : int
    wait : callable
        Of the transport: waits until a function says so, or raises at the deadline.
    meet : callable
        Returns when every rank has called it.
    """

    def __init__(self, card: Any, memories: Sequence[Any], rank: int, wait: Wait, meet: Callable[[], object]) -> None:
        self.card, self.rank, self._memories, self._wait_for, self._meet = card, rank, list(memories), wait, meet
        self._regions: dict[Any, Region] = {}

    def exchange(
        self, session: Any, plan: Plan, transport: Transport, window: Window | None, form: WireForm, tally: Tally
    ) -> Exchange:
        """Make the exchange of a session; every rank makes those of its sessions in the same order."""
        common = plan, transport, window, form, tally
        if math.prod(form.shape) * np.dtype(form.dtype).itemsize > STATE_BYTES:
            return Exchange(*common)
        region = self._regions.setdefault(session, Region(self, len(self._regions)))
        return PeerExchange(region, *common)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Ask until ``ready()``, never by a call that blocks."""
        self._wait_for(ready, partial(time.sleep, NAP))

    def slots(self, number: int, shape: tuple[int, ...]) -> list[Any]:
        """View a slot of every rank's memory as a packed state, by rank."""
        start, strides = number * STATE_BYTES, [4 * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        return [
            DeviceView(memory[start : start + STATE_BYTES], dtype="float32", shape=shape, strides=strides)
            for memory in self._memories
        ]

    def leave_patterns(self) -> None:
        """Write to the first two slots what the others' cards will look for."""
        for number in (0, 1):
            data, start = _pattern(self.rank, number).view(np.uint8).reshape(-1), number * STATE_BYTES
            self.card.from_host(data, self._memories[self.rank][start : start + data.size])

    def wrong_ranks(self) -> list[int]:
        """Let this card read every rank's patterns, and name the ranks whose came otherwise."""
        read, found = self.card.empty(PATTERN, "float32"), np.empty(PATTERN, np.float32)
        wrong = set()
        for number in (0, 1):
            for rank, slot in enumerate(self.slots(number, PATTERN)):
                self.card.merge(read, [slot])  # of one state alone, the bits are kept
                self.card.to_host(read, found.view(np.uint8).reshape(-1))
                if not np.array_equal(found, _pattern(rank, number)):
                    wrong.add(rank)
        return sorted(wrong)

    def free(self) -> None:
        """Unmap the others' memory; returns when all have done so, and this rank's may go. Collective."""
        for region in self._regions.values():
            region.settle()
        for rank, memory in enumerate(self._memories):
            if rank != self.rank:
                self.card.detach(memory)
        self._meet()

    def abort(self) -> None:
        """Leave everything as it is: cards that are lost may still read it."""


class Region:
    """The two slots of one session, taken in turn.

    A rank writes to a slot again when nobody reads what it held two uses ago: it has heard all others begin the use
    after that, and each waited for its own reading before it began.
    """

    def __init__(self, peers: Peers, number: int) -> None:
        self.peers, self._number, self.use = peers, number, 0
        self._started: list[Callable[[], bool]] = []

    def slots(self, use: int, shape: tuple[int, ...]) -> list[Any]:
        """View every rank's slot for a use."""
        return self.peers.slots(2 * self._number + use % 2, shape)

    def started(self) -> None:
        """Take note of what was just started on the current stream."""
        self._started.append(self.peers.card.mark())

    def settle(self) -> None:
        """Wait for what was started, on whatever stream."""
        while self._started:
            self.peers.wait(self._started[0])
            del self._started[0]


class PeerExchange(Exchange):
    """One plan for headers, and states in memory that all cards read."""

    with_payloads = False

    def __init__(self, region: Region, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._region = region

    def load(self, state: PartialState) -> None:
        """Copy this rank's state, which has to be on its card, to where the others will read it."""
        if isinstance(state._packed, np.ndarray):
            raise BackendError(f"plan 'p2p' merges states on cards, and this one of {state.ops.name!r} is on the host")
        region = self._region
        own = region.slots(region.use + 1, self.form.shape)[region.peers.rank]
        state.ops.merge(own, [state._packed])
        region.started()

    def begin(self, own: Header) -> None:
        """Tell the others, when the state is there and what was read for the last use has been."""
        self._region.settle()
        super().begin(own)

    def ran(self) -> None:
        """Go on to the next slot, which every rank does after every plan."""
        super().ran()
        self._region.use += 1

    def _store(self, out: PartialState) -> None:
        """Merge, in rank order, what lies on all cards."""
        out.ops.merge(out._packed, self._region.slots(self._region.use, self.form.shape))
        self._region.started()


def _pattern(rank: int, number: int) -> npt.NDArray[np.float32]:
    """Give a state of a rank with which no other is confused."""
    rows = np.random.default_rng((rank, number)).standard_normal(PATTERN, dtype=np.float32)
    rows[..., -2] = np.abs(rows[..., -2]) + 1
    return rows


def open_peers(rank: int, hosts: Sequence[str], consult: Consult, wait: Wait, meet: Callable[[], object]) -> Peers:
    """Map the memory of all ranks' cards into each other; collective.

    Raises
    ------
    BackendError
        On every rank: ranks are on several hosts, a rank has no card, a card could not be mapped, or bytes came
        otherwise than they were.
    """
    card, reasons = this_card()
    if problems := reasons_of(consult("TreeComm", (), {"reasons": reasons}), hosts):
        raise BackendError(f"plan 'p2p' can't be used: {'; '.join(problems)}")
    if len(set(hosts)) > 1:
        names = ", ".join(dict.fromkeys(hosts))
        raise BackendError(f"plan 'p2p' can't be used: it is for the ranks of one host, and these are on {names}")
    with ExitStack() as opened:
        peers = Peers(card, _mapped(card, rank, consult, opened), rank, wait, meet)
        _told(consult, peers.leave_patterns)
        refuse_wrong_bytes("p2p", _told(consult, peers.wrong_ranks), "use another plan")
        opened.pop_all()
    return peers


def _mapped(card: Any, rank: int, consult: Consult, opened: ExitStack) -> list[Any]:
    """Export this rank's memory, and map the others', which ``opened`` unmaps; by rank, and collective."""
    memories: dict[int, Any] = {}

    def export() -> str:
        memories[rank], name = card.export(ROOM)
        return str(name.hex())

    names = _told(consult, export)

    def attach() -> None:
        for other, name in enumerate(names):
            if other != rank:
                memories[other] = card.attach(bytes.fromhex(name), ROOM)
                opened.callback(card.detach, memories[other])

    _told(consult, attach)
    return [memories[each] for each in range(len(names))]


def _told(consult: Consult, work: Callable[[], Any]) -> list[Any]:
    """Do this rank's work, and give what every rank's came to; an error on any is raised on all, when all are done."""
    found, error = None, None
    try:
        found = work()
    except Exception as failed:  # whatever it is, the others must hear of it before it is raised here
        error = failed
    return [each["found"] for each in consult("TreeComm", (), {"found": found}, error)]
