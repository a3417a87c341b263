"""What ``treeattn bench`` shows and writes: where it ran, a table per workload, JSON, CSV and pictures."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeattn.cli.output import console, counts, escape, print_rows, print_table, size, write_json, writing
from treeattn.launch import find_runtime

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from treeattn.cli.bench_ranks import Contest
    from treeattn.cli.comparison import Row

__all__ = ["environment", "show"]

LEGEND = """\
ms: median of a step, until its slowest rank is done; spread: from the 10th to the 90th percentile, of the median
forecast: the tree's shards, timed without an exchange, and what its plan should take by a model measured here
to tree: how many times as long as the tree; error: the largest, absolute, from a float64 oracle
sent, memory: bytes of the busiest rank, the latter at the peak; paper's: what the paper's formulas say of them"""

TIMES = "ms", "spread", "forecast", "to tree", "error"
BYTES = "rounds", "sent", "paper's", "memory", "paper's"


def environment(contest: Contest) -> dict[str, Any]:
    """Say what the rows were measured on."""
    import numpy as np

    from treeattn import __version__
    from treeattn.backends.registry import find

    delays = contest.delays
    return {
        "treeattn": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.node()}, {platform.machine()}, {_processor()}",
        "cores": len(os.sched_getaffinity(0)),
        "ranks are": "threads of one process" if contest.threads else find_runtime().banner,
        "backend": find(contest.backend).name,
        "plan": contest.plan,
        "ranks per host": contest.ranks_per_host or "as they are",
        "time is": "each rank's own, computing and waiting" if contest.threads and delays else "the machine's",
        "emulated latency (ms)": "none" if delays is None else f"{1e3 * delays.inside:g}:{1e3 * delays.between:g}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def show(
    rows: Sequence[Row], where: dict[str, Any], json_file: str | None, csv_file: str | None, plot_file: str | None
) -> None:
    """Print the rows and write the files that were asked for; then fail if any row is wrong."""
    to = console(json_file)
    print_rows(to, "treeattn bench", [(name, escape(str(value))) for name, value in where.items()])
    _print_tables(to, rows)
    write_json(json_file, {"environment": where, "rows": [_told(row) for row in rows]})
    if csv_file is not None:
        _write_csv(csv_file, rows)
    if plot_file is not None:
        from treeattn.cli.plots import draw

        draw(rows, plot_file)
    if wrong := [row for row in rows if not row.correct]:
        names = ", ".join(dict.fromkeys(row.algorithm for row in wrong))
        raise click.ClickException(f"{len(wrong)} of {len(rows)} rows are wrong, of {names}")


def _told(row: Row) -> dict[str, Any]:
    """Give a row for programs; no number where there is none."""
    told = asdict(row)
    if row.refused:
        told |= dict.fromkeys(("median_ms", "p10_ms", "p90_ms", "error", "limit"))
    return {**told, "correct": row.correct}


def _write_csv(file: str, rows: Sequence[Row]) -> None:
    told = [_told(row) for row in rows]
    with writing(file), open(file, "w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(told[0]))
        writer.writeheader()
        writer.writerows(told)


def _print_tables(to: Console, rows: Sequence[Row]) -> None:
    """Print two tables for each workload: times, with the tree's as the measure, and bytes."""
    for (ranks, hosts, tokens, batch), group in groupby(
        rows, lambda row: (row.ranks, row.hosts, row.tokens, row.batch)
    ):
        own = list(group)
        tree_ms = next((row.median_ms for row in own if row.algorithm == "tree"), None)
        where = f"{ranks} rank{'s'[: ranks != 1]} on {hosts} host{'s'[: hosts != 1]}"
        title = f"{where}, {counts(tokens)} tokens, batch {batch}"
        print_table(to, _table(title, TIMES, [(row, _times(row, tree_ms)) for row in own]))
        print_table(to, _table("", BYTES, [(row, _bytes(row)) for row in own if not row.refused]))
    for text in dict.fromkeys(f"{row.algorithm} on {row.ranks} ranks: {row.refused}" for row in rows if row.refused):
        to.print(escape(text))
    to.print(LEGEND)


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[Row, Sequence[str]]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row, cells in rows:
        table.add_row(row.algorithm, *cells)
    return table


def _times(row: Row, tree_ms: float | None) -> list[str]:
    if row.refused:
        return ["refused"]
    return [
        f"{row.median_ms:.2f}",
        f"{100 * (row.p90_ms - row.p10_ms) / row.median_ms:.0f} %",
        "" if row.forecast_ms is None else f"{row.forecast_ms:.2f}",
        "" if tree_ms is None else f"{row.median_ms / tree_ms:.2f}",
        f"{row.error:.0e}" if row.error <= row.limit else f"[red]{row.error:.0e} > {row.limit:.0e}[/]",
    ]


def _bytes(row: Row) -> list[str]:
    return [
        f"{row.collectives} calls" if row.collectives else str(row.rounds),
        size(row.rank_bytes) if row.as_stated else f"[red]{size(row.rank_bytes)}, not as stated[/]",
        "" if row.paper_bytes is None else size(row.paper_bytes),
        size(row.memory_bytes),
        "" if row.paper_memory_bytes is None else size(row.paper_memory_bytes),
    ]
