"""Which keys of a block the queries of a tile see: by position, by bool mask, and by -inf in a float mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.kernels.call import BLOCK, Call, Task, call_at, task_at
from treeattn.kernels.compilation import inline, part
from treeattn.kernels.memory import pointer

__all__ = ["ALL", "NONE", "SEE", "SOME", "are_consecutive", "row_keys", "see_double", "see_single"]

NONE, SOME, ALL = range(3)

SEE = "void(int64)"
"""(task): sets its ``visible``: its queries see ALL, SOME or NONE of the block's keys; and its ``seen`` if SOME."""

FURTHEST = 2**63 - 1


@part(SEE)
def see_single(address: int) -> None:
    """Decide by position and by mask, whose additive form is float32."""
    _see(task_at(address), np.float32)


@part(SEE)
def see_double(address: int) -> None:
    """Decide by position and by mask, whose additive form is float64."""
    _see(task_at(address), np.float64)


@inline
def row_keys(call: Call, b: int) -> Any:
    """Keys of batch row ``b`` that may be read."""
    return pointer(call.kv_len, np.int64)[b] if call.kv_len != 0 else call.kv_tokens


@inline
def are_consecutive(call: Call) -> bool:
    """Whether the keys' positions are consecutive in every batch row; asked once, so that no head reads them again."""
    if call.kv_pos == 0 or call.kv_pos_t != 8:
        return False
    for b in range(call.batch if call.kv_pos_b != 0 else 1):
        if not _is_run(pointer(call.kv_pos + b * call.kv_pos_b, np.int64), call.kv_tokens):
            return False
    return True


@inline
def _is_run(positions: Any, count: int) -> bool:
    """Look at a block at a time: without a way out between them, comparisons are vectorised."""
    for start in range(0, count, BLOCK):
        same = True
        for i in range(start, min(start + BLOCK, count)):
            same &= positions[i] - i == positions[0]
        if not same:
            return False
    return True


@inline
def _see(task: Task, dtype: Any) -> None:
    call = call_at(task.call)
    task.visible = _by_position(call, task)
    if task.visible == SOME or (task.visible == ALL and call.mask != 0):
        count = 0
        for row in range(task.rows):
            seen = pointer(task.seen + row * BLOCK, np.uint8)
            _mark_by_position(call, task, task.first + row // call.group, seen)
            _mark_by_mask(call, task, row, seen, dtype)
            for i in range(task.keys):
                count += seen[i]
        task.visible = ALL if count == task.rows * task.keys else SOME if count else NONE


@inline
def _by_position(call: Call, task: Task) -> int:
    """Answer from the smallest and largest position of the block alone; SOME where that leaves it open."""
    if call.kv_pos == 0:
        return ALL
    low, high = _range_of_positions(call, task)
    all_of_them, any_of_them = True, False
    for t in range(task.tokens):
        nearest, furthest = _reach(call, task.b, task.first + t)
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
def _position(call: Call, task: Task, i: int) -> Any:
    if call.kv_run:
        return pointer(call.kv_pos + task.b * call.kv_pos_b, np.int64)[0] + task.start + i
    return pointer(call.kv_pos + task.b * call.kv_pos_b + (task.start + i) * call.kv_pos_t, np.int64)[0]


@inline
def _range_of_positions(call: Call, task: Task) -> tuple[int, int]:
    low, high = FURTHEST, -FURTHEST
    if call.kv_run:
        low, high = _position(call, task, 0), _position(call, task, task.keys - 1)
    elif call.kv_pos_t == 8:  # apart, because only this loop can be vectorised
        positions = pointer(call.kv_pos + task.b * call.kv_pos_b + task.start * 8, np.int64)
        for i in range(task.keys):
            low, high = min(low, positions[i]), max(high, positions[i])
    else:
        for i in range(task.keys):
            position = _position(call, task, i)
            low, high = min(low, position), max(high, position)
    return low, high


@inline
def _mark_by_position(call: Call, task: Task, t: int, seen: Any) -> None:
    if call.kv_pos == 0:
        for i in range(task.keys):
            seen[i] = 1
        return
    nearest, furthest = _reach(call, task.b, t)
    for i in range(task.keys):
        seen[i] = nearest <= _position(call, task, i) <= furthest


@inline
def _mark_by_mask(call: Call, task: Task, row: int, seen: Any, dtype: Any) -> None:
    if call.mask == 0:
        return
    t, head = task.first + row // call.group, task.h * call.group + row % call.group
    mask = call.mask + task.b * call.mask_b + head * call.mask_h + t * call.mask_t + task.start * call.mask_d
    for i in range(task.keys):
        if call.mask_additive:
            seen[i] &= pointer(mask + i * call.mask_d, dtype)[0] != -np.inf
        else:
            seen[i] &= pointer(mask + i * call.mask_d, np.uint8)[0] != 0
