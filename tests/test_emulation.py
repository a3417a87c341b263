"""Emulated latency, by virtual clocks: what a message's delay adds up to is exact, and no test looks at real time."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import treeattn
from treeattn import errors
from treeattn.arguments.spec import Options
from treeattn.costs.catalog import Link, Model
from treeattn.costs.choosing import candidates
from treeattn.costs.forecast import Cluster, Demand, forecast
from treeattn.costs.model import CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.plan import Plan
from treeattn.planning.planner import plan_allreduce, plan_reduce
from treeattn.planning.radices import Radices
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention
from treeattn.transports.clocks import OwnTime
from treeattn.transports.emulation import DelayedTransport, Delays

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


def merge(comm: Any, root: int | None = None) -> None:
    state = treeattn.PartialState.identity((1, 6, 1, 4))
    comm.allreduce(state) if root is None else comm.reduce(state, root=root)


def seconds_of(hosts: list[str], plans: list[Plan]) -> list[float]:
    """Give the virtual time that each plan takes."""

    def rank(transport: Any) -> list[float]:
        clock, times = Standing(), []
        far = DelayedTransport(transport, hosts, UNEQUAL, clock)
        for number, plan in enumerate(plans, 1):
            with treeattn.TreeComm(far, plan=plan.radices) as comm:
                merge(comm, plan.root)  # agrees
                clock.now = start = 1e4 * number
                merge(comm, plan.root)
                times.append(clock.now - start)
        return times

    return [max(times) for times in zip(*run_ranks(len(hosts), rank, timeout=120), strict=True)]


UNEQUAL = Delays(1.0, 100.0)
PAYLOAD = 6 * (4 + 2) * 4
RACKS = ["r/a", "r/b", "r/b", "r/c", "s/d", "s/e", "s/e", "s/e"]
LAYOUTS = [*map(list, ("ab", "aab", "abc", "aabbcc", "aaabcc", "abcde", "aaabbcdd", "abcdefg", "abcdefghi")), RACKS]


@pytest.mark.parametrize("hosts", LAYOUTS, ids="".join)
def test_the_forecast_is_what_every_plan_takes(hosts):
    """In pairs, threes and all at once, across and up trees, through some ranks of a host and through all."""
    ways = itertools.product((None, 2), (None, 2, 3), ("exchange", "reduce"), (1, "all"))
    shapes = [Radices(inside, radix, scheme=scheme, leaders=leaders) for inside, radix, scheme, leaders in ways]
    shapes += [replace(each, rack=2, leaders=2) for each in shapes if each.leaders == "all"]
    plans = {str(plan.rounds): plan for each in shapes for plan in both(hosts, each)}
    at_once = 1e12
    model = CostModel(Link(1e6, at_once, ""), Link(1e8, at_once, ""), merge_gb_per_s=at_once)
    forecasts = [cost(plan, PAYLOAD, model).total_us / 1e6 for plan in plans.values()]
    assert forecasts == pytest.approx(seconds_of(hosts, list(plans.values())), rel=1e-6)


def both(hosts: list[str], radices: Radices) -> tuple[Plan, Plan]:
    """Give the plan of a merge for all, and of one for the last rank alone."""
    return plan_allreduce(hosts, radices), plan_reduce(hosts, len(hosts) - 1, radices)


@pytest.mark.parametrize("hosts", LAYOUTS, ids="".join)
def test_a_model_measured_on_emulated_wires_predicts_what_plans_take_on_them(hosts):
    def measured(transport: Any) -> CostModel:
        with treeattn.TreeComm(DelayedTransport(transport, hosts, UNEQUAL, Standing()), plan="auto") as comm:
            merge(comm)
            return comm.calibration.model

    model = run_ranks(len(hosts), measured, timeout=120)[0]
    plans = [plan_allreduce(hosts, each) for each in candidates(hosts, model=model)]
    forecasts = [cost(plan, PAYLOAD, model).total_us / 1e6 for plan in plans]
    alike = len({hosts.count(host) for host in hosts}) == 1  # steps of others overlap: smaller hosts begin the next one
    assert forecasts == pytest.approx(seconds_of(hosts, plans), rel=1e-6 if alike else 0.01)


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
