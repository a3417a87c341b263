"""A cost model: what messages, shared memory and merges take on one machine; `pricing` prices plans by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from treeattn.costs.catalog import LINKS, Link, check_amount, look_up
from treeattn.errors import InputError
from treeattn.planning.saved import loaded, no_file, text_of

__all__ = ["DEFAULT_MODEL", "PRESETS", "Cost", "CostModel", "read_model"]


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
    >>> from treeattn.costs.model import PRESETS, CostModel
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
"""Cost models of common machines. Links are those of `treeattn.costs.catalog`, where their sources are.

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
    hint, expected = no_file(model), f"one of {', '.join(PRESETS)}, a CostModel or a file"
    if isinstance(model, str) and not hint:
        return look_up("model", model, PRESETS)  # which knows the nearest names
    raise InputError.of("model", expected=expected, got=repr(model), hint=hint)


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
