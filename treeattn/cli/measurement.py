"""Running decode steps over a made-up cache: what they gave, how long they took, what they sent."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from treeattn.cli.contender import FirstStep, contender
from treeattn.planning.plan import Stats
from treeattn.wrapping import team_of

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
        What all ranks sent in one step, and what the plan, or the baseline's formula, says that they send.
    same_bits : bool
        Whether every rank has the same result.
    plan : str
        The tree; "" for baselines.
    first : FirstStep
        What the first step took, rank 0's.
    """

    out: Array
    seconds: list[float]
    counted: Stats
    predicted: Stats
    same_bits: bool
    plan: str
    first: FirstStep


def measure(
    comm: TreeComm,
    work: Workload,
    algorithm: str,
    *,
    root: int | None,
    backend: str | None,
    warmup: int,
    repeats: int,
) -> Measurement:
    """Make this rank's shard and decode over it; collective."""
    found = contender(comm, work, algorithm, root=root, backend=backend)
    out = found.step()
    out = out if root is None else comm.bcast(out, root)
    for _ in range(warmup):
        found.step()
    seconds = [_timed(found.step) for _ in range(repeats)]
    counted = _counted(comm, found.step)
    predicted = _total(comm, found.stated())
    same_bits = _same_bits(comm, out)
    return Measurement(out, seconds, counted, predicted, same_bits, found.plan, found.first)


def _timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _counted(comm: TreeComm, step: Callable[[], Any]) -> Stats:
    before = comm.stats
    step()
    return _total(comm, comm.stats - before)


def _total(comm: TreeComm, own: Stats) -> Stats:
    """Add up every rank's share."""
    return Stats.total(Stats(**each) for each in team_of(comm).consult("count of a step", (), asdict(own)))


def _same_bits(comm: TreeComm, out: Array) -> bool:
    digest = hashlib.sha256(out.tobytes()).hexdigest()
    every = team_of(comm).consult("bits of a result", (), {"digest": digest})
    return len({each["digest"] for each in every}) == 1
