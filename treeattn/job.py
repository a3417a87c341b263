"""A launcher and its ranks as a child of this process: whatever ends this process first ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = ["running"]

GRACE = 2.0
"""Seconds after Ctrl-C in which the launcher, to which a terminal sends it too, may end by itself."""

ENDING = signal.SIGTERM, signal.SIGHUP
"""What batch systems, service managers and terminals that close send to one process, and mean its job."""


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a launcher that ends no later than the block, however that ends.

    Parameters
    ----------
    command : sequence of str
    environment : mapping

    Yields
    ------
    subprocess.Popen
        The launcher.

    Raises
    ------
    SystemExit
        With 128 and the signal's number, as a shell has it, after SIGTERM or SIGHUP, once all ranks have ended.

    Examples
    --------
    >>> with running(["sleep", "60"], {"PATH": "/bin:/usr/bin"}) as launcher:
    ...     launcher.poll() is None
    True
    >>> launcher.returncode
    -15
    """
    with _Signals() as signals, subprocess.Popen(command, env=environment) as launcher:
        try:
            signals.end_this()
            yield launcher
        finally:
            _end(launcher, GRACE if isinstance(sys.exc_info()[1], KeyboardInterrupt) else 0)


def _end(launcher: subprocess.Popen[bytes], grace: float) -> None:
    """Wait for the launcher's end, and ask for it after so many seconds; it then ends its ranks."""
    wait: float | None = grace
    while True:
        try:
            launcher.wait(wait)
            return
        except subprocess.TimeoutExpired:
            launcher.terminate()
            wait = None
        except (KeyboardInterrupt, SystemExit):  # somebody insists
            wait = 0


class _Signals:
    """Makes SystemExit of signals that would end this process at once; those that somebody handles are his.

    They count from the beginning, and raise from `end_this` on, when there is somebody to end first.
    """

    def __init__(self) -> None:
        self._heard: int | None = None
        self._raise = False
        main = threading.current_thread() is threading.main_thread()
        self._ours = [number for number in ENDING if main and signal.getsignal(number) == signal.SIG_DFL]

    def __enter__(self) -> _Signals:
        for number in self._ours:
            signal.signal(number, self._hear)
        return self

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._heard = number
        if self._raise:
            self.end_this()

    def end_this(self) -> None:
        """Raise for what was heard so far, and for what will be."""
        self._raise = True
        if self._heard is not None:
            raise SystemExit(128 + self._heard)

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, signal.SIG_DFL)
