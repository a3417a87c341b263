"""How a command fails: one sentence, an exit status, and no rank left behind."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from treeattn.cli.output import named_output, open_streams
from treeattn.errors import TreeattnError
from treeattn.launch import GRACE, abort, launched

__all__ = ["run_command"]


def run_command(command: click.Command, arguments: Sequence[str], name: str = "treeattn") -> NoReturn:
    """Run a command line and end the process with its status; a failure is one sentence on stderr, from one rank.

    Parameters
    ----------
    command : click.Command
    arguments : sequence of str
    name : str
        Of the program, which begins that sentence.
    """
    open_streams()
    try:
        with named_output():
            status = command.main(arguments, name, standalone_mode=False, obj=tuple(arguments))
    except click.Abort:  # Ctrl-C
        raise SystemExit(130) from None
    except Exception as error:
        _fail(error, name, debug="--debug" in arguments)
    if status:
        _let_rank_zero_speak()
    raise SystemExit(status)


def _fail(error: Exception, name: str, debug: bool) -> NoReturn:
    _let_rank_zero_speak()
    text = "".join(traceback.format_exception(error)) if debug else f"{name}: {_sentence(error)}"
    abort(text, error.exit_code if isinstance(error, click.ClickException) else 1)


def _sentence(error: Exception) -> str:
    if isinstance(error, click.UsageError):
        command = f" ({error.ctx.command_path} --help)" if error.ctx else ""
        return error.format_message().rstrip(".") + command
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if isinstance(error, (TreeattnError, OSError)):
        return " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"


def _let_rank_zero_speak() -> None:
    """Wait a moment on the other ranks: if all fail alike, rank 0's end ends them before they speak too."""
    here = launched()
    if here is not None and here.rank > 0:
        time.sleep(GRACE)
