"""The communicator: merges states over a tree of ranks that follows the hardware, or fails on all of them alike."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from treeattn.agreement import CONSULT, ERROR, OTHER, Attempt, Description, Header, Signature, conclude
from treeattn.arrays import KV_DTYPES, narrow_dtype
from treeattn.errors import CommError, InputError, RankTimeout
from treeattn.executor import Exchange, Tally, broadcast
from treeattn.guard import Guard
from treeattn.joining import Settings, map_hosts, open_transport, under_launcher
from treeattn.plan import Plan, Stats
from treeattn.planner import choose_radices, plan_allreduce, plan_bcast, plan_reduce
from treeattn.state import PartialState
from treeattn.transport import Silence, Transport

__all__ = ["TYPICAL_PAYLOAD", "TreeComm", "as_tree_comm"]

Array: TypeAlias = npt.NDArray[Any]
T = TypeVar("T")

TYPICAL_PAYLOAD = 32 * (128 + 2) * 4
"""Bytes of one decode step's state: 32 heads of width 128 in float32. ``TreeComm.plan`` is for this."""

FIRST_GATHER = 1024
"""Bytes per rank of the first exchange of descriptions; one that does not fit is exchanged again, whole."""

KEPT_EXCHANGES = 8
"""Plans whose buffers are kept."""

_LENGTH = struct.Struct("<I")


