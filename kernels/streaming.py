"""The streaming kernel: one task is one KV head and one range of its keys, for a tile of query tokens.

All query heads of the group and all tokens of the tile are served by one pass over K and V, block by block, in the
order of the addresses. A task leaves a partial state; tasks share nothing, so bits don't depend on the threads.
Source: arXiv 2408.04093 for the split and its merge; the online softmax of arXiv 1805.02867 inside a task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from treeattn.kernels.call import BLOCK, Call, call_at
from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import call_part, itemsize, next_task, pointer
from treeattn.kernels.softmax import to_logits, to_weights
from treeattn.kernels.visibility import NONE, SOME, row_keys, visibility

__all__ = ["Workspace", "stream_double", "stream_single", "workspace"]

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""

STREAM = "void(int64, int64)"


class Workspace(NamedTuple):
    """Where a task keeps what it works on: addresses, each on a cache line."""

    q: int
    sums: int
    partial: int  # the block's own sums, so that long sums are added in two levels
    scores: int
    m: int
    l: int  # noqa: E741 - the field's name
    k: int
    v: int
    k_scale: int
    v_scale: int
    seen: int
    end: int


@entry(STREAM)
def stream_single(call: int, base: int) -> None:
    """Do tasks of the call at an address until none is left; ``base`` is the address of this thread's workspace."""
    _stream(call, base, np.float32)


@entry(STREAM)
def stream_double(call: int, base: int) -> None:
    """Do tasks with sums in float64."""
    _stream(call, base, np.float64)


