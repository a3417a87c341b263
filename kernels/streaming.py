"""The streaming kernel: one task is one KV head and one range of its keys, for a tile of query tokens.

All query heads of the group and all tokens of the tile are served by one pass over K and V, block by block, in the
order of the addresses. A task leaves a partial state; tasks share nothing, so bits don't depend on the threads.
Source: arXiv 2408.04093 for the split and its merge; arXiv 1805.02867 for the online softmax inside a task.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.kernels.call import BLOCK, BUFFERS, TASK, Call, Task, call_at, task_at
from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import call_part, itemsize, next_task, pointer
from treeattn.kernels.visibility import ALL, NONE, row_keys

__all__ = ["buffer_bytes", "stream_double", "stream_single", "workspace_bytes"]

LINE = 64
"""Bytes of a cache line, and of the widest vector."""

TASK_BYTES = TASK.itemsize

STREAM = "void(int64, int64)"


@entry(STREAM)
def stream_single(call: int, workspace: int) -> None:
    """Do tasks of the call at an address, in this thread's workspace, until none is left; sums are float32."""
    _stream(call, workspace, np.float32)


@entry(STREAM)
def stream_double(call: int, workspace: int) -> None:
    """Do tasks with sums in float64."""
    _stream(call, workspace, np.float64)


def workspace_bytes(rows: int, head_dim: int, v_head_dim: int, size: int) -> int:
    """Bytes that one thread works in, for elements of ``size`` bytes."""
    buffers = buffer_bytes.py_func(rows, head_dim, v_head_dim, size)
    return int(TASK_BYTES + LINE * (len(buffers) + 1) + sum(buffers))


@inline
def buffer_bytes(rows: int, head_dim: int, v_head_dim: int, size: int) -> tuple[int, ...]:
    """Bytes of a task's buffers, in the order of `Task`."""
    sums, block = rows * v_head_dim * size, BLOCK * size
    keys, values = block * head_dim, block * v_head_dim
    return (
        rows * head_dim * size,
        sums,
        sums,
        rows * block,
        rows * size,
        rows * size,
        keys,
        values,
        block,
        block,
        rows * BLOCK,
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
    buffers = buffer_bytes(call.tile * call.group, call.head_dim, call.v_head_dim, size)
    fields, end = pointer(workspace, np.int64), workspace + TASK_BYTES
    for i in range(len(buffers)):
        start = -(-end // LINE) * LINE
        fields[BUFFERS + i] = start
        end = start + buffers[i]


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


@inline
def _begin(call: Call, task: Task, dtype: Any) -> None:
    """Gather the tile's queries and start its rows at the identity."""
    q, sums = pointer(task.q, dtype), pointer(task.sums, dtype)
    m, l = pointer(task.m, dtype), pointer(task.l, dtype)  # noqa: E741 - the field's names
    for row in range(task.rows):
        t, head = task.first + row // call.group, task.h * call.group + row % call.group
        source = call.q + task.b * call.q_b + head * call.q_h + t * call.q_t
        for j in range(call.head_dim):
            q[row * call.head_dim + j] = pointer(source + j * call.q_d, dtype)[0]
        m[row], l[row] = -np.inf, 0
    for j in range(task.rows * call.v_head_dim):
        sums[j] = 0


@inline
def _do_block(call: Call, task: Task, address: int, dtype: Any) -> None:
    task.visible = ALL
    if call.see != 0:
        call_part(call.see, (address,))
        if task.visible == NONE:
            return
    k, k_t = _keys(call, task)
    call_part(call.scores, (task.q, task.rows, k, k_t, task.keys, call.head_dim, task.scores))
    _gather_scales(call, task, dtype)
    call_part(call.weigh, (address,))
    v, v_t = _values(call, task)
    call_part(call.values, (task.scores, task.rows, v, v_t, task.keys, call.v_head_dim, task.partial, task.hidden))
    _add_partial(call, task, dtype)


@inline
def _keys(call: Call, task: Task) -> tuple[int, int]:
    """Address of the block's keys in working precision, and the bytes from one to the next."""
    source = call.k + task.b * call.k_b + task.h * call.k_h + task.start * call.k_t
    if call.k_staged == 0:
        return source, call.k_t
    shape = (task.keys, call.head_dim)
    call_part(call.widen, (call.k_storage, source, call.k_t, call.k_d, shape[0], shape[1], task.k, call.k_float8))
    return task.k, call.k_staged


@inline
def _values(call: Call, task: Task) -> tuple[int, int]:
    source = call.v + task.b * call.v_b + task.h * call.v_h + task.start * call.v_t
    if call.v_staged == 0:
        return source, call.v_t
    shape = (task.keys, call.v_head_dim)
    call_part(call.widen, (call.v_storage, source, call.v_t, call.v_d, shape[0], shape[1], task.v, call.v_float8))
    return task.v, call.v_staged


@inline
def _gather_scales(call: Call, task: Task, dtype: Any) -> None:
    """Write one scale per key of the block, so that the rows need no division to find theirs."""
    if call.k_scale != 0:
        source = call.k_scale + task.b * call.k_scale_b + task.h * call.k_scale_h
        _gather(source, call.k_scale_t, call.k_block, task, task.k_scale, dtype)
    if call.v_scale != 0:
        source = call.v_scale + task.b * call.v_scale_b + task.h * call.v_scale_h
        _gather(source, call.v_scale_t, call.v_block, task, task.v_scale, dtype)


@inline
def _gather(source: int, step: int, block: int, task: Task, target: int, dtype: Any) -> None:
    into = pointer(target, dtype)
    for i in range(task.keys):
        into[i] = pointer(source + (task.start + i) // block * step, dtype)[0]


@inline
def _add_partial(call: Call, task: Task, dtype: Any) -> None:
    sums, partial = pointer(task.sums, dtype), pointer(task.partial, dtype)
    for j in range(task.rows * call.v_head_dim):
        sums[j] += partial[j]


@inline
def _store(call: Call, task: Task, states: int, dtype: Any) -> None:
    width, heads = call.v_head_dim, call.kv_heads * call.group
    sums, m, l = pointer(task.sums, dtype), pointer(task.m, dtype), pointer(task.l, dtype)  # noqa: E741
    for row in range(task.rows):
        t, head = task.first + row // call.group, task.h * call.group + row % call.group
        at = ((task.b * heads + head) * call.q_tokens + t) * (width + 2)
        state = pointer(states + at * itemsize(dtype), dtype)
        for j in range(width):
            state[j] = sums[row * width + j]
        state[width], state[width + 1] = l[row], m[row]
