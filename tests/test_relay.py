"""The short way of a step between hosts: the bits, counts and errors of the long way, whoever takes which."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import PartialState, TreeComm
from treeattn.errors import InputError, RankTimeout
from treeattn.execution.executor import Exchange
from treeattn.planning.plan import Plan
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices
from treeattn.steps.relay import relay_of
from treeattn.testing import over_the_wire, run_ranks
from treeattn.wrapping import team_of

WAYS = ["allreduce", "to a new state", "another shape", "wrong on one rank", "decode", "root", "begin and end"]
TREE = Radices("shared", None, scheme="reduce")
PIECES = Radices("shared", leaders="all")


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile before ranks have to wait for it."""
    run_ranks(3, lambda t: [TreeComm(t).allreduce(state_of(t.rank, 0))] * 2, hosts=list("aab"), timeout=120)


def state_of(rank, number, heads=3):
    rng = np.random.default_rng([rank, number])
    q, k, v = (rng.standard_normal((1, heads, n, 4), dtype=np.float32) for n in (1, 3, 3))
    return treeattn.partial_attention(q, k, v)


def right(hosts, number, heads=3):
    """Hosts in the order of their first ranks, and their ranks in order."""
    ranks = defaultdict(list)
    for rank, host in enumerate(hosts):
        ranks[host].append(state_of(rank, number, heads))
    return over_the_wire(list(ranks.values())).packed.tobytes()


def kinds(comm):
    return type(team_of(comm).session.shortcut).__name__.strip("_")


@pytest.mark.parametrize(
    ("hosts", "settings", "expected"),
    [
        ("aabb", {}, ["Speaker", "Follower", "Speaker", "Follower"]),
        ("abab", {}, ["Speaker", "Speaker", "Follower", "Follower"]),
        ("aab", {}, ["Speaker", "Follower", "Speaker"]),
        ("abc", {}, ["Speaker"] * 3),
        ("aaa", {}, ["Swap"] * 3),
        ("abcd", {"plan": "binary"}, ["Speaker"] * 4),
        ("aabb", {"deterministic": True}, ["Speaker", "Follower"] * 2),
        ("aabbc", {"plan": "reduce"}, ["Speaker"] * 5),
        ("aabbc", {"plan": TREE}, ["Speaker", "Follower", "Speaker", "Follower", "Speaker"]),
        ("aabb", {"plan": "split"}, ["Speaker"] * 4),
        ("aabb", {"plan": PIECES}, ["Speaker"] * 4),
        ("aabb", {"plan": PIECES, "deterministic": True}, ["Speaker"] * 4),
        ("aaaabb", {"plan": Radices("shared", leaders=3)}, ["Speaker"] * 3 + ["Follower"] + ["Speaker"] * 2),
        ("aaa", {"plan": PIECES}, ["Follower"] * 3),
    ],
)
def test_who_takes_which_way(hosts, settings, expected, monkeypatch):
    """And goes it to the end, but for steps in which somebody is late."""
    resumed, resume = [], Exchange.resume
    monkeypatch.setattr(
        Exchange, "resume", lambda self, *given: resumed.append(self.transport.rank) or resume(self, *given)
    )

    def body(transport):
        with TreeComm(transport, **settings) as comm:
            for number in range(9):
                comm.allreduce(state_of(comm.rank, number))
            return kinds(comm)

    assert run_ranks(len(hosts), body, hosts=list(hosts)) == expected
    assert all(resumed.count(rank) < 8 for rank in range(len(hosts)))


@given(
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=8),
    st.lists(st.sampled_from("abc"), min_size=2, max_size=6),
    st.integers(0, 5),
    st.sampled_from([None, PIECES]),
    st.sampled_from([None, 1]),
)
@settings(deadline=None, max_examples=30)
def test_whatever_comes_between_steps_have_their_bits(ways, hosts, bad, plan, seed):
    bad %= len(hosts)

    def step(comm, number, way, out):
        if way == "wrong on one rank":
            with pytest.raises(InputError, match="state: expected a PartialState"):
                comm.allreduce(None if comm.rank == bad else state_of(comm.rank, number))
        elif way == "another shape":
            assert comm.allreduce(state_of(comm.rank, number, 2)).packed.tobytes() == right(hosts, number, 2)
        elif way == "decode":
            sink = np.zeros(3, np.float32) + (comm.rank == bad)
            q, k = np.ones((1, 3, 1, 4), np.float32), np.full((1, 3, 2, 4), comm.rank, np.float32)
            with pytest.raises(InputError, match="sink: expected the same on every rank"):
                treeattn.decode(q, k, k, comm=comm, sink=sink)
        elif way == "root":
            comm.reduce(state_of(comm.rank, number))
        elif way == "begin and end":
            assert comm.allreduce_begin(state_of(comm.rank, number)).end().packed.tobytes() == right(hosts, number)
        merged = comm.allreduce(state_of(comm.rank, number), out=None if way == "to a new state" else out)
        assert merged.packed.tobytes() == right(hosts, number)

    def body(transport):
        with TreeComm(transport, plan=plan) as comm:
            out = comm.allreduce(state_of(comm.rank, 99))
            for number, way in enumerate(ways):
                step(comm, number, way, out)

    run_ranks(len(hosts), body, hosts=hosts, seed=seed)


