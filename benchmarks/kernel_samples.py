"""One sample: a streaming read, the call, and the read again.

The memory's speed drifts by a factor of 2 and more on shared machines, so a plain time says nothing. What counts is how
long reading the same bytes took just before and after. A sample is thrown away when those two reads differ by more than
a quarter, or when other processes worked while it was taken.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["Probe", "Sample", "Sampler", "summary"]

Array: TypeAlias = npt.NDArray[Any]
Call: TypeAlias = Callable[[int], Any]

DRIFT = 0.25
"""Largest difference of a sample's two reads, as a share of the shorter."""

SHORTEST = 0.025
"""Seconds that each part of a sample takes at least; it repeats over the sets to reach them."""

PAUSE = 0.005
"""Seconds between two parts, for threads that spin a while before they sleep."""

TICK, OTHERS = 0.01, 0.08
"""Seconds in which the system counts processor time, and the share of a processor that others may use."""


@dataclass(frozen=True)
class Sample:
    """Seconds per set of one read, the call, and the other read; and whether others were at work."""

    before: float
    call: float
    after: float
    disturbed: bool

    @property
    def kept(self) -> bool:
        """Whether it tells anything."""
        return not self.disturbed and abs(self.before - self.after) <= DRIFT * min(self.before, self.after)

    @property
    def read(self) -> float:
        """Seconds that reading the bytes of one set takes."""
        return (self.before + self.after) / 2


@numba.njit("int64(int64[::1])", nogil=True)
def add(words: Any) -> Any:
    """Add up integers: nothing but loads, of the widest kind that the processor has."""
    total = np.int64(0)
    for i in range(words.size):
        total += words[i]
    return total


class Probe:
    """Reads whole sets once, in the order of their addresses, each thread its own stretch of every run.

    Parameters
    ----------
    sets : sequence of sequence of array
        For each set, its runs of int64.
    threads : int
    """

    def __init__(self, sets: Sequence[Sequence[Array]], threads: int) -> None:
        self._parts = [[self._part(sets, at, part, threads) for at in range(len(sets))] for part in range(threads)]
        self._others = ThreadPoolExecutor(max(1, threads - 1))

    def _part(self, sets: Sequence[Sequence[Array]], at: int, part: int, parts: int) -> list[Array]:
        return [run[part * run.size // parts : (part + 1) * run.size // parts] for run in sets[at]]

    def read(self, first: int, count: int) -> None:
        """Read ``count`` sets in turn, from number ``first`` on; threads start and meet once."""
        waiting = [self._others.submit(self._read, parts, first, count) for parts in self._parts[1:]]
        self._read(self._parts[0], first, count)
        for each in waiting:
            each.result()

    def _read(self, parts: list[list[Array]], first: int, count: int) -> None:
        for i in range(first, first + count):
            for words in parts[i % len(parts)]:
                add(words)


class Sampler:
    """Takes samples of a call; ``call(i)`` works on set ``i`` of ``count``."""

    def __init__(self, call: Call, probe: Probe, count: int) -> None:
        self._call, self._probe, self._sets, self._next = call, probe, count, 0
        self._calls = self._repeats(self._run)
        self._reads = max(self._calls, self._repeats(probe.read))

    def take(self, seconds: float) -> list[Sample]:
        """Take samples for some seconds, one at least."""
        end, samples = time.perf_counter() + seconds, [self._sample()]
        while time.perf_counter() < end:
            samples.append(self._sample())
        return samples

    def _repeats(self, work: Callable[[int, int], None]) -> int:
        """Give how often work has to be done to take long enough; it has been done before."""
        work(0, 1)
        shortest = min(self._timed(work, 1) for _ in range(3))
        return max(1, math.ceil(SHORTEST / shortest))

    def _sample(self) -> Sample:
        idle = _other_work()
        start = time.perf_counter()
        before = self._timed(self._probe.read, self._reads)
        time.sleep(PAUSE)
        call = self._timed(self._run, self._calls)
        time.sleep(PAUSE)
        after = self._timed(self._probe.read, self._reads)
        took = time.perf_counter() - start
        return Sample(before, call, after, _other_work() - idle > 2 * TICK + OTHERS * took)

    def _timed(self, work: Callable[[int, int], None], count: int) -> float:
        """Seconds per set."""
        first, self._next = self._next, (self._next + count) % self._sets
        start = time.perf_counter()
        work(first, count)
        return (time.perf_counter() - start) / count

    def _run(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            self._call(i % self._sets)


def _other_work() -> float:
    """Processor seconds that others have used, or taken from this machine; 0 where the system doesn't tell."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    used = resource.getrusage(resource.RUSAGE_SELF)
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) * TICK - used.ru_utime - used.ru_stime


def summary(samples: Sequence[Sample], nbytes: int) -> dict[str, Any]:
    """Put the samples that were kept into figures: medians, and quartiles of the share of the limit."""
    kept = [sample for sample in samples if sample.kept]
    counted = {"kept": len(kept), "taken": len(samples)}
    if len(kept) < 2:
        return {**counted, "absent": f"{len(kept)} of {len(samples)} samples were undisturbed"}
    shares = [sample.read / sample.call for sample in kept]
    low, median, high = statistics.quantiles(shares, n=4, method="inclusive")
    seconds, read = (statistics.median(times) for times in zip(*((s.call, s.read) for s in kept), strict=True))
    return {
        **counted,
        "ms": 1e3 * seconds,
        "gb_per_s": nbytes / seconds / 1e9,
        "read_gb_per_s": nbytes / read / 1e9,
        "share": median,
        "share_quartiles": [low, high],
        "beyond_read_us": 1e6 * statistics.median(sample.call - sample.read for sample in kept),
    }
