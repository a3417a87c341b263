"""One call's arguments, validated once: a frozen ``Spec`` (what to compile for) and ``Args`` (what to run on).

Everything behind this module trusts what it gets. Axes are always (batch, heads, tokens, width) from here on,
whatever the caller's layout; the transposed views are made here, without a copy.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arrays import FLOAT_DTYPES, KV_DTYPES, as_array, dtype_name, reinterpret
from treeattn.errors import InputError

__all__ = ["LAYOUTS", "POSITION_LIMIT", "Args", "KVView", "Options", "Spec", "resolve", "to_bhtd"]

Array: TypeAlias = npt.NDArray[Any]
Layout: TypeAlias = Literal["bhtd", "bthd"]
LAYOUTS: tuple[Layout, ...] = ("bhtd", "bthd")

POSITION_LIMIT = 2**62
"""Positions and windows stay within ±this, so that their sums and differences can't overflow int64."""


@dataclass(frozen=True, slots=True)
class KVView:
    """How K and V lie in memory; all that a kernel may know about their storage.

    Parameters
    ----------
    k_dtype, v_dtype : str
        Storage types, one of ``treeattn.arrays.KV_DTYPES``.
    k_strides, v_strides : tuple of int
        Bytes from one element to the next along (batch, KV head, token, width).
    k_scaled, v_scaled : bool
        Whether a scale per block of tokens comes with the call.
    """

    k_dtype: str
    v_dtype: str
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    k_scaled: bool = False
    v_scaled: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything about a call that stays the same from one decode step to the next; hashable.

    The number of keys is not here: a cache grows, and a prepared call must survive that.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_tokens: int
    head_dim: int
    v_head_dim: int
    q_dtype: str
    state_dtype: str
    kv: KVView
    scale: float
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Literal["bool", "float"] | None = None
    ragged: bool = False
    layout: Layout = "bhtd"

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def positional(self) -> bool:
        """Whether a key's position decides who sees it."""
        return self.causal or self.window is not None

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        """Shape of the state's one buffer: (batch, q_heads, q_tokens, v_head_dim + 2)."""
        return self.batch, self.q_heads, self.q_tokens, self.v_head_dim + 2


