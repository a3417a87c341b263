"""Every exception that treeattn raises on purpose: one small tree.

Each leaf is also the built-in exception that ordinary code would catch (``ValueError``, ``RuntimeError``, ...).
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CommError",
    "InputError",
    "MissingDependencyError",
    "RankTimeout",
    "TreeattnError",
]


TOLD_ELSEWHERE = "treeattn_told_elsewhere"
"""Attribute of an exception that all ranks raise, true but on one rank: a job need not print it from every rank."""


class TreeattnError(Exception):
    """Base of all errors that treeattn raises on purpose."""


class InputError(TreeattnError, ValueError):
    """An argument is not what the function takes; the message begins with the argument's name."""

    @classmethod
    def of(cls, argument: str, *, expected: object, got: object, hint: str = "") -> InputError:
        """Build the one form that every such message has: ``argument: expected ..., got ...``."""
        text = f"{argument}: expected {expected}, got {got}"
        return cls(f"{text}; {hint}" if hint else text)


class BackendError(TreeattnError, RuntimeError):
    """No backend can do what was asked; the message lists each backend's reasons."""


class MissingDependencyError(TreeattnError, ImportError):
    """An optional package is not installed; the message names the install command."""


class CommError(TreeattnError, RuntimeError):
    """A communicator can't do this: it is broken, freed, in use by another thread, or disagrees with its launcher."""


class RankTimeout(CommError, TimeoutError):  # noqa: N818 - a public name, and a TimeoutError by kind
    """A rank stayed silent past the deadline; the communicator is broken from here on.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that stayed silent; empty where that is not known, or where it is this one that came too late.
    hosts : tuple of str
        Their hosts.
    step : int or None
        The last step in which they were heard; None if that was in none.
    """

    def __init__(
        self, text: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = (), step: int | None = None
    ) -> None:
        super().__init__(text)
        self.ranks, self.hosts, self.step = ranks, hosts, step
