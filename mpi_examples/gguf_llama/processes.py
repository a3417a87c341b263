"""The ranks of one run: what they tell each other beside attention, and how they fail together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gguf_llama.errors import LlamaError

if TYPE_CHECKING:
    from treeattn import TreeComm

__all__ = ["Processes"]

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Processes:
    """All ranks of a run, or those of one host.

    Parameters
    ----------
    mpi : mpi4py communicator or None
        None where this process is alone; MPI is not imported then.
    """

    mpi: Any = None

    @classmethod
    def of(cls, tree: TreeComm) -> Processes:
        """Give the ranks that ``tree`` spans, which are the whole world."""
        if tree.size == 1:
            return cls()
        from mpi4py import MPI

        return cls(MPI.COMM_WORLD.Dup())  # so that no message here can match one of the tree's

    @property
    def rank(self) -> int:
        """Number of this process among them."""
        return 0 if self.mpi is None else int(self.mpi.rank)

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self.mpi is None else int(self.mpi.size)

    def on_this_host(self) -> Processes:
        """Give those that share memory with this one; collective."""
        if self.mpi is None:
            return self
        from mpi4py import MPI

        return Processes(self.mpi.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank))

    def bcast(self, data: bytes, root: int = 0) -> bytes:
        """Give every rank the root's ``data``; what others pass is ignored."""
        if self.mpi is None:
            return data
        length = np.array([len(data)], np.int64)
        self.mpi.Bcast(length, root)
        buffer = bytearray(data) if self.rank == root else bytearray(int(length[0]))
        self.mpi.Bcast(buffer, root)
        return bytes(buffer)

    def gather_rows(self, rows: Array, counts: Sequence[int]) -> Array:
        """Put the ranks' rows under each other, on every rank.

        Parameters
        ----------
        rows : array (counts[rank], ...), C-contiguous
        counts : sequence of int
            Rows that each rank has.
        """
        if self.mpi is None:
            return rows
        gathered = np.empty((sum(counts), *rows.shape[1:]), rows.dtype)
        width = gathered[:1].size
        self.mpi.Allgatherv(rows, (gathered, [count * width for count in counts]))
        return gathered

    def attempt(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank; if it fails on some, raise the first one's LlamaError on all; collective."""
        problem = ""
        try:
            result = action()
        except LlamaError as error:
            problem = str(error)
        self._raise_first(problem)
        return result

    def _raise_first(self, problem: str) -> None:
        failed = self.gather_rows(np.array([bool(problem)], np.int32), [1] * self.size)
        if failed.any():
            raise LlamaError(self.bcast(problem.encode(), int(failed.argmax())).decode())
