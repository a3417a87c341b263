"""How a rank waits: it tests, gives up its core, naps when it takes long, and looks up now and then.

Ranks that outnumber cores then don't stand in each other's way, whatever the MPI library would do by itself; and a
wait can end at a deadline, or because another rank gave up, which no blocking MPI call can.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from treeattn.transports.base import Silence, Usual

__all__ = ["NAP", "Patience", "nap"]

NAP_AFTER = 2e-3
"""Seconds of testing after which a wait naps between tests: what is awaited is then no matter of microseconds."""

SOON = 100e-6
"""The same where the last wait took as long as that, as they do between distant hosts, or where a sleep is woken."""

NAP, NAP_SHARE = 50e-6, 1 / 128
"""Seconds of a nap, and the part of the time so far that it takes where that is more."""

LONGEST_NAP = 5e-3
"""The same at most, however long a rank might rest: whoever calls the roll is not to wait for an answer."""

LOOKS = 16
"""Naps from one look for the roll to the next."""

_SET_SLACK, _EXACT, _USUAL = 29, 1, 0  # of prctl; nanoseconds, of which 0 is what the process began with


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
    _long: bool = field(default=False, init=False)

    def wait(
        self, ready: Callable[[], bool], sleep: Callable[[], None] | None = None, usual: Usual | None = None
    ) -> None:
        """Return when ``ready()`` is true.

        Parameters
        ----------
        ready : callable
        sleep : callable, optional
            Returns when it may be time to look again, and after some milliseconds; in place of a nap.
        usual : Usual, optional
            What is known of this wait.

        Raises
        ------
        Silence
            It is not true at the deadline, or the roll is called.
        """
        waited = 0.0 if ready() else self._wait(ready, sleep, 0.0 if usual is None else usual.rest)
        if usual is not None:
            usual.took(waited)

    def _wait(self, ready: Callable[[], bool], sleep: Callable[[], None] | None, rest: float) -> float:
        """Wait for what is not there at once; give how long it took."""
        start, waited, naps = time.monotonic(), 0.0, 0
        awake = 0.0 if rest else NAP_AFTER if sleep is None and not self._long else SOON
        while not ready():
            waited = time.monotonic() - start
            if self.timeout and waited > self.timeout:
                raise Silence
            if waited <= awake:
                os.sched_yield()
                continue
            if naps % LOOKS == 0 and self.alarmed():
                raise Silence
            naps += 1
            if sleep is not None:
                sleep()
            else:
                nap(min(max(rest - waited, NAP, NAP_SHARE * waited), LONGEST_NAP))
        if sleep is None:
            self._long = waited > NAP_AFTER
        return waited


def nap(seconds: float = NAP) -> None:
    """Sleep for a nap and not twice as long, as it would be by the slack that Linux gives to timers."""
    slack = _slack()
    slack(_SET_SLACK, _EXACT, 0, 0, 0)
    time.sleep(seconds)
    slack(_SET_SLACK, _USUAL, 0, 0, 0)


@cache
def _slack() -> Callable[..., Any]:
    if not sys.platform.startswith("linux"):
        return lambda *_: None
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return prctl
