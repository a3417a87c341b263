"""All-reduces in flight: the bits, messages and errors of `allreduce`, whatever is called in between."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from states import bits
from treeattn import PartialState, TreeComm
from treeattn.errors import CommError, InputError
from treeattn.steps.lanes import IN_FLIGHT
from treeattn.testing import run_ranks
from treeattn.transports.emulation import DelayedTransport, Delays
from treeattn.wrapping import team_of

OPS = PartialState.identity((1, 1, 1, 1), backend="reference").ops
SIZES = [3, 5, 3, 2]


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile before ranks have to wait for it."""
    run_ranks(2, lambda t: TreeComm(t).allreduce(state_of(t.rank, 0)), timeout=120)


def state_of(rank, number, heads=3):
    rng = np.random.default_rng([rank, number])
    packed = rng.standard_normal((1, heads, 1, 6)).astype("float32")
    packed[..., -2] = np.abs(packed[..., -2])
    return PartialState(packed, OPS)


def right(comm, number, heads):
    return bits(comm.allreduce(state_of(comm.rank, number, heads)))


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    st.lists(st.sampled_from(["begin", "end", "allreduce", "consult", "bcast", "reduce"]), max_size=12),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_calls_between_begin_and_end_change_nothing(hosts, calls, deterministic):
    others = {
        "allreduce": lambda comm: comm.allreduce(state_of(comm.rank, 9)),
        "consult": lambda comm: team_of(comm).consult("test", (), {}),
        "bcast": lambda comm: comm.bcast(7 if comm.rank == 0 else None),
        "reduce": lambda comm: comm.reduce(state_of(comm.rank, 9)),
    }

    def body(transport):
        with TreeComm(transport, deterministic=deterministic) as comm:
            begun, found = [], []
            for number, call in enumerate(calls):
                heads = SIZES[number % len(SIZES)]
                if call == "begin":
                    begun.append((number, heads, comm.allreduce_begin(state_of(comm.rank, number, heads))))
                elif call == "end" and begun:
                    number, heads, handle = begun.pop(0)
                    found.append((number, heads, bits(handle.end())))
                elif call in others:
                    others[call](comm)
            found += [(number, heads, bits(handle.end())) for number, heads, handle in begun]
            assert found == [(number, heads, right(comm, number, heads)) for number, heads, _ in found]
            return [each[2] for each in found]

    results = run_ranks(len(hosts), body, hosts=hosts)
    assert all(each == results[0] for each in results)


def test_as_many_messages_as_the_plan_says_and_no_more():
    def body(transport):
        with TreeComm(transport) as comm:
            for counted in (False, True):  # the first time, lanes are opened and agree
                before = comm.stats
                begun = [comm.allreduce_begin(state_of(comm.rank, number)) for number in range(3)]
                ended = [handle.end() for handle in begun]
                found = comm.stats - before
                if counted:
                    predicted = comm.plan_for(ended[0].nbytes).predict(ended[0].nbytes).per_rank[comm.rank]
                    assert found == predicted + predicted + predicted

    run_ranks(4, body, hosts=list("aabc"))


@pytest.mark.parametrize("before", [3, 5])  # heads of what was begun before: others make ranks agree anew, in the end
def test_what_is_begun_may_be_overwritten_and_the_end_may_be_given_room(before):
    def body(transport):
        with TreeComm(transport) as comm:
            state, out = state_of(comm.rank, 1), state_of(comm.rank, 2)
            wanted = right(comm, 1, 3)
            comm.allreduce_begin(state_of(comm.rank, 0, before)).end()
            handle = comm.allreduce_begin(state, out=out)
            state._packed[...] = np.nan
            assert handle.end() is out
            assert bits(out) == wanted

    for size in (1, 3):
        run_ranks(size, body, hosts=list("aab")[:size])


def test_what_is_wrong_on_one_rank_is_raised_at_the_end_on_all_and_spares_the_others():
    def body(transport):
        with TreeComm(transport) as comm:
            comm.allreduce(state_of(comm.rank, 0))
            good = [comm.allreduce_begin(state_of(comm.rank, 1))]
            bad = comm.allreduce_begin(None if comm.rank == 1 else state_of(comm.rank, 2))
            good.append(comm.allreduce_begin(state_of(comm.rank, 3)))
            first = bits(good[0].end())
            with pytest.raises(InputError, match="state: expected a PartialState, got NoneType"):
                bad.end()
            assert [first, bits(good[1].end())] == [right(comm, 1, 3), right(comm, 3, 3)]
            return True

    assert run_ranks(4, body, hosts=list("aabb")) == [True] * 4


def test_states_that_differ_are_told_apart():
    def body(transport):
        with TreeComm(transport) as comm:
            for _ in range(2):
                comm.allreduce_begin(state_of(comm.rank, 1)).end()
                handle = comm.allreduce_begin(state_of(comm.rank, 1, heads=3 + comm.rank))
                with pytest.raises(InputError, match=r"state\.shape: expected the same on every rank"):
                    handle.end()

    run_ranks(2, body, hosts=list("ab"))


