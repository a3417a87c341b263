"""From a block's raw scores to weights, with the running maximum and sum of each row (online softmax).

Logits stay natural; weights are 2**((logit - m) log2 e). Folding log2 e into q would lose bits at large logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels import vector_math
from treeattn.kernels.call import BLOCK, Call, Task, call_at, task_at
from treeattn.kernels.compilation import inline, loops, part
from treeattn.kernels.exponential import LOG2E, exp2
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.vectors import DOUBLE, FLOAT, LANES, Vectors
from treeattn.kernels.visibility import SOME

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["WEIGH", "weigh_double", "weigh_single"]

WEIGH = "void(int64)"
"""(task): turns the block's scores into weights, in place, and adds them to ``l``; moves ``m``, and ``sums`` with it.

A hidden key's weight is -inf, a mark that no weight can have; the task's ``marked`` is set where there may be one.
"""

LEAST_PRODUCT, MOST_PRODUCT = 1e-36, 1e36
"""Between which two scales are one: a product that float32 can't hold says nothing of the logits, which it may.

What a user's own factor may be is another bound, in ``treeattn/arguments/factors.py``.
"""


@part(WEIGH)
def weigh_single(address: int) -> None:
    """Weigh in float32."""
    _weigh(task_at(address), np.float32)


@part(WEIGH)
def weigh_double(address: int) -> None:
    """Weigh in float64."""
    _weigh(task_at(address), np.float64)


def _vectors_of(builder: Any, kind: Any) -> Vectors:
    return Vectors(builder, FLOAT if kind.dtype == types.float32 else DOUBLE)


def _scale(typingctx: Any, kind: Any, row: Any, keys: Any, factor: Any, start: Any) -> Any:
    """Multiply a row in place; give the largest number in it and ``start``. NaN is passed over."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, keys, factor, start = args
        vectors = _vectors_of(builder, kind)
        factors = vectors.spread(factor)

        def step(at: Any, found: list[Any]) -> list[Any]:
            scaled = vectors.multiply(vectors.load(at), factors)
            vectors.store(scaled, at)
            return [larger(vectors, scaled, found[0])]

        (highest,) = vectors.for_row(row, keys, [vectors.spread(start)], step)
        return vectors.reduce(highest, lambda a, b: larger(vectors, a, b))

    return kind.dtype(kind, types.int64, types.int64, kind.dtype, kind.dtype), codegen


def larger(vectors: Vectors, a: Any, b: Any) -> Any:
    """Give the larger, and ``b`` where ``a`` is NaN."""
    return vectors.where(">", a, b, a, b)


def _soften(typingctx: Any, kind: Any, row: Any, keys: Any, cap: Any) -> Any:
    """Replace each number x of a row by cap tanh(x / cap)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, keys, cap = args
        vectors = _vectors_of(builder, kind)
        caps = vectors.spread(cap)

        def step(at: Any, found: list[Any]) -> list[Any]:
            bent = vector_math.tanh(vectors, builder.fdiv(vectors.load(at), caps))
            vectors.store(vectors.multiply(bent, caps), at)
            return []

        vectors.for_row(row, keys, [], step)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, kind.dtype), codegen


def _exponentiate(typingctx: Any, kind: Any, row: Any, keys: Any, m: Any, factor: Any, nothing: Any) -> Any:
    """Turn logits into weights, whose sum it gives, times ``factor``; that of a logit of -inf becomes ``nothing``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, row, keys, *numbers = args
        vectors = _vectors_of(builder, kind)
        (highest, factors, absent), lowest = map(vectors.spread, numbers), vectors.constant(float("-inf"))

        def step(at: Any, total: list[Any]) -> list[Any]:
            logits = vectors.load(at)
            relative = vectors.multiply(builder.fsub(logits, highest), vectors.constant(LOG2E))
            weights = vector_math.exp2(vectors, relative)
            vectors.store(vectors.where("==", logits, lowest, absent, vectors.multiply(weights, factors)), at)
            return [vectors.add(total[0], weights)]

        (total,) = vectors.for_row(row, keys, [vectors.zero], step)
        return vectors.reduce(total, vectors.add)

    return kind.dtype(kind, types.int64, types.int64, *[kind.dtype] * 3), codegen


