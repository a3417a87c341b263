"""Options that several commands take, and how their values are read."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from treeattn.arguments.arrays import FLOAT_DTYPES
from treeattn.arguments.spec import LAYOUTS
from treeattn.costs.model import PRESETS
from treeattn.errors import InputError
from treeattn.launch import launched, run
from treeattn.planning.planner import BY_MODEL
from treeattn.planning.radices import NAMED_RADICES
from treeattn.planning.topology import check_hosts

__all__ = [
    "ALGORITHM_NAMES",
    "Whole",
    "backend_option",
    "file_option",
    "json_option",
    "model_option",
    "on_ranks",
    "parse_tokens",
    "plan_option",
    "plan_options",
    "read_algorithm",
    "read_output_file",
    "read_tokens",
    "read_window",
    "shape_options",
    "suggest",
]

Command = TypeVar("Command", bound=Callable[..., Any])

ALGORITHM_NAMES = "tree, ring, ring_query, dist_flash, megatron_sp, ulysses, allreduce3, gather, ulysses_gqa"
"""What `treeattn.cli.contender.ALGORITHMS` has, written down here so that help need not import them."""

PLAN_NAMES = *BY_MODEL, *NAMED_RADICES
PLAN_HELP = f"{', '.join(PLAN_NAMES)}; radices INSIDE,BETWEEN; or a file of topology --save."


class Whole(click.IntRange):
    """A whole number of at least so many; click's own says "integer range" to people."""

    name = "integer"


def parse_tokens(text: str) -> int | None:
    """Read a number of tokens; k is 1024 and M is 1024 k. None is no such number."""
    factor = {"k": 1024, "m": 1024**2}.get(text.strip()[-1:].lower(), 1)
    try:
        number = float(text.strip()[:-1] if factor > 1 else text) * factor
    except ValueError:
        return None
    return int(number) if 1 <= number < 1e15 else None


