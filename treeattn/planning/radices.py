"""What shapes a plan: a radix per level, the scheme between hosts, the leaders of a host; and how that is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeAlias

from treeattn.errors import InputError

__all__ = ["NAMED_RADICES", "Radices", "read_radices"]

Radix: TypeAlias = "int | None"

_REDUCE, _LEADERS = "reduce", "leaders="

LARGEST = 10**9
"""No job has as many ranks; Python writes and reads numbers of some thousand digits only when it is asked to."""

LONGEST = 60
"""Characters of what was given that an error shows."""

_COUNT, _RADIX = "a number of at least 1 and below 1e9", "a number of at least 2 and below 1e9"


@dataclass(frozen=True, slots=True)
class Radices:
    """How many states meet in one round, per level; None means all of them.

    Its text, which `read_radices` reads, is ``INSIDE,BETWEEN`` or ``INSIDE,RACK,BETWEEN``: each a number or ``all``,
    the first also ``shared`` or ``flat``, the last with ``reduce`` before it for that scheme; and ``,leaders=N``.

    Parameters
    ----------
    inside : int, None or "shared"
        Between the ranks of a host; "shared" is through memory that they share, all in one round.
    between : int or None
        Between hosts, or racks.
    flat : bool
        Ignore the hosts: every rank exchanges with every other, by the radix ``between``.
    rack : int, None or "skip"
        Between the hosts of a rack, whose states are merged there first; "skip" has no such level.
    scheme : "exchange" or "reduce"
        Between hosts: all swap unmerged states, so that the bits of a result do not depend on the radix; or states are
        merged up a tree, and the result goes down it: more rounds, fewer bytes.
    leaders : int or "all"
        Ranks of a host that each carry a piece of the head rows between hosts; of small hosts all, in turns.

    Examples
    --------
    >>> str(Radices(2, 3, scheme="reduce", leaders=4))
    '2,reduce3,leaders=4'
    """

    inside: int | Literal["shared"] | None = None
    between: int | None = None
    flat: bool = False
    rack: int | Literal["skip"] | None = "skip"
    scheme: Literal["exchange", "reduce"] = "exchange"
    leaders: int | Literal["all"] = 1

    def __post_init__(self) -> None:
        inside = None if self.inside == "shared" else self.inside
        rack = None if self.rack == "skip" else self.rack
        for name, radix in (("inside", inside), ("between", self.between), ("rack", rack)):
            if radix is not None and not _is_count(radix, 2):
                raise InputError.of(name, expected=f"{_RADIX}, or None for all", got=_brief(radix))
        if self.leaders != "all" and not _is_count(self.leaders, 1):
            raise InputError.of("leaders", expected=f'{_COUNT}, or "all"', got=_brief(self.leaders))
        if self.scheme not in ("exchange", "reduce"):
            raise InputError.of("scheme", expected='"exchange" or "reduce"', got=repr(self.scheme))

    def __str__(self) -> str:
        between = _text(self.between)
        if self.scheme == "reduce":
            between = _REDUCE + (between if self.between else "")
        rack = [] if self.rack == "skip" else [_text(self.rack)]
        leaders = [] if self.leaders == 1 else [f"{_LEADERS}{self.leaders}"]
        return ",".join(["flat" if self.flat else _text(self.inside), *rack, between, *leaders])


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < LARGEST


def _brief(value: Any) -> str:
    """Write what was given; of numbers that Python refuses to write, that they are large."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def _text(radix: Any) -> str:
    return "all" if radix is None else str(radix)


NAMED_RADICES: Mapping[str, Radices] = {
    "shared": Radices(inside="shared"),
    "flat": Radices(flat=True),
    "oneshot": Radices(inside=None, between=None),
    "binary": Radices(inside=2, between=2),
    "reduce": Radices(inside=2, between=2, scheme="reduce"),
    "split": Radices(leaders="all"),
}
"""Shapes that have a name."""


def read_radices(value: Any) -> Radices | None:
    """Read a name, the text of radices, or a sequence of its parts; None where it is none of them.

    Raises
    ------
    InputError
        A part is wrong.

    Examples
    --------
    >>> read_radices("2,all") == read_radices((2, None)) == Radices(2)
    True
    """
    if isinstance(value, str):
        if value in NAMED_RADICES:
            return NAMED_RADICES[value]
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, Sequence):
        return None
    *parts, last = value or [None]
    leaders = str(last).startswith(_LEADERS)
    parts = parts if leaders else list(value)
    if len(parts) not in (2, 3):
        return None
    return _of_parts(parts, _leaders(last[len(_LEADERS) :]) if leaders else 1)


def _of_parts(parts: Sequence[Any], leaders: int | Literal["all"]) -> Radices:
    inside, *rack, between = parts
    scheme: Literal["exchange", "reduce"] = "exchange"
    if isinstance(between, str) and between.startswith(_REDUCE):
        scheme, between = "reduce", between[len(_REDUCE) :] or None
    return Radices(
        inside="shared" if inside == "shared" else None if inside == "flat" else _radix(inside),
        between=_radix(between),
        flat=inside == "flat",
        rack=_radix(rack[0]) if rack else "skip",
        scheme=scheme,
        leaders=leaders,
    )


def _radix(value: Any) -> int | None:
    if value is None or value == "all":
        return None
    number = _number(value)
    if not _is_count(number, 2):
        raise InputError.of("plan", expected=f'each radix {_RADIX}, or "all"', got=_brief(value))
    return number


def _leaders(value: Any) -> int | Literal["all"]:
    number = _number(value)
    if value == "all":
        return "all"
    if number is None or not _is_count(number, 1):
        raise InputError.of("plan", expected=f'leaders= {_COUNT}, or "all"', got=_brief(value))
    return number


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal() and len(value.strip()) < len(str(LARGEST)):
        value = int(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
