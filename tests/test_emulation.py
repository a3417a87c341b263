"""Emulated latency, by virtual clocks: what a message's delay adds up to is exact, and no test looks at real time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import treeattn
from treeattn import errors
from treeattn.catalog import Link, Model
from treeattn.clocks import OwnTime
from treeattn.costs import CostModel, cost
from treeattn.emulation import DelayedTransport, Delays
from treeattn.forecast import Cluster, Demand, forecast
from treeattn.inputs import Options
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention

TEN = Delays(0.0, 10.0)
rng = np.random.default_rng(0)
Q, K, V = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 64, 64))


class Standing:
    """A clock that stands still but when its rank sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def elapsed(hosts: list[str], call: Any, delays: Delays = TEN, **options: Any) -> list[float]:
    """Give the virtual time that ``call(comm)`` takes on every rank, after all have started together."""

    def rank(transport: Any) -> float:
        clock = Standing()
        far = DelayedTransport(transport, hosts, delays, clock)
        with treeattn.TreeComm(far, **options) as comm:
            run = call(comm)
            clock.now = 1000.0
            run()
            return clock.now - 1000.0

    return run_ranks(len(hosts), rank, timeout=120)


def shard(comm: Any) -> tuple[Any, Any, Any]:
    return Q, K[:, :, comm.rank :: comm.size], V[:, :, comm.rank :: comm.size]


def baseline(name: str) -> Any:
    return lambda comm: treeattn.baselines.BASELINES[name].prepare(*shard(comm), Options(), comm=comm).run


def tree(comm: Any) -> Any:
    treeattn.decode(*shard(comm), comm=comm)  # agrees on the call
    return lambda: treeattn.decode(*shard(comm), comm=comm)


def apart(size: int) -> list[str]:
    return [f"host {rank}" for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_a_ring_takes_one_delay_less_than_there_are_ranks(size):
    assert elapsed(apart(size), baseline("ring")) == [10.0 * (size - 1)] * size
    assert elapsed(apart(size), baseline("ring_query")) == [10.0 * (size - 1)] * size


@pytest.mark.parametrize(
    ("name", "delays"), [("gather", 1), ("megatron_sp", 1), ("ulysses", 2), ("allreduce3", 6)], ids=str
)
def test_other_baselines_take_a_delay_per_round(name, delays):
    times = elapsed(apart(2), baseline(name))
    assert times == [10.0 * delays] * 2


@pytest.mark.parametrize("plan", ["default", "oneshot", "binary"])
@pytest.mark.parametrize("hosts", [apart(16), ["a", "a", "b", "b", "c"], ["a"] * 4], ids=lambda hosts: len(hosts))
def test_the_tree_takes_a_delay_per_round_between_hosts(hosts, plan):
    plans = []

    def call(comm):
        plans.append(comm.plan_for(1 * 2 * 1 * (4 + 2) * 4))
        return tree(comm)

    times = elapsed(hosts, call, plan=plan)
    assert max(times) == 10.0 * plans[0].rounds_between


def test_at_sixteen_hosts_the_tree_is_at_least_eight_times_faster_than_a_ring():
    ring, tree_time = max(elapsed(apart(16), baseline("ring"))), max(elapsed(apart(16), tree))
    assert ring >= 8 * tree_time


@pytest.mark.parametrize("hosts", [2, 8, 16])
def test_the_forecast_of_the_wire_is_what_is_emulated(hosts):
    model = Model(layers=1, q_heads=2, kv_heads=2, head_dim=4, parameters=0)
    way = Link(alpha_us=10_000.0, gb_per_s=1e12, source="")
    cluster = Cluster(hosts, 1, 1e12, CostModel(way, way))
    for name, run in (
        ("tree", tree),
        ("ring", baseline("ring")),
        *((name, baseline(name)) for name in ("ring_query", "megatron_sp", "dist_flash", "gather")),
    ):
        assert max(elapsed(apart(hosts), run)) == pytest.approx(forecast(name, Demand(model, 64), cluster).wire)


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b", "b", "c", "c"]], ids=len)
def test_a_model_measured_on_emulated_wires_predicts_what_a_plan_takes_on_them(hosts):
    delays, nbytes = Delays(1.0, 100.0), 1 * 2 * 1 * (4 + 2) * 4
    costs = []

    def call(comm):
        run = tree(comm)
        costs.append(cost(comm.plan_for(nbytes), nbytes, comm.calibration.model).total_us / 1e6)
        return run

    times = elapsed(hosts, call, delays, plan="auto")
    assert costs == pytest.approx([max(times)] * len(hosts), rel=1e-6)


def test_each_level_has_its_own_delay():
    hosts = ["a", "a", "b", "b"]
    inside_first = elapsed(hosts, tree, Delays(1.0, 100.0), plan="oneshot")
    assert max(inside_first) == 1.0 + 100.0 + 1.0  # up inside, between leaders, down inside


def test_results_are_those_of_the_ranks_alone():
    def rank(transport: Any) -> Any:
        far = DelayedTransport(transport, ["a", "b", "b"], Delays(0, 1e-4))
        with treeattn.TreeComm(far) as comm:
            assert comm.hosts == ("a", "b", "b")
            return treeattn.decode(*shard(comm), comm=comm, return_lse=True)

    for result in run_ranks(3, rank):
        assert_attention(result, Q, K, V)


def test_own_time_is_what_a_thread_has_computed_and_slept():
    clock = OwnTime()
    computed, before = time.thread_time(), clock()
    clock.sleep(1000.0)
    time.sleep(0.001)  # real sleep is nobody's time here
    elapsed, computed = clock() - before, time.thread_time() - computed
    assert 1000 <= elapsed <= 1000 + computed + 1e-9  # of rounding


def test_latency_is_read_and_refused_in_one_sentence():
    assert Delays.read("2.5:10") == Delays(0.0025, 0.01)
    for text in ("", "fast", "-1", "1:2:3", "inf"):
        with pytest.raises(errors.InputError, match=r"^latency: expected milliseconds"):
            Delays.read(text)
