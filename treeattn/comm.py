"""The communicator: merges states over a tree of ranks that follows the hardware, or fails on all of them alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from treeattn.agreement import Attempt, Description, Signature
from treeattn.broadcasting import broadcast, check_alike, describe, sendable
from treeattn.calibration import Calibration
from treeattn.cards import open_cards
from treeattn.channel import Channel
from treeattn.collective import check_collective
from treeattn.errors import InputError
from treeattn.gpu_mpi import Verdict, agreed
from treeattn.groups import Beside, Groups
from treeattn.joining import Settings, map_hosts, notes_on, open_transport, under_launcher
from treeattn.lanes import Lanes, Reduction
from treeattn.peer_memory import open_peers
from treeattn.plan import Plan, Stats, Usage
from treeattn.planner import plan_bcast
from treeattn.policy import Policy
from treeattn.session import Session
from treeattn.state import PartialState, state_dtype, state_shape
from treeattn.topology import near_card
from treeattn.transport import Transport
from treeattn.window import open_window
from treeattn.wire import Wire
from treeattn.wire_form import ROUNDING, WireForm

__all__ = ["TYPICAL_PAYLOAD", "TreeComm", "as_tree_comm"]

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")

TYPICAL_SHAPE = (1, 32, 1, 128)
TYPICAL_PAYLOAD = 32 * (128 + 2) * 4
"""Shape, and bytes in float32, of one decode step's state. ``TreeComm.plan`` is for this."""


