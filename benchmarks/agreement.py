"""What agreement costs: one allreduce of a decode step's state, with and without headers, and when a rank is wrong.

    python -m treeattn.launch 2 benchmarks/agreement.py --json agreement.json

All calls go by messages (plan "flat"), which both can. Rows, each the median of rank 0's times in microseconds:

- ``allreduce``: the public call, with agreement;
- ``bare``: the same plan, messages and merges with no header, no checks, no lock and no signature;
- ``unwatched``: the same again, waiting without an eye on the deadline and on the calling of the roll;
- ``disagree``: the call in which rank 0 brings no state, up to the error that every rank raises;
- ``first``: a call of another shape than the one before, which is agreed on first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treeattn
from treeattn.cli.output import console, print_rows
from treeattn.errors import InputError
from treeattn.planning.plan import Plan
from treeattn.transports.base import Transport
from treeattn.wrapping import team_of

CALLS = {
    "allreduce": "allreduce",
    "bare": "without headers and checks",
    "unwatched": "and without a watch over the wait",
    "disagree": "a rank is wrong, all raise",
    "first": "another shape than before",
}


class Bare:
    """Follows a plan with payloads alone; ``wait`` takes the requests of a round."""

    def __init__(
        self, plan: Plan, transport: Transport, state: treeattn.PartialState, wait: Callable[[list[Any]], None]
    ) -> None:
        self._wait = wait
        self._transport, self._ops, self._shape = transport, state.ops, state.packed.shape
        size, count = state.nbytes, plan.records(transport.rank)
        buffer = np.empty(count * size, np.uint8)
        self._states = [buffer[i * size : (i + 1) * size].view(state.dtype).reshape(self._shape) for i in range(count)]
        self._rounds = [
            (
                step.number,
                [(source, buffer[at * size : (at + slots) * size]) for source, slots, at in step.receives],
                [(dest, buffer[: slots * size]) for dest, slots in step.sends],
                [[self._states[source] for source in sources] for sources in step.merges],
            )
            for step in plan.steps(transport.rank)
        ]

    def merge(self, state: treeattn.PartialState) -> treeattn.PartialState:
        """Merge the states of all ranks."""
        transport, own = self._transport, self._states[0]
        np.copyto(own, state._packed)
        for tag, receives, sends, merges in self._rounds:
            requests = [transport.irecv(data, source, tag) for source, data in receives]
            requests += [transport.isend(data, dest, tag) for dest, data in sends]
            self._wait(requests)
            for sources in merges:
                self._ops.merge(own, sources)
        return treeattn.PartialState(own.copy(), self._ops)


def unwatched(transport: Transport) -> Callable[[list[Any]], None]:
    """Wait on ``transport`` with no deadline, and whatever other ranks may have to say."""

    def wait(requests: list[Any]) -> None:
        while not transport.progress(requests):
            os.sched_yield()

    return wait


def median_us(call: Callable[[], Any], repeats: int) -> float:
    for _ in range(repeats // 10 + 1):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def disagree(comm: treeattn.TreeComm, state: treeattn.PartialState) -> None:
    try:
        comm.allreduce(state if comm.rank else None)  # type: ignore[arg-type]
    except InputError:
        return
    raise AssertionError("a rank without a state went unnoticed")


def measure(comm: treeattn.TreeComm, heads: int, width: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(comm.rank)
    q, k, v = (rng.standard_normal((1, heads, n, width), dtype=np.float32) for n in (1, 4, 4))
    state, small = treeattn.partial_attention(q, k, v), treeattn.partial_attention(q[:, :1], k[:, :1], v[:, :1])
    plan, transport = comm.plan_for(state.nbytes), team_of(comm).channel.transport.dup()
    bare = Bare(plan, transport, state, transport.wait)
    free = Bare(plan, transport, state, unwatched(transport))
    found: dict[str, list[float]] = {"allreduce": [], "bare": [], "unwatched": []}
    for _ in range(5):  # in turns, so that whatever else the machine does meets both
        found["allreduce"].append(median_us(lambda: comm.allreduce(state), repeats))
        found["bare"].append(median_us(lambda: bare.merge(state), repeats))
        found["unwatched"].append(median_us(lambda: free.merge(state), repeats))
    return {
        **{name: statistics.median(each) for name, each in found.items()},
        "disagree": median_us(lambda: disagree(comm, state), repeats // 10),
        "first": median_us(lambda: (comm.allreduce(state), comm.allreduce(small)), repeats // 10) / 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="where rank 0 writes the numbers")
    options = parser.parse_args()
    with treeattn.TreeComm(plan="flat") as comm:
        found = measure(comm, options.heads, options.width, options.repeats)
        if comm.rank == 0:
            show(found, comm.size, str(comm.plan), options.json)


def show(found: dict[str, float], ranks: int, plan: str, path: Path | None) -> None:
    rows = [("plan", plan), *((CALLS[name], f"{value:.1f} µs") for name, value in found.items())]
    print_rows(console(None), f"{ranks} ranks, median of rank 0's times", rows)
    if path is not None:
        path.write_text(json.dumps({"ranks": ranks, "plan": plan, "microseconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
