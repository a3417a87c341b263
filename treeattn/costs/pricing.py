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
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

from treeattn.costs.catalog import Link
from treeattn.costs.model import DEFAULT_MODEL, Cost, CostModel
from treeattn.planning.messages import count_messages, largest_message
from treeattn.planning.plan import Message, Plan, Round
from treeattn.planning.topology import rack_of

__all__ = ["WAYS", "Load", "PlanCost", "Step", "cost"]

End: TypeAlias = "tuple[int, str]"
"""A rank, and the name of a link."""

Ends: TypeAlias = "dict[End, _Sum]"

Crowd: TypeAlias = "tuple[str, str]"
"""A host, or nothing for all together, and the name of a link."""

Sharing: TypeAlias = "Callable[[End], tuple[Crowd, float | None]]"
"""With whom an end has to share, and how many of them can move at once; None is all."""

Shared: TypeAlias = "tuple[Sharing, dict[Crowd, _Sum], dict[Crowd, _Sum]]"
"""What all who have to share move, and what comes the other way."""


WAYS = "inside", "window", "rack", "between"
"""Names of links."""

BETWEEN = "rack", "between"
"""Those between hosts."""


class Load(NamedTuple):
    """What moves one after another: messages, bytes, and bytes of the largest message."""

    messages: float = 0.0
    nbytes: float = 0.0
    largest: int = 0

    def over(self, times: float) -> Load:
        """Give the load where so many times as many can move at once."""
        return Load(self.messages / times, self.nbytes / times, self.largest)

    def us(self, link: Link) -> float:
        """Microseconds that it takes on a link, without latency."""
        return link.gap_us * self.messages + link.transfer_us(self.nbytes) + link.handshake_us(self.largest)


class Step(NamedTuple):
    """One rank's part in one round.

    Parameters
    ----------
    number : int
        Of the round.
    way : str
        On which it moved what it moved, one of `WAYS`.
    waited : bool
        Whether the rank waited for a message's latency.
    loads : tuple of Load
        What moved: alone, over the lanes of the host, and over the trunk; the last two where there are any.
    merged : int
        Bytes that it merged then.
    """

    number: int
    way: str
    waited: bool
    loads: tuple[Load, ...]
    merged: int

    def cost(self, model: CostModel) -> Cost:
        """Give its terms: those of the load that takes longest."""
        link = model.link(self.way)
        load = max(self.loads, key=lambda each: each.us(link))
        return Cost(
            latency=link.alpha_us if self.waited else 0.0,
            injection=link.gap_us * load.messages,
            transfer=link.transfer_us(load.nbytes),
            handshake=link.handshake_us(load.largest),
            merge=model.merge_us(self.merged),
            launch=model.round_us,
            jitter=link.jitter_us if self.waited else 0.0,
        )


class _Moving(NamedTuple):
    """What an end of a link needs: microseconds without latency, and for what."""

    us: float
    way: str
    loads: tuple[Load, ...]

    def beside(self, crowd: _Moving) -> _Moving:
        """Give what it needs where it has to share with a crowd."""
        return _Moving(max(self.us, crowd.us), self.way, (*self.loads, *crowd.loads))


