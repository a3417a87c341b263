"""A rank's parts in a plan, as far as there is a short way through it, and the jobs that they make of a step.

Plans in one piece are the simplest case of plans in several: a rank has a part in each piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treeattn.execution.records import Records
from treeattn.execution.window import Window
from treeattn.planning.plan import Plan, RankRound

__all__ = ["Part", "Piece", "Rows", "parts_of"]

ONE = [(1, 0)]
"""One state, to record 0: what a round brings in which a rank gets a result, without who sends it."""


class Part(NamedTuple):
    """A rank's part in one piece: rounds of messages, perhaps with a round in windows before them and one after."""

    before: RankRound | None
    messages: tuple[RankRound, ...]
    after: RankRound | None

    @property
    def follows(self) -> bool:
        """Whether this rank gives its rows to a leader of its host, and gets the result from there."""
        before, messages, after = self
        if before is None or messages or after is None:
            return False
        given = any(slots for _, slots in before.sends) and not before.receives
        return given and not after.sends and [each[1:] for each in after.receives] == ONE

    @property
    def leads(self) -> bool:
        """Whether it merges, or keeps, what its host's ranks have, and ends with the result in one merge or record."""
        before, messages, after = self
        if before is not None and (before.sends or not _gathers(before)):
            return False
        return (not messages or _ends(messages[-1])) and (after is None or not after.receives)

    @property
    def order(self) -> tuple[int, ...]:
        """Records whose merge is the result, where this rank leads."""
        return self.messages[-1].merges[0] if self.messages and self.messages[-1].merges else (0,)


def _gathers(before: RankRound) -> bool:
    """Whether single states come, and are merged once if at all."""
    return len(before.merges) <= 1 and all(slots == 1 for _, slots, _ in before.receives)


def _ends(last: RankRound) -> bool:
    return len(last.merges) == 1 or (not last.merges and [each[1:] for each in last.receives] in ([], ONE))


def parts_of(plan: Plan, rank: int) -> tuple[Part, ...]:
    """Give this rank's part in each piece of a plan, or none where the plan has windows at other places."""
    shared = [each.shared for each in plan.rounds]
    if not shared or shared == [True] or any(shared[1:-1]) or shared[0] != shared[-1]:
        return ()
    steps, last = plan.steps(rank), len(shared) - 1
    parts = []
    for piece in range(plan.pieces):
        found = {step.number: step for step in steps if step.piece == piece}
        before, after = (found.pop(at, None) if shared[at] else None for at in (0, last))
        parts.append(Part(before, tuple(found.values()), after))
    return tuple(parts)


class Rows(NamedTuple):
    """What is done with rows of a state, ``first`` and so many more: they are packed, merged or unpacked.

    ``target`` is the address of their wire rows, 0 where they go to the result alone, ``sources`` those of wire rows
    to merge, in that order.
    """

    target: int
    first: int
    number: int
    sources: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a state on one rank.

    Parameters
    ----------
    part : Part
    records : Records
    rows : range
        Which of the state's.
    window : Window or None
    rank : int
    """

    part: Part
    records: Records
    rows: range
    window: Window | None
    rank: int

    @property
    def came(self) -> list[int]:
        """Records that begin what comes in the last round of messages."""
        return [self.records.address(at) for last in self.part.messages[-1:] for _, _, at in last.receives]

    def packs(self, use: int) -> list[Rows]:
        """Pack to where it is merged."""
        return [self._rows(self._slot(self.rank, use) if self.part.follows else self.records.address(0))]

    def merges(self, use: int) -> list[Rows]:
        """Merge what the host's ranks have, or copy each to its record."""
        before = self.part.before
        if before is None or self.part.follows:
            return []
        found = {at: self._slot(rank, use) for rank, _, at in before.receives}
        if not before.merges:
            return [self._rows(self.records.address(at), slot) for at, slot in found.items()]
        places = {0: self.records.address(0), **found}
        return [self._rows(self.records.address(0), *(places[at] for at in before.merges[0]))]

    def ends(self, use: int) -> list[Rows]:
        """Merge the result, into this rank's slot where others are to read it."""
        if self.part.follows:
            return []
        is_read = self.part.after is not None and self.part.after.sends
        return [self._rows(self._slot(self.rank, use) if is_read else 0, *map(self.records.address, self.part.order))]

    def answers(self, use: int) -> list[Rows]:
        """Take the result from the slot of who leads."""
        after = self.part.after
        if after is None or not self.part.follows:
            return []
        return [self._rows(0, *(self._slot(leader, use) for leader, _, _ in after.receives))]

    def _rows(self, target: int, *sources: int) -> Rows:
        return Rows(target, self.rows.start, len(self.rows), sources)

    def _slot(self, rank: int, use: int) -> int:
        assert self.window is not None, "there are no rounds in windows"
        return self.window.address(rank, use) + self.rows.start * self.records.form.row_bytes
