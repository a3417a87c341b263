"""Measuring the cost model: whole steps, by plans of all kinds, timed by the code that runs plans.

The model is fitted to medians, or to less where repeats are few (`_usual`); what the 99th percentile adds is jitter.
Time is the transport's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from treeattn.calibration.fitting import Timed, fit
from treeattn.calibration.probes import probes_for
from treeattn.costs.model import CostModel
from treeattn.execution.agreement import Attempt, Signature
from treeattn.execution.window import Window
from treeattn.planning.plan import Plan, spans
from treeattn.state import PartialState
from treeattn.steps.channel import Channel
from treeattn.steps.session import Session, make_together
from treeattn.transports.base import Transport
from treeattn.transports.clocks import Clock
from treeattn.transports.waiting import nap
from treeattn.wire_form import WireForm, merger

__all__ = ["Calibration", "Sample", "calibrate", "in_turns"]

Run: TypeAlias = Callable[[], object]

SECONDS = 0.6
"""Roughly how long all steps together are repeated, each as long as any other, or twice as long for more turns."""

SETTLING = 1
"""Runs of a turn that do not count: the first after steps by another plan takes longer."""

FEWEST, MOST = 1, 200
"""Repeats of a turn at least, and of a step at most."""

TURNS = 3
"""Turns in which runs are repeated, where there is time: a moment in which all is slow then spoils one of three."""

SHORTEST = 1e-9
"""Seconds that anything takes, at least."""

MERGED = 8
"""States of the merge that is timed."""

FITTING = 0.03
"""Seconds that rank 0 fits a model, roughly."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step took.

    Parameters
    ----------
    plan : str
        Its radices.
    nbytes : int
        Of a state.
    p50_us, p99_us : float
        What it usually takes (`_usual`), and the 99th percentile over repeats, of the middle rank.
    """

    plan: str
    nbytes: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and the model that fits it."""

    samples: tuple[Sample, ...]
    model: CostModel


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
    shared = window is not None and form.nbytes <= window.room
    probes = probes_for(channel.hosts, form.shape[1], shared)
    forms = [replace(form, shape=(form.shape[0], each.rows, *form.shape[2:])) for each in probes]
    branch = channel.branch()
    steps = list(_steps(channel, branch, window, [each.plan for each in probes], forms))
    make_together(channel, [(each.session, each.attempt.state) for each in steps])
    runs = [partial(channel.call, each) for each in steps]
    *quantiles, merging = _middle(channel, [*_quantiles(channel, runs), _merge_seconds(form, channel.transport.clock)])
    channel.retire(branch)
    us = 1e6 * np.reshape(quantiles, (2, -1)).T
    timed = [
        Timed(probe.plan, form.nbytes, *each) for probe, form, each in zip(probes, forms, us.tolist(), strict=True)
    ]
    model = _fitted(channel, timed, MERGED * form.nbytes / merging / 1e9)
    return Calibration(tuple(Sample(str(each.plan.radices), *each[1:]) for each in timed), model)


@dataclass(frozen=True, slots=True)
class _Step:
    """A whole step, by the short way where it has one, as all steps but the first."""

    session: Session
    attempt: Attempt

    def __call__(self) -> None:
        shortcut = self.session.shortcut
        if shortcut is None or shortcut.merge(self.attempt.state, None, self.attempt) is None:
            self.session.merge(self.attempt, None)


def _steps(
    channel: Channel, branch: Transport, window: Window | None, plans: Sequence[Plan], forms: Sequence[WireForm]
) -> Iterator[_Step]:
    """Give whole steps, all on one branch, with tags of their own, since each has receives that are started ahead."""
    first = 0
    for plan, form in zip(plans, forms, strict=True):
        yield _step(channel.apart(branch, first), plan, window, form)
        first += plan.tags


def _step(channel: Channel, plan: Plan, window: Window | None, form: WireForm) -> _Step:
    """Give a whole step of states of a form, agreed on as if by calls before."""
    batch, heads, tokens, width = form.shape
    rows = batch, heads, tokens
    state = PartialState.from_lse(np.zeros((*rows, width - 2), np.float32), np.zeros(rows, np.float32), base="e")
    signature = Signature("calibration", None, (), (*rows, width), form.dtype)
    return _Step(Session(channel, lambda *_: plan, window, signature), Attempt(signature, state, None))


