"""From a name, an object or nothing to a backend that can run; built-in ones first, then entry points."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from treeattn.arguments.devices import on_device
from treeattn.backends.base import Backend
from treeattn.errors import BackendError, InputError

if TYPE_CHECKING:
    from treeattn.arguments.spec import Spec

__all__ = ["available", "find", "following", "home_of", "names", "notes"]

BUILT_IN = {
    "cpu": "treeattn.backends.cpu:CpuBackend",
    "reference": "treeattn.backends.reference:ReferenceBackend",
    "nvidia": "treeattn.backends.nvidia:NvidiaBackend",
    "amd": "treeattn.backends.amd:AmdBackend",
    "pcie": "treeattn.backends.pcie:PcieBackend",
    "auto": "treeattn.backends.auto:AutoBackend",
    "fake": "treeattn.testing.fake_backend:FakeBackend",
}
GROUP = "treeattn.backends"
UNLISTED = ("fake",)
"""Built in for tests: taken by name, and not offered."""
DEFAULT = "cpu"


def names() -> list[str]:
    """Names that ``backend=`` offers, built-in ones first."""
    return [*(name for name in BUILT_IN if name not in UNLISTED), *_plugins()]


def find(backend: Any = None, spec: Spec | None = None) -> Backend:
    """Give the backend that ``backend`` names, checked against ``spec`` where one is given.

    Parameters
    ----------
    backend : str, Backend or None
        None takes the default, which follows the array: NumPy arrays run on the CPU.

    Raises
    ------
    InputError
        No backend has that name.
    BackendError
        It can't run here, or can't run this call; every reason is in the message.
    """
    found = backend if isinstance(backend, Backend) else load(DEFAULT if backend is None else _named(backend))
    if reasons := found.reasons(spec):
        raise BackendError(f"backend {found.name!r} can't run this: {'; '.join(reasons)}")
    return found


def following(spec: Spec) -> str:
    """Name the backend that a call gets which names none: it follows q."""
    return _following(spec.on_device)


def home_of(array: Any) -> Backend:
    """Give the backend in whose memory a cache begins that was asked for none: it follows the first tokens."""
    return load(_following(on_device(array)))


def _following(on_a_card: bool) -> str:
    return "auto" if on_a_card else DEFAULT


def notes() -> dict[str, str]:
    """Give what a user should know of each built-in backend, even where it can run."""
    return {name: load(name).note for name in BUILT_IN if load(name).note}


def available() -> dict[str, list[str]]:
    """Every backend by name, with the reasons why it can't run here (none where it can).

    A plug-in that can't be loaded warns, and has that for its reason.
    """
    found = {}
    for name in names():
        try:
            found[name] = load(name).reasons()
        except InputError:  # a setting that keeps numba from being imported
            raise
        except Exception as error:  # of a stranger's code, whatever it is: never the end of the program
            found[name] = [f"{type(error).__name__}: {error}"]
            warnings.warn(f"backend {name!r} is left out: {found[name][0]}", stacklevel=2)
    return found


def _named(backend: Any) -> str:
    if isinstance(backend, str):
        return backend
    raise InputError.of("backend", expected="a name or a Backend object", got=type(backend).__name__)


@cache
def load(name: str) -> Backend:
    """Import and make the backend called ``name``, once."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        made = getattr(importlib.import_module(module), attribute)()
    elif name in _plugins():
        made = _plugin(name)
    else:
        raise InputError.of("backend", expected=f"one of {', '.join(map(repr, names()))}", got=repr(name))
    if not isinstance(made, Backend):
        raise BackendError(f"backend {name!r} is not a treeattn.backends.base.Backend but {type(made).__name__}")
    return made


def _plugin(name: str) -> Any:
    """Make a plug-in's backend; what goes wrong in its code is told with its place."""
    point = _plugins()[name]
    try:
        return point.load()()
    except Exception as error:
        raise BackendError(f"{point.value} could not be loaded ({type(error).__name__}: {error})") from error


@cache
def _plugins() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in BUILT_IN or point.name in found:
            warnings.warn(f"backend {point.name!r} of {point.value} is ignored: the name is taken", stacklevel=2)
        else:
            found[point.name] = point
    return found
