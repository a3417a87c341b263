"""``treeattn doctor``: what is installed here, what works, and what to do about the rest."""

from __future__ import annotations

from dataclasses import asdict

import click

from treeattn.cli.options import json_option, on_ranks
from treeattn.cli.output import console, escape, print_rows, write_json
from treeattn.doctor import Check, examine, examine_together, healthy
from treeattn.errors import TreeattnError
from treeattn.launch import launched

__all__ = ["doctor"]

EXAMPLES = """\b
Examples:
  treeattn doctor
  treeattn doctor --ranks 4
  srun -n 16 treeattn doctor --json - > health.json
"""
SIGNS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[red]failed[/]"}


@click.command(epilog=EXAMPLES)
@json_option
@on_ranks()
def doctor(*, json_file: str | None) -> int:
    """Tell what is installed, what works and what does not.

    Run it the way you run your programs: under the same launcher, on the same hosts. What it prints belongs into
    bug reports. The exit status is 0 if nothing failed.
    """
    checks = examine()
    rank, size, together = _examine_together()
    checks += together
    if rank == 0:
        print_rows(console(json_file), "treeattn doctor", _rows(checks))
        checked = [asdict(check) for check in checks]
        write_json(json_file, {"healthy": healthy(checks), "ranks": size, "checks": checked})
    return 0 if healthy(checks) else 1


def _examine_together() -> tuple[int, int, list[Check]]:
    """Give this rank, how many there are, and what they found together, or why they could not get together."""
    from treeattn.comm import TreeComm

    try:
        with TreeComm() as comm:
            return comm.rank, comm.size, examine_together(comm)
    except TreeattnError as error:
        here = launched()
        return (0 if here is None else here.rank), 1, [Check("ranks", str(error), "failed")]


def _rows(checks: list[Check]) -> list[tuple[str, str]]:
    rows = []
    for check in checks:
        rows.append((check.name, f"{SIGNS[check.state]}  {escape(check.finding)}"))
        if check.remedy:
            rows.append(("", escape(check.remedy)))
    return rows
