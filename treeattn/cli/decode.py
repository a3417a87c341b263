"""``treeattn decode``: one decode step over a made-up cache, checked and timed."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from treeattn.cli.options import (
    ALGORITHM_NAMES,
    Whole,
    backend_option,
    json_option,
    model_option,
    on_ranks,
    plan_options,
    read_algorithm,
    read_tokens,
    shape_options,
    suggest,
)
from treeattn.cli.output import console, counts, print_rows, under_way, write_json
from treeattn.cli.workload import Workload
from treeattn.errors import InputError
from treeattn.wire_form import WIRE_DTYPES

if TYPE_CHECKING:
    from treeattn.cli.measurement import Measurement
    from treeattn.comm import TreeComm

__all__ = ["decode"]

EXAMPLES = """\b
Examples:
  treeattn decode --tokens 131072 --dtype bfloat16 --ranks 2
  treeattn decode --tokens 4096 --causal --window 1023,0 --verify
  treeattn decode --algorithm ring --ranks 4 --verify
  treeattn decode --ranks 4 --hosts a,a,b,b --json - | jq .counted
"""


def _check(*, plan: str, model: str, algorithm: str, wire_dtype: str | None, **options: Any) -> None:
    """Refuse what can't work before any rank is started."""
    from treeattn.costs.model import read_model
    from treeattn.planning.planner import parse_radices

    if wire_dtype is not None and algorithm != "tree":
        raise InputError.of("wire_dtype", expected="--algorithm tree", got=algorithm)
    Workload.of(options).check()
    parse_radices(plan)
    read_model(model)


@click.command(epilog=EXAMPLES)
@click.option(
    "--tokens",
    callback=read_tokens,
    default="8192",
    show_default=True,
    help="Context, on all ranks together; k is 1024.",
)
@shape_options
@click.option(
    "--algorithm",
    callback=read_algorithm,
    default="tree",
    show_default=True,
    help=f"One of {ALGORITHM_NAMES}.",
    shell_complete=suggest(ALGORITHM_NAMES.split(", ")),
)
@backend_option
@click.option("--root", type=int, help="Only this rank gets the result.")
@plan_options
@model_option
@click.option("--wire-dtype", type=click.Choice(WIRE_DTYPES), help="What o travels in.  [default: the state's own]")
@click.option("--seed", type=Whole(0), default=0, show_default=True, help="Of the made-up cache.")
@click.option("--repeats", type=Whole(1), default=10, show_default=True, help="Timed steps.")
@click.option("--warmup", type=Whole(0), default=2, show_default=True, help="Steps before those.")
@click.option("--verbose", is_flag=True, help="Show what the first step took, and what was compiled for it.")
@click.option("--verify", is_flag=True, help="Compare with a float64 oracle, on rank 0.")
@json_option
@on_ranks(check=_check)
def decode(
    *,
    algorithm: str,
    hosts: tuple[str, ...] | None,
    plan: str,
    model: str,
    deterministic: bool,
    wire_dtype: str | None,
    backend: str | None,
    root: int | None,
    repeats: int,
    warmup: int,
    verbose: bool,
    verify: bool,
    json_file: str | None,
    **options: Any,
) -> int:
    """Decode one step over a made-up cache and show what it took.

    Every rank makes its shard of the cache, then all decode together. Steps are timed on rank 0, one after another.
    The exit status is 1 if the result is wrong, the tree's bits differ between ranks, or messages are not as planned.
    """
    from treeattn.cli.measurement import measure
    from treeattn.comm import TreeComm

    work = Workload.of(options)
    with TreeComm(hosts=hosts, plan=plan, model=model, deterministic=deterministic, wire_dtype=wire_dtype) as comm:
        with under_way("making a cache, and decoding over it"):
            found = measure(comm, work, algorithm, root=root, backend=backend, warmup=warmup, repeats=repeats)
        results = {"algorithm": algorithm, **_results(comm, work, found)}
        rounding = comm.wire_error(comm.wire_bytes(work.state_shape, work.state_dtype), root)
    if comm.rank == 0:
        results["verdict"] = _verdict(work, found, rounding) if verify else None
        print_rows(console(json_file), "treeattn decode", _rows(results, verbose))
        write_json(json_file, results)
        _complain(results)
    return 0


