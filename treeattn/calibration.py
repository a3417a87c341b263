"""Measuring the cost model: the rounds that plans are made of, and whole steps, timed by the code that runs plans.

The model is fitted to medians; what the 99th percentile adds is a link's jitter. Time is the transport's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import TypeAlias, TypeVar

import numpy as np

from treeattn.agreement import Header
from treeattn.channel import Channel
from treeattn.clocks import Clock
from treeattn.costs import CostModel
from treeattn.executor import Exchange
from treeattn.fitting import SHORTEST, Sample, add_steps, fit
from treeattn.plan import Plan
from treeattn.probes import Probe, probes_for
from treeattn.rounds import Tally
from treeattn.state import PartialState
from treeattn.window import STATE_BYTES, Window
from treeattn.wire_form import WireForm, merger

__all__ = ["Calibration", "calibrate"]

T = TypeVar("T")
Run: TypeAlias = Callable[[], object]

SECONDS = 0.1
"""Roughly how long a probe is repeated."""

FEWEST, MOST = 5, 200
"""Repeats of a probe, at least and at most."""

FIRST = 3
"""Repeats that tell how long a probe takes."""

MERGED = 8
"""States of the merge that is timed."""


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
    probes = list(probes_for(hosts, window is not None and form.nbytes <= STATE_BYTES))
    branch, tally = channel.branch(), Tally(hosts, channel.rank)
    exchanges = [Exchange(plan, branch, window, form, tally) for plan in _one_after_another(probes)]
    runs = [_run(channel, probe, exchange) for probe, exchange in zip(probes, exchanges, strict=True)]
    values = [*_quantiles(channel, runs), _merge_seconds(form, channel.transport.clock)]
    told = _concluded(channel, values, partial(_fitted, probes, form.nbytes))
    channel.retire(branch)
    return Calibration.from_json(told)


def _one_after_another(probes: Sequence[Probe]) -> Iterator[Plan]:
    """Give plans with no number of a round in common."""
    earlier = accumulate((len(probe.plan.rounds) for probe in probes), initial=0)
    return (probe.after(rounds) for probe, rounds in zip(probes, earlier, strict=False))


def _run(channel: Channel, probe: Probe, exchange: Exchange) -> Run:
    """Give what is timed: rounds, or a whole step."""
    rounds = partial(channel.call, exchange.run, Header(0, 0, 0, 0))
    if probe.way != "step":
        return rounds
    *rows, width = exchange.form.shape
    state = PartialState.from_lse(np.zeros((*rows, width - 2), np.float32), np.zeros(rows, np.float32), base="e")

    def step() -> None:
        exchange.load(state)
        rounds()
        exchange.result(state, None)

    return step


def _quantiles(channel: Channel, runs: Sequence[Run]) -> list[float]:
    """Medians of what runs take on this rank, in microseconds, and then 99th percentiles."""
    clock = channel.transport.clock
    first = [float(np.median(_times(clock, run, FIRST))) for run in runs]
    counts = _concluded(channel, first, _repeats)
    times = [_times(clock, run, count) for run, count in zip(runs, counts, strict=True)]
    return [1e6 * float(np.quantile(each, at)) for at in (0.5, 0.99) for each in times]


def _fitted(probes: Sequence[Probe], payload_bytes: int, slowest: Sequence[float]) -> str:
    """Put together what was measured, and the model that fits it, as JSON."""
    *found, merging = slowest
    p50s, p99s = found[: len(probes)], found[len(probes) :]
    around = next((p50 for probe, p50 in zip(probes, p50s, strict=True) if probe.is_around), 0.0)
    samples = []
    for probe, p50, p99 in zip(probes, p50s, p99s, strict=True):
        less = min(around, p50 - SHORTEST) if probe.has_around else 0.0
        nbytes = payload_bytes if probe.way == "step" else probe.plan.message_bytes(probe.slots, payload_bytes)
        samples.append(Sample(probe.way, probe.partners, nbytes, probe.leaders, p50 - less, p99 - less))
    steps = [(probe.plan, p50) for probe, p50 in zip(probes, p50s, strict=True) if probe.way == "step"]
    model = fit(samples, MERGED * payload_bytes / merging / 1e9)
    return Calibration(tuple(samples), add_steps(model, payload_bytes, steps)).to_json()


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


def _times(clock: Clock, run: Run, count: int) -> list[float]:
    """Seconds that each of ``count`` runs takes, by the mean of two in a row, after one that does not count.

    Two ranks that only wait for each other, and don't begin at once, take turns in waiting long and not at all.
    """
    ends = []
    for _ in range(count + 2):
        run()
        ends.append(clock())
    return [max((end - start) / 2, SHORTEST / 1e6) for start, end in zip(ends, ends[2:], strict=False)]


def _merge_seconds(form: WireForm, clock: Clock) -> float:
    """Seconds to merge `MERGED` states."""
    sources = list(np.zeros((MERGED, form.nbytes), np.uint8))
    merge = merger(np.zeros(form.nbytes, np.uint8), sources, form)
    return min(_elapsed(merge, clock) for _ in range(20))


def _elapsed(call: Run, clock: Clock) -> float:
    start = clock()
    call()
    return max(clock() - start, 1e-9)
