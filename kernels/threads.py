"""The project's own threads: a few, started once, that run compiled code which has released the interpreter's lock.

numba's thread layers are not used: its OpenMP layer slows PyTorch's down when it is loaded first, and its work queue
can't be entered by two threads at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

__all__ = ["run_on_threads"]

Work: TypeAlias = Callable[[], None]


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