FREE = _Moving(0.0, "inside", (Load(),))


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What each round adds to the longest chain, nothing where it lies beside others; a call besides; and the chain."""

    rounds: tuple[Cost, ...]
    call: Cost
    chain: tuple[Step, ...]

    @property
    def terms(self) -> Cost:
        """All terms together."""
        return sum(self.rounds, self.call)

    @property
    def total_us(self) -> float:
        """Microseconds in all."""
        return self.terms.total


class _Chain(NamedTuple):
    """When a rank was through, and what had to happen before, one after another."""

    us: float = 0.0
    steps: tuple[Step, ...] = ()


@dataclass(slots=True)
class _Sum:
    """What goes one way through one end of a link in one round."""

    messages: float = 0
    nbytes: float = 0.0
    largest: int = 0

    def add(self, size: int, between: bool) -> None:
        self.messages += count_messages(size, between=between)
        self.nbytes += size
        self.largest = max(self.largest, largest_message(size, between=between))

    def add_share(self, load: _Sum, lanes: float) -> None:
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
    terms = {step.number: step.cost(model) for step in longest.steps}
    rounds = tuple(terms.get(number, Cost()) for number in range(len(plan.rounds)))
    return PlanCost(rounds, model.call_cost(plan.pieces) if rounds else Cost(), longest.steps)


class _Pricing:
    """Prices one plan's rounds at one payload."""

    def __init__(self, plan: Plan, pieces: tuple[int, ...], model: CostModel) -> None:
        self._plan, self._pieces, self._model = plan, pieces, model
        self._sharings = self._on_host, self._in_trunk
        self._links = {way: model.link(way) for way in WAYS}
        self._hosts, self._racks = plan.hosts, [rack_of(host) for host in plan.hosts]
        self._known: dict[tuple[str, float, float, int], _Moving] = {}

    def round(self, number: int, each: Round, chains: Sequence[_Chain]) -> dict[int, _Chain]:
        """Give the chains of all ranks that have part in a round, from those before it."""
        merged: dict[int, int] = defaultdict(int)
        for merge in each.merges:
            merged[merge.rank] += len(merge.sources) * self._pieces[merge.piece]
        found = {}
        for rank, (us, before, moved) in self._latest(each, chains).items():
            step = Step(number, moved.way, rank != before, moved.loads, merged.get(rank, 0))
            through = us + self._model.merge_us(step.merged) + self._model.round_us
            found[rank] = _Chain(through, (*chains[before].steps, step))
        return found

    def _latest(self, each: Round, chains: Sequence[_Chain]) -> dict[int, tuple[float, int, _Moving]]:
        """Give, for each rank, when all has come, whose message was the last, or its own number, and what moved."""
        ways = [self._way(message, each.shared) for message in each.messages]
        sent, received = self._loads(each, ways)
        crowds = [(sharing, _crowds(sent, sharing), _crowds(received, sharing)) for sharing in self._sharings]
        out = self._priced(sent, received, crowds)
        into = self._priced(received, sent, [(sharing, there, here) for sharing, here, there in crowds])
        latest = {merge.rank: (chains[merge.rank].us, merge.rank, FREE) for merge in each.merges}
        for (rank, _), moving in chain(out.items(), into.items()):
            busy = chains[rank].us + moving.us
            if rank not in latest or busy > latest[rank][0]:
                latest[rank] = busy, rank, moving
        for message, way in zip(each.messages, ways, strict=True):
            source, dest = message.source, message.dest
            there, here = out.get((source, way), FREE), into[dest, way]
            moving = here if here.us >= there.us else there
            us = chains[source].us + (self._links[way].alpha_us + moving.us)
            if us >= latest[dest][0]:
                latest[dest] = us, source, moving
        return latest

    def _loads(self, each: Round, ways: Sequence[str]) -> tuple[Ends, Ends]:
        """Add up what goes out through each end of a link, and what comes in."""
        out: Ends = defaultdict(_Sum)
        into: Ends = defaultdict(_Sum)
        sizes: dict[tuple[int, int], int] = {}
        for message, way in zip(each.messages, ways, strict=True):
            kind = message.slots, message.piece
            if kind not in sizes:
                sizes[kind] = self._plan.message_bytes(message.slots, self._pieces[message.piece])
            between = way in BETWEEN
            into[message.dest, way].add(sizes[kind], between)
            if not each.shared:
                out[message.source, way].add(sizes[kind], between)
        return out, into

    def _way(self, message: Message, shared: bool) -> str:
        source, dest = message.source, message.dest
        if shared:
            return "window"
        if self._hosts[source] == self._hosts[dest]:
            return "inside"
        return "rack" if self._racks[source] == self._racks[dest] else "between"

    def _priced(self, loads: Ends, back: Ends, sharings: Sequence[Shared]) -> dict[End, _Moving]:
        """Price each end of a link, beside all with which it has to share that."""
        found = {end: self._moving(end[1], load, back.get(end)) for end, load in loads.items()}
        for sharing, crowds, against in sharings:
            prices = {crowd: self._moving(crowd[1], load, against.get(crowd)) for crowd, load in crowds.items()}
            if prices:
                for end, alone in found.items():
                    crowd = prices.get(sharing(end)[0])
                    found[end] = alone if crowd is None else alone.beside(crowd)
        return found

    def _on_host(self, end: End) -> tuple[Crowd, float | None]:
        rank, way = end
        return (self._hosts[rank], way), self._links[way].lanes

    def _in_trunk(self, end: End) -> tuple[Crowd, float | None]:
        _, way = end
        return ("", way), self._links[way].trunk if way in BETWEEN else None

    def _moving(self, way: str, load: _Sum, back: _Sum | None) -> _Moving:
        """Price a load; the rank has a call for each message of the other way too, whose bytes do not hinder these."""
        messages = load.messages + (0 if back is None else back.messages)
        alike = way, messages, load.nbytes, load.largest
        if alike not in self._known:
            moved = Load(messages, load.nbytes, load.largest)
            self._known[alike] = _Moving(moved.us(self._links[way]), way, (moved,))
        return self._known[alike]


def _crowds(loads: Ends, sharing: Sharing) -> dict[Crowd, _Sum]:
    """Add up what goes through ends that have to share a link."""
    crowds: dict[Crowd, _Sum] = defaultdict(_Sum)
    for end, load in loads.items():
        crowd, lanes = sharing(end)
        if lanes is not None:
            crowds[crowd].add_share(load, lanes)
    return crowds
