"""Whether a communicator may be used now: one operation at a time, not after it broke, not after it was freed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np

from treeattn.errors import CommError

__all__ = ["Guard"]

T = TypeVar("T")

_TAKEN, _CLOSED = 0, 1


class Guard:
    """Runs the operations of one communicator, or refuses to.

    An operation is run by `run`, or, where it is a short way through one, takes its turn and ends it: compiled steps
    at ``address`` (`treeattn.kernels.turns`), and others by `take_turn` and `end_turn`.

    Parameters
    ----------
    ranks : int
        How many there are. What one process does alone meets nobody: there, threads may run operations at once.

    Attributes
    ----------
    free : list of bool
        Its one item is taken out for an operation of several ranks, and put back: to do so is faster than with a lock.
    reason : str or None
        Why every operation is refused from here on.
    address : int
        Of what compiled steps ask: whether a short way has its turn, whether there is a reason, and where ``free`` is.

    Examples
    --------
    >>> guard = Guard(2)
    >>> guard.run(max, 3, 4)
    4
    >>> guard.run(guard.run, max, 3, 4)
    Traceback (most recent call last):
    treeattn.errors.CommError: this communicator is in use, by another thread or in the middle of an operation
    >>> guard.close("this communicator was freed")
    >>> guard.run(max, 3, 4)
    Traceback (most recent call last):
    treeattn.errors.CommError: this communicator was freed
    """

    __slots__ = ("_alone", "_cells", "address", "free", "reason")

    def __init__(self, ranks: int) -> None:
        self.free, self._alone = [True], ranks == 1
        self.reason: str | None = None
        self._cells = np.array([0, 0, id(self.free)], np.int64)
        self.address = int(self._cells.ctypes.data)

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run an operation, and give what it returns.

        Ctrl-C may come between any two steps of this, and leaves ``free`` as it was found: what takes its item also
        notes that, in one call of C, and what puts it back is one.
        """
        took: list[bool] = []
        try:
            if not self._alone:
                self._take(took)
            if self.reason is not None:
                raise CommError(self.reason)
            if not self._alone and (not took or self._cells[_TAKEN]):
                raise CommError("this communicator is in use, by another thread or in the middle of an operation")
            return function(*arguments)
        finally:
            self.free.extend(took)

    def _take(self, took: list[bool]) -> None:
        with suppress(IndexError):
            took.extend(map(self.free.pop, (0,)))

    def take_turn(self) -> bool:
        """Begin a short way; false where the communicator is in use, or where every operation is refused."""
        took: list[bool] = []
        try:
            self._take(took)
            if not took or self.reason is not None or self._cells[_TAKEN]:
                return False
            self._cells[_TAKEN] = 1
            return True
        finally:
            self.free.extend(took)

    def end_turn(self) -> None:
        """End it."""
        self._cells[_TAKEN] = 0

    def close(self, reason: str) -> None:
        """Refuse every operation from here on, with this reason; the first reason stays."""
        self.reason = self.reason or reason
        self._cells[_CLOSED] = 1
