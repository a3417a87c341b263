"""Into how many splits the keys go, so that every multiprocessor has work and merging stays cheap."""

from __future__ import annotations

from functools import lru_cache

from treeattn.kernels.gpu.source import MAX_SPLITS

__all__ = ["split_count"]

MERGE_STEPS = 0.05
"""Time to merge one more split, in the time that a block takes for one step of keys. An estimate, not measured: 4 KB of
state from the L2 cache, against 32 KB of keys at a block's share of the memory's rate."""

START_STEPS = 2
"""Time for a block to start and to publish, in steps: an estimate too."""


def split_count(tiles: int, keys: int, step: int, slots: int) -> int:
    """Give the number of splits that should end soonest.

    Parameters
    ----------
    tiles : int
        Blocks that there are without splitting: batch times KV heads times tiles of query rows.
    keys : int
        Keys of the longest row; with a cache that grows under a captured graph, its capacity.
    step : int
        Keys that a block takes at once.
    slots : int
        Blocks that the card holds at the same time: multiprocessors times blocks of this kernel that fit one.

    Examples
    --------
    >>> from treeattn.kernels.gpu.splits import split_count
    >>> split_count(tiles=8, keys=131072, step=64, slots=396)
    49
    """
    return _soonest(tiles, -(-max(keys, 1) // step), slots)


@lru_cache(maxsize=1024)
def _soonest(tiles: int, steps: int, slots: int) -> int:
    most = min(MAX_SPLITS, steps, max(2 * slots // max(tiles, 1), 1))
    return min(range(1, most + 1), key=lambda splits: (_time(tiles, steps, slots, splits), splits))


def _time(tiles: int, steps: int, slots: int, splits: int) -> float:
    waves = -(-tiles * splits // slots)
    return waves * (-(-steps // splits) + START_STEPS) + (MERGE_STEPS * splits if splits > 1 else 0)
