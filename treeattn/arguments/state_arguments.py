"""The arguments of states, checked: shapes, dtypes, sinks, bases of logarithms."""

from __future__ import annotations

import math
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import FLOAT_DTYPES, as_array, cast, known_dtype, to_array
from treeattn.arguments.devices import on_device
from treeattn.errors import InputError

__all__ = ["log_of_base", "sink_logits", "state_dtype", "state_shape"]

Array: TypeAlias = npt.NDArray[Any]


def state_shape(shape: Any) -> tuple[int, int, int, int]:
    """Give ``shape`` if it is that of a state; an InputError otherwise."""
    try:
        batch, heads, tokens, width = map(index, shape)
    except (TypeError, ValueError):
        batch = heads = tokens = width = -1
    if min(batch, heads, tokens, width) < 0:
        raise InputError.of("shape", expected="(batch, query heads, query tokens, width of v)", got=repr(shape))
    return batch, heads, tokens, width


def state_dtype(dtype: Any) -> str:
    """Name ``dtype`` if it is that of states; an InputError otherwise."""
    return known_dtype("dtype", dtype, ("float32", "float64"))


def sink_logits(sink: Any, heads: int, dtype: str, there: bool) -> Array | None:
    """Check ``sink`` (Hq,), which may be on a device only if states are (``there``), and give it as ``dtype``."""
    if sink is None:
        return None
    array = to_array("sink", sink)
    if on_device(array) and not there:
        raise InputError.of("sink", expected="an array in host memory, as q is", got="one on a GPU")
    if array.shape != (heads,):
        raise InputError.of("sink", expected=f"shape ({heads},), one logit per query head", got=f"shape {array.shape}")
    if array.dtype.kind != "i":
        array = as_array("sink", array, FLOAT_DTYPES)
    array = cast(array, dtype)
    return array if on_device(array) else np.ascontiguousarray(array)


def log_of_base(base: Any) -> float:
    """Give the natural logarithm of ``base`` if it is one that logarithms are exchanged in; an InputError otherwise."""
    if isinstance(base, str) and base == "e":
        return 1.0
    if isinstance(base, (int, float, np.number)) and not isinstance(base, bool) and base == 2:
        return math.log(2.0)
    raise InputError.of("base", expected="'e' or 2", got=repr(base))
