"""Errors of calls that send nothing: they wait for the next call that can tell the other ranks."""

from __future__ import annotations

from collections import deque

__all__ = ["Deferral"]


class Deferral:
    """The first error since the last collective call.

    Parameters
    ----------
    alone : bool
        Whether there is nobody to tell, so that errors are raised at once.

    Examples
    --------
    >>> waiting = Deferral(alone=False)
    >>> waiting.put(ValueError("first"))
    >>> waiting.put(ValueError("second"))
    >>> waiting.take(), waiting.take()
    (ValueError('first'), None)
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._errors: deque[Exception] = deque(maxlen=1)

    def put(self, error: Exception) -> None:
        """Keep an error, or raise it."""
        if self._alone:
            raise error
        if not self._errors:
            self._errors.append(error)

    def take(self) -> Exception | None:
        """Give what was kept, once."""
        try:
            return self._errors.popleft()  # in one step: another thread may put one in the meantime
        except IndexError:
            return None
