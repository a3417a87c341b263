"""Whether a communicator may be used now: one operation at a time, not after it broke, not after it was freed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from treeattn.errors import CommError

__all__ = ["Guard"]

T = TypeVar("T")


class Guard:
    """Runs the operations of one communicator, or refuses to.

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

    __slots__ = ("_alone", "free", "reason")

    def __init__(self, ranks: int) -> None:
        self.free, self._alone = [True], ranks == 1
        self.reason: str | None = None

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run an operation, and give what it returns.

        Ctrl-C may come between any two steps of this, and leaves ``free`` as it was found: what takes its item also
        notes that, in one call of C, and what puts it back is one.
        """
        took: list[bool] = []
        try:
            if not self._alone:
                with suppress(IndexError):
                    took.extend(map(self.free.pop, (0,)))
            if self.reason is not None:
                raise CommError(self.reason)
            if not took and not self._alone:
                raise CommError("this communicator is in use, by another thread or in the middle of an operation")
            return function(*arguments)
        finally:
            self.free.extend(took)

    def close(self, reason: str) -> None:
        """Refuse every operation from here on, with this reason; the first reason stays."""
        self.reason = self.reason or reason
