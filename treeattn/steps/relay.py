"""The short way of a step between hosts: compiled code before a rank's messages and after them.

With ranks that outnumber cores, and have slept since the step before, what they do one after the other adds up: here
it is one compiled call on a rank that has no messages, and two on one that has, with these between. Of each piece of a
state a rank leads its host or follows who does; a state in one piece is the simplest case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.execution.agreement import Attempt, Header
from treeattn.execution.counting import Count
from treeattn.execution.rounds import MessageRound
from treeattn.execution.window import compiled
from treeattn.execution.window_round import SPINS
from treeattn.planning.plan import Plan, RankRound, spans
from treeattn.state import PartialState
from treeattn.steps.relay_parts import Piece, Rows, parts_of
from treeattn.steps.shortcut import BUSY, Run, Shortcut
from treeattn.transports.base import nothing

__all__ = ["relay_of"]

Array: TypeAlias = npt.NDArray[Any]

YIELDS = 20
"""How often a rank gives up its core before it sleeps, `treeattn.execution.window_round.SPINS` looks apart."""

SLEEP = np.array([0, 50_000_000], np.int64)
"""Seconds and nanoseconds that a rank sleeps at most in compiled code."""


def relay_of(plan: Plan, rank: int) -> type[Shortcut] | None:
    """Give the short way of a rank through a plan, where there is one."""
    parts = parts_of(plan, rank)
    if not parts or not all(part.leads or part.follows for part in parts):
        return None
    return _Speaker if any(part.messages for part in parts) else _Follower


class _Relay(Shortcut):
    """What ranks with messages and those without have in common."""

    def _prepare(self) -> tuple[Run, Array]:
        exchange, rank = self._exchange, self._channel.rank
        self._parts, rows = parts_of(exchange.plan, rank), spans(exchange.form.rows, exchange.plan.pieces)
        own = zip(self._parts, exchange.parts, rows, strict=True)
        self._pieces = [Piece(*each, exchange.window, rank) for each in own]
        self._check, self._checked = self._header.view(np.uint64)[3:], 0
        self._prepare_step()
        return self._in_turn, self._own_place()

    def _in_turn(self, state: int, out: int, place: int, check: int) -> int:
        """Run a whole step, if it is this one's turn, as a compiled one does: see `Shortcut._prepare`."""
        if not self._guard.take_turn():
            return BUSY
        if check != self._checked:
            self._check[0] = self._checked = check
        found = self._step(state, out, place)
        if found == 0:
            self._guard.end_turn()
        return found

    @abstractmethod
    def _prepare_step(self) -> None:
        """Make ready what `_step` takes besides this rank's own."""

    @abstractmethod
    def _step(self, state: int, out: int, place: int) -> int:
        """Give 0 for a whole step, else 1 more than the place of the round in which it ends."""

    def _own_place(self) -> Array:
        """Give what is this rank's own in compiled code."""
        exchange, parts = self._exchange, self._parts
        self._uses = Count() if exchange.window is None else exchange.window.uses
        self._room, self._tables = compiled().room(self._channel.size, exchange.form), self._own_tables()
        records = [each.address(0) for each in exchange.parts]
        own = relay_code().Place(
            header=self._header.ctypes.data,
            room=self._room.ctypes.data,
            spins=SPINS,
            yields=YIELDS,
            drowsy=0,
            sleep=SLEEP.ctypes.data,
            steps=self._channel.steps.address,
            uses=self._uses.address,
            width=exchange.form.width,
            records=len(records),
        )
        slots = [*self._own_slots(part.before for part in parts), *self._own_slots(part.after for part in parts)]
        place: Array = relay_code().place_of(own, slots, self._tables, records)
        return place

    def _own_tables(self) -> Any:
        """Give what there is to do in a step: `treeattn.kernels.relay.Tables`."""
        return relay_code().Tables(
            packs=self._jobs(Piece.packs),
            others=self._sources([part.before for part in self._parts if part.leads]),
            merges=self._jobs(Piece.merges),
            came=np.array([record for piece in self._pieces for record in piece.came], np.int64),
            ends=self._jobs(Piece.ends),
            leaders=self._sources([part.after for part in self._parts if part.follows]),
            answers=self._jobs(Piece.answers),
        )

    def _own_slots(self, steps: Iterable[RankRound | None]) -> list[int]:
        """Give this rank's slots if it publishes in any of these steps; else zeros."""
        speaks = any(step is not None and step.sends for step in steps)
        return self._slots([self._channel.rank]) if speaks else [0, 0]

    def _jobs(self, of: Callable[[Piece, int], Sequence[Rows]]) -> Array:
        """Give jobs for even uses, and then for odd ones."""
        jobs = [job for use in (0, 1) for piece in self._pieces for job in of(piece, use)]
        found: Array = relay_code().table(jobs)
        return found

    def _sources(self, steps: Iterable[RankRound | None]) -> Array:
        """Give the slots of all from whom something comes in these steps."""
        receives = [each for step in steps if step is not None for each in step.receives]
        return np.array(self._slots(dict.fromkeys(source for source, _, _ in receives)), np.int64)

    def _slots(self, ranks: Iterable[int]) -> list[int]:
        """Give addresses of slots for even uses, and then for odd ones."""
        window, ranks = self._exchange.window, list(ranks)
        assert window is not None or not ranks, "there are no rounds in windows"
        return [] if window is None else [window.address(rank, use) for use in (0, 1) for rank in ranks]

    def _otherwise(self, found: int, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        header = Header(self._channel.step, 0, self.signature.digest, attempt.check)
        self._exchange.resume(header, found - 1)
        return self._go_on(attempt, out)


class _Follower(_Relay):
    """A rank without messages: it publishes, and sleeps until others have."""

    def _prepare_step(self) -> None:
        self._whole: Callable[[int, int, int], int] = relay_code().follow_at(self._exchange.form)

    def _step(self, state: int, out: int, place: int) -> int:
        found = self._whole(state, out, place)
        if found == 0:
            self._exchange.ran()
        return found


class _Speaker(_Relay):
    """A rank with messages: it merges what its host's ranks have before them, and passes the result on after."""

    def _prepare_step(self) -> None:
        self._gather: Callable[[int, int], int] = relay_code().gather_at(self._exchange.form)
        self._spread: Callable[[int, int], int] = relay_code().spread_at(self._exchange.form)
        places = [(at, each) for at, each in enumerate(self._exchange.rounds) if isinstance(each, MessageRound)]
        *self._earlier, (self._at, self._last) = places
        self._own_header = memoryview(self._header.view(np.uint8).data)

    def _step(self, state: int, out: int, place: int) -> int:
        if self._gather(state, place) != 0:
            return 1
        ended = self._channel.call(self._swap)
        if ended:
            return ended
        found = self._spread(out, place)
        if found != 0:
            return self._stopped(found)
        self._exchange.start_ahead()
        self._exchange.ran()
        return 0

    def _swap(self) -> int:
        """Go through the rounds of messages; the last one's headers, and what it merges, are left to compiled code."""
        for at, each in self._earlier:
            each.post(True)
            each.wait(nothing)
            for header in each.headers():
                if header != self._own_header:
                    return 1 + at
            each.merge()
        self._last.post(True)
        self._last.wait(nothing)
        return 0

    def _stopped(self, found: int) -> int:
        """Say where the last part of a step has stopped, and have records hold what it has published, if it has."""
        if found == relay_code().DIFFERENT:
            return 1 + self._at
        self._last.merge()
        return 2 + self._at


def relay_code() -> ModuleType:
    """Give the compiled code for relays, which loads numba."""
    from treeattn.kernels import relay

    return relay
