"""``treeattn warmup``: compile ahead what a model's decode steps need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import treeattn
from treeattn.arguments.arrays import KV_DTYPES, narrow_dtype
from treeattn.cli.options import json_option, on_ranks, shape_options
from treeattn.cli.output import console, write_json
from treeattn.cli.workload import Workload
from treeattn.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from treeattn.comm import TreeComm

__all__ = ["warmup"]

EXAMPLES = """\b
Examples:
  treeattn warmup --q-heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16
  treeattn warmup --dtype bfloat16 --kv-dtype int8 --causal --q-tokens 4
  treeattn warmup --ranks 2
  treeattn warmup --list
"""


def _workload(options: Mapping[str, Any]) -> Workload:
    return Workload.of({**options, "tokens": 1, "seed": 0})


def _check(**options: Any) -> None:
    """Refuse a shape that makes no sense before any rank is started."""
    _workload(options).check()


@click.command(epilog=EXAMPLES)
@shape_options
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="Type of stored k and v.  [default: as --dtype]")
@click.option("--all", "everything", is_flag=True, help="Compile for every shape, all that --list names.")
@click.option("--list", "listed", is_flag=True, help="Name all that can be compiled for this processor, and no more.")
@click.option("--clear", is_flag=True, help="Remove all compiled code, that of other versions too, and no more.")
@json_option
@on_ranks(check=_check)
def warmup(
    *, kv_dtype: str | None, everything: bool, listed: bool, clear: bool, json_file: str | None, **options: Any
) -> int:
    """Compile ahead, and keep on disk, what decode steps need.

    It runs a step of the shape over a few made-up keys. Ranks that share a host need a little more than a process
    alone: give --ranks 2 for those. Where each host has a disk of its own, run it on every host.
    """
    from treeattn.comm import TreeComm
    from treeattn.kernels.code_folder import cache_folder, clear_cache
    from treeattn.kernels.specialisations import specialisations

    if clear + listed + everything > 1:
        raise InputError.of("--clear", expected="one of --all, --list and --clear", got="several")
    results: dict[str, Any] = {}
    with TreeComm() as comm:
        to = console("-" if comm.rank else json_file)
        if clear:
            results["removed"] = _shown(to, map(str, clear_cache()))
        elif listed:
            results["specialisations"] = _shown(to, (name for name, _ in specialisations()))
        else:
            results["ready"] = _watched(to, lambda: _decode(comm, _workload(options), kv_dtype))
            if everything:
                results["ready"] += _watched(to, lambda: [part() for _, part in specialisations()])
            results["folder"] = [str(folder := cache_folder() or "no folder can be written")]
            to.print(f"code is kept in {folder}", soft_wrap=True)
        write_json(None if comm.rank else json_file, results)
    return 0


def _decode(comm: TreeComm, work: Workload, kv_dtype: str | None) -> None:
    """Take one step over a key on each rank."""
    work = replace(work, tokens=comm.size)
    (k, v), options = work.cache(comm.rank, comm.rank + 1), work.options(comm.rank)
    if kv_dtype is not None:
        k, v = (each.astype(narrow_dtype(kv_dtype)) for each in (k, v))
    treeattn.decode(work.query(), k, v, comm=comm, **options)


def _watched(to: Console, work: Callable[[], Any]) -> list[dict[str, Any]]:
    """Do something, and show each function that is made ready for it."""
    from treeattn.kernels.compilation import Compilation, watching

    ready: list[dict[str, Any]] = []
    with to.status("starting") as status:

        def begin(name: str) -> None:
            status.update(f"compiling or loading {name}")

        def end(done: Compilation) -> None:
            ready.append(done._asdict())
            to.print(f"{done.name}: {'loaded' if done.loaded else 'compiled'} in {done.seconds:.2f} s")

        with watching(begin, end):
            work()
    return ready


def _shown(to: Console, lines: Iterable[str]) -> list[str]:
    shown = list(lines)
    for line in shown:
        to.print(line, soft_wrap=True)
    return shown
