"""What a small call costs: beside its bytes, beside what Python does, and with helpers that are awake or asleep.

The first table times single operations twice: again at once, and after 32 MB have been read, which is what a call does
that has 4096 tokens. The second times prepared calls of few keys, each time other ones: one after the other, so that
helpers still look for the next call, and apart, so that they have to be woken.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from kernel_samples import add
from rich.console import Console
from rich.table import Table

from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.backends.registry import find
from treeattn.kernels import threads

HEADS, WIDTH = 8, 128
STORED = 30_000
"""Keys of each head from which the calls take theirs: 123 MB, as much again of values."""

APART = 0.002
"""Seconds between two calls that find their helpers asleep."""


@click.command(help=__doc__)
@click.option("--repeats", default=60, show_default=True, help="Times that each is taken; the medians are shown.")
@click.option("--tokens", default="64,128,256", show_default=True, help="Keys of the prepared calls.")
def main(repeats: int, tokens: str) -> None:
    console = Console(highlight=False)
    first = Table("operation", "again at once: µs", "after other memory: µs")
    for name, work in operations().items():
        first.add_row(name, *(f"{median(work, repeats, before):.1f}" for before in (work, reading())))
    console.print(first)
    second = Table("tokens", "KB", "threads", "one after the other: µs", "apart: µs")
    for count in map(int, tokens.split(",")):
        for number in (1, 2):
            os.environ["TREEATTN_THREADS"] = str(number)
            threads.look_again()
            call = prepared(count)
            times = (median(call, repeats, before) for before in (call, lambda: time.sleep(APART)))
            second.add_row(
                str(count), f"{8 * HEADS * WIDTH * count / 1024:.0f}", str(number), *(f"{each:.1f}" for each in times)
            )
    console.print(second)


def median(work: Callable[[], Any], repeats: int, before: Callable[[], Any]) -> float:
    """Microseconds of ``work``, each time just after ``before``."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def operations() -> dict[str, Callable[[], Any]]:
    q = np.zeros((1, HEADS, 1, WIDTH), np.float32)
    return {
        "a function that does nothing": lambda: None,
        "an array's address from NumPy": lambda: q.__array_interface__["data"][0],
        "np.empty": lambda: np.empty(q.shape, np.float32),
        "a prepared call of one key": prepared(1),
    }


def reading() -> Callable[[], Any]:
    """Give a function that reads 32 MB, each time others."""
    runs, at = [np.ones(1 << 22, np.int64) for _ in range(8)], iter(range(1 << 62))
    return lambda: add(runs[next(at) % len(runs)])


def prepared(tokens: int) -> Callable[[], Any]:
    """Give a function that runs a prepared call, each time on other keys."""
    q = np.ones((1, HEADS, 1, WIDTH), np.float32)
    k, v = (np.ones((1, HEADS, STORED, WIDTH), np.float32) for _ in "kv")
    places = [slice(start, start + tokens) for start in range(0, STORED - tokens, tokens)]
    calls = [resolve(q, k[:, :, place], v[:, :, place], Options()) for place in places[:4000]]
    run, out, at = (
        find("cpu").prepare(calls[0][0]),
        np.empty(calls[0][0].packed_shape, np.float32),
        iter(range(1 << 62)),
    )
    return lambda: run(calls[next(at) % len(calls)][1], out)


if __name__ == "__main__":
    main()
