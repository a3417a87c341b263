"""How kernels are compiled: numba with no contraction, one signature each, kept on disk between runs.

numba's own cache has three gaps that this module closes. A function's entry isn't renewed when a function that it
calls changes; two processes that fill one index at once can lose or swap entries; and a folder that can't be written
is an error. Here each set of sources and each kind of processor has a folder of its own, an entry point has exactly
one signature, one process compiles while the others of the host wait, and without a folder the code lives in memory.
(`treeattn.kernels.code_folder` chooses the folder.) Code that is there already is loaded by all at once, and without
what numba would read first to be able to compile: of 16 ranks that begin together, each waits for its own alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numba
from numba.core import config as _config
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime.nrt import rtsys

from treeattn.kernels.code_folder import cache_folder

config: Any = _config  # its settings appear at run time, out of a type checker's sight

__all__ = ["Compilation", "account", "compilations", "entry", "inline", "loops", "part", "watching"]

Function = TypeVar("Function", bound=Callable[..., Any])

Make: TypeAlias = Callable[[Callable[..., Any], Mapping[str, Any]], Any]
"""Makes a function ready, with numba's options."""


class _Inlined(CPUDispatcher):
    """A function that compiled code calls. Nothing is compiled by which Python could: that takes a fifth more time."""

    def __call__(self, *arguments: Any) -> Any:
        return self.py_func(*arguments)


def _inlined(**options: Any) -> Callable[[Function], Function]:
    fixed = {"nopython": True, "error_model": "numpy", "nogil": True}
    without = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    make: Any = _Inlined

    def decorate(function: Function) -> Function:
        made: Function = make(function, targetoptions={**fixed, **without, **options})
        return made

    return decorate


inline = _inlined(fastmath=False)
"""For functions that kernels call: no contraction, so one sequence of operations gives the same bits everywhere.

``fastmath=False`` is said aloud, for numba lets a function that doesn't say it inherit the flags of its first caller.
"""

loops = _inlined(fastmath={"contract", "reassoc", "nsz"}, forceinline=True)
"""For inner loops of which no two machines must agree: sums may be reordered and contracted, so that they vectorise.

NaN and infinities stay what they are: the other flags would make masks and empty shards undefined. Always inlined: a
symbol that several compiled parts share is resolved to whichever copy was loaded first, and copies that were vectorised
in different places sum in different orders, so that code just compiled and code from the disk would differ in bits.
"""


class Compilation(NamedTuple):
    """A function that was compiled, or loaded from the disk, and the seconds that it took, waiting for others too."""

    name: str
    seconds: float
    loaded: bool


def entry(signature: Any, *, nogil: bool = True) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Make a function an entry point from Python: calling the result compiles it, or loads it, once and gives it.

    Parameters
    ----------
    signature : str or numba signature
        Its one signature.
    nogil : bool
        Whether other threads of Python run meanwhile; a function that does not say so from the beginning may say so
        itself, by `treeattn.kernels.memory.let_threads_run`.
    """

    def make(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        dispatcher = numba.njit(**{**options, "nogil": nogil, "no_cfunc_wrapper": True})(function)
        dispatcher.compile(signature)
        return dispatcher

    def decorate(function: Callable[..., Any]) -> Callable[[], Any]:
        @cache
        def compiled() -> Any:
            with _noted(function) as hits:
                dispatcher = _made_ready(function, make)
                hits.extend(dispatcher.stats.cache_hits)
            (only,) = dispatcher.overloads.values()
            return only.entry_point  # the dispatcher would look for the one that takes such arguments, in every call

        return compiled

    return decorate


def part(signature: str) -> Callable[[Callable[..., Any]], Callable[[], int]]:
    """Make a function a part that compiled code calls by address: calling the result compiles it once and gives that.

    Parts keep the number of compiled variants a sum, not a product: an entry point knows only their signatures.
    """

    def make(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
        return numba.cfunc(signature, **options)(function)

    def decorate(function: Callable[..., Any]) -> Callable[[], int]:
        @cache
        def compiled() -> Any:
            with _noted(function) as hits:
                made = _made_ready(function, make)
                hits.extend(range(made.cache_hits))
            return made

        return lambda: int(compiled().address)

    return decorate


def _made_ready(function: Callable[..., Any], make: Make) -> Any:
    """Load a function's code, or compile it while the other processes of this host wait for that."""
    with _compiling() as options:
        found = _loaded(function, options, make)
        if found is None:
            with _one_process(cache_folder()):
                found = _loaded(function, options, make) or _kept_if_possible(function, options, make)
        return found


