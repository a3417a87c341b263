"""The project's own threads: a few, started once, that run compiled code which has released the interpreter's lock.

numba's thread layers are not used: its OpenMP layer slows PyTorch's down when it is loaded first, and its work queue
can't be entered by two threads at once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from treeattn.errors import InputError

__all__ = ["run_on_threads", "thread_count"]

Work: TypeAlias = Callable[[], None]

VARIABLE = "TREEATTN_THREADS"


def thread_count() -> int:
    """Threads that a call may use: ``TREEATTN_THREADS``, or this rank's share of the host's processors.

    Raises
    ------
    InputError
        ``TREEATTN_THREADS`` is not a whole number of at least 1.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return max(1, min(_processors(0), _processors(os.getppid()) // _ranks_on_host()))
    if not re.fullmatch(r"\s*0*[1-9]\d{0,4}\s*", wanted):
        raise InputError.of(VARIABLE, expected="a number of threads of at least 1", got=repr(wanted))
    return int(wanted)


def run_on_threads(work: Work, threads: int) -> None:
    """Run ``work`` on up to ``threads`` threads at once, this one among them, until all that began have ended.

    ``work`` must do everything there is to do even if no other thread joins: others may be busy with another call.
    """
    if threads == 1:
        work()
        return
    job = _Job(work)
    _helpers.invite(job, threads - 1)
    try:
        work()
    finally:
        job.close()
    job.raise_error()


def _processors(pid: int) -> int:
    """Processors that a process may use; the launcher's are those of the whole job, before it bound its ranks."""
    try:
        return len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _ranks_on_host() -> int:
    """Ranks that share this host, from the launcher's environment; 1 without a launcher."""
    names = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]
    if "SLURM_LOCALID" in os.environ:  # an allocation sets the others outside of its ranks too
        names += ["SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]
    for name in names:
        if found := re.match(r"\d+", os.environ.get(name, "")):
            return max(1, int(found.group()))
    return 1


class _Job:
    """One call's work, which helpers may join as long as it is open."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._open = True
        self._running = 0
        self._idle = threading.Lock()  # free while no helper is at work; a lock wakes faster than a condition
        self._error: BaseException | None = None

    def join(self) -> None:
        """Help, as a thread of the pool."""
        with self._lock:
            if not self._open:
                return
            if self._running == 0:
                self._idle.acquire()
            self._running += 1
        try:
            self._work()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._idle.release()

    def close(self) -> None:
        """Let nobody join any more, and wait for those who have."""
        with self._lock:
            self._open = False
        with self._idle:
            pass

    def raise_error(self) -> None:
        """Raise what went wrong in a helper."""
        if self._error is not None:
            raise self._error


class _Helpers:
    """Threads that wait for jobs. They are daemons: they hold nothing that has to be put in order at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._started = 0

    def invite(self, job: _Job, helpers: int) -> None:
        """Ask ``helpers`` threads to join ``job``; there are as many threads as were ever asked for at once."""
        if self._started < helpers:
            with self._lock:
                while self._started < helpers:
                    threading.Thread(target=self._serve, name="treeattn", daemon=True).start()
                    self._started += 1
        for _ in range(helpers):
            self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            self._jobs.get().join()


_helpers = _Helpers()


def _forget_helpers() -> None:
    """Start anew in a forked child, where the threads are gone and the queue may have been caught in the middle."""
    global _helpers
    _helpers = _Helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
