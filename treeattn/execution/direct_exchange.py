"""Following a plan with messages from card to card, receives started a step ahead."""

from __future__ import annotations

from typing import Any

from treeattn.execution.agreement import Header
from treeattn.execution.direct import DeviceRecords, DirectOps
from treeattn.execution.executor import Exchange
from treeattn.execution.pieces import Pieces
from treeattn.execution.tally import Tally
from treeattn.planning.plan import Plan
from treeattn.state import PartialState
from treeattn.transports.base import Transport
from treeattn.wire_form import WireForm

__all__ = ["DirectExchange"]


class DirectExchange(Exchange):
    """Two sets of records, taken in turn: into one may be received while kernels still read the other.

    Parameters
    ----------
    plan : Plan
        Of one piece, without rounds in windows.
    transport : Transport
        Of this plan alone.
    form : WireForm
    tally : Tally
    ops : DirectOps
        Of the card.
    """

    def __init__(self, plan: Plan, transport: Transport, form: WireForm, tally: Tally, ops: DirectOps) -> None:
        self._other: tuple[Any, ...] = ()
        self._turned = False
        super().__init__(plan, transport, None, form, tally, ops)
        first = self._pieces, self.rounds, self._ahead
        self._pieces = Pieces([DeviceRecords(plan.records(transport.rank, 0), form, ops)], form)
        self.rounds = self._prepare()
        second = self._pieces, self.rounds, [request for each in self.rounds for request in each.ahead]
        (self._pieces, self.rounds, self._ahead), self._other = first, second

    def load(self, state: PartialState) -> None:
        """Take this rank's state to the set whose turn it is."""
        self._turn()
        super().load(state)

    def begin(self, own: Header) -> None:
        """Start to follow the plan, with that set."""
        self._turn()
        super().begin(own)

    def start_ahead(self) -> None:
        """Start receives of the next step, into the set of the last one, once no kernel reads it."""
        if not self._other:  # nothing has been received yet
            super().start_ahead()
            return
        pieces, _, ahead = self._other
        _records(self._pieces).leave()
        _records(pieces).settle()
        if ahead:
            self.transport.start(ahead)
        self._turned = True

    def _turn(self) -> None:
        """Take the other set, at the first thing that a step does."""
        if self._turned:
            mine = self._pieces, self.rounds, self._ahead
            (self._pieces, self.rounds, self._ahead), self._other = self._other, mine
            self._turned = False


def _records(pieces: Pieces) -> DeviceRecords:
    whole = pieces.whole
    assert isinstance(whole, DeviceRecords), "messages are in a card's memory"
    return whole
