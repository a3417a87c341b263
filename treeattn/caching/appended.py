"""What all ranks have appended to a cache, in digests, where they are to find out whether it was the same."""

from __future__ import annotations

from typing import Any

from treeattn.arguments.digests import digest, digest_of_array

__all__ = ["Appended"]


class Appended:
    """A digest for every length that a cache has had: of all appended tokens before it, in their order.

    Tokens of which each rank has its own, or that nobody looks at, leave it as it is.

    Attributes
    ----------
    seen : bool
        Whether there were any others.

    Examples
    --------
    >>> import numpy as np
    >>> one, other = Appended(), Appended()
    >>> one.add(0, np.zeros((1, 2, 3, 4)), np.ones((1, 2, 3, 4)))
    >>> one.upto(2) == one.upto(3), one.upto(0) == other.upto(0)
    (False, True)
    >>> other.cut(10**15)  # takes no room while nobody looks
    """

    def __init__(self) -> None:
        self._digests, self.seen = [0], False

    def cut(self, length: int) -> None:
        """Forget what was behind ``length``, to which the cache has come back, or has come unseen."""
        if not self.seen:
            return
        del self._digests[length + 1 :]
        self._digests += self._digests[-1:] * (length + 1 - len(self._digests))

    def add(self, length: int, k: Any, v: Any) -> None:
        """Take tokens, of axis 2, that a cache of ``length`` gets."""
        self.seen = True
        self.cut(length)
        for token in range(k.shape[2]):
            new = [digest_of_array(array[:, :, token]) for array in (k, v)]
            self._digests.append(digest(repr((self._digests[-1], *new)).encode()))

    def upto(self, length: int) -> int:
        """Give the digest of a length."""
        return self._digests[min(length, len(self._digests) - 1)]
