"""Timing of calls that all ranks make together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["milliseconds"]

WORLD = MPI.COMM_WORLD

LOOK = 1e-3
"""Seconds from one look to the next whether all ranks are done."""


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Mean time of a call in a block of ``repeats``, of the slowest rank.

    The clock starts behind two calls, the second of which ranks leave together. Some leave a barrier a whole delay
    after others: they find everything there in the first call, and leave that a delay before the others.
    """
    WORLD.Barrier()
    call()
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return _slowest(1e3 * (time.perf_counter() - start) / repeats)


def _slowest(figure: float) -> float:
    """Give the largest figure of any rank.

    Ranks that wait for others look now and then: waiting in MPI they would hold the cores that others need to end
    their last call, which at 16 ranks on 2 cores made calls of 12 ms look like 13.
    """
    mine, largest = np.array([figure]), np.empty(1)
    request = WORLD.Iallreduce(mine, largest, MPI.MAX)
    while not request.Test():
        time.sleep(LOOK)
    return float(largest[0])
