"""What a decode step will take on hardware that is not here: memory per rank, and time between tokens with its terms.

Time is that of one token through all layers. Four terms add up to it:

- weights: every weight read once; weights are spread over the ranks of a host, by whatever the engine uses for that
  (whose own messages are the same for all algorithms, and are left out);
- kernel: keys and values read once, by each rank those that its algorithm has it read;
- wire: alpha + bytes / bandwidth per round of messages, of the level that it uses, as far as no kernel hides it;
- launch: what starting a kernel or a round costs before anything moves.

Rounds and bytes of the tree are its plan's; those of baselines are their stated formulas. Constants are those of
`treeattn.catalog`, times `EFFICIENCY`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treeattn.catalog import Device, Link, Model
from treeattn.plan import Plan
from treeattn.planner import choose_radices, plan_allreduce

__all__ = ["ALGORITHMS", "EFFICIENCY", "LAUNCH_US", "Cluster", "Demand", "Terms", "forecast", "smallest_fit"]

EFFICIENCY = 0.8
"""Share of a stated bandwidth that is reached; decode kernels and large messages come to 70 to 90 %."""

LAUNCH_US = 7.0
"""Microseconds to start a kernel or a round of messages: NCCL's src/graph/tuning.cc has a base of 6.6 to 8.4."""

USABLE = 0.9
"""Share of memory that weights and the cache may fill; the rest is for activations and the runtime."""

STATE_ITEMSIZE = 4
"""Bytes of a number of a state, float32."""

