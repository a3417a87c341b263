"""Choosing a plan: the cheapest by a cost model, among those worth a look. Pure: a function of layout and payload.

The levels of a plan follow one another, so each is looked at by itself: what a host does, on one host of the largest
size, and what hosts do, with one rank on each. `estimate` adds them up; where all hosts are alike, that is what
`treeattn.costs.pricing.cost` says of the whole plan, without making it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Literal, TypeAlias

from treeattn.costs.catalog import Link
from treeattn.costs.model import DEFAULT_MODEL, Cost, CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices
from treeattn.planning.topology import group_ranks, rack_of

__all__ = ["candidates", "choose_radices", "estimate"]

Leaders: TypeAlias = 'int | Literal["all"]'

LARGEST_RADIX = 64
"""Where a link sets no limit: on every network of the catalog, more messages at once cost more than another round."""

ALIKE = 1.1
"""Plans whose costs differ by less than this factor are told apart by jitter; and then the simpler one is taken."""


def choose_radices(
    hosts: Sequence[str], payload_bytes: int, *, shared: bool = False, model: CostModel = DEFAULT_MODEL
) -> Radices:
    """Give the radices of the cheapest plan.

    Parameters
    ----------
    hosts : sequence of str
        One label per rank.
    payload_bytes : int
    shared : bool
        Whether the ranks of each host share memory in which such a payload has room; it is used then.
    model : CostModel
        By default that of `treeattn.costs.model` for machines of which nothing is known.

    Examples
    --------
    >>> str(choose_radices(["a", "a"], 16640)), str(choose_radices(["a", "a", "b", "b"], 16640))
    ('flat,all', 'all,all')
    """
    return _choose(tuple(hosts), payload_bytes, shared, model)


@lru_cache(maxsize=256)
def _choose(hosts: tuple[str, ...], payload_bytes: int, shared: bool, model: CostModel) -> Radices:
    costs = {
        radices: estimate(hosts, radices, payload_bytes, model)
        for radices in candidates(hosts, shared=shared, model=model)
    }
    least = min(each.total for each in costs.values())
    alike = [radices for radices, each in costs.items() if each.total <= ALIKE * least]
    return min(alike, key=lambda radices: costs[radices].jitter)  # the first of equals: simpler ones come first


def candidates(hosts: Sequence[str], *, shared: bool = False, model: CostModel = DEFAULT_MODEL) -> list[Radices]:
    """Give the radices worth a look: on each level those that are smallest for their number of rounds.

    Inside a host only the fewest rounds are: with up to `largest_radix` ranks there that is one, which merges in the
    order of shared memory, so that bits do not depend on whether there is any. Parameters are those of
    `choose_radices`.
    """
    largest, names = _shape(hosts)
    within = Radices("shared") if shared else Radices(next(_balanced(largest, model.inside.largest_radix)))
    if len(names) == 1:
        return [within] if shared else _on_one_host(within, largest, model.inside.largest_radix)
    leaders: list[Leaders] = [1, "all"] if largest > 1 else [1]
    return [
        replace(across, inside=within.inside, leaders=each) for each, across in product(leaders, _between(names, model))
    ]


def _on_one_host(up_and_down: Radices, ranks: int, limit: int | None) -> list[Radices]:
    swaps = [Radices(between=radix, flat=True) for radix in _balanced(ranks, limit)]
    return [*swaps, up_and_down, replace(up_and_down, leaders="all")]


def _between(names: Sequence[str], model: CostModel) -> list[Radices]:
    """Give the ways from host to host, by racks too where there are several and they hold several hosts."""
    ways = _across(len(names), model.between)
    racks = group_ranks(map(rack_of, names))
    if 1 < len(racks) < len(names):
        link = model.rack or model.between
        rack = _balanced(max(map(len, racks)), link.largest_radix)
        ways += [replace(way, rack=radix) for way, radix in product(_across(len(racks), model.between), rack)]
    return ways


def _across(count: int, link: Link) -> list[Radices]:
    schemes: tuple[Literal["exchange", "reduce"], ...] = ("exchange", "reduce")
    return [Radices(None, radix, scheme=scheme) for scheme in schemes for radix in _balanced(count, link.largest_radix)]


def _balanced(count: int, limit: int | None) -> Iterator[int | None]:
    """Give, for each number of rounds, the smallest radix that needs no more; None where one round will do."""
    limit = min(limit or LARGEST_RADIX, LARGEST_RADIX)
    if count <= limit:
        yield None
    rounds, last = 2, count
    while last > 2:
        radix = next(radix for radix in range(2, count + 1) if radix**rounds >= count)
        if radix <= limit and radix < last:
            yield radix
        rounds, last = rounds + 1, radix


def estimate(hosts: Sequence[str], radices: Radices, payload_bytes: int, model: CostModel = DEFAULT_MODEL) -> Cost:
    """Add up the terms of the levels of an allreduce, in microseconds."""
    largest, names = _shape(hosts)
    if radices.flat or len(names) == 1:
        return cost(plan_allreduce(hosts, radices), payload_bytes, model).terms
    pieces = largest if radices.leaders == "all" else min(radices.leaders, largest)
    within, across = Radices(radices.inside, leaders=pieces), replace(radices, inside=None, leaders=1)
    between = _between_cost(names, across, -(-payload_bytes // pieces), _crowded(model, pieces))
    return _inside_cost(largest, within, payload_bytes, model) + between + model.call_cost(pieces)


@lru_cache(maxsize=1024)
def _inside_cost(ranks: int, radices: Radices, payload_bytes: int, model: CostModel) -> Cost:
    """Look at a host beside another, so that there is an up and a down, without what is between them."""
    plan = plan_allreduce(("0",) * ranks + ("1",), radices)
    inside = replace(plan, rounds=tuple(each for each in plan.rounds if each.level == "inside"))
    return sum(cost(inside, payload_bytes, model).rounds, Cost())


@lru_cache(maxsize=1024)
def _between_cost(names: tuple[str, ...], radices: Radices, payload_bytes: int, model: CostModel) -> Cost:
    return sum(cost(plan_allreduce(names, radices), payload_bytes, model).rounds, Cost())


def _crowded(model: CostModel, leaders: int) -> CostModel:
    """Give the model of one of several leaders of a host, who share its lanes, and the trunk with all others."""
    return replace(model, between=_shared(model.between, leaders), rack=model.rack and _shared(model.rack, leaders))


def _shared(link: Link, leaders: int) -> Link:
    lanes = min(link.lanes or leaders, leaders)
    share, trunk = lanes / leaders, link.trunk and link.trunk / lanes
    return replace(link, gb_per_s=link.gb_per_s * share, gap_us=link.gap_us / share, trunk=trunk)


def _shape(hosts: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Give the ranks of the largest host, and each host's label."""
    return max(map(len, group_ranks(hosts))), tuple(dict.fromkeys(hosts))
