"""Counts that compiled code and Python both keep."""

from __future__ import annotations

import numpy as np

__all__ = ["Count"]


class Count:
    """A whole number in memory of its own, which compiled code may count up by its address.

    Examples
    --------
    >>> steps = Count()
    >>> steps.value += 2
    >>> steps.value
    2
    """

    __slots__ = ("_cell", "address")

    def __init__(self) -> None:
        self._cell = np.zeros(1, np.int64)
        self.address = int(self._cell.ctypes.data)

    @property
    def value(self) -> int:
        """The number."""
        return int(self._cell[0])

    @value.setter
    def value(self, value: int) -> None:
        self._cell[0] = value
