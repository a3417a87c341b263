"""Backends: which kernels run for which arrays, and how a state is merged, packed and finished there.

To write one, read `treeattn.backends.base`. `names` lists what ``backend=`` takes, `available` says why one can't run
here, and `find` gives it.

>>> import treeattn
>>> treeattn.backends.available()["cpu"]
[]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeattn.lazy import lazily

if TYPE_CHECKING:
    from treeattn.backends.base import Attend, Backend, Capabilities, Prepared, StateOps
    from treeattn.backends.host import HostOps, StagedOps
    from treeattn.backends.memory import HostMemory, KVMemory
    from treeattn.backends.registry import available, find, names

if __name__ != "treeattn.backends":
    raise ImportError(f"import treeattn.backends, not {__name__}: the folder installs inside the package")

__all__ = [
    "Attend",
    "Backend",
    "Capabilities",
    "HostMemory",
    "HostOps",
    "KVMemory",
    "Prepared",
    "StagedOps",
    "StateOps",
    "available",
    "find",
    "names",
]

_HOMES = {
    "Attend": "base",
    "Backend": "base",
    "Capabilities": "base",
    "HostMemory": "memory",
    "HostOps": "host",
    "KVMemory": "memory",
    "Prepared": "base",
    "StagedOps": "host",
    "StateOps": "base",
    "available": "registry",
    "find": "registry",
    "names": "registry",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
