"""From raw scores to weights for many query rows, which lie in the lanes of vectors (online softmax).

The same steps as for a few rows, in the same order; the largest logit and the sum of each row need no sum over lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types as _types
from numba.extending import intrinsic

from treeattn.kernels import vector_math
from treeattn.kernels.call import BLOCK, Call, Task, call_at, task_at
from treeattn.kernels.compilation import inline, loops, part
from treeattn.kernels.exponential import LOG2E
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.softmax import larger
from treeattn.kernels.vectors import DOUBLE, FLOAT, LANES, Vectors
from treeattn.kernels.visibility import SOME

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["MANY_WEIGH", "many_weigh_double", "many_weigh_single"]

MANY_WEIGH = "void(int64, int64, int64)"
"""(task, first key, keys): turns the scores of some of the block's keys into weights, in place, and adds them to ``l``;
moves ``m``, and ``sums`` with it.

Where the task's block is not seen whole, a hidden key's weight is -inf, a mark that no weight can have.
"""

OWN, FACTOR, SOFTCAP = range(3)
"""Ways to change logits."""


@part(MANY_WEIGH)
def many_weigh_single(address: int, first: int, keys: int) -> None:
    """Weigh in float32."""
    _weigh(task_at(address), first, keys, np.float32)


@part(MANY_WEIGH)
def many_weigh_double(address: int, first: int, keys: int) -> None:
    """Weigh in float64."""
    _weigh(task_at(address), first, keys, np.float64)


def _vectors_of(builder: Any, kind: Any) -> Vectors:
    return Vectors(builder, FLOAT if kind.dtype == types.float32 else DOUBLE)


def _change(typingctx: Any, kind: Any, how: Any, at: Any, line: Any, keys: Any, factor: Any, factors: Any) -> Any:
    """Change lines of logits in one of the three ways: each by its own of ``factors``, or all by ``factor``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, at, line, keys, factor, factors = args
        vectors, way = _vectors_of(builder, kind), how.literal_value
        spread = vectors.spread(factor)

        def step(index: Any, carried: list[Any]) -> list[Any]:
            place, own = carried
            x = vectors.load(place)
            if way == SOFTCAP:
                x = vector_math.tanh(vectors, builder.fdiv(x, spread))
            vectors.store(vectors.multiply(x, vectors.broadcast(own) if way == OWN else spread), place)
            return [builder.add(place, line), vectors.advance(own, 1, vectors.size)]

        vectors.loop(keys, [at, factors], step)
        return context.get_dummy_value()

    return types.void(kind, how, types.int64, types.int64, types.int64, kind.dtype, types.int64), codegen


