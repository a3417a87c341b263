"""Write the tables of docs/performance.md from the JSON of one or several runs of the kernel's benchmark.

    python benchmarks/kernel.py --rows dtypes --json a.json    (and so on, as often as you like)
    python benchmarks/kernel_docs.py a.json b.json ...

A figure is the median over the runs; behind it, in brackets, are those of all runs, in the order of the files. Above a
table is what it was measured on. ``--tables`` leaves the others as they are; ``--machine intel`` writes to the marks of
"dtypes on intel" and so on, beside those of the machine that the page is about.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click
from kernel_cases import GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
LIBRARIES = ("treeattn", "onnxruntime", "torch", "jax", "numpy")

Row: TypeAlias = "dict[str, Any]"
Runs: TypeAlias = "dict[tuple[str, int, str], list[Row]]"


TABLES = ("dtypes", "options", "many", "widths", "memory", "peers", "fixed")


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--tables", default=",".join(TABLES), show_default=True, help="Tables to write.")
@click.option("--machine", help="Another machine, which has tables of its own.")
def main(files: Sequence[str], tables: str, machine: str | None = None) -> None:
    results = [json.loads(Path(file).read_text()) for file in files]
    usual = {case.name: case.tokens for group in GROUPS.values() for case in group}
    runs: Runs = defaultdict(list)
    for run, row in ((run, row) for run, result in enumerate(results) for row in result["rows"]):
        if row["tokens"] == usual[row["name"]]:
            runs[row["name"], row["threads"], row["peer"]].append(row | {"run": run})
    page = PAGE.read_text()
    for name in tables.split(","):
        lines = [*origin(results, runs, name), "", *written(runs, name)]
        page = fill(page, f"{name} on {machine}" if machine else name, "\n".join(lines))
    PAGE.write_text(page)


def written(runs: Runs, name: str) -> list[str]:
    """Give a table's lines."""
    special: dict[str, Callable[[Runs], list[str]]] = {"peers": peers, "fixed": fixed}
    return special[name](runs) if name in special else shares(runs, name)


def fill(page: str, name: str, text: str) -> str:
    """Put a table between its two marks."""
    marks = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not marks.search(page):
        raise click.ClickException(f"{PAGE.name}: expected the marks of {name!r}")
    return marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)


def origin(results: Sequence[dict[str, Any]], runs: Runs, table: str) -> list[str]:
    """Say on what the runs were made that have a row of a table, a line for each that differs."""
    names, others = {case.name for case in GROUPS[table]}, LIBRARIES[1:]
    found = [rows for (name, _, peer), rows in runs.items() if name in names and (table != "peers" or peer in others)]
    used = sorted({row["run"] for rows in found for row in rows})
    return list(dict.fromkeys(about(results[run]) for run in used))


def about(result: dict[str, Any]) -> str:
    """Say on what a run was made."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['machine']}; {result['date']}; commit {result['commit']}; {versions}  "


def shares(runs: Runs, group: str) -> list[str]:
    """Share of the limit and speed for each row of a group, by number of threads."""
    threads = sorted({threads for _, threads, _ in runs})
    heads = [
        f"{count} thread{'s' * (count > 1)}: {what}" for count in threads for what in ("% of a read", "GB/s", "ms")
    ]
    lines = table_head(["row", *heads])
    for name in dict.fromkeys(case.name for case in GROUPS[group]):
        cells = []
        for count in threads:
            rows = measured(runs[name, count, "treeattn"])
            cells += [every(rows, "share", 100, 0), every(rows, "gb_per_s", 1, 1), every(rows, "ms", 1, 2)]
        lines.append(table_line([f"`{name}`", *cells]))
    return lines


def peers(runs: Runs) -> list[str]:
    """Share of the limit for each library, in the runs that had others than treeattn too."""
    lines = table_head(
        ["row", "threads", *(f"{library}: % of a read" for library in LIBRARIES), "times as fast as the best other"]
    )
    together = {row["run"] for (_, _, peer), rows in runs.items() if peer in LIBRARIES[1:] for row in rows}
    for name in dict.fromkeys(case.name for case in GROUPS["peers"]):
        for count in sorted({threads for row, threads, peer in runs if row == name and peer in LIBRARIES[1:]}):
            rows = [[row for row in runs[name, count, each] if row["run"] in together] for each in LIBRARIES]
            lines.append(table_line([f"`{name}`", str(count), *map(library_cell, rows), ahead(runs, name, count)]))
    return lines


def library_cell(rows: Sequence[Row]) -> str:
    found = measured(rows)
    forms = (
        "" if not found or found[0]["peer"] == "treeattn" else f" {'/'.join(sorted({row['form'] for row in found}))}"
    )
    return every(found, "share", 100, 0) + forms.replace("_", " ")


def ahead(runs: Runs, name: str, threads: int) -> str:
    """How many times as fast as the best other library of the same run: time over time, not share over share."""
    best: dict[int, float] = defaultdict(float)
    for row in (row for library in LIBRARIES[1:] for row in measured(runs[name, threads, library])):
        best[row["run"]] = max(best[row["run"]], row["gb_per_s"])
    own = [row for row in measured(runs[name, threads, "treeattn"]) if row["run"] in best]
    return every([{"times": row["gb_per_s"] / best[row["run"]]} for row in own], "times", 1, 1)


def fixed(runs: Runs) -> list[str]:
    """Microseconds of a call beyond reading its bytes, and bytes beyond the inputs."""
    lines = table_head(["row", "threads", "prepared call: µs", "`attention`: µs", "bytes beyond the inputs"])
    for name in dict.fromkeys(case.name for case in GROUPS["fixed"]):
        for count in sorted({threads for row, threads, _ in runs if row == name}):
            prepared, public = (measured(runs[name, count, peer]) for peer in ("prepared", "treeattn"))
            calls = (every(rows, "beyond_read_us", 1, 0) for rows in (prepared, public))
            lines.append(table_line([f"`{name}`", str(count), *calls, every(public, "extra_bytes", 1, 0)]))
    return lines


def measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "share" in row]


def every(rows: Sequence[Row], key: str, factor: float, digits: int) -> str:
    """Median, and all values where there are several."""
    values = [factor * row[key] for row in rows if key in row]
    if not values:
        return "-"
    shown = [f"{value:,.{digits}f}" for value in (statistics.median(values), *values)]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({', '.join(shown[1:])})"


def table_head(cells: Sequence[str]) -> list[str]:
    return [table_line(cells), table_line(["---"] * len(cells))]


def table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
