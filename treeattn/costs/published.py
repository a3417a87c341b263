"""Times that others have published, or that were measured, and how far the forecast follows them.

`PAPER` holds Tables 1 and 2 of arXiv 2408.04093 (v4): seconds for a prompt and ten tokens, by tree and by ring. Its
ring rows cost what keys and values *of all query heads* take on the wire: 10 tokens x layers x (ranks - 1) hops of
2·b·t·d elements, with d the hidden width, as the paper's own formula has it. So `paper_seconds` forecasts with as many
KV heads as query heads; with the KV heads of the models alone nothing fits. That was seen in the table.

Three numbers are no constants of nature, and have to be fitted: see `Assumptions`. `CHOSEN` were picked with all twelve
rows in view, for each machine apart, so that agreement there is a fit. `fitted` picks them from one machine's rows
alone; the rows of the other machines are then predicted, and `error` tells how well. `benchmarks/published.py` prints
both.

Of runs that `benchmarks/netlab.py` has measured, `measured_step` forecasts every algorithm's step from what a lone
message and a lone kernel took there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from treeattn.costs.catalog import DEVICES, LINKS, MODELS, Link, Model
from treeattn.costs.forecast import Cluster, Demand, forecast
from treeattn.costs.model import DEFAULT_MODEL, CostModel

__all__ = [
    "CHOSEN",
    "GUIDE_MS",
    "GUIDE_RANKS",
    "GUIDE_TOKENS",
    "PAPER",
    "Assumptions",
    "Published",
    "error",
    "fitted",
    "measured_step",
    "paper_seconds",
]

NEW_TOKENS = 10

STAGED = "pcie4-staged"
"""Link of the catalog whose bandwidth comes from these very rows."""

STAGED_GB_PER_S = 16.0
"""What would be expected without them: PCIe 4.0 x16 carries 32 GB/s, and through host memory it is crossed twice."""


@dataclass(frozen=True, slots=True)
class Published:
    """One row: seconds for a prompt of ``tokens`` tokens and ten more.

    Parameters
    ----------
    model, device : str
        Names of the catalog.
    ranks, tokens : int
    tree, ring : float
        Seconds.
    """

    model: str
    device: str
    ranks: int
    tokens: int
    tree: float
    ring: float

    @property
    def ratio(self) -> float:
        """How many times faster the tree was."""
        return self.ring / self.tree


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What no datasheet says of the paper's runs.

    Parameters
    ----------
    utilisation : float
        Share of the stated matrix rate at which the prompt runs.
    hop_us : float
        Microseconds of software per hop of the ring.
    staged_gb_per_s : float
        1e9 bytes per second between two cards without peer access.
    """

    utilisation: float
    hop_us: float
    staged_gb_per_s: float = STAGED_GB_PER_S


def _rows(model: str, device: str, ranks: int, rows: list[tuple[int, float, float]]) -> list[Published]:
    return [Published(model, device, ranks, tokens, tree, ring) for tokens, tree, ring in rows]


PAPER = (
    *_rows(
        "llama-3-8b",
        "h100",
        8,
        [(32_000, 0.60, 2.57), (64_000, 1.08, 4.42), (128_000, 2.68, 6.38), (256_000, 2.89, 8.19)],
    ),
    *_rows(
        "llama-3-8b",
        "mi300x",
        4,
        [(32_000, 1.05, 3.57), (64_000, 2.36, 7.33), (128_000, 6.43, 16.40), (256_000, 15.30, 35.12)],
    ),
    *_rows(
        "llama-3.2-1b",
        "rtx4090",
        2,
        [(8_000, 0.34, 1.38), (16_000, 0.58, 2.77), (20_000, 0.74, 3.47), (32_000, 1.01, 5.45)],
    ),
)
"""The paper's Tables 1 and 2."""

CHOSEN = {
    "h100": Assumptions(0.25, 700.0),
    "mi300x": Assumptions(0.25, 0.0),
    "rtx4090": Assumptions(0.25, 0.0, LINKS[STAGED].gb_per_s),
}
"""Picked with all rows in view: shares of 0.2, 0.25, 0.3, 0.4 and 0.5 and hops of 0, 0.3 and 0.7 ms were tried."""

GUIDE_RANKS = (8, 16, 32, 64, 128)
GUIDE_TOKENS = 512_000
GUIDE_MS = {
    "ring": (38.4, 74.2, 138.6, 215.0, 382.4),
    "dist_flash": (31.2, 56.4, 88.5, 110.2, 195.0),
    "tree": (18.5, 21.2, 23.8, 26.4, 31.0),
}
"""A guide's claim: time between tokens for 512k tokens by number of GPUs. The paper has no such table."""


