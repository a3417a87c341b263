"""What a plan will take, before anybody follows it: the terms of each round, and in all. Pure; sends nothing.

A round takes as long as its busiest rank. That one pays, once, its link's latency; for each message an injection gap;
for each byte the link's rate; for a message over a protocol's limit a handshake; then what it merges. In shared
memory a rank publishes once, so that only what it reads counts. Sending and receiving go on side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from treeattn.catalog import LINKS, Link, look_up
from treeattn.errors import InputError
from treeattn.plan import Message, Plan, Round

__all__ = ["DEFAULT_MODEL", "PRESETS", "Cost", "CostModel", "PlanCost", "cost", "read_model"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """What messages, windows and merges take on one machine, all in microseconds and 1e9 bytes per second.

    Parameters
    ----------
    inside : Link
        Messages between ranks of a host.
    between : Link
        Messages between hosts.
    rack : Link, optional
        Messages between hosts of a rack; as ``between`` by default.
    window : Link, optional
        Memory that the ranks of a host share; as ``inside`` by default.
    merge_gb_per_s : float
        States that one rank merges, read once each: the inverse of gamma.
    round_us : float
        What a round costs a rank before anything moves.

    Examples
    --------
    >>> from treeattn.costs import PRESETS, CostModel
    >>> model = PRESETS["nvlink-infiniband"]
    >>> CostModel.from_json(model.to_json()) == model
    True
    """

    inside: Link
    between: Link
    rack: Link | None = None
    window: Link | None = None
    merge_gb_per_s: float = 40.0
    round_us: float = 0.0

    def link(self, plan: Plan, message: Message, shared: bool) -> Link:
        """Give the link that a message takes."""
        if shared:
            return self.window or self.inside
        return self.between if plan.crosses(message) else self.inside

    def merge_us(self, nbytes: float) -> float:
        """Microseconds to merge states of ``nbytes`` in all."""
        return nbytes / (self.merge_gb_per_s * 1e3)

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Read what `to_json` wrote.

        Raises
        ------
        InputError
            It is something else.
        """
        try:
            found = json.loads(text)
            read: dict[str, Any] = {
                name: _link(value) if name in _WAYS else float(value) for name, value in found.items()
            }
            return cls(**read)
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError.of("model", expected="JSON as CostModel.to_json writes it", got=str(error)) from None


_WAYS = "inside", "between", "rack", "window"


def _link(found: Mapping[str, Any] | None) -> Any:
    if found is None:
        return None
    steps = tuple((int(limit), float(more)) for limit, more in found.get("steps", ()))
    return Link(**{**found, "steps": steps})


PRESETS = {
    "default": CostModel(LINKS["shared-memory"], LINKS["any-network"], window=LINKS["window"], round_us=5.0),
    "nvlink-infiniband": CostModel(LINKS["nvlink4"], LINKS["ib-ndr"], merge_gb_per_s=1000.0, round_us=7.0),
    "infinity-fabric-roce": CostModel(
        LINKS["infinity-fabric"], LINKS["roce-400g"], merge_gb_per_s=1000.0, round_us=7.0
    ),
    "pcie-ethernet": CostModel(LINKS["pcie4-staged"], LINKS["ethernet-100g"], merge_gb_per_s=400.0, round_us=7.0),
}
"""Cost models of common machines. Links are those of `treeattn.catalog`, where their sources are.

Merges: 16,640 bytes and as many more in 0.85 us on a CPU core, measured; on a GPU a launch outweighs them, so that
rates there are orders of magnitude only. A round costs a GPU a launch: NCCL's src/graph/tuning.cc has a base of 6.6 to
8.4 us. On a CPU, 5 us for what Python does is an assumption.
"""

DEFAULT_MODEL = PRESETS["default"]
"""The model by which plans are chosen where nothing was measured."""


