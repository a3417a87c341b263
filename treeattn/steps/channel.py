"""The wire of one communicator: its transport, who is where, what was counted, and whether it still holds."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from treeattn.errors import CommError, RankTimeout
from treeattn.execution.counting import Count
from treeattn.execution.tally import Tally
from treeattn.execution.window import room_for_state
from treeattn.steps.guard import Guard
from treeattn.transports.base import Mark, Silence, Transport, with_tags
from treeattn.transports.gpu_mpi import Verdict

if TYPE_CHECKING:
    from treeattn.execution.executor import Exchange

__all__ = ["Channel", "Joined"]

T = TypeVar("T")

FIRST_GATHER = 1024
"""Bytes per rank of the first exchange of descriptions; longer ones are exchanged again, whole."""

GRACE = 0.5, 5.0
"""At least and at most so many seconds are ranks given to answer the roll; in between, half the time-out."""

_LENGTH = struct.Struct("<I")


class Joined(Protocol):
    """Cards of all ranks that carry states themselves, however they are joined."""

    def exchange(self, session: Any, *common: Any) -> Exchange:
        """Make an exchange of a session, of what `treeattn.execution.executor.Exchange` takes."""

    def free(self) -> None:
        """Give the cards back; collective."""

    def abort(self) -> None:
        """Give them back where others may be lost."""


class Channel:
    """A transport that breaks for good, with a reason, when something that was sent or awaited goes wrong.

    Parameters
    ----------
    transport : Transport
        Ours alone.

    Attributes
    ----------
    most_room : int
        Bytes of the largest state for which windows may have room: less where /dev/shm had no room for more.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport, self.guard = transport, Guard(transport.size)
        self.rank, self.size = transport.rank, transport.size
        self.steps, self.freed = Count(), False
        self._branches: list[Transport] = []
        self._given: tuple[Transport, Transport] | None = None
        self.gpu_memory = Verdict((), "not asked")
        self.cards: Joined | None = None
        self.collective = ""
        self.wire_dtype: str | None = None
        self.name_hosts(("unknown",) * self.size)
        transport.on_end(self.guard.close)
        _channels.add(self)

    @property
    def step(self) -> int:
        """Number of the last step that this rank has begun."""
        return self.steps.value

    def name_hosts(self, hosts: tuple[str, ...]) -> None:
        """Take the host map, and count from here on."""
        self.hosts, self.most_room = hosts, room_for_state(hosts)
        self.tally = Tally(hosts, self.rank)

    def apart(self, branch: Transport, first: int) -> Channel:
        """Give a channel for calls within a call: counted apart, states as they are, and one plan, on a branch of ours.

        Its tags are those from ``first`` on, so that several can share the branch.
        """
        made = copy(self)
        made._given = with_tags(branch, first), branch
        made.guard, made.wire_dtype = Guard(self.size), None
        made.name_hosts(self.hosts)
        made.most_room = self.most_room
        return made

    def operate(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a whole operation, and no other meanwhile; where Ctrl-C cuts it short, ranks have lost each other."""
        try:
            return self.guard.run(function, *arguments)
        except Exception:
            raise
        except BaseException as error:
            self.break_off(error)
            raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what sends and receives; if it does not end well, ranks have lost each other, and that is for good."""
        try:
            return function(*arguments)
        except Silence as silence:
            late = self._call_roll(Mark(self.step, silence.round))
            self._break(str(late))
            raise late from None
        except BaseException as error:
            self.break_off(error)
            if self.size == 1 or isinstance(error, CommError) or not isinstance(error, Exception):
                raise
            raise CommError(f"the ranks lost each other in the middle of an operation: {error}") from error

    def break_off(self, error: BaseException) -> None:
        """Break because of an error in the middle of an operation; a rank that is alone has nobody to lose."""
        if self.size > 1:
            self._break(f"{type(error).__name__}: {error}")

    def _call_roll(self, mark: Mark) -> RankTimeout:
        """Find out who is missing: not those for whom this rank waits, who may wait in vain themselves."""
        timeout = self.transport.timeout
        found = self.transport.call_roll(mark, min(max(timeout / 2, GRACE[0]), GRACE[1]))
        missing = tuple(rank for rank in range(self.size) if rank not in found)
        where, last = f"in step {mark.step}, round {mark.round}", max(each.step for each in found.values()) - 1
        if not missing:
            return RankTimeout(
                f"no rank is silent, but others gave up after {timeout:g} s {where}: one came too late, or ranks do "
                "not begin and end their all-reduces in the same order"
            )
        late = ", ".join(f"rank {rank} on host {self.hosts[rank]}" for rank in missing)
        heard = "when the communicator was made" if last < 0 else f"in step {last}"
        text = f"nothing came from {late} for {timeout:g} s {where}; last heard {heard}"
        return RankTimeout(text, missing, tuple(self.hosts[rank] for rank in missing), None if last < 0 else last)

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
        padded = _LENGTH.pack(len(data)) + data[:room].ljust(room, b"\0")
        return self.transport.allgather(padded) if self.size > 1 else [padded]

    def share(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        """Give every rank's values, which JSON can carry, by rank; collective, in the middle of an operation."""
        return [json.loads(each) for each in self.gather(json.dumps(values).encode())]

    def branch(self) -> Transport:
        """Make a transport for one plan; collective."""
        if self._given is not None:
            return self._given[0]
        made = self.call(self.transport.branch)
        self._branches.append(made)
        return made

    def retire(self, branch: Transport) -> None:
        """Give a plan's transport back, or the one that several share; every rank does, between the same two steps."""
        if self._given is not None:
            branch = self._given[1]
        if branch in self._branches:
            self._branches.remove(branch)
            branch.free()

    def free(self) -> None:
        """Give the transports back; collective."""
        self.operate(self._free)

    def _free(self) -> None:
        self.guard.close("this communicator was freed")
        self.freed = True
        if self.cards is not None:
            self.cards.free()
        for transport in (*self._branches, self.transport):
            transport.free()

    def _break(self, reason: str) -> None:
        self.guard.close(f"this communicator is broken ({reason}); end the job, or make another of the ranks left")
        if self.cards is not None:
            self.cards.abort()
        for transport in (*self._branches, self.transport):
            transport.abandon()


_channels: WeakSet[Channel] = WeakSet()


def _leave_to_parent() -> None:
    """Keep a forked child from sending as if it were its parent, or writing to memory that the parent's host shares."""
    for channel in _channels:
        if channel.size > 1:
            channel.guard.close("this process is a fork of the rank whose communicator this is")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
