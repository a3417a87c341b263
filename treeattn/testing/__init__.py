"""Fakes and checks for code that builds on treeattn: ranks as threads, a fake backend, conformance tests, an oracle.

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treeattn.testing.conformance import BackendConformance
    from treeattn.testing.fake_backend import FakeBackend
    from treeattn.testing.ranks import run_ranks
    from treeattn.testing.wire import over_the_wire

__all__ = ["BackendConformance", "FakeBackend", "over_the_wire", "run_ranks"]

_HOMES = {
    "BackendConformance": "conformance",
    "FakeBackend": "fake_backend",
    "over_the_wire": "wire",
    "run_ranks": "ranks",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home, on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'treeattn.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"treeattn.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Name what is public, and what every module has."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