MOST_RANKS = 2**20
"""Ranks up to which a fit is looked for."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks, how they are spread over hosts, and the links between them.

    Parameters
    ----------
    device : Device
    ranks, per_host : int
    inside, between : Link
    launch_us : float
    """

    device: Device
    ranks: int
    per_host: int
    inside: Link
    between: Link
    launch_us: float = LAUNCH_US

    @property
    def hosts(self) -> tuple[str, ...]:
        """One label per rank."""
        return tuple(str(rank // self.per_host) for rank in range(self.ranks))

    @property
    def slowest(self) -> Link:
        """The link that a pattern over all ranks has to pass."""
        return self.between if self.ranks > self.per_host else self.inside

    def read_ms(self, nbytes: float) -> float:
        """Milliseconds to read bytes of device memory."""
        return nbytes / (self.device.gb_per_s * EFFICIENCY * 1e6)


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
    launch: float = 0.0
    reason: str = ""

    @property
    def total(self) -> float:
        """Time between tokens."""
        return self.weights + self.kernel + self.wire + self.launch


def smallest_fit(demand: Demand, device: Device, per_host: int) -> int | None:
    """Give the fewest ranks whose memory holds weights and cache; None if no number does."""
    room = device.memory_gb * 1e9 * USABLE
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
    >>> from treeattn.catalog import DEVICES, LINKS, MODELS
    >>> cluster = Cluster(DEVICES["h100"], 64, 8, LINKS["nvlink4"], LINKS["ib-ndr"])
    >>> demand = Demand(MODELS["llama-3-8b"], 2**20)
    >>> forecast("ring", demand, cluster).total > 8 * forecast("tree", demand, cluster).total
    True
    """
    layer = ALGORITHMS[algorithm](demand, cluster)
    if layer.reason:
        return layer
    layers = demand.model.layers
    weights = cluster.read_ms(demand.weight_bytes / min(cluster.ranks, cluster.per_host))
    return Terms(weights, layers * layer.kernel, layers * layer.wire, layers * layer.launch)


def _shard(demand: Demand, cluster: Cluster) -> float:
    """Bytes of one layer's keys and values on one rank."""
    return demand.kv_bytes / demand.model.layers / cluster.ranks


def _send_ms(link: Link, nbytes: float) -> float:
    return link.alpha_us / 1e3 + nbytes / (link.gb_per_s * EFFICIENCY * 1e6)


def _launches(cluster: Cluster, count: int) -> float:
    return count * cluster.launch_us / 1e3


def _tree(demand: Demand, cluster: Cluster) -> Terms:
    """Go through the rounds of the plan that the communicator would choose."""
    hosts, payload = cluster.hosts, demand.state_bytes
    plan = plan_allreduce(hosts, choose_radices(hosts, payload))
    links = {"inside": cluster.inside, "between": cluster.between}
    wire = sum(
        _send_ms(links[each.level], most) for each, most in zip(plan.rounds, _busiest(plan, payload), strict=True)
    )
    return Terms(0, cluster.read_ms(_shard(demand, cluster)), wire, _launches(cluster, 1 + len(plan.rounds)))


def _busiest(plan: Plan, payload: int) -> list[int]:
    """Bytes that the busiest rank sends in each round."""
    found = []
    for each in plan.rounds:
        sent: dict[int, int] = {}
        for message in each.messages:
            sent[message.source] = sent.get(message.source, 0) + plan.message_bytes(message.slots, payload)
        found.append(max(sent.values(), default=0))
    return found


def _passing(demand: Demand, cluster: Cluster, steps: int) -> Terms:
    """Work on one's own shard and on ``steps`` others that come one by one while the kernel runs."""
    shard = _shard(demand, cluster)
    kernel, hop = cluster.read_ms(shard), _send_ms(cluster.slowest, shard)
    return Terms(0, (steps + 1) * kernel, steps * max(0.0, hop - kernel), _launches(cluster, 1 + 2 * steps))


def _ring(demand: Demand, cluster: Cluster) -> Terms:
    """P - 1 steps; every rank reads all keys and values."""
    return _passing(demand, cluster, cluster.ranks - 1)


def _ring_query(demand: Demand, cluster: Cluster) -> Terms:
    """P - 1 hops of a state, as many of them between hosts as there are hosts."""
    hops, hosts = cluster.ranks - 1, -(-cluster.ranks // cluster.per_host)
    between = min(hops, hosts) if hosts > 1 else 0
    wire = between * _send_ms(cluster.between, demand.state_bytes)
    wire += (hops - between) * _send_ms(cluster.inside, demand.state_bytes)
    return Terms(0, cluster.read_ms(_shard(demand, cluster)), wire, _launches(cluster, 1 + hops))


def _dist_flash(demand: Demand, cluster: Cluster) -> Terms:
    """P // 2 shards come to the rank with the query, the states of the others meanwhile; the result goes to all.

    The other ranks have nothing to wait for, so that shards follow each other, and only the first one's latency counts.
    """
    steps, link, shard = cluster.ranks // 2, cluster.slowest, _shard(demand, cluster)
    kernel = cluster.read_ms(shard)
    follow = _send_ms(link, shard) - link.alpha_us / 1e3
    fetched = link.alpha_us / 1e3 + steps * max(0.0, follow - kernel)
    wire = (fetched + _send_ms(link, demand.state_bytes)) * (cluster.ranks > 1)
    return Terms(0, (steps + 1) * kernel, wire, _launches(cluster, 3 + 2 * steps))


def _ulysses(demand: Demand, cluster: Cluster) -> Terms:
    """Every rank gets all tokens of its heads, a KV head of its own at least."""
    model, ranks = demand.model, cluster.ranks
    if ranks > model.q_heads:
        return Terms(reason=f"{model.q_heads} heads are fewer than {ranks} ranks")
    share = max(1 / ranks, 1 / model.kv_heads)
    exchange = _send_ms(cluster.slowest, _shard(demand, cluster) * (ranks - 1) * share)
    results = _send_ms(cluster.slowest, demand.state_bytes / ranks * (ranks - 1))
    kernel = cluster.read_ms(demand.kv_bytes / model.layers * share)
    return Terms(0, kernel, (exchange + results) * (ranks > 1), _launches(cluster, 3))


def _megatron_sp(demand: Demand, cluster: Cluster) -> Terms:
    """Every rank gets, and reads, everything."""
    shard, ranks = _shard(demand, cluster), cluster.ranks
    wire = _send_ms(cluster.slowest, (ranks - 1) * shard) * (ranks > 1)
    return Terms(0, cluster.read_ms(ranks * shard), wire, _launches(cluster, 2))


ALGORITHMS: dict[str, Callable[[Demand, Cluster], Terms]] = {
    "tree": _tree,
    "ring": _ring,
    "ring_query": _ring_query,
    "dist_flash": _dist_flash,
    "ulysses": _ulysses,
    "megatron_sp": _megatron_sp,
}
"""One layer's terms, by algorithm."""
