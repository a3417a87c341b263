"""Messages of an operation that is not a tree's: it says who sends what to whom, and all of it is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from treeattn.planning.messages import cut
from treeattn.planning.plan import Usage
from treeattn.steps.channel import Channel
from treeattn.steps.overlap import beside
from treeattn.transports.base import Bytes

__all__ = ["Pending", "Wire"]

Array: TypeAlias = npt.NDArray[Any]
Ends: TypeAlias = "Iterable[tuple[int, Array]]"
T = TypeVar("T")

_OPERATIONS = {"max": np.maximum, "sum": np.add}


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Messages under way."""

    requests: list[Any]


class Wire:
    """The messages of one collective operation; `treeattn.ranks.team.Team.converse` gives one.

    Both ends know beforehand how long a message is: an empty one is not sent at all. Messages between two ranks
    arrive in the order in which they were started.

    Parameters
    ----------
    channel : Channel
    """

    def __init__(self, channel: Channel) -> None:
        self.rank, self.size, self.hosts = channel.rank, channel.size, channel.hosts
        self._transport, self._tally = channel.transport, channel.tally
        self._held = self._peak = self._products = 0
        self._under_way: list[Pending] = []

    @property
    def native_allreduce(self) -> bool:
        """Whether `allreduce` is one call of the runtime's own collective."""
        return self._transport.native_allreduce

    def start(self, *, sends: Ends = (), receives: Ends = ()) -> Pending:
        """Start messages of C-contiguous arrays, given as (rank, array); they must stay as they are until `finish`."""
        arriving = [(source, piece) for source, array in receives for piece in self._cut(array, source)]
        requests = [self._transport.irecv(piece, source, 0) for source, piece in arriving]
        for dest, array in sends:
            for piece in self._cut(array, dest):
                requests.append(self._transport.isend(piece, dest, 0))
                self._tally.sent(dest, piece.size)
        self._under_way.append(Pending(requests))
        return self._under_way[-1]

    def finish(self, pending: Pending) -> None:
        """Wait until all of ``pending`` has been sent and has arrived."""
        self._transport.wait(pending.requests)
        self._under_way.remove(pending)

    def compute(self, work: Callable[[], T]) -> T:
        """Do ``work``, which keeps processors of this rank busy, while messages that were started move on."""
        requests = [request for pending in self._under_way for request in pending.requests]
        if not requests or not self._transport.needs_progress:
            return work()
        return beside(lambda: self._transport.progress(requests), work)

    def round(self, number: int = 1, *, crossing: bool) -> None:
        """Count rounds; ``crossing`` if any rank's message of them goes to another host."""
        self._tally.rounds(number, number * crossing)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.uint8) -> Array:
        """Allocate a message buffer, counted in `Usage`."""
        array: Array = np.empty(shape, dtype)
        self._held += array.nbytes
        self._peak = max(self._peak, self._held)
        return array

    def contiguous(self, array: Array) -> Array:
        """Give ``array`` as it can travel: itself, or a copy in a buffer of `empty`."""
        if array.flags.c_contiguous:
            return array
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def drop(self, array: Array) -> None:
        """Take a buffer of `empty` out of the count; the caller lets go of it."""
        self._held -= array.nbytes

    def work(self, products: int) -> None:
        """Count query-key products that were given to a kernel."""
        self._products += products

    @property
    def usage(self) -> Usage:
        """What was counted so far that is not a message."""
        return Usage(self._peak, self._products)

    def allreduce(self, array: Array, operation: Literal["max", "sum"]) -> None:
        """Reduce a contiguous float array over all ranks, in place.

        MPI does it where the ranks are MPI's, and that is counted as one call. Elsewhere each rank reduces one
        part, in rank order, and sends it to all: two rounds, in which each rank sends 2 (p - 1) / p of the array.
        """
        if self.size > 1 and not self._transport.allreduce(array, operation):
            self._reduce_parts(array.reshape(-1), operation)
        elif self.size > 1:
            self._tally.collectives += 1

    def _reduce_parts(self, flat: Array, operation: str) -> None:
        parts = np.array_split(flat, self.size)
        mine, others = parts[self.rank], [rank for rank in range(self.size) if rank != self.rank]
        inbox = {rank: self.empty(mine.shape, mine.dtype) for rank in others}
        self.swap([(rank, parts[rank]) for rank in others], inbox.items())
        total = inbox.get(0, mine).copy()
        for rank in range(1, self.size):
            _OPERATIONS[operation](total, inbox.get(rank, mine), out=total)
        mine[...] = total
        self.swap([(rank, mine) for rank in others], [(rank, parts[rank]) for rank in others])
        for array in inbox.values():
            self.drop(array)

    def swap(self, sends: Ends, receives: Ends) -> None:
        """Send and receive in one round between all ranks, and wait."""
        self.round(crossing=len(set(self.hosts)) > 1)
        self.finish(self.start(sends=sends, receives=receives))

    def _cut(self, array: Array, other: int) -> list[Bytes]:
        return cut(array.reshape(-1).view(np.uint8), between=self._tally.crosses(other))