class TreeComm:
    """Ranks that merge partial attention states over a tree; collective to make.

    Every method but `plan_for` is collective: all ranks call it, in the same order. What is wrong on one rank is
    raised on every rank, and the communicator stays usable. One operation at a time: a second thread gets an error.

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
        merge, which takes some seconds, and remembers it with ``comm``. Shared memory is used where ranks of a host
        have it, for states of up to 4 MiB by how many ranks share 32 MiB, messages elsewhere; with the same radices
        that changes no bits.
        "nccl" lets states go from card to card by NCCL or RCCL, where every rank has a card of its own (not yet run on
        one), and merges in rank order; "p2p" lets the cards of one host read them from each other's memory, after a
        trial (likewise), with those bits.
        "mpi" lets MPI's own collective merge states on the host, in one call, with a compiled operator. MPI then
        decides the order: all ranks have the same bits on Open MPI and MPICH, though MPI's standard does not promise
        it, but not those of other plans, nor `reduce` those of `allreduce`. It is for ranks of MPI, takes neither
        ``deterministic=True`` nor ``wire_dtype``, and was nowhere faster than the default where it was measured.
    model : str, path or CostModel, optional
        By which plans are chosen: the name of a preset, a file from ``treeattn topology --calibrate --save``, or a
        model. By default that of `treeattn.costs` for machines of which nothing is known.
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
    >>> comm.allreduce(treeattn.PartialState.identity((1, 2, 1, 4))).shape
    (1, 2, 1, 4)
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
        self._channel = Channel(open_transport(comm, timeout))
        self.rank, self.size = self._channel.rank, self._channel.size
        self._session = Session(self._channel, self._measured_plan)
        self._lanes = Lanes(self._channel, self._open_lane)
        self._groups = Groups(self._channel, self._lanes, self._session)
        self._guard = self._channel.guard
        self._signatures: dict[Any, Signature] = {}
        try:
            self._join(comm, hosts, plan, model, deterministic, timeout, wire_dtype)
        except Exception:  # raised on every rank, so that all of them come here, unless they have lost each other
            if self.usable:
                self._channel.free()
            raise

    def _join(
        self, comm: Any, hosts: Any, plan: Any, model: Any, deterministic: Any, timeout: Any, wire_dtype: Any
    ) -> None:
        """Agree with the other ranks on the settings and on who is where."""
        channel, transport = self._channel, self._channel.transport
        place = {"name": transport.host_name(), "near": near_card()}
        places = self.consult("TreeComm", (), place)
        names = tuple(each["name"] for each in places)
        channel.name_hosts(names)
        settings, memory, error = Settings(), Verdict((), "not asked"), None
        try:
            settings = Settings.read(self.size, hosts, plan, model, deterministic, timeout, wire_dtype)
            if settings.collective == "mpi":
                check_collective(transport)
            memory = transport.gpu_memory()
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = wrong
        told = self.consult("TreeComm", settings.fields, {"gpu_mpi": memory}, error)
        channel.gpu_memory = agreed(each["gpu_mpi"] for each in told)
        transport.timeout, channel.wire_dtype = settings.timeout, settings.wire_dtype
        channel.collective = settings.collective
        channel.name_hosts(settings.hosts or map_hosts(transport, names, self.consult))
        settings.check_plan(channel.hosts)
        if transport.shares_memory:
            self._session.window = open_window(channel.hosts, self.rank, partial(self.consult, "TreeComm", ()))
        near = [rank for rank, each in enumerate(places) if each["near"]]
        notes = notes_on(comm) if settings.measures else {}
        self._policy = Policy(channel, settings, near, notes)
        if settings.collective == "nccl":
            channel.cards = open_cards(self.rank, channel.hosts, self.consult, transport.wait_for, transport.watched)
        elif settings.collective == "p2p":
            channel.cards = open_peers(
                self.rank, channel.hosts, self.consult, transport.wait_for, lambda: channel.gather(b"")
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """One host label per rank, the same on every rank."""
        return self._channel.hosts

    @property
    def wire_dtype(self) -> str | None:
        """What o travels in, if it is not the states' own dtype."""
        return self._channel.wire_dtype

    def wire_bytes(self, shape: tuple[int, int, int, int], dtype: str = "float32") -> int:
        """Give the bytes that a state takes on the wire, which is what `plan_for` and ``Plan.predict`` take.

        Parameters
        ----------
        shape : tuple of int
            (B, Hq, Tq, Dv), the state's.
        dtype : str
            The state's.
        """
        *rows, width = state_shape(shape)
        return WireForm((*rows, width + 2), state_dtype(dtype), self.wire_dtype).nbytes

    def wire_error(self, payload_bytes: int, root: int | None = None) -> float:
        """Say by how much of the largest ``v``, at most, ``wire_dtype`` adds to the error of ``out``.

        Parameters
        ----------
        payload_bytes, root
            As in `plan_for`.

        Returns
        -------
        float
            0 without ``wire_dtype``; else u for the state and for each merge of the plan.
        """
        if self.wire_dtype is None or self.size == 1:
            return 0.0
        merges = sum(any(each.merges) for each in self.plan_for(payload_bytes, root).rounds)
        return (1 + merges) * ROUNDING[self.wire_dtype]

    def check_dtype(self, dtype: str) -> None:
        """Refuse states that are more precise than ``wire_dtype`` is for.

        Raises
        ------
        InputError
            They are float64.
        """
        if self.wire_dtype is not None and dtype == "float64":
            hint = "float64 states travel whole: leave wire_dtype out, or compute in float32"
            raise InputError.of("wire_dtype", expected="None for float64 states", got=repr(self.wire_dtype), hint=hint)

    @property
    def plan(self) -> Plan:
        """The plan of `allreduce` for one decode step's state (32 heads of width 128 in float32)."""
        return self.plan_for(self.wire_bytes(TYPICAL_SHAPE))

    def plan_for(self, payload_bytes: int, root: int | None = None) -> Plan:
        """Give the plan that a state takes: to all ranks, or to ``root``.

        Parameters
        ----------
        payload_bytes : int
            Bytes of a state on the wire; see `wire_bytes`.
        root : int, optional
            The only rank that wants the result.
        """
        return self._policy.plan(payload_bytes, root, self._session.shares(payload_bytes))

    def _measured_plan(self, payload_bytes: int, root: int | None, shared: bool) -> Plan:
        if self._policy.has_to_measure:
            self._session.make_room(payload_bytes)
            self._policy.measure(payload_bytes, self._session.window)
        return self._policy.plan(payload_bytes, root, shared)

    def _open_lane(self) -> Session:
        """Make a lane, with memory of its own where the communicator has any; collective."""
        memory = self._session.window and open_window(
            self.hosts, self.rank, partial(self._consult_fields, "TreeComm", ())
        )
        return Session(self._channel, self._measured_plan, memory, self._session.agreed)

    @property
    def calibration(self) -> Calibration | None:
        """What was measured for ``plan="auto"``, once a merge or another communicator of these ranks has done it."""
        return self._policy.calibration

    @property
    def deterministic(self) -> bool:
        """Whether rank states travel unmerged."""
        return self._policy.deterministic

    @property
    def stats(self) -> Stats:
        """What this rank has sent, and how many rounds it went through, since the communicator was made."""
        return self._channel.tally.stats

    @property
    def gpu_mpi(self) -> Verdict:
        """Families of GPU memory that every rank's MPI takes pointers to, and how that is known."""
        return self._channel.gpu_memory

    @property
    def native_allreduce(self) -> bool:
        """Whether the runtime has an all-reduce of its own, as MPI does."""
        return self._channel.transport.native_allreduce

    @property
    def usage(self) -> Usage:
        """What the last merge, or other operation that sends, took on this rank besides messages."""
        return self._channel.tally.usage

    def total_stats(self) -> Stats:
        """Add up every rank's `stats` as they were before this call; collective."""
        return Stats.total(Stats(**each) for each in self.consult("total_stats", (), asdict(self.stats)))

    @property
    def usable(self) -> bool:
        """Whether it was neither freed nor broken."""
        return self._guard.reason is None

    @property
    def freed(self) -> bool:
        """Whether `free` was called."""
        return self._channel.freed

    def __repr__(self) -> str:
        hosts = len(set(self.hosts))
        kind = f"rank {self.rank} of {self.size} on {hosts} host{'s' * (hosts != 1)}"
        plan = self._channel.collective or str(self._policy)
        return f"TreeComm({kind}, plan={plan!r})"

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
        shortcut = self._session.shortcut
        if shortcut is not None and shortcut.is_allreduce:
            merged = shortcut.merge(state, out)
            if merged is not None:
                return merged
        merged = self.exchange(self._attempt("allreduce", state, None), out=out)
        assert merged is not None, "without a root, every rank has the result"
        return merged

    def allreduce_begin(self, state: PartialState, *, out: PartialState | None = None) -> Reduction:
        """Begin to merge the states of all ranks, and compute something else until the result is wanted.

        Up to `treeattn.lanes.IN_FLIGHT` (8) may be in flight. All ranks begin and end them in the same order; calls of
        other methods may come in between. What the first ranks of hosts have to pass on moves in later calls.

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
        attempt = self._attempt("allreduce_begin", state, None)
        attempt = attempt if out is None else _with_out(attempt, out)
        if self.size > 1:
            return self._lanes.begin(attempt, out)
        merged = self.exchange(attempt, out=_copied(attempt) if out is None else out)
        return Reduction(lambda: merged)

    def reduce(self, state: PartialState, root: int = 0) -> PartialState | None:
        """Merge the states of all ranks; ``root`` gets the result, with the bits of `allreduce`, others None.

        Parameters
        ----------
        state : PartialState
            This rank's, of the same shape and dtype on every rank.
        root : int
            The rank that gets the result, the same on every rank.

        Raises
        ------
        InputError
            On every rank, if any rank's argument is wrong, or states or roots differ.
        """
        return self.exchange(self._attempt("reduce", state, root))

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
        with self._guard:
            given, error = None, None
            try:
                root = _check_root(root, self.size)
                given = sendable(array, self.rank == root)
            except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
                error = wrong
            told = self._consult(Description("bcast", root, values={"array": describe(given)}), error)
            dtype, shape = check_alike([each["array"] for each in told], root)
            data = given if given is not None and self.rank == root else np.empty(shape, dtype)
            plan = plan_bcast(self.hosts, root, self._policy.radices(data.nbytes, self._session.shares(data.nbytes)))
            self._channel.call(broadcast, plan, self._channel.transport, data, self._channel.tally)
            return data

    def free(self) -> None:
        """Give everything back; collective. Again is fine; any other use raises `CommError`.

        Raises
        ------
        InputError
            On every rank, if another rank calls something else; nothing is freed then.
        """
        if self.usable:
            self.consult("free", (), {})
            self._lanes.complete()
            self._channel.free()
            self._session.forget()
            self._lanes.forget()

    def __enter__(self) -> TreeComm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:  # else other ranks may not come here, and freeing would wait for them
            self.free()

    def exchange(self, attempt: Attempt, *, out: PartialState | None = None) -> PartialState | None:
        """Merge the attempts of all ranks, or raise on all of them; what `decode` is made of.

        Parameters
        ----------
        attempt : Attempt
            This rank's state and what it believes the call to be, or the error that kept it from having one.
        out : PartialState, optional
            A state to overwrite.

        Returns
        -------
        PartialState or None
            None on ranks that are not the root, where there is one.
        """
        shortcut = self._session.shortcut
        if shortcut is not None and attempt.signature is shortcut.signature:  # kept by those who make signatures
            merged = shortcut.merge(attempt.state, out, attempt)
            if merged is not None:
                return merged
        with self._guard:
            attempt = attempt if out is None else _with_out(attempt, out)
            if self.size > 1:
                return self._session.merge(attempt, out)
            if attempt.error is not None or attempt.state is None:
                raise attempt.error or InputError.of("attempt", expected="a state or an error", got="neither")
            return attempt.state if out is None else _copy(attempt.state, out)

    def in_groups(self, groups: int, attempt: Callable[[int, Beside], Attempt]) -> list[PartialState | None]:
        """Merge groups of one call, the state of one under way while the next one's is computed.

        Parameters
        ----------
        groups : int
        attempt : callable
            As in `treeattn.groups.Groups.run`.

        Returns
        -------
        list of PartialState or None
            By group, what `exchange` would give; states are merged in place.
        """
        if self.size == 1:
            tried = (attempt(index, lambda work: work()) for index in range(groups))
            return [self.exchange(each, out=each.state) for each in tried]
        with self._guard:
            return self._groups.run(groups, attempt)

    def beside(self, work: Callable[[], T]) -> T:
        """Do ``work`` while what was begun moves on, as messages of MPI only do inside of calls.

        Parameters
        ----------
        work : callable
            It must not use the communicator, and runs on another thread.

        Returns
        -------
        What ``work`` returns.
        """
        return self._lanes.beside(work)

    def consult(
        self,
        operation: str,
        fields: tuple[tuple[str, Any], ...],
        values: dict[str, Any],
        error: Exception | None = None,
    ) -> list[dict[str, Any]]:
        """Compare ``fields`` over all ranks and share ``values``; for calls that are not on the hot path.

        Parameters
        ----------
        operation : str
            What the call is, for messages.
        fields : tuple of (name, value)
            What must be the same on every rank; values that JSON can carry.
        values : dict
            What every rank gets to know; likewise.
        error : Exception, optional
            What went wrong on this rank.

        Returns
        -------
        list of dict
            The values, by rank.

        Raises
        ------
        Exception
            On every rank, if any has an error or ``fields`` differ.
        """
        with self._guard:
            return self._consult_fields(operation, fields, values, error)

    def _consult_fields(
        self,
        operation: str,
        fields: tuple[tuple[str, Any], ...],
        values: dict[str, Any],
        error: Exception | None = None,
    ) -> list[dict[str, Any]]:
        return self._consult(Description(operation, None, [list(pair) for pair in fields], values=values), error)

    def converse(self, function: Callable[[Wire], T]) -> T:
        """Run an operation that has its own pattern of messages; collective.

        Parameters
        ----------
        function : callable
            Gets the `Wire`. Every rank's must send what the others' receive, so agree by `consult` before. What it
            raises breaks the communicator: keep an error of this rank's own until all messages are through, and let
            another `consult` report it.
        """
        with self._guard:
            result: T = self._channel.call(self._conversation, function)
            return result

    def _conversation(self, function: Callable[[Wire], T]) -> T:
        wire = Wire(self._channel)
        result = function(wire)
        self._channel.tally.usage = wire.usage
        return result

    def _consult(self, description: Description, error: Exception | None) -> list[dict[str, Any]]:
        if error is not None:
            description = Description.of_error(error, description.operation)
        return self._session.consult(description, error)

    def _attempt(self, operation: str, state: Any, root: Any) -> Attempt:
        try:
            root = None if operation in ("allreduce", "allreduce_begin") else _check_root(root, self.size)
            return Attempt(self._signature(operation, root, state), state, None)
        except Exception as error:  # whatever it is, the others must hear of it before it is raised here
            return Attempt(None, None, error)

    def _signature(self, operation: str, root: int | None, state: Any) -> Signature:
        if not isinstance(state, PartialState):
            raise InputError.of("state", expected="a PartialState", got=type(state).__name__)
        key = operation, root, state._packed.shape, state._packed.dtype
        found = self._signatures.get(key)
        if found is None:
            self.check_dtype(state.dtype.name)
            fields = (("state.shape", state.shape), ("state.dtype", state.dtype.name))
            found = Signature(operation, root, fields, state._packed.shape, state.dtype.name)
            self._signatures[key] = found
        return found


def _check_root(root: Any, size: int) -> int:
    if isinstance(root, (int, np.integer)) and not isinstance(root, bool) and 0 <= root < size:
        return int(root)
    raise InputError.of("root", expected=f"a rank from 0 to {size - 1}", got=repr(root))


def _with_out(attempt: Attempt, out: Any) -> Attempt:
    """Let an ``out`` that can't take the result count as this rank's error."""
    state = attempt.state
    if state is None or attempt.error is not None or (isinstance(out, PartialState) and _alike(state, out)):
        return attempt
    return replace(attempt, error=InputError.of("out", expected=f"a state like {state!r}", got=repr(out)))


def _copied(attempt: Attempt) -> PartialState | None:
    """Give room for a copy of a state that its owner may soon overwrite."""
    state = attempt.state
    return None if state is None else state.like(state.ops.empty(state._packed.shape, state.dtype.name))


def _alike(state: PartialState, out: PartialState) -> bool:
    return (state.shape, state.dtype, state.ops.name) == (out.shape, out.dtype, out.ops.name)


def _copy(state: PartialState, out: PartialState) -> PartialState:
    if out is not state:
        state.ops.merge(out._packed, [state._packed])
    return out


_of_transports: WeakKeyDictionary[Transport, TreeComm] = WeakKeyDictionary()
_alone: list[TreeComm] = []


def as_tree_comm(comm: Any) -> TreeComm:
    """Give a TreeComm for whatever ``comm=`` took; collective where one has to be made.

    A TreeComm is given back as it is. A bare mpi4py communicator, a Transport or None is wrapped once and
    remembered; it is forgotten with the communicator. One that broke is given back broken: another would wait for
    ranks that may be gone.
    """
    if isinstance(comm, TreeComm):
        return comm
    if isinstance(comm, Transport):
        if comm not in _of_transports or _of_transports[comm].freed:
            _of_transports[comm] = TreeComm(comm)
        return _of_transports[comm]
    if comm is None and not under_launcher():
        if not _alone or _alone[0].freed:
            _alone[:] = [TreeComm()]
        return _alone[0]
    return _wrapped(comm)


def _wrapped(comm: Any) -> TreeComm:
    if comm is not None and "mpi4py.MPI" not in sys.modules:  # it can't be a communicator: don't start MPI to ask
        raise InputError.of("comm", expected="a TreeComm, an mpi4py communicator or None", got=type(comm).__name__)
    from treeattn import mpi_transport  # here, so that one process needs no MPI

    return mpi_transport.cached_on(comm, TreeComm, lambda found: not found.freed)
