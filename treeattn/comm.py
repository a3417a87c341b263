"""The communicator: merges states over a tree of ranks that follows the hardware, or fails on all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy.typing as npt

from treeattn.arguments.checks import refuse_copies
from treeattn.errors import InputError
from treeattn.planning.plan import Stats
from treeattn.ranks.facts import Facts
from treeattn.ranks.joining import join
from treeattn.state import PartialState
from treeattn.steps.lanes import Reduction

__all__ = ["TreeComm"]

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")


class TreeComm(Facts):
    """Ranks that merge partial attention states over a tree; collective to make.

    Methods are collective: all ranks call them, in the same order. Only `plan_for`, `wire_bytes`, `wire_error` and
    `beside` are each rank's own affair. What is wrong on one rank is raised on every rank, and the communicator stays
    usable. On several ranks, one operation at a time: a second thread gets an error. What Ctrl-C cuts short there is
    broken; a process that is alone goes on. As a context manager, it is freed at the end.

    Parameters
    ----------
    comm : mpi4py communicator, Transport or None
        It is duplicated. None is COMM_WORLD under a launcher, else one process, for which MPI is not imported.
    hosts : sequence of str, optional
        One label per rank; ranks with one label form a subtree. What is before a label's last slash is the host's
        rack, as in "rack0/a". By default ranks share a host where the host name and MPI's shared-memory split both say
        so. ``TREEATTN_HOSTS`` (comma-separated) does the same for the world; a part of it asks MPI.
    plan : str, path, sequence, Radices or Plan, optional
        The tree: a name ("shared", "flat", "oneshot", "binary", "reduce", "split"), radices (inside a host, between
        hosts) or (inside a host, between hosts of a rack, between racks), each a number or "all", the first also
        "shared", or a plan for these hosts, or its file, whose radices are taken; see `Radices`. By default that which
        ``model`` finds cheapest, a pure function of hosts and payload. "auto" measures a model instead, at the first
        merge, which takes one to three seconds, and remembers it with ``comm``. Shared memory is used where ranks of a
        host have it, for states of up to 4 MiB by how many ranks share 32 MiB, messages elsewhere; with the same
        radices that changes no bits.
        "nccl" lets states go from card to card by NCCL or RCCL, where every rank has a card of its own (not yet run on
        one), and merges in rank order; "p2p" lets the cards of one host read them from each other's memory, after a
        trial (likewise), with those bits.
        "mpi" lets MPI's own collective merge states on the host, in one call, with a compiled operator. MPI then
        decides the order: all ranks have the same bits on Open MPI and MPICH, though MPI's standard does not promise
        it, but not those of other plans, nor `reduce` those of `allreduce`. It is for ranks of MPI, takes neither
        ``deterministic=True`` nor ``wire_dtype``, and was nowhere faster than the default where it was measured.
    model : str, path or CostModel, optional
        By which plans are chosen: the name of a preset, a file from ``treeattn topology --calibrate --save``, or a
        model. By default that of `treeattn.costs.model` for machines of which nothing is known.
    deterministic : bool
        Carry rank states unmerged and merge them in rank order: more bytes, and bits that do not depend on hosts.
    timeout : float, optional
        Seconds that a rank may stay silent; 0 waits for ever. ``TREEATTN_TIMEOUT`` or 300 by default. A rank that
        compiles a kernel for the first time is silent too: ``treeattn warmup`` does that beforehand.
    wire_dtype : "bfloat16", "float16" or None
        Let o travel in 16 bit, and l and m in float32 as ever: about half the bytes, for float32 states only. It is
        rounded when a rank sends its state and at each merge on the way, each time by at most u of itself, u = 2**-8
        for bfloat16 and 2**-11 for float16. So ``out`` is off by at most (1 + merges) u max(abs(v)) more, which
        `wire_error` computes; lse is as exact as without it, and all ranks have the same bits.

    Attributes
    ----------
    rank, size : int
    hosts : tuple of str
        One label per rank, the same on every rank.
    wire_dtype : str or None

    Raises
    ------
    InputError
        On every rank, if an argument is wrong on any, or differs.
    CommError
        The launcher started several ranks but MPI sees one.
    MissingDependencyError
        Several ranks, but no MPI.

    Examples
    --------
    >>> import treeattn
    >>> comm = treeattn.TreeComm()
    >>> comm.rank, comm.size
    (0, 1)
    >>> state = treeattn.PartialState.identity((1, 2, 1, 4))
    >>> comm.allreduce(state).shape, comm.reduce(state, root=0).shape
    ((1, 2, 1, 4), (1, 2, 1, 4))
    >>> comm.bcast([1.0, 2.0]).tolist(), comm.total_stats().messages
    ([1.0, 2.0], 0)
    >>> comm.free()
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        hosts: Any = None,
        plan: Any = None,
        model: Any = None,
        deterministic: bool = False,
        timeout: float | None = None,
        wire_dtype: str | None = None,
    ) -> None:
        options = {"hosts": hosts, "plan": plan, "model": model, "deterministic": deterministic}
        super().__init__(join(comm, {**options, "timeout": timeout, "wire_dtype": wire_dtype}))

    def allreduce(self, state: PartialState, *, out: PartialState | None = None) -> PartialState:
        """Merge the states of all ranks; every rank gets the result.

        Parameters
        ----------
        state : PartialState
            This rank's, of the same shape and dtype on every rank.
        out : PartialState, optional
            A state to overwrite, which may be ``state``.

        Returns
        -------
        PartialState
            The same bits on every rank, on every run, whatever arrives first.

        Raises
        ------
        InputError
            On every rank, if any rank's argument is wrong or the states differ in shape or dtype.
        """
        quick = self._team.session.quick
        known, target, arguments = quick.repeated
        merged: PartialState | None = None
        if state is known and out is target:
            found = None
            try:
                found = quick.run(*arguments)
                merged = out if found == 0 else quick.go_on(found, state, out)
            except BaseException as error:
                quick.fail(found, error)
                raise
        elif quick.is_allreduce:
            merged = quick.merge(state, out)
        return self._team.allreduce(state, out) if merged is None else merged

    def allreduce_begin(self, state: PartialState, *, out: PartialState | None = None) -> Reduction:
        """Begin to merge the states of all ranks, and compute something else until the result is wanted.

        Up to `treeattn.steps.lanes.IN_FLIGHT` (8) may be in flight. All ranks begin and end them in the same order;
        calls of other methods may come in between. What the first ranks of hosts have to pass on moves in later calls.

        Parameters
        ----------
        state : PartialState
            This rank's, of the same shape and dtype on every rank; it may be overwritten once this returns.
        out : PartialState, optional
            A state to overwrite at the end.

        Returns
        -------
        Reduction
            Its ``end()`` gives the merged state, with the bits of `allreduce`, or raises what `allreduce` would. (If
            nothing was merged on this communicator before, this call raises it.)

        Examples
        --------
        >>> import treeattn
        >>> comm = treeattn.TreeComm()
        >>> begun = [comm.allreduce_begin(treeattn.PartialState.identity((1, n, 1, 4))) for n in (2, 3)]
        >>> [each.end().shape for each in begun]
        [(1, 2, 1, 4), (1, 3, 1, 4)]
        """
        return self._team.begin(state, out)

    def beside(self, work: Callable[[], T]) -> T:
        """Do ``work`` while what was begun moves on, as messages of MPI only move inside of its calls.

        Parameters
        ----------
        work : callable
            Takes nothing; it must not use the communicator, and runs on another thread.

        Returns
        -------
        object
            What ``work`` returns.

        Examples
        --------
        >>> import treeattn
        >>> comm = treeattn.TreeComm()
        >>> begun = comm.allreduce_begin(treeattn.PartialState.identity((1, 2, 1, 4)))
        >>> comm.beside(lambda: 6 * 7), begun.end().shape
        (42, (1, 2, 1, 4))
        """
        if not callable(work):
            raise InputError.of("work", expected="a function", got=type(work).__name__)
        return self._team.beside(work)

    def reduce(self, state: PartialState, root: int = 0) -> PartialState | None:
        """Merge the states of all ranks; ``root`` gets the result, with the bits of `allreduce`, others None.

        Parameters
        ----------
        state : PartialState
            This rank's, of the same shape and dtype on every rank.
        root : int
            The rank that gets the result, the same on every rank.

        Returns
        -------
        PartialState or None
            The merged state on ``root``.

        Raises
        ------
        InputError
            On every rank, if any rank's argument is wrong, or states or roots differ.
        """
        return self._team.reduce(state, root)

    def bcast(self, array: Any, root: int = 0) -> Array:
        """Give every rank the root's array.

        Parameters
        ----------
        array : array or None
            None is fine on ranks that are not root: shape and dtype come with the data. An array there must have
            the root's shape and dtype; it is not changed.
        root : int

        Returns
        -------
        array
            On the root its own, elsewhere a new one.

        Raises
        ------
        InputError
            On every rank, if any rank's argument is wrong, or roots, shapes or dtypes differ.
        """
        return self._team.bcast(array, root)

    def total_stats(self) -> Stats:
        """Add up every rank's `stats` as they were before this call; collective.

        Returns
        -------
        Stats
            Messages and bytes of all ranks together; rounds and collectives, which all share, once.
        """
        return Stats.total(Stats(**each) for each in self._team.consult("total_stats", (), asdict(self.stats)))

    def free(self) -> None:
        """Give everything back; collective. Again is fine; any other use raises `CommError`.

        Raises
        ------
        InputError
            On every rank, if another rank calls something else; nothing is freed then.
        """
        self._team.free()

    def __reduce__(self) -> NoReturn:
        refuse_copies(self)

    def __enter__(self) -> TreeComm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:  # else other ranks may not come here, and freeing would wait for them
            self.free()
