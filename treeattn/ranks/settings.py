"""The arguments of ``TreeComm``, checked; the environment stands in for what a user did not pass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from treeattn.arguments.arrays import known_dtype
from treeattn.arguments.checks import check_flag, is_number
from treeattn.costs.model import DEFAULT_MODEL, CostModel, read_model
from treeattn.errors import InputError
from treeattn.launch import launched
from treeattn.planning.plan import Plan, Radices
from treeattn.planning.planner import read_plan
from treeattn.planning.topology import HOSTS_VARIABLE, check_hosts, hosts_of_environment
from treeattn.wire_form import WIRE_DTYPES

__all__ = ["DEFAULT_TIMEOUT", "Settings", "timeout_of"]

TIMEOUT_VARIABLE = "TREEATTN_TIMEOUT"
DEFAULT_TIMEOUT = 300.0

COLLECTIVES = ("nccl", "p2p", "mpi")
"""Plans in which something other than a tree of messages carries the states."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``TreeComm`` was told.

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
        cls, size: int, hosts: Any, plan: Any, model: Any, deterministic: Any, timeout: Any, wire_dtype: Any
    ) -> Settings:
        """Check what the user passed for ``size`` ranks."""
        deterministic = check_flag("deterministic", deterministic)
        collective = plan if isinstance(plan, str) and plan in COLLECTIVES else ""
        shape = None if collective else read_plan(plan)
        whole = shape if isinstance(shape, Plan) else None
        deterministic = deterministic or (whole is not None and whole.deterministic)
        measures = isinstance(plan, str) and plan == "auto"
        if measures and model is not None:
            raise InputError.of("model", expected='None with plan="auto", which measures one', got=repr(model))
        wire_dtype = None if wire_dtype is None else known_dtype("wire_dtype", wire_dtype, WIRE_DTYPES, also="None")
        _check_travel(wire_dtype, collective, deterministic)
        if size > 1:
            _check_merging()
        return cls(
            hosts=_hosts(hosts, size),
            plan=whole,
            radices=shape.radices if isinstance(shape, Plan) else shape,
            measures=measures,
            model=DEFAULT_MODEL if model is None else read_model(model),
            deterministic=deterministic,
            timeout=timeout_of(timeout),
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
    if collective and wire_dtype is not None:
        raise InputError.of("wire_dtype", expected=f"None with plan={collective!r}", got=repr(wire_dtype))
    if collective == "mpi" and deterministic:
        raise InputError.of("deterministic", expected="False with plan='mpi', where MPI orders merges", got="True")


def _check_merging() -> None:
    """Refuse what ranks could not merge with: else one alone would fail, in the middle of their first call."""
    from treeattn.kernels.numba_settings import check_settings

    check_settings(os.environ)


def _hosts(hosts: Any, size: int) -> tuple[str, ...] | None:
    if hosts is not None:
        return check_hosts(hosts, size)
    labels, here = hosts_of_environment(os.environ), launched()
    if labels is None or size == 1 or (here is not None and size < here.size):
        return None  # the variable is about the world, not about a part of it
    return check_hosts(labels, size, HOSTS_VARIABLE)


def timeout_of(timeout: Any) -> float:
    """Give the deadline in seconds, the environment's or the default where the user names none."""
    name, value = "timeout", timeout
    if timeout is None:
        name, value = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE) or DEFAULT_TIMEOUT
    try:
        seconds = float(value) if is_number(value) or isinstance(value, str) else -1.0
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError.of(name, expected="seconds, 0 for no limit", got=repr(value))
    return seconds
