"""Host memory that a card's driver has pinned, so that copies land in it: whole pages, each pinned once."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Pins"]


class Pins:
    """What one card has pinned.

    Parameters
    ----------
    register : callable
        Takes the address and the size of whole pages; raises where it can't pin them.
    unregister : callable
        Takes the address.
    """

    def __init__(self, register: Callable[[int, int], object], unregister: Callable[[int], object]) -> None:
        self._register, self._unregister = register, unregister
        self._ranges: dict[int, int] = {}
        self._refused: set[int] = set()

    def pin(self, array: npt.NDArray[np.uint8]) -> bool:
        """Pin all the memory that ``array`` is a part of, until that is freed; False where that can't be done.

        Only memory with pages of its own is taken: others' data would be on the first and the last one.
        """
        owner = _owner(array)
        start, end = int(owner.ctypes.data), int(owner.ctypes.data) + owner.nbytes
        if self.hold(start, owner.nbytes):
            return True
        if start % mmap.PAGESIZE or start in self._refused:
            return False
        try:
            self._register(start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE)
        except Exception:  # whatever a driver throws, copies take the detour
            self._refused.add(start)
            return False
        self._ranges[start] = end
        weakref.finalize(owner, self._forget, start).atexit = False
        return True

    def hold(self, start: int, size: int) -> bool:
        """Whether these bytes are pinned."""
        return any(first <= start and start + size <= end for first, end in self._ranges.items())

    def _forget(self, start: int) -> None:
        del self._ranges[start]
        with contextlib.suppress(Exception):  # of a driver that is going away itself
            self._unregister(start)


def _owner(array: Any) -> Any:
    """Give the array of which ``array`` is, by whatever way, a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
