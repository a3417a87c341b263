"""The cost model: against plans and baselines' formulas, against published times, and the command that prints it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import treeattn
from treeattn import cli, errors
from treeattn.arguments.spec import Options
from treeattn.cli.plan import SHOWN
from treeattn.costs.catalog import DEVICES, LINKS, MODELS, Link, Model, look_up
from treeattn.costs.forecast import ALGORITHMS, EFFICIENCY, Cluster, Demand, forecast, smallest_fit
from treeattn.costs.model import CostModel
from treeattn.costs.pricing import cost
from treeattn.costs.published import CHOSEN, GUIDE_MS, PAPER, error, fitted, measured_step, paper_seconds
from treeattn.planning.planner import plan_allreduce
from treeattn.testing import run_ranks

LLAMA = Demand(MODELS["llama-3-8b"], 2**20)


def cluster(ranks: int, per_host: int = 8, **links):
    found = Cluster.of(DEVICES["h100"], ranks, per_host, LINKS["ib-ndr"])
    return replace(found, model=replace(found.model, **links))


# ---- terms


def test_the_tree_is_what_the_communicators_model_says_of_its_plan():
    """The same function by which a plan is chosen, whatever the links: latencies, gaps, handshakes, lanes."""
    odd = Link(20.0, 5.0, "", gap_us=2.0, steps=((1000, 30.0),), lanes=2)
    for ranks in (1, 8, 64):
        ours, payload = cluster(ranks, inside=odd), LLAMA.state_bytes
        plan = plan_allreduce(ours.hosts, ours.radices(payload))
        terms, stated = forecast("tree", LLAMA, ours), cost(plan, payload, ours.model)
        launch = ours.model.round_us * 32 / 1e3  # the kernel's own
        assert terms.wire + terms.merge + terms.launch - launch == pytest.approx(32 * stated.total_us / 1e3)


def test_the_tree_pays_a_latency_per_round_of_its_plan():
    free, slow = Link(0.0, 1e12, ""), Link(1000.0, 1e12, "")
    for ranks in (8, 64, 1024):
        terms = forecast("tree", LLAMA, cluster(ranks, inside=free, between=slow))
        rounds = plan_allreduce(cluster(ranks).hosts, None).rounds_between if ranks <= 64 else None
        per_layer = terms.wire / LLAMA.model.layers
        assert rounds is None or per_layer == pytest.approx(rounds)
        assert per_layer == pytest.approx(round(per_layer))


def test_a_ring_pays_a_hop_less_than_there_are_ranks_and_reads_everything():
    slow = Link(1000.0, 1e12, "")
    terms = forecast("ring", LLAMA, cluster(8, inside=slow))
    kernel = LLAMA.kv_bytes / (3350e6 * EFFICIENCY)
    assert terms.kernel == pytest.approx(kernel)
    hidden = terms.kernel * 7 / 8
    assert terms.wire == pytest.approx(32 * 7 * 1.0 - hidden, rel=1e-3)


def test_a_ring_whose_hops_the_kernel_hides_has_no_wire():
    assert forecast("ring", LLAMA, cluster(8, inside=Link(0.0, 1e6, ""))).wire == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_terms_add_up_and_one_rank_sends_nothing(name):
    terms = forecast(name, LLAMA, cluster(8))
    assert terms.total == pytest.approx(terms.weights + terms.kernel + terms.wire + terms.merge + terms.launch)
    assert min(terms.weights, terms.kernel, terms.wire, terms.launch) > 0
    alone = forecast(name, LLAMA, cluster(1))
    assert alone.wire == alone.merge == 0
    assert alone.kernel == pytest.approx(LLAMA.kv_bytes / (3350e6 * EFFICIENCY))


@pytest.mark.parametrize("name", ["tree", "ring", "dist_flash", "megatron_sp"])
def test_a_longer_context_never_takes_less_time(name):
    times = [forecast(name, replace(LLAMA, tokens=tokens), cluster(64)).total for tokens in (1000, 10**5, 10**6, 10**7)]
    assert times == sorted(times)


@pytest.mark.parametrize("hosts", [1, 4])
@pytest.mark.parametrize("name", ["ring", "ring_query", "megatron_sp", "gather", "ulysses"])
def test_bytes_and_messages_are_those_of_the_stated_formula(name, hosts):
    ranks, heads, tokens, width = 4, 8, 64, 16
    q, k = np.zeros((1, heads, 1, width), np.float32), np.zeros((1, heads, tokens // ranks, width), np.float32)

    def rank(transport):
        with treeattn.TreeComm(transport) as comm:
            algorithm = treeattn.baselines.BASELINES[name]
            return algorithm.cost(algorithm.prepare(q, k, k, Options(), comm=comm).problem).ranks[comm.rank]

    stated = run_ranks(ranks, rank)[0]
    demand = Demand(Model(1, heads, heads, width, 0.0), tokens, kv_itemsize=4)
    for counted, link in (
        (stated.bytes, Link(0.0, 1e-6, "")),  # a byte in a millisecond
        (stated.messages, Link(0.0, 1e15, "", gap_us=1e3)),
    ):
        model = CostModel(link, link, merge_gb_per_s=1e15)
        assert forecast(name, demand, Cluster(ranks, ranks // hosts, 1e15, model)).wire == pytest.approx(counted)


@pytest.mark.parametrize("name", ["megatron_sp", "gather"])
def test_ranks_of_a_host_share_its_lanes(name):
    many, few = (Link(0.0, 1.0, "", lanes=lanes) for lanes in (8, 2))
    wide, narrow = (forecast(name, LLAMA, cluster(8, inside=link)).wire for link in (many, few))
    assert narrow == pytest.approx(4 * wide)


def test_ulysses_is_refused_where_heads_are_fewer_than_ranks():
    assert "32 heads are fewer than 64 ranks" in forecast("ulysses", LLAMA, cluster(64)).reason


# ---- capacity


@pytest.mark.parametrize("per_host", [1, 4, 8])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_the_smallest_fit_fits_and_one_rank_less_does_not(model, per_host):
    demand, device = Demand(MODELS[model], 2**22), DEVICES["h200"]
    ranks = smallest_fit(demand, device, per_host)
    if ranks is None:
        assert demand.weight_bytes / per_host >= 0.9 * device.memory_gb * 1e9
        return
    assert demand.rank_bytes(ranks, per_host) <= 0.9 * device.memory_gb * 1e9
    assert demand.rank_bytes(ranks - 1, per_host) > 0.9 * device.memory_gb * 1e9


def test_a_cache_is_two_arrays_of_kv_heads_per_layer():
    assert LLAMA.kv_bytes == 2 * 2**20 * 32 * 8 * 128 * 2
    assert LLAMA.state_bytes == 32 * (128 + 2) * 4


# ---- published times


def test_the_papers_ratios_come_out_where_constants_were_chosen_with_them_in_view():
    """A fit, and no test of prediction. The miss: from 128k to 256k tokens on 8 H100 the published time of the tree
    hardly grows, while the work on a prompt grows by its square; 2.89 s would take over 90 % of the stated rate."""
    factors = {(row.device, row.tokens): error(row, CHOSEN[row.device]) for row in PAPER}
    assert 0.4 < factors.pop(("h100", 256_000)) < 1 / 1.5
    assert all(1 / 1.5 < factor < 1.5 for factor in factors.values())


def test_forecast_ratios_lie_where_the_published_ones_do_but_for_four():
    assert all(2.3 <= round(row.ratio, 1) <= 5.4 for row in PAPER)
    ours = {(row.device, row.tokens): row.ratio * error(row, CHOSEN[row.device]) for row in PAPER}
    outside = {row: round(ratio, 1) for row, ratio in ours.items() if not 2.3 <= round(ratio, 1) <= 5.4}
    assert outside.keys() == {("h100", 32_000), ("h100", 128_000), ("h100", 256_000), ("mi300x", 256_000)}


@pytest.mark.parametrize("machine", CHOSEN)
def test_rows_of_other_machines_are_predicted_from_those_of_one(machine):
    """Constants are fitted to one machine's four rows, without a look at the others' eight."""
    assumed = fitted([row for row in PAPER if row.device == machine])
    unseen = [row for row in PAPER if row.device != machine]
    staged = [max(factor, 1 / factor) for row in unseen if row.device == "rtx4090" for factor in [error(row, assumed)]]
    others = [max(factor, 1 / factor) for row in unseen if row.device != "rtx4090" for factor in [error(row, assumed)]]
    assert max(others) < 2.6
    assert max(staged, default=1.0) < 3.2  # two cards reach a third of what PCIe would let pass
    if machine == "rtx4090":
        ring = [paper_seconds(row, assumed)[1] / row.ring for row in unseen]
        assert all(0.8 < factor < 1.7 for factor in ring)


NETLAB = json.loads((Path(__file__).parents[1] / "benchmarks" / "netlab.json").read_text())
FACTOR = {10: 1.2, 1: 2.1}
"""By milliseconds of the wire. At 1 ms, up to 8 ranks and the program that is the wire wait for two cores as long as
for messages, and no model of messages knows of that."""

RINGS = "ring", "dist_flash"
RINGS_FACTOR = {10: 1.6, 1: 3.1}
"""What these send is so long that TCP's window counts, which opens anew after each pause; no forecast knows of that."""


