"""The streaming kernel: one task is one KV head and one range of its keys, for a tile of query tokens.

All query heads of the group and all tokens of the tile are served by one pass over K and V, block by block, in the
order of the addresses. A task leaves a partial state; tasks share nothing, so bits don't depend on the threads.
Source: arXiv 2408.04093 for the split and its merge; arXiv 1805.02867 for the online softmax inside a task.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.kernels.call import BLOCK, BUFFERS, TASK, Call, Task, call_at, task_at
from treeattn.kernels.compilation import inline, part
from treeattn.kernels.loads import order, padded
from treeattn.kernels.many_rows import do_chunks
from treeattn.kernels.many_scores import KEYS
from treeattn.kernels.memory import add_at, call_part, itemsize, next_task, pointer
from treeattn.kernels.queries import gather_column, gather_row
from treeattn.kernels.values import STRIP
from treeattn.kernels.vectors import LANES, LINE
from treeattn.kernels.visibility import ALL, NONE, row_keys

__all__ = ["buffer_bytes", "stream_double", "stream_single", "workspace_bytes"]

MOST_SPLITS = 32
"""Parts that a head's keys are cut into at most."""

TASK_BYTES = TASK.itemsize

STREAM = "void(int64, int64)"


@part(STREAM)
def stream_single(call: int, workspace: int) -> None:
    """Do tasks of the call at an address, in this thread's workspace, until none is left; sums are float32."""
    _stream(call, workspace, np.float32)


@part(STREAM)
def stream_double(call: int, workspace: int) -> None:
    """Do tasks with sums in float64."""
    _stream(call, workspace, np.float64)


def workspace_bytes(rows: int, head_dim: int, v_head_dim: int, size: int) -> int:
    """Bytes that one thread works in, for elements of ``size`` bytes."""
    buffers = buffer_bytes(rows, padded(head_dim) * size, padded(v_head_dim) * size, size)
    return int(TASK_BYTES + LINE * (len(buffers) + 1) + sum(buffers))


