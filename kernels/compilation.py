"""How kernels are compiled: numba with no contraction, one signature each, kept on disk between runs.

numba's own cache has three gaps that this module closes. A function's entry isn't renewed when a function that it
calls changes; two processes that fill one index at once can lose or swap entries; and a folder that can't be written
is an error. Here each set of sources and each kind of processor has a folder of its own, an entry point has exactly
one signature, one process compiles while the others of the host wait, and without a folder the code lives in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding
from numba.core import config as _config

config: Any = _config  # its settings appear at run time, out of a type checker's sight

__all__ = ["cache_folder", "entry", "inline"]

inline = numba.njit(error_model="numpy", nogil=True)
"""For functions that kernels call: no contraction, so one sequence of operations gives the same bits everywhere."""


def entry(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Make ``function`` an entry point: calling the result compiles it, or loads it, once and gives the function.

    Parameters
    ----------
    signature : str
        Its one signature, in numba's words.
    **options
        More options of ``numba.njit``.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[], Any]:
        @cache
        def compiled() -> Any:
            folder = cache_folder()
            with _one_process(folder):
                dispatcher = _cached(function, folder, options)
                dispatcher.compile(signature)
            return dispatcher

        return compiled

    return decorate


@cache
def cache_folder() -> Path | None:
    """Folder of compiled code for these sources on this processor, or None where no place can be written."""
    for root in _roots():
        folder = root / f"treeattn-{_fingerprint()}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


def _roots() -> Iterator[Path]:
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR)
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeattn"
    yield Path(tempfile.gettempdir()) / f"treeattn-{os.getuid()}"


def _fingerprint() -> str:
    """Digest of all that decides the machine code: the sources, numba, and the processor."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = binding.get_host_cpu_features().flatten()
    digest.update(f"{numba.__version__} {binding.get_host_cpu_name()} {features}".encode())
    return digest.hexdigest()[:16]


def _cached(function: Callable[..., Any], folder: Path | None, options: dict[str, Any]) -> Any:
    """Wrap ``function`` with its cache in ``folder``; numba takes the place from its configuration, right here."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder or "")
    try:
        return numba.njit(error_model="numpy", nogil=True, cache=folder is not None, **options)(function)
    finally:
        config.CACHE_DIR = before


@contextlib.contextmanager
def _one_process(folder: Path | None) -> Iterator[None]:
    """Hold the folder's lock, so that ranks that start together compile once; go on without where it can't be had."""
    with contextlib.ExitStack() as held:
        if folder is not None:
            with contextlib.suppress(OSError, ImportError):
                import fcntl

                lock = held.enter_context(open(folder / "lock", "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
