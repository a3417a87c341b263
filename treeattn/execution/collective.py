"""The plan "mpi": MPI's own collective merges the states, by an operator of compiled code.

Headers go by messages, as ever, before that: a rank with an error is heard of first, so that nobody enters a collective
which not all will enter. Then it is one all-reduce, or one reduce where only a root wants the result. MPI decides in
which order it merges.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.errors import BackendError
from treeattn.execution.agreement import Header
from treeattn.execution.executor import Exchange
from treeattn.state import PartialState
from treeattn.state_ops import StateOps
from treeattn.transports.base import Meanwhile, Transport, nothing
from treeattn.wire_form import operator

__all__ = ["CollectiveExchange", "check_collective"]


def check_collective(transport: Transport) -> None:
    """Refuse what can't take an operator of ours.

    Raises
    ------
    BackendError
        There is a reason.
    """
    if found := transport.operator_reasons():
        raise BackendError(f"plan 'mpi' can't be used: {'; '.join(found)}")


class CollectiveExchange(Exchange):
    """One plan for headers, and one collective for states."""

    with_payloads = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ops: StateOps | None = None
        self._sent, self._merged = (np.zeros(self.form.nbytes, np.uint8) for _ in range(2))
        rows = self._sent, self._merged, self.form.row_bytes
        self._reduction, self._loaded = self.transport.row_reduction(*rows, operator(self.form)), False

    def load(self, state: PartialState) -> None:
        """Take this rank's state, which has to be on the host."""
        if not isinstance(state._packed, np.ndarray):
            raise BackendError(f"plan 'mpi' merges states on the host, and this one of {state.ops.name!r} is on a card")
        if state.ops is not self._ops:
            self._pack = state.ops.prepare_pack(self._sent, self.form)
            self._unpack = state.ops.prepare_unpack(self._merged, self.form)
            self._ops = state.ops
        self._pack(state._packed)
        self._loaded = True

    def complete(self, meanwhile: Meanwhile = nothing) -> Header:
        """Follow the plan with headers alone, and, where all is well, let MPI merge the states."""
        header = super().complete(meanwhile)
        if header.status == 0 and self._loaded:
            self._tally.collectives += 1
            self.transport.wait([self._reduction.start(self.plan.root)], meanwhile)
        self._loaded = False
        return header

    def _store(self, out: PartialState) -> None:
        """Unpack what was merged."""
        self._unpack(out._packed)