@inline
def buffer_bytes(rows: int, q_row: int, sums_row: int, size: int) -> tuple[int, ...]:
    """Bytes of a task's buffers, in the order of `Task`, for working rows of so many bytes."""
    block, tile = BLOCK * size, max(KEYS, LANES)
    return (
        rows * q_row,
        rows * sums_row,
        rows * block,
        rows * size,
        rows * size,
        max(STRIP, tile * q_row),
        max(STRIP, 4 * sums_row),
        block,
        block,
        rows * BLOCK,
        rows * size,
        8 * (rows * MOST_SPLITS + sums_row // size + 2 + MOST_SPLITS),
    )


@inline
def _stream(address: int, workspace: int, dtype: Any) -> None:
    call, task = call_at(address), task_at(workspace)
    task.call = address
    _place_buffers(call, workspace, itemsize(dtype))
    tasks = call.batch * call.kv_heads * call.tiles * call.splits
    index = next_task(address)
    while index < tasks:
        _do_task(call, task, workspace, index, dtype)
        index = next_task(address)


@inline
def _place_buffers(call: Call, workspace: int, size: int) -> None:
    buffers = buffer_bytes(_working_rows(call, size), call.q_row, call.sums_row, size)
    fields, end = pointer(workspace, np.int64), workspace + TASK_BYTES
    for i in range(len(buffers)):
        start = -(-end // LINE) * LINE
        fields[BUFFERS + i] = start
        end = start + buffers[i]


@inline
def _working_rows(call: Call, size: int) -> int:
    """Query rows that buffers have room for."""
    return call.many // size if call.many else call.tile * call.group


@inline
def _do_task(call: Call, task: Task, address: int, index: int, dtype: Any) -> None:
    split, tile = index % call.splits, index // call.splits % call.tiles
    task.h = index // (call.splits * call.tiles) % call.kv_heads
    task.b = index // (call.splits * call.tiles * call.kv_heads)
    task.first = tile * call.tile
    task.tokens = min(call.tile, call.q_tokens - task.first)
    task.rows = task.tokens * call.group
    _begin(call, task, dtype)
    stop = min((split + 1) * call.split, row_keys(call, task.b))
    for start in range(split * call.split, stop, BLOCK):
        task.start, task.keys = start, min(BLOCK, stop - start)
        _do_block(call, task, address, dtype)
    _store(call, task, call.states + split * call.states_s, dtype)
    if call.splits > 1 and add_at(call.ended + 8 * (index // call.splits), 1) == call.splits - 1:
        _merge_splits(call, task, itemsize(dtype))


@inline
def _begin(call: Call, task: Task, dtype: Any) -> None:
    """Gather the tile's queries and start its rows at the identity."""
    q, sums = pointer(task.q, np.int64), pointer(task.sums, np.int64)
    m, l = pointer(task.m, dtype), pointer(task.l, dtype)  # noqa: E741 - the field's names
    for i in range(_working_rows(call, itemsize(dtype)) * call.q_row // 8):
        q[i] = 0
    for i in range(task.rows * call.sums_row // 8):
        sums[i] = 0
    for row in range(task.rows):
        t, head = task.first + row // call.group, task.h * call.group + row % call.group
        source = call.q + task.b * call.q_b + head * call.q_h + t * call.q_t
        if call.many:
            gather_column(call, source, task.q + row * itemsize(dtype), dtype)
        else:
            gather_row(call, source, task.q + row * call.q_row, dtype)
        m[row], l[row] = -np.inf, 0


@inline
def _do_block(call: Call, task: Task, address: int, dtype: Any) -> None:
    task.visible = ALL
    if call.see != 0:
        call_part(call.see, (address,))
        if task.visible == NONE:
            return
    _gather_scales(call, task, dtype)
    if call.many:
        do_chunks(call, task, address, dtype)
        return
    _score(call, task, itemsize(dtype))
    call_part(call.weigh, (address,))
    _add_values(call, task, itemsize(dtype))


@inline
def _score(call: Call, task: Task, size: int) -> None:
    source, width = call.k + task.b * call.k_b + task.h * call.k_h + task.start * call.k_t, call.head_dim
    if call.k_strip == 0:
        shape = (source, call.k_t, task.keys, width)
        call_part(call.scores, (task.q, call.q_row, task.rows, *shape, task.scores))
        return
    for first in range(0, task.keys, call.k_strip):
        keys, start = min(call.k_strip, task.keys - first), source + first * call.k_t
        call_part(call.widen_k, (call.k_storage, start, call.k_t, call.k_d, keys, width, task.k, call.k_float8))
        shape = (task.k, call.k_row, keys, call.k_row // size)
        call_part(call.scores, (task.q, call.q_row, task.rows, *shape, task.scores + first * size))


@inline
def _add_values(call: Call, task: Task, size: int) -> None:
    source, width = call.v + task.b * call.v_b + task.h * call.v_h + task.start * call.v_t, call.v_head_dim
    into = (task.sums, call.sums_row, task.marked)
    if call.v_strip == 0:
        call_part(call.values, (task.scores, task.rows, source, call.v_t, task.keys, width, *into))
        return
    for first in range(0, task.keys, call.v_strip):
        keys, start = min(call.v_strip, task.keys - first), source + first * call.v_t
        call_part(call.widen_v, (call.v_storage, start, call.v_t, call.v_d, keys, width, task.v, call.v_float8))
        call_part(call.values, (task.scores + first * size, task.rows, task.v, call.v_row, keys, width, *into))


@inline
def _gather_scales(call: Call, task: Task, dtype: Any) -> None:
    """Write one scale per key of the block, so that the rows need no division to find theirs."""
    if call.k_scale != 0:
        source = call.k_scale + task.b * call.k_scale_b + task.h * call.k_scale_h
        _gather(source, call.k_scale_t, call.k_block, task, task.k_scale, dtype, True)
    if call.v_scale != 0:
        source = call.v_scale + task.b * call.v_scale_b + task.h * call.v_scale_h
        _gather(source, call.v_scale_t, call.v_block, task, task.v_scale, dtype, False)


@inline
def _gather(source: int, step: int, block: int, task: Task, target: int, dtype: Any, of_keys: bool) -> None:
    into, at, first = pointer(target, dtype), task.start // block, 0
    while first < task.keys:
        scale = pointer(source + at * step, dtype)[0]
        if of_keys and not abs(scale) < np.inf:  # times a dot product it might pass for a logit of -inf, a hidden key
            scale = dtype(np.nan)
        at += 1
        stop = min(task.keys, at * block - task.start)
        for i in range(first, stop):
            into[i] = scale
        first = stop


@inline
def _store(call: Call, task: Task, states: int, dtype: Any) -> None:
    width, heads, unit, how = call.v_head_dim, call.kv_heads * call.group, dtype(call.v_unit), call.v_order
    m, l = pointer(task.m, dtype), pointer(task.l, dtype)  # noqa: E741 - the field's names
    for row in range(task.rows):
        t, head = task.first + row // call.group, task.h * call.group + row % call.group
        at = ((task.b * heads + head) * call.q_tokens + t) * (width + 2)
        state, sums = pointer(states + at * itemsize(dtype), dtype), pointer(task.sums + row * call.sums_row, dtype)
        for j in range(width):
            state[j] = sums[order(j, how)] * unit
        state[width], state[width + 1] = l[row], m[row]


@inline
def _merge_splits(call: Call, task: Task, size: int) -> None:
    """Merge a tile's splits, as the thread that has ended the last of them; in their order, whoever was last."""
    width, heads = call.v_head_dim + 2, call.kv_heads * call.group
    sources = task.merging + 8 * (task.tokens * call.splits + width)
    for head in range(task.h * call.group, (task.h + 1) * call.group):
        at = ((task.b * heads + head) * call.q_tokens + task.first) * width * size
        for split in range(call.splits):
            pointer(sources, np.int64)[split] = call.states + split * call.states_s + at
        call_part(call.merge, (call.out + at, sources, call.splits, task.tokens, width, task.merging))
