"""Pictures of ``treeattn bench``: time by ranks, time by context, peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeattn.cli.contender import ALGORITHMS
from treeattn.cli.output import writing
from treeattn.errors import MissingDependencyError

if TYPE_CHECKING:
    from treeattn.cli.comparison import Row

__all__ = ["draw", "import_pyplot", "picture_format", "picture_formats"]


def import_pyplot() -> Any:
    """Import ``matplotlib.pyplot`` for drawing to files.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(f"--plot needs matplotlib: pip install 'treeattn[plot]' ({error})") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[Row], file: str) -> None:
    """Draw rows to a PNG file, or whatever its name ends in."""
    shown = [row for row in rows if not row.refused]
    most_ranks, longest = max(row.ranks for row in shown), max(row.tokens for row in shown)
    batch = shown[0].batch
    one_length = [row for row in shown if row.tokens == longest and row.batch == batch]
    one_size = [row for row in shown if row.ranks == most_ranks and row.batch == batch]
    figure, axes = import_pyplot().subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    _panel(axes[0], one_length, "ranks", lambda row: row.median_ms, f"ms per step, {longest:,} tokens")
    _panel(axes[1], one_size, "tokens", lambda row: row.median_ms, f"ms per step, {most_ranks} ranks")
    _panel(axes[2], one_length, "ranks", lambda row: row.peak_bytes, f"peak bytes of buffers, {longest:,} tokens")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    with writing(file):
        figure.savefig(file, format=picture_format(file), dpi=120)


def picture_format(file: str) -> str:
    """Give the format that a file's name asks for; a picture goes to that file, whatever its name.

    Examples
    --------
    >>> picture_format("rows.SVG"), picture_format("/dev/stdout")
    ('svg', 'png')
    """
    return Path(file).suffix[1:].lower() or "png"


def picture_formats() -> list[str]:
    """Name the formats that there are."""
    return sorted(import_pyplot().Figure().canvas.get_supported_filetypes())


def _panel(axis: Any, rows: Sequence[Row], by: str, value: Callable[[Row], float], title: str) -> None:
    for name in dict.fromkeys(row.algorithm for row in rows):
        own = [row for row in rows if row.algorithm == name]
        # An algorithm keeps its colour where another, having refused, is missing.
        color = f"C{list(ALGORITHMS).index(name)}"
        axis.plot([getattr(row, by) for row in own], [value(row) for row in own], marker="o", label=name, color=color)
    scale = "log" if any(value(row) > 0 for row in rows) else "linear"  # one rank alone has no buffers
    axis.set(title=title, xlabel=by, xscale="log", yscale=scale)
    ticks = sorted({getattr(row, by) for row in rows})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3, which="both")
