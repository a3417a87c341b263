"""What a plan will take, before anybody follows it: the terms of each round, and in all. Pure; sends nothing.

A round takes as long as its busiest rank. That one pays, once, its link's latency; for each message that it sends or
receives an injection gap; for each byte the link's rate, both ways side by side; for a message over a protocol's limit
a handshake; then what it merges. In shared memory a rank publishes once, so that only what it reads counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from treeattn.catalog import LINKS, Link, check_amount, look_up
from treeattn.errors import InputError
from treeattn.plan import Message, Plan, Round
from treeattn.saved import loaded, text_of
from treeattn.topology import rack_of

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
        Messages between hosts of one rack; as ``between`` by default.
    window : Link, optional
        Memory that the ranks of a host share; as ``inside`` by default.
    merge_gb_per_s : float
        States that one rank merges, read once each: the inverse of gamma.
    round_us : float
        What a round costs a rank before anything moves.
    call_us : float
        What a call costs a rank besides its rounds, such as packing its state and unpacking the result.
    piece_us : float
        The same, for each piece but one into which several leaders cut a state.

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
    call_us: float = 0.0
    piece_us: float = 0.0

    def __post_init__(self) -> None:
        for name in _WAYS:
            link, optional = getattr(self, name), name in ("rack", "window")
            if not isinstance(link, Link) and not (optional and link is None):
                raise InputError.of(name, expected="a Link", got=repr(link))
        check_amount("merge_gb_per_s", self.merge_gb_per_s, above_zero=True)
        for name in ("round_us", "call_us", "piece_us"):
            check_amount(name, getattr(self, name))

    def link(self, way: str) -> Link:
        """Give the link of a way: "inside", "window", "rack" or "between"."""
        found: Link | None = getattr(self, way)
        return found or (self.inside if way == "window" else self.between)

    def merge_us(self, nbytes: float) -> float:
        """Microseconds to merge states of ``nbytes`` in all."""
        return nbytes / (self.merge_gb_per_s * 1e3)

    def call_cost(self, pieces: int) -> Cost:
        """Give what a call costs besides its rounds, where a state is cut into so many pieces."""
        return Cost(launch=self.call_us + (pieces - 1) * self.piece_us)

    @property
    def digest(self) -> str:
        """A short text that is equal for equal models only, by which ranks compare theirs."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

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
        expected = "JSON as CostModel.to_json writes it"
        found = loaded("model", text, expected)
        try:
            read: dict[str, Any] = {
                name: _link(value) if name in _WAYS else float(value) for name, value in found.items()
            }
            return cls(**read)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise InputError.of("model", expected=expected, got=str(error)) from None


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
    text = text_of("model", model)
    if text is not None:
        return CostModel.from_json(text)
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
        moves, and around it all.
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
    """What each round of a plan costs, and a call besides."""

    rounds: tuple[Cost, ...]
    call: Cost = Cost()

    @property
    def terms(self) -> Cost:
        """All terms together."""
        return sum(self.rounds, self.call)

    @property
    def total_us(self) -> float:
        """Microseconds in all."""
        return self.terms.total


@dataclass(slots=True)
class _Load:
    """What goes one way through one rank's end of a link in one round."""

    link: Link
    messages: float = 0
    nbytes: float = 0.0
    largest: int = 0

    def add(self, size: int) -> None:
        self.messages += 1
        self.nbytes += size
        if size > self.largest:
            self.largest = size


def cost(plan: Plan, payload_bytes: int, model: CostModel = DEFAULT_MODEL) -> PlanCost:
    """Say what a plan takes, each round of it and a call, when every state has ``payload_bytes`` bytes.

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
    (22.0, 4.0, 21.0)
    """
    priced = _Pricing(plan, plan.piece_bytes(payload_bytes), model)
    rounds = tuple(priced.round(each) for each in plan.rounds)
    return PlanCost(rounds, model.call_cost(plan.pieces) if rounds else Cost())


class _Pricing:
    """Prices one plan's rounds at one payload."""

    def __init__(self, plan: Plan, pieces: tuple[int, ...], model: CostModel) -> None:
        self._plan, self._pieces, self._model = plan, pieces, model
        self._hosts, self._racks = plan.hosts, [rack_of(host) for host in plan.hosts]

    def round(self, each: Round) -> Cost:
        loads = self._loads(each)
        moving = [_moving(load, loads.get((not out, rank, way))) for (out, rank, way), load in loads.items()]
        merged = [0] * self._plan.size
        for merge in each.merges:
            merged[merge.rank] += len(merge.sources) * self._pieces[merge.piece]
        busiest = max([*moving, *self._crowds(loads)], key=lambda terms: terms.total, default=Cost())
        return busiest + Cost(merge=self._model.merge_us(max(merged)), launch=self._model.round_us)

    def _loads(self, each: Round) -> dict[tuple[bool, int, str], _Load]:
        """Add up what each rank sends, and what it receives; by (whether it sends, rank, way)."""
        loads: dict[tuple[bool, int, str], _Load] = {}
        sizes: dict[tuple[int, int], int] = {}
        for message in each.messages:
            kind, way = (message.slots, message.piece), self._way(message, each.shared)
            if kind not in sizes:
                sizes[kind] = self._plan.message_bytes(message.slots, self._pieces[message.piece])
            ends = ((False, message.dest),) if each.shared else ((True, message.source), (False, message.dest))
            for out, rank in ends:
                load = loads.get((out, rank, way))
                if load is None:
                    load = loads[out, rank, way] = _Load(self._model.link(way))
                load.add(sizes[kind])
        return loads

    def _way(self, message: Message, shared: bool) -> str:
        source, dest = message.source, message.dest
        if shared:
            return "window"
        if self._hosts[source] == self._hosts[dest]:
            return "inside"
        return "rack" if self._racks[source] == self._racks[dest] else "between"

    def _crowds(self, loads: Mapping[tuple[bool, int, str], _Load]) -> list[Cost]:
        """Price hosts whose ranks have to share lanes."""
        crowds: dict[tuple[bool, str, str], _Load] = {}
        for (out, rank, way), load in loads.items():
            if load.link.lanes is not None:
                crowd = crowds.setdefault((out, self._hosts[rank], way), _Load(load.link))
                crowd.largest = max(crowd.largest, load.largest)
                crowd.messages += load.messages / load.link.lanes
                crowd.nbytes += load.nbytes / load.link.lanes
        return [_moving(crowd, crowds.get((not out, host, way))) for (out, host, way), crowd in crowds.items()]


def _moving(load: _Load, back: _Load | None) -> Cost:
    """Price a load; the rank has a call for each message of the other way too, whose bytes do not hinder these."""
    link, messages = load.link, load.messages + (0 if back is None else back.messages)
    return Cost(
        latency=link.alpha_us,
        injection=link.gap_us * messages,
        transfer=link.transfer_us(load.nbytes),
        handshake=link.handshake_us(load.largest),
        jitter=link.jitter_us,
    )
