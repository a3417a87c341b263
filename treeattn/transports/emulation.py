"""The wires of a cluster on one machine: a transport that holds every message for as long as its way would take.

Each message begins with the time at which it was sent. Who receives it waits until that time plus the delay of the way
between the two ranks' hosts has come. Messages under way do not hinder each other, and sending takes no time: it is
latency that is emulated, not bandwidth. Data is copied on its way, which takes memory that real wires don't.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn.errors import InputError
from treeattn.planning.topology import check_hosts
from treeattn.transports.base import Bytes, Mark, Meanwhile, Prepared, Transport, Usual, nothing
from treeattn.transports.clocks import Clock, WallTime

__all__ = ["DelayedTransport", "Delays"]

_STAMP = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds that a message takes.

    Parameters
    ----------
    inside : float
        Between ranks of one host.
    between : float
        Between hosts.

    Examples
    --------
    >>> Delays.read("10"), Delays.read("0.02:10")
    (Delays(inside=0.0, between=0.01), Delays(inside=2e-05, between=0.01))
    """

    inside: float
    between: float

    @classmethod
    def read(cls, text: str) -> Delays:
        """Read milliseconds, as ``BETWEEN`` or ``INSIDE:BETWEEN``."""
        try:
            *inside, between = (float(word) / 1e3 for word in text.split(":"))
        except ValueError:
            inside, between = [], -1.0
        found = cls(inside[0] if inside else 0.0, between)
        if len(inside) > 1 or not (0 <= found.inside < np.inf and 0 <= found.between < np.inf):
            expected = "milliseconds between hosts, or inside a host and between hosts with a colon in between"
            raise InputError.of("latency", expected=expected, got=repr(text))
        return found


@dataclass(slots=True)
class _Message:
    """One end of a message: its request, its stamp and data in one buffer, and, where it is received, its delay."""

    request: Any
    framed: Bytes
    data: Bytes
    delay: float | None

    @property
    def due(self) -> float:
        """Time from which a message that is complete may be seen. What is only sent may always be."""
        if self.delay is None:
            return -np.inf
        sent_at: float = _STAMP.unpack(self.framed[: _STAMP.size].tobytes())[0]
        return sent_at + self.delay

    def arrive(self) -> None:
        """Hand the data over."""
        if self.delay is not None:
            self.data[...] = self.framed[_STAMP.size :]


class DelayedTransport(Transport):
    """Ranks on hosts that are imagined, with messages as slow as between such hosts.

    Parameters
    ----------
    transport : Transport
        What really carries the messages; clocks must be the same on all of its ranks, as they are on one machine.
    hosts : sequence of str
        One label per rank.
    delays : Delays
    clock : Clock, optional
        `WallTime` by default.

    Examples
    --------
    >>> import treeattn
    >>> from treeattn.transports.emulation import DelayedTransport, Delays
    >>> def program(transport):
    ...     far = DelayedTransport(transport, ["a", "b"], Delays(0, 1e-3))
    ...     with treeattn.TreeComm(far) as comm:
    ...         return comm.hosts, comm.bcast([comm.rank + 5]).tolist()
    >>> treeattn.testing.run_ranks(2, program)
    [(('a', 'b'), [5]), (('a', 'b'), [5])]
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Sequence[str],
        delays: Delays,
        clock: Clock | None = None,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._hosts, self._delays = check_hosts(hosts, self.size), delays
        self.clock = WallTime() if clock is None else clock
        self._carrier = transport

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take, without the delay; 0 waits for ever."""
        return self._carrier.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._carrier.timeout = seconds

    def _delay(self, rank: int) -> float:
        if rank == self.rank:
            return 0.0
        return self._delays.inside if self._hosts[rank] == self._hosts[self.rank] else self._delays.between

    def isend(self, data: Bytes, dest: int, tag: int) -> _Message:
        """Start to send, behind the time."""
        framed = _framed(data, self.clock())
        return _Message(self._carrier.isend(framed, dest, tag), framed, data, None)

    def irecv(self, data: Bytes, source: int, tag: int) -> _Message:
        """Start to receive; what is shorter than ``data`` leaves the rest of it as it is."""
        framed = _framed(data, 0.0)
        return _Message(self._carrier.irecv(framed, source, tag), framed, data, self._delay(source))

    shares_memory = False  # which would be faster than any delay

    def wait(
        self, requests: Sequence[_Message | Prepared], meanwhile: Meanwhile = nothing, usual: Usual | None = None
    ) -> None:
        """Wait until all are complete and due."""
        messages = [each.started if isinstance(each, Prepared) else each for each in requests]
        self._carrier.wait([message.request for message in messages], meanwhile, usual)
        self._wait_until([message.due for message in messages])
        for message in messages:
            message.arrive()

    @property
    def needs_progress(self) -> bool:  # type: ignore[override]
        """Whether the carrier's messages only move while it is called."""
        return self._carrier.needs_progress

    def progress(self, requests: Sequence[_Message | Prepared]) -> bool:
        """Let the carrier's messages move; give whether all are complete and due."""
        messages = [each.started if isinstance(each, Prepared) else each for each in requests]
        moved = self._carrier.progress([message.request for message in messages])
        return moved and max((message.due for message in messages), default=0.0) <= self.clock()

    def wait_for(self, ready: Callable[[], bool], sleep: Callable[[], None], usual: Usual | None = None) -> None:
        """Wait for what is no message, and has no delay."""
        self._carrier.wait_for(ready, sleep, usual)

    def call_roll(self, mark: Mark, grace: float) -> dict[int, Mark]:
        """Ask who is there, without delay."""
        return self._carrier.call_roll(mark, grace)

    def _wait_until(self, due: list[float]) -> None:
        left = max(due, default=0.0) - self.clock()
        if left > 0:
            self.clock.sleep(left)

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank's data, each due like a message from that rank."""
        found = self._carrier.allgather(_STAMP.pack(self.clock()) + data)
        self._wait_until([_STAMP.unpack_from(each)[0] + self._delay(rank) for rank, each in enumerate(found)])
        return [each[_STAMP.size :] for each in found]

    def on_end(self, close: Callable[[str], None]) -> None:
        """Leave it to the carrier."""
        self._carrier.on_end(close)

    def dup(self) -> DelayedTransport:
        """Make another of the same ranks, hosts and delays."""
        carrier = self._carrier.dup()
        return DelayedTransport(carrier, self._hosts, self._delays, self.clock)

    def branch(self) -> DelayedTransport:
        """Make one for a plan."""
        return DelayedTransport(self._carrier.branch(), self._hosts, self._delays, self.clock)

    def shared_memory_group(self) -> int:
        """Lowest rank with the same host label."""
        return self._hosts.index(self._hosts[self.rank])

    def host_name(self) -> str:
        """Give the label of this rank's host."""
        return self._hosts[self.rank]

    def free(self) -> None:
        """Free the carrier, which is ours where `dup` made it, as every communicator's is."""
        self._carrier.free()

    def abandon(self) -> None:
        """Abandon the carrier."""
        self._carrier.abandon()


def _framed(data: Bytes, now: float) -> Bytes:
    return np.concatenate([np.frombuffer(_STAMP.pack(now), np.uint8), data])
