"""Merging over ranks that are threads: right answers, equal bits, counted messages."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from plans import radices_of
from states import bits, message_of, sequence, states_of
from treeattn import PartialState, TreeComm
from treeattn.execution.records import Share
from treeattn.planning.messages import MOST_PARTS
from treeattn.planning.plan import HEADER_BYTES, Radices, Stats
from treeattn.planning.planner import plan_allreduce
from treeattn.testing import FakeBackend, over_the_wire, run_ranks
from treeattn.testing.oracle import assert_close, dense, tolerance
from treeattn.wrapping import team_of


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile the merge before ranks have to wait for it."""
    for dtype in ("float32", "float64"):
        treeattn.merge(states_of(2, dtype=dtype)).finish()


RADIX = st.sampled_from([None, 2, 3])
RADICES = radices_of(RADIX, leaders=[1, 2])
HOSTS = st.lists(st.sampled_from(["a", "b", "r/c", "r/d"]), min_size=1, max_size=7)
SOME = settings(deadline=None, max_examples=100)


def shards(q, k, v, edges):
    """A state per pair of neighbouring edges."""
    pieces = [slice(a, b) for a, b in pairwise(edges)]
    return [treeattn.partial_attention(q, k[:, :, at], v[:, :, at], backend="reference") for at in pieces]


def allreduced(states, hosts=None, *, arrival=None, **options):
    """Bits of an allreduce of ``states``, which must be the same on every rank, and of a reduce to the last rank."""
    last = len(states) - 1

    def body(transport):
        with TreeComm(transport, **options) as comm:
            everywhere = comm.allreduce(states[comm.rank])
            at_root = comm.reduce(states[comm.rank], root=last)
            assert (at_root is None) == (comm.rank != last)
            return bits(everywhere), None if at_root is None else bits(at_root)

    found = run_ranks(len(states), body, hosts=hosts, seed=arrival, rendezvous=arrival is not None)
    assert {every for every, _ in found} == {found[last][1]}
    return found[0][0]


@given(HOSTS, RADICES, st.booleans(), st.integers(0, 99), st.data())
@SOME
def test_shards_on_any_hosts_and_any_tree_merge_to_the_dense_answer(hosts, radices, deterministic, seed, data):
    size, tokens = len(hosts), 12
    cuts = data.draw(st.lists(st.integers(0, tokens), min_size=size - 1, max_size=size - 1))
    q, k, v = sequence(seed, tokens)
    states = shards(q, k, v, (0, *sorted(cuts), tokens))
    packed = np.frombuffer(
        allreduced(states, hosts, plan=radices, deterministic=deterministic, arrival=seed), np.float32
    ).reshape(states[0].packed.shape)
    out, lse = PartialState(packed, states[0].ops).finish(return_lse=True)
    right, limit = dense(q, k, v), tolerance(q, k, v)
    assert_close(out, right.out, limit.out, "out")
    assert_close(lse, right.lse, limit.lse, "lse")


