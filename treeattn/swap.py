"""The shortest way of a step: one compiled call, for ranks of one host that do again what they did last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.agreement import Attempt, Header, Signature
from treeattn.channel import Channel
from treeattn.executor import Exchange
from treeattn.rounds import WindowRound
from treeattn.state import PartialState
from treeattn.transport import Transport
from treeattn.window import STATE_BYTES, Window, compiled

__all__ = ["Swap"]


class Swap:
    """An exchange whose plan is one round in a window, of states in host memory; calling it is an allreduce.

    Parameters
    ----------
    exchange : Exchange
    channel : Channel
    state : PartialState
        What was merged last: only states like it are.
    signature : Signature
        What was agreed on.
    otherwise : callable
        Takes (attempt, out) and ends the step where a swap finds that not all is well.
    """

    def __init__(
        self,
        exchange: Exchange,
        channel: Channel,
        state: PartialState,
        signature: Signature,
        otherwise: Callable[[Attempt, PartialState | None], PartialState | None],
    ) -> None:
        packed, window, (only,) = state._packed, exchange.window, exchange.rounds
        assert window is not None, "a swap is one in a window"
        assert isinstance(only, WindowRound), "a swap is one in a window"
        self._exchange, self._channel, self._round, self._otherwise = exchange, channel, only, otherwise
        self._guard, self._enter, self._leave = channel.guard, channel.guard.lock.acquire, channel.guard.lock.release
        self._tally, self._usage = channel.tally, exchange.usage
        self._ops, self._shape, self._dtype = state.ops, packed.shape, packed.dtype
        self._run: Callable[..., int] = compiled().swap_at(exchange.form)
        self._header = np.zeros(4, np.int64)
        self._header.view(np.uint8)[:] = np.frombuffer(Header(0, 0, signature.digest, 0).pack(), np.uint8)
        self._check, self._checked = self._header.view(np.uint64)[3:], 0
        self._room = compiled().room(exchange.transport.size, exchange.form)
        self._slots, self._own = self._addresses(window, exchange.transport)
        self.signature, self.is_allreduce = signature, signature.operation == "allreduce"
        self._last: tuple[Any, Any] = signature, signature  # which nobody passes

    def _addresses(self, window: Window, transport: Transport) -> tuple[Any, Any]:
        """Give the slots of all ranks, and what is this rank's own: see `treeattn.kernels.window.swap_at`."""
        ranks = range(transport.size)
        slots = [window.address(rank, use) for use in (0, 1) for rank in ranks]
        fits = np.prod(self._shape) * self._dtype.itemsize <= STATE_BYTES  # a state is longer than its rows of 16 bit
        even, odd = (window.common(use) if fits else 0 for use in (0, 1))
        own = compiled().Own(
            header=self._header.ctypes.data,
            room=self._room.ctypes.data,
            spins=window.spins,
            yields=window.yields,
            clears=even != 0 and transport.rank == 0,
            steps=self._channel.steps.address,
            uses=window.uses.address,
            rounds=self._tally.all_rounds.address,
            even_slot=slots[transport.rank],
            odd_slot=slots[transport.size + transport.rank],
            even_common=even,
            odd_common=odd,
        )
        return np.array([*slots, *ranks], np.int64), np.array(own, np.int64)

    @staticmethod
    def possible(exchange: Exchange, state: PartialState | None, signature: Signature | None) -> bool:
        """Whether an exchange, after it was run with ``state``, is one."""
        if signature is None or signature.root is not None or state is None:
            return False
        rounds = exchange.plan.rounds
        return len(rounds) == 1 and rounds[0].shared and isinstance(state._packed, np.ndarray)

    def serves(self, exchange: Exchange, state: PartialState, signature: Signature) -> bool:
        """Whether this swap is that exchange's, of such states."""
        return exchange is self._exchange and signature is self.signature and self._fits(state)

    def __call__(self, state: Any, out: Any, attempt: Attempt | None = None) -> PartialState | None:
        """Merge, and give the result; None where this call is not like the last, or the communicator not free.

        Parameters
        ----------
        state : PartialState
        out : PartialState or None
        attempt : Attempt, optional
            The call, where more than its state and signature matters.
        """
        last = self._last
        if (state is not last[0] or out is not last[1]) and not self._takes(state, out):
            return None
        if self._guard.reason is not None or not self._enter(False):
            return None
        try:
            merged: PartialState = state.like(np.empty(self._shape, self._dtype)) if out is None else out
            check = 0 if attempt is None else attempt.check
            if check != self._checked:
                self._check[0] = self._checked = check
            if self._run(state._packed, merged._packed, self._slots, self._own) == 0:
                self._tally.usage = self._usage
                return merged
            self._round.published = True
            return self._otherwise(attempt or Attempt(self.signature, state, None), out)
        except KeyboardInterrupt as error:
            self._channel.break_off(error)
            raise
        finally:
            self._leave()

    def _takes(self, state: Any, out: Any) -> bool:
        """Whether these are states like those that were agreed on; the next call with the same ones need not ask."""
        if not self._fits(state) or not (out is None or self._fits(out)):
            return False
        if out is not None:
            self._last = state, out
        return True

    def _fits(self, state: Any) -> bool:
        """Whether this is a state like those that were agreed on."""
        if type(state) is not PartialState or state.ops is not self._ops:
            return False
        packed = state._packed
        return packed.shape == self._shape and packed.dtype == self._dtype and packed.flags.carray
