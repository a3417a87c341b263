"""Errors of calls that send nothing: they wait for the next call that can tell the other ranks."""

from __future__ import annotations

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
        self._error: Exception | None = None

    def put(self, error: Exception) -> None:
        """Keep an error, or raise it."""
        if self._alone:
            raise error
        self._error = self._error or error

    def take(self) -> Exception | None:
        """Give what was kept, once."""
        error, self._error = self._error, None
        return error
