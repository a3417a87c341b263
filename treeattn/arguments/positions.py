"""Where queries and keys stand in the sequence: positions, windows and row lengths, validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import to_numpy
from treeattn.arguments.devices import broadcast, on_device, take
from treeattn.errors import InputError

__all__ = ["POSITION_LIMIT", "Consecutive", "Positions", "lengths", "window_pair"]

Array: TypeAlias = npt.NDArray[Any]

POSITION_LIMIT = 2**61
"""Positions stay within ±this. No distance then exceeds twice it, where window sides are cut off, and no sum of a
position and a side overflows int64."""

FEW = 64
"""Batch rows whose lengths Python compares faster than NumPy does."""


def window_pair(window: Any) -> tuple[int | None, int | None] | None:
    """Check ``window=(left, right)``."""
    if window is None:
        return None
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise InputError.of("window", expected="a pair (left, right)", got=repr(window))
    left, right = (_window_side(side, window) for side in window)
    return left, right


def _window_side(side: Any, window: Any) -> int | None:
    if side is None:
        return None
    if not _integer(side):
        raise InputError.of("window", expected="(left, right), each an integer or None", got=repr(window))
    if side < 0:
        hint = "write None for a side without a limit"
        raise InputError.of("window", expected="(left, right), none negative", got=repr(window), hint=hint)
    return min(int(side), 2 * POSITION_LIMIT)


def lengths(kv_len: Any, batch: int, tokens: int) -> Array | None:
    """Give ``kv_len`` as (B,) int64; one number stands for every row."""
    if kv_len is None:
        return None
    if type(kv_len) is np.ndarray and kv_len.dtype == np.int64 and kv_len.shape == (batch,) and batch <= FEW:
        if all(0 <= length <= tokens for length in kv_len.tolist()):  # without NumPy's slower words for it
            return np.ascontiguousarray(kv_len)
    elif on_device(kv_len):
        return _device_lengths(take("kv_len", kv_len), batch)
    array = _integers("kv_len", kv_len, what="integers, the keys of each row")
    if array.shape not in ((), (batch,)):
        raise InputError.of("kv_len", expected=f"shape ({batch},), one length per row", got=f"shape {array.shape}")
    _check_range("kv_len", array, 0, tokens, what=f"lengths from 0 to {tokens}, this call's keys")
    return np.ascontiguousarray(np.broadcast_to(array, (batch,)), dtype=np.int64)


def _device_lengths(array: Array, batch: int) -> Array:
    """Lengths on a GPU are never read here, so that a captured graph may outlive them: kernels clamp them."""
    if array.shape != (batch,) or array.dtype != np.int64:
        got = f"{array.dtype} of shape {array.shape}"
        raise InputError.of("kv_len", expected=f"int64 of shape ({batch},), where it is on a GPU", got=got)
    return array


@dataclass(frozen=True, slots=True)
class Consecutive:
    """Keys at ``start``, ``start`` + 1 and so on, the same in every row: positions that need no array."""

    start: int

    def array(self, batch: int, tokens: int) -> Array:
        """Give them as (B, Tk) int64, which takes memory."""
        return _for_all(self.of(slice(0, tokens)), batch)

    def of(self, keys: slice) -> Array:
        """Give those of some keys of a row."""
        return np.arange(self.start + keys.start, self.start + keys.stop, dtype=np.int64)

    def first(self, batch: int) -> Array:
        """Give that of the first key as (B, 1) int64."""
        return _for_all(np.array([self.start], np.int64), batch)


@dataclass(frozen=True, slots=True)
class Positions:
    """The two position arguments, and what they mean where the caller left one out.

    Those on a GPU are never read here, so that a captured graph may outlive them.
    """

    q_pos: Any
    kv_pos: Any
    batch: int
    q_tokens: int
    kv_tokens: int

    def resolve(self, kv_len: Array | None) -> tuple[Array, Array | Consecutive]:
        """Give (B, Tq) and (B, Tk) int64 positions, those of the keys as `Consecutive` where they are."""
        if self.q_pos is self.kv_pos is kv_len is None and self.kv_tokens:
            last = np.arange(self.kv_tokens - self.q_tokens, self.kv_tokens, dtype=np.int64)
            return _for_all(last, self.batch), Consecutive(0)
        kv_pos = self._of_keys()
        if self.q_pos is not None:
            return self._array("q_pos", self.q_pos, self.q_tokens), kv_pos
        for name, needed in (("kv_len", kv_len), ("kv_pos", kv_pos)):
            if on_device(needed):
                raise InputError.of("q_pos", expected=f"positions, where {name} is on a GPU", got="None")
        return self._of_last_keys(kv_pos, kv_len), kv_pos

    def _of_keys(self) -> Array | Consecutive:
        if self.kv_pos is None:
            return Consecutive(0)
        if on_device(self.kv_pos):
            return self._array("kv_pos", self.kv_pos, self.kv_tokens)
        array = _integers("kv_pos", self.kv_pos, what="integer positions")
        if array.ndim:
            return self._array("kv_pos", array, self.kv_tokens)
        _check_positions("kv_pos", array)
        return Consecutive(int(array))

    def _of_last_keys(self, kv_pos: Array | Consecutive, kv_len: Array | None) -> Array:
        """Put the last query of each row on its last real key, and the others consecutively before it."""
        if self.kv_tokens == 0:
            return np.zeros((self.batch, self.q_tokens), dtype=np.int64)
        last = np.full(self.batch, self.kv_tokens, dtype=np.int64) if kv_len is None else kv_len
        at = np.maximum(last - 1, 0)
        ends = kv_pos.start + at if isinstance(kv_pos, Consecutive) else kv_pos[np.arange(self.batch), at]
        return np.ascontiguousarray(ends[:, None] + np.arange(1 - self.q_tokens, 1, dtype=np.int64))

    def _array(self, name: str, values: Any, tokens: int) -> Array:
        there = on_device(values)
        array = take(name, values) if there else _integers(name, values, what="integer positions")
        if array.shape not in ((tokens,), (self.batch, tokens)):
            expected = f"shape ({tokens},) or ({self.batch}, {tokens})"
            raise InputError.of(name, expected=expected, got=f"shape {array.shape}")
        if not there:
            _check_positions(name, array)
            return np.broadcast_to(array.astype(np.int64, copy=False), (self.batch, tokens))
        if array.dtype != np.int64:
            raise InputError.of(name, expected="int64, where it is on a GPU", got=array.dtype)
        spread: Array = broadcast(array, (self.batch, tokens))
        return spread


def _for_all(row: Array, batch: int) -> Array:
    """Give every batch row the same positions."""
    return row[None] if batch == 1 else np.broadcast_to(row, (batch, row.size))


def _integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _integers(name: str, values: Any, *, what: str) -> Array:
    array = to_numpy(name, values)
    if array.dtype.kind not in "iu" and array.size:
        raise InputError.of(name, expected=what, got=f"dtype {array.dtype}")
    return array


def _check_positions(name: str, array: Array) -> None:
    _check_range(name, array, -POSITION_LIMIT, POSITION_LIMIT, what="positions from -2**61 to 2**61")


def _check_range(name: str, array: Array, low: int, high: int, *, what: str) -> None:
    if array.size == 0:
        return
    least, most = int(array.min()), int(array.max())
    if least < low or most > high:
        raise InputError.of(name, expected=what, got=least if least < low else most)
