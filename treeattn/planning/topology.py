"""Who is where: which ranks share a host, which hosts a rack, and which ranks are near their host's network card."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from treeattn.arguments.checks import is_whole
from treeattn.errors import InputError

__all__ = [
    "HOSTS_VARIABLE",
    "check_hosts",
    "group_ranks",
    "host_labels",
    "hosts_of_environment",
    "near_card",
    "rack_of",
]

HOSTS_VARIABLE = "TREEATTN_HOSTS"


def group_ranks(hosts: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Give the ranks of each host, ascending; hosts come in the order of their lowest ranks.

    Examples
    --------
    >>> group_ranks(["a", "b", "a", "b", "c"])
    ((0, 2), (1, 3), (4,))
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return tuple(map(tuple, groups.values()))


def rack_of(host: str) -> str:
    """Give the rack of a host: what is before the last slash of its label, nothing where there is none.

    Examples
    --------
    >>> rack_of("rack0/a"), rack_of("a")
    ('rack0', '')
    """
    return host.rpartition("/")[0]


def host_labels(names: Sequence[str], shared: Sequence[int]) -> tuple[tuple[str, ...], bool]:
    """Cross host names with the shared-memory split.

    Parameters
    ----------
    names : sequence of str
        Host name of each rank.
    shared : sequence of int
        A number per rank, equal where the MPI library says that ranks share memory.

    Returns
    -------
    labels : tuple of str
        One per rank; ranks share a label only where name and split both agree. It is the host name, with
        ``#2``, ``#3``, ... behind it where one name stands for several hosts.
    agreed : bool
        Whether names and split drew the same line.

    Examples
    --------
    >>> host_labels(["n1", "n1", "n2"], [0, 0, 2])
    (('n1', 'n1', 'n2'), True)
    >>> host_labels(["n1", "n1", "n1"], [0, 0, 2])
    (('n1', 'n1', 'n1#2'), False)
    """
    groups_of_name: dict[str, list[int]] = {}
    labels = []
    for name, group in zip(names, shared, strict=True):
        groups = groups_of_name.setdefault(name, [])
        if group not in groups:
            groups.append(group)
        number = groups.index(group) + 1
        labels.append(name if number == 1 else f"{name}#{number}")
    agreed = group_ranks(names) == group_ranks(map(str, shared))
    return tuple(labels), agreed


def hosts_of_environment(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Read one host label per rank from ``TREEATTN_HOSTS``, a comma-separated list; None where it is not set."""
    text = environ.get(HOSTS_VARIABLE, "").strip()
    return tuple(label.strip() for label in text.split(",")) if text else None


def check_hosts(hosts: Any, size: int, argument: str = "hosts") -> tuple[str, ...]:
    """Take ``hosts`` as one label per rank.

    Raises
    ------
    InputError
        It is not a sequence of ``size`` labels.
    """
    try:
        given = None if isinstance(hosts, (str, bytes, Set, Mapping)) else tuple(hosts)
    except TypeError:  # an array without axes can't be gone through, though it looks so
        given = None
    expected = f"{size} label{'s'[: size != 1]}, one per rank"
    if given is None or not all(isinstance(label, str) or is_whole(label) for label in given):
        raise InputError.of(argument, expected=expected, got=repr(hosts))
    labels = tuple(map(str, given))
    if len(labels) != size:
        hint = f"mpirun -n {len(labels)}, or --ranks {len(labels)}, starts as many" if 1 == size < len(labels) else ""
        raise InputError.of(argument, expected=expected, got=f"{len(labels)} ({', '.join(labels)})", hint=hint)
    if not all(labels):
        raise InputError.of(argument, expected="no empty label", got=repr(labels))
    return labels


def near_card(system: Path = Path("/sys"), cores: Iterable[int] | None = None) -> bool:
    """Tell whether this process runs on the NUMA node of a network card, as far as Linux says so.

    Where there are cards for InfiniBand or RoCE, only they count; else those for Ethernet that are not down.

    Parameters
    ----------
    system : Path
        Where Linux describes the machine.
    cores : iterable of int, optional
        Those that the process may use; by default all that it really may.
    """
    cards = {_text(path) for path in _cards(system)} - {"", "-1"}
    mine = set(os.sched_getaffinity(0) if cores is None else cores)
    near = (_cores_in(_text(system / f"devices/system/node/node{card}/cpulist")) for card in cards)
    return any(not mine.isdisjoint(each) for each in near)


def _cards(system: Path) -> Iterable[Path]:
    cards = list((system / "class" / "infiniband").glob("*/device/numa_node"))
    nets = (system / "class" / "net").glob("*/device/numa_node")  # what is virtual has no device
    return cards or [each for each in nets if _text(each.parents[1] / "operstate") != "down"]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _cores_in(text: str) -> set[int]:
    """Read cores as Linux lists them, such as "0-3,8"."""
    ends = [part.split("-") for part in text.split(",") if part]
    return {core for each in ends for core in range(int(each[0]), int(each[-1]) + 1)}
