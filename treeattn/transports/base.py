"""What a communicator needs from whatever carries its bytes: MPI, or threads of one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.transports.clocks import Clock, WallTime
from treeattn.transports.gpu_mpi import Verdict

__all__ = [
    "Bytes",
    "Mark",
    "Meanwhile",
    "Prepared",
    "RowReduction",
    "SelfTransport",
    "Silence",
    "Transport",
    "Usual",
    "nothing",
    "with_tags",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

REMEMBERED, REST = 4, 0.75
"""So many waits are remembered, and that part of the shortest is a rest."""

SHORTEST_REST = 1e-3
"""Seconds; of what takes less, looking up early is worth more than what it costs."""

Meanwhile: TypeAlias = Callable[[], None]
"""What may be done now and then during a wait; it does not wait itself."""


def nothing() -> None:
    """Do nothing meanwhile."""


class Usual:
    """How long the last waits at one place took, so that a rank can sleep through the first part of the next one.

    Where ranks outnumber cores, each look at what can't have come yet takes its time from a rank that has work.

    Examples
    --------
    >>> usual = Usual()
    >>> for milliseconds in (14, 12, 16, 12):
    ...     usual.took(milliseconds * 1e-3)
    >>> round(usual.rest * 1e3, 1)
    9.0
    """

    __slots__ = ("_waits", "rest")

    def __init__(self) -> None:
        self._waits: deque[float] = deque([0.0] * REMEMBERED, REMEMBERED)
        self.rest = 0.0

    def took(self, seconds: float) -> None:
        """Take note of a wait.

        A rest is a part of the shortest of them: it ends before what is awaited comes, unless that comes much sooner
        than it used to, and then the next rest is shorter.
        """
        self._waits.append(seconds)
        rest = REST * min(self._waits)
        self.rest = rest if rest > SHORTEST_REST else 0.0


class Mark(NamedTuple):
    """How far a rank is: the step of its communicator, and the round of the plan in that step."""

    step: int
    round: int


class Silence(Exception):  # noqa: N818 - a fact that the communicator turns into a RankTimeout
    """Not all that was awaited came before the deadline, or another rank has already called the roll."""

    def __init__(self, round: int = 0) -> None:
        super().__init__("not all that was awaited came in time")
        self.round = round


@dataclass(eq=False)
class Prepared:
    """A request that can be started again and again, where the runtime has none of its own."""

    post: Callable[[], Any]
    started: Any = None


class RowReduction(Protocol):
    """A collective of the runtime's own that merges rows of all ranks."""

    def start(self, root: int | None) -> Any:
        """Start it for all ranks, or for ``root`` alone; collective. Gives a request for `Transport.wait`."""


