"""All-reduces that are begun now and ended later, several of them in flight at once.

Each runs in a lane: a session with plans, buffers, duplicate communicators and shared memory of its own, so that what
one lane sends never meets what another awaits. Ranks take lanes alike, since they begin and end in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from treeattn.errors import CommError
from treeattn.execution.agreement import Attempt
from treeattn.state import PartialState
from treeattn.steps.channel import Channel
from treeattn.steps.overlap import beside
from treeattn.steps.session import Session

__all__ = ["IN_FLIGHT", "Lanes", "Reduction"]

T = TypeVar("T")

IN_FLIGHT = 8
"""So many all-reduces of one communicator may be begun and not yet ended."""


class Reduction:
    """An all-reduce that was begun; what `treeattn.TreeComm.allreduce_begin` gives."""

    def __init__(self, finish: Callable[[], PartialState | None]) -> None:
        self._finish: Callable[[], PartialState | None] | None = finish

    def __repr__(self) -> str:
        return f"<all-reduce that {'was ended' if self._finish is None else 'is in flight'}>"

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
        finish, self._finish = self._finish, None
        if finish is None:
            raise CommError("this all-reduce was ended before")
        merged = finish()
        assert merged is not None, "without a root, every rank has the result"
        return merged


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

    def begin(self, attempt: Attempt, out: PartialState | None) -> Reduction:
        """Start an attempt, and move on what is in flight."""
        lane = self._channel.operate(self._begin, attempt)
        return Reduction(partial(self._channel.operate, self._end, lane, out))

    def _begin(self, attempt: Attempt) -> Session:
        if not self.room(1):
            raise CommError(f"{IN_FLIGHT} all-reduces of this communicator are in flight: end one before the next")
        lane = self.take()
        try:
            lane.begin(attempt, lent=True)
            self._channel.call(self.advance)
        except BaseException:
            self.leave(lane)
            raise
        return lane

    def room(self, lanes: int) -> bool:
        """Whether so many more may be in flight."""
        return len([lane for lane in self._lanes if lane in self._flying]) + lanes <= IN_FLIGHT

    @property
    def ready(self) -> bool:
        """Whether the next lane is there, and what is begun in it needs nothing but messages."""
        free = self._free()
        return bool(free) and free[0].ready

    def _free(self) -> list[Session]:
        """Give the free lanes, as they were opened, in whatever order this rank has ended what it began."""
        return [lane for lane in self._lanes if lane not in self._flying]

    def take(self) -> Session:
        """Take the next lane, and open it where there is none; collective then."""
        free = self._free()
        if not free:
            free = [self._open()]
            self._lanes += free
        self._flying.append(free[0])
        return free[0]

    def leave(self, lane: Session) -> None:
        """Give a lane back."""
        self._flying.remove(lane)

    @contextmanager
    def flying(self, session: Session) -> Iterator[None]:
        """Let a session that is no lane move on with the lanes meanwhile."""
        self._flying.append(session)
        try:
            yield
        finally:
            self._flying.remove(session)

    def _end(self, lane: Session, out: PartialState | None) -> PartialState | None:
        try:
            return lane.end(out, partial(self.advance, lane))
        finally:
            self.leave(lane)

    def advance(self, ending: Session | None = None) -> None:
        """Move on what is in flight, except for the lane that does so itself."""
        for lane in self._flying:
            if lane is not ending:
                lane.advance()

    def beside(self, work: Callable[[], T]) -> T:
        """Do ``work``, which must not use the communicator, and let what is in flight move on in the meantime."""
        if not self._flying or not self._channel.transport.needs_progress:
            return work()
        result: T = self._channel.operate(self.move_beside, work)
        return result

    def move_beside(self, work: Callable[[], T]) -> T:
        """Do the same in the middle of an operation."""
        if not self._channel.transport.needs_progress:
            return work()
        return beside(lambda: self._channel.call(self._all_over), work)

    def _all_over(self) -> bool:
        self.advance()
        return all(lane.over for lane in self._flying)

    def complete(self) -> None:
        """Let everything in flight come to its end, whatever that is, before the communicator is freed."""
        for lane in self._flying:
            self._channel.call(lane.complete)

    def forget(self) -> None:
        """Let go of buffers and shared memory."""
        for lane in self._lanes:
            lane.forget()
