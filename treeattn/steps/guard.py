"""Whether a communicator may be used now: one operation at a time, not after it broke, not after it was freed."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    lock : threading.Lock
        Held during an operation of several ranks.
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

    __slots__ = ("_alone", "lock", "reason")

    def __init__(self, ranks: int) -> None:
        self.lock, self._alone = threading.Lock(), ranks == 1
        self.reason: str | None = None

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run an operation, and give what it returns.

        Ctrl-C may come between any two steps of this, and leaves the lock as it was found: what takes it also notes
        that, in one call of C, and what frees it is one.
        """
        took: list[bool] = []
        try:
            if not self._alone:
                took.extend(map(self.lock.acquire, (False,)))
            if self.reason is not None:
                raise CommError(self.reason)
            if False in took:
                raise CommError("this communicator is in use, by another thread or in the middle of an operation")
            return function(*arguments)
        finally:
            if True in took:
                self.lock.release()

    def close(self, reason: str) -> None:
        """Refuse every operation from here on, with this reason; the first reason stays."""
        self.reason = self.reason or reason
