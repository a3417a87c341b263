"""Whose turn it is to use a communicator, where compiled code takes turns with threads of Python.

What both ask is changed only by who holds Python's lock (GIL): a step takes its turn before it gives that up, and ends
the turn when it has it again. That costs less than two calls of Python, each out of caches that others have used.
`treeattn.steps.guard` has the other side.
"""

from __future__ import annotations

from typing import Any

import numba as _numba
import numpy as np

from treeattn.kernels.compilation import inline
from treeattn.kernels.memory import pointer

types: Any = _numba.types  # untyped: its names appear at run time

__all__ = ["end_turn", "take_turn"]

_TAKEN_AT, _CLOSED_AT, _FREE_AT = range(3)

_length: Any = types.ExternalFunction("PyList_Size", types.int64(types.int64))


@inline
def take_turn(guard: int) -> bool:
    """Take the turn that the guard at an address gives; false where it is another's, or where there are none left."""
    cells = pointer(guard, np.int64)
    if cells[_TAKEN_AT] != 0 or cells[_CLOSED_AT] != 0 or _length(cells[_FREE_AT]) == 0:
        return False
    cells[_TAKEN_AT] = 1
    return True


@inline
def end_turn(guard: int) -> None:
    """Let others take their turn."""
    pointer(guard, np.int64)[_TAKEN_AT] = 0