def read_model(model: Any) -> CostModel:
    """Read what ``model=`` takes: the name of a preset, a CostModel, or the path of a file that holds one.

    Raises
    ------
    InputError
        It is neither.

    Examples
    --------
    >>> read_model("pcie-ethernet").between.largest_radix
    8
    """
    if isinstance(model, CostModel):
        return model
    if isinstance(model, str) and model in PRESETS:
        return PRESETS[model]
    if isinstance(model, (str, Path)) and Path(model).is_file():
        return CostModel.from_json(Path(model).read_text(encoding="utf-8"))
    if isinstance(model, str):
        return look_up("model", model, PRESETS)  # which knows the nearest names
    raise InputError.of("model", expected="a preset's name, a CostModel or a file", got=repr(model))


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds, by what they are spent on.

    Parameters
    ----------
    latency, injection, transfer, handshake, merge, launch : float
        For the first byte; for each message; for each byte; for protocols; for merging what came; before anything
        moves.
    jitter : float
        By which the 99th percentile lies above; not part of `total`.
    """

    latency: float = 0.0
    injection: float = 0.0
    transfer: float = 0.0
    handshake: float = 0.0
    merge: float = 0.0
    launch: float = 0.0
    jitter: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.latency + self.injection + self.transfer + self.handshake + self.merge + self.launch

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What each round of a plan costs."""

    rounds: tuple[Cost, ...]

    @property
    def terms(self) -> Cost:
        """The terms of all rounds together."""
        return sum(self.rounds, Cost())

    @property
    def total_us(self) -> float:
        """Microseconds in all."""
        return self.terms.total


@dataclass(slots=True)
class _Load:
    """What goes through one end of a link in one round."""

    link: Link
    messages: int = 0
    nbytes: float = 0.0
    largest: int = 0

    def add(self, size: int) -> None:
        self.messages += 1
        self.nbytes += size
        self.largest = max(self.largest, size)

    def cost(self) -> Cost:
        link = self.link
        gaps, handshake = link.gap_us * self.messages, link.handshake_us(self.largest)
        return Cost(link.alpha_us, gaps, link.transfer_us(self.nbytes), handshake, jitter=link.jitter_us)


def cost(plan: Plan, payload_bytes: int, model: CostModel = DEFAULT_MODEL) -> PlanCost:
    """Say what each round of a plan takes when every state has ``payload_bytes`` bytes.

    Parameters
    ----------
    plan : Plan
    payload_bytes : int
    model : CostModel

    Examples
    --------
    >>> from treeattn.costs import PRESETS, cost
    >>> from treeattn.planner import plan_allreduce
    >>> two_hosts = plan_allreduce(["a", "a", "b", "b"])
    >>> terms = cost(two_hosts, 16640, PRESETS["nvlink-infiniband"]).terms
    >>> terms.latency, terms.injection, terms.launch
    (22.0, 3.0, 21.0)
    """
    return PlanCost(tuple(_round_cost(plan, each, payload_bytes, model) for each in plan.rounds))


def _round_cost(plan: Plan, each: Round, payload_bytes: int, model: CostModel) -> Cost:
    moving = _busiest(load.cost() for load in _loads(plan, each, payload_bytes, model))
    merged = max((len(merge.sources) for merge in each.merges), default=0) * payload_bytes
    return moving + Cost(merge=model.merge_us(merged), launch=model.round_us)


def _busiest(costs: Iterable[Cost]) -> Cost:
    return max(costs, key=lambda each: each.total, default=Cost())


def _loads(plan: Plan, each: Round, payload_bytes: int, model: CostModel) -> Iterable[_Load]:
    """Add up each rank's messages, what it sends and what it receives apart, and each host's where lanes are few."""
    loads: dict[Any, _Load] = {}
    for message in each.messages:
        link, size = model.link(plan, message, each.shared), plan.message_bytes(message.slots, payload_bytes)
        ends = [("to", message.dest)] if each.shared else [("from", message.source), ("to", message.dest)]
        for way, rank in ends:
            loads.setdefault((way, rank, id(link)), _Load(link)).add(size)
    return [*loads.values(), *_crowds(plan, loads)]


def _crowds(plan: Plan, loads: Mapping[Any, _Load]) -> list[_Load]:
    """Give the loads of hosts whose ranks have to share lanes: the messages of the busiest, the bytes of all."""
    crowds: dict[Any, _Load] = {}
    for (way, rank, link), load in loads.items():
        if load.link.lanes is not None:
            crowd = crowds.setdefault((way, plan.hosts[rank], link), _Load(load.link))
            crowd.messages, crowd.largest = max(crowd.messages, load.messages), max(crowd.largest, load.largest)
            crowd.nbytes += load.nbytes / load.link.lanes
    return list(crowds.values())
