"""How fast the CPU kernel is, as a share of what the memory can deliver, beside other libraries.

Every figure is a share of the limit: the time that a plain read of the same bytes takes just before and after, over the
time of the call. Several sets of K and V are used in turn, so that none is still in a cache. Each library runs in a
process of its own, pinned to as many processors as there are threads. They take turns, and each answer is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from kernel_cases import GROUPS, Case, select
from kernel_peers import PEERS
from kernel_report import about_machine, draw, table
from kernel_samples import Sample, summary

HERE = Path(__file__).parent
TURNS = 8
"""Times that each library's turn comes, where there are several."""

SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that choose OpenBLAS's kernels by hand, which some machines set to slow but safe ones."""

PORTABLE = {"TREEATTN_PORTABLE": "1"}


@click.command(help=__doc__)
@click.option("--rows", default="short", show_default=True, help=f"Rows, or groups of them: {', '.join(GROUPS)}.")
@click.option("--dtypes", default="", help="Only rows with these types of K and V.")
@click.option("--tokens", default="", help="Contexts in place of the rows' own.")
@click.option("--threads", default="", help="Numbers of threads.  [default: 1 and all processors]")
@click.option("--peers", default="treeattn", show_default=True, help=f"Some of {', '.join(PEERS)}, or all.")
@click.option("--seconds", default=2.0, show_default=True, help="Time for the samples of each.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures there.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False), help="Draw shares of the limit by context.")
def main(
    rows: str, dtypes: str, tokens: str, threads: str, peers: str, seconds: float, json_file: str, plot_file: str
) -> None:
    names = list(PEERS) if peers == "all" else peers.split(",")
    lengths = [int(word) for word in tokens.split(",")] if tokens else [None]
    found: list[dict[str, Any]] = []
    for count in numbers_of_threads(threads):
        for case in (case for length in lengths for case in select(rows, dtypes, length)):
            click.echo(f"{case.name}, {case.tokens:,} tokens, {count} threads ...", err=True)
            found += compare(case, names, count, seconds)
    results = {**about_machine(), "rows": found}
    table(results)
    if json_file:
        Path(json_file).write_text(json.dumps(results, indent=1))
    if plot_file:
        draw(results, plot_file)


def numbers_of_threads(words: str) -> list[int]:
    """Read the numbers that were asked for; by default 1 and all processors that this process may use."""
    if words:
        return [int(word) for word in words.split(",")]
    return sorted({1, len(os.sched_getaffinity(0))})


def compare(case: Case, peers: Sequence[str], threads: int, seconds: float) -> list[dict[str, Any]]:
    """Measure one case with each library, in turns."""
    turns = 1 if len(peers) == 1 else TURNS
    with ExitStack() as running:
        workers = [running.enter_context(Worker(case, peer, threads)) for peer in peers]
        for _ in range(turns):
            for worker in workers:
                worker.take(seconds / turns)
    return [{"threads": threads, "nbytes": case.nbytes, **asdict(case), **worker.figures()} for worker in workers]


class Worker:
    """One library's process for one case. They are made ready one after another, and asked one at a time."""

    def __init__(self, case: Case, peer: str, threads: int) -> None:
        self._case, self._peer, self._threads = case, peer, threads
        self._samples: list[Sample] = []

    def __enter__(self) -> Worker:
        task = {"case": asdict(self._case), "peer": self._peer, "threads": self._threads}
        command = [interpreter(self._peer), str(HERE / "kernel_worker.py"), json.dumps(task)]
        self._process = subprocess.Popen(
            command, env=environment(self._case, self._threads), preexec_fn=lambda: pin(self._threads),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._chosen = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def take(self, seconds: float) -> None:
        """Take samples for some seconds, if the library is there."""
        if "absent" not in self._chosen:
            print(seconds, file=self._process.stdin, flush=True)
            self._samples += [Sample(*each) for each in self._answer()["samples"]]

    def figures(self) -> dict[str, Any]:
        """Give what the samples say, or why there are none."""
        measured = {} if "absent" in self._chosen else summary(self._samples, self._case.nbytes)
        return {"peer": self._peer, **self._chosen, **measured}

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self._peer}, {self._case.name}: {self._process.communicate()[1]}")
        found: dict[str, Any] = json.loads(line)
        return found


def interpreter(peer: str) -> str:
    """Give the library's own environment, which `make bench-peers` makes, or this one."""
    own = HERE.parent / f".venv-{peer}" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def environment(case: Case, threads: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SLOWING}
    names = ("TREEATTN_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    numbers = dict.fromkeys(names, str(threads))
    return {**kept, **numbers, **(PORTABLE if case.portable else {})}


def pin(threads: int) -> None:
    """Keep a process on as many processors as it may have threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


if __name__ == "__main__":
    main()
