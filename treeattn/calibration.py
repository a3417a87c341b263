"""Measuring the cost model: the rounds that plans are made of, timed one kind at a time, by the code that runs plans.

A *probe* is a round in which the ranks of a group swap messages of one size with so many partners at once: two by two,
messages of every size that a plan may send, and with as many as may meet, headers and single states. In shared memory
it is a round up and one down. The model is fitted to medians; what the 99th percentile adds is a link's jitter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from treeattn.agreement import Header
from treeattn.catalog import Link
from treeattn.channel import Channel
from treeattn.clocks import Clock
from treeattn.costs import DEFAULT_MODEL, CostModel
from treeattn.executor import Exchange
from treeattn.plan import Merge, Message, Plan, Round
from treeattn.radices import Radices
from treeattn.rounds import Tally
from treeattn.topology import group_ranks, rack_of
from treeattn.window import STATE_BYTES, Window
from treeattn.wire_form import WireForm, merger

__all__ = ["Calibration", "Sample", "calibrate", "fit"]

Groups: TypeAlias = "Sequence[tuple[int, ...]]"
T = TypeVar("T")

SECONDS = 0.1
"""Roughly how long a probe is repeated."""

FEWEST, MOST = 5, 200
"""Repeats of a probe, at least and at most."""

FIRST = 3
"""Repeats that tell how long a probe takes."""

MOST_PARTNERS = 15
"""Most partners of a probe."""

MOST_ROUNDS = 3
"""Rounds of a probe, at most."""

SHORTEST = 1e-3
"""Microseconds that a probe takes, at least."""

STEP = 0.3
"""A message that takes longer than its bytes explain, by this share of a latency, has met another protocol."""

MERGED = 8
"""States of the merge that is timed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one kind of round took.

    Parameters
    ----------
    way : str
        "inside", "window", "rack" or "between"; "around" is headers to leaders and back, by messages inside hosts.
    partners : int
        Messages that each rank sends and receives; in a window, and around, ranks of the largest host.
    nbytes : int
        Of each message.
    leaders : int
        Ranks of a host that do so at once.
    p50_us, p99_us : float
        Median and 99th percentile over repeats, of the slowest rank; without what comes around.
    """

    way: str
    partners: int
    nbytes: int
    leaders: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and the model that fits it."""

    samples: tuple[Sample, ...]
    model: CostModel

    def to_json(self) -> str:
        """Write it as JSON, in which every number keeps its bits."""
        return json.dumps({"samples": [asdict(each) for each in self.samples], "model": self.model.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read what `to_json` wrote."""
        found = json.loads(text)
        return cls(tuple(Sample(**each) for each in found["samples"]), CostModel.from_json(found["model"]))


@dataclass(frozen=True, slots=True)
class _Probe:
    way: str
    partners: int
    slots: int
    leaders: int
    rounds: tuple[Round, ...]

    @property
    def is_around(self) -> bool:
        """Whether it is what comes around others: headers to leaders and back."""
        return self.slots == 0 and self.way in ("window", "around")

    @property
    def has_around(self) -> bool:
        """Whether headers go to leaders before, and back after, what it measures."""
        return self.way in ("rack", "between") and len(self.rounds) > 1

    def plan(self, hosts: tuple[str, ...], number: int) -> Plan:
        """Make it a plan whose rounds, which are the tags of messages, are no other probe's."""
        earlier = (Round("between", "exchange", ()),) * (MOST_ROUNDS * number)
        return Plan("allreduce", None, hosts, Radices(), False, (*earlier, *self.rounds))


def calibrate(channel: Channel, window: Window | None, form: WireForm) -> Calibration:
    """Measure for states of one form, by the transport's clock; collective.

    Rank 0 fits the model to every rank's times and sends it, so that all have the same, whatever they compute with.

    Parameters
    ----------
    channel : Channel
    window : Window or None
        Of this rank's host.
    form : WireForm
    """
    hosts = channel.hosts
    probes = list(_probes(hosts, window is not None and form.nbytes <= STATE_BYTES))
    branch, tally = channel.branch(), Tally(hosts, channel.rank)
    exchanges = [
        Exchange(probe.plan(hosts, number), branch, window, form, tally) for number, probe in enumerate(probes)
    ]
    values = [*_quantiles(channel, exchanges), _merge_seconds(form, channel.transport.clock)]
    sizes = [each.plan.message_bytes(probe.slots, form.nbytes) for probe, each in zip(probes, exchanges, strict=True)]
    told = _concluded(channel, values, partial(_fitted, probes, sizes, MERGED * form.nbytes))
    channel.retire(branch)
    return Calibration.from_json(told)


def _quantiles(channel: Channel, exchanges: Sequence[Exchange]) -> list[float]:
    """Medians of what runs take on this rank, in microseconds, and then 99th percentiles."""
    first = [float(np.median(_times(channel, each, FIRST))) for each in exchanges]
    counts = _concluded(channel, first, _repeats)
    times = [_times(channel, each, count) for each, count in zip(exchanges, counts, strict=True)]
    return [1e6 * float(np.quantile(each, at)) for at in (0.5, 0.99) for each in times]


def _fitted(probes: Sequence[_Probe], sizes: Sequence[int], merged_bytes: int, slowest: Sequence[float]) -> str:
    """Put together what was measured, and the model that fits it, as JSON."""
    *found, merging = slowest
    p50s, p99s = found[: len(probes)], found[len(probes) :]
    around = next((p50 for probe, p50 in zip(probes, p50s, strict=True) if probe.is_around), 0.0)
    samples = []
    for probe, nbytes, p50, p99 in zip(probes, sizes, p50s, p99s, strict=True):
        less = min(around, p50 - SHORTEST) if probe.has_around else 0.0
        samples.append(Sample(probe.way, probe.partners, nbytes, probe.leaders, p50 - less, p99 - less))
    return Calibration(tuple(samples), fit(samples, merged_bytes / merging / 1e9)).to_json()


def _repeats(slowest: Sequence[float]) -> list[int]:
    """How often to repeat probes that take so many seconds."""
    return [int(min(max(SECONDS / each, FEWEST), MOST)) for each in slowest]


def _concluded(channel: Channel, values: Sequence[float], conclude: Callable[[Sequence[float]], T]) -> T:
    """Give what rank 0 concludes from the largest that any rank has of each value."""
    found, told = channel.gather(json.dumps(values).encode()), b""
    if channel.rank == 0:
        slowest = [max(each) for each in zip(*map(json.loads, found), strict=True)]
        told = json.dumps(channel.call(conclude, slowest)).encode()
    concluded: T = json.loads(channel.gather(told)[0])
    return concluded


def _times(channel: Channel, exchange: Exchange, count: int) -> list[float]:
    """Seconds that each of ``count`` runs takes, by the mean of two in a row, after one that does not count.

    Two ranks that only wait for each other, and don't begin at once, take turns in waiting long and not at all.
    """
    ends, header, clock = [], Header(0, 0, 0, 0), channel.transport.clock
    for _ in range(count + 2):
        channel.call(exchange.run, header)
        ends.append(clock())
    return [max((end - start) / 2, SHORTEST / 1e6) for start, end in zip(ends, ends[2:], strict=False)]


def _merge_seconds(form: WireForm, clock: Clock) -> float:
    """Seconds to merge `MERGED` states."""
    sources = list(np.zeros((MERGED, form.nbytes), np.uint8))
    merge = merger(np.zeros(form.nbytes, np.uint8), sources, form)
    return min(_elapsed(merge, clock) for _ in range(20))


def _elapsed(call: Callable[[], None], clock: Clock) -> float:
    start = clock()
    call()
    return max(clock() - start, 1e-9)


def _probes(hosts: tuple[str, ...], shared: bool) -> Iterator[_Probe]:
    groups = group_ranks(hosts)
    leaders, each = tuple(group[0] for group in groups), min(map(len, groups))
    racks = [tuple(leaders[index] for index in rack) for rack in group_ranks(rack_of(hosts[at]) for at in leaders)]
    yield from _swaps("inside", groups)
    around = _up_and_down(groups, 0, shared)
    if shared:
        yield from (around, _up_and_down(groups, 1, shared))
    elif 1 < len(leaders) < len(hosts):
        yield around
    racked = 1 < len(racks) < len(leaders)
    if racked:
        yield from _around(_swaps("rack", racks), around)
    top = tuple(rack[0] for rack in racks) if racked else leaders
    if len(top) > 1:
        yield from _around(_swaps("between", [top]), around)
    if len(top) > 1 and each > 1:
        side_by_side = [tuple(group[index] for group in groups if group[0] in top) for index in range(each)]
        yield from _around([_swap("between", side_by_side, _many(len(top)), 1, each)], around)


def _around(probes: Iterable[_Probe], around: _Probe) -> Iterator[_Probe]:
    """Put rounds to leaders and back around others: ranks that are no leaders then wait as they do in plans.

    Where ranks outnumber cores, it matters how those wait that have nothing to do.
    """
    up, down = around.rounds
    for probe in probes:
        yield replace(probe, rounds=(up, *probe.rounds, down) if up.messages else probe.rounds)


def _many(count: int) -> int:
    """Give how many partners a rank among ``count`` has in probes with many, or with the only one."""
    return min(count - 1, MOST_PARTNERS)


def _swaps(way: str, groups: Groups) -> Iterator[_Probe]:
    """Swap messages of each size with one partner, and of two sizes with many, where there are that many."""
    largest = max(map(len, groups))
    sizes = [0, 1]
    while 2 * sizes[-1] <= largest // 2:
        sizes.append(2 * sizes[-1])
    many = _many(largest)
    yield from (_swap(way, groups, 1, slots, 1) for slots in sizes if largest > 1)
    yield from (_swap(way, groups, many, slots, 1) for slots in (0, 1) if many > 1)


def _swap(way: str, groups: Groups, partners: int, slots: int, leaders: int) -> _Probe:
    room = max(slots, 1)
    messages = tuple(
        Message(group[source], group[dest], slots, number * room)
        for group in groups
        for number, source, dest in _pairs(len(group), partners)
    )
    return _Probe(way, partners, slots, leaders, (Round("between", "exchange", messages),))


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


def _up_and_down(groups: Groups, slots: int, shared: bool) -> _Probe:
    up = tuple(Message(rank, group[0], slots, at) for group in groups for at, rank in enumerate(group[1:], 1))
    down = tuple(Message(group[0], rank, slots) for group in groups for rank in group[1:])
    merges = tuple(Merge(group[0], tuple(range(len(group)))) for group in groups if slots and len(group) > 1)
    rounds = Round("inside", "reduce", up, merges, shared), Round("inside", "broadcast", down, (), shared)
    return _Probe("window" if shared else "around", max(map(len, groups)), slots, 1, rounds)


def fit(samples: Sequence[Sample], merge_gb_per_s: float) -> CostModel:
    """Fit a cost model to what was measured; ways that were not measured are the default's.

    Examples
    --------
    >>> swaps = [Sample("between", 1, 32, 1, 100.016, 110.0), Sample("between", 1, 10032, 1, 105.016, 130.016)]
    >>> fitted = fit(swaps, 10.0).between
    >>> round(fitted.alpha_us, 6), round(fitted.gb_per_s, 6), round(fitted.jitter_us, 6)
    (100.0, 2.0, 25.0)
    """
    of = {way: [each for each in samples if each.way == way] for way in ("inside", "window", "rack", "between")}
    return CostModel(
        inside=_link(of["inside"]) if of["inside"] else DEFAULT_MODEL.inside,
        between=_link(of["between"]) if of["between"] else DEFAULT_MODEL.between,
        rack=_link(of["rack"]) if of["rack"] else None,
        window=_window(of["window"], merge_gb_per_s) if of["window"] else DEFAULT_MODEL.window,
        merge_gb_per_s=merge_gb_per_s,
    )


def _link(samples: Sequence[Sample]) -> Link:
    """Fit a link: latency and gap to headers, rate to the middle one of slopes, steps to what is then too long."""
    sizes = sorted((each for each in samples if each.leaders == 1), key=lambda each: each.nbytes)
    alone, most = [each for each in sizes if each.partners == 1], max(each.partners for each in samples)
    many = [each for each in sizes if each.partners == most > 1]
    slopes = sorted([*_slopes(alone), *_slopes(many)])
    slope = max(slopes[(len(slopes) - 1) // 2], 1e-9)
    each = max(0.0, (many[0].p50_us - alone[0].p50_us) / (most - 1)) if many else slope * alone[0].nbytes
    gap, rate = max(0.0, each - slope * alone[0].nbytes) / 2, 1e-3 / slope
    alpha = max(0.0, alone[0].p50_us - each)
    plain = Link(alpha, rate, "measured", gap, largest_radix=most + 1 if most == MOST_PARTNERS else None)
    jitter = max(each.p99_us - each.p50_us for each in alone[1:])
    lanes = next((_lanes(each, (many or alone)[1], plain) for each in samples if each.leaders > 1), None)
    return replace(plain, steps=_steps(alone, plain), lanes=lanes, jitter_us=jitter)


def _slopes(samples: Sequence[Sample]) -> list[float]:
    """Microseconds per byte from each size to the next."""
    return [
        (after.p50_us - before.p50_us) / (after.nbytes - before.nbytes) / after.partners
        for before, after in pairwise(samples)
    ]


def _steps(alone: Sequence[Sample], plain: Link) -> tuple[tuple[int, float], ...]:
    """Find where messages take longer than latency and bytes explain."""
    steps: list[tuple[int, float]] = []
    for before, after in pairwise(alone):
        explained = plain.message_us(after.nbytes) + 2 * plain.gap_us + sum(more for _, more in steps)
        if after.p50_us - explained > STEP * plain.alpha_us:
            limit = max(before.nbytes, 2 ** ((after.nbytes - 1).bit_length() - 1))  # protocols change at powers of two
            steps.append((limit, after.p50_us - explained))
    return tuple(steps)


def _lanes(crowd: Sample, one: Sample, plain: Link) -> float | None:
    """Find out how many ranks of a host can send at once, from what all take beyond latency, and what one does."""
    slower = (crowd.p50_us - plain.alpha_us) / max(one.p50_us - plain.alpha_us, SHORTEST)
    return None if slower <= 1 else max(1.0, crowd.leaders / slower)


def _window(samples: Sequence[Sample], merge_gb_per_s: float) -> Link:
    """Fit a window: half of two rounds is the latency, and what states add, but for merging, the rate."""
    small, large = samples
    ranks, merging = small.partners, small.partners * (large.nbytes - small.nbytes) / (merge_gb_per_s * 1e3)
    more = max(large.p50_us - small.p50_us - merging, 1e-6)
    rate = ranks * (large.nbytes - small.nbytes) / more / 1e3
    return Link(small.p50_us / 2, rate, "measured", jitter_us=(large.p99_us - large.p50_us) / 2)