@inline
def workspace(base: int, rows: int, head_dim: int, v_head_dim: int, size: int) -> Workspace:
    """Lay out a workspace from ``base`` for elements of ``size`` bytes; in Python too, to learn its length."""
    q = -(-base // ALIGNMENT) * ALIGNMENT
    sums = q + -(-rows * head_dim * size // ALIGNMENT) * ALIGNMENT
    partial = sums + -(-rows * v_head_dim * size // ALIGNMENT) * ALIGNMENT
    scores = partial + (partial - sums)
    m = scores + rows * BLOCK * size
    l = m + -(-rows * size // ALIGNMENT) * ALIGNMENT  # noqa: E741 - the field's name
    k = l + -(-rows * size // ALIGNMENT) * ALIGNMENT
    v = k + BLOCK * head_dim * size
    k_scale = v + BLOCK * v_head_dim * size
    v_scale = k_scale + BLOCK * size
    seen = v_scale + BLOCK * size
    return Workspace(q, sums, partial, scores, m, l, k, v, k_scale, v_scale, seen, seen + rows * BLOCK)


@inline
def _stream(address: int, base: int, dtype: Any) -> None:
    call = call_at(address)
    work = workspace(base, call.tile * call.group, call.head_dim, call.v_head_dim, itemsize(dtype))
    tasks = call.batch * call.kv_heads * call.tiles * call.splits
    index = next_task(address)
    while index < tasks:
        _task(call, index, work, dtype)
        index = next_task(address)


@inline
def _task(call: Call, index: int, work: Workspace, dtype: Any) -> None:
    split, tile = index % call.splits, index // call.splits % call.tiles
    h = index // (call.splits * call.tiles) % call.kv_heads
    b = index // (call.splits * call.tiles * call.kv_heads)
    first = tile * call.tile
    tokens = min(call.tile, call.q_tokens - first)
    _begin(call, b, h, first, tokens, work, dtype)
    stop = min((split + 1) * call.split, row_keys(call, b))
    for start in range(split * call.split, stop, BLOCK):
        _block(call, b, h, first, tokens, start, min(BLOCK, stop - start), work, dtype)
    _store(call, b, h, first, tokens, split, work, dtype)


@inline
def _begin(call: Call, b: int, h: int, first: int, tokens: int, work: Workspace, dtype: Any) -> None:
    """Gather the tile's queries, row = token * group + head, and start its rows at the identity."""
    q, sums = pointer(work.q, dtype), pointer(work.sums, dtype)
    m, l = pointer(work.m, dtype), pointer(work.l, dtype)  # noqa: E741 - the field's names
    for row in range(tokens * call.group):
        t, head = first + row // call.group, h * call.group + row % call.group
        source = call.q + b * call.q_b + head * call.q_h + t * call.q_t
        for j in range(call.head_dim):
            q[row * call.head_dim + j] = pointer(source + j * call.q_d, dtype)[0]
        m[row], l[row] = -np.inf, 0
    for j in range(tokens * call.group * call.v_head_dim):
        sums[j] = 0


@inline
def _block(
    call: Call,
    b: int,
    h: int,
    first: int,
    tokens: int,
    start: int,
    keys: int,
    work: Workspace,
    dtype: Any,
) -> None:
    seen = visibility(call, b, h, first, tokens, start, keys, work.seen, dtype)
    if seen == NONE:
        return
    rows = tokens * call.group
    k, k_t = _keys(call, b, h, start, keys, work)
    call_part(call.scores, (work.q, rows, k, k_t, keys, call.head_dim, work.scores))
    _gather_scales(call, b, h, start, keys, work, dtype)
    hidden = seen == SOME
    for row in range(rows):
        t, head = first + row // call.group, h * call.group + row % call.group
        scores = work.scores + row * BLOCK * itemsize(dtype)
        to_logits(call, b, head, t, start, keys, scores, work.k_scale, dtype)
        hidden |= _add_row(call, row, scores, seen == SOME, keys, work, dtype)
    v, v_t = _values(call, b, h, start, keys, work)
    call_part(call.values, (work.scores, rows, v, v_t, keys, call.v_head_dim, work.partial, np.int64(hidden)))
    _add_partial(call, rows, work, dtype)


@inline
def _keys(call: Call, b: int, h: int, start: int, keys: int, work: Workspace) -> tuple[int, int]:
    """Address of the block's keys in working precision, and the bytes from one to the next."""
    source = call.k + b * call.k_b + h * call.k_h + start * call.k_t
    if call.k_staged == 0:
        return source, call.k_t
    shape = (keys, call.head_dim)
    call_part(call.widen, (call.k_storage, source, call.k_t, call.k_d, shape[0], shape[1], work.k, call.k_float8))
    return work.k, call.k_staged


@inline
def _values(call: Call, b: int, h: int, start: int, keys: int, work: Workspace) -> tuple[int, int]:
    source = call.v + b * call.v_b + h * call.v_h + start * call.v_t
    if call.v_staged == 0:
        return source, call.v_t
    shape = (keys, call.v_head_dim)
    call_part(call.widen, (call.v_storage, source, call.v_t, call.v_d, shape[0], shape[1], work.v, call.v_float8))
    return work.v, call.v_staged


@inline
def _gather_scales(call: Call, b: int, h: int, start: int, keys: int, work: Workspace, dtype: Any) -> None:
    """Write one scale per key of the block, so that the rows need no division to find theirs."""
    if call.k_scale != 0:
        source = call.k_scale + b * call.k_scale_b + h * call.k_scale_h
        _gather(source, call.k_scale_t, call.k_block, start, keys, work.k_scale, dtype)
    if call.v_scale != 0:
        source = call.v_scale + b * call.v_scale_b + h * call.v_scale_h
        _gather(source, call.v_scale_t, call.v_block, start, keys, work.v_scale, dtype)


@inline
def _gather(source: int, step: int, block: int, start: int, keys: int, target: int, dtype: Any) -> None:
    into = pointer(target, dtype)
    for i in range(keys):
        into[i] = pointer(source + (start + i) // block * step, dtype)[0]


@inline
def _add_row(call: Call, row: int, scores: int, some: bool, keys: int, work: Workspace, dtype: Any) -> Any:
    """Weigh one row's keys and rescale its earlier sums; True where a weight may be the mark of a hidden key."""
    m, l = pointer(work.m, dtype), pointer(work.l, dtype)  # noqa: E741 - the field's names
    m[row], total, correction = to_weights(scores, work.seen + row * BLOCK, some, keys, m[row], dtype)
    l[row] = l[row] * correction + total
    sums = pointer(work.sums + row * call.v_head_dim * itemsize(dtype), dtype)
    partial = pointer(work.partial + row * call.v_head_dim * itemsize(dtype), dtype)
    for j in range(call.v_head_dim):
        sums[j] *= correction
        partial[j] = 0
    if call.v_scale != 0:
        _scale_weights(scores, work.v_scale, keys, dtype)
    return total == 0


@inline
def _add_partial(call: Call, rows: int, work: Workspace, dtype: Any) -> None:
    sums, partial = pointer(work.sums, dtype), pointer(work.partial, dtype)
    for j in range(rows * call.v_head_dim):
        sums[j] += partial[j]


@inline
def _scale_weights(scores: int, v_scale: int, keys: int, dtype: Any) -> None:
    weight, stored = pointer(scores, dtype), pointer(v_scale, dtype)
    for i in range(keys):
        weight[i] = weight[i] * stored[i] if weight[i] != -np.inf else weight[i]


@inline
def _store(call: Call, b: int, h: int, first: int, tokens: int, split: int, work: Workspace, dtype: Any) -> None:
    width, size = call.v_head_dim, itemsize(dtype)
    sums, m, l = pointer(work.sums, dtype), pointer(work.m, dtype), pointer(work.l, dtype)  # noqa: E741
    for row in range(tokens * call.group):
        t, head = first + row // call.group, h * call.group + row % call.group
        at = ((b * call.kv_heads * call.group + head) * call.q_tokens + t) * (width + 2) * size
        state = pointer(call.states + split * call.states_s + at, dtype)
        for j in range(width):
            state[j] = sums[row * width + j]
        state[width], state[width + 1] = l[row], m[row]
