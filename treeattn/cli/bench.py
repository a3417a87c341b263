"""``treeattn bench``: the tree and the systems it is compared with, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeattn.arguments.arrays import FLOAT_DTYPES
from treeattn.cli.bench_ranks import Contest, on_mpi, on_threads, report_to
from treeattn.cli.bench_report import environment, show
from treeattn.cli.options import (
    ALGORITHM_NAMES,
    Whole,
    backend_option,
    file_option,
    json_option,
    parse_tokens,
    plan_option,
    read_output_file,
)
from treeattn.cli.workload import Workload
from treeattn.launch import launched

if TYPE_CHECKING:
    from treeattn.cli.comparison import Row
    from treeattn.transports.emulation import Delays

__all__ = ["bench"]

EXAMPLES = """\b
Examples:
  treeattn bench --ranks 2,4,8
  treeattn bench --algorithms tree,ring --tokens 65536,262144 --dtype bfloat16 --csv rows.csv
  treeattn bench --ranks 8,16,32 --emulate-latency 10 --plot latency.png
  mpirun -n 4 treeattn bench --json -
"""


def _contexts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    read = [parse_tokens(word) for word in value.split(",")]
    if None in read:
        raise click.BadParameter(f"expected numbers of tokens between commas, such as 4096,64k,1M, got {value!r}")
    return tuple(number for number in read if number)


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in value.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise click.BadParameter(f"expected positive numbers between commas, such as 2,4,8, got {value!r}")
    return numbers


def _algorithms(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    from treeattn.cli.contender import ALGORITHMS

    names = tuple(ALGORITHMS) if value == "all" else tuple(word.strip() for word in value.split(","))
    if unknown := [name for name in names if name not in ALGORITHMS]:
        raise click.BadParameter(f"expected all, or any of {', '.join(ALGORITHMS)}, got {unknown[0]!r}")
    return names


def _delays(ctx: click.Context, param: click.Parameter, value: str | None) -> Delays | None:
    from treeattn.transports.emulation import Delays

    return None if value is None else Delays.read(value)


def _plot_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a plot that can't be drawn before anything is measured."""
    if value is not None:
        from treeattn.cli.plots import picture_format, picture_formats

        if picture_format(value) not in (known := picture_formats()):
            raise click.BadParameter(f"expected a name that ends in one of {', '.join(known)}, got {value!r}")
    return read_output_file(ctx, param, value)


def _list_option(
    name: str, default: str, text: str, read: Callable[..., tuple[int, ...]] = _numbers
) -> Callable[[Any], Any]:
    return click.option(name, default=default, callback=read, show_default=True, metavar="N,N,...", help=text)


@click.command(epilog=EXAMPLES)
@click.option(
    "--algorithms",
    callback=_algorithms,
    default="all",
    show_default=True,
    metavar="NAME,NAME,...",
    help=f"Of {ALGORITHM_NAMES}.",
)
@_list_option("--tokens", "4096,16384", "Contexts, on all ranks together; k is 1024.", _contexts)
@_list_option("--batch", "1", "Batch rows: the payloads, since a state has a row for each.")
@_list_option("--ranks", "2,4,8", "Numbers of ranks; under a launcher, its own.")
@click.option("--threads", is_flag=True, help="Ranks are threads of one process, not MPI processes.")
@click.option(
    "--emulate-latency",
    "delays",
    callback=_delays,
    metavar="MS[:MS]",
    help="Hold messages for MS between hosts, or INSIDE:BETWEEN. Ranks are then threads, unless under a launcher.",
)
@click.option(
    "--ranks-per-host",
    type=Whole(1),
    help="Pretend that so many share a host.  [default: 1 with emulated latency]",
)
@click.option("--q-heads", type=Whole(1), default=32, show_default=True)
@click.option("--kv-heads", type=Whole(1), default=8, show_default=True)
@click.option("--q-tokens", type=Whole(1), default=1, show_default=True, help="Query tokens, the last ones.")
@click.option("--head-dim", type=Whole(1), default=64, show_default=True)
@click.option("--dtype", type=click.Choice(FLOAT_DTYPES), default="float32", show_default=True)
@click.option("--causal", is_flag=True, help="Query tokens see no later ones.")
@plan_option
@backend_option
@click.option("--seed", type=Whole(0), default=0, show_default=True)
@click.option("--repeats", type=Whole(1), default=5, show_default=True, help="Timed steps per row.")
@click.option("--warmup", type=Whole(1), default=2, show_default=True, help="Steps before those.")
@file_option("--csv", "csv_file", "Write the rows here.")
@file_option("--plot", "plot_file", "Draw time by ranks, time by context and peak memory here.", check=_plot_file)
@click.option("--rows", "rows_file", type=click.Path(dir_okay=False), hidden=True)
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
@json_option
@click.pass_context
def bench(
    context: click.Context,
    /,
    *,
    ranks: tuple[int, ...],
    threads: bool,
    csv_file: str | None,
    plot_file: str | None,
    rows_file: str | None,
    json_file: str | None,
    **options: Any,
) -> int:
    """Compare the tree with ring attention and other baselines.

    All run on the same kernels and ranks. Every row is checked against a float64 oracle, and its messages against the
    algorithm's formula. A step is timed from when all ranks are ready until the slowest has its result; agreeing on
    the call is left out for the baselines, while the tree's costs it nothing. With emulated latency and ranks that
    are threads, time is each rank's own: what it would take with a processor for itself, so that 64 ranks need no 64
    cores.
    """
    here = launched()
    threads = here is None and (threads or options["delays"] is not None)
    contest = _contest({**options, "threads": threads})
    if rows_file is not None:
        contest.run(None, report_to(Path(rows_file)))
        return 0
    numbers = ranks if here is None else (here.size,)
    rows: list[Row] = []
    with _progress(len(numbers) * len(contest.works) * len(contest.algorithms)) as advance:

        def on_row(row: Row) -> None:
            rows.append(row)
            advance()

        for number in numbers:
            if here is not None:
                contest.run(None, on_row)
            elif threads:
                on_threads(contest, number, on_row)
            else:
                on_mpi(number, context.find_root().obj, on_row)
    if here is None or here.rank == 0:
        show(rows, environment(contest), json_file, csv_file, plot_file)
    return 0


def _contest(options: dict[str, Any]) -> Contest:
    """Read the options, and refuse what can't work before any rank is started."""
    from treeattn.planning.planner import parse_radices

    parse_radices(options["plan"])
    fixed = {"v_head_dim": None, "layout": "bhtd", "window": None, "softcap": None}
    contexts, batches = options.pop("tokens"), options.pop("batch")
    first = Workload.of({**options, **fixed, "tokens": contexts[0], "batch": batches[0]})
    first.check()
    works = [replace(first, tokens=tokens, batch=batch) for tokens in contexts for batch in batches]
    per_host = options["ranks_per_host"] or (None if options["delays"] is None else 1)
    rest = {name: options[name] for name in ("algorithms", "backend", "warmup", "repeats", "plan", "delays", "threads")}
    return Contest(works=works, ranks_per_host=per_host, **rest)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], Any]]:
    """Show how far the comparison is, where somebody looks."""
    from rich.console import Console
    from rich.progress import Progress

    to = Console(stderr=True)
    with Progress(console=to, transient=True, disable=not to.is_terminal or launched() is not None) as progress:
        task = progress.add_task("comparing", total=total)
        yield lambda: progress.advance(task)
