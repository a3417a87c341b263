"""Plain arguments, checked alike wherever they are taken: flags, whole numbers, ranks."""

from __future__ import annotations

import numbers
from typing import Any, NoReturn

import numpy as np

from treeattn.errors import InputError

__all__ = [
    "LARGEST",
    "check_flag",
    "check_rank",
    "check_root",
    "check_size",
    "check_whole",
    "is_number",
    "is_whole",
    "refuse_copies",
]

LARGEST = 2**63 - 1
"""Of sizes and numbers of bytes: offsets are 64-bit."""


def check_flag(name: str, value: Any) -> bool:
    """Give ``value`` as a bool if it is one; an InputError otherwise."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InputError.of(name, expected="True or False", got=repr(value))


def is_number(value: Any) -> bool:
    """Whether ``value`` is one of Python's or NumPy's real numbers; True and False are none, nor is an array of one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether ``value`` is one of Python's or NumPy's integers; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Give ``value`` as an int if it is a whole number from ``least`` to ``most``; an InputError otherwise."""
    if is_whole(value) and least <= value and (most is None or value <= most):
        return int(value)
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise InputError.of(name, expected=expected, got=repr(value))


def check_size(name: str, value: Any, least: int) -> int:
    """Give ``value`` as a number of bytes, or of what takes bytes; an InputError otherwise."""
    if is_whole(value) and value > LARGEST:
        raise InputError.of(name, expected="an integer below 2**63", got=value)
    return check_whole(name, value, least)


def check_rank(name: str, value: Any, size: int) -> int:
    """Give ``value`` as a rank if it is one of ``size``; an InputError otherwise."""
    return _rank(name, value, size, "")


def check_root(value: Any, size: int) -> int | None:
    """Give the rank that alone wants a result; None where all ranks do."""
    return None if value is None else _rank("root", value, size, "None or ")


def _rank(name: str, value: Any, size: int, also: str) -> int:
    if is_whole(value) and 0 <= value < size:
        return int(value)
    raise InputError.of(name, expected=f"{also}a rank from 0 to {size - 1}", got=repr(value))


def refuse_copies(owned: object) -> NoReturn:
    """Raise a TypeError where what ranks have together is copied or pickled."""
    raise TypeError(
        f"a {type(owned).__name__} belongs to the ranks that made it together, and can't be copied or pickled: make "
        "another, on all of them"
    )
