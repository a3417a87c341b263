"""The short way of a step between hosts: compiled code before a host's messages and after them.

With ranks that outnumber cores, and have slept since the step before, what they do one after the other adds up: here
it is one compiled call on a rank that follows its host's leader, and two on one that has messages, with these between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from treeattn.execution.agreement import Attempt, Header
from treeattn.execution.counting import Count
from treeattn.execution.rounds import MessageRound
from treeattn.execution.window import compiled
from treeattn.execution.window_round import SPINS
from treeattn.planning.plan import Plan, RankRound
from treeattn.state import PartialState
from treeattn.steps.shortcut import Shortcut
from treeattn.transports.base import nothing

__all__ = ["relay_of"]

YIELDS = 20
"""How often a rank gives up its core before it sleeps, `treeattn.execution.window_round.SPINS` looks apart."""

SLEEP = np.array([0, 50_000_000], np.int64)
"""Seconds and nanoseconds that a rank sleeps at most in compiled code."""


class Part(NamedTuple):
    """A rank's part in a plan of rounds of messages, perhaps with a round in windows before them and one after them."""

    before: RankRound | None
    messages: tuple[RankRound, ...]
    after: RankRound | None

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Part | None:
        """Give this rank's part, where a plan is such a one."""
        shared = [each.shared for each in plan.rounds]
        if plan.pieces > 1 or all(shared) or any(shared[1:-1]) or shared[0] != shared[-1]:
            return None
        found = {step.number: step for step in plan.steps(rank)}
        ends = [found.pop(at, None) if shared[at] else None for at in (0, len(shared) - 1)]
        return cls(ends[0], tuple(found.values()), ends[1])

    @property
    def follows(self) -> bool:
        """Whether this rank gives its state to its host's leader, and gets the result from there."""
        before, messages, after = self
        if before is None or messages or after is None:
            return False
        return not before.receives and not after.sends and [each[1:] for each in after.receives] == [(1, 0)]

    @property
    def speaks(self) -> bool:
        """Whether it has messages, after a merge of what its host's ranks have; the last end in one merge or record."""
        before, messages, after = self
        if not messages:
            return False
        gathers = before is None or (not before.sends and len(before.merges) == 1)
        last, one = messages[-1], [(1, 0)]
        ends = len(last.merges) == 1 or (not last.merges and [each[1:] for each in last.receives] in ([], one))
        return gathers and ends and (after is None or not after.receives)


def relay_of(plan: Plan, rank: int) -> type[Shortcut] | None:
    """Give the short way of a rank through a plan, where there is one."""
    part = Part.of(plan, rank)
    if part is None:
        return None
    return _Speaker if part.speaks else _Follower if part.follows else None


