"""A task of many query rows, for which computing takes longer than reading: blocks as small matrix products.

A block is taken in chunks that stay in the caches, scores and values of one chunk after the other. While the scores of
a chunk are computed its values are fetched, and while those are summed the keys of the next chunk.
"""

from __future__ import annotations

from typing import Any

from treeattn.kernels.call import Call, Task
from treeattn.kernels.compilation import inline
from treeattn.kernels.many_scores import KEYS
from treeattn.kernels.many_values import ROWS
from treeattn.kernels.memory import call_part, itemsize
from treeattn.kernels.vectors import LANES
from treeattn.kernels.visibility import SOME

__all__ = ["CHUNK", "do_chunks", "whole_rows"]

CHUNK = 64
"""Keys that are scored, weighed and summed at a time: their rows fit the second-level cache beside those fetched."""


def whole_rows(rows: int) -> int:
    """Rows that working buffers have: whole vectors and tiles of them."""
    unit = max(LANES, ROWS)
    return -(-rows // unit) * unit


@inline
def do_chunks(call: Call, task: Task, address: int, dtype: Any) -> None:
    """Score, weigh and sum the task's block, of which some keys are seen."""
    for first in range(0, task.keys, CHUNK):
        keys = min(CHUNK, task.keys - first)
        k = call.k + task.b * call.k_b + task.h * call.k_h + (task.start + first) * call.k_t
        v = call.v + task.b * call.v_b + task.h * call.v_h + (task.start + first) * call.v_t
        _score(call, task, k, keys, v, itemsize(dtype))
        call_part(call.weigh, (address, first, keys))
        _add_values(call, task, v, keys, k + keys * call.k_t, itemsize(dtype))


@inline
def _score(call: Call, task: Task, k: int, keys: int, ahead: int, size: int) -> None:
    vectors, strip = -(-task.rows * size // (LANES * 4)), call.k_strip if call.k_strip else keys
    turns = max(1, -(-keys // KEYS)) * vectors * call.columns
    step = -(-keys * call.v_ahead // turns)
    for first in range(0, keys, strip):
        count, source, row = min(strip, keys - first), k + first * call.k_t, call.k_t
        if call.k_strip:
            call_part(
                call.widen_k, (call.k_storage, source, call.k_t, call.k_d, count, call.head_dim, task.k, call.k_float8)
            )
            source, row = task.k, call.k_row
        shape = (vectors, source, row, count, call.columns, task.scores + first * call.many)
        call_part(call.scores, (task.q, call.many, *shape, ahead + first * call.v_ahead, step))


@inline
def _add_values(call: Call, task: Task, v: int, keys: int, ahead: int, size: int) -> None:
    strip, width = call.v_strip if call.v_strip else keys, call.sums_row // size if call.v_strip else call.v_head_dim
    turns = max(1, -(-task.rows // ROWS) * -(-call.sums_row // (2 * LANES * 4)) * keys)
    step = -(-keys * call.k_ahead // turns)
    for first in range(0, keys, strip):
        count, source, row = min(strip, keys - first), v + first * call.v_t, call.v_t
        if call.v_strip:
            call_part(
                call.widen_v,
                (call.v_storage, source, call.v_t, call.v_d, count, call.v_head_dim, task.v, call.v_float8),
            )
            source, row = task.v, call.v_row
        weights = (task.scores + first * call.many, call.many, task.rows)
        into = (task.sums, call.sums_row, task.visible == SOME, ahead + first * call.k_ahead, step)
        call_part(call.values, (*weights, source, row, count, width, *into))
