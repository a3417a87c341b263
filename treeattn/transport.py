"""What a communicator needs from whatever carries its bytes: MPI, or threads of one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "SelfTransport", "Silence", "Transport"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Silence(Exception):  # noqa: N818 - a fact that the communicator turns into a RankTimeout
    """Nothing came from ``ranks`` before the deadline."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"nothing came from ranks {list(ranks)}")
        self.ranks = tuple(ranks)


class Transport(ABC):
    """Ranks that can send each other bytes.

    Messages from one rank to another under one tag arrive in the order they were sent; nothing else is promised
    about order, and a send may wait for its receive. No method but `wait` and `allgather` waits for other ranks,
    and those two end with `Silence` at the deadline.
    """

    rank: int
    size: int
    timeout: float
    """Seconds that a wait may take; 0 waits for ever."""
    native_allreduce = False
    """Whether `allreduce` does anything."""

    @abstractmethod
    def isend(self, data: Bytes, dest: int, tag: int) -> Any:
        """Start to send ``data``, which must not change before the request is complete; give the request."""

    @abstractmethod
    def irecv(self, data: Bytes, source: int, tag: int) -> Any:
        """Start to receive at most ``data.size`` bytes; give the request."""

    @abstractmethod
    def wait(self, requests: list[Any], peers: Sequence[int]) -> None:
        """Wait until all ``requests`` are complete.

        Parameters
        ----------
        requests : list
        peers : sequence of int
            Whom each request is with.

        Raises
        ------
        Silence
            Some are not complete at the deadline.
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

    @abstractmethod
    def dup(self) -> Transport:
        """Make a transport of the same ranks whose messages never meet this one's; collective."""

    @abstractmethod
    def shared_memory_group(self) -> int:
        """Give a number that is equal on ranks that share memory; collective."""

    @abstractmethod
    def host_name(self) -> str:
        """Name of the host that this rank is on."""

    @abstractmethod
    def free(self) -> None:
        """Give everything back; collective."""

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

    def wait(self, requests: list[Any], peers: Sequence[int]) -> None:
        """There is nothing to wait for."""

    def allgather(self, data: bytes) -> list[bytes]:
        """Give this rank's data back."""
        return [data]

    def dup(self) -> SelfTransport:
        """Make another."""
        return SelfTransport()

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
