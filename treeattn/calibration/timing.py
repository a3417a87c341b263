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

from treeattn.calibration.fitting import SHORTEST, Sample, add_steps, fit
from treeattn.calibration.probes import Probe, probes_for
from treeattn.costs.model import CostModel
from treeattn.execution.agreement import Attempt, Header, Signature
from treeattn.execution.executor import Exchange
from treeattn.execution.tally import Tally
from treeattn.execution.window import Window
from treeattn.planning.plan import Plan, spans
from treeattn.state import PartialState
from treeattn.steps.channel import Channel
from treeattn.steps.session import Session
from treeattn.transports.clocks import Clock
from treeattn.wire_form import WireForm, merger

__all__ = ["Calibration", "calibrate", "in_turns"]

T = TypeVar("T")
Run: TypeAlias = Callable[[], object]

SECONDS = 0.1
"""Roughly how long rounds are repeated."""

STEP_SECONDS = 0.3
"""The same for whole steps, by which all forecasts stand and fall."""

FEWEST, MOST = 5, 200
"""Repeats of a probe, at least and at most."""

TURNS = 3
"""Turns in which probes are repeated, where there are enough repeats."""

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
    probes = list(probes_for(hosts, window is not None and form.nbytes <= window.room))
    rounds, steps = ([probe for probe in probes if (probe.way == "step") is whole] for whole in (False, True))
    branch, tally = channel.branch(), Tally(hosts, channel.rank)
    exchanges = [Exchange(plan, branch, window, form, tally) for plan in _one_after_another(rounds)]
    sessions = [Session(channel.apart(), _always(probe.plan), window) for probe in steps]
    runs: list[Run] = [
        *(partial(channel.call, exchange.run, Header(0, 0, 0, 0)) for exchange in exchanges),
        *(partial(channel.call, _step(session, form)) for session in sessions),
    ]
    seconds = [SECONDS] * len(exchanges) + [STEP_SECONDS] * len(sessions)
    values = [*_quantiles(channel, runs, seconds), _merge_seconds(form, channel.transport.clock)]
    told = _concluded(channel, values, partial(_fitted, [*rounds, *steps], form.nbytes))
    channel.retire(branch)
    for session in sessions:
        session.retire()
    return Calibration.from_json(told)


def _one_after_another(probes: Sequence[Probe]) -> Iterator[Plan]:
    """Give plans with no number of a round in common."""
    earlier = accumulate((len(probe.plan.rounds) for probe in probes), initial=0)
    return (probe.after(rounds) for probe, rounds in zip(probes, earlier, strict=False))


def _always(plan: Plan) -> Callable[..., Plan]:
    return lambda *_: plan


def _step(session: Session, form: WireForm) -> Run:
    """Give a whole step, by the short way where it has one, as all steps but the first."""
    batch, heads, tokens, width = form.shape
    rows = batch, heads, tokens
    state = PartialState.from_lse(np.zeros((*rows, width - 2), np.float32), np.zeros(rows, np.float32), base="e")
    attempt = Attempt(Signature("calibration", None, (), (*rows, width), form.dtype), state, None)

    def step() -> None:
        shortcut = session.shortcut
        if shortcut is None or shortcut.merge(state, None, attempt) is None:
            session.merge(attempt, None)

    return step


def _quantiles(channel: Channel, runs: Sequence[Run], seconds: Sequence[float]) -> list[float]:
    """Medians of what runs take on this rank, in microseconds, and then 99th percentiles; each for so many seconds."""
    clock = channel.transport.clock
    first = [float(np.median(_times(clock, run, FIRST))) for run in runs]
    counts = _concluded(channel, first, partial(_repeats, seconds))
    times = in_turns(clock, runs, counts)
    return [1e6 * float(np.quantile(each, at)) for at in (0.5, 0.99) for each in times]


def _fitted(probes: Sequence[Probe], payload_bytes: int, slowest: Sequence[float]) -> str:
    """Put together what was measured, and the model that fits it, as JSON."""
    *found, merging = slowest
    p50s, p99s = found[: len(probes)], found[len(probes) :]
    around = next((p50 for probe, p50 in zip(probes, p50s, strict=True) if probe.is_around), 0.0)
    samples = []
    for probe, p50, p99 in zip(probes, p50s, p99s, strict=True):
        less = min(probe.around * around, p50 - SHORTEST)
        nbytes = payload_bytes if probe.way == "step" else probe.plan.message_bytes(probe.slots, payload_bytes)
        samples.append(Sample(probe.way, probe.partners, nbytes, probe.leaders, p50 - less, p99 - less))
    steps = [(probe.plan, p50) for probe, p50 in zip(probes, p50s, strict=True) if probe.way == "step"]
    model = fit(samples, MERGED * payload_bytes / merging / 1e9)
    return Calibration(tuple(samples), add_steps(model, payload_bytes, steps)).to_json()


def _repeats(seconds: Sequence[float], slowest: Sequence[float]) -> list[int]:
    """How often to repeat what takes so long, to fill so many seconds."""
    return [int(min(max(all_of_it / each, FEWEST), MOST)) for all_of_it, each in zip(seconds, slowest, strict=True)]


def _concluded(channel: Channel, values: Sequence[float], conclude: Callable[[Sequence[float]], T]) -> T:
    """Give what rank 0 concludes from the largest that any rank has of each value."""
    found, told = channel.gather(json.dumps(values).encode()), b""
    if channel.rank == 0:
        slowest = [max(each) for each in zip(*map(json.loads, found), strict=True)]
        told = json.dumps(channel.call(conclude, slowest)).encode()
    concluded: T = json.loads(channel.gather(told)[0])
    return concluded


def in_turns(clock: Callable[[], float], runs: Sequence[Run], counts: Sequence[int]) -> list[list[float]]:
    """Seconds of so many repeats of each run, in turns: a machine that is slow for a while is so for all of them."""
    parts = [spans(count, min(TURNS, max(1, count // FEWEST))) for count in counts]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(TURNS):
        for run, part, found in zip(runs, parts, times, strict=True):
            if turn < len(part):
                found += _times(clock, run, len(part[turn]))
    return times


def _times(clock: Callable[[], float], run: Run, count: int) -> list[float]:
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