def test_more_than_stated_are_refused_and_an_end_is_one():
    def body(transport):
        with TreeComm(transport) as comm:
            begun = [comm.allreduce_begin(state_of(comm.rank, number)) for number in range(IN_FLIGHT)]
            with pytest.raises(CommError, match=f"{IN_FLIGHT} all-reduces of this communicator are in flight"):
                comm.allreduce_begin(state_of(comm.rank, 0))
            for number, handle in enumerate(begun):
                assert bits(handle.end()) == right(comm, number, 3)
            with pytest.raises(CommError, match="ended before"):
                begun[0].end()
            comm.allreduce_begin(state_of(comm.rank, 0)).end()

    run_ranks(2, body)


def test_a_rank_of_threads_may_send_and_receive_while_it_waits_for_something_else():
    def body(transport):
        other, came = 1 - transport.rank, np.zeros(1, np.uint8)
        request = transport.irecv(came, other, 0)
        if transport.rank:
            time.sleep(0.02)  # until the other has looked in vain
            transport.isend(np.array([5], np.uint8), other, 0)
            transport.wait([request])
            return int(came[0])

        def ready():
            if not transport.progress([request]):
                return False
            transport.wait([transport.isend(came + np.uint8(1), other, 0)])
            return True

        transport.wait_for(ready, lambda: None)
        return int(came[0])

    assert run_ranks(2, body) == [5, 6]


def test_what_one_rank_of_threads_does_as_it_looks_is_seen_by_others():
    done = [0]

    def body(transport):
        def ready():  # ranks take turns, which nothing tells the transport of
            if done[0] % 3 == transport.rank and done[0] < 12:
                done[0] += 1
            return done[0] == 12

        transport.wait_for(ready, lambda: None)

    run_ranks(3, body)
    assert done == [12]


def test_ranks_of_threads_that_wait_in_vain_for_something_else_are_told():
    def body(transport):
        if transport.rank:
            transport.wait_for(lambda: False, lambda: None)

    with pytest.raises(CommError, match="no rank can go on"):
        run_ranks(3, body)


def test_ranks_that_ended_in_different_orders_begin_alike_again():
    def body(transport):
        with TreeComm(transport) as comm:
            begun = [(number, comm.allreduce_begin(state_of(comm.rank, number))) for number in range(3)]
            ended = {number: bits(handle.end()) for number, handle in (begun if comm.rank else reversed(begun))}
            again = [bits(comm.allreduce_begin(state_of(comm.rank, number)).end()) for number in range(3)]
            both = [comm.allreduce_begin(state_of(comm.rank, number)) for number in range(3)]
            assert [ended[number] for number in range(3)] == again == [bits(handle.end()) for handle in both]

    run_ranks(2, body)


def test_an_all_reduce_says_whether_it_was_ended():
    with TreeComm() as comm:
        begun = comm.allreduce_begin(state_of(0, 0))
        assert repr(begun) == "<all-reduce that is in flight>"
        begun.end()
        assert repr(begun) == "<all-reduce that was ended>"


def test_a_communicator_freed_with_all_reduces_in_flight_leaves_nothing():
    def body(transport):
        for _ in range(5):
            with TreeComm(transport) as comm:
                for number in range(3):
                    comm.allreduce_begin(state_of(comm.rank, number))
        with pytest.raises(CommError, match="this communicator was freed"):
            comm.allreduce_begin(state_of(comm.rank, 0))

    gc.collect()
    before = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/dev/shm/#")
    run_ranks(3, body, hosts=list("aab"))
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/dev/shm/#")) == before


@pytest.mark.parametrize("options", [{"rendezvous": True, "seed": 3}, {"seed": 4}], ids=str)
def test_messages_that_wait_and_arrive_in_any_order(options):
    def body(transport):
        with TreeComm(transport, plan="binary") as comm:
            begun = [comm.allreduce_begin(state_of(comm.rank, number)) for number in range(4)]
            assert [bits(each.end()) for each in begun] == [right(comm, number, 3) for number in range(4)]

    run_ranks(5, body, hosts=list("abcde"), **options)


def test_delays_of_two_in_flight_are_waited_for_together():
    """By a clock that only passes when it is slept: two in flight take one delay."""

    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    def body(transport):
        clock = Clock()
        far = DelayedTransport(transport, ["a", "b"], Delays(0, 1.0), clock)
        with TreeComm(far) as comm:
            [handle.end() for handle in [comm.allreduce_begin(state_of(comm.rank, n)) for n in range(2)]]
            start = clock.now
            begun = [comm.allreduce_begin(state_of(comm.rank, n)) for n in range(2)]
            assert clock.now == start, "to begin takes no time"
            [handle.end() for handle in begun]
            return clock.now - start

    assert run_ranks(2, body) == [pytest.approx(1.0)] * 2


def test_ranks_of_mpi(each_mpi):
    for report in each_mpi("comm_mpi", 4, "flight", "a,a,b,b").of_all(4):
        assert report["right"] == [True] * 6
        assert report["left open"] == 0


def test_a_rank_that_stays_away_is_named(mpirun):
    job = mpirun("comm_mpi", 3, "flight_silent", check=False)
    assert job.rc != 0
    errors = [report["error"] for report in job.reports if "error" in report]
    assert len(errors) == 2, job
    assert all(error.startswith("nothing came from rank 2 on host c for ") for error in errors)


def test_begun_with_one_rank():
    comm = TreeComm()
    handle = comm.allreduce_begin(state_of(0, 1))
    assert bits(handle.end()) == bits(treeattn.merge([state_of(0, 1)]))
