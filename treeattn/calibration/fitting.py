"""A cost model that fits what was measured: constants by which steps take what `treeattn.costs.pricing` says.

What a plan takes is the sum along its longest chain of latencies, messages, bytes and merges, each times a constant;
so the constants are those, none below 0, by which the steps are off by the smallest shares. Which chain is the longest
depends on the constants, so both are found again until they stay the same.

Three things are no such constants: from which size on a message needs a handshake, how many ranks can send at once
between hosts (the trunk), and how many of one host (its lanes). Each is supposed only where the steps say so: where it
explains more than one more constant of any kind would be expected to, by Akaike's criterion. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.costs.model import DEFAULT_MODEL, CostModel
from treeattn.costs.pricing import WAYS, Step, cost
from treeattn.planning.plan import Plan
from treeattn.planning.topology import group_ranks

__all__ = ["Timed", "fit", "least_squares"]

Array: TypeAlias = npt.NDArray[Any]

Counted: TypeAlias = "tuple[str, str]"
"""A way, and what is counted on it; or "call", and what is counted of a call."""

CALLS, PIECES = ("call", "calls"), ("call", "pieces")

SHARE = 0.01
"""Share of a step that no clock tells for sure: what explains less is not looked for."""

TURNS = 3
"""How often a model is fitted to the chains that are longest by it, at most."""

FASTEST = 1e6
"""1e9 bytes per second, of links on which bytes took no time that could be told."""

ROUNDING = 1e-12
"""What is as small beside 1 is nothing."""


class Timed(NamedTuple):
    """What a step took: median and 99th percentile over repeats, on the middle rank, in microseconds."""

    plan: Plan
    nbytes: int
    p50_us: float
    p99_us: float


def fit(timed: Sequence[Timed], merge_gb_per_s: float) -> CostModel:
    """Fit a cost model to what steps took; ways that they did not take are the default's.

    Parameters
    ----------
    timed : sequence of Timed
        All of the same hosts.
    merge_gb_per_s : float
        States that one rank merges.

    Examples
    --------
    >>> from treeattn.costs.catalog import Link
    >>> from treeattn.costs.choosing import candidates
    >>> from treeattn.planning.planner import plan_allreduce
    >>> hosts, right = list("abcde"), CostModel(Link(1, 1, ""), Link(100, 2, "", gap_us=3), merge_gb_per_s=10)
    >>> cases = [(plan_allreduce(hosts, each), nbytes) for each in candidates(hosts) for nbytes in (2080, 16640)]
    >>> found = fit([Timed(*each, *[cost(*each, right).total_us] * 2) for each in cases], 10).between
    >>> round(found.alpha_us), round(found.gb_per_s, 1), round(found.gap_us, 1), found.trunk
    (100, 2.0, 3.0, None)
    """
    far = ("rack", "between") if len(set(timed[0].plan.hosts)) > 1 else ("inside",)
    free = _unhindered(timed[0].plan.hosts, far, merge_gb_per_s)
    model, chains = free, list[Sequence[Step]]()
    for _ in range(TURNS):
        before, chains = chains, [cost(each.plan, each.nbytes, model).chain for each in timed]
        if chains == before:
            break
        model = _Search(timed, chains, far, model, free).best()
    return _concluded(model, far, free, _jitter(timed, chains))


def _unhindered(hosts: Sequence[str], far: Sequence[str], merge_gb_per_s: float) -> CostModel:
    """Give a model with limits that hinder nobody: by these, chains tell what goes through lanes and trunk."""
    links: dict[str, Any] = {way: replace(DEFAULT_MODEL.link(way), steps=(), lanes=None, trunk=None) for way in WAYS}
    model = replace(DEFAULT_MODEL, **links, merge_gb_per_s=merge_gb_per_s, round_us=0.0)
    return _limited(model, far, trunk=len(hosts), lanes=max(map(len, group_ranks(hosts))))


@dataclass(frozen=True)
class _Search:
    """The search for the model that fits chains; these are the longest by the model ``of``.

    Limits are those of the ways ``far``; those of the model ``free`` hinder nobody.
    """

    timed: Sequence[Timed]
    chains: Sequence[Sequence[Step]]
    far: Sequence[str]
    of: CostModel
    free: CostModel

    def best(self) -> CostModel:
        """Fit the constants, with the limits so far and then with others, one kind after another."""
        best = self._fitted(self.of)
        for others in (self._handshakes(), self._halves("trunk", 2), self._halves("lanes", 1)):
            found = [self._fitted(_limited(best.model, self.far, **each)) for each in others]
            best = min([best, *found], key=lambda each: each.off)
        return best.model

    def _handshakes(self) -> Iterator[dict[str, Any]]:
        """Suppose one from a size on that some messages have: protocols change at powers of two."""
        sizes = sorted({step.loads[0].largest for each in self.chains for step in each if step.way in self.far})
        for limit in {max(small, 2 ** ((large - 1).bit_length() - 1)) for small, large in pairwise(sizes)}:
            yield {"steps": ((limit, 0.0),)}

    def _halves(self, name: str, least: float) -> Iterator[dict[str, Any]]:
        """Halve a limit down to the least; a trunk for fewer than the two ends of a message would be a slower link."""
        value: float = getattr(self.free.link(self.far[0]), name)
        while value > least:
            value = max(least, value / 2)
            yield {name: value}

    def _fitted(self, model: CostModel) -> _Fit:
        """Find the constants that go with the limits of a model."""
        counts = [self._counts(each.plan, chain, model) for each, chain in zip(self.timed, self.chains, strict=True)]
        names = list(dict.fromkeys(name for each in counts for name in each))
        us = np.array([each.p50_us for each in self.timed])
        rows = np.array([[each.get(name, 0) for name in names] for each in counts]) / us[:, None]
        merging = np.array([model.merge_us(sum(step.merged for step in chain)) for chain in self.chains])
        shares = np.maximum(us - merging, 0) / us
        constants = least_squares(rows, shares)
        off = float(np.mean((rows @ constants - shares) ** 2))
        link, free = model.link(self.far[0]), self.free.link(self.far[0])
        supposed = bool(link.steps) + (link.trunk != free.trunk) + (link.lanes != free.lanes)
        found = _with_constants(model, dict(zip(names, constants.tolist(), strict=True)))
        return _Fit(len(us) * np.log(off + SHARE**2) + 2 * supposed, found)

    def _counts(self, plan: Plan, chain: Sequence[Step], model: CostModel) -> Mapping[Counted, float]:
        """Count what is on a chain, and of a call."""
        counts: dict[Counted, float] = defaultdict(float, {CALLS: 1, PIECES: plan.pieces - 1})
        for step in (each for each in chain if each.loads[0].messages):
            link, before = model.link(step.way), self.of.link(step.way)
            room = 1.0, (link.lanes or 1) / (before.lanes or 1), (link.trunk or 1) / (before.trunk or 1)
            loads = [load.over(times) for load, times in zip(step.loads, room, strict=False)]
            load = max(loads, key=lambda each: each.us(link))
            counts[step.way, "latencies"] += step.waited
            counts[step.way, "messages"] += load.messages
            counts[step.way, "bytes"] += load.nbytes
            counts[step.way, "handshakes"] += sum(load.largest > limit for limit, _ in link.steps)
        return counts


class _Fit(NamedTuple):
    """How far a model is off, with what it supposes, and the model: the less the better."""

    off: float
    model: CostModel


def _limited(model: CostModel, far: Sequence[str], **limits: Any) -> CostModel:
    """Give a model with other limits on some ways."""
    links: dict[str, Any] = {way: replace(model.link(way), **limits) for way in far}
    return replace(model, **links)


def _with_constants(model: CostModel, constants: Mapping[Counted, float]) -> CostModel:
    """Give a model with other constants, of the ways that have any."""
    ways = {way for way, _ in constants} - {"call"}
    links: dict[str, Any] = {
        way: replace(
            model.link(way),
            alpha_us=constants[way, "latencies"],
            gap_us=constants[way, "messages"],
            gb_per_s=1e-3 / max(constants[way, "bytes"], 1e-3 / FASTEST),
            steps=tuple((limit, constants[way, "handshakes"]) for limit, _ in model.link(way).steps),
            source="measured",
        )
        for way in ways
    }
    return replace(model, **links, call_us=constants[CALLS], piece_us=constants[PIECES])


def _jitter(timed: Sequence[Timed], chains: Sequence[Sequence[Step]]) -> dict[str, float]:
    """Give, for each way, by how much the 99th percentile of a round on it lies above the median."""
    ways = list(dict.fromkeys(step.way for chain in chains for step in chain if step.waited))
    us = np.array([each.p50_us for each in timed])
    waits = np.array([[sum(step.waited and step.way == way for step in chain) for way in ways] for chain in chains])
    above = np.array([each.p99_us for each in timed]) - us
    return dict(zip(ways, least_squares(waits / us[:, None], above / us).tolist(), strict=True))


def _concluded(model: CostModel, far: Sequence[str], free: CostModel, jitter: Mapping[str, float]) -> CostModel:
    """Give a model without limits that hinder nobody, and with the default's links for ways that were not taken."""
    found, all_free = model.link(far[0]), free.link(far[0])
    limits = {name: None for name in ("trunk", "lanes") if getattr(found, name) == getattr(all_free, name)}
    model = _limited(model, far, **limits)
    taken = {way: replace(model.link(way), jitter_us=us) for way, us in jitter.items()}
    if "between" not in taken and "rack" in taken:  # all hosts are in one rack
        taken["between"] = taken.pop("rack")
    links: dict[str, Any] = {way: taken.get(way, getattr(DEFAULT_MODEL, way)) for way in WAYS}
    return replace(model, **links)