def read_tokens(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Read one number of tokens."""
    if (number := parse_tokens(value)) is None:
        raise click.BadParameter(f"expected a number of tokens, such as 131072, 128k or 1M, got {value!r}")
    return number


def suggest(names: Iterable[str], files: bool = False) -> Callable[..., list[CompletionItem]]:
    """Offer ``names`` where a shell completes the value of an option that takes others too, such as ``files``."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found + [CompletionItem(incomplete, type="file")] * (files and not found)

    return complete


def read_hosts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Split labels at commas; how many there must be, the communicator knows."""
    labels = None if value is None else tuple(label.strip() for label in value.split(","))
    if labels is not None and not all(labels):
        raise click.BadParameter(f"expected labels between commas, such as a,a,b,b, got {value!r}")
    return labels


def read_window(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int | None, int | None] | None:
    """Read LEFT,RIGHT; which numbers make sense, the library knows."""
    if value is None:
        return None
    try:
        left, right = (None if word.strip() == "none" else int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected LEFT,RIGHT, each a number or none, got {value!r}") from None
    return left, right


def plan_option(command: Command) -> Command:
    """Add --plan: which tree is used."""
    names = suggest(PLAN_NAMES, files=True)
    return click.option("--plan", default="default", show_default=True, help=PLAN_HELP, shell_complete=names)(command)


def model_option(command: Command) -> Command:
    """Add --model: the cost model by which a plan is chosen."""
    return click.option(
        "--model",
        default="default",
        show_default=True,
        help=f"Cost model: {', '.join(PRESETS)}; or a file of topology --calibrate --save.",
        shell_complete=suggest(PRESETS, files=True),
    )(command)


def backend_option(command: Command) -> Command:
    """Add --backend: what computes."""
    text = "A name from treeattn doctor.  [default: what suits the arrays]"

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from treeattn.backends.registry import names

        return suggest(names())(ctx, param, incomplete)

    return click.option("--backend", help=text, shell_complete=complete)(command)


def read_algorithm(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Refuse an algorithm that there is not."""
    from treeattn.cli.contender import ALGORITHMS

    if value not in ALGORITHMS:
        raise click.BadParameter(f"expected one of {', '.join(ALGORITHMS)}, got {value!r}")
    return value


def _folder_of(file: str) -> Path:
    path = Path(file)
    return (path if path.is_absolute() else Path(_current_folder(), path)).parent


def read_output_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a file to write in a folder that is not there, before any work is done for it; rank 0 is to write it."""
    here = launched()
    if value == "":
        raise click.BadParameter("expected a file, or - for standard output, got ''")
    if value not in (None, "-") and (here is None or here.rank == 0) and not _folder_of(value).is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), value)
    return value


def shape_options(command: Command) -> Command:
    """Add what a model's decode step looks like: heads, widths, type, layout, and which keys are seen."""
    positive = Whole(1)
    for option in (
        click.option("--softcap", type=float, help="Bound logits softly to this size."),
        click.option(
            "--window",
            callback=read_window,
            metavar="LEFT,RIGHT",
            help="See LEFT tokens back and RIGHT ahead; none = no limit.",
        ),
        click.option("--causal", is_flag=True, help="Query tokens see no later ones."),
        click.option("--layout", type=click.Choice(LAYOUTS), default="bhtd", show_default=True),
        click.option(
            "--dtype", type=click.Choice(FLOAT_DTYPES), default="float32", show_default=True, help="Type of q, k, v."
        ),
        click.option("--v-head-dim", type=positive, help="Width of v.  [default: as --head-dim]"),
        click.option("--head-dim", type=positive, default=128, show_default=True, help="Width of q and k."),
        click.option("--q-tokens", type=positive, default=1, show_default=True, help="Query tokens, the last ones."),
        click.option("--kv-heads", type=positive, default=8, show_default=True),
        click.option("--q-heads", type=positive, default=32, show_default=True),
        click.option("--batch", type=positive, default=1, show_default=True),
    ):
        command = option(command)
    return command


def plan_options(command: Command) -> Command:
    """Add --hosts, --plan and --deterministic: who shares a host, and which tree is used."""
    for option in (
        click.option("--deterministic", is_flag=True, help="Equal bits whatever the hosts, for more bytes."),
        plan_option,
        click.option(
            "--hosts", callback=read_hosts, metavar="A,A,B,B", help="Pretend that the ranks are on these hosts."
        ),
    ):
        command = option(command)
    return command


def json_option(command: Command) -> Command:
    """Add --json: where to write what the table says, for programs."""
    return file_option("--json", "json_file", "Write the results here as JSON; - is stdout.", dash=True)(command)


def file_option(
    name: str, target: str, text: str, *, check: Callable[..., str | None] = read_output_file, dash: bool = False
) -> Callable[[Command], Command]:
    """Add an option for a file to write; ``-`` is standard output where ``dash`` says so."""
    return click.option(
        name, target, type=click.Path(dir_okay=False, writable=True, allow_dash=dash), callback=check, help=text
    )


def on_ranks(
    *, check: Callable[..., None] | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Add --ranks and --debug to a command, and start it on that many ranks when no launcher has.

    Parameters
    ----------
    check : callable, optional
        Takes the command's options and raises what is wrong with them, before anything is started.
    """

    def decorate(command: Callable[..., int | None]) -> Callable[..., int | None]:
        @click.option("--ranks", type=Whole(1), help="Start mpirun with this many ranks.")
        @click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
        @functools.wraps(command)
        def with_ranks(ranks: int | None, **options: Any) -> int | None:
            if check is not None:
                check(**options)
            if ranks is None or _among(ranks):
                return command(**options)
            _check_against(ranks, **options)
            return run(ranks, [*_this_command(), *click.get_current_context().find_root().obj])

        return with_ranks

    return decorate


def _check_against(ranks: int, hosts: tuple[str, ...] | None = None, root: int | None = None, **options: Any) -> None:
    """Refuse what so many ranks would refuse, before a launcher tells the same at length."""
    if hosts is not None:
        check_hosts(hosts, ranks)
    if root is not None and not 0 <= root < ranks:
        raise InputError.of("--root", expected=f"a rank from 0 to {ranks - 1}", got=root)


def _this_command() -> list[str]:
    """Give what starts this command anew; like the command itself, it imports from the current folder only if asked."""
    if sys.path[0] in ("", _current_folder()):
        return ["-m", "treeattn"]
    return ["-c", "import sys; sys.path = list(filter(None, sys.path)); from treeattn.cli import main; main()"]


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InputError.of("current folder", expected="one that is there", got="one that was removed") from None


def _among(ranks: int) -> bool:
    """Tell whether this process is already one of the ranks that were asked for."""
    size = 1 if (here := launched()) is None else here.size
    if size not in (1, ranks):
        raise InputError.of("--ranks", expected=f"{size}, the number that a launcher has started", got=ranks)
    return size == ranks
