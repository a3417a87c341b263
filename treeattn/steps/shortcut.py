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

__all__ = ["BUSY", "NEVER", "Arguments", "Run", "Shortcut"]

Array: TypeAlias = npt.NDArray[Any]

Arguments: TypeAlias = tuple[int, int, int, int]
"""Addresses of the array objects of a packed state and of a packed result, of memory of the rank's own; check word."""

Run: TypeAlias = Callable[[int, int, int, int], int]

NEVER: tuple[Any, Any, Arguments] = object(), object(), (0, 0, 0, 0)
"""States that nobody passes."""

BUSY = -1
"""What a step says that it was not the turn of; as compiled steps do."""


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
    run : callable
        Runs a whole step.
    repeated : tuple
        The last state and result of `TreeComm.allreduce`, which may be passed again, and what `run` takes for them.
        That call does itself what `merge` would. Where ranks outnumber cores, several do in turn on each core what
        Python does in a step, each out of caches in which the others have been: every call in it counts as often.
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
        self._exchange, self._channel = exchange, channel
        self._guard = channel.guard
        self._ops, self._shape, self._dtype = state.ops, state._packed.shape, state._packed.dtype
        self._header = np.zeros(4, np.int64)
        self._header.view(np.uint8)[:] = np.frombuffer(Header(0, 0, signature.digest, 0).pack(), np.uint8)
        self.signature, self.is_allreduce = signature, signature.operation == "allreduce"
        self.run, self._own = self._prepare()
        self._own_at = self._own.ctypes.data
        self.repeated = NEVER

    @abstractmethod
    def _prepare(self) -> tuple[Run, Array]:
        """Give what runs a whole step, and the memory that it needs of this rank.

        It takes `Arguments`, the third of which is the address of that memory. It gives 0 if all was well, and ``BUSY``
        where it is not its turn. Anything else is for `_otherwise`, and its turn is not over.
        """

    @abstractmethod
    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """End the step after what the run gave, where that is not 0."""

    def merge(self, state: Any, out: Any, attempt: Attempt | None = None) -> PartialState | None:
        """Merge, and give the result; None where this call is not like the last, or the communicator not free.

        Parameters
        ----------
        state : PartialState
        out : PartialState or None
        attempt : Attempt, optional
            The call, where more than its state and signature matters.
        """
        if not self._fits(state) or not (out is None or self._fits(out)):
            return None
        merged, arguments = self._with_arguments(state, out, 0 if attempt is None else attempt.check)
        found = None
        try:
            found = self.run(*arguments)
            return merged if found == 0 else self.go_on(found, state, out, attempt)
        except BaseException as error:
            self.fail(found, error)
            raise

    def go_on(
        self, found: int, state: PartialState, out: PartialState | None, attempt: Attempt | None = None
    ) -> PartialState | None:
        """Give what `merge` gives, where the run gave this and not 0."""
        if found == BUSY:
            return None
        merged = self._otherwise(found, attempt or Attempt(self.signature, state, None), out)
        self._guard.end_turn()
        return merged

    def fail(self, found: int | None, error: BaseException) -> None:
        """Leave things in order after an error in the run, or, if that has given something, after it."""
        if found is None or not isinstance(error, Exception):  # a signal has cut it short
            self._channel.break_off(error)
        if found != BUSY:
            self._guard.end_turn()

    def _with_arguments(
        self, state: PartialState, out: PartialState | None, check: int
    ) -> tuple[PartialState, Arguments]:
        """Give what is to hold the result, and what a step takes; the next call with the same states need not ask."""
        merged: PartialState = state._like(np.empty(self._shape, self._dtype)) if out is None else out
        arguments = id(state._packed), id(merged._packed), self._own_at, check
        if out is not None and self.is_allreduce:
            self.repeated = state, out, arguments
        return merged, arguments

    def _fits(self, state: Any) -> bool:
        """Whether this is a state like those that were agreed on."""
        if type(state) is not PartialState or state.ops is not self._ops:
            return False
        packed = state._packed
        return packed.shape == self._shape and packed.dtype == self._dtype and packed.flags.carray
