"""What rank 0 prints: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from treeattn.launch import launched

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "console",
    "counts",
    "drawable",
    "escape",
    "named_output",
    "open_streams",
    "print_rows",
    "print_table",
    "size",
    "under_way",
    "write_json",
    "writing",
]

_PLAIN = {"└": "`", "├": "|", "─": "-", "↔": "<->", "→": "->", "×": " x "}


def console(json_file: str | None) -> Console:
    """Give where rank 0 prints: nowhere if JSON has standard output to itself."""
    from rich.console import Console

    # Launchers give ranks a terminal of their own, whatever reads their output in the end.
    plain = None if launched() is None else False
    to = Console(file=sys.stdout, quiet=json_file == "-", force_terminal=plain, highlight=False)
    to.width = to.width or 80  # which some containers report as 0, and then nothing at all would be shown
    return to


def under_way(text: str) -> AbstractContextManager[Any]:
    """Say what takes a while, as long as the context lasts, on stderr where somebody looks at it."""
    from rich.console import Console

    to = Console(stderr=True)
    return to.status(text) if to.is_terminal and launched() is None else nullcontext()


def print_rows(to: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names and values below a title."""
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")  # a path that was cut short is of no use
    for name, value in rows:
        table.add_row(name, value)
    to.print(table)


def print_table(to: Console, table: Table) -> None:
    """Print a table of numbers whole: a narrower terminal breaks its lines, where rich would cut the numbers."""
    width = to.width
    to.width = max(width, to.measure(table, options=to.options.update(width=sys.maxsize)).maximum)
    to.print(table)
    to.width = width


def escape(text: str) -> str:
    """Keep brackets in ``text`` from being read as markup."""
    from rich.markup import escape

    return escape(text)


def drawable(text: str, encoding: str) -> str:
    """Give a drawing in ASCII where ``encoding`` has no lines and arrows."""
    try:
        "└├─↔→×".encode(encoding)
    except UnicodeEncodeError:
        return text.translate({ord(drawn): plain for drawn, plain in _PLAIN.items()})
    return text


def counts(number: float, unit: str = "") -> str:
    """Write a count with its thousands apart."""
    return f"{number:,.0f}{unit and ' ' + unit}"


def size(nbytes: float) -> str:
    """Write bytes with three digits and a unit of 1000s."""
    power = next((power for power in range(4) if nbytes < 999.5 * 1000**power), 4)
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


@contextmanager
def writing(file: str) -> Iterator[None]:
    """Name the file in what goes wrong: where a disk is full, Python does not say whose file it was."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error


class _Output:
    """Standard output, which is named in what goes wrong there."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str | bytes) -> None:
        with writing("standard output"):
            self._stream.write(text)

    def flush(self) -> None:
        with writing("standard output"):
            self._stream.flush()

    @property
    def buffer(self) -> _Output:
        """Where bytes are written, such as what a shell asks to complete commands."""
        return _Output(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def named_output() -> Iterator[None]:
    """Let ``sys.stdout`` be named in what goes wrong there, whoever writes to it."""
    stream = sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a label that it can't show is no reason to show nothing
    try:
        with redirect_stdout(cast("IO[str]", _Output(stream))):
            yield
    except OSError:
        _let_end(stream)
        raise


def _let_end(stream: Any) -> None:
    """Drop what a stream holds and can't write, which Python would try once more at exit, and make that the status."""
    try:
        stream.flush()
    except OSError:
        if isinstance(stream, TextIOWrapper):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def open_streams() -> None:
    """Let what is written to a stream that is closed go nowhere: the next file to be opened would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - open to the end


def write_json(json_file: str | None, results: Mapping[str, Any]) -> None:
    """Write ``results`` to the file that was asked for, if any."""
    if json_file is None:
        return
    text = json.dumps(results, indent=2) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        with writing(json_file):
            Path(json_file).write_text(text, encoding="utf-8")