def _loaded(function: Callable[..., Any], options: Mapping[str, Any], make: Make) -> Any:
    """Give a function from the disk, or None where its code is not there, or damaged."""
    if options["cache"]:
        with contextlib.suppress(Exception), _loading():
            return make(function, options)
    return None


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Let numba load code, but not compile: for that it would read all functions that it knows, which takes longest.

    It has its target do so before it looks for code, and again before it compiles. Loaded code needs no more than the
    functions by which numba counts references.
    """
    target: Any = cpu_target.target_context
    with global_compiler_lock, contextlib.ExitStack() as changed:
        for context, refresh in ((target, partial(rtsys.initialize, target)), (target.typing_context, _refuse)):
            context.refresh = refresh
            changed.callback(delattr, context, "refresh")
        yield


def _refuse() -> None:
    raise LookupError("there is no code to load")


def _kept_if_possible(function: Callable[..., Any], options: Mapping[str, Any], make: Make) -> Any:
    """Make a function ready, in memory alone where the disk is full, or has a damaged file of it, which then goes."""
    try:
        return make(function, options)
    except Exception:
        if not options["cache"]:
            raise
        for file in Path(config.CACHE_DIR).rglob(f"*{function.__name__}-*.nb[ic]"):
            with contextlib.suppress(OSError):
                file.unlink()
        return make(function, {**options, "cache": False})


def compilations() -> tuple[Compilation, ...]:
    """Give what this process has made ready so far, in order."""
    return tuple(_done)


def account(done: Sequence[Compilation]) -> str:
    """Say in words how many functions were compiled and loaded, and what each kind took.

    Examples
    --------
    >>> account([Compilation("see", 1.5, False), Compilation("weigh", 0.5, True), Compilation("scores", 0.25, True)])
    '1 function compiled in 1.50 s, 2 loaded in 0.75 s'
    """
    parts: list[str] = []
    for what, loaded in (("compiled", False), ("loaded", True)):
        seconds = [each.seconds for each in done if each.loaded is loaded]
        noun = "" if parts else " functions" if len(seconds) > 1 else " function"
        if seconds:
            parts.append(f"{len(seconds)}{noun} {what} in {sum(seconds):.2f} s")
    return ", ".join(parts) or "no function was compiled or loaded"


@contextlib.contextmanager
def watching(begin: Callable[[str], None], end: Callable[[Compilation], None]) -> Iterator[None]:
    """Call ``begin`` with the name of each function that is about to be made ready, and ``end`` when it is."""
    watcher = begin, end
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


_one_thread = threading.Lock()
_done: list[Compilation] = []
_watchers: list[tuple[Callable[[str], None], Callable[[Compilation], None]]] = []


@contextlib.contextmanager
def _noted(function: Callable[..., Any]) -> Iterator[list[Any]]:
    """Note how long a function takes to be made ready; it was loaded if the list has anything in the end."""
    name, hits, start = function.__name__.strip("_").replace("_", " "), list[Any](), time.perf_counter()
    for begin, _ in _watchers:
        begin(name)
    yield hits
    _done.append(Compilation(name, time.perf_counter() - start, bool(hits)))
    for _, end in _watchers:
        end(_done[-1])


@contextlib.contextmanager
def _compiling() -> Iterator[dict[str, Any]]:
    """Give numba's options, with its cache in our folder: it takes the place from its configuration, while it wraps."""
    folder = cache_folder()
    with _one_thread:
        before = config.CACHE_DIR
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
