"""From a block's raw scores to weights, with the running maximum and sum of each row (online softmax).

Logits stay natural; weights are 2**((logit - m) log2 e). Folding log2 e into q would lose bits at large logits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treeattn.kernels.call import BLOCK, Call, Task, call_at, task_at
from treeattn.kernels.compilation import loops, part
from treeattn.kernels.exponential import LOG2E, exp2
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.visibility import SOME

__all__ = ["WEIGH", "weigh_double", "weigh_single"]

WEIGH = "void(int64)"
"""(task): turns the block's scores into weights, in place, and adds them to ``l``; moves ``m``, and ``sums`` with it.

A hidden key's weight is -inf, a mark that no weight can have; the task's ``hidden`` is set where there may be one.
``partial`` is cleared.
"""


@part(WEIGH)
def weigh_single(address: int) -> None:
    """Weigh in float32."""
    _weigh(task_at(address), np.float32)


@part(WEIGH)
def weigh_double(address: int) -> None:
    """Weigh in float64."""
    _weigh(task_at(address), np.float64)


@loops
def _weigh(task: Task, dtype: Any) -> None:
    call = call_at(task.call)
    some = task.visible == SOME
    task.hidden = some
    for row in range(task.rows):
        scores = pointer(task.scores + row * BLOCK * itemsize(dtype), dtype)
        _to_logits(call, task, row, scores, dtype)
        if some:
            _hide(scores, task.seen + row * BLOCK, task.keys, dtype)
        correction, total = _to_weights(task, row, scores, some, dtype)
        _rescale(call, task, row, correction, dtype)
        _scale_weights(call, task, scores, dtype)
        task.hidden |= total == 0


@loops
def _to_logits(call: Call, task: Task, row: int, logits: Any, dtype: Any) -> None:
    """Scale, softcap, float mask, in this order."""
    factor, stored = dtype(call.scale), pointer(task.k_scale, dtype)
    if call.k_scale != 0:
        for i in range(task.keys):
            logits[i] *= factor * stored[i]
    else:
        for i in range(task.keys):
            logits[i] *= factor
    if call.softcap > 0:
        cap = dtype(call.softcap)
        for i in range(task.keys):
            logits[i] = cap * math.tanh(logits[i] / cap)
    if call.mask_additive:
        t, head = task.first + row // call.group, task.h * call.group + row % call.group
        mask = call.mask + task.b * call.mask_b + head * call.mask_h + t * call.mask_t + task.start * call.mask_d
        for i in range(task.keys):
            logits[i] += pointer(mask + i * call.mask_d, dtype)[0]


@loops
def _hide(logits: Any, seen: int, keys: int, dtype: Any) -> None:
    visible = pointer(seen, np.uint8)
    for i in range(keys):
        logits[i] = logits[i] if visible[i] else dtype(-np.inf)


@loops
def _to_weights(task: Task, row: int, logits: Any, some: bool, dtype: Any) -> tuple[Any, Any]:
    """Weigh one row's keys; give what its earlier sums have to be multiplied with, and the sum of its weights."""
    m, l = pointer(task.m, dtype), pointer(task.l, dtype)  # noqa: E741 - the field's names
    highest, before = _largest(logits, task.keys, m[row], dtype), m[row]
    if highest == -np.inf and not _any_nan(logits, task.keys):
        return dtype(1), dtype(0)  # every logit is -inf, and marks its key as hidden
    total = _exponentiate(logits, task.keys, highest, some, dtype)
    correction = exp2((before - highest) * dtype(LOG2E)) if before != highest else dtype(1)
    m[row], l[row] = highest, l[row] * correction + total
    return correction, total


@loops
def _largest(logits: Any, keys: int, start: Any, dtype: Any) -> Any:
    """Largest logit, ``start`` included; a NaN is passed over, and shows in the weights instead."""
    highest = start
    for i in range(keys):
        highest = logits[i] if logits[i] > highest else highest
    return highest


@loops
def _any_nan(logits: Any, keys: int) -> bool:
    found = False
    for i in range(keys):
        found |= logits[i] != logits[i]
    return found


@loops
def _exponentiate(weights: Any, keys: int, m: Any, some: bool, dtype: Any) -> Any:
    total = dtype(0)
    if some:
        for i in range(keys):
            hidden = weights[i] == dtype(-np.inf)
            p = exp2((weights[i] - m) * dtype(LOG2E))
            total += dtype(0) if hidden else p
            weights[i] = dtype(-np.inf) if hidden else p
    else:
        for i in range(keys):
            p = exp2((weights[i] - m) * dtype(LOG2E))
            total += p
            weights[i] = p
    return total


@loops
def _rescale(call: Call, task: Task, row: int, correction: Any, dtype: Any) -> None:
    start = row * call.v_head_dim * itemsize(dtype)
    sums, partial = pointer(task.sums + start, dtype), pointer(task.partial + start, dtype)
    for j in range(call.v_head_dim):
        sums[j] *= correction
        partial[j] = 0


@loops
def _scale_weights(call: Call, task: Task, weights: Any, dtype: Any) -> None:
    if call.v_scale != 0:
        stored = pointer(task.v_scale, dtype)
        for i in range(task.keys):
            weights[i] = weights[i] * stored[i] if weights[i] != -np.inf else weights[i]
