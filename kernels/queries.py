"""Queries of any type and strides, gathered in the order in which keys are loaded.

What the loops need of a call is read before them: for all that the compiler knows, they might write over it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.kernels.call import STORAGES, Call
from treeattn.kernels.compilation import inline
from treeattn.kernels.loads import order
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.narrow import widened

__all__ = ["gather_column", "gather_row"]

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = (STORAGES.index(name) for name in ("float32", "float64", "bfloat16", "float16"))


@inline
def gather_row(call: Call, source: int, target: int, dtype: Any) -> None:
    """Write one query; as bfloat16, which it then is, for products of pairs."""
    step, how, storage, width = call.q_d, call.k_order, call.q_storage, call.head_dim
    own = FLOAT64 if itemsize(dtype) == 8 else FLOAT32
    if call.pairs and how == 0 and step == 2:
        _copy(source, target, width, np.uint16)
    elif call.pairs:
        for j in range(width):
            pointer(target, np.uint16)[order(j, how)] = pointer(source + j * step, np.uint16)[0]
    elif storage == own and how == 0 and step == itemsize(dtype):
        _copy(source, target, width, dtype)
    else:
        for j in range(width):
            pointer(target, dtype)[order(j, how)] = _number(storage, source + j * step, dtype)


@inline
def _copy(source: int, target: int, width: int, dtype: Any) -> None:
    """Copy a row as it is: a loop with no strides in it, which the compiler turns into vectors."""
    numbers, copied = pointer(source, dtype), pointer(target, dtype)
    for j in range(width):
        copied[j] = numbers[j]


@inline
def gather_column(call: Call, source: int, target: int, dtype: Any) -> None:
    """Write one query down the columns of many rows; ``target`` is its place in the first."""
    step, how, storage, line = call.q_d, call.k_order, call.q_storage, call.many
    if call.pairs:
        for j in range(call.head_dim):
            pointer(target + j // 2 * line, np.uint16)[j % 2] = pointer(source + j * step, np.uint16)[0]
    else:
        for j in range(call.head_dim):
            pointer(target + order(j, how) * line, dtype)[0] = _number(storage, source + j * step, dtype)


@inline
def _number(storage: int, address: int, dtype: Any) -> Any:
    """Give the stored number at an address; casts to a wider type are exact."""
    if storage == BFLOAT16:
        return dtype(widened(pointer(address, np.uint16)[0]))
    if storage == FLOAT16:
        return dtype(widened(pointer(address, np.int16)[0]))
    if storage == FLOAT64:
        return dtype(pointer(address, np.float64)[0])
    return dtype(pointer(address, np.float32)[0])
