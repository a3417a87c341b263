"""Pictures of what `benchmarks/merge.py` measured: time by hosts, and time by payload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeattn.cli.plots import import_pyplot


def draw(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw runs to a PNG file, or whatever its name ends in.

    The left panel has the runs whose payload is that of the first, the right one those on its ranks and hosts.

    Parameters
    ----------
    runs : sequence of dict
        Of one or several files from ``merge.py --json``.
    file : Path
    """
    first, names = runs[0], list(dict.fromkeys(name for run in runs for name in run["milliseconds"]))
    of_one_size = [run for run in runs if run["bytes"] == first["bytes"]]
    of_one_layout = [run for run in runs if (run["hosts"], run["ranks"]) == (first["hosts"], first["ranks"])]
    figure, axes = import_pyplot().subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _panel(axes[0], of_one_size, names, "hosts", f"ms per merge of {first['bytes']:,} bytes")
    _panel(axes[1], of_one_layout, names, "bytes", f"ms per merge, {first['ranks']} ranks on {first['hosts']} hosts")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(file, dpi=120)


def _panel(axis: Any, runs: Sequence[dict[str, Any]], names: Sequence[str], by: str, title: str) -> None:
    for number, name in enumerate(names):
        points = sorted((run[by], run["milliseconds"][name]["median"]) for run in runs if name in run["milliseconds"])
        style = "o-" if number < 10 else "s--"  # there are ten colours
        axis.plot(*zip(*points, strict=True) if points else ([], []), style, label=name, color=f"C{number % 10}")
    axis.set(title=title, xlabel=by, xscale="log", yscale="log")
    ticks = sorted({run[by] for run in runs})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3, which="both")
