"""From a block's raw scores to weights, with the running maximum and sum of each row (online softmax).

Logits stay natural; weights are 2**((logit - m) log2 e). Folding log2 e into q instead would lose bits at large logits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treeattn.kernels.call import Call
from treeattn.kernels.compilation import loops
from treeattn.kernels.exponential import LOG2E, exp2
from treeattn.kernels.memory import pointer

__all__ = ["to_logits", "to_weights"]


@loops
def to_logits(
    call: Call, b: int, head: int, t: int, start: int, keys: int, scores: int, k_scale: int, dtype: Any
) -> None:
    """Turn one row's raw scores into logits: scale, softcap, float mask, in this order."""
    logit = pointer(scores, dtype)
    factor = dtype(call.scale)
    if call.k_scale != 0:
        stored = pointer(k_scale, dtype)
        for i in range(keys):
            logit[i] *= factor * stored[i]
    else:
        for i in range(keys):
            logit[i] *= factor
    if call.softcap > 0:
        cap = dtype(call.softcap)
        for i in range(keys):
            logit[i] = cap * math.tanh(logit[i] / cap)
    if call.mask_additive:
        mask = call.mask + b * call.mask_b + head * call.mask_h + t * call.mask_t + start * call.mask_d
        for i in range(keys):
            logit[i] += pointer(mask + i * call.mask_d, dtype)[0]


@loops
def to_weights(scores: int, seen: int, some: bool, keys: int, m: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Turn one row's logits into weights relative to its new maximum.

    Returns
    -------
    m, total, correction
        The new maximum, the sum of the weights, and what earlier sums have to be multiplied with. A hidden key's
        weight is -inf, a mark that no weight can have.
    """
    if some:
        _hide(scores, seen, keys, dtype)
    highest = _largest(scores, keys, m, dtype)
    if highest == -np.inf and not _any_nan(scores, keys, dtype):
        _hide_all(scores, keys, dtype)
        return m, dtype(0), dtype(1)
    total = _weigh(scores, keys, highest, some, dtype)
    return highest, total, exp2((m - highest) * dtype(LOG2E)) if m != highest else dtype(1)


@loops
def _hide(scores: int, seen: int, keys: int, dtype: Any) -> None:
    logit, visible = pointer(scores, dtype), pointer(seen, np.uint8)
    for i in range(keys):
        logit[i] = logit[i] if visible[i] else dtype(-np.inf)


@loops
def _largest(scores: int, keys: int, start: Any, dtype: Any) -> Any:
    """Largest logit, ``start`` included; a NaN is passed over, and shows in the weights instead."""
    logit = pointer(scores, dtype)
    highest = start
    for i in range(keys):
        highest = logit[i] if logit[i] > highest else highest
    return highest


@loops
def _any_nan(scores: int, keys: int, dtype: Any) -> bool:
    logit = pointer(scores, dtype)
    found = False
    for i in range(keys):
        found |= logit[i] != logit[i]
    return found


@loops
def _hide_all(scores: int, keys: int, dtype: Any) -> None:
    weight = pointer(scores, dtype)
    for i in range(keys):
        weight[i] = dtype(-np.inf)


@loops
def _weigh(scores: int, keys: int, m: Any, some: bool, dtype: Any) -> Any:
    weight = pointer(scores, dtype)
    total = dtype(0)
    if some:
        for i in range(keys):
            hidden = weight[i] == dtype(-np.inf)
            p = exp2((weight[i] - m) * dtype(LOG2E))
            total += dtype(0) if hidden else p
            weight[i] = dtype(-np.inf) if hidden else p
    else:
        for i in range(keys):
            p = exp2((weight[i] - m) * dtype(LOG2E))
            total += p
            weight[i] = p
    return total