scale: Any = intrinsic(_scale)
soften: Any = intrinsic(_soften)
exponentiate: Any = intrinsic(_exponentiate)


@inline  # not `loops`: reordering would undo the rounding in exp2 and tanh
def _weigh(task: Task, dtype: Any) -> None:
    call = call_at(task.call)
    some = task.visible == SOME
    task.marked = some
    for row in range(task.rows):
        at = task.scores + row * BLOCK * itemsize(dtype)
        task.marked |= not _weigh_row(call, task, row, at, some, dtype)


@loops
def _fill_up(logits: Any, keys: int, value: Any) -> None:
    """Write ``value`` behind the last key, up to the end of its vector."""
    for i in range(keys, -(-keys // LANES) * LANES):
        logits[i] = value


@inline  # not `loops`: reordering would undo the rounding in exp2 and tanh
def _weigh_row(call: Call, task: Task, row: int, at: int, some: bool, dtype: Any) -> bool:
    """Weigh one row's keys; False where every logit is -inf, and so marks its key as hidden."""
    m, l = pointer(task.m, dtype), pointer(task.l, dtype)  # noqa: E741 - the field's names
    before, highest = m[row], _to_logits(call, task, row, at, some, dtype)
    if highest == -np.inf and not _any_nan(pointer(at, dtype), task.keys):
        return False
    one_scale = call.v_scale != 0 and _share_scale(task, call.v_block)
    factor = pointer(task.v_scale, dtype)[0] if one_scale else dtype(1)
    total = exponentiate(dtype, at, task.keys, highest, factor, dtype(-np.inf) if some else dtype(0))
    if before != highest:
        correction = exp2((before - highest) * dtype(LOG2E))
        l[row] *= correction
        _rescale(call, task, row, correction, dtype)
    m[row], l[row] = highest, l[row] + total
    if call.v_scale != 0 and not one_scale:
        _scale_weights(task, pointer(at, dtype), dtype)
    return True


@inline  # not `loops`: reordering would undo the rounding in exp2 and tanh
def _to_logits(call: Call, task: Task, row: int, at: int, some: bool, dtype: Any) -> Any:
    """Scale, softcap, float mask, in this order, then hide; give the largest logit so far."""
    logits, m, factor = pointer(at, dtype), pointer(task.m, dtype)[row], dtype(call.scale)
    if call.k_scale != 0:
        stored = pointer(task.k_scale, dtype)
        if _share_scale(task, call.k_block) and LEAST_PRODUCT < abs(factor * stored[0]) < MOST_PRODUCT:
            factor *= stored[0]
        else:
            for i in range(task.keys):
                logits[i] *= stored[i]
    _fill_up(logits, task.keys, logits[0])  # a logit that changes no maximum, whatever the sign of the scale
    highest = scale(dtype, at, task.keys, factor, m)
    if call.softcap > 0:
        soften(dtype, at, task.keys, dtype(call.softcap))
    if call.mask_additive:
        _add_mask(call, task, row, logits, dtype)
    if some:
        _hide(logits, task.seen + row * BLOCK, task.keys, dtype)
    _fill_up(logits, task.keys, dtype(-np.inf))
    if call.softcap > 0 or call.mask_additive or some:
        highest = scale(dtype, at, task.keys, dtype(1), m)
    return highest


@inline
def _share_scale(task: Task, block: int) -> bool:
    """Whether the task's keys have one scale, which ``block`` keys share."""
    return task.start // block == (task.start + task.keys - 1) // block


@loops
def _add_mask(call: Call, task: Task, row: int, logits: Any, dtype: Any) -> None:
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
def _any_nan(logits: Any, keys: int) -> bool:
    found = False
    for i in range(keys):
        found |= logits[i] != logits[i]
    return found


@loops
def _rescale(call: Call, task: Task, row: int, correction: Any, dtype: Any) -> None:
    sums = pointer(task.sums + row * call.sums_row, dtype)
    for j in range(call.sums_row // itemsize(dtype)):
        sums[j] *= correction


@loops
def _scale_weights(task: Task, weights: Any, dtype: Any) -> None:
    stored = pointer(task.v_scale, dtype)
    for i in range(task.keys):
        weights[i] = weights[i] * stored[i] if weights[i] != -np.inf else weights[i]
