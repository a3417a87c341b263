"""Which cores ranks run on, and how far apart two cores are."""

from __future__ import annotations

import os
import statistics
import threading
import time
from functools import cache
from typing import Any

import numba
import numpy as np
from mpi4py import MPI

from treeattn.kernels.memory import load_acquire, store_release

__all__ = ["Distance", "spread"]

WORLD = MPI.COMM_WORLD

ROUND_TRIPS = 2000


def spread() -> str:
    """Pin the ranks of a host in turns to the cores that they may use, where they outnumber those; say so in words.

    Left to itself, Linux now and then puts five of eight ranks on one of two cores and leaves them there, and then
    every scheme waits for that core.
    """
    host = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    cores = sorted(set().union(*host.allgather(os.sched_getaffinity(0))))
    crowded = host.size > len(cores)
    if crowded:
        os.sched_setaffinity(0, {cores[host.rank % len(cores)]})
    anywhere = WORLD.allreduce(crowded, MPI.LOR)
    host.Free()
    return "pinned in turns to the cores of their host" if anywhere else "where the system puts them"


class Distance:
    """How long a word takes from one core of this machine to another; rank 0 finds out while the others sleep.

    Virtual machines move between processors: on the same two of their cores a word took 45 or 170 ns, for seconds or
    minutes each, and steps in shared memory twice as long with the latter.
    """

    def __init__(self, cores: set[int]) -> None:
        self._cores, self._found = sorted(cores)[:2], list[float]()

    def look(self) -> None:
        """Measure once; collective."""
        if WORLD.rank == 0 and len(self._cores) == 2:
            self._found.append(_one_way(*self._cores))
        request = WORLD.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)

    @property
    def ns(self) -> float | None:
        """Median in nanoseconds; None on one core, and on ranks that have not looked."""
        return statistics.median(self._found) if self._found else None


def _one_way(first: int, second: int) -> float:
    """Nanoseconds for a word to go from one core to another, by threads that are pinned there and answer each other."""
    place, spent = np.zeros(1, np.int64), [0.0, 0.0]

    def work(turn: int, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        start = time.perf_counter()
        _answer()(place.ctypes.data, turn, ROUND_TRIPS)
        spent[turn] = time.perf_counter() - start

    _answer()
    threads = [threading.Thread(target=work, args=each) for each in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1e9 * min(spent) / (2 * ROUND_TRIPS)


@cache
def _answer() -> Any:
    @numba.njit("void(int64, int64, int64)", nogil=True)
    def answer(place: int, turn: int, times: int) -> None:
        for word in range(turn, 2 * times, 2):
            while load_acquire(place) != word:
                pass
            store_release(place, word + 1)

    return answer
