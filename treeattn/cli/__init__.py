"""The command line. One file per command, all of one shape; `failure` is where every error ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from treeattn import __version__
from treeattn.cli.bench import bench
from treeattn.cli.decode import decode
from treeattn.cli.doctor import doctor
from treeattn.cli.failure import run_command
from treeattn.cli.plan import plan
from treeattn.cli.topology import topology
from treeattn.cli.warmup import warmup

__all__ = ["commands", "main"]

EXAMPLES = """\b
Examples:
  treeattn doctor --ranks 4
  treeattn topology --hosts a,a,b,b
  treeattn warmup --dtype bfloat16
  treeattn decode --tokens 131072 --ranks 4 --verify
  treeattn bench --ranks 2,4,8 --plot comparison.png
  mpirun -n 4 treeattn decode --q-heads 32 --kv-heads 8
"""


@click.group(
    "treeattn",
    commands=[decode, bench, plan, topology, doctor, warmup],
    invoke_without_command=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, "-V", "--version", prog_name="treeattn")
@click.pass_context
def commands(context: click.Context) -> None:
    """Exact attention decoding over a key/value cache that is split over MPI ranks.

    Every command runs on one process, under `mpirun -n P treeattn ...`, or starts mpirun itself with --ranks P.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``treeattn`` with ``arguments``, by default the process's own, and end the process."""
    run_command(commands, sys.argv[1:] if arguments is None else arguments)
