"""Which keys of a block the queries of a tile see: by position, by bool mask, and by -inf in a float mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.kernels.call import BLOCK, Call
from treeattn.kernels.compilation import inline
from treeattn.kernels.memory import pointer

__all__ = ["ALL", "NONE", "SOME", "row_keys", "visibility"]

NONE, SOME, ALL = range(3)

FURTHEST = 2**63 - 1


@inline
def row_keys(call: Call, b: int) -> int:
    """Keys of batch row ``b`` that may be read."""
    return pointer(call.kv_len, np.int64)[b] if call.kv_len != 0 else call.kv_tokens


@inline
def visibility(
    call: Call, b: int, h: int, first: int, tokens: int, start: int, keys: int, seen: int, dtype: Any
) -> int:
    """Say whether the tile's queries see all, some or none of the block's keys.

    Where the answer is SOME, ``seen[row, key]`` (uint8, ``BLOCK`` a row) says which; row = token * group + head.
    """
    if call.kv_pos == 0 and call.mask == 0:
        return ALL
    by_position = _by_position(call, b, first, tokens, start, keys)
    if by_position == NONE or (by_position == ALL and call.mask == 0):
        return by_position
    count = 0
    for t in range(tokens):
        for g in range(call.group):
            row = seen + (t * call.group + g) * BLOCK
            _mark_by_position(call, b, first + t, start, keys, row)
            _mark_by_mask(call, b, h * call.group + g, first + t, start, keys, row, dtype)
            count += _count(row, keys)
    if count == tokens * call.group * keys:
        return ALL
    return SOME if count else NONE


@inline
def _by_position(call: Call, b: int, first: int, tokens: int, start: int, keys: int) -> int:
    """Answer from the smallest and largest position of the block alone; SOME where that leaves it open."""
    if call.kv_pos == 0:
        return ALL
    low, high = _range_of(call.kv_pos + b * call.kv_pos_b + start * call.kv_pos_t, call.kv_pos_t, keys)
    all_of_them, any_of_them = True, False
    for t in range(tokens):
        nearest, furthest = _reach(call, b, first + t)
        all_of_them &= nearest <= low and high <= furthest
        any_of_them |= nearest <= high and low <= furthest
    if all_of_them:
        return ALL
    return SOME if any_of_them else NONE


@inline
def _reach(call: Call, b: int, t: int) -> tuple[int, int]:
    """First and last position that the query sees; a side of -1 has no limit."""
    position = pointer(call.q_pos + b * call.q_pos_b + t * call.q_pos_t, np.int64)[0]
    nearest = position - call.left if call.left >= 0 else -FURTHEST
    furthest = position + call.right if call.right >= 0 else FURTHEST
    return nearest, min(furthest, position) if call.causal else furthest


@inline
def _range_of(address: int, step: int, count: int) -> tuple[int, int]:
    low, high = FURTHEST, -FURTHEST
    if step == 8:  # apart, because only this loop can be vectorised
        positions = pointer(address, np.int64)
        for i in range(count):
            low, high = min(low, positions[i]), max(high, positions[i])
    else:
        for i in range(count):
            position = pointer(address + i * step, np.int64)[0]
            low, high = min(low, position), max(high, position)
    return low, high


@inline
def _mark_by_position(call: Call, b: int, t: int, start: int, keys: int, row: int) -> None:
    seen = pointer(row, np.uint8)
    if call.kv_pos == 0:
        for i in range(keys):
            seen[i] = 1
        return
    nearest, furthest = _reach(call, b, t)
    for i in range(keys):
        position = pointer(call.kv_pos + b * call.kv_pos_b + (start + i) * call.kv_pos_t, np.int64)[0]
        seen[i] = nearest <= position <= furthest


@inline
def _mark_by_mask(call: Call, b: int, head: int, t: int, start: int, keys: int, row: int, dtype: Any) -> None:
    if call.mask == 0:
        return
    seen = pointer(row, np.uint8)
    mask = call.mask + b * call.mask_b + head * call.mask_h + t * call.mask_t + start * call.mask_d
    for i in range(keys):
        if call.mask_additive:
            seen[i] &= pointer(mask + i * call.mask_d, dtype)[0] != -np.inf
        else:
            seen[i] &= pointer(mask + i * call.mask_d, np.uint8)[0] != 0


@inline
def _count(row: int, keys: int) -> int:
    seen, count = pointer(row, np.uint8), 0
    for i in range(keys):
        count += seen[i]
    return count
