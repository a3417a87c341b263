"""What is to be done before MPI ends: communicators are freed, and a job that can't end well is ended by Abort."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

from treeattn.launch import abort
from treeattn.transports.mpi_library import ENDED, import_mpi

__all__ = ["abort_at_exit", "free_before_finalize", "live", "stuck", "watched"]


class Freed(Protocol):
    """What is freed before MPI ends."""

    size: int

    def end(self, reason: str) -> None:
        """Take note that ranks can't talk any more, and free it."""


live: list[Freed] = []
"""Transports that were not freed; they are, before MPI ends."""

stuck: list[Any] = []
"""Requests of operations that were cut short: MPI may still write to their buffers."""


@contextlib.contextmanager
def watched(timeout: float, what: str) -> Iterator[None]:
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
def free_before_finalize() -> None:
    """Have what is `live` by then freed when MPI ends, and never by the garbage collector."""
    mpi = import_mpi()
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_free_all), True)
    atexit.register(_end_failed_job)


def _free_all(*_: Any) -> None:
    """Free the rest, in the order of making, which is the same on all ranks; MPI calls this first in Finalize."""
    for transport in tuple(live):  # which `free` shortens
        transport.end(ENDED)  # in the memory of a host, ranks could go on by themselves, until one needs MPI


def _end_failed_job() -> None:
    """End the job if an exception has ended this rank, whose traceback is out: Finalize would wait for the others."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if failed and any(transport.size > 1 for transport in live):
        _end_job("an exception ended this rank, for which others may wait: ending the job")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=live.clear)  # a child has nothing to free, and no job to end


@cache
def abort_at_exit() -> None:
    """End the job when this process ends, by Abort."""
    atexit.register(_end_job, "an operation between ranks was cut short: ending the job")


def _end_job(reason: str) -> None:
    try:
        abort(reason)
    finally:
        os._exit(1)  # where Abort comes back before the launcher ends us: what follows would be Finalize