def least_squares(rows: Array, values: Array) -> Array:
    """Solve rows @ x = values as well as can be with no x below 0, and with none above that does not help.

    Those above 0 are found one by one, the one that helps most first; where that brings others below 0, these leave
    (C. Lawson and R. Hanson, Solving Least Squares Problems, 1974, chapter 23).
    """
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    rows, x = rows / scale, np.zeros(len(scale))
    free, barred = x > 0, x > 0
    while True:
        slopes = np.where(free | barred, 0.0, rows.T @ (values - rows @ x))
        best = slopes.argmax()
        if slopes[best] <= ROUNDING:
            solved: Array = x / scale
            return solved
        free[best] = True
        x, free = _inside(rows, values, x, free)
        barred = np.zeros_like(free) if free[best] else barred | (np.arange(len(x)) == best)  # rounding brought it back


def _inside(rows: Array, values: Array, x: Array, free: Array) -> tuple[Array, Array]:
    """Go from x towards the solution by the free ones until none is below 0; those that would be are free no more."""
    while True:
        found = np.zeros(len(x))
        found[free] = np.linalg.lstsq(rows[:, free], values, rcond=None)[0]
        below = free & (found <= 0)
        if not below.any():
            return found, free
        reach = np.where(below, x / np.maximum(x - found, ROUNDING), np.inf)
        free = free & (reach > reach.min())
        x = np.where(free, x + reach.min() * (found - x), 0.0)