@given(HOSTS, RADIX, st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_bits_do_not_depend_on_the_radix_between_hosts_or_on_what_arrives_first(hosts, inside, seed):
    states = states_of(len(hosts), seed)
    found = {
        allreduced(states, hosts, plan=Radices(inside, between), arrival=arrival)
        for between, arrival in ((None, None), (2, 1), (3, 2), (2, 3))
    }
    assert len(found) == 1


@given(HOSTS, RADICES, st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_deterministic_bits_do_not_depend_on_hosts(hosts, radices, seed):
    states = states_of(len(hosts), seed)
    in_rank_order = bits(over_the_wire(states))
    assert allreduced(states, hosts, plan=radices, deterministic=True) == in_rank_order
    assert allreduced(states, plan="flat") == in_rank_order


@given(HOSTS, RADICES, st.booleans())
@settings(deadline=None, max_examples=40)
def test_counters_equal_the_prediction(hosts, radices, deterministic):
    size, states = len(hosts), states_of(len(hosts))
    rows = states[0].m.size

    def body(transport):
        with TreeComm(transport, plan=radices, deterministic=deterministic) as comm:
            comm.reduce(states[comm.rank], root=size - 1)
            before = comm.stats
            comm.reduce(states[comm.rank], root=size - 1)
            reduced = comm.stats - before
            comm.allreduce(states[comm.rank])
            before = comm.stats
            comm.allreduce(states[comm.rank])
            after = comm.stats
            assert comm.total_stats() == Stats.total(
                Stats(**each) for each in team_of(comm).consult("s", (), vars_of(after))
            )
            plans = comm.plan_for(states[0].nbytes, size - 1), comm.plan_for(states[0].nbytes)
            return [reduced, after - before], [
                plan.predict(states[0].nbytes, rows).per_rank[comm.rank] for plan in plans
            ]

    for counted, predicted in run_ranks(size, body, hosts=hosts):
        assert counted == predicted


def vars_of(stats):
    return {name: getattr(stats, name) for name in Stats.__slots__}


@given(HOSTS, RADICES)
@settings(deadline=None, max_examples=30)
def test_every_part_of_every_message_has_a_tag_of_its_own(hosts, radices):
    plan = plan_allreduce(hosts, radices)
    shares = [Share([step], [None] * plan.pieces, len(plan.rounds), None) for step in plan.steps(0)]
    tags = [share.tag(share.steps[0].piece, part) for share in shares for part in range(MOST_PARTS)]
    assert len(tags) == len(set(tags))
    assert all(0 <= tag < plan.tags for tag in tags)


@pytest.mark.parametrize("arrival", [None, 5])
@pytest.mark.parametrize("plan", ["oneshot", "binary", "reduce", "split"])
def test_long_states_go_in_parts(plan, arrival, monkeypatch):
    states = states_of(5)
    whole = allreduced(states, list("aabbc"), plan=plan)
    monkeypatch.setattr("treeattn.planning.messages.LARGEST_MESSAGE", 50)
    monkeypatch.setattr("treeattn.planning.messages.AT_ONCE", 70)
    assert allreduced(states, list("aabbc"), plan=plan, arrival=arrival) == whole


def test_long_states_are_counted_by_parts_and_a_rank_without_one_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("treeattn.planning.messages.LARGEST_MESSAGE", 50)
    states = states_of(2)

    def body(transport):
        with TreeComm(transport, plan="flat") as comm:
            comm.allreduce(states[comm.rank])
            before = comm.stats
            right = bits(comm.allreduce(states[comm.rank]))
            counted = comm.stats - before
            assert counted == comm.plan_for(states[0].nbytes).predict(states[0].nbytes).per_rank[comm.rank]
            text = message_of(lambda: comm.allreduce(None if comm.rank else states[0]))
            assert bits(comm.allreduce(states[comm.rank])) == right
            return counted.messages, counted.bytes, text.split(":")[0]

    size = HEADER_BYTES + states[0].nbytes
    assert run_ranks(2, body) == [(-(-size // 50), size, "state")] * 2


def test_float64_states_travel_in_float64():
    states = states_of(3, dtype="float64")
    assert allreduced(states, plan="flat") == bits(over_the_wire(states))


def test_out_is_overwritten_and_given_back():
    states = states_of(3)
    right = bits(over_the_wire(states))

    def body(transport):
        with TreeComm(transport) as comm:
            state, other = PartialState(states[comm.rank].packed.copy(), states[0].ops), states_of(1)[0]
            first = comm.allreduce(state, out=other)
            assert first is other
            assert bits(state) == bits(states[comm.rank]), "the state itself is not touched"
            again = comm.allreduce(state, out=state)
            assert again is state
            return bits(first), bits(again)

    assert run_ranks(3, body) == [(right, right)] * 3
    alone = states_of(2)
    assert treeattn.TreeComm().allreduce(alone[0], out=alone[1]) is alone[1]
    assert bits(alone[0]) == bits(alone[1])


def test_states_on_a_device_are_copied_once_each_way_and_merge_to_the_same_bits():
    states = states_of(5)
    right = allreduced(states, hosts=list("aabba"))

    def body(transport):
        fake = FakeBackend()
        there = fake.ops.empty(states[0].packed.shape, "float32")
        fake.ops.from_host(states[transport.rank].packed.reshape(-1).view(np.uint8), there)
        with TreeComm(transport) as comm:
            merged = comm.allreduce(PartialState(there, fake.ops))
            data = np.empty(merged.nbytes, np.uint8)
            fake.ops.to_host(merged._packed, data)
            again = comm.allreduce(PartialState(there, fake.ops), out=merged)
            assert again is merged
            return data.tobytes(), [fake.calls.count(name) for name in ("to_host", "from_host", "merge")]

    found = run_ranks(5, body, hosts=list("aabba"))
    assert [each for each, _ in found] == [right] * 5
    assert [counts for _, counts in found] == [[3, 3, 0]] * 5, "one copy each way a call, and the test's own"
