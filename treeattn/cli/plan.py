"""``treeattn plan``: what a cluster holds and how fast it would decode, before it is bought."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from treeattn.cli.options import Whole, json_option, read_tokens, suggest
from treeattn.cli.output import console, counts, escape, print_rows, print_table, size, write_json
from treeattn.costs.catalog import DEVICES, LINKS, MODELS, Device, Link, Model, look_up
from treeattn.costs.forecast import LAUNCH_US, Cluster, Demand, Terms, forecast, smallest_fit, usable_bytes
from treeattn.costs.published import GUIDE_MS, GUIDE_RANKS, GUIDE_TOKENS
from treeattn.errors import InputError
from treeattn.planning.planner import plan_allreduce

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plan"]

STORED = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
"""Types that a cache may be stored in, and their bytes."""

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)

SHOWN = ("tree", "ring", "ring_query", "dist_flash", "ulysses", "megatron_sp")

TERMS = ("total", "weights", "kernel", "wire", "merge", "launch")

EXAMPLES = """\b
Examples:
  treeattn plan --model llama-3-8b --context 1M --gpu h100 --nodes 8
  treeattn plan --model llama-3-70b --context 128k --gpu mi300x --link ethernet-400g --price 2.5
  treeattn plan --shape 32,32,8,128,8 --context 5.12M --gpu rtx5090 --nodes 16 --gpus-per-node 4 --json -
"""


@dataclass(frozen=True)
class Order:
    """What was asked for: a demand, and the hardware to meet it."""

    demand: Demand
    device: Device
    nodes: int
    per_node: int
    link: Link
    price: float | None

    @property
    def ranks(self) -> int:
        """All devices."""
        return self.nodes * self.per_node

    def cluster(self, ranks: int) -> Cluster:
        """Give that many ranks of this hardware."""
        return Cluster.of(self.device, ranks, self.per_node, self.link)

    def cost(self, ranks: int, terms: Terms) -> float | None:
        """Price of a million tokens."""
        if self.price is None or terms.reason:
            return None
        return self.price * ranks * terms.total / 3.6e6 * 1e6 / self.demand.batch


def read_shape(ctx: click.Context, param: click.Parameter, value: str | None) -> Model | None:
    """Read LAYERS,Q_HEADS,KV_HEADS,WIDTH,PARAMETERS, the last in 1e9."""
    if value is None:
        return None
    try:
        *numbers, parameters = value.split(",")
        layers, q_heads, kv_heads, width = map(int, numbers)
        model = Model(layers, q_heads, kv_heads, width, float(parameters) * 1e9)
    except ValueError:
        raise click.BadParameter(f"expected LAYERS,Q_HEADS,KV_HEADS,WIDTH,BILLIONS, got {value!r}") from None
    if min(layers, q_heads, kv_heads, width) < 1 or q_heads % kv_heads or not model.parameters >= 0:
        raise click.BadParameter(f"expected positive numbers, and KV heads that divide the query heads, got {value!r}")
    return model


def _named_option(flag: str, default: str, names: Iterable[str], text: str) -> Callable[[Any], Any]:
    """Make an option that takes one of ``names``, which its help lists and shells complete."""
    about = text.format(", ".join(names))
    return click.option(flag, default=default, show_default=True, help=about, shell_complete=suggest(names))


@click.command(epilog=EXAMPLES)
@_named_option("--model", "llama-3-8b", MODELS, "One of {}.")
@click.option(
    "--shape",
    callback=read_shape,
    metavar="L,HQ,HKV,D,B",
    help="Instead of a model: layers, query heads, KV heads, width of a head, billions of parameters.",
)
@click.option("--context", "tokens", callback=read_tokens, default="1M", show_default=True, help="Tokens; k is 1024.")
@click.option("--batch", type=Whole(1), default=1, show_default=True, help="Rows that are decoded together.")
@click.option("--dtype", type=click.Choice(list(STORED)), default="bfloat16", show_default=True, help="Of the cache.")
@_named_option("--gpu", "h100", DEVICES, "One of {}.")
@click.option("--nodes", type=Whole(1), default=1, show_default=True)
@click.option("--gpus-per-node", type=Whole(1), default=8, show_default=True)
@_named_option("--link", "ib-ndr", LINKS, "Between nodes, one of {}.")
@click.option("--price", type=click.FloatRange(0), help="Of a GPU and hour; shows the cost of a million tokens.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback when something fails.")
@json_option
def plan(
    *,
    model: str,
    shape: Model | None,
    tokens: int,
    batch: int,
    dtype: str,
    gpu: str,
    nodes: int,
    gpus_per_node: int,
    link: str,
    price: float | None,
    json_file: str | None,
) -> int:
    """Forecast memory and time on hardware that is not here.

    The time is that between tokens. Nothing is run or measured: constants and their sources are in
    treeattn/costs/catalog.py, the model in treeattn/costs/forecast.py. Weights are bfloat16, spread over the GPUs of a
    node.
    """
    demand = Demand(shape or look_up("model", model, MODELS), tokens, batch, STORED[dtype])
    device, between = look_up("gpu", gpu, DEVICES), look_up("link", link, LINKS)
    order = Order(demand, device, nodes, gpus_per_node, between, price)
    _refuse_what_does_not_fit(order)
    names = {"model": model if shape is None else "custom", "gpu": gpu, "link": link, "dtype": dtype}
    results = {**names, "order": asdict(order), **_capacity(order), **_times(order), "guide": _guide(order)}
    _show(console(json_file), results, order)
    write_json(json_file, results)
    return 0


def _refuse_what_does_not_fit(order: Order) -> None:
    need = smallest_fit(order.demand, order.device, order.per_node)
    if need is None:
        least = int(order.demand.weight_bytes / usable_bytes(order.device)) + 1
        weights = size(order.demand.weight_bytes)
        raise InputError.of("gpus-per-node", expected=f"at least {least}, for {weights} of weights", got=order.per_node)
    if need > order.ranks:
        nodes = -(-need // order.per_node)
        expected = f"at least {nodes}, since weights and {size(order.demand.kv_bytes)} of cache need {need} ranks"
        raise InputError.of("nodes", expected=expected, got=order.nodes)


def _capacity(order: Order) -> dict[str, Any]:
    """Say what the cache takes, by type, and the tree that its states would go through."""
    cache = {}
    for name, itemsize in STORED.items():
        demand = replace(order.demand, kv_itemsize=itemsize)
        fit = smallest_fit(demand, order.device, order.per_node)
        cache[name] = {"bytes": demand.kv_bytes, "bytes_per_rank": demand.kv_bytes / order.ranks, "smallest_fit": fit}
    cluster, payload = order.cluster(order.ranks), order.demand.state_bytes
    return {"cache": cache, "plan": str(plan_allreduce(cluster.hosts, cluster.radices(payload)))}


def _times(order: Order) -> dict[str, Any]:
    """Forecast every algorithm on 8 to 1024 ranks; smaller clusters of whole nodes only where they fit."""
    rows = []
    for ranks in sorted({*RANKS, order.ranks}):
        fits = order.demand.rank_bytes(ranks, order.per_node) <= usable_bytes(order.device)
        for name in SHOWN:
            terms = forecast(name, order.demand, order.cluster(ranks))
            cost = order.cost(ranks, terms)
            rows.append(
                {"ranks": ranks, "algorithm": name, "fits": fits, **asdict(terms), "total": terms.total, "cost": cost}
            )
    return {"times_ms": rows}


def _guide(order: Order) -> dict[str, Any]:
    """Put the guide's claim beside a forecast of the same context on this hardware."""
    demand = replace(order.demand, tokens=GUIDE_TOKENS, batch=1)
    own = {name: [forecast(name, demand, order.cluster(ranks)).total for ranks in GUIDE_RANKS] for name in GUIDE_MS}
    return {"tokens": GUIDE_TOKENS, "ranks": GUIDE_RANKS, "claimed_ms": GUIDE_MS, "forecast_ms": own}


