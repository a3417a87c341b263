"""The wires of a cluster on one machine: a transport that holds every message for as long as its way would take.

Each message is accompanied by the time at which it was sent. Who receives it waits until that time plus the delay of
the way between the two ranks' hosts has come. Messages under way do not hinder each other, and sending takes no time:
it is latency that is emulated, not bandwidth.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeattn.errors import InputError
from treeattn.topology import check_hosts
from treeattn.transport import Bytes, Transport

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
    """One end of a message: its data, the stamp that goes with it, and, where it is received, its delay."""

    data: Any
    stamp: Any
    sent_at: Bytes
    delay: float | None


class DelayedTransport(Transport):
    """Ranks on hosts that are imagined, with messages as slow as between such hosts; collective to make.

    Parameters
    ----------
    transport : Transport
        What really carries the messages; clocks must be the same on all of its ranks, as they are on one machine.
    hosts : sequence of str
        One label per rank.
    delays : Delays
    clock, sleep : callable
        Give the time, and let it pass; tests have their own.

    Examples
    --------
    >>> import treeattn
    >>> from treeattn.emulation import DelayedTransport, Delays
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
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._hosts, self._delays = check_hosts(hosts, self.size), delays
        self._clock, self._sleep = clock, sleep
        self._carrier, self._stamps = transport, transport.dup()

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
        """Start to send, with the time."""
        stamp = np.frombuffer(_STAMP.pack(self._clock()), np.uint8)
        return _Message(self._carrier.isend(data, dest, tag), self._stamps.isend(stamp, dest, tag), stamp, None)

    def irecv(self, data: Bytes, source: int, tag: int) -> _Message:
        """Start to receive, with the time."""
        stamp = np.empty(_STAMP.size, np.uint8)
        requests = self._carrier.irecv(data, source, tag), self._stamps.irecv(stamp, source, tag)
        return _Message(*requests, stamp, self._delay(source))

    def wait(self, requests: list[_Message], peers: Sequence[int]) -> None:
        """Wait until all are complete and due."""
        parts = [request for message in requests for request in (message.data, message.stamp)]
        self._carrier.wait(parts, [peer for peer in peers for _ in range(2)])
        received = [(m.sent_at.tobytes(), m.delay) for m in requests if m.delay is not None]
        self._wait_until([_STAMP.unpack(sent_at)[0] + delay for sent_at, delay in received])

    def _wait_until(self, due: list[float]) -> None:
        left = max(due, default=0.0) - self._clock()
        if left > 0:
            self._sleep(left)

    def allgather(self, data: bytes) -> list[bytes]:
        """Give every rank's data, each due like a message from that rank."""
        found = self._carrier.allgather(_STAMP.pack(self._clock()) + data)
        self._wait_until([_STAMP.unpack_from(each)[0] + self._delay(rank) for rank, each in enumerate(found)])
        return [each[_STAMP.size :] for each in found]

    def dup(self) -> DelayedTransport:
        """Make another of the same ranks, hosts and delays."""
        carrier = self._carrier.dup()
        return DelayedTransport(carrier, self._hosts, self._delays, clock=self._clock, sleep=self._sleep)

    def shared_memory_group(self) -> int:
        """Lowest rank with the same host label."""
        return self._hosts.index(self._hosts[self.rank])

    def host_name(self) -> str:
        """Give the label of this rank's host."""
        return self._hosts[self.rank]

    def free(self) -> None:
        """Free both carriers; the first is ours where `dup` made it, as every communicator's is."""
        self._stamps.free()
        self._carrier.free()

    def abandon(self) -> None:
        """Abandon both carriers."""
        self._stamps.abandon()
        self._carrier.abandon()
