"""What ranks that are threads of one process share: messages under way, who waits for what, and who has left."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treeattn.errors import CommError
from treeattn.transports.base import Bytes, Mark

__all__ = ["LOOK", "Channel", "Request", "World"]

LOOK = 1e-3
"""Seconds between looks at what nobody tells of."""

LOOKS_IN_VAIN = 50
"""Looks of every rank without any event after which no rank can go on."""


@dataclass(eq=False, slots=True)
class Request:
    """One end of a message: a buffer, and whether the transfer is over."""

    data: Bytes
    done: bool = False


@dataclass(eq=False)
class Channel:
    """Sends and receives under one (context, source, dest, tag) that have not met yet."""

    source: int
    dest: int
    sends: deque[Request] = field(default_factory=deque)
    receives: deque[Request] = field(default_factory=deque)

    def transfer(self) -> None:
        """Let the oldest send and the oldest receive meet."""
        send, receive = self.sends.popleft(), self.receives.popleft()
        if send.data.size > receive.data.size:
            raise CommError(f"a message of {send.data.size} bytes is too long for {receive.data.size}")
        receive.data[: send.data.size] = send.data
        send.done = receive.done = True


class World:
    """What the threads share: channels, who waits for what, and who has left. One lock guards it all.

    Each rank waits on a condition of its own, and only messages that can arrive are looked at: with 64 ranks,
    waking all of them for every message, or looking through all channels, would take longer than the work itself.

    A rank that waits for what is no message looks by itself, without the lock, since it may send and receive as it
    looks. Instead of requests it leaves the number of events that there were when it last looked in vain. What a rank
    does for others outside the messages is done when it begins to wait, which is an event, as an arrival and a leaving
    are; or as it looks, so that all look again a number of times before they are told that nobody can go on.
    """

    def __init__(self, size: int, hosts: Sequence[str], rendezvous: bool, seed: int | None) -> None:
        self.size, self.hosts, self.rendezvous = size, hosts, rendezvous
        self.lock = threading.Lock()
        self._changed = [threading.Condition(self.lock) for _ in range(size)]
        self._channels: dict[tuple[Any, ...], Channel] = {}
        self._ready: list[Channel] = []  # once for every pair of a send and a receive
        self.waiting: dict[int, list[Request] | int] = {}
        self._events = self._in_vain = 0
        self.rolls: defaultdict[tuple[int, ...], dict[int, Mark]] = defaultdict(dict)
        self.left: set[int] = set()
        self.stopped: str | None = None
        self._random = None if seed is None else random.Random(seed)

    def channel(self, context: tuple[int, ...], source: int, dest: int, tag: int) -> Channel:
        """Give the channel of that name."""
        key = context, source, dest, tag
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = Channel(source, dest)
        return found

    def post(self, channel: Channel, request: Request, own: deque[Request], other: deque[Request]) -> None:
        """Add a send or a receive to a channel; without a seed, what can arrive now does so at once."""
        own.append(request)
        if len(own) > len(other):  # nothing waits for this one yet
            return
        self._ready.append(channel)
        if self._random is None:
            self.progress()
        else:
            self._changed[channel.dest].notify()

    def progress(self) -> None:
        """Let every message that can arrive do so, in an order drawn by chance if there is a seed."""
        while self._ready:
            at = self._random.randrange(len(self._ready)) if self._random else 0
            channel = self._ready.pop(at)
            channel.transfer()
            self.happened()
            for rank in (channel.source, channel.dest):
                self._changed[rank].notify()

    def wait(self, rank: int, seconds: float | None) -> None:
        """Wait until something may have changed for a rank."""
        self._changed[rank].wait(seconds)

    @property
    def events(self) -> int:
        """Number of events, and of times that all are to look again."""
        return self._events

    def happened(self) -> None:
        """Take note of an event."""
        self._events, self._in_vain = self._events + 1, 0

    def stuck(self) -> bool:
        """Whether every rank that is still there waits, and for something that can't come.

        Before that is said of ranks that look by themselves, they are made to look again.
        """
        waits = all(rank in self.waiting or rank in self.left for rank in range(self.size))
        if not waits or any(map(self._may_go_on, self.waiting.values())):
            return False
        looking = any(isinstance(awaited, int) for awaited in self.waiting.values())
        if not looking or self._in_vain == LOOKS_IN_VAIN:
            return True
        self._events, self._in_vain = self._events + 1, self._in_vain + 1
        return False

    def _may_go_on(self, awaited: list[Request] | int) -> bool:
        if isinstance(awaited, int):
            return awaited != self._events
        return all(request.done for request in awaited)

    def stop(self, reason: str) -> None:
        """End all waiting, now and later."""
        self.stopped = self.stopped or reason
        self.wake_all()

    def wake_all(self) -> None:
        """Let every rank look again at what it waits for."""
        for changed in self._changed:
            changed.notify()

    def leave(self, rank: int) -> None:
        """Take note that a rank's function has ended."""
        with self.lock:
            self.left.add(rank)
            self.happened()
            self.progress()
            if self.waiting and self.stuck():
                self.stop(f"rank {rank} has ended while others still waited for it")