class _Relay(Shortcut):
    """What ranks with messages and those who follow them have in common."""

    def _prepare(self) -> tuple[Callable[..., int], tuple[Any, Any]]:
        part = Part.of(self._exchange.plan, self._channel.rank)
        assert part is not None, "`relay_of` gives no way through other plans"
        self._window, self._records = self._exchange.window, self._exchange.records
        return self._prepare_part(part)

    @abstractmethod
    def _prepare_part(self, part: Part) -> tuple[Callable[..., int], tuple[Any, Any]]:
        """Give what `Shortcut` wants of ``_prepare``."""

    def _own_place(self, slots: Sequence[int]) -> Any:
        """Give what is this rank's own in compiled code."""
        self._uses = Count() if self._window is None else self._window.uses
        self._room = compiled().room(self._channel.size, self._exchange.form)
        place = relay_code().Place(
            header=self._header.ctypes.data,
            record=self._records.payloads[0].ctypes.data,
            room=self._room.ctypes.data,
            spins=SPINS,
            yields=YIELDS,
            drowsy=0,
            sleep=SLEEP.ctypes.data,
            steps=self._channel.steps.address,
            uses=self._uses.address,
            even_slot=slots[0],
            odd_slot=slots[1],
        )
        return np.array(place, np.int64)

    def _slots(self, rank: int) -> list[int]:
        """Addresses of a rank's two slots."""
        assert self._window is not None, "there are no rounds in windows"
        return [self._window.address(rank, use) for use in (0, 1)]

    def _resume(self, at: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        header = Header(self._channel.step, 0, self.signature.digest, attempt.check)
        self._exchange.resume(header, at)
        return self._go_on(attempt, out)


class _Follower(_Relay):
    """A rank that is not its host's leader: it publishes, and sleeps until there is a result."""

    def _prepare_part(self, part: Part) -> tuple[Callable[..., int], tuple[Any, Any]]:
        assert part.after is not None, "a rank that follows gets the result from its leader"
        ((leader, _, _),) = part.after.receives
        self._compiled: Callable[..., int] = relay_code().follow_at(self._exchange.form)
        place = self._own_place(self._slots(self._channel.rank))
        return self._follow, (np.array(self._slots(leader), np.int64), place)

    def _follow(self, state: Any, out: Any, leader: Any, place: Any) -> int:
        found = self._compiled(state, out, leader, place)
        if found == 0:
            self._exchange.ran()
        return found

    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        self._records.headers[0][:] = self._header.tobytes()  # with which those that come are compared
        return self._resume(1, attempt, out)


class _Speaker(_Relay):
    """A rank that has messages: it merges what its host's ranks have before them, and passes the result on after."""

    def _prepare_part(self, part: Part) -> tuple[Callable[..., int], tuple[Any, Any]]:
        before, messages, after = part
        form, rows = self._exchange.form, self._records.payloads
        self._gather: Callable[..., int] = relay_code().gather_at(form)
        self._spread: Callable[..., int] = relay_code().spread_at(form)
        places = [(at, each) for at, each in enumerate(self._exchange.rounds) if isinstance(each, MessageRound)]
        *self._earlier, (self._at, self._last) = places
        (order,) = messages[-1].merges or ((0,),)
        self._merged = np.array([rows[at].ctypes.data for at in order], np.int64)
        self._own = memoryview(self._header.view(np.uint8).data)
        self._place = self._own_place((0, 0) if after is None else self._slots(self._channel.rank))
        return self._speak, self._gathered(before)

    def _gathered(self, before: RankRound | None) -> tuple[Any, Any]:
        """Give the slots of this host's other ranks, and the rows to merge there."""
        own, ranks = self._records.payloads[0].ctypes.data, () if before is None else before.merges[0]
        places = {} if before is None else {at: self._slots(rank) for rank, _, at in before.receives}
        others = [slots[use] for use in (0, 1) for slots in places.values()]
        sources = [{0: [own, own], **places}[at][use] for use in (0, 1) for at in ranks]
        return np.array(others, np.int64), np.array(sources, np.int64)

    def _speak(self, state: Any, out: Any, others: Any, sources: Any) -> int:
        """Give 0 for a whole step; else 1 more than the place of the round in which it ends."""
        if self._gather(state, others, sources, self._place) != 0:
            return 1
        ended = self._channel.call(self._swap)
        if ended:
            return ended
        if self._spread(out, self._merged, self._place) != 0:
            return 1 + self._at
        self._exchange.start_ahead()
        self._exchange.ran()
        return 0

    def _swap(self) -> int:
        """Go through the rounds of messages; the last one's headers, and what it merges, are left to compiled code."""
        for at, each in self._earlier:
            each.post(True)
            each.wait(nothing)
            for header in each.headers():
                if header != self._own:
                    return 1 + at
            each.merge()
        self._last.post(True)
        self._last.wait(nothing)
        return 0

    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        return self._resume(found - 1, attempt, out)


def relay_code() -> ModuleType:
    """Give the compiled code for relays, which loads numba."""
    from treeattn.kernels import relay

    return relay