def paper_seconds(row: Published, assumed: Assumptions) -> tuple[float, float]:
    """Forecast the seconds of a row, prompt included, by tree and by ring."""
    prompt = _prompt_flops(row) / (row.ranks * DEVICES[row.device].tflops * 1e12 * assumed.utilisation)
    tree, ring = _decode_seconds(row, assumed.hop_us, assumed.staged_gb_per_s)
    return prompt + tree, prompt + ring


def error(row: Published, assumed: Assumptions) -> float:
    """Factor by which the forecast of ring / tree is off; over 1 is too much for the tree."""
    tree, ring = paper_seconds(row, assumed)
    return ring / tree / row.ratio


def fitted(rows: Sequence[Published]) -> Assumptions:
    """Give the assumptions under which the seconds of ``rows`` come out best, least squares of their logarithms."""
    shares, hops = (n / 100 for n in range(10, 81)), (float(us) for us in range(0, 1501, 50))
    staged = [n / 4 for n in range(8, 81)] if any(_link(row) == STAGED for row in rows) else [STAGED_GB_PER_S]
    return min((Assumptions(*each) for each in product(shares, hops, staged)), key=lambda each: _misfit(rows, each))


def _misfit(rows: Sequence[Published], assumed: Assumptions) -> float:
    pairs = ((row, paper_seconds(row, assumed)) for row in rows)
    return sum(math.log(tree / row.tree) ** 2 + math.log(ring / row.ring) ** 2 for row, (tree, ring) in pairs)


def _link(row: Published) -> str:
    return DEVICES[row.device].inside


def _prompt_flops(row: Published) -> float:
    """Two products per parameter and token, and half of all pairs of tokens in every layer."""
    model = MODELS[row.model]
    return 2 * model.parameters * row.tokens + 2 * model.layers * row.tokens**2 * model.q_heads * model.head_dim


@cache
def _decode_seconds(row: Published, hop_us: float, staged_gb_per_s: float) -> tuple[float, float]:
    """Seconds of the new tokens, by tree and by ring."""
    model, device = MODELS[row.model], DEVICES[row.device]
    demand = Demand(replace(model, kv_heads=model.q_heads), row.tokens)
    cluster = Cluster.of(device, row.ranks, row.ranks, LINKS[device.inside])
    inside = cluster.model.inside
    if device.inside == STAGED:
        inside = replace(inside, gb_per_s=inside.gb_per_s * staged_gb_per_s / LINKS[STAGED].gb_per_s)
    with_hops = replace(cluster.model, inside=replace(inside, alpha_us=inside.alpha_us + hop_us))
    tree = forecast("tree", demand, replace(cluster, model=replace(cluster.model, inside=inside)))
    ring = forecast("ring", demand, replace(cluster, model=with_hops))
    return NEW_TOKENS * tree.total / 1e3, NEW_TOKENS * ring.total / 1e3


def measured_step(run: Mapping[str, Any], algorithm: str) -> float:
    """Forecast the milliseconds of an algorithm's step in a run of `benchmarks/netlab.py`.

    Parameters
    ----------
    run : mapping
        One of the ``runs`` of ``benchmarks/netlab.json``; its ``step_ms`` is not looked at.
    algorithm : str
    """
    shape, ranks = run["shape"], run["ranks"]
    model = Model(1, shape["q_heads"], shape["kv_heads"], shape["head_dim"], 0.0)
    demand = Demand(model, shape["tokens"], kv_itemsize=4)
    kernel = {int(tokens): ms for tokens, ms in run["kernel_ms"].items()}
    reading = max(kernel[shape["tokens"] // ranks] - kernel[1], 1e-3)
    link = _measured_link({int(nbytes): ms for nbytes, ms in run["one_way_ms"].items()})
    costs = CostModel(link, link, merge_gb_per_s=DEFAULT_MODEL.merge_gb_per_s, round_us=DEFAULT_MODEL.round_us)
    cluster = Cluster(ranks, ranks // run["hosts"], demand.kv_bytes / ranks / reading / 1e6, costs)
    start: float = kernel[1]
    return start + forecast(algorithm, demand, cluster).total


def _measured_link(one_way: Mapping[int, float]) -> Link:
    """Take latency from the shortest message, bandwidth from the two between, and a handshake from the longest."""
    short, longer, parts, whole = sorted(one_way)
    us_per_byte = 1e3 * (one_way[parts] - one_way[longer]) / (parts - longer)
    handshake = 1e3 * (one_way[whole] - one_way[parts]) - (whole - parts) * us_per_byte
    steps = ((TCP_EAGER_BYTES, max(0.0, handshake)),)
    return Link(1e3 * one_way[short], 1e-3 / us_per_byte, "measured", 1.0, steps)


TCP_EAGER_BYTES = 65536
"""What Open MPI sends over TCP before it asks, btl_tcp_eager_limit."""
