"""What a plan will take, before anybody follows it: its longest chain of messages and merges. Pure; sends nothing.

A rank begins a round when it is through with the last one that it had part in, and is through with it when all that it
receives there has come: each message as long after its sender has begun as the busier of its two ends needs. An end of
a link needs, once, the link's latency; for each message that its rank sends or receives an injection gap; for each byte
the link's rate, both ways side by side; for a message over a protocol's limit a handshake. Ranks of a host that share
its lanes need as long as all their messages do there, where that is longer, and so do ranks that share a trunk between
hosts. A rank that receives nothing, or begins when all has come, is busy for as long, but for the latency. Then it
merges. In shared memory a rank publishes once, so that only what it reads counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, TypeAlias

from treeattn.costs.model import DEFAULT_MODEL, Cost, CostModel
from treeattn.planning.plan import Message, Plan, Round
from treeattn.planning.topology import rack_of

__all__ = ["PlanCost", "cost"]

End: TypeAlias = "tuple[int, str]"
"""A rank, and the name of a link."""

Ends: TypeAlias = "dict[End, _Load]"

Crowd: TypeAlias = "tuple[str, str]"
"""A host, or nothing for all together, and the name of a link."""

Sharing: TypeAlias = "Callable[[End], tuple[Crowd, float | None]]"
"""With whom an end has to share, and how many of them can move at once; None is all."""

Priced: TypeAlias = "tuple[float, Cost]"
"""Microseconds in all, and their terms."""

FREE: Priced = 0.0, Cost()


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What each round adds to the longest chain, nothing where it lies beside others; and a call besides."""

    rounds: tuple[Cost, ...]
    call: Cost

    @property
    def terms(self) -> Cost:
        """All terms together."""
        return sum(self.rounds, self.call)

    @property
    def total_us(self) -> float:
        """Microseconds in all."""
        return self.terms.total


class _Step(NamedTuple):
    """One rank's part in one round: what moved, whether the rank waited for that, and what it merged."""

    number: int
    moved: Cost
    waited: bool
    merge_us: float

    def terms(self, round_us: float) -> Cost:
        moved = self.moved if self.waited else replace(self.moved, latency=0.0, jitter=0.0)
        return replace(moved, merge=self.merge_us, launch=round_us)


class _Chain(NamedTuple):
    """When a rank was through, and what had to happen before, one after another."""

    us: float = 0.0
    steps: tuple[_Step, ...] = ()


@dataclass(slots=True)
class _Load:
    """What goes one way through one end of a link in one round."""

    messages: float = 0
    nbytes: float = 0.0
    largest: int = 0

    def add(self, size: int) -> None:
        self.messages += 1
        self.nbytes += size
        if size > self.largest:
            self.largest = size

    def add_share(self, load: _Load, lanes: float) -> None:
        self.messages += load.messages / lanes
        self.nbytes += load.nbytes / lanes
        self.largest = max(self.largest, load.largest)


def cost(plan: Plan, payload_bytes: int, model: CostModel = DEFAULT_MODEL) -> PlanCost:
    """Say what a plan takes, each round of it and a call, when every state has ``payload_bytes`` bytes.

    Parameters
    ----------
    plan : Plan
    payload_bytes : int
    model : CostModel

    Examples
    --------
    >>> from treeattn.costs.model import PRESETS
    >>> from treeattn.planning.planner import plan_allreduce
    >>> from treeattn.costs.pricing import cost
    >>> from treeattn.planning.radices import NAMED_RADICES
    >>> two_hosts = plan_allreduce(["a", "a", "b", "b"])
    >>> terms = cost(two_hosts, 16640, PRESETS["nvlink-infiniband"]).terms
    >>> terms.latency, terms.injection, terms.launch
    (22.0, 4.0, 21.0)

    A tree of pairs over three hosts goes up in two rounds, but what comes in the second is under way during the first.

    >>> pairs = plan_allreduce(["a", "b", "c"], NAMED_RADICES["reduce"])
    >>> [each.latency for each in cost(pairs, 16640, PRESETS["nvlink-infiniband"]).rounds]
    [14, 0.0, 0.0, 14]
    """
    pricing, chains = _Pricing(plan, plan.piece_bytes(payload_bytes), model), [_Chain()] * plan.size
    for number, each in enumerate(plan.rounds):
        for rank, through in pricing.round(number, each, chains).items():
            chains[rank] = through
    longest = max(chains, key=lambda each: each.us)
    terms = {step.number: step.terms(model.round_us) for step in longest.steps}
    rounds = tuple(terms.get(number, Cost()) for number in range(len(plan.rounds)))
    return PlanCost(rounds, model.call_cost(plan.pieces) if rounds else Cost())


