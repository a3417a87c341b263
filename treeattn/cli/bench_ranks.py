"""Where the ranks of ``treeattn bench`` come from: MPI processes, started once per number of ranks, or threads."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from treeattn.cli.workload import Workload
from treeattn.job import running
from treeattn.launch import find_runtime, mpirun_command, mpirun_environment

if TYPE_CHECKING:
    from treeattn.cli.comparison import Row
    from treeattn.comm import TreeComm
    from treeattn.costs.model import CostModel
    from treeattn.transports.base import Transport
    from treeattn.transports.clocks import Clock
    from treeattn.transports.emulation import Delays

__all__ = ["Contest", "on_mpi", "on_threads"]

OnRow: TypeAlias = "Callable[[Row], Any]"

POLL = 0.1
"""Seconds between looks at what the ranks have reported."""

KERNEL_THREADS = "TREEATTN_THREADS"

LONGEST = 24 * 3600.0
"""Seconds after which threads are given up."""


@dataclass(frozen=True)
class Contest:
    """What is compared, on however many ranks there are.

    Parameters
    ----------
    works : sequence of Workload
    algorithms : sequence of str
    backend : str or None
    warmup, repeats : int
    plan : str
    ranks_per_host : int or None
        Pretend that so many ranks share a host; None takes the hosts as they are.
    delays : Delays or None
        Latency to emulate: on ranks that are threads, in the time that each would take with a processor for itself.
    threads : bool
        Whether ranks are threads.
    """

    works: Sequence[Workload]
    algorithms: Sequence[str]
    backend: str | None
    warmup: int
    repeats: int
    plan: str
    ranks_per_host: int | None
    delays: Delays | None
    threads: bool

    def run(self, transport: Transport | None, on_row: OnRow) -> None:
        """Compare on the ranks of ``transport``, None for those that a launcher has started; collective.

        ``on_row`` is called on rank 0.
        """
        from treeattn.cli.comparison import Timing, compare
        from treeattn.comm import TreeComm
        from treeattn.transports.clocks import OwnTime, WallTime

        clock = OwnTime() if self.threads and self.delays else WallTime()
        timing = Timing(self.warmup, self.repeats, clock, self._head_start)
        carrier, hosts = self._delayed(transport, clock), self._hosts(transport)
        with TreeComm(carrier, hosts=hosts, plan="auto") as comm:
            model = _measured_model(comm, self.works[0]) if "tree" in self.algorithms else None
        with TreeComm(carrier, hosts=hosts, plan=self.plan) as comm:
            for row in compare(comm, self.works, self.algorithms, self.backend, timing, model):
                if comm.rank == 0:
                    on_row(row)

    @property
    def _head_start(self) -> float:
        """Seconds per rank until a barrier, whose messages are held too, is behind all ranks; see `Timing`."""
        if self.delays is None:
            return 5e-3 if self.threads else 0.0
        return 5e-3 + 2 * self.delays.between

    def _hosts(self, transport: Transport | None) -> list[str] | None:
        if self.ranks_per_host is None:
            return None
        return [f"host{rank // self.ranks_per_host}" for rank in range(_size(transport))]

    def _delayed(self, transport: Transport | None, clock: Clock) -> Transport | None:
        if self.delays is None:
            return transport
        from treeattn.transports.emulation import DelayedTransport
        from treeattn.transports.mpi_transport import world_transport

        hosts = self._hosts(transport) or ["host"] * _size(transport)
        carrier = world_transport(LONGEST) if transport is None else transport
        return DelayedTransport(carrier, hosts, self.delays, clock)


def _measured_model(comm: TreeComm, work: Workload) -> CostModel | None:
    """Measure what messages and merges of such states take here; None on one rank, which sends none."""
    from treeattn.state import PartialState

    comm.allreduce(PartialState.identity(work.state_shape, dtype=work.state_dtype))
    return None if comm.calibration is None else comm.calibration.model


def _size(transport: Transport | None) -> int:
    from treeattn.launch import launched

    if transport is not None:
        return transport.size
    here = launched()
    return 1 if here is None else here.size


def on_threads(contest: Contest, ranks: int, on_row: OnRow) -> None:
    """Run a contest on ranks that are threads of this process."""
    from treeattn.testing import run_ranks

    threads = os.environ.get(KERNEL_THREADS)
    os.environ[KERNEL_THREADS] = "1"  # a rank's own time is that of its thread, and ranks are threads enough
    try:
        run_ranks(ranks, lambda transport: contest.run(transport, on_row), timeout=LONGEST)
    finally:
        del os.environ[KERNEL_THREADS]
        if threads is not None:
            os.environ[KERNEL_THREADS] = threads


def on_mpi(ranks: int, arguments: Sequence[str], on_row: OnRow) -> None:
    """Run the same command on MPI ranks, and take their rows from a file that rank 0 writes line by line."""
    from treeattn.cli.comparison import Row

    runtime = find_runtime()
    with TemporaryDirectory() as folder:
        file = Path(folder, "rows")
        file.touch()
        program = [sys.executable, "-m", "treeattn", *arguments, "--rows", str(file)]
        command = mpirun_command(runtime, ranks, program)
        with running(command, mpirun_environment(runtime, ranks)) as launcher, file.open() as rows:
            while launcher.poll() is None:
                time.sleep(POLL)
                _read(rows, Row, on_row)
            _read(rows, Row, on_row)
    if launcher.returncode:
        raise click.ClickException(f"the comparison on {ranks} ranks ended with exit status {launcher.returncode}")


def _read(rows: Any, kind: type[Row], on_row: OnRow) -> None:
    """Take the whole lines that are there; rank 0 writes each in one go."""
    for line in rows:
        on_row(kind(**json.loads(line)))


def report_to(file: Path) -> OnRow:
    """Give a function that appends rows to a file, a line each."""

    def on_row(row: Row) -> None:
        with file.open("a") as rows:
            rows.write(json.dumps(asdict(row)) + "\n")

    return on_row