@dataclass(frozen=True, slots=True)
class Args:
    """The arrays of one call, as (batch, heads, tokens, width) views.

    ``q_pos`` (B, Tq) and ``kv_pos`` (B, Tk) are int64 and set exactly when ``spec.positional``; ``kv_len`` (B,)
    int64 exactly when ``spec.ragged``; ``mask`` (B, Hq, Tq, Tk), bool or of the state's dtype, is a broadcast
    view. ``k_scale`` and ``v_scale`` (B, Hkv, blocks) are of the state's dtype; block ``i`` covers tokens
    ``i * k_block`` up to ``(i + 1) * k_block``.
    """

    q: Array
    k: Array
    v: Array
    q_pos: Array | None = None
    kv_pos: Array | None = None
    kv_len: Array | None = None
    mask: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    k_block: int = 1
    v_block: int = 1

    @property
    def kv_tokens(self) -> int:
        """Keys in this call, hidden ones too."""
        return int(self.k.shape[2])


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword options that ``attention``, ``partial_attention``, ``energy`` and ``decode`` share."""

    scale: float | None = None
    mask: Any = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    q_pos: Any = None
    kv_pos: Any = None
    kv_len: Any = None
    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: Any = None
    layout: str = "bhtd"


def resolve(q: Any, k: Any, v: Any, options: Options) -> tuple[Spec, Args]:
    """Validate one call.

    Raises
    ------
    InputError
        The first thing that is wrong, beginning with the argument's name.
    """
    layout = _layout(options.layout)
    q = to_bhtd(_four_axes("q", as_array("q", q, FLOAT_DTYPES), layout), layout)
    k = to_bhtd(_four_axes("k", _stored("k", k, options.kv_dtype), layout), layout)
    v = to_bhtd(_four_axes("v", _stored("v", v, options.kv_dtype), layout), layout)
    _check_shapes(q, k, v)
    state_dtype = "float64" if "float64" in {dtype_name(a) for a in (q, k, v)} else "float32"
    causal, window = _flag("causal", options.causal), _window(options.window)
    kv_len = _kv_len(options.kv_len, q.shape[0], k.shape[2])
    positions = _Positions(options.q_pos, options.kv_pos, q.shape[0], q.shape[2], k.shape[2])
    q_pos, kv_pos = positions.resolve(kv_len) if causal or window is not None else (None, None)
    mask = _mask(options.mask, (*q.shape[:3], k.shape[2]), state_dtype)
    k_scale, k_block = _block_scale("k_scale", options.k_scale, k.shape, state_dtype)
    v_scale, v_block = _block_scale("v_scale", options.v_scale, v.shape, state_dtype)
    spec = Spec(
        batch=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        q_tokens=q.shape[2],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        q_dtype=dtype_name(q),
        state_dtype=state_dtype,
        kv=KVView(dtype_name(k), dtype_name(v), k.strides, v.strides, k_scale is not None, v_scale is not None),
        scale=_number("scale", options.scale, default=q.shape[3] ** -0.5),
        softcap=_softcap(options.softcap),
        causal=causal,
        window=window,
        mask=None if mask is None else "bool" if mask.dtype == bool else "float",
        ragged=kv_len is not None,
        layout=layout,
    )
    args = Args(q, k, v, q_pos, kv_pos, kv_len, mask, k_scale, v_scale, k_block, v_block)
    return spec, args


def to_bhtd(array: Array, layout: Layout) -> Array:
    """View ``array`` as (batch, heads, tokens, width); the same call turns such a view back."""
    return array if layout == "bhtd" else array.swapaxes(1, 2)


def _layout(layout: str) -> Layout:
    for known in LAYOUTS:
        if layout == known:
            return known
    raise InputError.of("layout", expected=" or ".join(map(repr, LAYOUTS)), got=repr(layout))


def _stored(name: str, array: Any, kv_dtype: Any) -> Array:
    """K or V, with raw uint8 or uint16 storage read as ``kv_dtype`` says."""
    if kv_dtype is not None:
        array = reinterpret(name, array, kv_dtype)
    return as_array(name, array, KV_DTYPES)


def _four_axes(name: str, array: Array, layout: Layout) -> Array:
    if array.ndim == 4:
        return array
    axes = "(batch, heads, tokens, width)" if layout == "bhtd" else "(batch, tokens, heads, width)"
    raise InputError.of(name, expected=f"four axes {axes}", got=f"shape {array.shape}")


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    batch, q_heads, _, width = q.shape
    _check_axis("k", "batch", k.shape[0], batch, "q's")
    _check_axis("k", "width", k.shape[3], width, "q's")
    _check_axis("v", "batch", v.shape[0], batch, "q's")
    _check_axis("v", "number of heads", v.shape[1], k.shape[1], "k's")
    _check_axis("v", "number of tokens", v.shape[2], k.shape[2], "k's")
    if width < 1 or v.shape[3] < 1:
        name = "q" if width < 1 else "v"
        raise InputError.of(name, expected="a width of at least 1", got=0)
    if k.shape[1] < 1 or q_heads % k.shape[1]:
        expected = f"a number of heads that divides q's {q_heads}" if q_heads else "at least one head"
        raise InputError.of("k", expected=expected, got=k.shape[1])


def _check_axis(name: str, axis: str, got: int, expected: int, whose: str) -> None:
    if got != expected:
        raise InputError.of(name, expected=f"{whose} {axis} of {expected}", got=got)


def _number(name: str, value: Any, *, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise InputError.of(name, expected="a finite number", got=repr(value))
    if not math.isfinite(value):
        raise InputError.of(name, expected="a finite number", got=float(value))
    return float(value)


def _softcap(value: Any) -> float | None:
    if value is None:
        return None
    cap = _number("softcap", value, default=0.0)
    if cap <= 0:
        raise InputError.of("softcap", expected="a positive number or None", got=value)
    return cap


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise InputError.of(name, expected="True or False", got=repr(value))


def _integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _window(window: Any) -> tuple[int | None, int | None] | None:
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
    return min(int(side), POSITION_LIMIT)


def _integers(name: str, values: Any, *, what: str) -> Array:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise InputError.of(name, expected=what, got=f"dtype {array.dtype}")
    return array


def _kv_len(kv_len: Any, batch: int, tokens: int) -> Array | None:
    if kv_len is None:
        return None
    array = _integers("kv_len", kv_len, what="integers, the keys of each row")
    if array.shape not in ((), (batch,)):
        raise InputError.of("kv_len", expected=f"shape ({batch},), one length per row", got=f"shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() > tokens):
        worst = array.min() if array.min() < 0 else array.max()
        raise InputError.of("kv_len", expected=f"lengths from 0 to {tokens}, this call's keys", got=int(worst))
    return np.ascontiguousarray(np.broadcast_to(array, (batch,)), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Positions:
    """The two position arguments, and what they mean where the caller left one out."""

    q_pos: Any
    kv_pos: Any
    batch: int
    q_tokens: int
    kv_tokens: int

    def resolve(self, kv_len: Array | None) -> tuple[Array, Array]:
        """Give (B, Tq) and (B, Tk) int64 positions."""
        kv_pos = self._of_keys()
        if self.q_pos is None:
            return self._of_last_keys(kv_pos, kv_len), kv_pos
        return self._array("q_pos", self.q_pos, self.q_tokens), kv_pos

    def _of_keys(self) -> Array:
        start = 0 if self.kv_pos is None else self.kv_pos
        if np.ndim(start) != 0:
            return self._array("kv_pos", start, self.kv_tokens)
        if not _integer(start) and not (isinstance(start, np.ndarray) and start.dtype.kind in "iu"):
            raise InputError.of("kv_pos", expected="an integer or an array of integers", got=repr(start))
        self._check_range("kv_pos", int(start), int(start) + self.kv_tokens)
        row = np.arange(self.kv_tokens, dtype=np.int64) + int(start)
        return np.broadcast_to(row, (self.batch, self.kv_tokens))

    def _of_last_keys(self, kv_pos: Array, kv_len: Array | None) -> Array:
        """Queries end on the row's last real key and stand consecutively before it."""
        last = np.full(self.batch, self.kv_tokens, dtype=np.int64) if kv_len is None else kv_len
        if self.kv_tokens == 0:
            return np.zeros((self.batch, self.q_tokens), dtype=np.int64)
        ends = kv_pos[np.arange(self.batch), np.maximum(last - 1, 0)]
        return np.ascontiguousarray(ends[:, None] + np.arange(1 - self.q_tokens, 1, dtype=np.int64))

    def _array(self, name: str, values: Any, tokens: int) -> Array:
        array = _integers(name, values, what="integer positions")
        shapes = ((tokens,), (self.batch, tokens))
        if array.shape not in shapes:
            expected = f"shape ({tokens},) or ({self.batch}, {tokens})"
            raise InputError.of(name, expected=expected, got=f"shape {array.shape}")
        if array.size:
            self._check_range(name, int(array.min()), int(array.max()))
        return np.broadcast_to(array.astype(np.int64, copy=False), (self.batch, tokens))

    @staticmethod
    def _check_range(name: str, low: int, high: int) -> None:
        if low < -POSITION_LIMIT or high > POSITION_LIMIT:
            worst = low if low < -POSITION_LIMIT else high
            raise InputError.of(name, expected="positions between -2**62 and 2**62", got=worst)


