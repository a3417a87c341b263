"""The time by which ranks wait and measure: the machine's, or, where a cluster is emulated, each rank's own."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "OwnTime", "WallTime"]


class Clock(Protocol):
    """Something that tells the time, in seconds, and can let it pass."""

    def __call__(self) -> float:
        """Give the time."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class WallTime:
    """The machine's time: messages are really held."""

    def __call__(self) -> float:
        """Give the machine's monotonic time, the same for all of its processes."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class OwnTime:
    """The time of one thread, as if it had a processor for itself: the time that it has computed, and has slept.

    Sleeping takes no time but is counted. Ranks that are threads with such clocks, whose messages carry the sender's
    time, end at the times at which they would end on a machine with a core for each, however few there are and
    however busy they are. Make one in each thread. What helpers compute for the thread is not seen.
    """

    def __init__(self) -> None:
        self._slept = 0.0

    def __call__(self) -> float:
        """Give the thread's own time."""
        return time.thread_time() + self._slept

    def sleep(self, seconds: float) -> None:
        """Count time as slept."""
        self._slept += seconds