def _verdict(work: Workload, found: Measurement, rounding: float) -> dict[str, Any]:
    with under_way("asking the float64 oracle"):
        return asdict(work.verdict(found.out, rounding))


def _results(comm: TreeComm, work: Workload, found: Measurement) -> dict[str, Any]:
    """Put everything into one mapping, the same for people and for programs; times in ms."""
    deciles = statistics.quantiles(found.seconds * 2, n=10, method="inclusive")  # twice: one repeat is enough
    median = statistics.median(found.seconds)
    return {
        "workload": asdict(work),
        "ranks": comm.size,
        "hosts": comm.hosts,
        "plan": found.plan,
        "wire_dtype": comm.wire_dtype,
        "median_ms": 1e3 * median,
        "first_ms": 1e3 * found.first.seconds,
        "first_code": found.first.code,
        "p10_ms": 1e3 * deciles[0],
        "p90_ms": 1e3 * deciles[-1],
        "kv_bytes": work.kv_bytes,
        "gb_per_s": None if work.window else work.kv_bytes / median / 1e9,  # keys outside a window may be skipped
        "counted": asdict(found.counted),
        "predicted": asdict(found.predicted),
        "paper_bytes_per_rank": work.paper_bytes(comm.size),
        "same_bits": found.same_bits,
    }


def _rows(results: dict[str, Any], verbose: bool) -> list[tuple[str, str]]:
    first = [("first step", f"{results['first_ms']:.0f} ms: {results['first_code']}")] if verbose else []
    work, counted = results["workload"], results["counted"]
    heads = f"{work['q_heads']} query and {work['kv_heads']} KV heads of width {work['head_dim']}"
    verdict = results["verdict"]
    error = "not asked for (--verify)"
    if verdict is not None:
        error = f"{verdict['error']:.2e}, at most {verdict['limit']:.2e} allowed; {verdict['method']}"
    read = "not known: a window leaves keys out"
    if results["gb_per_s"] is not None:
        read = f"{results['gb_per_s']:.2f} GB/s, all ranks together"
    return [
        ("cache", f"{counts(work['tokens'])} tokens, {heads}, {work['dtype']}: {counts(results['kv_bytes'])} bytes"),
        ("plan", results["plan"] or results["algorithm"]),
        ("o on the wire", results["wire_dtype"] or "as it is"),
        ("error", error),
        (
            "time per step",
            f"{results['median_ms']:.3f} ms (10 % to 90 %: {results['p10_ms']:.3f} to {results['p90_ms']:.3f})",
        ),
        *first,
        ("cache read", read),
        ("rounds", f"{counted['rounds']}, {counted['rounds_between']} between hosts"),
        ("messages", f"{counts(counted['messages'])}, {counts(counted['messages_between'])} between hosts"),
        ("bytes sent", f"{counts(counted['bytes'])}, {counts(counted['bytes_between'])} between hosts"),
        ("as planned", "yes" if counted == results["predicted"] else f"no: {results['predicted']}"),
        ("paper's scheme", f"3 all-reduces, {counts(results['paper_bytes_per_rank'])} bytes per rank"),
        ("bits", "the same on every rank" if results["same_bits"] else "different between ranks"),
    ]


def _complain(results: dict[str, Any]) -> None:
    """Raise for what must never be, after it was shown."""
    verdict = results["verdict"]
    if verdict is not None and not verdict["error"] <= verdict["limit"]:
        raise click.ClickException(f"the result is off by {verdict['error']:.3g}, more than {verdict['limit']:.3g}")
    if results["algorithm"] == "tree" and not results["same_bits"]:
        raise click.ClickException("ranks have different bits")
    if results["counted"] != results["predicted"]:
        raise click.ClickException("the messages are not those of the plan")
