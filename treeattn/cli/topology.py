"""``treeattn topology``: who shares a host, and the tree that a merge takes over them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from treeattn.cli.options import json_option, on_ranks, plan_options
from treeattn.cli.output import console, counts, drawable, print_rows, write_json
from treeattn.errors import InputError
from treeattn.launch import launched

if TYPE_CHECKING:
    from treeattn.plan import Plan

__all__ = ["topology"]

EXAMPLES = """\b
Examples:
  treeattn topology --ranks 4
  treeattn topology --hosts a,a,b,b
  treeattn topology --hosts a,a,a,b,b,c --plan binary --payload 66560
  mpirun -n 4 treeattn topology --json -
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--payload",
    type=click.IntRange(1),
    default=32 * (128 + 2) * 4,
    show_default=True,
    help="Bytes of a state: query heads x (width of v + 2) x 4.",
)
@click.option("--root", type=click.IntRange(0), help="Draw the tree that gives only this rank the result.")
@plan_options
@json_option
@on_ranks()
def topology(
    *,
    payload: int,
    root: int | None,
    hosts: tuple[str, ...] | None,
    plan: str,
    deterministic: bool,
    json_file: str | None,
) -> int:
    """Show hosts, ranks and the tree, and predict what a merge costs.

    With --hosts and no launcher, nothing is started: the layout is only imagined.
    """
    rank, labels = _layout(hosts)
    tree = _tree(labels, plan, deterministic, root, payload)
    if rank == 0:
        results = _results(tree, payload)
        to = console(json_file)
        to.print(drawable(tree.draw(), to.encoding), markup=False)
        print_rows(to, f"\nOne merge of states of {counts(payload)} bytes", _rows(results))
        write_json(json_file, results)
    return 0


def _layout(hosts: tuple[str, ...] | None) -> tuple[int, tuple[str, ...]]:
    """Give this rank and every rank's host; without other ranks, any layout may be imagined."""
    from treeattn.comm import TreeComm

    here = launched()
    if hosts is not None and (here is None or here.size == 1):
        return 0, hosts
    with TreeComm(hosts=hosts) as comm:
        return comm.rank, comm.hosts


def _tree(hosts: tuple[str, ...], plan: str, deterministic: bool, root: int | None, payload: int) -> Plan:
    from treeattn.choosing import choose_radices
    from treeattn.planner import parse_radices, plan_allreduce, plan_reduce

    radices = parse_radices(plan) or choose_radices(hosts, payload)
    if root is None:
        return plan_allreduce(hosts, radices, deterministic=deterministic)
    if root >= len(hosts):
        raise InputError.of("--root", expected=f"a rank from 0 to {len(hosts) - 1}", got=root)
    return plan_reduce(hosts, root, radices, deterministic=deterministic)


def _results(tree: Plan, payload: int) -> dict[str, Any]:
    predicted = tree.predict(payload)
    return {
        "plan": str(tree),
        "hosts": tree.hosts,
        "payload_bytes": payload,
        "predicted": asdict(predicted.total),
        "busiest_rank_bytes": max(each.bytes for each in predicted.per_rank),
    }


def _rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    predicted = results["predicted"]
    return [
        ("rounds", f"{predicted['rounds']}, {predicted['rounds_between']} between hosts"),
        ("messages", f"{counts(predicted['messages'])}, {counts(predicted['messages_between'])} between hosts"),
        ("bytes sent", f"{counts(predicted['bytes'])}, {counts(predicted['bytes_between'])} between hosts"),
        ("busiest rank sends", f"{counts(results['busiest_rank_bytes'])} bytes"),
    ]
