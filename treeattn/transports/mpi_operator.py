"""MPI's own reductions by an operator of compiled code, which MPI calls without Python in between."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from treeattn.errors import BackendError
from treeattn.transports.base import Bytes

__all__ = ["MpiRowReduction", "reasons"]


@cache
def _create() -> Any:
    """Find the call that makes operators: mpi4py has one for functions of Python alone."""
    from mpi4py import MPI

    return ctypes.CDLL(MPI.__file__).MPI_Op_create  # of the MPI library that mpi4py has loaded


def reasons() -> list[str]:
    """Say why there can be no such operator here."""
    try:
        _create()
    except (OSError, AttributeError) as error:
        return [f"MPI_Op_create is out of reach ({error})"]
    return []


class MpiRowReduction:
    """Rows that MPI merges; see `treeattn.transports.base.Transport.row_reduction`.

    A row is one element of a derived datatype, so that no algorithm cuts it in two. The operator is said not to
    commute. MPI then keeps the order of the ranks, and cuts no payload into parts that meet in different orders.
    """

    def __init__(self, comm: Any, sent: Bytes, merged: Bytes, row_bytes: int, address: int) -> None:
        from mpi4py import MPI

        self._comm, self._operator = comm, _operator(address)
        self._row = MPI.FLOAT.Create_contiguous(row_bytes // 4).Commit()
        self._sent, self._merged = ([rows, rows.nbytes // row_bytes, self._row] for rows in (sent, merged))

    def start(self, root: int | None) -> Any:
        """Start to merge every rank's rows."""
        if root is None:
            return self._comm.Iallreduce(self._sent, self._merged, self._operator)
        merged = self._merged if root == self._comm.Get_rank() else None
        return self._comm.Ireduce(self._sent, merged, self._operator, root)

    def free(self) -> None:
        """Give the operator and the datatype back."""
        self._operator.Free()
        self._row.Free()


def _operator(address: int) -> Any:
    from mpi4py import MPI

    is_number = MPI._sizeof(MPI.Op) == ctypes.sizeof(ctypes.c_uint)  # as MPICH's handles; Open MPI's are addresses
    handle: Any = ctypes.c_uint() if is_number else ctypes.c_void_p()
    failed = _create()(ctypes.c_void_p(address), ctypes.c_int(False), ctypes.byref(handle))
    if failed:
        raise BackendError(f"plan 'mpi' can't be used: MPI_Op_create failed with {failed}")
    return MPI.Op.fromhandle(handle.value)
