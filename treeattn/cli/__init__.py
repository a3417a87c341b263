"""The command line. One file per command, all of one shape; `failure` is where every error ends."""

from __future__ import annotations

import click

from treeattn import __version__
from treeattn.cli.decode import decode
from treeattn.cli.doctor import doctor
from treeattn.cli.failure import OneSentence
from treeattn.cli.topology import topology

__all__ = ["main"]

EXAMPLES = """\b
Examples:
  treeattn doctor --ranks 4
  treeattn topology --hosts a,a,b,b
  treeattn decode --tokens 131072 --ranks 4 --verify
  mpirun -n 4 treeattn decode --q-heads 32 --kv-heads 8
"""


@click.group(
    cls=OneSentence,
    commands=[decode, topology, doctor],
    invoke_without_command=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="treeattn")
@click.pass_context
def main(context: click.Context) -> None:
    """Exact attention decoding over a key/value cache that is split over MPI ranks.

    Every command runs on one process, under `mpirun -n P treeattn ...`, or starts mpirun itself with --ranks P.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
