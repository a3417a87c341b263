"""What is timed to measure a cost model: one kind of round each, as a plan by itself; pure, sends nothing.

A *probe* is a round in which the ranks of a group swap messages of one size with so many partners at once: two by two,
messages of every size that a plan may send; with as many as may meet, headers and single states; and so again by all
ranks of a host. In shared memory it is a round up and one down. The last probes are whole steps, from packing a state
to unpacking the result: through one leader of each host, by plans of few rounds and of many, and through all leaders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from treeattn.costs.choosing import candidates
from treeattn.costs.pricing import cost
from treeattn.planning.plan import Merge, Message, Plan, Round
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices
from treeattn.planning.topology import group_ranks, rack_of

__all__ = ["MOST_PARTNERS", "Probe", "probes_for"]

Groups: TypeAlias = "Sequence[tuple[int, ...]]"

MOST_PARTNERS = 15
"""Most partners of a probe."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Rounds that are timed together.

    Parameters
    ----------
    way : str
        "inside", "window", "rack" or "between"; "around" is headers to leaders and back, by messages inside hosts, and
        "step" a whole step.
    partners : int
        Messages that each rank sends and receives; in a window, around, and in a step, ranks of the largest host.
    slots : int
        States of each message.
    leaders : int
        Ranks of a host that do so at once.
    plan : Plan
    """

    way: str
    partners: int
    slots: int
    leaders: int
    plan: Plan

    @property
    def is_around(self) -> bool:
        """Whether it is what comes around others: headers to leaders and back."""
        return self.slots == 0 and self.way in ("window", "around")

    @property
    def around(self) -> float:
        """How many of two rounds of headers, to leaders and back, lie on its longest chain of messages; as a share."""
        rounds = zip(self.plan.rounds, cost(self.plan, 1).rounds, strict=True)
        met = sum(each.level == "inside" and terms.total > 0 for each, terms in rounds)
        return met / 2 if self.way in ("rack", "between") else 0.0

    def after(self, rounds: int) -> Plan:
        """Give its plan behind so many empty rounds: the numbers of rounds are the tags of messages."""
        return replace(self.plan, rounds=((Round("between", "exchange", ()),) * rounds + self.plan.rounds))


def probes_for(hosts: tuple[str, ...], shared: bool) -> Iterator[Probe]:
    """Give the probes of a layout; ``shared`` says whether the ranks of hosts share memory for states."""
    layout = _Layout(hosts, shared)
    yield from layout.swaps("inside", layout.groups)
    around = layout.up_and_down(0)
    if shared:
        yield from (around, layout.up_and_down(1))
    elif layout.several_hosts and len(layout.groups) < len(hosts):
        yield around
    if layout.several_hosts:
        yield from _around(layout.between(), around)
        yield from layout.steps()


def _around(probes: Iterable[Probe], around: Probe) -> Iterator[Probe]:
    """Put rounds to leaders and back around others: ranks that are no leaders then wait as they do in plans.

    Where ranks outnumber cores, it matters how those wait that have nothing to do.
    """
    up, down = around.plan.rounds
    for probe in probes:
        rounds = (up, *probe.plan.rounds, down) if up.messages else probe.plan.rounds
        yield replace(probe, plan=replace(probe.plan, rounds=rounds))


@dataclass(frozen=True)
class _Layout:
    hosts: tuple[str, ...]
    shared: bool

    @property
    def groups(self) -> Groups:
        """The ranks of each host."""
        return group_ranks(self.hosts)

    @property
    def several_hosts(self) -> bool:
        """Whether there is anything between hosts."""
        return len(self.groups) > 1

    def between(self) -> Iterator[Probe]:
        """Swap between leaders of hosts, in racks and then of racks where there are any; last, by all ranks at once."""
        leaders = tuple(group[0] for group in self.groups)
        racks = [tuple(leaders[at] for at in rack) for rack in group_ranks(rack_of(self.hosts[at]) for at in leaders)]
        top = leaders
        if 1 < len(racks) < len(leaders):
            yield from self.swaps("rack", racks)
            top = tuple(rack[0] for rack in racks)
        yield from self.swaps("between", [top])
        each = min(map(len, self.groups))
        if each > 1:
            crowd = [tuple(group[index] for group in self.groups if group[0] in top) for index in range(each)]
            yield self.swap("between", crowd, _many(len(top)), 1, each)

    def steps(self) -> Iterator[Probe]:
        """Merge states through one leader of each host, in few rounds and in many, and through all leaders."""
        largest = max(map(len, self.groups))
        ways = [
            each for each in candidates(self.hosts, shared=self.shared) if each.leaders == 1 and each.rack == "skip"
        ]
        swaps, trees = ([each for each in ways if each.scheme == scheme] for scheme in ("exchange", "reduce"))
        racks = len({rack_of(host) for host in self.hosts})
        alike = len(self.groups) > 2 and racks in (1, len(self.groups))  # one kind of link between hosts
        many = [*swaps[1:2], trees[0], trees[-1]] if alike else []
        for radices in dict.fromkeys([swaps[0], *many]):
            yield Probe("step", largest, 1, 1, plan_allreduce(self.hosts, radices))
        if largest > 1:
            for radices in (swaps[0], trees[0]):
                plan = plan_allreduce(self.hosts, replace(radices, leaders=largest))
                yield Probe("step", largest, 1, largest, plan)

    def swaps(self, way: str, groups: Groups) -> Iterator[Probe]:
        """Swap messages of each size with one partner, and of two sizes with many, where there are that many."""
        largest = max(map(len, groups))
        many = _many(largest)
        yield from (self.swap(way, groups, 1, slots, 1) for slots in _sizes(largest) if largest > 1)
        yield from (self.swap(way, groups, many, slots, 1) for slots in (0, 1) if many > 1)

    def swap(self, way: str, groups: Groups, partners: int, slots: int, leaders: int) -> Probe:
        """Let each rank of a group swap messages with partners."""
        room = max(slots, 1)
        messages = tuple(
            Message(group[source], group[dest], slots, number * room)
            for group in groups
            for number, source, dest in _pairs(len(group), partners)
        )
        return self._probe(way, partners, slots, leaders, Round("between", "exchange", messages))

    def up_and_down(self, slots: int) -> Probe:
        """Bring states, or headers, to the first rank of each host, and one back."""
        groups, shared = self.groups, self.shared
        up = tuple(Message(rank, group[0], slots, at) for group in groups for at, rank in enumerate(group[1:], 1))
        down = tuple(Message(group[0], rank, slots) for group in groups for rank in group[1:])
        merges = tuple(Merge(group[0], tuple(range(len(group)))) for group in groups if slots and len(group) > 1)
        rounds = Round("inside", "reduce", up, merges, shared), Round("inside", "broadcast", down, (), shared)
        return self._probe("window" if shared else "around", max(map(len, groups)), slots, 1, *rounds)

    def _probe(self, way: str, partners: int, slots: int, leaders: int, *rounds: Round) -> Probe:
        return Probe(way, partners, slots, leaders, Plan("allreduce", None, self.hosts, Radices(), False, rounds))


def _sizes(count: int) -> list[int]:
    """Give how many states messages carry in plans among so many that are worth a look; none, in headers, too."""
    names = tuple(map(str, range(count)))
    rounds = chain(*(plan_allreduce(names, radices).rounds for radices in candidates(names)))
    return sorted({0, *(message.slots for each in rounds for message in each.messages)})


def _many(count: int) -> int:
    """Give how many partners a rank among ``count`` has in probes with many, or with the only one."""
    return min(count - 1, MOST_PARTNERS)


def _pairs(count: int, partners: int) -> Iterator[tuple[int, int, int]]:
    """Give (number, source, dest): neighbours two by two, who wait for each other, or each with those after it.

    In a ring with one partner, ranks would not wait for whom they send to, and drift apart.
    """
    if partners == 1:
        yield from ((1, rank ^ 1, rank) for rank in range(count - count % 2))
    else:
        yield from (
            (number, (rank + number) % count, rank)
            for rank in range(count)
            for number in range(1, min(partners, count - 1) + 1)
        )
