"""What multiplies and bounds logits and stored numbers: scale, softcap and scales per block of tokens, validated."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import FLOAT_DTYPES, as_array, cast
from treeattn.arguments.checks import is_number
from treeattn.arguments.devices import broadcast
from treeattn.errors import InputError

__all__ = ["block_scale", "dot_scale", "softcap_of"]

Array: TypeAlias = npt.NDArray[Any]

LARGEST = {"float32": 1e36, "float64": 1e300}
"""What a factor of logits may be, by the type that they are computed in, with room for what kernels multiply it by.

It bounds what users pass. The bounds in ``kernels/softmax.py`` are about a product, and choose between two ways.
"""


def dot_scale(value: Any, width: int, state_dtype: str) -> float:
    """Check ``scale``, the factor of dot products of ``width`` numbers."""
    number, most = _number("scale", value, default=width**-0.5), LARGEST[state_dtype]
    if abs(number) > most:
        raise InputError.of("scale", expected=f"-{most:g} to {most:g}, as logits are {state_dtype}", got=number)
    return number


def softcap_of(value: Any, state_dtype: str) -> float | None:
    """Check ``softcap``."""
    if value is None:
        return None
    cap, most = _number("softcap", value, default=0.0), LARGEST[state_dtype]
    if cap <= 0:
        raise InputError.of("softcap", expected="a positive number or None", got=value)
    if not 1 / most <= cap <= most:
        raise InputError.of("softcap", expected=f"{1 / most:g} to {most:g}, as logits are {state_dtype}", got=value)
    return cap


def block_scale(name: str, scale: Any, shape: tuple[int, ...], state_dtype: str) -> tuple[Array | None, int]:
    """Give ``k_scale`` or ``v_scale`` as (B, Hkv, blocks), and the tokens that one block covers."""
    if scale is None:
        return None, 1
    array = cast(as_array(name, scale, FLOAT_DTYPES), state_dtype)
    batch, heads, tokens, _ = shape
    blocks = array.shape[-2] if array.ndim >= 2 else 1
    try:
        spread: Any = broadcast(array, (batch, heads, blocks, 1))
    except ValueError:
        expected = f"a shape that broadcasts to (batch, kv heads, token blocks, 1) = ({batch}, {heads}, blocks, 1)"
        raise InputError.of(name, expected=expected, got=array.shape) from None
    full = spread[..., 0] if isinstance(spread, np.ndarray) else spread.first_of_last
    return full, _block_tokens(name, tokens, blocks)


def _block_tokens(name: str, tokens: int, blocks: int) -> int:
    """Tokens in each of ``blocks`` equal blocks, the last of which may be shorter but not empty."""
    block = max(-(-tokens // max(blocks, 1)), 1)
    if tokens and -(-tokens // block) != blocks:
        expected = f"a number of equal token blocks (the last may be shorter) that cover {tokens} tokens"
        raise InputError.of(name, expected=expected, got=f"{blocks} blocks")
    return block


def _number(name: str, value: Any, *, default: float) -> float:
    if value is None:
        return default
    if not is_number(value):
        raise InputError.of(name, expected="a finite number", got=repr(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError.of(name, expected="a finite number", got=number)
    return number
