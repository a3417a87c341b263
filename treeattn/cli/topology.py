"""``treeattn topology``: who shares a host, and the tree that a merge takes over them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeattn.cli.options import Whole, file_option, json_option, model_option, on_ranks, plan_options
from treeattn.cli.output import console, counts, drawable, print_rows, write_json, writing
from treeattn.costs.model import CostModel, read_model
from treeattn.costs.pricing import cost
from treeattn.errors import InputError
from treeattn.launch import launched

if TYPE_CHECKING:
    from treeattn.planning.plan import Plan

__all__ = ["topology"]

EXAMPLES = """\b
Examples:
  treeattn topology --ranks 4
  treeattn topology --hosts a,a,b,b
  treeattn topology --hosts a,a,a,b,b,c --plan binary --payload 66560
  treeattn topology --hosts r0/a,r0/b,r1/c,r1/d --plan all,2,all --model infinity-fabric-roce --save plan.json
  treeattn topology --plan plan.json
  treeattn topology --ranks 4 --calibrate --save model.json
  mpirun -n 4 treeattn topology --json -
"""


def _check(*, plan: str, model: str, **options: Any) -> None:
    """Refuse what can't work before any rank is started."""
    from treeattn.planning.plan import Plan
    from treeattn.planning.planner import parse_radices
    from treeattn.planning.saved import text_of

    read_model(model)
    text = text_of("plan", plan)
    if text is None:
        parse_radices(plan)
    else:
        Plan.from_json(text)


@click.command(epilog=EXAMPLES)
@click.option(
    "--payload",
    type=Whole(1),
    default=32 * (128 + 2) * 4,
    show_default=True,
    help="Bytes of a state: query heads x (width of v + 2) x 4.",
)
@click.option("--root", type=Whole(0), help="Draw the tree that gives only this rank the result.")
@model_option
@click.option("--calibrate", is_flag=True, help="Measure a cost model on these ranks, and plans beside its forecasts.")
@file_option("--save", "save", "Write the plan, or what --calibrate has measured, for --plan and --model.")
@plan_options
@json_option
@on_ranks(check=_check)
def topology(
    *,
    payload: int,
    root: int | None,
    model: str,
    calibrate: bool,
    save: str | None,
    hosts: tuple[str, ...] | None,
    plan: str,
    deterministic: bool,
    json_file: str | None,
) -> int:
    """Show hosts, ranks and the tree, and predict what a merge costs.

    With --hosts and no launcher, nothing is started: the layout is only imagined. The plan of a file is drawn as it
    is. What is before the last slash of a host is its rack.
    """
    if calibrate:
        return _calibrate(hosts, payload, save, json_file)
    rank, tree = _draw_from(hosts, plan, deterministic, root, payload, read_model(model))
    if rank == 0:
        results = _results(tree, payload, read_model(model))
        to = console(json_file)
        to.print(drawable(tree.draw(), to.encoding), markup=False)
        print_rows(to, f"\nOne merge of states of {counts(payload)} bytes", _rows(results))
        write_json(json_file, results)
        _save(save, tree.to_json())
    return 0


def _calibrate(hosts: tuple[str, ...] | None, payload: int, save: str | None, json_file: str | None) -> int:
    from treeattn.cli.calibrating import calibrate, show

    rank, found, chosen, measured = calibrate(hosts, payload)
    if rank == 0:
        show(console(json_file), found, chosen, measured)
        samples, plans = map(asdict, found.samples), map(asdict, measured)
        write_json(json_file, {"samples": [*samples], "plans": [*plans], "chosen": str(chosen)})
        _save(save, found.model.to_json())
    return 0


def _save(path: str | None, text: str) -> None:
    if path is not None:
        with writing(path):
            Path(path).write_text(text, encoding="utf-8")


def _draw_from(
    hosts: tuple[str, ...] | None, plan: str, deterministic: bool, root: int | None, payload: int, model: CostModel
) -> tuple[int, Plan]:
    """Give this rank, and the plan of a file, or that of a layout."""
    from treeattn.planning.plan import Plan
    from treeattn.planning.saved import text_of

    here, text = launched(), text_of("plan", plan)
    if text is not None:
        return 0 if here is None else here.rank, Plan.from_json(text)
    if hosts is not None and (here is None or here.size == 1):
        return 0, _imagined(hosts, plan, deterministic, root, payload, model)
    return _followed(hosts, plan, deterministic, root, payload, model)


def _followed(
    hosts: tuple[str, ...] | None, plan: str, deterministic: bool, root: int | None, payload: int, model: CostModel
) -> tuple[int, Plan]:
    """Give this rank, and the plan that a merge of these ranks follows: through shared memory where they have it."""
    from treeattn.comm import TreeComm

    wanted = None if plan in ("default", "auto") else plan
    with TreeComm(hosts=hosts, plan=wanted, deterministic=deterministic, model=model) as comm:
        _check_root(root, comm.size)
        return comm.rank, comm.plan_for(payload, root)


def _imagined(
    hosts: tuple[str, ...], plan: str, deterministic: bool, root: int | None, payload: int, model: CostModel
) -> Plan:
    """Give the plan of ranks that are not there, which send messages."""
    from treeattn.costs.choosing import choose_radices
    from treeattn.planning.planner import parse_radices, plan_allreduce, plan_reduce

    radices = parse_radices(plan) or choose_radices(hosts, payload, model=model)
    if root is None:
        return plan_allreduce(hosts, radices, deterministic=deterministic)
    _check_root(root, len(hosts))
    return plan_reduce(hosts, root, radices, deterministic=deterministic)


def _check_root(root: int | None, ranks: int) -> None:
    if root is not None and root >= ranks:
        raise InputError.of("--root", expected=f"a rank from 0 to {ranks - 1}", got=root)


def _results(tree: Plan, payload: int, model: CostModel) -> dict[str, Any]:
    predicted, priced = tree.predict(payload), cost(tree, payload, model)
    return {
        "plan": str(tree),
        "hosts": tree.hosts,
        "payload_bytes": payload,
        "predicted": asdict(predicted.total),
        "busiest_rank_bytes": max(each.bytes for each in predicted.per_rank),
        "cost_us": {**asdict(priced.terms), "total": priced.total_us},
    }


def _rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    predicted = results["predicted"]
    return [
        ("rounds", f"{predicted['rounds']}, {predicted['rounds_between']} between hosts"),
        ("messages", f"{counts(predicted['messages'])}, {counts(predicted['messages_between'])} between hosts"),
        ("bytes sent", f"{counts(predicted['bytes'])}, {counts(predicted['bytes_between'])} between hosts"),
        ("busiest rank sends", f"{counts(results['busiest_rank_bytes'])} bytes"),
        ("forecast", _terms(results["cost_us"])),
    ]


def _terms(cost_us: dict[str, float]) -> str:
    """Write the terms that there are, and their sum."""
    terms = [f"{name} {cost_us[name]:.3g}" for name in cost_us if name not in ("jitter", "total") and cost_us[name]]
    return f"{cost_us['total']:.3g} us by the model: {', '.join(terms)}" if terms else "nothing to send"
