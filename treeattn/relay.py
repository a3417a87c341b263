"""The short way of a step between hosts: compiled code before a host's messages and after them.

With ranks that outnumber cores, and have slept since the step before, what they do one after the other adds up: here
it is one compiled call on a rank that is not its host's leader, and two on one that is, with its messages in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from treeattn.agreement import Attempt, Header
from treeattn.counting import Count
from treeattn.plan import Plan, RankRound
from treeattn.rounds import MessageRound
from treeattn.shortcut import Shortcut
from treeattn.state import PartialState
from treeattn.transport import nothing
from treeattn.window import compiled
from treeattn.window_round import SPINS

__all__ = ["relay_of"]

YIELDS = 20
"""How often a rank gives up its core before it sleeps, `treeattn.window_round.SPINS` looks apart."""

HERE, BEHIND = 1, 2
"""Where a leader stops: before its messages, or behind them."""

SLEEP = np.array([0, 50_000_000], np.int64)
"""Seconds and nanoseconds that a rank sleeps at most in compiled code."""


class Part(NamedTuple):
    """A rank's part in a plan of one round of messages, with a round in windows before it and one after it, or none."""

    before: RankRound | None
    messages: RankRound | None
    after: RankRound | None

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Part | None:
        """Give this rank's part, where a plan is such a one."""
        steps = plan.steps(rank)
        shared = [each.shared for each in plan.rounds]
        if plan.pieces > 1 or shared not in ([False], [True, False, True]):
            return None
        found: dict[int, RankRound] = {step.number: step for step in steps}
        at = shared.index(False)
        return cls(found.get(at - 1), found.get(at), found.get(at + 1))

    @property
    def follows(self) -> bool:
        """Whether this rank gives its state to its host's leader, and gets the result from there."""
        before, messages, after = self
        if before is None or messages is not None or after is None:
            return False
        return not before.receives and not after.sends and [each[1:] for each in after.receives] == [(1, 0)]

    @property
    def leads(self) -> bool:
        """Whether it merges what its host's ranks have, and then what comes from other hosts."""
        before, messages, after = self
        if messages is None or len(messages.merges) != 1 or any(slots != 1 for _, slots, _ in messages.receives):
            return False
        gathers = before is None or (not before.sends and len(before.merges) == 1)
        return gathers and (after is None or not after.receives)


def relay_of(plan: Plan, rank: int) -> type[Shortcut] | None:
    """Give the short way of a rank through a plan, where there is one."""
    part = Part.of(plan, rank)
    if part is None:
        return None
    return _Leader if part.leads else _Follower if part.follows else None


class _Relay(Shortcut):
    """What leaders and those who follow them have in common."""

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
        return self._resume(1, attempt, out)


class _Leader(_Relay):
    """A rank that merges what its host's ranks have, swaps that with other hosts, and passes the result on."""

    def _prepare_part(self, part: Part) -> tuple[Callable[..., int], tuple[Any, Any]]:
        before, messages, after = part
        assert messages is not None, "a leader has messages"
        form, own = self._exchange.form, self._records.payloads[0].ctypes.data
        self._gather: Callable[..., int] = relay_code().gather_at(form)
        self._spread: Callable[..., int] = relay_code().spread_at(form)
        self._round = next(each for each in self._exchange.rounds if isinstance(each, MessageRound))
        self._at = self._exchange.rounds.index(self._round)
        (order,) = messages.merges
        self._hosts = np.array([self._records.payloads[at].ctypes.data for at in order], np.int64)
        self._place = self._own_place((0, 0) if after is None else self._slots(self._channel.rank))
        places = {} if before is None else {at: self._slots(rank) for rank, _, at in before.receives}
        others = [slots[use] for use in (0, 1) for slots in places.values()]
        ranks = () if before is None else before.merges[0]
        sources = [{0: [own, own], **places}[at][use] for use in (0, 1) for at in ranks]
        return self._lead, (np.array(others, np.int64), np.array(sources, np.int64))

    def _lead(self, state: Any, out: Any, others: Any, sources: Any) -> int:
        if self._gather(state, others, sources, self._place) != 0:
            return HERE
        self._channel.call(self._swap)
        if self._spread(out, self._hosts, self._place) != 0:
            return BEHIND
        self._exchange.start_ahead()
        self._exchange.ran()
        return 0

    def _swap(self) -> None:
        self._round.post(True)
        self._round.wait(nothing)

    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        return self._resume(0 if found == HERE else self._at, attempt, out)


def relay_code() -> ModuleType:
    """Give the compiled code for relays, which loads numba."""
    from treeattn.kernels import relay

    return relay
