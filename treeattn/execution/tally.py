"""What a rank has sent, and what else it took, counted as it goes."""

from __future__ import annotations

from collections.abc import Sequence

from treeattn.execution.counting import Count
from treeattn.planning.plan import Stats, Usage

__all__ = ["Tally"]


class Tally:
    """Counts what this rank sends; `stats` is a snapshot."""

    def __init__(self, hosts: tuple[str, ...], rank: int) -> None:
        self._away = [host != hosts[rank] for host in hosts]
        self._sent = [0, 0, 0, 0]
        self.all_rounds, self._rounds_between = Count(), 0
        self.collectives = 0
        self.peak_bytes, self.products = Count(), Count()

    def crosses(self, rank: int) -> bool:
        """Whether what goes to a rank, or comes from it, goes from one host to another."""
        return self._away[rank]

    def sent(self, dest: int, size: int) -> None:
        """Count one message."""
        self.sent_all(self.total(((dest, size),)))

    def sent_all(self, total: Sequence[int]) -> None:
        """Count what `total` has added up."""
        sent = self._sent
        for at in range(4):
            sent[at] += total[at]

    def total(self, messages: Sequence[tuple[int, int]]) -> tuple[int, int, int, int]:
        """Add up messages (dest, size) that are often sent together."""
        sizes = [size for _, size in messages]
        away = [size for dest, size in messages if self.crosses(dest)]
        return len(sizes), sum(sizes), len(away), sum(away)

    def rounds(self, number: int, between: int) -> None:
        """Count rounds, and those of them in which any message goes between hosts."""
        self.all_rounds.value += number
        self._rounds_between += between

    @property
    def usage(self) -> Usage:
        """What the last operation took."""
        return Usage(self.peak_bytes.value, self.products.value)

    @usage.setter
    def usage(self, usage: Usage) -> None:
        self.peak_bytes.value, self.products.value = usage.peak_bytes, usage.products

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        rounds, (messages, size, between, size_between) = self.all_rounds.value, self._sent
        return Stats(rounds, messages, size, self._rounds_between, between, size_between, self.collectives)
