"""The exchanges of one call that is made in groups: one group's state is under way while the next one's is computed.

The first group's exchange is one of the communicator's main session, like any call that is not made in groups: ranks
that do something else, or have another number of groups, meet there and learn of it. The others are in lanes, and begin
before that is known, where they need nothing but messages for it. So, if the first exchange fails, ranks tell each
other how many lanes they have entered, and all enter and leave as many: nothing of a failed call stays under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from treeattn.errors import CommError
from treeattn.execution.agreement import Attempt
from treeattn.state import PartialState
from treeattn.steps.channel import Channel
from treeattn.steps.lanes import Lanes
from treeattn.steps.session import Session

__all__ = ["Beside", "Groups"]

Beside: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Does some work, and gives what that returns, while messages move on."""


class Groups:
    """What makes calls in groups, on one communicator of several ranks.

    Parameters
    ----------
    channel : Channel
    lanes : Lanes
    main : Session
        The communicator's own.
    """

    def __init__(self, channel: Channel, lanes: Lanes, main: Session) -> None:
        self._channel, self._lanes, self._main = channel, lanes, main
        self._entered: list[Session] = []
        self._agreed = False
        main.groups = self

    @property
    def unagreed(self) -> int:
        """Number of lanes that this rank has entered without knowing whether the others have."""
        return 0 if self._agreed else len(self._entered)

    def run(self, groups: int, attempt: Callable[[int, Beside], Attempt]) -> list[PartialState | None]:
        """Compute and merge one group after the other; collective.

        Parameters
        ----------
        groups : int
        attempt : callable
            Computes a group's state, given its number and a way to do that beside messages, or says what went wrong.

        Returns
        -------
        list of PartialState or None
            Merged states by group; None on ranks that are not the root, where there is one.

        Raises
        ------
        Exception
            On every rank, what went wrong on any; nothing of this call is under way then.
        """
        try:
            with self._lanes.flying(self._main):
                return self._run(groups, attempt)
        except Exception:
            self._give_up()
            raise
        finally:
            self._leave()

    def _run(self, groups: int, attempt: Callable[[int, Beside], Attempt]) -> list[PartialState | None]:
        first = attempt(0, lambda work: work())
        if not self._lanes.room(groups - 1):
            first = replace(first, error=CommError(f"too many all-reduces are in flight for {groups} groups more"))
        self._main.begin(first)
        merged = [self._agree(first)] if first.error is not None else []
        outs: list[PartialState | None] = []
        for index in range(1, groups):
            tried = attempt(index, self._lanes.move_beside)
            if not merged and not self._lanes.ready:  # to go on takes more than messages
                merged.append(self._agree(first))
            self._enter(tried)
            outs.append(tried.state)
        merged = merged or [self._agree(first)]
        return merged + self._ended(outs)

    def _agree(self, first: Attempt) -> PartialState | None:
        """End the first group's exchange."""
        merged = self._main.end(first.state, partial(self._lanes.advance, self._main))
        self._agreed = True
        return merged

    def _enter(self, attempt: Attempt) -> None:
        lane = self._lanes.take()
        try:
            lane.begin(attempt)
        except BaseException:
            self._lanes.leave(lane)
            raise
        self._entered.append(lane)
        self._channel.call(self._lanes.advance)

    def _ended(self, outs: list[PartialState | None]) -> list[PartialState | None]:
        """End all in lanes, whatever becomes of each, and raise the first error."""
        ended: list[PartialState | None] = []
        errors: list[Exception] = []
        for out in outs:
            lane = self._entered[0]
            try:
                ended.append(lane.end(out, partial(self._lanes.advance, lane)))
            except Exception as error:
                errors.append(error)
            self._lanes.leave(self._entered.pop(0))
        if errors:
            raise errors[0]
        return ended

    def settle(self, lanes: int) -> None:
        """After the first exchange has failed, enter as many lanes as some rank has entered, and leave all."""
        if lanes == 0:
            return
        while len(self._entered) < lanes:
            self._enter(Attempt(None, None, CommError("another exchange of this call has failed")))
        self._give_up()

    def _give_up(self) -> None:
        """End what was begun in lanes, whatever comes of it."""
        for lane in self._entered:
            try:
                lane.end(None)
            except Exception:
                if self._channel.guard.reason is not None:
                    raise
        self._leave()

    def _leave(self) -> None:
        for lane in self._entered:
            self._lanes.leave(lane)
        self._entered.clear()
        self._agreed = False
