"""What may stand in a file that holds a plan or a model: it may be damaged, edited, or of another kind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from treeattn.errors import InputError
from treeattn.planning.plan import Action, Level, Plan, Round

__all__ = ["check_plan", "loaded", "no_file", "text_of"]

KINDS: Mapping[str, tuple[set[str], str]] = {
    "plan": ({"operation", "hosts", "rounds"}, "a plan"),
    "model": ({"inside", "between"}, "a cost model"),
    "": ({"samples", "plans"}, "what --calibrate has measured"),
}
"""Kinds of files, by the argument that takes them: names that are in them, and what that is."""


def text_of(argument: str, path: Any) -> str | None:
    """Give the text of the file at ``path``; None where there is none.

    Raises
    ------
    InputError
        The file can't be read, or is no text.
    """
    try:
        if not isinstance(path, (str, Path)) or not Path(path).is_file():
            return None
    except (OSError, ValueError):  # too long for a name, or with a null character
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError.of(argument, expected="a readable text file", got=f"{path} ({error})") from None


def no_file(path: Any) -> str:
    """Say that there is no such file, where ``path`` looks like the name of one."""
    looks = isinstance(path, Path) or (isinstance(path, str) and (os.sep in path or Path(path).suffix))
    return "there is no such file" if looks else ""


def loaded(argument: str, text: str, expected: str) -> Any:
    """Read JSON that was written for ``argument``, "plan" or "model".

    Raises
    ------
    InputError
        It is no text, no JSON, or was written for something else: the message says for what.
    """
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError.of(argument, expected=expected, got=str(error)) from None
    have = set(found) if isinstance(found, dict) else set()
    for other, (names, what) in KINDS.items():
        if other != argument and names <= have:
            hint = f"it is what {other}= and --{other} take" if other else ""
            raise InputError.of(argument, expected=expected, got=what, hint=hint)
    return found


def check_plan(plan: Plan) -> Plan:
    """Give ``plan``, if all that it names is there; whether its rounds merge all states is not looked at.

    Raises
    ------
    ValueError
        A rank, record, piece or word that there is not.
    """
    _words("operation", [plan.operation], ("allreduce", "reduce", "bcast"))
    _words("level", [each.level for each in plan.rounds], get_args(Level))
    _words("action", [each.action for each in plan.rounds], get_args(Action))
    flags = [plan.deterministic, *(each.shared for each in plan.rounds)]
    if not all(isinstance(each, bool) for each in flags):
        raise ValueError("deterministic and shared are true or false")
    _numbers("root", [] if plan.root is None else [plan.root], plan.size)
    _numbers("pieces", [plan.pieces], plan.size + 1, least=1)
    for each in plan.rounds:
        _check_round(each, plan.size, plan.pieces)
    return plan


def _check_round(each: Round, ranks: int, pieces: int) -> None:
    messages, merges = each.messages, each.merges
    _numbers("rank", [rank for message in messages for rank in (message.source, message.dest)], ranks)
    _numbers("rank", [merge.rank for merge in merges], ranks)
    _numbers("slots", [message.slots for message in messages], ranks + 1)
    _numbers("record", [message.at for message in messages], ranks + 1)
    _numbers("record", [source for merge in merges for source in merge.sources], ranks + 1)
    _numbers("piece", [*(message.piece for message in messages), *(merge.piece for merge in merges)], pieces)


def _numbers(name: str, found: Iterable[Any], end: int, least: int = 0) -> None:
    for each in found:
        if not isinstance(each, int) or isinstance(each, bool) or not least <= each < end:
            raise ValueError(f"{name} {each!r}, which is no number from {least} to {end - 1}")


def _words(name: str, found: Iterable[Any], known: Iterable[str]) -> None:
    for each in found:
        if not isinstance(each, str) or each not in known:
            raise ValueError(f"{name} {each!r}, which is none of {', '.join(known)}")
