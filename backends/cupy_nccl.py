"""NCCL and RCCL, as CuPy has them. Not yet run on a card."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

__all__ = ["NcclGroup", "new_group", "why_not"]


def why_not() -> list[str]:
    """Say why CuPy has no NCCL here; an empty list means that it has."""
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
        return [] if nccl.available else ["the CuPy that is installed was built without NCCL"]
    except ImportError as error:
        first = str(error).strip().partition("\n")[0]
        return [f"CuPy finds no NCCL ({first}): pip install nvidia-nccl-cu12 (or -cu13)"]


def new_group() -> bytes:
    """Make the name of a group; CuPy gives it as signed numbers."""
    return np.array(importlib.import_module("cupy.cuda.nccl").get_unique_id(), np.int8).tobytes()


class NcclGroup:
    """What `treeattn.gpu.cards.Group` describes, on the current card; made by all ranks at once.

    Parameters
    ----------
    stream : callable
        Gives the address of the current stream.
    name : bytes
        From `new_group`.
    size, rank : int
    """

    def __init__(self, stream: Any, name: bytes, size: int, rank: int) -> None:
        nccl = importlib.import_module("cupy.cuda.nccl")
        self._bytes, self._stream = nccl.NCCL_UINT8, stream
        self._comm = nccl.NcclCommunicator(size, tuple(np.frombuffer(name, np.int8).tolist()), rank)

    def gather(self, mine: Any, everyones: Any) -> None:
        """Start an all-gather."""
        self._comm.allGather(mine.data.ptr, everyones.data.ptr, mine.nbytes, self._bytes, self._stream())

    def check(self) -> None:
        """Ask for an asynchronous error."""
        self._comm.check_async_error()

    def free(self) -> None:
        """Destroy it."""
        self._comm.destroy()

    def abort(self) -> None:
        """Abort it."""
        self._comm.abort()
