"""Running decode steps over a made-up cache: what they gave, how long they took, what they sent."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

import treeattn
from treeattn.plan import Stats

if TYPE_CHECKING:
    from treeattn.cli.workload import Workload
    from treeattn.comm import TreeComm

__all__ = ["Measurement", "measure"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Measurement:
    """What a run found.

    Parameters
    ----------
    out : array
        The step's result.
    seconds : list of float
        One time per step, rank 0's.
    counted, predicted : Stats
        What all ranks sent in one step, and what the plan says that they send.
    same_bits : bool
        Whether every rank has the same result.
    """

    out: Array
    seconds: list[float]
    counted: Stats
    predicted: Stats
    same_bits: bool


def measure(
    comm: TreeComm, work: Workload, *, root: int | None, backend: str | None, warmup: int, repeats: int
) -> Measurement:
    """Make this rank's shard and decode over it; collective."""
    start, stop = work.span(comm.rank, comm.size)
    k, v = work.cache(start, stop)
    options = work.options(start)
    step = partial(treeattn.decode, work.query(), k, v, comm=comm, root=root, backend=backend, **options)
    out = step()  # compiles, and agrees on the call: later steps send the plan's messages and nothing else
    out = out if root is None else comm.bcast(out, root)
    for _ in range(warmup):
        step()
    seconds = [_timed(step) for _ in range(repeats)]
    counted = _counted(comm, step)
    predicted = comm.plan_for(work.state_bytes, root).predict(work.state_bytes).total
    return Measurement(out, seconds, counted, predicted, _same_bits(comm, out))


def _timed(step: partial[Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _counted(comm: TreeComm, step: partial[Any]) -> Stats:
    before = comm.stats
    step()
    own = comm.stats - before
    return Stats.total(Stats(**each) for each in comm.consult("count of a step", (), asdict(own)))


def _same_bits(comm: TreeComm, out: Array) -> bool:
    digest = hashlib.sha256(out.tobytes()).hexdigest()
    every = comm.consult("bits of a result", (), {"digest": digest})
    return len({each["digest"] for each in every}) == 1
