"""What is gained by computing while states are under way, where both take about as long.

    python -m treeattn.launch 2 benchmarks/in_flight.py --json in_flight.json

Run it where messages take time: on several hosts. Keys are chosen so that computing a state takes as long as merging it
does, on the slowest rank, unless ``--keys`` says how many. Rows, each the median over blocks of the mean time of the
slowest rank:

- ``compute``, ``merge``: a state's computing, and its all-reduce, alone;
- ``one by one``: two independent sequences, each computes a state and merges it, in turns;
- ``in flight``: the same two, one's state merged while the other's is computed;
- ``pipeline=1``, ``2``, ...: one `decode` of many query tokens, whose heads go in so many groups.

The results of both ways are compared, bit for bit, before they are timed.

A pipeline hides the time that bytes take, and no latency: give it many ``--tokens`` and a wire of some rate. So
``benchmarks/in_flight.json`` was measured, between hosts that were network namespaces with 1 Gbit/s and 1 ms between
them: 4 groups took 47 ms where one took 65, and 2 groups 54.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI
from rank_timing import milliseconds
from rich.console import Console
from rich.table import Table

import treeattn
from treeattn.launch import install_abort_hook

Array: TypeAlias = npt.NDArray[Any]
WORLD = MPI.COMM_WORLD
FEWEST, MOST = 512, 1 << 20


class Sequence:
    """One of the two sequences: its keys and values on this rank, and a query."""

    def __init__(self, number: int, heads: int, width: int, keys: int, tokens: int = 1) -> None:
        rng = np.random.default_rng([number, WORLD.rank])
        self.q = np.random.default_rng(number).standard_normal((1, heads, tokens, width), dtype=np.float32)
        self.k, self.v = (rng.standard_normal((1, heads, keys, width), dtype=np.float32) for _ in "kv")

    def compute(self) -> treeattn.PartialState:
        """Attention over this rank's keys."""
        return treeattn.partial_attention(self.q, self.k, self.v)


def fitting_keys(comm: treeattn.TreeComm, heads: int, width: int, tokens: int, repeats: int) -> int:
    """Give the keys whose state takes as long to compute as to merge."""
    keys = 4 * FEWEST
    short = Sequence(0, heads, width, keys, tokens)
    state = short.compute()
    merge = milliseconds(lambda: comm.allreduce(state), repeats)
    compute = milliseconds(short.compute, repeats)
    return int(np.clip(keys * merge / compute, FEWEST, MOST))


def one_by_one(comm: treeattn.TreeComm, sequences: list[Sequence]) -> list[Array]:
    """Compute and merge, one sequence after the other."""
    return [comm.allreduce(each.compute()).packed for each in sequences]


class InFlight:
    """The same, with one sequence's state under way while the other's is computed; it stays so between calls."""

    def __init__(self, comm: treeattn.TreeComm, sequences: list[Sequence]) -> None:
        self._comm, self._sequences = comm, sequences
        self._begun = comm.allreduce_begin(sequences[-1].compute())

    def __call__(self) -> list[Array]:
        """Advance both sequences by a step; gives the last sequence's result of the step before, and the others'."""
        ended = []
        for each in self._sequences:
            state = self._comm.beside(each.compute)
            ended.append(self._begun.end().packed)
            self._begun = self._comm.allreduce_begin(state)
        return ended

    def end(self) -> None:
        """Leave nothing in flight."""
        self._begun.end()


def two_sequences(comm: treeattn.TreeComm, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Give the calls that two sequences make, their results compared."""
    heads, width = options.heads, options.width
    keys = options.keys or fitting_keys(comm, heads, width, 1, options.repeats)
    sequences = [Sequence(number, heads, width, keys) for number in range(2)]
    state = sequences[0].compute()
    in_flight = InFlight(comm, sequences)
    right, found = one_by_one(comm, sequences), in_flight()
    assert [each.tobytes() for each in found] == [each.tobytes() for each in reversed(right)], "other bits in flight"
    return {
        f"compute {keys} keys": sequences[0].compute,
        "merge": lambda: comm.allreduce(state),
        "one by one": lambda: one_by_one(comm, sequences),
        "in flight": in_flight,
    }


def pipelines(comm: treeattn.TreeComm, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Give calls of `decode` with one group of heads and more, their results compared."""
    heads, width, tokens = options.heads, options.width, options.tokens
    keys = options.keys or fitting_keys(comm, heads, width, tokens, options.repeats)
    long = Sequence(2, heads, width, keys, tokens)

    def decode(groups: int) -> Array:
        out: Array = treeattn.decode(long.q, long.k, long.v, comm=comm, pipeline=groups)
        return out

    right = decode(1).tobytes()
    assert all(decode(groups).tobytes() == right for groups in options.groups), "other bits in groups"
    state = long.compute()
    return {
        f"compute {tokens} x {keys} keys": long.compute,
        f"merge {state.nbytes / 1e6:.2f} MB": lambda: comm.allreduce(state),
        **{f"pipeline={groups}": lambda groups=groups: decode(groups) for groups in (1, *options.groups)},
    }


def measure(calls: dict[str, Callable[[], Any]], blocks: int, repeats: int) -> dict[str, float]:
    """Give the median block of each call, taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(blocks):
        for name, call in calls.items():
            found[name].append(milliseconds(call, repeats))
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32, help="query tokens of the pipelined decode")
    parser.add_argument("--groups", type=int, nargs="*", default=[2, 4], help="groups of the pipelined decode")
    parser.add_argument("--keys", type=int, default=0, help="keys per rank; by default such that it takes long enough")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="calls per block")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the numbers")
    options = parser.parse_args()
    install_abort_hook()
    with treeattn.TreeComm() as comm:
        calls = two_sequences(comm, options)
        found = measure(calls, options.blocks, options.repeats)
        calls["in flight"].end()  # type: ignore[attr-defined]
        found |= measure(pipelines(comm, options), options.blocks, options.repeats)
        if comm.rank == 0:
            show(found, f"{comm.size} ranks on {len(set(comm.hosts))} hosts", options.json)


def show(found: dict[str, float], title: str, path: Path | None) -> None:
    """Print the table, and write the numbers."""
    table = Table(title=f"computing beside messages, ms of the slowest rank; {title}")
    for column in ("row", "ms", "times as fast"):
        table.add_column(column)
    slow = {"in flight": "one by one"}
    for name, row in found.items():
        base = slow.get(name, "pipeline=1" if name.startswith("pipeline") else "")
        faster = f"{found[base] / row:.2f}" if base else ""
        table.add_row(name, f"{row:.3f}", faster)
    Console(width=100).print(table)
    if path is not None:
        path.write_text(json.dumps({"layout": title, "milliseconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
