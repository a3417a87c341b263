"""Merging one decode step's states over ranks: every scheme of treeattn, and what MPI's own collectives make of it.

    python -m treeattn.launch 4 benchmarks/merge.py --json merge.json

    python benchmarks/merge.py --runs merge.json on-4-hosts.json on-8-hosts.json --plot merge.png

Run it under any launcher, on one host or many; with several numbers of ``--heads`` it goes through them, a payload
each. The second command measures nothing and draws what earlier runs wrote. All rows of a payload come from one run, in
turns, so that whatever else the machines do meets all of them; each is the median over blocks of the mean time of a
call, of the slowest rank:

- ``default``: the public call with the default plan;
- ``raw``: on one host, the compiled step in shared memory that it then is, without what the call does around it;
- ``shared``, ``oneshot``, ``binary``, ``flat``, ``reduce``, ``split``: the public call with that plan;
- ``mpi``: the same, in which MPI's own all-reduce merges the states, by a compiled operator;
- ``three``: three all-reduces, of m, of l and of o, which is what the paper's code does;
- ``max+sum``: an all-reduce of m, and one of o and l together;
- ``gather``: an all-gather of the states, merged by every rank in compiled code;
- ``ring``: states passed on around a ring, merged by every rank when it has them all.

Every row's result is compared with the float64 merge before it is timed. Where the ranks of a host outnumber its cores,
each is pinned to one, in turns, for all schemes alike. The table's head says so, and how long a word took from one core
of rank 0's machine to another: what goes through shared memory depends on it, and on virtual machines it changes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from cores import Distance, spread
from merge_plot import draw
from mpi4py import MPI
from rank_timing import milliseconds
from rich.console import Console
from rich.table import Table

import treeattn
from treeattn.kernels.combine import prepare_merge
from treeattn.kernels.window import Own
from treeattn.launch import install_abort_hook
from treeattn.steps.swap import Swap
from treeattn.wrapping import team_of

Array: TypeAlias = npt.NDArray[Any]
Call: TypeAlias = Callable[[], Array]

PLANS = ("default", "shared", "oneshot", "binary", "flat", "reduce", "split", "mpi")
WORLD = MPI.COMM_WORLD

FOR_EVER = 2**31
"""Times to give up the core before a step would come back without a result."""


class Peers:
    """What MPI offers, with buffers allocated once; each method gives the finished output (heads, width)."""

    def __init__(self, state: treeattn.PartialState) -> None:
        self._packed = state.packed.copy()
        self._o, self._l, self._m = (np.ascontiguousarray(each[0, :, 0]) for each in (state.o, state.l, state.m))
        self._all = np.empty((WORLD.size, *self._packed.shape), self._packed.dtype)
        self._merged = np.empty_like(self._packed)
        self._merge = prepare_merge(self._merged, list(self._all))
        self._highest, self._total = np.empty_like(self._m), np.empty_like(self._l)
        self._weighted, self._sum = np.empty_like(self._o), np.empty_like(self._o)
        self._both = np.empty((len(self._m), self._o.shape[1] + 1), self._o.dtype)
        self._both_sum = np.empty_like(self._both)

    def three(self) -> Array:
        """All-reduce m by MAX, then l and o by SUM."""
        WORLD.Allreduce(self._m, self._highest, MPI.MAX)
        weight = np.exp(self._m - self._highest)
        WORLD.Allreduce(self._l * weight, self._total, MPI.SUM)
        np.multiply(self._o, weight[:, None], out=self._weighted)
        WORLD.Allreduce(self._weighted, self._sum, MPI.SUM)
        return self._sum / self._total[:, None]

    def max_sum(self) -> Array:
        """All-reduce m by MAX, then o and l together by SUM."""
        WORLD.Allreduce(self._m, self._highest, MPI.MAX)
        weight = np.exp(self._m - self._highest)
        np.multiply(self._o, weight[:, None], out=self._both[:, :-1])
        np.multiply(self._l, weight, out=self._both[:, -1])
        WORLD.Allreduce(self._both, self._both_sum, MPI.SUM)
        return self._both_sum[:, :-1] / self._both_sum[:, -1:]

    def gather(self) -> Array:
        """All-gather the states and merge them."""
        WORLD.Allgather(self._packed, self._all)
        return self._finish()

    def ring(self) -> Array:
        """Pass states on to the next rank until all have all, and merge them."""
        rank, size = WORLD.rank, WORLD.size
        self._all[rank] = self._packed
        for step in range(size - 1):
            sent, received = self._all[(rank - step) % size], self._all[(rank - step - 1) % size]
            WORLD.Sendrecv(sent, (rank + 1) % size, 0, received, (rank - 1) % size, 0)
        return self._finish()

    def _finish(self) -> Array:
        self._merge()
        return self._merged[0, :, 0, :-2] / self._merged[0, :, 0, -2:-1]


def trees(state: treeattn.PartialState) -> tuple[dict[str, Call], dict[str, treeattn.TreeComm]]:
    """Give a call per plan that differs from those before it, and its communicator."""
    calls: dict[str, Call] = {}
    comms = {name: treeattn.TreeComm(plan=name) for name in PLANS}
    known = set()
    for name, comm in comms.items():
        kind = name if name == "mpi" else str(comm.plan_for(state.nbytes).radices)
        if kind in known:
            continue
        known.add(kind)
        out = comm.allreduce(state)
        calls[name] = lambda comm=comm, out=out: comm.allreduce(state, out=out)  # type: ignore[misc]
    return calls, comms


def raw(comm: treeattn.TreeComm, state: treeattn.PartialState) -> dict[str, Call]:
    """Give the compiled step alone, where calls of ``comm`` are one such step."""
    swap = team_of(comm).session.shortcut
    if not isinstance(swap, Swap):
        return {}
    run, own, out = swap.run, swap._own.copy(), comm.allreduce(state)
    own[Own._fields.index("yields")] = FOR_EVER
    arguments = id(state._packed), id(out._packed), own.ctypes.data, 0

    def call(kept: Any = own) -> Any:
        run(*arguments)
        return out

    return {"raw": call}


def check(name: str, result: Any, state: treeattn.PartialState) -> None:
    """Compare with the merge in float64."""
    packed = np.stack(WORLD.allgather(state.packed.astype(np.float64)))[:, 0, :, 0]
    weight = np.exp(packed[..., -1] - packed[..., -1].max(0)) * packed[..., -2]
    each = packed[..., :-2] / packed[..., -2:-1]
    right = (each * weight[..., None]).sum(0) / weight.sum(0)[:, None]
    found = result.finish()[0, :, 0] if isinstance(result, treeattn.PartialState) else result
    error = float(np.abs(found - right).max())
    assert error < 1e-5, f"{name} is wrong by {error}"


def measure(calls: dict[str, Call], blocks: int, repeats: int, distance: Distance) -> dict[str, dict[str, float]]:
    """Give median and best block of each call; each block begins with another, as the first comes after a pause."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    turn = deque(calls.items())
    for _ in range(blocks):
        distance.look()
        for name, call in turn:
            found[name].append(milliseconds(call, repeats))
        turn.rotate(-1)
    return {name: {"median": statistics.median(each), "best": min(each)} for name, each in found.items()}


