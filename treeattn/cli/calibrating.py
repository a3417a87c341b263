"""What ``treeattn topology --calibrate`` does on ranks: it measures the model, and each plan beside its forecast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.calibration.timing import in_turns
from treeattn.cli.output import print_table
from treeattn.comm import TreeComm
from treeattn.costs.choosing import candidates
from treeattn.costs.pricing import cost
from treeattn.errors import InputError
from treeattn.planning.planner import plan_allreduce
from treeattn.state import PartialState
from treeattn.wrapping import team_of

if TYPE_CHECKING:
    from rich.console import Console

    from treeattn.calibration.timing import Calibration, Sample
    from treeattn.planning.radices import Radices

__all__ = ["Measured", "calibrate", "show"]

WIDTH = 128
"""Width of v of the states that are merged: the payload's bytes are theirs to within a head row."""

SECONDS, TURNS = 0.5, 6
"""Roughly how long each plan is repeated, and in how many turns: a machine may be slow for longer than one takes."""

FIRST, FEWEST, MOST = 4, 12, 1000
"""Repeats that tell how long a plan takes; and then at least and at most."""

SETTLING = 5
"""Runs of a turn that do not count: a job that merges by one plan has long been past them."""

SHOWN = 6
"""Plans that are measured, the cheapest first."""


LEGEND = """\
step: a whole merge, from which the model's constants are found; bytes: of a state
p50, p99: of the mean of two in a row; of steps on the middle rank, of plans on the slowest
off: the forecast above what was measured, or below it"""


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan's forecast and what it took, in microseconds."""

    plan: str
    predicted_us: float
    p50_us: float
    p99_us: float

    @property
    def off(self) -> float:
        """Share of the measurement by which the forecast misses it."""
        return self.predicted_us / self.p50_us - 1


def calibrate(hosts: tuple[str, ...] | None, payload: int) -> tuple[int, Calibration, Radices, list[Measured]]:
    """Measure on the ranks that are here; collective.

    Returns
    -------
    rank : int
    calibration : Calibration
    chosen : Radices
    measured : list of Measured
        The cheapest candidates by the model, and by name those that everybody knows.
    """
    with TreeComm(hosts=hosts, plan="auto") as comm:
        if comm.size == 1:
            raise InputError.of("--calibrate", expected="several ranks: --ranks or a launcher", got="one")
        state = _state(comm.rank, payload)
        comm.allreduce(state)
        found = comm.calibration
        assert found is not None, "the first merge measures"
        chosen = comm.plan_for(state.nbytes).radices
        shared = chosen.inside == "shared"
        costs = {
            radices: cost(plan_allreduce(comm.hosts, radices), state.nbytes, found.model).total_us
            for radices in candidates(comm.hosts, shared=shared, model=found.model)
        }
        worth = sorted(costs, key=costs.__getitem__)[:SHOWN]
        measured = _measured({radices: costs[radices] for radices in worth}, comm.hosts, state)
        return comm.rank, found, chosen, measured


def _state(rank: int, payload: int) -> PartialState:
    rows = max(1, payload // (4 * (WIDTH + 2)))
    out = np.random.default_rng(rank).standard_normal((1, rows, 1, WIDTH), dtype=np.float32)
    return PartialState.from_lse(out, np.zeros((1, rows, 1), np.float32), base="e")


def _measured(forecasts: dict[Radices, float], hosts: tuple[str, ...], state: PartialState) -> list[Measured]:
    """Time a merge by each plan, all in turns."""
    with ExitStack() as stack:
        comms = [stack.enter_context(TreeComm(hosts=hosts, plan=radices)) for radices in forecasts]
        runs = [partial(comm.allreduce, state) for comm in comms]
        counts = [_repeats(comm, run) for comm, run in zip(comms, runs, strict=True)]
        times = in_turns(time.perf_counter, runs, counts, SETTLING, TURNS)
        quantiles = [_slowest(comm, np.quantile(each, (0.5, 0.99))) for comm, each in zip(comms, times, strict=True)]
    return [
        Measured(str(radices), us, *(1e6 * each for each in found))
        for (radices, us), found in zip(forecasts.items(), quantiles, strict=True)
    ]


def _repeats(comm: TreeComm, run: Callable[[], object]) -> int:
    """How often to repeat it, by how long it takes the slowest rank after the first times."""
    (first,) = in_turns(time.perf_counter, [run], [FIRST])
    (slowest,) = _slowest(comm, [float(np.median(first))])
    return int(min(max(SECONDS / slowest, FEWEST), MOST))


def _slowest(comm: TreeComm, seconds: Iterable[float]) -> list[float]:
    """Give each of some times as it was on the rank where it was the longest."""
    told = team_of(comm).consult("topology", (), {"seconds": [float(each) for each in seconds]})
    return [max(each) for each in zip(*(each["seconds"] for each in told), strict=True)]


def show(to: Console, found: Calibration, chosen: Radices, measured: list[Measured]) -> None:
    """Print what was measured, the model, and the plans."""
    _print(to, "Steps, as measured", ("plan", "bytes", "p50 us", "p99 us"), map(_row, found.samples))
    rows = [
        (each.plan, *map(_number, (each.predicted_us, each.p50_us, each.p99_us)), f"{each.off:+.0%}")
        for each in measured
    ]
    _print(to, "Plans", ("plan", "forecast us", "p50 us", "p99 us", "off"), rows)
    to.print(f"chosen: {chosen}\n\n{LEGEND}", markup=False)


def _row(sample: Sample) -> tuple[str, ...]:
    return (sample.plan, f"{sample.nbytes:,}", _number(sample.p50_us), _number(sample.p99_us))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _print(to: Console, title: str, columns: tuple[str, ...], rows: Any) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], style="bold")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    print_table(to, table)
