"""From whatever ``comm=`` takes to a communicator of ours, made once and remembered."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

from treeattn.comm import TreeComm
from treeattn.errors import InputError
from treeattn.ranks.joining import under_launcher
from treeattn.ranks.team import Team
from treeattn.transports.base import Transport

__all__ = ["as_tree_comm", "team_of"]

_of_transports: WeakKeyDictionary[Transport, TreeComm] = WeakKeyDictionary()
_alone: list[TreeComm] = []


def team_of(comm: Any) -> Team:
    """Give the ranks behind whatever ``comm=`` took; collective where a communicator has to be made."""
    return as_tree_comm(comm)._team


def as_tree_comm(comm: Any) -> TreeComm:
    """Give a TreeComm for whatever ``comm=`` took; collective where one has to be made.

    A TreeComm is given back as it is. A bare mpi4py communicator, a Transport or None is wrapped once and
    remembered; with an mpi4py communicator, it is freed. One that broke is given back broken: another would wait for
    ranks that may be gone.
    """
    if isinstance(comm, TreeComm):
        return comm
    if isinstance(comm, Transport):
        if comm not in _of_transports or _of_transports[comm]._team.channel.freed:
            _of_transports[comm] = TreeComm(comm)
        return _of_transports[comm]
    if comm is None and not under_launcher():
        if not _alone or _alone[0]._team.channel.freed:
            _alone[:] = [TreeComm()]
        return _alone[0]
    return _wrapped(comm)


def _wrapped(comm: Any) -> TreeComm:
    if comm is not None and "mpi4py.MPI" not in sys.modules:  # it can't be a communicator: don't start MPI to ask
        raise InputError.of("comm", expected="a TreeComm, an mpi4py communicator or None", got=type(comm).__name__)
    from treeattn.transports.mpi_library import cached_on  # here, so that one process needs no MPI

    return cached_on(comm, TreeComm, lambda found: not found._team.channel.freed, _end)


def _end(made: TreeComm) -> None:
    """Free what was made for a communicator when that is freed, unless something lives on that was made of it."""
    if not made._team.kept:
        made.free()
