"""How a rank waits: it tests, gives up its core, naps when it takes long, and looks up now and then.

Ranks that outnumber cores then don't stand in each other's way, whatever the MPI library would do by itself; and a
wait can end at a deadline, or because another rank gave up, which no blocking MPI call can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from treeattn.transport import Silence

__all__ = ["NAP", "Patience"]

EAGER_TESTS = 32
"""Tests in a row before a wait first looks at the clock."""

NAP_AFTER = 2e-3
"""Seconds of testing after which a wait naps between tests: what is awaited is then no matter of microseconds."""

NAP = 50e-6
"""Seconds of a nap."""


@dataclass(slots=True)
class Patience:
    """What the transports of one communicator share about waiting.

    Parameters
    ----------
    timeout : float
        Seconds that a wait may take; 0 waits for ever.
    alarmed : callable
        Whether another rank has called the roll. Only asked between naps, so it costs a short wait nothing.
    """

    timeout: float
    alarmed: Callable[[], bool]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready()`` is true.

        Raises
        ------
        Silence
            It is not true at the deadline, or the roll is called.
        """
        for _ in range(EAGER_TESTS):
            if ready():
                return
            os.sched_yield()
        start = time.monotonic()
        while not ready():
            waited = time.monotonic() - start
            if self.timeout and waited > self.timeout:
                raise Silence
            if waited > NAP_AFTER:
                self._nap()
            else:
                os.sched_yield()

    def _nap(self) -> None:
        if self.alarmed():
            raise Silence
        time.sleep(NAP)
