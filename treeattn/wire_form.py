"""What a state looks like while it travels: which numbers, in which precision, and how many bytes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ROUNDING", "WIRE_DTYPES", "Bytes", "WireForm", "merger", "operator", "own_pages"]

WIRE_DTYPES = ("bfloat16", "float16")
"""What o may travel in, besides its own dtype."""

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""By how much of itself a number is rounded there at most."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WireForm:
    """Rows of a state on the wire; see `treeattn.kernels.wire_rows` for what they hold.

    Parameters
    ----------
    shape : tuple of int
        Of the packed state, (B, Hq, Tq, Dv + 2).
    dtype : "float32" or "float64"
        The state's.
    narrow : "bfloat16", "float16" or None
        What o travels in, if it is not the state's dtype, which must then be float32.

    Examples
    --------
    >>> WireForm((1, 32, 1, 130), "float32").nbytes
    16640
    >>> WireForm((1, 32, 1, 130), "float32", "bfloat16").nbytes
    8448
    """

    shape: tuple[int, ...]
    dtype: str
    narrow: str | None = None

    @property
    def o_dtype(self) -> str:
        """What o travels in."""
        return self.narrow or self.dtype

    @property
    def width(self) -> int:
        """Numbers of a row: o, then l, then e."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Head rows of the state."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; those of o are a multiple of 4."""
        size = np.dtype(self.dtype).itemsize
        o_bytes = (self.width - 2) * (2 if self.narrow else size)
        return -(-o_bytes // 4) * 4 + 2 * size

    @property
    def nbytes(self) -> int:
        """Bytes of a state."""
        return self.rows * self.row_bytes


def own_pages(size: int) -> Bytes:
    """Allocate zeros on pages that hold nothing else, so that a card's driver can pin them; at least ``size`` bytes."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)


def merger(out: Bytes, sources: Sequence[Bytes], form: WireForm) -> Callable[[], None]:
    """Give a function that merges the rows at ``sources``, in this order, to ``out``; see `kernels.wire_rows`."""
    from treeattn.kernels.wire_rows import prepare_merge  # here, because it loads numba

    return prepare_merge(out, sources, form)


def operator(form: WireForm) -> int:
    """Give the address of compiled code that merges two rows as an MPI operator does; see `kernels.wire_rows`."""
    from treeattn.kernels.wire_rows import operator_at  # here, because it loads numba

    return operator_at(form.width, form.o_dtype)
