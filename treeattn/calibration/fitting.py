"""A cost model that fits what was measured: latencies, gaps, rates and steps from the times of probes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.calibration.probes import MOST_PARTNERS
from treeattn.costs.catalog import Link
from treeattn.costs.model import DEFAULT_MODEL, Cost, CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.plan import Plan

__all__ = ["CLOSE", "SHORTEST", "Sample", "add_steps", "fit"]

Array: TypeAlias = npt.NDArray[Any]

SHORTEST = 1e-3
"""Microseconds that anything takes, at least."""

STEP = 0.3
"""A message that takes longer than its bytes explain, by this share of a latency, has met another protocol."""

ENOUGH_STEPS = 3
"""Steps in one piece that tell apart what a round, a message and a call cost."""

TINY = 1e-9
"""Shares of a step by which a fit is not better; and microseconds that are next to nothing."""

CLOSE = 0.02
"""Share of a step by which a fit may be worse that supposes fewer ranks in each other's way."""

TURNS = 10
"""How often a model is fitted to the chains that are longest by it, at most."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a probe took.

    Parameters
    ----------
    way, partners, leaders
        See `treeattn.calibration.probes.Probe`.
    nbytes : int
        Of each message; in a step, of a state.
    p50_us, p99_us : float
        Median and 99th percentile over repeats, of the slowest rank; without what comes around.
    """

    way: str
    partners: int
    nbytes: int
    leaders: int
    p50_us: float
    p99_us: float


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


def add_steps(model: CostModel, payload_bytes: int, steps: Sequence[tuple[Plan, float]]) -> CostModel:
    """Let a model also say what whole steps take, in microseconds: in one piece and, if that was measured, in several.

    What rounds do not explain is the cost of a call, and of each piece more. Where there are enough steps in one piece,
    they also tell what a round and a message between hosts cost: rounds that are timed one by one wait for each other
    otherwise than in a step, above all where ranks outnumber cores.
    """
    whole, cut = ([each for each in steps if (each[0].pieces > 1) is several] for several in (False, True))
    if len(whole) >= ENOUGH_STEPS:
        model = _by_steps(model, payload_bytes, whole)
    else:
        for plan, us in whole:
            model = replace(model, call_us=model.call_us + _unexplained(plan, payload_bytes, model, us))
    if cut:
        rows = np.array([[(plan.pieces - 1) / us] for plan, us in cut])
        left = np.array([_unexplained(plan, payload_bytes, model, us) / us for plan, us in cut])
        model = replace(model, piece_us=_least_squares(rows, left)[0])
    return model


def _unexplained(plan: Plan, payload_bytes: int, model: CostModel, us: float) -> float:
    return max(0.0, us - cost(plan, payload_bytes, model).total_us)


def _by_steps(model: CostModel, payload_bytes: int, steps: Sequence[tuple[Plan, float]]) -> CostModel:
    """Find latency, gap and trunk between hosts, and the cost of a call, by which steps are off by the smallest shares.

    An exchange in which all hosts send at once takes longer than a tree over as many messages where they are in each
    other's way. Rounds by themselves were timed with all at once, so that a rank alone is as much faster. A trunk for
    fewer than the two ends of a message would be a slower link.
    """
    senders, between, fits = len(set(steps[0][0].hosts)), model.between, list[tuple[float, CostModel]]()
    for crowding in (2**power for power in range(senders.bit_length() - 1)):
        trunk, rate = senders / crowding if crowding > 1 else None, crowding * between.gb_per_s
        model = replace(model, between=replace(model.between, gb_per_s=rate, trunk=trunk))
        model = _by_turns(model, payload_bytes, steps)
        fits.append((_misfit(model, payload_bytes, steps), model))
        least = min(off for off, _ in fits)
        if fits[-1][0] > least or least <= CLOSE:
            break
    return next(found for off, found in fits if off <= least + CLOSE)


def _misfit(model: CostModel, payload_bytes: int, steps: Sequence[tuple[Plan, float]]) -> float:
    """Share by which a model is off, as a mean over steps (of squares)."""
    off = [cost(plan, payload_bytes, model).total_us / us - 1 for plan, us in steps]
    return float(np.sqrt(np.mean(np.square(off))))


def _by_turns(model: CostModel, payload_bytes: int, steps: Sequence[tuple[Plan, float]]) -> CostModel:
    """Find latency and gap between hosts, and the cost of a call, with the trunk that a model has.

    Which chain of a plan's messages is the longest depends on them, so they are found again until they stay the same.
    """
    for _ in range(TURNS):
        before, model = model, _by_chains(model, payload_bytes, steps)
        if model == before:
            break
    return model


def _by_chains(model: CostModel, payload_bytes: int, steps: Sequence[tuple[Plan, float]]) -> CostModel:
    """Find them by the chains that are the longest by a model."""
    alpha, gap = max(model.between.alpha_us, TINY), max(model.between.gap_us, TINY)
    counting = replace(model, between=replace(model.between, alpha_us=alpha, gap_us=gap), call_us=0.0)
    rows, left = [], []
    for plan, us in steps:
        priced = cost(plan, payload_bytes, counting)
        pairs = zip(plan.rounds, priced.rounds, strict=True)
        across = sum((terms for each, terms in pairs if each.level != "inside"), Cost())
        rows.append([across.latency / alpha / us, across.injection / gap / us, 1 / us])
        left.append(max(0.0, us - (priced.total_us - across.latency - across.injection)) / us)
    alpha, gap, call = _least_squares(np.array(rows), np.array(left))
    return replace(model, between=replace(model.between, alpha_us=alpha, gap_us=gap), call_us=call)


def _least_squares(rows: Array, values: Array) -> list[float]:
    """Solve rows @ x = values as well as can be with no x below 0: the fewest x above 0 of those that are as good."""
    count = rows.shape[1]
    best, least = np.zeros(count), float(np.linalg.norm(values))
    for number in range(1, count + 1):
        for some in map(list, combinations(range(count), number)):
            found = np.linalg.lstsq(rows[:, some], values, rcond=None)[0]
            off = float(np.linalg.norm(rows[:, some] @ found - values))
            if (found >= 0).all() and off < least - TINY:
                best, least = np.zeros(count), off
                best[some] = found
    return [float(each) for each in best]