@pytest.mark.parametrize("run", NETLAB["runs"], ids=lambda run: f"{run['hosts']} hosts, {run['delay_ms']} ms")
def test_measured_steps_are_forecast_from_a_lone_message_and_a_lone_kernel(run):
    """What was measured is the world that a forecast speaks of, and no expected value of what any code computes.

    The steps themselves are not used to calibrate.
    """
    for name, times in run["step_ms"].items():
        factor = measured_step(run, name) / statistics.median(times)
        most = (RINGS_FACTOR if name in RINGS else FACTOR)[run["delay_ms"]]
        assert 1 / most < factor < most, name


def test_measured_at_ten_milliseconds_the_algorithms_come_in_the_order_of_the_forecast():
    for run in (run for run in NETLAB["runs"] if run["delay_ms"] == 10 and run["hosts"] > 2):
        measured = sorted(run["step_ms"], key=lambda name: statistics.median(run["step_ms"][name]))
        assert measured == sorted(run["step_ms"], key=lambda name: measured_step(run, name))


def test_the_papers_eightfold_at_128_gpus_is_that_of_a_ring_of_states():
    """Of a ring of keys and values, whose volume the paper states, the forecast is thousands of times."""
    block = Demand(replace(LLAMA.model, layers=1, q_heads=16, kv_heads=16, parameters=0.0), 5_120_000)
    times = {name: forecast(name, block, cluster(128)).total for name in ("tree", "ring_query", "ring")}
    assert 6 < times["ring_query"] / times["tree"] < 12
    assert times["ring"] / times["tree"] > 1000


