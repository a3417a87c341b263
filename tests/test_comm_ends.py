"""What ends a communicator, and what those who wait then hear; threads and forks of ranks."""

import copy
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import treeattn
from states import bits, message_of, sequence, states_of
from treeattn import PartialState, TreeComm
from treeattn.errors import CommError, RankTimeout
from treeattn.steps.shortcut import BUSY
from treeattn.testing import over_the_wire, run_ranks
from treeattn.testing.ranks import ThreadTransport
from treeattn.transports.base import Silence
from treeattn.transports.mpi_ending import watched
from treeattn.wrapping import as_tree_comm, team_of


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile the merge before ranks have to wait for it."""
    for dtype in ("float32", "float64"):
        treeattn.merge(states_of(2, dtype=dtype)).finish()


def test_a_freed_communicator_says_so():
    comm = TreeComm()
    comm.free()
    comm.free()
    with pytest.raises(CommError, match="this communicator was freed"):
        comm.allreduce(states_of(1)[0])
    assert repr(comm).endswith(", freed)")
    with TreeComm() as comm:
        assert repr(comm) == "TreeComm(rank 0 of 1 on 1 host, plan='default')"
    assert not comm.usable


def test_freeing_on_one_rank_alone_frees_nothing():
    def body(transport):
        comm = TreeComm(transport)
        comm.allreduce(states_of(3)[comm.rank])
        text = message_of(comm.free if comm.rank == 1 else lambda: comm.allreduce(states_of(3)[comm.rank]))
        comm.allreduce(states_of(3)[comm.rank])
        comm.free()
        return text

    expected = "operation: expected the same on every rank, got allreduce on ranks 0, 2 and free on rank 1"
    assert run_ranks(3, body) == [expected] * 3


def test_a_broken_communicator_is_not_wrapped_anew():
    def body(transport):
        comm = as_tree_comm(transport)
        with pytest.raises(CommError):
            team_of(comm).channel.call(lambda: 1 / 0)
        assert repr(comm).endswith(", broken)")
        assert as_tree_comm(transport) is comm
        with pytest.raises(CommError, match="broken"):
            comm.free() or comm.bcast(1)

    run_ranks(2, body)


def test_a_bare_transport_is_wrapped_once_until_it_is_freed():
    def body(transport):
        comm = as_tree_comm(transport)
        assert as_tree_comm(transport) is comm
        assert as_tree_comm(comm) is comm
        comm.free()
        another = as_tree_comm(transport)
        assert another is not comm
        return another.bcast(7 if another.rank == 0 else None).item()

    assert run_ranks(2, body) == [7, 7]
    assert as_tree_comm(None) is as_tree_comm(None)


def test_communicators_of_the_same_ranks_do_not_meet():
    states = states_of(3)

    def body(transport):
        comms = [TreeComm(transport) for _ in range(40)]
        found = {bits(comm.allreduce(states[comm.rank])) for comm in comms}
        for comm in comms[::-1]:
            comm.free()
        return found

    assert run_ranks(3, body) == [{bits(over_the_wire(states))}] * 3


def test_a_second_thread_gets_an_error_at_once():
    def body(transport):
        comm = TreeComm(transport)
        if comm.rank == 1:
            assert started.wait(20)
        thread = threading.Thread(target=lambda: comm.bcast(1 if comm.rank == 0 else None))
        thread.start()
        if comm.rank == 0:
            while team_of(comm).channel.guard.free:
                pass
            with pytest.raises(CommError, match="in use, by another thread"):
                comm.allreduce(states_of(1)[0])
            started.set()
        thread.join()

    started = threading.Event()
    run_ranks(2, body)


def in_use():
    return pytest.raises(CommError, match="in use, by another thread")


OTHERS = {
    "allreduce": lambda comm, state: comm.allreduce(state, out=state),
    "allreduce of another shape": lambda comm, state: comm.allreduce(PartialState.identity((1, 3, 1, 4))),
    "bcast": lambda comm, state: comm.bcast(1),
    "begin": lambda comm, state: comm.allreduce_begin(state),
    "free": lambda comm, state: comm.free(),
}


@pytest.mark.parametrize("late", [0, 0.1], ids=["in compiled code", "after it"])
@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_short_way_is_one_operation_too(name, hosts, late):
    """Rank 0 is in one that waits for rank 1, in compiled code or on the way that goes on from there."""

    def body(transport):
        comm, state = TreeComm(transport), states_of(2)[transport.rank]
        guard, result = team_of(comm).channel.guard, comm.allreduce(state)
        for _ in range(2):
            comm.allreduce(state, out=result)
        if comm.rank == 1:
            assert tried.wait(20)
            return bits(comm.allreduce(state, out=result))
        with ThreadPoolExecutor(1) as threads:
            begun = threads.submit(comm.allreduce, state, out=result)
            while not guard._cells[0]:
                pass
            time.sleep(late)
            with in_use():
                OTHERS[name](comm, state)
            tried.set()
            return bits(begun.result())

    tried = threading.Event()
    assert len(set(run_ranks(2, body, hosts=hosts))) == 1


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_short_way_is_none_within_an_operation_or_after_all(hosts):
    def body(transport):
        comm, state = TreeComm(transport), states_of(2)[transport.rank]
        channel, result = team_of(comm).channel, comm.allreduce(state)
        comm.allreduce(state, out=result)
        before, steps = bits(result), channel.step
        with in_use():
            channel.operate(lambda: comm.allreduce(state, out=result))
        assert (bits(result), channel.step) == (before, steps)
        comm.allreduce(state, out=result)
        session = team_of(comm).session
        comm.free()
        assert session.quick is not session.shortcut
        assert session.shortcut is None
        assert not channel.guard.take_turn()

    run_ranks(2, body, hosts=hosts)


def test_compiled_steps_and_others_say_alike_that_it_is_not_their_turn():
    from treeattn.kernels import window  # loads numba, which who merely reads this file need not

    assert window.BUSY == BUSY
    assert BUSY not in (window.EQUAL, window.DIFFERENT, window.WAITING)


def test_threads_of_one_process_use_a_communicator_at_once():
    class Slow:
        """Becomes an array in the middle of an operation, and only once another thread has ended one."""

        def __array__(self, dtype=None, copy=None):
            with ThreadPoolExecutor(1) as threads:
                return threads.submit(treeattn.decode, q, k, v, comm=comm).result()

    q, k, v = sequence(0, 6)
    comm = TreeComm()
    assert np.array_equal(comm.bcast(Slow()), treeattn.attention(q, k, v))


def test_a_forked_child_is_no_rank():
    def body(transport):
        comm = TreeComm(transport)
        comm.allreduce(states_of(2)[comm.rank])
        comm.bcast(1)  # nobody is in the middle of anything
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                words = []
                for call in (comm.total_stats, lambda: comm.allreduce(states_of(2)[0])):
                    try:
                        call()
                    except CommError as error:
                        words.append(str(error))
                os._exit(0 if words == ["this process is a fork of the rank whose communicator this is"] * 2 else 1)
            assert os.waitpid(child, 0)[1] == 0
        return comm.bcast(1 if comm.rank == 0 else None).item()

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_ranks_is_not_copied(copied):
    comm = TreeComm()
    cache = treeattn.ShardedKVCache(comm, batch=1, kv_heads=1, head_dim=4, capacity=6)
    for each in (comm, cache):
        with pytest.raises(TypeError, match=f"^a {type(each).__name__} belongs to the ranks that made it together"):
            copied(each)


def test_a_silent_rank_is_named_and_the_communicator_is_broken():
    broken = []

    class Patient(ThreadTransport):
        """Does not take the others along when it breaks: each must find out by itself, as MPI ranks do."""

        def abandon(self):
            broken.append(self.rank)

    def body(transport):
        comm = TreeComm(transport)
        comm.allreduce(states_of(3)[comm.rank])
        team_of(comm).channel.transport.timeout = 0.2  # only now: on a busy machine the first may take longer
        if comm.rank == 2:
            while len(broken) < 2:
                time.sleep(0.01)
            return None
        with pytest.raises(
            RankTimeout, match=r"nothing came from rank 2 on host c for 0\.2 s in step 2, round 0; last heard in step 1"
        ) as caught:
            comm.allreduce(states_of(3)[comm.rank])
        assert (caught.value.ranks, caught.value.hosts, caught.value.step) == ((2,), ("c",), 1)
        with pytest.raises(CommError, match=r"this communicator is broken \(nothing came from rank 2"):
            comm.bcast(1)
        assert not comm.usable
        comm.free()
        return True

    found = run_ranks(3, lambda t: body(Patient(t._world, t.rank)), hosts=list("abc"))
    assert found == [True, True, None]


def test_a_rank_that_is_silent_from_the_first_step_on_was_last_heard_in_none():
    def silent():
        raise Silence

    def body(transport):
        channel = team_of(TreeComm(transport)).channel
        channel.transport.call_roll = lambda mark, wait: {transport.rank: mark}
        with pytest.raises(RankTimeout, match=r"in step 0, .*; last heard when the communicator was made$") as caught:
            channel.call(silent)
        return caught.value.ranks, caught.value.step

    assert run_ranks(2, body) == [((1,), None), ((0,), None)]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError("link down"), Silence()], ids=repr)
def test_what_is_cut_short_in_the_middle_is_broken(failure):
    class Failing(ThreadTransport):
        def start(self, requests):
            if armed and self.rank == 0:
                raise failure
            super().start(requests)

    armed = []

    def body(transport):
        comm = TreeComm(Failing(transport._world, transport.rank), plan="flat")
        comm.allreduce(states_of(2)[comm.rank])
        comm.rank or armed.append(True)
        expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) and comm.rank == 0 else CommError
        with pytest.raises(expected):
            comm.allreduce(states_of(2)[comm.rank])
        with pytest.raises(CommError, match="this communicator is broken"):
            comm.allreduce(states_of(2)[comm.rank])
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_ranks_exception_is_raised_with_what_became_of_the_others():
    def body(transport):
        if transport.rank == 1:
            raise ZeroDivisionError("at rank 1")
        TreeComm(transport)

    with pytest.raises(ZeroDivisionError) as caught:
        run_ranks(3, body)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1: ZeroDivisionError: at rank 1" in notes
    assert "rank 0: CommError" in notes
    assert "rank 2: CommError" in notes


def test_ranks_that_wait_for_each_other_in_vain_are_told_at_once():
    def body(transport):
        transport.wait([transport.irecv(np.empty(1, np.uint8), 1 - transport.rank, 0)])

    with pytest.raises(CommError, match="no rank can go on"):
        run_ranks(2, body)


def test_ranks_that_do_not_end_are_reported():
    over = threading.Event()
    with pytest.raises(RankTimeout, match=r"still running after 0\.5 s: rank 1$"):
        run_ranks(2, lambda transport: over.wait(60) if transport.rank else None, timeout=0.5)
    over.set()


def test_a_deadline_that_no_timer_can_wait_for_is_watched_for():
    with watched(1e300, "a call"):
        (watch,) = (each for each in threading.enumerate() if isinstance(each, threading.Timer))
        watch.join(0.05)
        assert watch.is_alive()
