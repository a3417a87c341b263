"""Kernels beside messages: what is sent arrives while the kernel works, and would not if nobody moved it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import treeattn
from treeattn.backends.registry import Backend, find
from treeattn.steps.overlap import beside
from treeattn.steps.wire import Wire
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention
from treeattn.testing.ranks import ThreadTransport

LONG = 60.0
rng = np.random.default_rng(0)
Q, K, V = (rng.standard_normal((1, heads, n, 8), dtype=np.float32) for heads, n in ((4, 3), (2, 60), (2, 60)))


class Waiting(Backend):
    """A backend whose kernels don't end before this rank's messages have arrived, and note whether they did."""

    name = "reference"
    ops = find("reference").ops

    def __init__(self, arrived: threading.Event, seen: list[bool], queues: bool = False) -> None:
        self.arrived, self.seen, self.queues = arrived, seen, queues

    def reasons(self, spec: Any = None) -> list[str]:
        return []

    def prepare(self, spec: Any) -> Any:
        kernel = find("reference").prepare(spec)

        def run(args: Any, out: Any) -> Any:
            self.seen.append(self.arrived.wait(0.0 if self.queues else LONG))
            return kernel(args, out)

        return run


@pytest.fixture
def arrived(monkeypatch):
    """Let messages move only when a rank looks after them; give an event per rank, set while none is under way."""
    events = [threading.Event() for _ in range(4)]
    for event in events:
        event.set()
    start, finish, progress = Wire.start, Wire.finish, ThreadTransport.progress

    def note(wire: Wire) -> None:
        under_way = any(pending.requests for pending in wire._under_way)
        events[wire.rank].clear() if under_way else events[wire.rank].set()

    def starting(self: Wire, **ends: Any) -> Any:
        pending = start(self, **ends)
        note(self)
        return pending

    def finishing(self: Wire, pending: Any) -> None:
        finish(self, pending)
        note(self)

    def progressing(self: ThreadTransport, requests: Any) -> bool:
        complete = progress(self, requests)
        if complete:
            events[self.rank].set()
        return complete

    monkeypatch.setattr(Wire, "start", starting)
    monkeypatch.setattr(Wire, "finish", finishing)
    monkeypatch.setattr(ThreadTransport, "progress", progressing)
    monkeypatch.setattr(ThreadTransport, "needs_progress", True)
    return events


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["ring", "dist_flash"])
def test_messages_arrive_while_the_kernel_works(name, size, arrived):
    def rank(transport: Any) -> list[bool]:
        seen, event = list[bool](), arrived[transport.rank]
        with treeattn.TreeComm(transport) as comm:
            shard = K[:, :, comm.rank :: size], V[:, :, comm.rank :: size]
            algorithm, backend = treeattn.baselines.BASELINES[name], Waiting(event, seen)
            assert_attention(algorithm(Q, *shard, comm=comm, return_lse=True, backend=backend), Q, K, V)
        return seen

    seen = run_ranks(size, rank, seed=1, timeout=120)  # with a seed, nothing arrives by itself
    assert all(each and all(each) for each in seen)


def test_what_a_device_queues_runs_on_the_callers_thread(arrived):
    """A stream belongs to a thread, and the CPU is free for messages anyway."""
    threads = []

    class Queue(Waiting):
        def prepare(self, spec: Any) -> Any:
            kernel = super().prepare(spec)

            def run(args: Any, out: Any) -> Any:
                threads.append(threading.current_thread().name)
                return kernel(args, out)

            return run

    def rank(transport: Any) -> None:
        with treeattn.TreeComm(transport) as comm:
            backend = Queue(arrived[transport.rank], [], queues=True)
            treeattn.baselines.ring(Q, K, V, comm=comm, backend=backend)

    run_ranks(2, rank, seed=1, timeout=120)
    assert set(threads) == {"rank 0", "rank 1"}


def test_work_is_done_once_on_another_thread_and_messages_are_left_alone_when_they_have_arrived():
    looks, workers, third = list[int](), list[int](), threading.Event()

    def moved() -> bool:
        looks.append(threading.get_ident())
        if len(looks) == 3:
            third.set()
        return third.is_set()

    def work() -> str:
        workers.append(threading.get_ident())
        return "looked after" if third.wait(LONG) else "left alone"

    assert beside(moved, work) == "looked after"
    assert looks == [threading.get_ident()] * 3
    assert len(workers) == 1
    assert workers[0] not in looks


@pytest.mark.parametrize("who", ["work", "messages"])
def test_an_error_of_either_is_raised_here(who):
    def fail() -> bool:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        beside(*((lambda: True, fail) if who == "work" else (fail, lambda: None)))


def test_two_threads_do_not_wait_for_each_others_work():
    first, second = threading.Event(), threading.Event()

    def meet(own: threading.Event, other: threading.Event) -> bool:
        own.set()
        return other.wait(LONG)

    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(beside(lambda: False, lambda: meet(first, second))))
    thread.start()
    results.append(beside(lambda: False, lambda: meet(second, first)))
    thread.join()
    assert results == [True, True]


def test_long_messages_of_mpi_arrive_while_the_kernel_works(each_mpi):
    for report in each_mpi("overlap", 3).of_all(3):
        assert report["bytes"] > 2**21  # far beyond what MPI sends before the receiver has answered
        assert report["seen"] == [True] * 3
