"""The two matrix products of one block of keys, for any width: scores = q·k and o += p·v.

Plain loops, which LLVM vectorises along the width. Sums may be reordered and contracted here: every merge that must
agree between machines comes later. NaN and infinities stay what they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.kernels.call import BLOCK
from treeattn.kernels.compilation import loops, part
from treeattn.kernels.memory import itemsize, pointer

__all__ = ["SCORES", "VALUES", "scores_double", "scores_single", "values_double", "values_single"]

SCORES = "void(int64, int64, int64, int64, int64, int64, int64)"
"""(rows of q, rows, keys, bytes per key, number of keys, width, scores): ``scores[row, key]``, ``BLOCK`` a row."""

VALUES = "void(int64, int64, int64, int64, int64, int64, int64, int64)"
"""(weights, rows, values, bytes per key, number of keys, width, sums, whether some weights are hidden).

``sums[row] += weights[row, key] * values[key]``. A weight of -inf marks a hidden key, whose value is not used.
"""


@part(SCORES)
def scores_single(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    """Scores in float32."""
    _scores(q, rows, k, k_t, keys, width, scores, np.float32)


@part(SCORES)
def scores_double(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int) -> None:
    """Scores in float64."""
    _scores(q, rows, k, k_t, keys, width, scores, np.float64)


@part(VALUES)
def values_single(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    """Weighted sums in float32."""
    _values(p, rows, v, v_t, keys, width, sums, hidden, np.float32)


@part(VALUES)
def values_double(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int) -> None:
    """Weighted sums in float64."""
    _values(p, rows, v, v_t, keys, width, sums, hidden, np.float64)


@loops
def _scores(q: int, rows: int, k: int, k_t: int, keys: int, width: int, scores: int, dtype: Any) -> None:
    found = pointer(scores, dtype)
    for key in range(keys):  # outermost: each row of K is fetched once, in address order
        k_row = pointer(k + key * k_t, dtype)
        for row in range(rows):
            q_row = pointer(q + row * width * itemsize(dtype), dtype)
            total = dtype(0)
            for j in range(width):
                total += q_row[j] * k_row[j]
            found[row * BLOCK + key] = total


@loops
def _values(p: int, rows: int, v: int, v_t: int, keys: int, width: int, sums: int, hidden: int, dtype: Any) -> None:
    whole = 0 if hidden else keys - keys % 4
    for key in range(0, whole, 4):
        for row in range(rows):
            _add_four(p, row, v, v_t, key, width, sums, dtype)
    for key in range(whole, keys):
        for row in range(rows):
            weight = pointer(p, dtype)[row * BLOCK + key]
            if weight != -np.inf:
                _add_one(weight, v + key * v_t, row, width, sums, dtype)


@loops
def _add_four(p: int, row: int, v: int, v_t: int, key: int, width: int, sums: int, dtype: Any) -> None:
    weights = pointer(p, dtype)
    at = row * BLOCK + key
    w0, w1, w2, w3 = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
    v0, v1 = pointer(v + key * v_t, dtype), pointer(v + (key + 1) * v_t, dtype)
    v2, v3 = pointer(v + (key + 2) * v_t, dtype), pointer(v + (key + 3) * v_t, dtype)
    total = pointer(sums + row * width * itemsize(dtype), dtype)
    for j in range(width):
        total[j] += w0 * v0[j] + w1 * v1[j] + w2 * v2[j] + w3 * v3[j]


@loops
def _add_one(weight: Any, v: int, row: int, width: int, sums: int, dtype: Any) -> None:
    value, total = pointer(v, dtype), pointer(sums + row * width * itemsize(dtype), dtype)
    for j in range(width):
        total[j] += weight * value[j]
