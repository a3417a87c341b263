"""The wire of one communicator: its transport, who is where, what was counted, and whether it still holds."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

from treeattn.errors import CommError, RankTimeout
from treeattn.executor import Tally
from treeattn.guard import Guard
from treeattn.transport import Silence, Transport

__all__ = ["Channel"]

T = TypeVar("T")

FIRST_GATHER = 1024
"""Bytes per rank of the first exchange of descriptions; longer ones are exchanged again, whole."""

_LENGTH = struct.Struct("<I")


class Channel:
    """A transport that breaks for good, with a reason, when something that was sent or awaited goes wrong.

    Parameters
    ----------
    transport : Transport
        Ours alone.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.guard = transport, Guard()
        self.rank, self.size = transport.rank, transport.size
        self.step, self.freed = 0, False
        self.name_hosts(("unknown",) * self.size)

    def name_hosts(self, hosts: tuple[str, ...]) -> None:
        """Take the host map, and count from here on."""
        self.hosts = hosts
        self.tally = Tally(hosts, self.rank)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what sends and receives; if it does not end well, ranks have lost each other, and that is for good."""
        try:
            return function(*arguments)
        except Silence as silence:
            late = ", ".join(f"rank {rank} on host {self.hosts[rank]}" for rank in silence.ranks)
            text = f"nothing came from {late} for {self.transport.timeout:g} s, in step {self.step}"
            self._break(text)
            raise RankTimeout(text) from None
        except BaseException as error:
            self._break(f"{type(error).__name__}: {error}")
            if isinstance(error, CommError) or not isinstance(error, Exception):
                raise
            raise CommError(f"the ranks lost each other in the middle of an operation: {error}") from error

    def gather(self, data: bytes) -> list[bytes]:
        """Give every rank's data, of whatever lengths: in one exchange if all are short, else in two."""
        return self.call(self._gather, data)

    def _gather(self, data: bytes) -> list[bytes]:
        found = self._gather_padded(data, FIRST_GATHER - _LENGTH.size)
        longest = max(_LENGTH.unpack_from(each)[0] for each in found)
        if longest > FIRST_GATHER - _LENGTH.size:
            found = self._gather_padded(data, longest)
        return [each[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(each)[0]] for each in found]

    def _gather_padded(self, data: bytes, room: int) -> list[bytes]:
        self.tally.collectives += 1
        return self.transport.allgather(_LENGTH.pack(len(data)) + data[:room].ljust(room, b"\0"))

    def free(self) -> None:
        """Give the transport back; collective."""
        with self.guard:
            self.guard.close("this communicator was freed")
            self.freed = True
            self.transport.free()

    def _break(self, reason: str) -> None:
        self.guard.close(f"this communicator is broken ({reason}); end the job, or make another of the ranks left")
        self.transport.abandon()
