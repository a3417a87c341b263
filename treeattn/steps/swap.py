"""The shortest way of a step: one compiled call, for ranks of one host."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.execution.agreement import Attempt
from treeattn.execution.window import compiled
from treeattn.execution.window_round import WindowRound
from treeattn.planning.plan import Plan
from treeattn.state import PartialState
from treeattn.steps.shortcut import Run, Shortcut

__all__ = ["Swap"]

Array: TypeAlias = npt.NDArray[Any]


class Swap(Shortcut):
    """The way through a plan that is one round in a window; parameters are those of `Shortcut`."""

    @staticmethod
    def possible(plan: Plan) -> bool:
        """Whether this is a way through a plan."""
        return len(plan.rounds) == 1 and plan.rounds[0].shared

    def _prepare(self) -> tuple[Run, Array]:
        """Give the compiled step, and what is this rank's own: see `treeattn.kernels.window.swap_at`."""
        (self._round,) = self._exchange.rounds
        window, transport, form = self._exchange.window, self._exchange.transport, self._exchange.form
        assert window is not None, "a swap is one in a window"
        ranks, tally = range(transport.size), self._channel.tally
        slots = [window.address(rank, use) for use in (0, 1) for rank in ranks]
        nbytes = int(np.prod(self._shape)) * self._dtype.itemsize  # a state is longer than its rows of 16 bit
        even, odd = (window.common(use, nbytes) for use in (0, 1))
        self._room, self._slots = compiled().room(transport.size, form), np.array([*slots, *ranks], np.int64)
        own = compiled().Own(
            header=self._header.ctypes.data,
            room=self._room.ctypes.data,
            spins=window.spins,
            yields=window.yields,
            parts=window.parts,
            steps=self._channel.steps.address,
            uses=window.uses.address,
            rounds=tally.all_rounds.address,
            peak_bytes=tally.peak_bytes.address,
            products=tally.products.address,
            taken_bytes=self._exchange.usage.peak_bytes,
            even_slot=slots[transport.rank],
            odd_slot=slots[transport.size + transport.rank],
            even_common=even,
            odd_common=odd,
            rows=form.rows,
            width=form.width,
            ranks=transport.size,
            guard=self._guard.address,
            slots=self._slots.ctypes.data,
        )
        return compiled().swap_at(form), np.array(own, np.int64)

    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        assert isinstance(self._round, WindowRound), "a swap is one in a window"
        self._round.published = True
        return self._go_on(attempt, out)  # this rank has published
