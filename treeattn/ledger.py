"""Which rank holds which positions of a sharded cache: pure bookkeeping, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Ledger", "Segment", "held_by"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start`` up to ``stop``, held by rank ``owner``; up to ``room`` more may follow there."""

    start: int
    stop: int
    owner: int
    room: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


def held_by(owner: int, dealt: Sequence[Segment]) -> list[tuple[int, int]]:
    """Give where ``owner``'s positions begin and end; parts that follow each other are one.

    Examples
    --------
    >>> held_by(0, [Segment(0, 4, 0), Segment(4, 8, 0), Segment(8, 12, 1), Segment(12, 13, 0)])
    [(0, 8), (12, 13)]
    """
    runs: list[tuple[int, int]] = []
    for part in dealt:
        if part.owner != owner:
            continue
        first = runs.pop()[0] if runs and runs[-1][1] == part.start else part.start
        runs.append((first, part.stop))
    return runs


class Ledger:
    """Deal positions to ranks so that every rank gets its share of the new tokens.

    Parameters
    ----------
    size : int
        Number of ranks.
    block_size : int
        Consecutive appended tokens that go to one rank before the next one is chosen: the one with the fewest
        tokens, the lowest such rank where several have.

    Examples
    --------
    >>> ledger = Ledger(size=2, block_size=4)
    >>> [(part.start, part.stop, part.owner) for part in ledger.append(10)]
    [(0, 4, 0), (4, 8, 1), (8, 10, 0)]
    >>> ledger.counts
    [6, 4]
    """

    def __init__(self, size: int, block_size: int) -> None:
        self.block_size = block_size
        self.segments: list[Segment] = []
        self.counts = [0] * size

    @property
    def length(self) -> int:
        """Tokens on all ranks together."""
        return self.segments[-1].stop if self.segments else 0

    def append(self, tokens: int) -> list[Segment]:
        """Deal ``tokens`` new positions; give the new parts, in order of position."""
        dealt = []
        while tokens > 0:
            dealt.append(self._deal(tokens))
            tokens -= len(dealt[-1])
        return dealt

    def prefill(self, lengths: Sequence[int]) -> list[Segment]:
        """Record consecutive pieces of new positions, ``lengths[rank]`` at each rank, in rank order."""
        dealt = []
        for owner, length in enumerate(lengths):
            if length:
                dealt.append(Segment(self.length, self.length + length, owner))
                self._add(dealt[-1])
        return dealt

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on; the block that is then the last takes no more tokens.

        It takes none even where it was not cut: what follows must not depend on how far this rank was ahead, since
        ranks that disagreed about their lengths are cut back to one.
        """
        while self.segments and self.segments[-1].start >= length:
            self._pop()
        if self.segments:
            last = self._pop()
            self._add(Segment(last.start, min(last.stop, length), last.owner))

    def _deal(self, tokens: int) -> Segment:
        """Give the next positions of one block: of the open one if there is one, else of a new one."""
        start = self.length
        if self.segments and self.segments[-1].room:
            last = self._pop()
            taken = min(tokens, last.room)
            self._add(Segment(last.start, start + taken, last.owner, last.room - taken))
            return Segment(start, start + taken, last.owner)
        owner = min(range(len(self.counts)), key=self.counts.__getitem__)
        taken = min(tokens, self.block_size)
        self._add(Segment(start, start + taken, owner, self.block_size - taken))
        return Segment(start, start + taken, owner)

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.counts[segment.owner] += len(segment)

    def _pop(self) -> Segment:
        segment = self.segments.pop()
        self.counts[segment.owner] -= len(segment)
        return segment
