"""Parts that plans are put together from: merges up a tree, gathers, spreads and exchanges among ranks. Pure.

The exchange is Bruck's all-gather (Bruck et al., IEEE TPDS 8(11), 1997) with a radix: in each round a rank that
holds the states of h nodes gets those of up to (radix - 1) h more. It fits any number of nodes.

A *block* is what a rank holds before a part begins: a tuple of keys, one per record, whose order is the order of the
last merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from typing import TypeAlias

from treeattn.planning.plan import Action, Level, Merge, Message, Round

__all__ = ["Block", "Part", "exchange", "final_merges", "gather", "reduction", "side_by_side", "spread", "then_merge"]

Block: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class Part:
    """One group's share of a round."""

    messages: tuple[Message, ...]
    merges: tuple[Merge, ...] = ()


def side_by_side(level: Level, action: Action, groups: Iterable[list[Part]], *, shared: bool = False) -> list[Round]:
    """Let groups go through their rounds at once; one with fewer rounds waits for the others."""
    rounds = zip_longest(*groups, fillvalue=Part(()))
    return [
        Round(level, action, tuple(chain(*(p.messages for p in side))), tuple(chain(*(p.merges for p in side))), shared)
        for side in rounds
    ]


def reduction(order: Sequence[int], leader: int, radix: int | None) -> list[Part]:
    """Merge neighbours in ``order``, then neighbouring runs, until one state is left at ``leader``.

    Who is merged with whom does not depend on the leader, so neither do the bits; only the place does: a run that
    holds the leader is merged there, any other at its first rank.
    """
    count, home = len(order), order.index(leader)
    radix = radix or max(count, 2)

    def owner(start: int, length: int) -> int:
        return home if start <= home < start + length else start

    parts, stride = [], 1
    while stride < count:
        messages: list[Message] = []
        merges = []
        for start in range(0, count, stride * radix):
            runs = [owner(run, stride) for run in range(start, min(start + stride * radix, count), stride)]
            if len(runs) > 1:
                parent = owner(start, stride * radix)
                at = {run: number for number, run in enumerate((run for run in runs if run != parent), 1)}
                messages += [Message(order[run], order[parent], 1, at[run]) for run in at]
                merges.append(Merge(order[parent], tuple(at.get(run, 0) for run in runs)))
        parts.append(Part(tuple(messages), tuple(merges)))
        stride *= radix
    return parts


def gather(order: Sequence[int], blocks: Sequence[Block], radix: int | None) -> list[Part]:
    """Bring every block, unmerged, to ``order[0]``: its records end up in the order of ``order``."""
    starts = (0, *accumulate(map(len, blocks)))
    return [
        Part(
            tuple(
                Message(order[child], order[parent], starts[end] - starts[child], starts[child] - starts[parent])
                for parent, child, end in edges
            )
        )
        for edges in _tree(len(order), radix)
    ]


def spread(order: Sequence[int], radix: int | None, slots: int) -> list[Part]:
    """Bring one record, or a header alone, from ``order[0]`` to all."""
    return [
        Part(tuple(Message(order[parent], order[child], slots) for parent, child, _ in edges))
        for edges in reversed(_tree(len(order), radix))
    ]


def _tree(count: int, radix: int | None) -> list[list[tuple[int, int, int]]]:
    """Give the edges (parent, child, end of the child's run) of each round of a tree of runs that double, or more."""
    radix = radix or max(count, 2)
    rounds, stride = [], 1
    while stride < count:
        rounds.append(
            [
                (start, child, min(child + stride, count))
                for start in range(0, count, stride * radix)
                for child in range(start + stride, min(start + stride * radix, count), stride)
            ]
        )
        stride *= radix
    return rounds


def exchange(order: Sequence[int], blocks: Sequence[Block], radix: int | None) -> list[Part]:
    """Swap blocks until each rank has all, its own first and the others in cyclic order."""
    count = len(order)
    radix = radix or max(count, 2)
    sizes = [len(block) for block in blocks]
    starts = (0, *accumulate(sizes + sizes))
    parts, held = [], 1
    while held < count:
        messages = []
        for index, rank in enumerate(order):
            for offset in range(held, min(held * radix, count), held):
                source = (index + offset) % count
                end = source + min(held, count - offset)
                at = starts[index + offset] - starts[index]
                messages.append(Message(order[source], rank, starts[end] - starts[source], at))
        parts.append(Part(tuple(messages)))
        held = min(held * radix, count)
    return parts


def final_merges(order: Sequence[int], blocks: Sequence[Block]) -> list[Merge]:
    """Let every rank merge all that it holds: the same states in the same order, so the same bits."""
    cyclic = (*blocks, *blocks)
    merges = []
    for index, rank in enumerate(order):
        keys = tuple(chain(*cyclic[index : index + len(order)]))
        merges.append(Merge(rank, tuple(sorted(range(len(keys)), key=keys.__getitem__))))
    return merges


def then_merge(rounds: list[Round], merges: list[Merge]) -> list[Round]:
    """Hang the last merges on the last round; a single record needs none."""
    merges = [merge for merge in merges if len(merge.sources) > 1]
    if not merges:
        return rounds
    return [*rounds[:-1], replace(rounds[-1], merges=(*rounds[-1].merges, *merges))]
