"""What is timed to measure a cost model: whole steps, by plans that are worth a look; pure, sends nothing.

A step is timed as calls take it, from packing a state to unpacking the result: through one leader of each host by all
exchanges, whose messages are of all sizes, and by the trees of fewest rounds and of most; through all leaders by the
plans of fewest rounds. These also tell, at another size, what bytes cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from treeattn.costs.choosing import candidates
from treeattn.planning.plan import Plan
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices

__all__ = ["Probe", "probes_for"]

OTHER_SIZE = 8
"""By so much the states of other size are smaller; or larger, where they have as few rows."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A step that is timed: its plan, and the head rows of each state."""

    plan: Plan
    rows: int


def probes_for(hosts: tuple[str, ...], rows: int, shared: bool) -> list[Probe]:
    """Give the probes of a layout.

    Parameters
    ----------
    hosts : tuple of str
        One label per rank.
    rows : int
        Head rows of the states that are to be merged.
    shared : bool
        Whether ranks of a host share memory for such states.
    """
    ways = candidates(hosts, shared=shared)
    if shared and len(set(hosts)) == 1:
        ways += candidates(hosts)  # there is but one plan in shared memory
    single, several = (_kinds(each for each in ways if (each.leaders == 1) is one) for one in (True, False))
    fewest = [each[0] for each in single]
    ends = [each if each[0].scheme == "exchange" else (each[0], each[-1]) for each in single]
    whole = [*dict.fromkeys(chain(*ends)), *(each[0] for each in several)]
    other = rows // OTHER_SIZE or rows * OTHER_SIZE
    sizes = [*((each, rows) for each in whole), *((each, other) for each in fewest)]
    return [Probe(plan_allreduce(hosts, each), size) for each, size in sizes]


def _kinds(ways: Iterable[Radices]) -> list[list[Radices]]:
    """Give those of each kind, which differ by the number of rounds; fewer come first."""
    kinds: dict[object, list[Radices]] = {}
    for each in ways:
        kinds.setdefault((each.scheme, each.flat, each.inside, each.rack == "skip"), []).append(each)
    return list(kinds.values())
