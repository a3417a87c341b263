"""The folded schedule of DistFlashAttn: which rank computes which pair of query rows and keys, and in which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from treeattn.baselines._call import Call, Span, span_of

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Which rank computes which pair in which step; the same on every rank.

    Parameters
    ----------
    call : Call
    hosts : sequence of str
        By rank.
    """

    call: Call
    hosts: Sequence[str]

    @property
    def steps(self) -> int:
        """Steps besides the one with one's own shard."""
        return self.call.size // 2

    @cached_property
    def rows(self) -> list[slice]:
        """Query rows that each rank owns: its share of the common ones, or all of its own."""
        size, tokens = self.call.size, self.call.spec.q_tokens
        if self.call.replicated:
            return [slice(tokens * rank // size, tokens * (rank + 1) // size) for rank in range(size)]
        return [slice(0, holding.q_tokens) for holding in self.call.holdings]

    @cached_property
    def spans(self) -> list[Span]:
        """Where each rank's rows stand."""
        if not self.call.replicated:
            return [holding.q_span for holding in self.call.holdings]
        positions = self.call.args.q_pos
        return [None if positions is None else span_of(positions[:, rows]) for rows in self.rows]

    def fetched(self, owner: int, step: int) -> slice:
        """Rows of ``owner`` that it computes itself in a step, with the shard of the rank ``step`` behind it."""
        rows, half = self.rows[owner], self._half(owner)
        return slice(rows.start, half) if self._shared(step) else rows

    def helped(self, owner: int, step: int) -> slice:
        """Rows of ``owner`` that the rank ``step`` ahead of it computes for it in a step."""
        rows, half = self.rows[owner], self._half(owner)
        return slice(half, rows.stop) if self._shared(step) else rows

    def meets(self, owner: int, rows: slice, keys_of: int) -> bool:
        """Whether rows of ``owner`` have to be computed over a rank's keys."""
        return rows.stop > rows.start and self.call.sees(self.spans[owner], keys_of)

    def fetches(self, owner: int, step: int) -> bool:
        """Whether ``owner`` fetches a shard in a step."""
        return self.meets(owner, self.fetched(owner, step), (owner - step) % self.call.size)

    def is_helped(self, owner: int, step: int) -> bool:
        """Whether ``owner`` is helped in a step."""
        return self.meets(owner, self.helped(owner, step), (owner + step) % self.call.size)

    def crosses(self, step: int) -> bool:
        """Whether ranks ``step`` apart are ever on different hosts."""
        size = self.call.size
        return any(self.hosts[rank] != self.hosts[(rank + step) % size] for rank in range(size))

    def _shared(self, step: int) -> bool:
        return 2 * step == self.call.size

    def _half(self, owner: int) -> int:
        rows = self.rows[owner]
        return int(-(-(rows.start + rows.stop) // 2))
