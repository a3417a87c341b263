"""All-reduces that are begun now and ended later, several of them in flight at once.

Each runs in a lane: a session with plans, buffers, duplicate communicators and shared memory of its own, so that what
one lane sends never meets what another awaits. Ranks take lanes alike, since they begin and end in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from treeattn.agreement import Attempt
from treeattn.channel import Channel
from treeattn.errors import CommError
from treeattn.overlap import beside
from treeattn.session import Session
from treeattn.state import PartialState

__all__ = ["IN_FLIGHT", "Lanes", "Reduction"]

T = TypeVar("T")

IN_FLIGHT = 8
"""So many all-reduces of one communicator may be begun and not yet ended."""


class Reduction:
    """An all-reduce that was begun; what `treeattn.TreeComm.allreduce_begin` gives."""

    def __init__(self, finish: Callable[[], PartialState | None]) -> None:
        self._finish: Callable[[], PartialState | None] | None = finish

    def end(self) -> PartialState:
        """Wait for the merged state; collective, and once only.

        Returns
        -------
        PartialState
            The same bits on every rank, those of `allreduce`.

        Raises
        ------
        InputError
            On every rank, if any rank's argument to ``allreduce_begin`` was wrong or the states differ.
        CommError
            It was ended before.
        """
        merged = self.end_at_root()
        assert merged is not None, "without a root, every rank has the result"
        return merged

    def end_at_root(self) -> PartialState | None:
        """Like `end`; None on ranks that are not the root, where there is one."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise CommError("this all-reduce was ended before")
        return finish()


class Lanes:
    """The lanes of one communicator of several ranks.

    Parameters
    ----------
    channel : Channel
    open_lane : callable
        Makes the session of a new lane; collective.
    """

    def __init__(self, channel: Channel, open_lane: Callable[[], Session]) -> None:
        self._channel, self._open = channel, open_lane
        self._lanes: list[Session] = []
        self._flying: list[Session] = []

    @property
    def opened(self) -> bool:
        """Whether there is any lane."""
        return bool(self._lanes)

    def begin(self, attempt: Attempt, out: PartialState | None) -> Reduction:
        """Start an attempt, and move on what is in flight."""
        with self._channel.guard:
            if len(self._flying) == IN_FLIGHT:
                raise CommError(f"{IN_FLIGHT} all-reduces of this communicator are in flight: end one before the next")
            lane = self._free_lane()
            self._flying.append(lane)
            try:
                lane.begin(attempt)
                self._channel.call(self._advance)
            except BaseException:
                self._flying.remove(lane)
                raise
        return Reduction(partial(self._end, lane, out))

    def _free_lane(self) -> Session:
        """Take the free lane that was opened first, in whatever order this rank has ended what it began."""
        free = [lane for lane in self._lanes if lane not in self._flying]
        if not free:
            free = [self._open()]
            self._lanes += free
        return free[0]

    def _end(self, lane: Session, out: PartialState | None) -> PartialState | None:
        with self._channel.guard:
            try:
                return lane.end(out, partial(self._advance, lane))
            finally:
                self._flying.remove(lane)

    def _advance(self, ending: Session | None = None) -> None:
        """Move on what is in flight, except for the lane that does so itself."""
        for lane in self._flying:
            if lane is not ending:
                lane.advance()

    def beside(self, work: Callable[[], T]) -> T:
        """Do ``work``, which must not use the communicator, and let what is in flight move on in the meantime."""
        transport = self._channel.transport
        if not self._flying or not transport.needs_progress:
            return work()
        with self._channel.guard:
            return beside(lambda: self._channel.call(self._all_over), work)

    def _all_over(self) -> bool:
        self._advance()
        return all(lane.over for lane in self._flying)

    def complete(self) -> None:
        """Let everything in flight come to its end, whatever that is, before the communicator is freed."""
        for lane in self._flying:
            self._channel.call(lane.complete)

    def forget(self) -> None:
        """Let go of buffers and shared memory."""
        for lane in self._lanes:
            lane.forget()