def _quantiles(channel: Channel, runs: Sequence[Run]) -> list[float]:
    """Seconds that each run usually takes on this rank, and then 99th percentiles.

    First runs load code and connect ranks; second ones tell for how many more there is time.
    """
    clock = channel.transport.clock
    for run in runs:
        run()
    second = _middle(channel, [_elapsed(run, clock) for run in runs])
    times = in_turns(clock, runs, [_repeats(SECONDS / len(runs) / each) for each in second], SETTLING)
    return [*map(_usual, times), *(float(np.quantile(each, 0.99)) for each in times)]


def _repeats(runs: float) -> int:
    """Give how many repeats count where there is time for so many runs.

    Few in each of three turns tell more than as many in one. In recordings of 6 to 16 ranks on two cores with wires of
    1 ms, models of 9 runs in three turns were off by 7 to 13 % (root of mean squares over plans), of 8 in two by 5 to
    12, and of 6 in two by 8 to 18.
    """
    turns = min(max(round(2 * runs / (SETTLING + 1 + FEWEST)), 1), TURNS)
    return max(min(int(runs), MOST) - turns * (SETTLING + 1), turns * FEWEST)


def _usual(times: Sequence[float]) -> float:
    """Give the median of many repeats, and of few what lies 1.5 repeats lower, but not below their lower third.

    Whatever disturbs a step only lengthens it, and the first repeats of a turn are longer than those that follow. In
    those recordings models of 9 runs were off by 7 to 13 % by this and by 7 to 16 by medians, by which one in eleven
    plans of 16 ranks was off by more than a quarter.
    """
    return float(np.quantile(times, max(1 / 3, (len(times) - 3) / (2 * len(times)))))


def _middle(channel: Channel, values: Sequence[float]) -> list[float]:
    """Give the median over ranks of each value: of few repeats, the largest would be that of the unluckiest rank."""
    found = channel.gather(np.array(values, np.float64).tobytes())
    middle: list[float] = np.median([np.frombuffer(each, np.float64) for each in found], axis=0).tolist()
    return middle


def _fitted(channel: Channel, timed: Sequence[Timed], merge_gb_per_s: float) -> CostModel:
    """Give the model that rank 0 fits, while the others leave it the cores that they may share."""
    told = ""
    if channel.rank == 0:
        told = channel.call(lambda: fit(timed, merge_gb_per_s).to_json())
    else:
        nap(FITTING)
    return CostModel.from_json(channel.gather(told.encode())[0].decode())


def in_turns(
    clock: Callable[[], float], runs: Sequence[Run], counts: Sequence[int], settling: int = 0, turns: int = TURNS
) -> list[list[float]]:
    """Seconds of so many repeats of each run, in turns: a machine that is slow for a while is so for all of them."""
    parts = [spans(count, min(turns, max(1, count // FEWEST))) for count in counts]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(turns):
        for run, part, found in zip(runs, parts, times, strict=True):
            if turn < len(part) and part[turn]:
                found += _times(clock, run, settling, len(part[turn]))
    return times


def _times(clock: Callable[[], float], run: Run, settling: int, count: int) -> list[float]:
    """Seconds that each of ``count`` runs takes, by the mean of two in a row, after ``settling`` that do not count.

    Two ranks that only wait for each other, and don't begin at once, take turns in waiting long and not at all.
    """
    ends = [clock()]
    for _ in range(settling + count + 1):
        run()
        ends.append(clock())
    return [max((end - start) / 2, SHORTEST) for start, end in zip(ends[settling:], ends[settling + 2 :], strict=False)]


def _merge_seconds(form: WireForm, clock: Clock) -> float:
    """Seconds to merge `MERGED` states."""
    sources = list(np.zeros((MERGED, form.nbytes), np.uint8))
    merge = merger(np.zeros(form.nbytes, np.uint8), sources, form)
    return min(_elapsed(merge, clock) for _ in range(20))


def _elapsed(call: Run, clock: Clock) -> float:
    start = clock()
    call()
    return max(clock() - start, SHORTEST)