def measure_payload(heads: int, width: int, blocks: int, repeats: int, distance: Distance) -> dict[str, Any]:
    """Give what one payload takes by every scheme, and by which plans."""
    rng = np.random.default_rng(WORLD.rank)
    q, k, v = (rng.standard_normal((1, heads, n, width), dtype=np.float32) for n in (1, 4, 4))
    state = treeattn.partial_attention(q, k, v)
    calls, comms = trees(state)
    calls |= raw(comms["default"], state)
    peers = Peers(state)
    calls |= {"three": peers.three, "max+sum": peers.max_sum, "gather": peers.gather, "ring": peers.ring}
    for name, call in calls.items():
        check(name, call(), state)
    plans = {name: str(comms[name].plan_for(state.nbytes)) for name in calls if name in comms}
    plans["mpi"] = f"MPI's own all-reduce; headers: {plans['mpi']}"
    run = {
        "ranks": WORLD.size,
        "hosts": len(set(comms["default"].hosts)),
        "bytes": state.nbytes,
        "plans": plans,
        "milliseconds": measure(calls, blocks, repeats, distance),
        "ns_between_cores": distance.ns,
    }
    for comm in comms.values():
        comm.free()
    return run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[32], help="one payload each")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=20, help="calls per block")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the numbers")
    parser.add_argument("--runs", type=Path, nargs="+", help="numbers of earlier runs, instead of measuring")
    parser.add_argument("--plot", type=Path, help="where rank 0 draws time by hosts and by payload; needs matplotlib")
    return parser.parse_args()


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Give what each payload takes."""
    cores = os.sched_getaffinity(0)
    where, repeats = spread(), (options.width, options.blocks, options.repeats)
    return [{"ranks_are": where, **measure_payload(each, *repeats, Distance(cores))} for each in options.heads]


def main() -> None:
    options = arguments()
    install_abort_hook()
    if options.runs:
        runs = [run for path in options.runs for run in json.loads(path.read_text())]
    else:
        runs = measure_all(options)
    if WORLD.rank > 0:
        return
    for run in runs:
        show(run)
    if options.json is not None:
        options.json.write_text(json.dumps(runs, indent=2) + "\n")
    if options.plot is not None:
        draw(runs, options.plot)


def show(run: dict[str, Any]) -> None:
    """Print the table of a payload."""
    layout = f"{run['ranks']} ranks on {run['hosts']} hosts, {run['ranks_are']}"
    apart = "" if run["ns_between_cores"] is None else f"; cores {run['ns_between_cores']:.0f} ns apart"
    table = Table(title=f"one merge of {run['bytes']:,} bytes, ms of the slowest rank, {layout}{apart}")
    for column in ("scheme", "median", "best", "times as fast as three", "plan"):
        table.add_column(column)
    found = run["milliseconds"]
    for name, row in found.items():
        faster = found["three"]["median"] / row["median"]
        table.add_row(name, f"{row['median']:.4f}", f"{row['best']:.4f}", f"{faster:.1f}", run["plans"].get(name, ""))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