def _weigh_lanes(
    typingctx: Any,
    kind: Any,
    at: Any,
    line: Any,
    keys: Any,
    factor: Any,
    nothing: Any,
    m: Any,
    sums: Any,
    corrections: Any,
) -> Any:
    """Turn a vector of rows' logits, times ``factor``, into weights; those of logits of -inf become ``nothing``.

    Moves ``m`` and ``l``, writes what older sums are to be multiplied with, and says whether any of that is not 1.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, line, keys, factor, nothing, m, sums, corrections = args
        vectors = _vectors_of(builder, kind)
        factors, absent = vectors.spread(factor), vectors.spread(nothing)
        lowest, before = vectors.constant(float("-inf")), vectors.load(m)

        def find(index: Any, carried: list[Any]) -> list[Any]:
            place, highest = carried
            logits = vectors.multiply(vectors.load(place), factors)
            return [builder.add(place, line), larger(vectors, logits, highest)]

        _, highest = vectors.loop(keys, [at, before], find)
        # Rows that have seen nothing yet: -inf less -inf would be NaN.
        origin = vectors.where("==", highest, lowest, vectors.zero, highest)

        def weigh(index: Any, carried: list[Any]) -> list[Any]:
            place, total = carried
            logits = vectors.multiply(vectors.load(place), factors)
            weights = _power(vectors, logits, origin)
            vectors.store(vectors.where("==", logits, lowest, absent, weights), place)
            return [builder.add(place, line), vectors.add(total, weights)]

        _, total = vectors.loop(keys, [at, vectors.zero], weigh)
        correction = vectors.where("==", before, highest, vectors.constant(1.0), _power(vectors, before, origin))
        vectors.store(highest, m)
        vectors.store(vectors.add_product(vectors.load(sums), correction, total), sums)
        vectors.store(correction, corrections)
        return _any(vectors, builder.fcmp_unordered("!=", correction, vectors.constant(1.0)))

    return types.boolean(
        kind, types.int64, types.int64, types.int64, kind.dtype, kind.dtype, *[types.int64] * 3
    ), codegen


def _power(vectors: Vectors, logits: Any, origin: Any) -> Any:
    relative = vectors.multiply(vectors.builder.fsub(logits, origin), vectors.constant(LOG2E))
    return vector_math.exp2(vectors, relative)


def _any(vectors: Vectors, bits: Any) -> Any:
    """Whether any of a vector of bits is set."""
    whole = vectors.builder.bitcast(bits, ir.IntType(vectors.lanes))
    return vectors.builder.icmp_unsigned("!=", whole, ir.Constant(ir.IntType(vectors.lanes), 0))


change: Any = intrinsic(prefer_literal=True)(_change)
weigh_lanes: Any = intrinsic(_weigh_lanes)


@inline  # not `loops`: reordering would undo the rounding in exp2 and tanh
def _weigh(task: Task, first: int, keys: int, dtype: Any) -> None:
    call = call_at(task.call)
    some, corrected = task.visible == SOME, False
    flips = some and dtype(call.scale) <= 0  # a scale that would make hidden keys' -inf another number
    if flips or call.k_scale != 0 or call.softcap > 0 or call.mask_additive:
        _to_logits(call, task, first, keys, dtype)
        factor = dtype(1)
    else:
        factor = dtype(call.scale)
    if some:
        _hide(call, task, first, keys, dtype)
    for offset in range(0, task.rows * itemsize(dtype), LANES * 4):
        corrected |= weigh_lanes(
            dtype,
            task.scores + offset,
            call.many,
            keys,
            factor,
            dtype(-np.inf) if some else dtype(0),
            task.m + offset,
            task.l + offset,
            task.corrections + offset,
        )
    if corrected:
        _rescale(call, task, dtype)
    if call.v_scale != 0:
        _scale_weights(call, task, first, keys, dtype)


@inline  # not `loops`: reordering would undo the rounding in tanh
def _to_logits(call: Call, task: Task, first: int, keys: int, dtype: Any) -> None:
    """Scale, softcap, float mask, in this order."""
    scales = task.k_scale + first * itemsize(dtype)
    for offset in range(0, task.rows * itemsize(dtype), LANES * 4):
        at = task.scores + offset
        if call.k_scale != 0:
            change(dtype, OWN, at, call.many, keys, dtype(1), scales)
        change(dtype, FACTOR, at, call.many, keys, dtype(call.scale), scales)
        if call.softcap > 0:
            change(dtype, SOFTCAP, at, call.many, keys, dtype(call.softcap), scales)
    if call.mask_additive:
        _add_mask(call, task, first, keys, dtype)


@loops
def _add_mask(call: Call, task: Task, first: int, keys: int, dtype: Any) -> None:
    for row in range(task.rows):
        t, head = task.first + row // call.group, task.h * call.group + row % call.group
        mask = call.mask + task.b * call.mask_b + head * call.mask_h + t * call.mask_t
        for i in range(keys):
            at = mask + (task.start + first + i) * call.mask_d
            pointer(task.scores + i * call.many, dtype)[row] += pointer(at, dtype)[0]


@loops
def _hide(call: Call, task: Task, first: int, keys: int, dtype: Any) -> None:
    for row in range(task.rows):
        seen = pointer(task.seen + row * BLOCK + first, np.uint8)
        for i in range(keys):
            if not seen[i]:
                pointer(task.scores + i * call.many, dtype)[row] = -np.inf


@loops
def _rescale(call: Call, task: Task, dtype: Any) -> None:
    corrections = pointer(task.corrections, dtype)
    for row in range(task.rows):
        sums = pointer(task.sums + row * call.sums_row, dtype)
        if corrections[row] != 1:
            for j in range(call.sums_row // itemsize(dtype)):
                sums[j] *= corrections[row]


@loops
def _scale_weights(call: Call, task: Task, first: int, keys: int, dtype: Any) -> None:
    stored = pointer(task.v_scale, dtype)
    for i in range(keys):
        weights = pointer(task.scores + i * call.many, dtype)
        for row in range(task.rows):
            weights[row] = weights[row] * stored[first + i] if weights[row] != -np.inf else weights[row]
