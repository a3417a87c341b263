"""What a decode step will take on hardware that is not here: memory per rank, and time between tokens with its terms.

Time is that of one token through all layers. Five terms add up to it:

- weights: every weight read once; weights are spread over the ranks of a host, by whatever the engine uses for that
  (whose own messages are the same for all algorithms, and are left out);
- kernel: keys and values read once, by each rank those that its algorithm has it read;
- wire: latency, gaps, bytes and handshakes of the rounds of messages, as far as no kernel hides them;
- merge: states that a rank merges;
- launch: what starting a kernel or a round costs before anything moves.

What the tree sends, merges and launches is `treeattn.costs.pricing.cost` of its plan: the model by which the
communicator itself chooses. Baselines follow their stated formulas over the same links. Rates and latencies are those
of `treeattn.costs.catalog`, times `EFFICIENCY`, or measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from treeattn.costs.catalog import LINKS, Device, Link, Model
from treeattn.costs.choosing import choose_radices, estimate
from treeattn.costs.model import CostModel
from treeattn.costs.pricing import Load
from treeattn.planning.messages import count_messages, largest_message
from treeattn.planning.radices import Radices

__all__ = [
    "ALGORITHMS",
    "EFFICIENCY",
    "LAUNCH_US",
    "Cluster",
    "Demand",
    "Terms",
    "forecast",
    "smallest_fit",
    "usable_bytes",
]

Way: TypeAlias = Literal["inside", "between"]

EFFICIENCY = 0.8
"""Share of a stated bandwidth that is reached: an assumption. Decode kernels and large messages come to 70 to 90 %."""

LAUNCH_US = 7.0
"""Microseconds to start a kernel or a round of messages: NCCL's src/graph/tuning.cc has a base of 6.6 to 8.4."""

USABLE = 0.9
"""Share of memory that weights and the cache may fill; the rest is for activations and the runtime."""

STATE_ITEMSIZE = 4
"""Bytes of a number of a state, float32."""

PARTS = 2
"""Messages that a shard takes: keys and values."""

