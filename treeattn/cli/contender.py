"""The algorithms of the command line: the tree and its baselines, each as a step to run and what it should send."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import treeattn
from treeattn.arguments.spec import Options
from treeattn.baselines import BASELINES, Baseline, Ulysses
from treeattn.costs.model import CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.plan import Stats

if TYPE_CHECKING:
    from treeattn.cli.workload import Workload
    from treeattn.comm import TreeComm

__all__ = ["ALGORITHMS", "Contender", "contender"]

WITH_REPLICATION = Ulysses(replicate_kv=True)
ALGORITHMS: dict[str, Baseline | None] = {"tree": None, **BASELINES, WITH_REPLICATION.name: WITH_REPLICATION}
"""Every algorithm by name; the tree is `treeattn.decode`."""


class FirstStep(NamedTuple):
    """Seconds of a first step, imports and preparation among them, and what was compiled or loaded in them."""

    seconds: float
    code: str


@dataclass(frozen=True)
class Contender:
    """One algorithm's step over one rank's shard, and what is known of it.

    Parameters
    ----------
    step : callable
        Takes a step; the first has been taken.
    stated : callable
        Gives what a step is stated to send.
    first : FirstStep
        What the first step took.
    plan : str
        The tree that it follows, if any.
    alone : callable, optional
        Attends to the shard as if there were no other rank: what a tree's step is without its exchange.
    exchange_us : callable, optional
        Says what a cost model makes of the rest, in microseconds.
    """

    step: Callable[[], Any]
    stated: Callable[[], Stats]
    first: FirstStep
    plan: str = ""
    alone: Callable[[], Any] | None = None
    exchange_us: Callable[[CostModel], float] | None = None


def contender(
    comm: TreeComm, work: Workload, name: str, *, root: int | None = None, backend: str | None = None
) -> Contender:
    """Make this rank's shard and agree on an algorithm's call; collective.

    Raises
    ------
    InputError
        On every rank, if the algorithm does not serve such a call.
    """
    start, stop = work.span(comm.rank, comm.size)
    q, (k, v), options = work.query(), work.cache(start, stop), work.options(start)
    baseline = ALGORITHMS[name]
    if baseline is None:
        step = partial(treeattn.decode, q, k, v, comm=comm, root=root, backend=backend, **options)
        first = _first_step(step)  # agrees: later steps send the plan's messages and nothing else
        size, rank = comm.wire_bytes(work.state_shape, work.state_dtype), comm.rank
        plan = comm.plan_for(size, root)
        return Contender(
            step,
            lambda: plan.predict(size).per_rank[rank],
            first,
            str(plan),
            partial(treeattn.attention, q, k, v, backend=backend, **options),
            lambda model: cost(plan, size, model).total_us,
        )
    prepared = baseline.prepare(q, k, v, Options(**options), comm=comm, root=root, backend=backend)

    def run() -> Any:
        prepared.run()
        return prepared.deliver()

    return Contender(run, lambda: baseline.cost(prepared.problem).stats(comm.rank), _first_step(run))


def _first_step(step: Callable[[], Any]) -> FirstStep:
    start = time.perf_counter()
    from treeattn.kernels.compilation import account, compilations  # here, for importing numba is part of the cost

    before = len(compilations())
    step()
    return FirstStep(time.perf_counter() - start, account(compilations()[before:]))
