"""Memory for keys and values: on cache lines, and on huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["LINE", "empty", "whole_lines"]

Array: TypeAlias = npt.NDArray[Any]

LINE = 64
"""Bytes of a cache line, and of the widest vector: one that begins between lines takes two of them."""

HUGE_PAGE = 1 << 21
"""Bytes of a huge page on x86-64 and, with the usual pages of 4096 bytes, on arm64."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Allocate an array without writing to it; pages are taken as they are written.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype

    Returns
    -------
    array
        In C order, and on a cache line. From 2 MB on it begins on a huge page, and the system is asked for such.

    Raises
    ------
    MemoryError
        There is not enough.

    Examples
    --------
    >>> import numpy as np
    >>> empty((2, 3), np.dtype("float32")).ctypes.data % LINE
    0
    """
    size = math.prod(shape) * dtype.itemsize
    memory, boundary = (_pages(size), HUGE_PAGE) if size >= HUGE_PAGE else (np.empty(size + LINE, np.uint8), LINE)
    start = -memory.ctypes.data % boundary
    return memory[start : start + size].view(dtype).reshape(shape)


def whole_lines(rows: int, row_bytes: int) -> int:
    """Round a number of rows up, so that what follows them begins on a cache line too."""
    step = LINE // math.gcd(LINE, row_bytes)
    return -(-rows // step) * step


def _pages(size: int) -> Array:
    """Map private memory that has room for ``size`` bytes from a huge page's boundary on."""
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no room for {size:,} bytes: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
