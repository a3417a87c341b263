"""Following a plan: rounds of messages and of windows, for a rank that knows nothing about topology."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any, TypeAlias

import numpy.typing as npt

from treeattn.execution.agreement import Header
from treeattn.execution.direct import DeviceRecords, DirectOps, DirectRound
from treeattn.execution.pieces import Pieces, records_of
from treeattn.execution.records import Records, Share, places_of
from treeattn.execution.rounds import MessageRound
from treeattn.execution.tally import Tally
from treeattn.execution.window import Window
from treeattn.execution.window_round import WindowRound
from treeattn.planning.plan import Plan, Usage
from treeattn.state import PartialState
from treeattn.transports.base import Meanwhile, Transport, nothing
from treeattn.wire_form import WireForm

__all__ = ["Exchange"]

Array: TypeAlias = npt.NDArray[Any]


class Exchange:
    """One plan at one payload size on one rank: buffers allocated once, requests prepared once.

    Receives are started a step ahead, so that what comes finds its place whenever it comes.

    Parameters
    ----------
    plan : Plan
    transport : Transport
        Of this plan alone.
    window : Window or None
        Of this rank's host; plans with rounds in windows need one.
    form : WireForm
        Of the states.
    tally : Tally
        Counts what is sent.
    direct : DirectOps, optional
        Of the card in whose memory messages are to be; the plan has no rounds in windows then.
    pinnable : bool
        Whether states come from a card through host memory, which its driver may want to pin.
    """

    with_payloads = True
    """Whether states travel with their headers."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        window: Window | None,
        form: WireForm,
        tally: Tally,
        direct: DirectOps | None = None,
        pinnable: bool = False,
    ) -> None:
        self.plan, self.transport, self.window, self._tally = plan, transport, window, tally
        counts = [plan.records(transport.rank, piece) for piece in range(plan.pieces)]
        on_card: list[Records] = [] if direct is None else [DeviceRecords(counts[0], form, direct)]
        self._pieces = Pieces(on_card or records_of(counts, form, pinnable), form, pinnable)
        self.usage = Usage(self._pieces.nbytes)
        self.rounds = self._prepare()
        self._ahead = [request for each in self.rounds for request in each.ahead]
        self._cost = len(plan.rounds), plan.rounds_between
        self._header, self._bytes, self._at = Header(0, 0, 0, 0), b"", len(self.rounds)
        self.start_ahead()

    @property
    def records(self) -> Records:
        """Where the state is packed and unpacked, and, of a plan in one piece, what comes."""
        return self._pieces.whole

    @property
    def parts(self) -> list[Records]:
        """Records of each piece."""
        return self._pieces.parts

    @property
    def on_host(self) -> bool:
        """Whether states travel in the rounds of the plan, from and to host memory."""
        return self.with_payloads and not isinstance(self.records, DeviceRecords)

    @property
    def form(self) -> WireForm:
        """Form of the states."""
        return self._pieces.whole.form

    def _prepare(self) -> list[MessageRound | WindowRound]:
        steps, parts, pieces = self.plan.steps(self.transport.rank), self._pieces.parts, range(self.plan.pieces)
        shared = [number for number, each in enumerate(self.plan.rounds) if each.shared]
        filling = [step for step in steps if step.number not in shared or not step.merges]  # others merge in the window
        places = Counter((step.piece, place) for step in filling for each in step.receives for place in places_of(each))
        busy = {*((piece, 0) for piece in pieces), *(place for place, times in places.items() if times > 1)}
        self._uses = len(shared)
        rounds: list[MessageRound | WindowRound] = []
        for number, found in groupby(steps, key=lambda step: step.number):
            share = Share(list(found), parts, len(self.plan.rounds), self.transport)
            if number in shared:
                assert self.window is not None, f"rank {self.transport.rank} has no window"
                ordinal = shared.index(number) + 1
                rounds.append(WindowRound(share, self.window, ordinal))
            elif isinstance(parts[0], DeviceRecords):
                rounds.append(DirectRound(share, parts[0], self._tally, busy))
            else:
                rounds.append(MessageRound(share, self._tally, busy))
        return rounds

    def load(self, state: PartialState) -> None:
        """Take this rank's state, before `run`."""
        first = self.rounds[0] if self.rounds else None
        if not isinstance(first, WindowRound) or not first.take(state):
            self._pieces.load(state)

    def run(self, own: Header) -> Header:
        """Follow the plan and give the header that all ranks' headers combine to: `begin`, and `complete`."""
        self.begin(own)
        return self.complete()

    def begin(self, own: Header) -> None:
        """Start to follow the plan.

        A rank whose header so far is not clean sends headers alone: its payload, if it has one, is worth nothing
        to anybody. Receives have room for a full message in any case.

        Parameters
        ----------
        own : Header
            This rank's; a status means that nothing was loaded.
        """
        self._header, self._bytes, self._at = own, own.pack(), 0
        self._pieces.write_header(self._bytes)
        self._post()

    def advance(self) -> None:
        """Follow the plan as far as it goes without waiting."""
        while not self.over and self.rounds[self._at].arrived():
            self._go_on(nothing)

    @property
    def over(self) -> bool:
        """Whether the plan was followed to its end."""
        return self._at == len(self.rounds)

    def complete(self, meanwhile: Meanwhile = nothing) -> Header:
        """Follow the plan to its end; ``meanwhile()`` is called during waits."""
        while not self.over:
            self._go_on(meanwhile)
        return self._header

    def resume(self, own: Header, at: int) -> None:
        """Take over a step from a shortcut: rounds before number ``at`` of this rank's are over, and that has begun.

        Record 0 of each piece has this rank's header already, or what came in its place, at which nobody has looked.
        """
        self._header, self._bytes, self._at = own, own.pack(), at

    def _post(self) -> None:
        if not self.over:
            self.rounds[self._at].post(self.with_payloads and self._header.status == 0)
            return
        self.start_ahead()
        self.ran()

    def start_ahead(self) -> None:
        """Start receives of the next step."""
        if self._ahead:
            self.transport.start(self._ahead)

    def _go_on(self, meanwhile: Meanwhile) -> None:
        """End one round and start the next."""
        at, before = self.rounds[self._at], self._header
        at.wait(meanwhile)
        for received in at.headers():
            if received != self._bytes:
                self._header = self._header.combine(Header.unpack(received))
        if self._header is not before:
            self._bytes = self._header.pack()
            self._pieces.write_header(self._bytes)
        if self.with_payloads and self._header.status == 0:
            at.merge()
        self._at += 1
        self._post()

    def ran(self) -> None:
        """Take note that the plan was followed once."""
        if self.window is not None:
            self.window.uses.value += self._uses
        self._tally.rounds(*self._cost)
        self._tally.usage = self.usage

    def result(self, state: PartialState, out: PartialState | None) -> PartialState | None:
        """Give the merged state, after a clean `run`, to the ranks that are to have it."""
        if self.plan.root not in (None, self.transport.rank):
            return None
        if out is None:
            out = state._like(state.ops.empty(self.form.shape, self.form.dtype))
        self._store(out)
        return out

    def _store(self, out: PartialState) -> None:
        """Write the merged state to ``out``."""
        self._pieces.store(out)
