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

__all__ = ["cache_folder", "entry", "inline", "loops", "part"]

inline = numba.njit(error_model="numpy", nogil=True, fastmath=False)
"""For functions that kernels call: no contraction, so one sequence of operations gives the same bits everywhere.

``fastmath=False`` is said aloud, for numba lets a function that doesn't say it inherit the flags of its first caller.
"""

loops = numba.njit(error_model="numpy", nogil=True, fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
"""For inner loops of which no two machines must agree: sums may be reordered and contracted, so that they vectorise.

NaN and infinities stay what they are: the other flags would make masks and empty shards undefined. Always inlined: a
symbol that several compiled parts share is resolved to whichever copy was loaded first, and copies that were vectorised
in different places sum in different orders, so that code just compiled and code from the disk would differ in bits.
"""


def entry(signature: Any) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Make a function an entry point from Python: calling the result compiles it, or loads it, once and gives it.

    Parameters
    ----------
    signature : str or numba signature
        Its one signature.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[], Any]:
        @cache
        def compiled() -> Any:
            with _compiling() as options:
                dispatcher = numba.njit(**options, nogil=True)(function)
                dispatcher.compile(signature)
            return dispatcher

        return compiled

    return decorate


def part(signature: str) -> Callable[[Callable[..., Any]], Callable[[], int]]:
    """Make a function a part that compiled code calls by address: calling the result compiles it once and gives that.

    Parts keep the number of compiled variants a sum, not a product: an entry point knows only their signatures.
    """

    def decorate(function: Callable[..., Any]) -> Callable[[], int]:
        @cache
        def compiled() -> Any:
            with _compiling() as options:
                return numba.cfunc(signature, **options)(function)

        return lambda: int(compiled().address)

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


@contextlib.contextmanager
def _compiling() -> Iterator[dict[str, Any]]:
    """Give numba's options, with its cache in our folder: it takes the place from its configuration, while it wraps."""
    folder = cache_folder()
    before = config.CACHE_DIR
    with _one_process(folder):
        config.CACHE_DIR = str(folder or "")
        try:
            yield {"error_model": "numpy", "fastmath": False, "cache": folder is not None}
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
