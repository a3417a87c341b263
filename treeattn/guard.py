"""Whether a communicator may be used now: one operation at a time, not after it broke, not after it was freed."""

from __future__ import annotations

import threading

from treeattn.errors import CommError

__all__ = ["Guard"]


class Guard:
    """Enter it for the time of one operation.

    Examples
    --------
    >>> guard = Guard()
    >>> with guard:
    ...     pass
    >>> guard.close("this communicator was freed")
    >>> with guard:
    ...     pass
    Traceback (most recent call last):
    treeattn.errors.CommError: this communicator was freed
    """

    __slots__ = ("_lock", "reason")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reason: str | None = None

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise CommError("this communicator is in use, by another thread or in the middle of an operation")
        if self.reason is not None:
            self._lock.release()
            raise CommError(self.reason)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self, reason: str) -> None:
        """Refuse every operation from here on, with this reason; the first reason stays."""
        self.reason = self.reason or reason
