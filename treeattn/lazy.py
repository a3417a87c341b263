"""Packages whose public names are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Give the ``__getattr__`` and the ``__dir__`` of ``package``.

    Parameters
    ----------
    package : str
    homes : mapping
        Of each public name, the module inside the package that has it; a module of that name is public itself.

    Examples
    --------
    >>> look_up, listed = lazily("treeattn.testing", {"run_ranks": "ranks"})
    >>> look_up("run_ranks").__module__, "run_ranks" in listed()
    ('treeattn.testing.ranks', True)
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(f"{package}.{homes[name]}")
        value = home if homes[name] == name else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        own = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*own, *homes})

    return look_up, listed