MOST_RANKS = 2**20
"""Ranks up to which a fit is looked for."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks, how they are spread over hosts, and what they reach.

    Parameters
    ----------
    ranks, per_host : int
    read_gb_per_s : float
        1e9 bytes of keys, values or weights that a rank reads per second.
    model : CostModel
        Messages, merges, and what starting a kernel or a round takes.
    """

    ranks: int
    per_host: int
    read_gb_per_s: float
    model: CostModel

    @classmethod
    def of(cls, device: Device, ranks: int, per_host: int, between: Link) -> Cluster:
        """Give what may be expected of a device and a link between hosts: `EFFICIENCY` of the stated rates."""
        read = device.gb_per_s * EFFICIENCY
        inside = LINKS[device.inside]
        model = CostModel(_sustained(inside), _sustained(between), merge_gb_per_s=read, round_us=LAUNCH_US)
        return cls(ranks, per_host, read, model)

    @property
    def hosts(self) -> tuple[str, ...]:
        """One label per rank."""
        return tuple(str(rank // self.per_host) for rank in range(self.ranks))

    @property
    def host_count(self) -> int:
        """Number of hosts."""
        return -(-self.ranks // self.per_host)

    @property
    def slowest(self) -> Way:
        """The way that a pattern over all ranks has to pass."""
        return "between" if self.host_count > 1 else "inside"

    def hop_ms(self, way: Way, nbytes: float, messages: int = 1, *, uncut: bool = False) -> float:
        """Milliseconds until a rank's ``messages``, of ``nbytes`` in all, have reached another rank.

        A library's own messages are ``uncut``; ours go between hosts in parts.
        """
        link, load = self.model.link(way), _load(nbytes, messages, way == "between" and not uncut)
        return (link.alpha_us + load.us(link)) / 1e3

    def read_ms(self, nbytes: float) -> float:
        """Milliseconds to read bytes of device memory."""
        return nbytes / (self.read_gb_per_s * 1e6)

    def launch_ms(self, count: int) -> float:
        """Milliseconds to start so many kernels and rounds."""
        return count * self.model.round_us / 1e3

    def radices(self, payload_bytes: int) -> Radices:
        """Give the plan that the communicator would choose here."""
        shared = self.model.window is not None
        return choose_radices(self.hosts, payload_bytes, shared=shared, model=self.model)


def _sustained(link: Link) -> Link:
    return replace(link, gb_per_s=link.gb_per_s * EFFICIENCY)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is served.

    Parameters
    ----------
    model : Model
    tokens, batch : int
        Context, and rows that are decoded together.
    kv_itemsize, weight_itemsize : int
        Bytes of a stored number of K and V, and of a weight.
    """

    model: Model
    tokens: int
    batch: int = 1
    kv_itemsize: int = 2
    weight_itemsize: int = 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self.model.kv_bytes(self.tokens, self.batch, self.kv_itemsize)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.model.parameters * self.weight_itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state."""
        return self.batch * self.model.q_heads * (self.model.head_dim + 2) * STATE_ITEMSIZE

    def rank_bytes(self, ranks: int, per_host: int) -> float:
        """Bytes of weights and cache that a rank holds."""
        return self.weight_bytes / min(ranks, per_host) + self.kv_bytes / ranks


@dataclass(frozen=True, slots=True)
class Terms:
    """Milliseconds of one token, by what they are spent on; `reason` says why an algorithm can't serve this at all."""

    weights: float = 0.0
    kernel: float = 0.0
    wire: float = 0.0
    merge: float = 0.0
    launch: float = 0.0
    reason: str = ""

    @property
    def total(self) -> float:
        """Time between tokens."""
        return self.weights + self.kernel + self.wire + self.merge + self.launch

    def times(self, layers: int) -> Terms:
        """Give the terms of so many layers."""
        one = self.weights, self.kernel, self.wire, self.merge, self.launch
        weights, kernel, wire, merge, launch = (layers * each for each in one)
        return Terms(weights, kernel, wire, merge, launch)


def usable_bytes(device: Device) -> float:
    """Give the bytes of a device's memory that weights and the cache may fill."""
    return device.memory_gb * 1e9 * USABLE


def smallest_fit(demand: Demand, device: Device, per_host: int) -> int | None:
    """Give the fewest ranks whose memory holds weights and cache; None if no number does."""
    room = usable_bytes(device)
    if demand.weight_bytes / per_host >= room:
        return None
    low, high = 1, MOST_RANKS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if demand.rank_bytes(middle, per_host) <= room else (middle + 1, high)
    return low


def forecast(algorithm: str, demand: Demand, cluster: Cluster) -> Terms:
    """Give the terms of one token by an algorithm of `ALGORITHMS`.

    Examples
    --------
    >>> from treeattn.costs.catalog import DEVICES, LINKS, MODELS
    >>> cluster = Cluster.of(DEVICES["h100"], 64, 8, LINKS["ib-ndr"])
    >>> demand = Demand(MODELS["llama-3-8b"], 2**20)
    >>> forecast("ring", demand, cluster).total > 8 * forecast("tree", demand, cluster).total
    True
    """
    layer = ALGORITHMS[algorithm](demand, cluster)
    if layer.reason:
        return layer
    weights = cluster.read_ms(demand.weight_bytes / min(cluster.ranks, cluster.per_host))
    return replace(layer.times(demand.model.layers), weights=weights)


def _shard(demand: Demand, cluster: Cluster) -> float:
    """Bytes of one layer's keys and values on one rank."""
    return demand.kv_bytes / demand.model.layers / cluster.ranks


def _load(nbytes: float, messages: int, between: bool) -> Load:
    """Give what ``messages`` of one size, and ``nbytes`` in all, are once they are cut."""
    each = math.ceil(nbytes / max(messages, 1))
    return Load(messages * count_messages(each, between=between), nbytes, largest_message(each, between=between))


def _exchange_ms(cluster: Cluster, nbytes: float, messages: int) -> float:
    """Milliseconds of a round in which every rank sends so much, to all others, at the same time."""
    link, load = cluster.model.link(cluster.slowest), _load(nbytes, messages, cluster.slowest == "between")
    crowd = 1.0 if link.lanes is None else max(1.0, min(cluster.ranks, cluster.per_host) / link.lanes)
    return (link.alpha_us + load._replace(nbytes=nbytes * crowd).us(link)) / 1e3 * (cluster.ranks > 1)


def _merge_ms(demand: Demand, cluster: Cluster, states: int) -> float:
    return cluster.model.merge_us(states * demand.state_bytes) / 1e3


def _tree(demand: Demand, cluster: Cluster) -> Terms:
    """Take the plan that the communicator would choose, at the cost by which it would."""
    payload = demand.state_bytes
    terms = estimate(cluster.hosts, cluster.radices(payload), payload, cluster.model)
    wire = terms.latency + terms.injection + terms.transfer + terms.handshake
    launch = cluster.launch_ms(1) + terms.launch / 1e3
    return Terms(0, cluster.read_ms(_shard(demand, cluster)), wire / 1e3, terms.merge / 1e3, launch)


def _ring(demand: Demand, cluster: Cluster) -> Terms:
    """P - 1 steps, in each of which a shard passes on while a kernel runs; every rank reads all keys and values."""
    steps, shard = cluster.ranks - 1, _shard(demand, cluster)
    kernel, hop = cluster.read_ms(shard), cluster.hop_ms(cluster.slowest, shard, PARTS)
    merge = _merge_ms(demand, cluster, steps + 1) * (steps > 0)
    return Terms(0, (steps + 1) * kernel, steps * max(0.0, hop - kernel), merge, cluster.launch_ms(1 + 2 * steps))


def _ring_query(demand: Demand, cluster: Cluster) -> Terms:
    """P - 1 hops of a state, of which as many between hosts as there are hosts: a state crosses wherever it began."""
    hops, state = cluster.ranks - 1, demand.state_bytes
    between = min(hops, cluster.host_count) if cluster.host_count > 1 else 0
    wire = between * cluster.hop_ms("between", state) + (hops - between) * cluster.hop_ms("inside", state)
    merge = _merge_ms(demand, cluster, 2 * hops)
    return Terms(0, cluster.read_ms(_shard(demand, cluster)), wire, merge, cluster.launch_ms(1 + hops))


def _dist_flash(demand: Demand, cluster: Cluster) -> Terms:
    """P // 2 shards come to the rank with the query, the states of the others meanwhile; the result goes to all.

    The other ranks have nothing to wait for, so that shards follow each other, and only the first one's latency counts.
    """
    steps, way, shard = cluster.ranks // 2, cluster.slowest, _shard(demand, cluster)
    kernel, first = cluster.read_ms(shard), cluster.model.link(way).alpha_us / 1e3
    fetched = first + steps * max(0.0, cluster.hop_ms(way, shard, PARTS) - first - kernel)
    wire = (fetched + cluster.hop_ms(way, demand.state_bytes)) * (cluster.ranks > 1)
    merge = _merge_ms(demand, cluster, 4 * steps)
    return Terms(0, (steps + 1) * kernel, wire, merge, cluster.launch_ms(3 + 2 * steps))


def _ulysses(demand: Demand, cluster: Cluster) -> Terms:
    """Every rank gets all tokens of its heads, a KV head of its own at least."""
    model, ranks = demand.model, cluster.ranks
    if ranks > model.q_heads:
        return Terms(reason=f"{model.q_heads} heads are fewer than {ranks} ranks")
    share, others = max(1 / ranks, 1 / model.kv_heads), ranks - 1
    exchange = _exchange_ms(cluster, _shard(demand, cluster) * others * share, PARTS * others)
    results = _exchange_ms(cluster, demand.state_bytes / ranks * others, others)
    kernel = cluster.read_ms(demand.kv_bytes / model.layers * share)
    return Terms(0, kernel, exchange + results, 0, cluster.launch_ms(3))


def _megatron_sp(demand: Demand, cluster: Cluster) -> Terms:
    """Every rank gets, and reads, everything."""
    shard, ranks = _shard(demand, cluster), cluster.ranks
    wire = _exchange_ms(cluster, (ranks - 1) * shard, PARTS * (ranks - 1))
    merge = _merge_ms(demand, cluster, ranks) * (ranks > 1)
    return Terms(0, cluster.read_ms(ranks * shard), wire, merge, cluster.launch_ms(2))


def _gather(demand: Demand, cluster: Cluster) -> Terms:
    """Every rank gets every state, and merges them all."""
    state, others = demand.state_bytes, cluster.ranks - 1
    merge = _merge_ms(demand, cluster, cluster.ranks) * (others > 0)
    wire = _exchange_ms(cluster, state * others, others)
    return Terms(0, cluster.read_ms(_shard(demand, cluster)), wire, merge, cluster.launch_ms(2))


def _allreduce3(demand: Demand, cluster: Cluster) -> Terms:
    """Three all-reduces by a library: up and down a binomial tree, which knows of no hosts where it is not told.

    The first and the last carry a number per row, the middle one the numerators.
    """
    rounds = (cluster.ranks - 1).bit_length()
    between = (cluster.host_count - 1).bit_length()
    width = demand.model.head_dim
    sizes = [demand.state_bytes * share / (width + 2) for share in (1, width, 1)]
    hops: tuple[tuple[Way, int], ...] = (("between", between), ("inside", rounds - between))
    wire = 2 * sum(count * cluster.hop_ms(way, size, uncut=True) for size in sizes for way, count in hops)
    merge = _merge_ms(demand, cluster, 2 * rounds)
    return Terms(0, cluster.read_ms(_shard(demand, cluster)), wire, merge, cluster.launch_ms(4))


ALGORITHMS: dict[str, Callable[[Demand, Cluster], Terms]] = {
    "tree": _tree,
    "ring": _ring,
    "ring_query": _ring_query,
    "dist_flash": _dist_flash,
    "ulysses": _ulysses,
    "megatron_sp": _megatron_sp,
    "allreduce3": _allreduce3,
    "gather": _gather,
}
"""One layer's terms, by algorithm."""