def _show(to: Console, results: dict[str, Any], order: Order) -> None:
    print_rows(to, "treeattn plan", _summary(results, order))
    _print_times(to, results["times_ms"], order)
    _print_guide(to, results["guide"])
    names = results["gpu"], order.device.inside, results["link"]
    sources = order.device.source, LINKS[order.device.inside].source, order.link.source
    for name, source in dict(zip(names, sources, strict=True)).items():
        to.print(f"source of {name}: {source}", markup=False)


def _summary(results: dict[str, Any], order: Order) -> list[tuple[str, str]]:
    demand = order.demand
    need = f"{counts(demand.tokens)} tokens, batch {demand.batch}, {results['model']}"
    rows = [("serves", f"{need}: {size(demand.weight_bytes)} of bfloat16 weights")]
    nodes = "1 node" if order.nodes == 1 else f"{order.nodes} nodes"
    rows.append(("hardware", f"{nodes} of {order.per_node} {results['gpu']}, {results['link']} between"))
    for name, found in results["cache"].items():
        fit = "none fits" if found["smallest_fit"] is None else f"fits from {counts(found['smallest_fit'])} ranks"
        rows.append((f"cache in {name}", f"{size(found['bytes'])}, {size(found['bytes_per_rank'])} per rank; {fit}"))
    return [*rows, ("tree", escape(results["plan"]))]


def _print_times(to: Console, rows: list[dict[str, Any]], order: Order) -> None:
    from rich import box
    from rich.table import Table

    title = f"time between tokens, ms, forecast ({LAUNCH_US:g} us per launch)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    costs = () if order.price is None else ("cost of 1M",)
    for column in (*TERMS, *costs):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, bool(costs)), end_section=row["algorithm"] == SHOWN[-1])
    print_table(to, table)
    for text in dict.fromkeys(f"{row['algorithm']}: {row['reason']}" for row in rows if row["reason"]):
        to.print(text)
    if any(not row["fits"] for row in rows):
        to.print("*: weights and cache do not fit")


def _cells(row: dict[str, Any], priced: bool) -> list[str]:
    ranks = f"{row['ranks']}{'' if row['fits'] else '*'}" if row["algorithm"] == "tree" else ""
    if row["reason"]:
        return [ranks, row["algorithm"], "-"]
    times = [_number(row[name]) for name in TERMS]
    return [ranks, row["algorithm"], *times, *([_number(row["cost"])] if priced else [])]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _print_guide(to: Console, guide: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    title = (
        f"{counts(guide['tokens'])} tokens, ms: a guide's claim, on hardware that it does not name, and the forecast"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("ranks", no_wrap=True)
    for ranks in guide["ranks"]:
        table.add_column(str(ranks), justify="right", no_wrap=True)
    for name, claimed in guide["claimed_ms"].items():
        table.add_row(f"{name}, claimed", *map(_number, claimed))
        table.add_row(f"{name}, forecast", *map(_number, guide["forecast_ms"][name]))
    print_table(to, table)
