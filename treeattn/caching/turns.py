"""Whose turn it is: any number of threads may read at once what one thread at a time may change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from treeattn.errors import CommError

__all__ = ["Turns"]

T = TypeVar("T")


class Turns:
    """Tells threads that come in each other's way so, in place of letting them wait.

    Ranks whose threads waited for each other would do so in different orders.

    Parameters
    ----------
    name : str
        What is used, in errors.

    Examples
    --------
    >>> turns = Turns("cache")
    >>> turns.read(lambda refusal: (refusal, turns.change(lambda refusal: refusal)))
    (None, CommError('this cache is in use by another thread'))
    >>> turns.change(lambda refusal: refusal)
    """

    def __init__(self, name: str) -> None:
        self._text = f"this {name} is in use by another thread"
        self._changing = threading.Lock()
        self._readers: set[object] = set()

    def read(self, work: Callable[[CommError | None], T]) -> T:
        """Give what ``work`` gives, which gets None, or, while a thread changes something, the error to raise."""
        reader = object()
        try:
            self._readers.add(reader)  # before looking: of two that begin at once, one at least sees the other
            result = work(self._refusal(self._changing.locked()))
        finally:
            self._readers.discard(reader)
        return result

    def change(self, work: Callable[[CommError | None], T]) -> T:
        """Do the same for what is to be changed; any other thread's turn is an error."""
        took: list[bool] = []
        try:
            took.extend(map(self._changing.acquire, (False,)))  # in one call, which Ctrl-C can't come between
            result = work(self._refusal(False in took or bool(self._readers)))
        finally:
            if True in took:
                self._changing.release()
        return result

    def _refusal(self, refused: bool) -> CommError | None:
        return CommError(self._text) if refused else None