class TreeComm:
    """Ranks that merge partial attention states over a tree; collective to make.

    Every method but `plan_for` is collective: all ranks call it, in the same order. What is wrong on one rank is
    raised on every rank, and the communicator stays usable. One operation at a time: a second thread gets an error.

    Parameters
    ----------
    comm : mpi4py communicator, Transport or None
        It is duplicated. None is COMM_WORLD under a launcher, else one process, for which MPI is not imported.
    hosts : sequence of str, optional
        One label per rank; ranks with one label form a subtree. By default ranks share a host where the host name
        and MPI's shared-memory split both say so. ``TREEATTN_HOSTS`` (comma-separated) does the same.
    plan : str, pair, Radices or Plan
        "auto", a name ("flat", "oneshot", "binary"), radices (inside a host, between hosts), each a number or
        "all", or a plan whose radices are taken.
    deterministic : bool
        Carry rank states unmerged and merge them in rank order: more bytes, and bits that do not depend on hosts.
    timeout : float, optional
        Seconds that a rank may stay silent; 0 waits for ever. ``TREEATTN_TIMEOUT`` or 300 by default.

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
        plan: Any = "auto",
        deterministic: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._transport: Transport = open_transport(comm)
        self.rank, self.size = self._transport.rank, self._transport.size
        self._guard, self._agreed, self._step = Guard(), None, 0
        self._agreed: Signature | None
        self._exchanges: dict[Any, Exchange] = {}
        self._signatures: dict[Any, Signature] = {}
        try:
            self._join(hosts, plan, deterministic, timeout)
        except InputError:  # raised on every rank, so that all of them come here
            self._transport.free()
            raise

    def _join(self, hosts: Any, plan: Any, deterministic: Any, timeout: Any) -> None:
        """Agree with the other ranks on the settings and on who is where."""
        self.hosts = ("unknown",) * self.size
        self._tally = Tally(self.hosts, self.rank)
        names = [each["name"] for each in self._tell("TreeComm", {"name": self._transport.host_name()})]
        self.hosts, settings, error = tuple(names), Settings(), None
        try:
            settings = Settings.read(self.size, hosts, plan, deterministic, timeout)
        except InputError as wrong:
            error = wrong
        self._tell("TreeComm", {}, settings.fields, error)
        self._transport.timeout = settings.timeout
        self.hosts = settings.hosts or map_hosts(self._transport, names, lambda v: self._tell("TreeComm", v))
        settings.check_plan(self.hosts)
        self._radices, self.deterministic = settings.radices, settings.deterministic
        self._tally = Tally(self.hosts, self.rank)

    @property
    def plan(self) -> Plan:
        """The plan of `allreduce` for one decode step's state (`TYPICAL_PAYLOAD`)."""
        return self.plan_for(TYPICAL_PAYLOAD)

    def plan_for(self, payload_bytes: int, root: int | None = None) -> Plan:
        """Give the plan that a state of ``payload_bytes`` bytes takes: to all, or to ``root``."""
        radices = self._radices or choose_radices(self.hosts, payload_bytes)
        if root is None:
            return plan_allreduce(self.hosts, radices, deterministic=self.deterministic)
        return plan_reduce(self.hosts, root, radices, deterministic=self.deterministic)

    @property
    def stats(self) -> Stats:
        """What this rank has sent, and how many rounds it went through, since the communicator was made."""
        return self._tally.stats

    def total_stats(self) -> Stats:
        """Add up every rank's `stats` as they were before this call; collective."""
        return Stats.total(Stats(**each) for each in self.consult("total_stats", (), asdict(self.stats)))

    def __repr__(self) -> str:
        kind = f"rank {self.rank} of {self.size} on {len(set(self.hosts))} hosts"
        return f"TreeComm({kind}, plan={'auto' if self._radices is None else str(self._radices)!r})"

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
        merged = self.exchange(self._attempt("allreduce", state, None), out=out)
        assert merged is not None, "without a root, every rank has the result"
        return merged

    def reduce(self, state: PartialState, root: int = 0) -> PartialState | None:
        """Merge the states of all ranks; ``root`` gets the result, with the bits of `allreduce`, others None.

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
                given = _sendable(array, self.rank == root)
            except Exception as wrong:  # whatever it is, the others must hear of it
                error = wrong
            seen = [] if given is None else [list(given.shape), given.dtype.name]
            told = self._consult("bcast", {"array": seen}, (), error, None if error else root)
            return self._bcast(given, [each["array"] for each in told], root)

    def _bcast(self, given: Array | None, seen: list[Any], root: int) -> Array:
        shape, dtype = seen[root]
        for rank, each in enumerate(seen):
            if each and each != seen[root]:
                expected = f"the root's {dtype} of shape {tuple(shape)}, or None"
                raise InputError.of("array", expected=expected, got=f"{each[1]} of shape {tuple(each[0])} on rank {rank}")
        is_root = self.rank == root and given is not None
        data = given if is_root and given is not None else np.empty(shape, narrow_dtype(dtype))
        plan = plan_bcast(self.hosts, root, self._radices or choose_radices(self.hosts, data.nbytes))
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._on_wire(broadcast, plan, self._transport, flat, self._tally)
        return data

    def free(self) -> None:
        """Give everything back; collective. Again is fine; any other use raises `CommError`."""
        if self._guard.reason is not None:
            return
        with self._guard:
            self._guard.close("this communicator was freed")
            self._exchanges.clear()
            self._transport.free()

    @property
    def usable(self) -> bool:
        """Whether it was neither freed nor broken."""
        return self._guard.reason is None

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
            None on ranks that are not ``attempt.root``, where there is one.
        """
        with self._guard:
            attempt = _checked(attempt, out)
            if self.size > 1:
                return self._merge(attempt, out)
            if attempt.error is not None or attempt.state is None:
                raise attempt.error or InputError.of("attempt", expected="a state or an error", got="neither")
            return attempt.state if out is None else _copy(attempt.state, out)

    def consult(
        self, operation: str, fields: tuple[tuple[str, Any], ...], values: dict[str, Any], error: Exception | None = None
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
            return self._consult(operation, values, fields, error)

    def _merge(self, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """Run the agreed plan until it ends clean, agreeing anew where that is what is missing."""
        if self._agreed is None:
            self._describe(attempt)
            self._agreed = attempt.signature
        while True:
            exchange = self._exchange_of(self._agreed)
            attempt, header = self._run(exchange, attempt)
            if header.status not in (0, OTHER):
                self._describe(attempt)
            # Equal digests are agreement: from a clean plan, or from one in which all had the same new signature.
            self._agreed = attempt.signature
            if header.status == 0:
                return self._result(exchange, attempt, out)

    def _run(self, exchange: Exchange, attempt: Attempt) -> tuple[Attempt, Header]:
        """Take part in the agreed plan, with this rank's payload or with what keeps it from sending one."""
        status = self._status(attempt)
        if status == 0 and attempt.state is not None:
            try:
                exchange.load(attempt.state)
            except Exception as error:  # a device may fail here
                attempt, status = replace(attempt, signature=None, state=None, error=error), ERROR
        digest = 0 if attempt.signature is None else attempt.signature.digest
        return attempt, self._pass(exchange, status, digest, attempt.check, attempt.state)

    def _status(self, attempt: Attempt) -> int:
        if attempt.error is not None or attempt.signature is None:
            return ERROR
        return 0 if self._agreed is not None and attempt.signature.wire == self._agreed.wire else OTHER

    def _pass(self, exchange: Exchange, status: int, digest: int, check: int, state: PartialState | None) -> Header:
        self._step += 1
        header = Header(self._step, status, digest, check)
        ops, on_host = (None, True) if state is None else (state.ops, isinstance(state._packed, np.ndarray))
        return self._on_wire(exchange.run, header, ops, on_host)

    def _result(self, exchange: Exchange, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        root, state = exchange.plan.root, attempt.state
        if state is None or (root is not None and root != self.rank):
            return None
        return exchange.result(state.ops, out, isinstance(state._packed, np.ndarray))

    def _exchange_of(self, agreed: Signature | None) -> Exchange:
        assert agreed is not None, "there is no plan to follow before the first agreement"
        found = self._exchanges.get(agreed.wire)
        if found is None:
            if len(self._exchanges) >= KEPT_EXCHANGES:
                del self._exchanges[next(iter(self._exchanges))]
            payload = int(np.prod(agreed.payload_shape)) * np.dtype(agreed.payload_dtype).itemsize
            plan = self.plan_for(payload, agreed.root)
            found = Exchange(plan, self._transport, agreed.payload_shape, agreed.payload_dtype, self._tally)
            self._exchanges[agreed.wire] = found
        return found

    def _describe(self, attempt: Attempt) -> None:
        self._negotiate(lambda: Description.of_attempt(attempt), attempt.error)

    def _tell(
        self, operation: str, values: dict[str, Any], fields: Any = (), error: Exception | None = None
    ) -> list[dict[str, Any]]:
        with self._guard:
            return self._consult(operation, values, fields, error)

    def _consult(
        self, operation: str, values: dict[str, Any], fields: Any, error: Exception | None, root: int | None = None
    ) -> list[dict[str, Any]]:
        """Go to the descriptions at once, once the others have been told so by way of the agreed plan."""
        if self._agreed is not None:
            self._pass(self._exchange_of(self._agreed), CONSULT, 0, 0, None)
        description = Description(operation, root, [list(pair) for pair in fields], values=values)
        if error is not None:
            description = Description.of_error(error, operation)
        return [each.values for each in self._negotiate(lambda: description, error)]

    def _negotiate(self, describe: Callable[[], Description], own: Exception | None) -> list[Description]:
        """Exchange descriptions and draw the same conclusion on every rank."""
        try:
            data = describe().encode()
        except Exception as error:  # a description that can't be made is an error like any other
            own = own or error
            data = Description.of_error(own).encode()
        descriptions = [Description.decode(each) for each in self._on_wire(self._gather, data)]
        conclude(descriptions, self.hosts, self.rank, own)
        return descriptions

    def _gather(self, data: bytes) -> list[bytes]:
        """Give every rank's data, of whatever lengths: in one exchange if all are short, else in two."""
        room, longest = 0, FIRST_GATHER - _LENGTH.size
        found: list[bytes] = []
        while room < longest:
            room = longest
            framed = _LENGTH.pack(len(data)) + data[:room].ljust(room, b"\0")
            found = self._transport.allgather(framed)
            self._tally.collectives += 1
            lengths = [_LENGTH.unpack_from(each)[0] for each in found]
            longest = max(lengths)
        return [each[_LENGTH.size : _LENGTH.size + length] for each, length in zip(found, lengths, strict=True)]

    def _on_wire(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what sends and receives; if it does not end well, ranks have lost each other, and that is for good."""
        try:
            return function(*arguments)
        except Silence as silence:
            late = ", ".join(f"rank {rank} on host {self.hosts[rank]}" for rank in silence.ranks)
            text = f"nothing came from {late} for {self._transport.timeout:g} s, in step {self._step}"
            self._break(text)
            raise RankTimeout(text) from None
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}")
            if isinstance(error, CommError) or not isinstance(error, Exception):
                raise
            raise CommError(f"the ranks lost each other in the middle of an operation: {error}") from error

    def _break(self, reason: str) -> None:
        self._guard.close(f"this communicator is broken ({reason}); end the job, or make another of the ranks left")
        self._transport.abandon()

    def _attempt(self, operation: str, state: Any, root: Any) -> Attempt:
        try:
            if operation == "reduce":
                root = _check_root(root, self.size)
            return Attempt(self._signature(operation, root, state), state, None, root)
        except Exception as error:  # whatever it is, the others must hear of it before it is raised here
            return Attempt(None, None, error, None)

    def _signature(self, operation: str, root: int | None, state: Any) -> Signature:
        if not isinstance(state, PartialState):
            raise InputError.of("state", expected="a PartialState", got=type(state).__name__)
        shape, dtype = state._packed.shape, state._packed.dtype
        found = self._signatures.get((operation, root, shape, dtype))
        if found is None:
            fields = (("state.shape", state.shape), ("state.dtype", dtype.name))
            found = Signature(operation, root, fields, shape, dtype.name)
            self._signatures[(operation, root, shape, dtype)] = found
        return found


def _check_root(root: Any, size: int) -> int:
    if isinstance(root, (int, np.integer)) and not isinstance(root, bool) and 0 <= root < size:
        return int(root)
    raise InputError.of("root", expected=f"a rank from 0 to {size - 1}", got=repr(root))


def _sendable(array: Any, is_root: bool) -> Array | None:
    if array is None and not is_root:
        return None
    found = np.asarray(array)
    if found.dtype.name not in KV_DTYPES and found.dtype.kind not in "biufc":
        raise InputError.of("array", expected="an array of numbers", got=f"dtype {found.dtype}")
    return found if found.dtype.isnative else found.astype(found.dtype.newbyteorder("="))


def _checked(attempt: Attempt, out: PartialState | None) -> Attempt:
    """Let an ``out`` that can't take the result count as this rank's error."""
    if out is None or attempt.state is None or attempt.error is not None:
        return attempt
    state = attempt.state
    if isinstance(out, PartialState) and (out.shape, out.dtype, out.ops.name) == (
        state.shape,
        state.dtype,
        state.ops.name,
    ):
        return attempt
    return replace(attempt, error=InputError.of("out", expected=f"a state like {state!r}", got=repr(out)))


def _copy(state: PartialState, out: PartialState) -> PartialState:
    if out is not state:
        state.ops.merge(out._packed, [state._packed])
    return out


_of_transports: WeakKeyDictionary[Transport, TreeComm] = WeakKeyDictionary()
_alone: list[TreeComm] = []


def as_tree_comm(comm: Any) -> TreeComm:
    """Give a TreeComm for whatever ``comm=`` took; collective where one has to be made.

    A TreeComm is given back as it is. A bare mpi4py communicator, a Transport or None is wrapped once and
    remembered; it is forgotten with the communicator.
    """
    if isinstance(comm, TreeComm):
        return comm
    if isinstance(comm, Transport):
        if comm not in _of_transports or not _of_transports[comm].usable:
            _of_transports[comm] = TreeComm(comm)
        return _of_transports[comm]
    if comm is None and not under_launcher():
        if not _alone or not _alone[0].usable:
            _alone[:] = [TreeComm()]
        return _alone[0]
    return _wrapped(comm)


def _wrapped(comm: Any) -> TreeComm:
    from treeattn import mpi_transport  # here, so that one process needs no MPI

    mpi = mpi_transport.import_mpi()
    if comm is not None and not isinstance(comm, mpi.Intracomm):
        raise InputError.of("comm", expected="a TreeComm, an mpi4py communicator or None", got=type(comm).__name__)
    comm = mpi.COMM_WORLD if comm is None else comm
    return mpi_transport.cached_on(comm, lambda: TreeComm(comm), lambda found: found.usable)