def _mask(mask: Any, shape: tuple[int, ...], state_dtype: str) -> Array | None:
    if mask is None:
        return None
    array = np.asarray(mask)
    if array.dtype != bool:
        array = as_array("mask", array, FLOAT_DTYPES, also="bool")
        with np.errstate(over="ignore"):  # a float64 value below float32's range means -inf, as it should
            array = array.astype(state_dtype, copy=False)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        expected = f"a shape that broadcasts to (batch, q heads, q tokens, kv tokens) = {shape}"
        raise InputError.of("mask", expected=expected, got=array.shape) from None


def _block_scale(name: str, scale: Any, shape: tuple[int, ...], state_dtype: str) -> tuple[Array | None, int]:
    """Scales as (B, Hkv, blocks) and the tokens that one block covers."""
    if scale is None:
        return None, 1
    array = as_array(name, scale, FLOAT_DTYPES).astype(state_dtype, copy=False)
    batch, heads, tokens, _ = shape
    blocks = array.shape[2] if array.ndim == 4 else array.shape[-2] if array.ndim >= 2 else 1
    try:
        full = np.broadcast_to(array, (batch, heads, blocks, 1))[..., 0]
    except ValueError:
        expected = f"a shape that broadcasts to (batch, kv heads, token blocks, 1) = ({batch}, {heads}, blocks, 1)"
        raise InputError.of(name, expected=expected, got=array.shape) from None
    if blocks < 1 or blocks > max(tokens, 1):
        raise InputError.of(name, expected=f"1 to {tokens} token blocks", got=blocks)
    return full, max(-(-tokens // blocks), 1)