class _Pricing:
    """Prices one plan's rounds at one payload."""

    def __init__(self, plan: Plan, pieces: tuple[int, ...], model: CostModel) -> None:
        self._plan, self._pieces, self._model = plan, pieces, model
        self._hosts, self._racks = plan.hosts, [rack_of(host) for host in plan.hosts]
        self._known: dict[tuple[str, float, float, int], Priced] = {}

    def round(self, number: int, each: Round, chains: Sequence[_Chain]) -> dict[int, _Chain]:
        """Give the chains of all ranks that have part in a round, from those before it."""
        merged: dict[int, int] = defaultdict(int)
        for merge in each.merges:
            merged[merge.rank] += len(merge.sources) * self._pieces[merge.piece]
        found = {}
        for rank, (us, before, moved) in self._latest(each, chains).items():
            merge_us = self._model.merge_us(merged.get(rank, 0))
            step = _Step(number, moved, rank != before, merge_us)
            found[rank] = _Chain(us + merge_us + self._model.round_us, (*chains[before].steps, step))
        return found

    def _latest(self, each: Round, chains: Sequence[_Chain]) -> dict[int, tuple[float, int, Cost]]:
        """Give, for each rank, when all has come, whose message was the last, or its own number, and the terms."""
        ways = [self._way(message, each.shared) for message in each.messages]
        sent, received = self._loads(each, ways)
        out, into = self._priced(sent, received), self._priced(received, sent)
        latest = {merge.rank: (chains[merge.rank].us, merge.rank, Cost()) for merge in each.merges}
        for (rank, _), (us, terms) in chain(out.items(), into.items()):
            busy = chains[rank].us + us - terms.latency
            if rank not in latest or busy > latest[rank][0]:
                latest[rank] = busy, rank, terms
        for message, way in zip(each.messages, ways, strict=True):
            source, dest = message.source, message.dest
            there, here = out.get((source, way), FREE), into[dest, way]
            us, terms = here if here[0] >= there[0] else there
            if chains[source].us + us >= latest[dest][0]:
                latest[dest] = chains[source].us + us, source, terms
        return latest

    def _loads(self, each: Round, ways: Sequence[str]) -> tuple[Ends, Ends]:
        """Add up what goes out through each end of a link, and what comes in."""
        out: Ends = defaultdict(_Load)
        into: Ends = defaultdict(_Load)
        sizes: dict[tuple[int, int], int] = {}
        for message, way in zip(each.messages, ways, strict=True):
            kind = message.slots, message.piece
            if kind not in sizes:
                sizes[kind] = self._plan.message_bytes(message.slots, self._pieces[message.piece])
            into[message.dest, way].add(sizes[kind])
            if not each.shared:
                out[message.source, way].add(sizes[kind])
        return out, into

    def _way(self, message: Message, shared: bool) -> str:
        source, dest = message.source, message.dest
        if shared:
            return "window"
        if self._hosts[source] == self._hosts[dest]:
            return "inside"
        return "rack" if self._racks[source] == self._racks[dest] else "between"

    def _priced(self, loads: Ends, back: Ends) -> dict[End, Priced]:
        """Price each end of a link, or all with which it has to share that, where they take longer."""
        found = {end: self._moving(end[1], load, back.get(end)) for end, load in loads.items()}
        for sharing in (self._on_host, self._in_trunk):
            crowds, against = _crowds(loads, sharing), _crowds(back, sharing)
            prices = {crowd: self._moving(crowd[1], load, against.get(crowd)) for crowd, load in crowds.items()}
            if prices:
                found = {
                    end: max(alone, prices.get(sharing(end)[0], FREE), key=lambda each: each[0])
                    for end, alone in found.items()
                }
        return found

    def _on_host(self, end: End) -> tuple[Crowd, float | None]:
        rank, way = end
        return (self._hosts[rank], way), self._model.link(way).lanes

    def _in_trunk(self, end: End) -> tuple[Crowd, float | None]:
        _, way = end
        return ("", way), None if way in ("inside", "window") else self._model.link(way).trunk

    def _moving(self, way: str, load: _Load, back: _Load | None) -> Priced:
        """Price a load; the rank has a call for each message of the other way too, whose bytes do not hinder these."""
        messages = load.messages + (0 if back is None else back.messages)
        alike = way, messages, load.nbytes, load.largest
        if alike not in self._known:
            link = self._model.link(way)
            terms = Cost(
                latency=link.alpha_us,
                injection=link.gap_us * messages,
                transfer=link.transfer_us(load.nbytes),
                handshake=link.handshake_us(load.largest),
                jitter=link.jitter_us,
            )
            self._known[alike] = terms.total, terms
        return self._known[alike]


def _crowds(loads: Ends, sharing: Sharing) -> dict[Crowd, _Load]:
    """Add up what goes through ends that have to share a link."""
    crowds: dict[Crowd, _Load] = defaultdict(_Load)
    for end, load in loads.items():
        crowd, lanes = sharing(end)
        if lanes is not None:
            crowds[crowd].add_share(load, lanes)
    return crowds