class Transport(ABC):
    """Ranks that can send each other bytes.

    Messages from one rank to another under one tag arrive in the order they were sent; nothing else is promised
    about order, and a send may wait for its receive. `wait` and `allgather` end with `Silence` at the deadline, and
    also, when they have waited for some milliseconds, if another rank has called the roll: who waits for a rank
    that itself waits for a missing one then learns of that in time.
    """

    rank: int
    size: int
    timeout: float
    """Seconds that a wait may take; 0 waits for ever. A branch has that of the transport it was made from."""
    native_allreduce = False
    """Whether `allreduce` does anything."""
    shares_memory = True
    """Whether ranks of one host may share memory beside the messages here."""
    needs_progress = False
    """Whether messages only move while `progress` or `wait` is called."""
    clock: Clock = WallTime()
    """Tells how long messages take, and what is computed between them."""

    @abstractmethod
    def isend(self, data: Bytes, dest: int, tag: int) -> Any:
        """Start to send ``data``, which must not change before the request is complete; give the request."""

    @abstractmethod
    def irecv(self, data: Bytes, source: int, tag: int) -> Any:
        """Start to receive at most ``data.size`` bytes; give the request."""

    def send_init(self, data: Bytes, dest: int, tag: int) -> Any:
        """Prepare to send ``data`` any number of times; give a request for `start`."""
        return Prepared(lambda: self.isend(data, dest, tag))

    def recv_init(self, data: Bytes, source: int, tag: int) -> Any:
        """Prepare to receive at most ``data.size`` bytes any number of times; give a request for `start`."""
        return Prepared(lambda: self.irecv(data, source, tag))

    def start(self, requests: list[Any]) -> None:
        """Start prepared requests, each of which is complete or was never started."""
        for request in requests:
            request.started = request.post()

    @abstractmethod
    def wait(self, requests: Sequence[Any], meanwhile: Meanwhile = nothing, usual: Usual | None = None) -> None:
        """Wait until all ``requests`` are complete.

        Parameters
        ----------
        requests : sequence
        meanwhile : callable, optional
            Moves on what else is under way; a transport whose messages move by themselves need not call it.
        usual : Usual, optional
            What is known of this wait, for a transport that can make use of it; not where ``meanwhile`` is given.

        Raises
        ------
        Silence
            Some are not complete at the deadline, or the roll is called.
        """

    @abstractmethod
    def progress(self, requests: Sequence[Any]) -> bool:
        """Let messages move, without waiting; give whether all ``requests`` are complete."""

    @abstractmethod
    def wait_for(self, ready: Callable[[], bool], sleep: Callable[[], None], usual: Usual | None = None) -> None:
        """Wait until ``ready()``, for what is no message; ends like `wait`.

        ``sleep()`` returns when it may be time to look again, and after some milliseconds in any case.
        """

    @abstractmethod
    def call_roll(self, mark: Mark, grace: float) -> dict[int, Mark]:
        """Tell all ranks how far this one is, and give, by rank, what they tell within ``grace`` seconds.

        Whoever is missing in the answer is neither waiting here nor on its way to. Nothing else may be done with
        this transport afterwards but `abandon`.
        """

    @abstractmethod
    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank's ``data``, all of one length, by rank."""

    def allreduce(self, array: Any, operation: str) -> bool:
        """Reduce a contiguous float array in place, by "max" or "sum", if the runtime has a call for that.

        Returns
        -------
        bool
            False where it has none, and nothing was done.
        """
        return False

    def operator_reasons(self) -> list[str]:
        """Say why the runtime can't reduce by an operator of ours; `row_reduction` is for where there is no reason."""
        return ["these ranks are not MPI's"]

    def row_reduction(self, sent: Bytes, merged: Bytes, row_bytes: int, operator: int) -> RowReduction:
        """Prepare to reduce the rows at ``sent`` to ``merged``, any number of times, by compiled code for two rows.

        Parameters
        ----------
        sent, merged : uint8 array
            Both of the same length.
        row_bytes : int
            Bytes of a row, which is never cut; a multiple of 4.
        operator : int
            Address of the code; what it does is the same on every rank. See `treeattn.wire_form.operator`.
        """
        raise NotImplementedError

    def on_end(self, close: Callable[[str], None]) -> None:  # noqa: B027 - most runtimes never end
        """Have ``close`` called with the reason when nothing can be sent any more, as the runtime has ended."""

    def watched(self, what: str) -> AbstractContextManager[None]:
        """Stand guard over a call that can't be waited for: where that is possible, the job ends at the deadline."""
        return nullcontext()

    def gpu_memory(self) -> Verdict:
        """Say which GPU memory messages may be in; none where only the CPU moves bytes."""
        return Verdict((), "messages are copied by the CPU")

    @abstractmethod
    def dup(self) -> Transport:
        """Make a transport of the same ranks whose messages never meet this one's; collective."""

    @abstractmethod
    def branch(self) -> Transport:
        """Make a `dup` that shares this one's deadline and roll; collective.

        Receives that one plan has started ahead would swallow another's messages, and both would then wait for
        ever: each plan has a branch of its own.
        """

    @abstractmethod
    def shared_memory_group(self) -> int:
        """Give a number that is equal on ranks that share memory; collective."""

    @abstractmethod
    def host_name(self) -> str:
        """Name of the host that this rank is on."""

    @abstractmethod
    def free(self) -> None:
        """Give everything back, receives that are started among it; collective."""

    @abstractmethod
    def abandon(self) -> None:
        """Take note that an operation was cut short: nothing may be sent here any more, or waited for at exit."""


class SelfTransport(Transport):
    """One process, which has nobody to talk to."""

    rank = 0
    size = 1
    timeout = 0.0

    def isend(self, data: Bytes, dest: int, tag: int) -> Any:
        """Never called: plans for one rank have no messages."""
        raise NotImplementedError

    def irecv(self, data: Bytes, source: int, tag: int) -> Any:
        """Never called: plans for one rank have no messages."""
        raise NotImplementedError

    def wait(self, requests: Sequence[Any], meanwhile: Meanwhile = nothing, usual: Usual | None = None) -> None:
        """There is nothing to wait for."""

    def progress(self, requests: Sequence[Any]) -> bool:
        """There is nothing to move."""
        return True

    def wait_for(self, ready: Callable[[], bool], sleep: Callable[[], None], usual: Usual | None = None) -> None:
        """Never called."""
        raise NotImplementedError

    def call_roll(self, mark: Mark, grace: float) -> dict[int, Mark]:
        """Nobody else is here."""
        return {0: mark}

    def allgather(self, data: bytes) -> list[bytes]:
        """Give this rank's data back."""
        return [data]

    def operator_reasons(self) -> list[str]:
        """There is nothing to reduce, which any runtime can."""
        return []

    def dup(self) -> SelfTransport:
        """Make another."""
        return SelfTransport()

    branch = dup

    def shared_memory_group(self) -> int:
        """There is one."""
        return 0

    def host_name(self) -> str:
        """Name of this host."""
        import socket

        return socket.gethostname()

    def free(self) -> None:
        """There is nothing to give back."""

    def abandon(self) -> None:
        """Nobody waits."""


def with_tags(transport: Transport, first: int) -> Transport:
    """Give the same transport with tags that begin at ``first``, for one of several plans that share it.

    It is made by this rank alone, and nothing that is to be freed.
    """
    view = copy(transport)
    for name in ("isend", "irecv", "send_init", "recv_init"):
        setattr(view, name, partial(_under_tag, getattr(transport, name), first))
    return view


def _under_tag(call: Callable[..., Any], first: int, data: Bytes, rank: int, tag: int) -> Any:
    return call(data, rank, first + tag)
