"""How much of a ring's wire its kernels hide: on two or more MPI ranks, per step, in milliseconds.

    mpirun -n 2 --hostfile hosts --map-by node python benchmarks/overlap.py

Four runs of the ring: kernels that do nothing, so that only shards travel; no messages, so that only kernels work;
both, with messages left alone while a kernel works; and both as the ring does it, with messages looked after. A number
is the slowest rank's time, divided by the steps; the kernel after the last message is taken off. "left alone" should
come near the sum of the first two, "looked after" near the larger. More query tokens make kernels longer, more keys
both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import treeattn
from treeattn.arguments.spec import Options
from treeattn.backends.registry import Backend, find
from treeattn.launch import install_abort_hook
from treeattn.transports.mpi_transport import MpiTransport
from treeattn.wrapping import team_of


class Idle(Backend):
    """A backend whose kernels take no time."""

    name = "cpu"
    ops = find("cpu").ops

    def reasons(self, spec: Any = None) -> list[str]:
        """Take any call."""
        return []

    def prepare(self, spec: Any) -> Any:
        """Give the state of no keys."""
        return lambda args, out: self.ops.fill_identity(out)


def medians(comm: treeattn.TreeComm, runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Time the runs in turn; give, for each repeat, the slowest rank's milliseconds."""
    own: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            team_of(comm).consult("start", (), {})
            start = time.perf_counter()
            run()
            own[name].append(1e3 * (time.perf_counter() - start))
    every = team_of(comm).consult("times", (), own)
    return {name: [max(times) for times in zip(*(rank[name] for rank in every), strict=True)][1:] for name in runs}


def alone(run: Callable[[], Any]) -> Callable[[], None]:
    """Run it with messages that nobody looks after while a kernel works."""

    def unattended() -> None:
        MpiTransport.needs_progress = False
        try:
            run()
        finally:
            MpiTransport.needs_progress = True

    return unattended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="keys per rank")
    parser.add_argument("--q-tokens", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    q = np.ones((1, 32, chosen.q_tokens, 128), np.float32)
    k = np.random.default_rng(0).standard_normal((1, 4, chosen.tokens, 128), dtype=np.float32)
    with treeattn.TreeComm() as comm:
        ring, steps = treeattn.baselines.ring, comm.size - 1
        both = ring.prepare(q, k, k, Options(), comm=comm)
        wire = ring.prepare(q, k, k, Options(), comm=comm, backend=Idle())
        runs = {
            "wire": wire.run,
            "kernel": lambda: [treeattn.partial_attention(q, k, k) for _ in range(steps)],
            "left alone": alone(both.run),
            "looked after": both.run,
        }
        found = medians(comm, runs, chosen.repeats)
        kernel = statistics.median(found["kernel"]) / steps
        for name in ("left alone", "looked after"):
            found[name] = [each - kernel for each in found[name]]  # the kernel after the last message
        report(comm, k.nbytes * 2, {name: [each / steps for each in times] for name, times in found.items()})


def report(comm: treeattn.TreeComm, nbytes: int, steps: dict[str, list[float]]) -> None:
    if comm.rank == 0:
        middle = {name: round(statistics.median(times), 2) for name, times in steps.items()}
        every = {name: [round(each, 2) for each in times] for name, times in steps.items()}
        print(json.dumps({"ranks": comm.size, "cores": os.cpu_count(), "shard bytes": nbytes, "median": middle}))
        print(json.dumps({"all": every}))


if __name__ == "__main__":
    install_abort_hook()
    main()
