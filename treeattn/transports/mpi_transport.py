"""Ranks of an MPI communicator, through mpi4py: bytes only, no pickling, and no call that waits out of our sight.

Messages travel on duplicates of the user's communicator: on the user's own, a receive from any source there could
swallow them, and both sides would then wait for ever. A communicator's first duplicate is its control communicator:
descriptions travel there, and the roll is called there; each plan has another, a branch.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from treeattn.errors import RankTimeout
from treeattn.transports.base import Bytes, Mark, Meanwhile, Silence, Transport, Usual, nothing
from treeattn.transports.gpu_mpi import Verdict, ask
from treeattn.transports.mpi_ending import abort_at_exit, free_before_finalize, live, stuck, watched
from treeattn.transports.mpi_library import checked, import_mpi
from treeattn.transports.mpi_operator import MpiRowReduction, reasons
from treeattn.transports.waiting import Patience, nap

__all__ = ["MpiTransport", "world_transport"]

ROLL_TAG = 32767
"""Tag of the calling of the roll: the largest that every MPI has, far from the numbers of rounds."""

_MARK = struct.Struct("<QQ")


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
        free_before_finalize()
        live.append(self)

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
            return cls(_duplicate(checked(comm, import_mpi()), Patience(timeout, lambda: False)), timeout)
        except Silence:
            abort_at_exit()
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
            stuck.append(requests)
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
        return watched(self.timeout, what)

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
        stuck.append([self._comm.Isend([data, self._bytes], rank, ROLL_TAG) for rank in others])
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
        if self in live:
            live.remove(self)
            for request in self._prepared:
                if not request.Test():  # a receive that was started ahead; it ends now
                    request.Cancel()
                    request.Wait()
                request.Free()
            for reduction in self._reductions:
                reduction.free()
            self._comm.Free()

    def end(self, reason: str) -> None:
        """Close what goes on without MPI, for this reason, and free the duplicate."""
        self._close(reason)
        self.free()

    def abandon(self) -> None:
        """See to it that the process ends by Abort: in Finalize it would wait for the ranks that went missing."""
        if self in live:
            live.remove(self)
            stuck.append([self._comm, self._prepared, self._reductions])
        abort_at_exit()


def _duplicate(comm: Any, patience: Patience) -> Any:
    ours, request = comm.Idup()
    try:
        patience.wait(request.Test)
    except BaseException:
        stuck.append([request, ours])
        raise
    return ours
