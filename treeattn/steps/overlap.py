"""Computing while messages are under way, on transports whose messages only move while somebody calls them.

MPI moves a large message in several steps, and takes each of them inside a call of MPI: a rank that is busy in a kernel
takes none. So the work goes to another thread, and the thread that owns the transport looks after the messages, between
naps that leave the core to the work.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["beside"]

T = TypeVar("T")

NAPS = 100e-6, 1e-3
"""Shortest and longest seconds between looks at the messages: where cores are few, a look takes one from a kernel."""

SHARE = 1 / 16
"""Part of the time so far that the next nap takes, between those: what has taken long may wait a little longer."""


def beside(moved: Callable[[], bool], work: Callable[[], T]) -> T:
    """Do ``work`` on a thread of its own, and call ``moved`` on this one, until it is true or the work is done.

    Parameters
    ----------
    moved : callable
        Moves messages on; gives whether all have arrived.
    work : callable
        Must not use the transport.

    Returns
    -------
    What ``work`` returns.

    Examples
    --------
    >>> from threading import Event
    >>> arrived = Event()
    >>> beside(lambda: arrived.set() or True, lambda: arrived.wait(10))
    True
    """
    task, done = _worker().submit(work), threading.Lock()
    done.acquire()
    task.add_done_callback(lambda _: done.release())
    start = time.monotonic()
    while not moved():
        nap = SHARE * (time.monotonic() - start)
        if done.acquire(timeout=min(max(nap, NAPS[0]), NAPS[1])):
            break
    return task.result()


_of_this_thread = threading.local()


def _worker() -> ThreadPoolExecutor:
    """Give this thread its worker, which stays: kernels keep their working memory in the thread that runs them."""
    found: ThreadPoolExecutor | None = getattr(_of_this_thread, "worker", None)
    if found is None:
        found = _of_this_thread.worker = ThreadPoolExecutor(1, thread_name_prefix="treeattn beside messages")
    return found


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_this_thread.__dict__.clear)  # the child has no workers