def test_the_guides_claim_agrees_on_the_order_and_on_growth_but_not_on_size():
    demand = replace(LLAMA, tokens=512_000)
    ours = {name: [forecast(name, demand, cluster(ranks)).total for ranks in (8, 128)] for name in GUIDE_MS}
    for times in (ours, {name: [claimed[0], claimed[-1]] for name, claimed in GUIDE_MS.items()}):
        assert times["tree"][1] < times["dist_flash"][1] < times["ring"][1]
        assert times["ring"][1] > 8 * times["tree"][1]


# ---- the command


@pytest.fixture
def plan(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(("plan", *arguments))
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_plan_tells_capacity_tree_times_and_the_claim(plan):
    status, out, err = plan("--nodes", "8", "--context", "1M", "--price", "2.5")
    assert (status, err) == (0, "")
    assert "1,048,576 tokens" in out
    assert "allreduce over 64 ranks on 8 hosts" in out
    assert "a guide's claim" in out
    assert all(f" {ranks} " in out for ranks in (8, 64, 1024))
    assert all(name in out for name in SHOWN)


def test_plan_writes_json(plan):
    status, out, _ = plan("--nodes", "8", "--price", "2", "--json", "-")
    assert status == 0
    told = json.loads(out)
    assert told["cache"]["bfloat16"]["bytes"] == LLAMA.kv_bytes
    row = next(row for row in told["times_ms"] if (row["ranks"], row["algorithm"]) == (64, "tree"))
    assert row["total"] == pytest.approx(forecast("tree", LLAMA, cluster(64)).total)
    assert row["cost"] == pytest.approx(2 * 64 * row["total"] / 1e3 / 3600 * 1e6)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "llama3-8b"), "treeattn: model: expected llama-3-8b, "),
        (("--gpu", "h1000"), "treeattn: gpu: expected h100, "),
        (("--link", "ethernet-100"), "treeattn: link: expected ethernet-100g, "),
        (("--context", "many"), "expected a number of tokens, such as 131072, 128k or 1M, got 'many'"),
        (("--shape", "32,32"), "expected LAYERS,Q_HEADS,KV_HEADS,WIDTH,BILLIONS, got '32,32'"),
        (("--context", "10M", "--model", "llama-3-70b"), "nodes: expected at least 8, since weights and 3.44 TB"),
        (("--gpu", "rtx4090", "--model", "llama-3-70b"), "nodes: expected at least"),
        (("--gpu", "rtx4090", "--model", "llama-3-405b"), "gpus-per-node: expected at least 38, for 812 GB of weights"),
    ],
    ids=str,
)
def test_what_is_unknown_or_does_not_fit_is_one_sentence(plan, arguments, sentence):
    status, out, err = plan(*arguments)
    assert status != 0
    assert out == ""
    assert sentence in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("gpu", DEVICES)
def test_every_device_and_a_shape_of_ones_own_can_be_planned(plan, gpu):
    status, out, _ = plan("--shape", "2,4,2,64,0.1", "--context", "64k", "--gpu", gpu)
    assert status == 0
    assert "custom" in out


def test_planning_loads_neither_kernels_nor_mpi():
    code = "import sys; from treeattn.cli import plan; print('numba' in sys.modules, 'mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]


def test_names_are_looked_up_whatever_their_case():
    assert look_up("gpu", "H100", DEVICES) is DEVICES["h100"]
    with pytest.raises(errors.InputError, match=r"^gpu: expected one of a100, b200, cpu, h100"):
        look_up("gpu", "zzz", DEVICES)
