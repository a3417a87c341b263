"""What it costs to keep watch for ranks that are missing: pairs of steps with and without, in one process.

    python -m treeattn.launch 2 benchmarks/watch.py --pairs 5000 --json watch.json

Both steps of a pair follow each other at once, in turns the one or the other first, so that whatever else the machine
does meets both. The difference is that of two pairs: steps that alternate by themselves, long and short, then cancel.
Rows, each the median over such fours of rank 0's times, with the quartiles of the difference, in microseconds:

- ``memory``: the public call through shared memory, with a deadline of 300 s and with none;
- ``messages``: the same by messages;
- ``wait``: the plan alone, by messages, without headers or checks: waiting as treeattn does, with its eye on the
  deadline and on the calling of the roll, against nothing but testing and giving up the core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from agreement import Bare, unwatched

import treeattn
from treeattn.cli.output import console, print_rows
from treeattn.wrapping import team_of

ROWS = {
    "memory": "a deadline of 300 s, shared memory",
    "messages": "a deadline of 300 s, messages",
    "wait": "all of the watch, messages alone",
}


def paired_us(watched: Callable[[], Any], free: Callable[[], Any], pairs: int) -> dict[str, float]:
    """Time pairs of steps; give medians, and the quartiles of their differences."""
    times = np.empty((pairs + pairs // 10, 2))
    for number, row in enumerate(times):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            (free if which else watched)()
            row[which] = time.perf_counter() - start
    twos = 1e6 * times[-(pairs // 2) * 2 :].reshape(-1, 2, 2).mean(axis=1)
    low, middle, high = np.quantile(twos[:, 0] - twos[:, 1], (0.25, 0.5, 0.75))
    with_watch, without = np.median(twos, axis=0)
    return {"watched": with_watch, "free": without, "difference": middle, "low": low, "high": high}


def deadline(plan: str, state: treeattn.PartialState, pairs: int) -> dict[str, float]:
    """Compare the public call on two communicators of the same ranks."""
    with treeattn.TreeComm(plan=plan, timeout=300) as watched, treeattn.TreeComm(plan=plan, timeout=0) as free:
        return paired_us(lambda: watched.allreduce(state), lambda: free.allreduce(state), pairs)


def whole_watch(state: treeattn.PartialState, pairs: int) -> dict[str, float]:
    """Compare the plan's messages with both ways to wait."""
    with treeattn.TreeComm(plan="flat") as comm:
        plan, transport = comm.plan_for(state.nbytes), team_of(comm).channel.transport.dup()
        watched = Bare(plan, transport, state, transport.wait)
        free = Bare(plan, transport, state, unwatched(transport))
        return paired_us(lambda: watched.merge(state), lambda: free.merge(state), pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="where rank 0 writes the numbers")
    options = parser.parse_args()
    with treeattn.TreeComm() as comm:
        out = np.random.default_rng(comm.rank).standard_normal((1, 32, 1, 128), dtype=np.float32)
        state = treeattn.PartialState.from_lse(out, np.zeros((1, 32, 1), np.float32), base="e")
        found = {
            "memory": deadline("shared", state, options.pairs),
            "messages": deadline("flat", state, options.pairs),
            "wait": whole_watch(state, options.pairs),
        }
        if comm.rank == 0:
            show(found, comm.size, options.pairs, options.json)


def show(found: dict[str, dict[str, float]], ranks: int, pairs: int, path: Path | None) -> None:
    text = "{difference:+.2f} µs ({low:+.2f} to {high:+.2f}): {watched:.2f} against {free:.2f}"
    rows = [(ROWS[name], text.format(**each)) for name, each in found.items()]
    print_rows(console(None), f"What the watch costs a step: {ranks} ranks, {pairs:,} pairs", rows)
    if path is not None:
        path.write_text(json.dumps({"ranks": ranks, "pairs": pairs, "microseconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
