"""Ranks as threads of one process: the communicator's whole behaviour, with no MPI.

Messages are copied, or, with ``rendezvous``, stay with the sender until they are received, as a large MPI message
does. With a ``seed``, whichever of the messages under way arrives next is drawn by chance. A state from which no
rank can go on is recognised and reported at once, instead of after a time-out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from treeattn.errors import CommError, InputError, RankTimeout
from treeattn.testing.world import LOOK, Request, World
from treeattn.transports.base import Bytes, Mark, Meanwhile, Prepared, Silence, Transport, Usual, nothing

__all__ = ["ThreadTransport", "run_ranks"]

T = TypeVar("T")

GATHER_TAG = -1
"""Tag of `ThreadTransport.allgather`; plans use the numbers of their rounds."""


class ThreadTransport(Transport):
    """One rank of `run_ranks`; pass it to ``TreeComm``."""

    def __init__(self, world: World, rank: int, context: tuple[int, ...] = ()) -> None:
        self.rank, self.size = rank, world.size
        self._world, self._context, self._duplicates = world, context, 0
        self._trunk, self._seconds = self, 0.0

    @property
    def timeout(self) -> float:
        """Seconds after which a wait ends in silence; branches have that of what they branch from."""
        return self._trunk._seconds

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._trunk._seconds = seconds

    @property
    def _roll(self) -> tuple[int, ...]:
        return self._trunk._context

    def isend(self, data: Bytes, dest: int, tag: int) -> Request:
        """Start to send."""
        world = self._world
        request = Request(data if world.rendezvous else data.copy(), done=False)
        with world.lock:
            channel = world.channel(self._context, self.rank, dest, tag)
            world.post(channel, request, channel.sends, channel.receives)
        return request if world.rendezvous else Request(data, done=True)

    def irecv(self, data: Bytes, source: int, tag: int) -> Request:
        """Start to receive."""
        request = Request(data)
        with self._world.lock:
            channel = self._world.channel(self._context, source, self.rank, tag)
            self._world.post(channel, request, channel.receives, channel.sends)
        return request

    def wait(
        self, requests: Sequence[Request | Prepared], meanwhile: Meanwhile = nothing, usual: Usual | None = None
    ) -> None:
        """Wait until all are complete, or no rank can go on."""
        self._wait_for([each.started if isinstance(each, Prepared) else each for each in requests])

    def progress(self, requests: Sequence[Request | Prepared]) -> bool:
        """Let what can arrive do so."""
        with self._world.lock:
            self._world.progress()
        return all((each.started if isinstance(each, Prepared) else each).done for each in requests)

    def wait_for(self, ready: Callable[[], bool], sleep: Callable[[], None], usual: Usual | None = None) -> None:
        """Wait for what is no message."""
        world, deadline = self._world, self._deadline()
        with world.lock:
            world.happened()
        while True:
            seen = world.events
            if ready():
                return
            with world.lock:
                self._wait_once(seen, deadline)

    def _wait_for(self, requests: list[Request]) -> None:
        world, deadline = self._world, self._deadline()
        with world.lock:
            world.progress()
            if all(request.done for request in requests):
                return
            world.happened()
            while not all(request.done for request in requests):
                self._wait_once(requests, deadline)

    def _deadline(self) -> float | None:
        return time.monotonic() + self.timeout if self.timeout else None

    def _wait_once(self, awaited: list[Request] | int, deadline: float | None) -> None:
        world = self._world
        world.waiting[self.rank] = awaited
        try:
            if world.stuck():
                world.stop("no rank can go on: each waits for another")
            if world.stopped:
                raise CommError(world.stopped)
            left = None if deadline is None else deadline - time.monotonic()
            if world.rolls[self._roll] or (left is not None and left <= 0):
                raise Silence
            world.wait(self.rank, LOOK if left is None else min(left, LOOK))
            world.progress()
        finally:
            del world.waiting[self.rank]

    def call_roll(self, mark: Mark, grace: float) -> dict[int, Mark]:
        """Ask who is there."""
        world, deadline = self._world, time.monotonic() + grace
        with world.lock:
            roll = world.rolls[self._roll]
            roll[self.rank] = mark
            world.wake_all()
            while len(roll) < self.size and not world.stopped and time.monotonic() < deadline:
                world.wait(self.rank, LOOK)
            return dict(roll)

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank's data."""
        import numpy as np

        mine = np.frombuffer(data, np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        found = {rank: np.empty(mine.size, np.uint8) for rank in others}
        requests = [self.irecv(found[rank], rank, GATHER_TAG) for rank in others]
        requests += [self.isend(mine, rank, GATHER_TAG) for rank in others]
        self.wait(requests)
        return [data if rank == self.rank else found[rank].tobytes() for rank in range(self.size)]

    def dup(self) -> ThreadTransport:
        """Make another of the same ranks; ranks that duplicate in the same order get matching ones."""
        self._duplicates += 1
        return type(self)(self._world, self.rank, (*self._context, self._duplicates))

    def branch(self) -> ThreadTransport:
        """Make one for a plan."""
        made = self.dup()
        made._trunk = self._trunk
        return made

    def shared_memory_group(self) -> int:
        """Lowest rank with the same host label."""
        return self._world.hosts.index(self._world.hosts[self.rank])

    def host_name(self) -> str:
        """Give the label that `run_ranks` was given."""
        return self._world.hosts[self.rank]

    def free(self) -> None:
        """There is nothing to give back."""

    def abandon(self) -> None:
        """End the others' waiting too."""
        with self._world.lock:
            self._world.stop(f"rank {self.rank} broke off in the middle of an operation")


def run_ranks(
    size: int,
    function: Callable[[ThreadTransport], T],
    *,
    hosts: Sequence[str] | None = None,
    timeout: float = 120,
    rendezvous: bool = False,
    seed: int | None = None,
) -> list[T]:
    """Run ``function(transport)`` on ``size`` ranks, as threads.

    Parameters
    ----------
    size : int
    function : callable
        Gets the rank's transport, which ``TreeComm(transport)`` takes.
    hosts : sequence of str, optional
        Host name of each rank; one for all by default.
    timeout : float
        Seconds until ranks that are still running are told to stop.
    rendezvous : bool
        Whether a send waits for its receive.
    seed : int, optional
        Draw the order of arrival by chance.

    Returns
    -------
    list
        What each rank's function returned.

    Raises
    ------
    Exception
        A rank's exception: that of the lowest rank that failed by itself rather than because another did. Its
        notes tell every rank's.
    RankTimeout
        Ranks were still running after ``timeout`` seconds.

    Examples
    --------
    >>> import treeattn
    >>> from treeattn.testing import run_ranks
    >>> def program(transport):
    ...     with treeattn.TreeComm(transport) as comm:
    ...         return comm.bcast([1.5, 2.5] if comm.rank == 0 else None).tolist()
    >>> run_ranks(2, program)
    [[1.5, 2.5], [1.5, 2.5]]
    """
    labels = ["localhost"] * size if hosts is None else list(hosts)
    if len(labels) != size:
        raise InputError.of("hosts", expected=f"{size} labels, one per rank", got=len(labels))
    world = World(size, labels, rendezvous, seed)
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(world, rank))
        except BaseException as error:  # all of it belongs to whoever called run_ranks
            failures[rank] = error
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    _join(threads, world, timeout)
    if failures:
        raise _worst(failures, world)
    return [results[rank] for rank in range(size)]


def _join(threads: list[threading.Thread], world: World, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    late = [thread for thread in threads if thread.is_alive()]
    if not late:
        return
    with world.lock:
        world.stop(f"still running after {timeout} s: {', '.join(thread.name for thread in late)}")
    for thread in late:
        thread.join(1)
    raise RankTimeout(str(world.stopped))


def _worst(failures: dict[int, BaseException], world: World) -> BaseException:
    """Choose the error to raise: an error of a rank's own before those that only say that another has gone."""
    own = [rank for rank in sorted(failures) if world.stopped is None or str(world.stopped) not in str(failures[rank])]
    chosen = failures[(own or sorted(failures))[0]]
    told = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items())]
    chosen.__notes__ = [*getattr(chosen, "__notes__", ()), *told]  # type: ignore[attr-defined]
    return chosen
