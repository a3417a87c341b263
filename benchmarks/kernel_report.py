"""What the kernel's benchmark prints: a table, the machine, and a plot."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

__all__ = ["about_machine", "draw", "table"]

COLUMNS = ("row", "threads", "tokens", "library", "% of the limit", "GB/s", "read GB/s", "ms", "kept", "error")


def about_machine() -> dict[str, Any]:
    """Give date, processor, commit and versions."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    packages = {name: version(name) for name in ("numpy", "numba", "llvmlite")}
    return {"date": str(date.today()), "machine": processor(), "commit": commit, "versions": packages}


def processor() -> str:
    """Name of the processor, where the system tells it, and how many there are."""
    names = []
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} processors"


def table(results: dict[str, Any]) -> None:
    """Print all rows; the middle half of the samples is in brackets."""
    printed = Table(
        *COLUMNS, title=f"{results['machine']}, {results['date']}, {results['commit']}", title_justify="left"
    )
    for row in results["rows"]:
        named = (row["name"], str(row["threads"]), f"{row['tokens']:,}")
        if "absent" in row:
            printed.add_row(*named, row["peer"], row["absent"])
            continue
        library = row["peer"] if row["peer"] in ("treeattn", "prepared") else f"{row['peer']}, {row['form']}"
        median, low, high = (100 * share for share in (row["share"], *row["share_quartiles"]))
        share, kept = f"{median:.0f} ({low:.0f} to {high:.0f})", f"{row['kept']} of {row['taken']}"
        rates = (f"{row[rate]:.1f}" for rate in ("gb_per_s", "read_gb_per_s"))
        printed.add_row(*named, library, share, *rates, f"{row['ms']:.3f}", kept, f"{row['error']:.0e}")
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    console.print(printed)


def draw(results: dict[str, Any], file: str) -> None:
    """Draw the share of the limit by context: a panel per row and number of threads, a line per library.

    Lines join medians; the middle half of the samples is shaded.
    """
    from treeattn.cli.plots import import_pyplot

    rows = [row for row in results["rows"] if "absent" not in row]
    if not rows:
        raise click.ClickException("plot: no row has figures; the table says why")
    panels = list(dict.fromkeys((row["name"], row["threads"]) for row in rows))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = import_pyplot().subplots(
        1, len(panels), figsize=(5 * len(panels), 4.5), layout="constrained", squeeze=False
    )
    highest = max(110, *(105 * row["share_quartiles"][1] for row in rows))
    for axis, (name, threads) in zip(axes[0], panels, strict=True):
        own = [row for row in rows if (row["name"], row["threads"]) == (name, threads)]
        for number, peer in enumerate(peers):
            _line(axis, [row for row in own if row["peer"] == peer], peer, f"C{number}")
        axis.axhline(100, color="grey", linewidth=1)
        axis.set(title=f"{name}, {threads} thread{'s' * (threads > 1)}", xlabel="tokens", xscale="log")
        ticks = sorted({row["tokens"] for row in own})
        axis.set(ylim=(0, highest), xticks=ticks, xticklabels=[f"{tick:,}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("% of a plain read")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(file, dpi=120)


def _line(axis: Any, rows: Sequence[dict[str, Any]], name: str, color: str) -> None:
    rows = sorted(rows, key=itemgetter("tokens"))
    tokens, shares = [row["tokens"] for row in rows], [100 * row["share"] for row in rows]
    low, high = ([100 * row["share_quartiles"][end] for row in rows] for end in (0, 1))
    axis.plot(tokens, shares, marker="o", label=name, color=color)
    axis.fill_between(tokens, low, high, color=color, alpha=0.2, linewidth=0)
