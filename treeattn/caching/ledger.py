"""Which rank holds which positions of a sharded cache: pure bookkeeping, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Deal", "Ledger", "Segment", "held_by"]


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


class Deal:
    """Positions for new tokens, which count once a ledger has taken them.

    Parameters
    ----------
    last : Segment or None
        The ledger's last.
    counts : sequence of int
        Tokens of each rank so far.

    Attributes
    ----------
    parts : list of Segment
        The new ones, in order of position.
    closed : list of Segment
        Those that will no longer be the last.
    """

    def __init__(self, last: Segment | None, counts: Sequence[int]) -> None:
        self.last, self.counts = last, list(counts)
        self.parts: list[Segment] = []
        self.closed: list[Segment] = []

    def append(self, tokens: int, block_size: int) -> int:
        """Deal the next of so many tokens, to the open block if there is one, else to a new one; give how many."""
        if self.last is not None and self.last.room:
            taken = min(tokens, self.last.room)
            self._extend(self.last, taken)
        else:
            taken = min(tokens, block_size)
            owner = min(range(len(self.counts)), key=self.counts.__getitem__)
            self.add(owner, taken, block_size - taken)
        return taken

    def _extend(self, last: Segment, tokens: int) -> None:
        end = last.stop + tokens
        self.parts.append(Segment(last.stop, end, last.owner))
        self.last = Segment(last.start, end, last.owner, last.room - tokens)
        self.counts[last.owner] += tokens

    def add(self, owner: int, tokens: int, room: int = 0) -> None:
        """Give an owner the next positions, as a block of its own."""
        start = 0 if self.last is None else self.last.stop
        self.closed += [] if self.last is None else [self.last]
        self.last = Segment(start, start + tokens, owner, room)
        self.parts.append(Segment(start, start + tokens, owner))
        self.counts[owner] += tokens


class _Now(NamedTuple):
    """What holds: so many of the ledger's blocks, the block after those, and the tokens of each rank."""

    blocks: int
    last: Segment | None
    counts: tuple[int, ...]


class Ledger:
    """Deal positions to ranks so that every rank gets its share of the new tokens.

    What holds changes in one assignment: whatever Ctrl-C cuts short, and whatever another thread looks at, it is what
    was before or what is after.

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
    >>> deal = ledger.deal(10)
    >>> [(part.start, part.stop, part.owner) for part in deal.parts]
    [(0, 4, 0), (4, 8, 1), (8, 10, 0)]
    >>> ledger.take(deal)
    >>> ledger.counts
    (6, 4)
    """

    def __init__(self, size: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: list[Segment] = []
        self._now = _Now(0, None, (0,) * size)

    @property
    def segments(self) -> list[Segment]:
        """All blocks, in order of position."""
        blocks, last, _ = self._now
        return [*self._blocks[:blocks], *([] if last is None else [last])]

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return self._now.counts

    @property
    def length(self) -> int:
        """Tokens on all ranks together."""
        last = self._now.last
        return 0 if last is None else last.stop

    def deal(self, tokens: int) -> Deal:
        """Find positions for so many new tokens, for `take`."""
        deal = Deal(self._now.last, self.counts)
        while tokens > 0:
            tokens -= deal.append(tokens, self.block_size)
        return deal

    def deal_pieces(self, lengths: Sequence[int]) -> Deal:
        """Find positions for consecutive pieces, ``lengths[rank]`` at each rank, in rank order, for `take`."""
        deal = Deal(self._now.last, self.counts)
        for owner, length in enumerate(lengths):
            if length:
                deal.add(owner, length)
        return deal

    def take(self, deal: Deal) -> None:
        """Let what was dealt last count from here on."""
        blocks = self._now.blocks
        self._blocks[blocks:] = deal.closed
        self._now = _Now(blocks + len(deal.closed), deal.last, tuple(deal.counts))

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on; the block that is then the last takes no more tokens.

        It takes none even where it was not cut: what follows must not depend on how far this rank was ahead, since
        ranks that disagreed about their lengths are cut back to one.
        """
        blocks, last, counts = self._now.blocks, self._now.last, list(self.counts)
        while last is not None and last.start >= length:
            counts[last.owner] -= len(last)
            blocks, last = (blocks - 1, self._blocks[blocks - 1]) if blocks else (0, None)
        if last is not None:
            kept = Segment(last.start, min(last.stop, length), last.owner)
            counts[last.owner] -= len(last) - len(kept)
            last = kept
        self._now = _Now(blocks, last, tuple(counts))
