"""Short ways of a step, for ranks that do again what they did last: what they have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.execution.agreement import Attempt, Header, Signature
from treeattn.execution.executor import Exchange
from treeattn.state import PartialState
from treeattn.steps.channel import Channel

__all__ = ["Shortcut"]

Array: TypeAlias = npt.NDArray[Any]


class Shortcut(ABC):
    """A way through an exchange of states in host memory; `merge` is an allreduce.

    It is there for what happens in every step. What it finds to be otherwise it leaves to the exchange, in the middle
    of the step, and on this rank alone: the others can't tell which way a rank has taken.

    Parameters
    ----------
    exchange : Exchange
    channel : Channel
    state : PartialState
        What was merged last: only states like it are.
    signature : Signature
        What was agreed on.
    go_on : callable
        Takes (attempt, out) and ends the step where not all is well.

    Attributes
    ----------
    is_allreduce : bool
        Whether that was `TreeComm.allreduce`.
    """

    def __init__(
        self,
        exchange: Exchange,
        channel: Channel,
        state: PartialState,
        signature: Signature,
        go_on: Callable[[Attempt, PartialState | None], PartialState | None],
    ) -> None:
        self._go_on = go_on
        self._exchange, self._channel, self._tally, self._usage = exchange, channel, channel.tally, exchange.usage
        self._guard, self._enter, self._leave = channel.guard, channel.guard.free.pop, channel.guard.free.append
        self._ops, self._shape, self._dtype = state.ops, state._packed.shape, state._packed.dtype
        self._header = np.zeros(4, np.int64)
        self._header.view(np.uint8)[:] = np.frombuffer(Header(0, 0, signature.digest, 0).pack(), np.uint8)
        self.signature, self.is_allreduce = signature, signature.operation == "allreduce"
        self._last_state: Any = signature  # which nobody passes
        self._last_out: Any = signature
        self._check, self._checked = self._header.view(np.uint64)[3:], 0
        self._run, self._own = self._prepare()
        self._own_at = self._own.ctypes.data

    @abstractmethod
    def _prepare(self) -> tuple[Callable[[int, int, int], int], Array]:
        """Give what runs a whole step and gives 0 if all was well, and the memory that it needs of this rank.

        It takes addresses: those of the array objects of a packed state and of a packed result, and of that memory.
        """

    @abstractmethod
    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """End the step after what the run gave, where that is not 0."""

    def merge(self, state: Any, out: Any, attempt: Attempt | None = None) -> PartialState | None:
        """Merge, and give the result; None where this call is not like the last, or the communicator not free.

        Where ranks outnumber cores, several do in turn on each core what Python does here, each out of caches in which
        the others have been: every attribute counts as often.

        Parameters
        ----------
        state : PartialState
        out : PartialState or None
        attempt : Attempt, optional
            The call, where more than its state and signature matters.
        """
        if (state is not self._last_state or out is not self._last_out) and not self._takes(state, out):
            return None
        if self._guard.reason is not None:
            return None
        found: int | None = 0
        try:
            try:
                entered = self._enter()
            except IndexError:
                return None
            try:
                merged: PartialState = state._like(np.empty(self._shape, self._dtype)) if out is None else out
                check = 0 if attempt is None else attempt.check
                if check != self._checked:
                    self._check[0] = self._checked = check
                found = None
                found = self._run(id(state._packed), id(merged._packed), self._own_at)
                if found == 0:
                    self._tally.usage = self._usage
                    return merged
                return self._otherwise(found, attempt or Attempt(self.signature, state, None), out)
            finally:
                self._leave(entered)
        except BaseException as error:
            if found is None or not isinstance(error, Exception):  # a signal has cut it short
                self._channel.break_off(error)
            raise

    def _takes(self, state: Any, out: Any) -> bool:
        """Whether these are states like those that were agreed on; the next call with the same ones need not ask."""
        if not self._fits(state) or not (out is None or self._fits(out)):
            return False
        if out is not None:
            self._last_state, self._last_out = state, out
        return True

    def _fits(self, state: Any) -> bool:
        """Whether this is a state like those that were agreed on."""
        if type(state) is not PartialState or state.ops is not self._ops:
            return False
        packed = state._packed
        return packed.shape == self._shape and packed.dtype == self._dtype and packed.flags.carray
