"""Fakes and checks for code that builds on treeattn: ranks as threads, a fake backend, conformance tests, an oracle.

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeattn.lazy import lazily

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

__getattr__, __dir__ = lazily(__name__, _HOMES)