SHARED = [TREE, Radices("shared", 2), Radices("shared", 2, scheme="reduce"), Radices("shared", None, 2)]
CUT = [
    "split",
    PIECES,
    Radices("shared", leaders=2),
    Radices("shared", 2, leaders="all"),
    Radices("shared", None, 2, leaders=3),
    Radices("shared", None, scheme="reduce", leaders="all"),
    Radices("shared", 2, None, scheme="reduce", leaders="all"),
    Radices(2, 2, leaders="all"),
]
"""More pieces than some hosts have ranks, and than states have rows."""
PLANS = [None, "binary", "reduce", Radices(None, 2, scheme="reduce"), *SHARED]
LABELS = st.lists(st.sampled_from(["r/a", "r/b", "s/c", "s/d"]), min_size=2, max_size=7)


@given(
    LABELS,
    st.sampled_from(PLANS) | st.sampled_from(CUT),
    st.booleans(),
    st.sampled_from([None, "float16", "bfloat16"]),
    st.lists(st.sets(st.integers(0, 6)), min_size=2, max_size=4),
    st.none() | st.integers(0, 6),
)
@settings(deadline=None, max_examples=60)
def test_by_every_plan_the_bits_are_those_of_rounds_one_by_one(hosts, plan, deterministic, wire_dtype, short, bad):
    """Some ranks, none at first, go the short way, and one may have no state in the middle of it."""

    def step(comm, some):
        team_of(comm).session.shortcut = team_of(comm).session.shortcut if comm.rank in some else None
        return comm.allreduce(state_of(comm.rank, 0)).packed.tobytes()

    def body(transport):
        with TreeComm(transport, plan=plan, deterministic=deterministic, wire_dtype=wire_dtype) as comm:
            found = [step(comm, some) for some in [(), (), range(7), *short]]
            if bad is not None:
                with pytest.raises(InputError, match="state: expected a PartialState"):
                    comm.allreduce(None if comm.rank == bad % comm.size else state_of(comm.rank, 0))
            return [*found, *(step(comm, some) for some in short)]

    assert len(set(itertools.chain(*run_ranks(len(hosts), body, hosts=hosts)))) == 1


@given(LABELS, st.sampled_from(PLANS) | st.sampled_from(CUT), st.booleans())
@settings(deadline=None, max_examples=40)
def test_what_is_counted_is_the_plans(hosts, plan, deterministic):
    def body(transport):
        with TreeComm(transport, plan=plan, deterministic=deterministic) as comm:
            state = state_of(comm.rank, 0)
            comm.allreduce(state)
            before = comm.stats
            for _ in range(3):
                comm.allreduce(state)
            each = comm.plan_for(state.nbytes).predict(state.nbytes, rows=3).per_rank[comm.rank]
            assert comm.stats - before == each + each + each
            assert comm.usage.peak_bytes > 0

    run_ranks(len(hosts), body, hosts=hosts)


FOLLOWED = ["Speaker", "Follower"] * 2


@pytest.mark.parametrize(("plan", "expected"), [(None, FOLLOWED), (TREE, FOLLOWED), (PIECES, ["Speaker"] * 4)])
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_rank_that_comes_late_finds_the_others(late, plan, expected):
    """So late that they have left the short way, in the middle of it."""

    def body(transport):
        with TreeComm(transport, plan=plan) as comm:
            for number in range(3):
                time.sleep(0.4 * (comm.rank == late and number == 1))
                assert comm.allreduce(state_of(comm.rank, number)).packed.tobytes() == right("aabb", number)
            return kinds(comm)

    assert run_ranks(4, body, hosts=list("aabb")) == expected


@pytest.mark.parametrize("plan", [None, PIECES])
@pytest.mark.parametrize("silent", [1, 2])
def test_a_rank_that_does_not_come_is_named(silent, plan):
    failed = threading.Semaphore(0)

    def body(transport):
        comm = TreeComm(transport, plan=plan)
        comm.allreduce(state_of(comm.rank, 0))
        team_of(comm).channel.transport.timeout = 0.3  # only now: on a busy machine the first may take longer
        if comm.rank == silent:
            return [failed.acquire(timeout=60) for _ in range(3)]
        with pytest.raises(RankTimeout) as caught:
            comm.allreduce(state_of(comm.rank, 0))
        failed.release()
        return caught.value.ranks

    found = run_ranks(4, body, hosts=list("aabb"))
    assert [each for rank, each in enumerate(found) if rank != silent] == [(silent,)] * 3


def test_states_of_another_kind_take_the_long_way():
    """Between steps that take the short one: of a backend of their own, or not contiguous."""
    ops = PartialState.identity((1, 1, 1, 1), backend="reference").ops

    def body(transport):
        with TreeComm(transport) as comm:
            found = []
            for turn in range(6):
                mine = state_of(comm.rank, 0)
                other = turn % 2 == comm.rank % 2
                found.append(comm.allreduce(PartialState(mine.packed.copy(), ops) if other else mine).packed.tobytes())
            return found

    assert run_ranks(3, body, hosts=list("aab")) == [[right("aab", 0)] * 6] * 3


def test_windows_in_the_middle_of_a_plan_have_no_short_way():
    up, across, down = plan_allreduce(list("aabb"), PIECES).rounds
    for rounds in ((up, down, across, down), (up, across), (across, down), (up,)):
        plan = Plan("allreduce", None, tuple("aabb"), PIECES, False, rounds, pieces=2)
        assert [relay_of(plan, rank) for rank in range(4)] == [None] * 4
