"""What a communicator settles once, when it is made: its transport, its settings and the map of its hosts."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from treeattn.costs import DEFAULT_MODEL, CostModel, read_model
from treeattn.errors import InputError
from treeattn.launch import launched
from treeattn.plan import Plan, Radices
from treeattn.planner import read_plan
from treeattn.topology import HOSTS_VARIABLE, check_hosts, host_labels, hosts_of_environment
from treeattn.transport import SelfTransport, Transport
from treeattn.wire_form import WIRE_DTYPES

__all__ = ["Settings", "map_hosts", "notes_on", "open_transport", "under_launcher"]

TIMEOUT_VARIABLE = "TREEATTN_TIMEOUT"
DEFAULT_TIMEOUT = 300.0

COLLECTIVES = ("nccl", "p2p", "mpi")
"""Plans in which something other than a tree of messages carries the states."""


def open_transport(comm: Any, timeout: Any) -> Transport:
    """Make a transport of our own from what ``TreeComm`` takes; collective.

    A ``timeout`` that is wrong is refused later, when all ranks can hear of it.

    Raises
    ------
    InputError
        It is nothing that ranks can talk on.
    """
    if isinstance(comm, Transport):
        return comm.dup()
    if comm is None and not under_launcher():
        return SelfTransport()
    if comm is not None and "mpi4py.MPI" not in sys.modules:
        expected = "None, an mpi4py communicator or a Transport"
        raise InputError.of("comm", expected=expected, got=type(comm).__name__)
    from treeattn import mpi_transport  # here, so that one process needs no MPI

    try:
        seconds = _timeout(timeout)
    except InputError:
        seconds = DEFAULT_TIMEOUT
    if comm is None:
        return mpi_transport.world_transport(seconds)
    return mpi_transport.MpiTransport.duplicate(comm, seconds)


_notes: WeakKeyDictionary[Transport, dict[Any, Any]] = WeakKeyDictionary()


def notes_on(comm: Any) -> dict[Any, Any]:
    """Give what all communicators that are made of ``comm`` share, and that ends with it."""
    if isinstance(comm, Transport):
        return _notes.setdefault(comm, {})
    if comm is None and not under_launcher():
        return {}
    from treeattn import mpi_transport  # here, so that one process needs no MPI

    return mpi_transport.cached_on(comm, lambda _: dict[Any, Any](), lambda _: True, "notes")


def under_launcher() -> bool:
    """Whether a launcher started this process with others."""
    here = launched()
    return here is not None and here.size > 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``TreeComm``, checked.

    Parameters
    ----------
    hosts : tuple of str or None
        One label per rank, where the user gave them.
    plan : Plan or None
        The plan that the user gave, as an object or in a file, if it was one.
    radices : Radices or None
        None chooses them by payload.
    measures : bool
        Whether to choose them by a model that is measured on first use.
    model : CostModel
        By which they are chosen otherwise.
    deterministic : bool
    timeout : float
        Seconds; 0 waits for ever.
    collective : "nccl", "p2p", "mpi" or ""
        What carries states, if not messages, which follow the default plan then, headers among them.
    wire_dtype : str or None
        What o travels in, if it is not the states' own.
    """

    hosts: tuple[str, ...] | None = None
    plan: Plan | None = None
    radices: Radices | None = None
    measures: bool = False
    model: CostModel = DEFAULT_MODEL
    deterministic: bool = False
    timeout: float = DEFAULT_TIMEOUT
    collective: str = ""
    wire_dtype: str | None = None

    @classmethod
    def read(
        cls, size: int, hosts: Any, plan: Any, model: Any, deterministic: Any, timeout: Any, wire_dtype: Any = None
    ) -> Settings:
        """Check what the user passed; the environment stands in for what they did not."""
        if not isinstance(deterministic, bool):
            raise InputError.of("deterministic", expected="True or False", got=repr(deterministic))
        collective = plan if isinstance(plan, str) and plan in COLLECTIVES else ""
        shape = None if collective else read_plan(plan)
        whole = shape if isinstance(shape, Plan) else None
        deterministic = deterministic or (whole is not None and whole.deterministic)
        measures = isinstance(plan, str) and plan == "auto"
        if measures and model is not None:
            raise InputError.of("model", expected='None with plan="auto", which measures one', got=repr(model))
        _check_travel(wire_dtype, collective, deterministic)
        return cls(
            hosts=_hosts(hosts, size),
            plan=whole,
            radices=shape.radices if isinstance(shape, Plan) else shape,
            measures=measures,
            model=DEFAULT_MODEL if model is None else read_model(model),
            deterministic=deterministic,
            timeout=_timeout(timeout),
            collective=collective,
            wire_dtype=wire_dtype,
        )

    @property
    def fields(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same on every rank."""
        return (
            ("hosts", self.hosts),
            ("plan", self.collective or str(self.radices or ("auto" if self.measures else "default"))),
            ("hosts of the plan", None if self.plan is None else self.plan.hosts),
            ("model", self.model.digest),
            ("deterministic", self.deterministic),
            ("wire_dtype", self.wire_dtype),
        )

    def check_plan(self, hosts: tuple[str, ...]) -> None:
        """Refuse a plan that was made for other hosts."""
        if self.plan is not None and self.plan.hosts != hosts:
            raise InputError.of("plan", expected=f"a plan for hosts {', '.join(hosts)}", got=str(self.plan))


def _check_travel(wire_dtype: Any, collective: str, deterministic: bool) -> None:
    """Refuse ways for states that there are not, or that exclude each other."""
    if wire_dtype is not None and not (isinstance(wire_dtype, str) and wire_dtype in WIRE_DTYPES):
        names = " or ".join(map(repr, (None, *WIRE_DTYPES)))
        raise InputError.of("wire_dtype", expected=names, got=repr(wire_dtype))
    if collective and wire_dtype is not None:
        raise InputError.of("wire_dtype", expected=f"None with plan={collective!r}", got=repr(wire_dtype))
    if collective == "mpi" and deterministic:
        raise InputError.of("deterministic", expected="False with plan='mpi', where MPI orders merges", got="True")


def _hosts(hosts: Any, size: int) -> tuple[str, ...] | None:
    if hosts is not None:
        return check_hosts(hosts, size)
    labels, here = hosts_of_environment(os.environ), launched()
    if labels is None or size == 1 or (here is not None and size < here.size):
        return None  # the variable is about the world, not about a part of it
    return check_hosts(labels, size, HOSTS_VARIABLE)


def _timeout(timeout: Any) -> float:
    name, value = "timeout", timeout
    if timeout is None:
        name, value = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError.of(name, expected="seconds, 0 for no limit", got=repr(value))
    return seconds


def map_hosts(
    transport: Transport, names: Sequence[str], consult: Callable[..., list[dict[str, Any]]]
) -> tuple[str, ...]:
    """Find out which ranks share a host: only those for which names and shared memory both say so; collective."""
    shared = [each["group"] for each in consult("TreeComm", (), {"group": transport.shared_memory_group()})]
    labels, agreed = host_labels(names, shared)
    if not agreed and transport.rank == 0:
        text = "host names and shared memory disagree about which ranks share a host; taking them as "
        warnings.warn(f"{text}{', '.join(labels)} (hosts= or {HOSTS_VARIABLE} overrides this)", stacklevel=4)
    return labels
