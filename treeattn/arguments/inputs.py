"""One call's arguments, validated once into a `treeattn.arguments.spec.Spec` and its ``Args``.

Everything behind this module trusts what it gets. Axes are always (batch, heads, tokens, width) from here on,
whatever the caller's layout; the transposed views are made here, without a copy.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import FLOAT_DTYPES, KV_DTYPES, as_array, cast, dtype_name, reinterpret, to_array
from treeattn.arguments.checks import check_flag
from treeattn.arguments.devices import always_on_device, broadcast, kind_of, on_device
from treeattn.arguments.factors import block_scale, dot_scale, softcap_of
from treeattn.arguments.positions import Consecutive, Positions, lengths, window_pair
from treeattn.arguments.spec import LAYOUTS, Args, KVView, Layout, Options, Spec
from treeattn.errors import InputError

__all__ = ["check_layout", "resolve", "to_bhtd"]

Array: TypeAlias = npt.NDArray[Any]
_PositionPair: TypeAlias = "tuple[Array, Array | Consecutive] | tuple[None, None]"


def resolve(q: Any, k: Any, v: Any, options: Options) -> tuple[Spec, Args]:
    """Validate one call.

    Raises
    ------
    InputError
        The first thing that is wrong, beginning with the argument's name.
    """
    key = _key(q, k, v, options)
    spec = None if key is None else _known.get(key)
    if spec is None:
        return _resolve(q, k, v, options, key)
    if options.kv_dtype is not None:
        k, v = reinterpret("k", k, options.kv_dtype), reinterpret("v", v, options.kv_dtype)
    if spec.layout != "bhtd":
        q, k, v = (to_bhtd(array, spec.layout) for array in (q, k, v))
    return spec, _args(q, k, v, options, spec.state_dtype, spec.positional)


KEPT_SPECS = 256
"""Specs of calls that are kept; each is what a loop repeats."""

_known: dict[tuple[Any, ...], Spec] = {}


def _key(q: Any, k: Any, v: Any, options: Options) -> tuple[Any, ...] | None:
    """Give all that decides a call's spec, and whether it is valid but for what `_args` checks; None if that is more.

    The number of keys is not in it: a cache grows. Types are compared first, since 1 and True are equal.
    """
    scale, mask, causal, window, softcap, _, _, kv_len, k_scale, v_scale, kv_dtype, layout = options
    if not (
        (type(q) is type(k) is type(v) is np.ndarray or all(map(always_on_device, (q, k, v))))
        and type(scale) in _NUMBER
        and type(softcap) in _NUMBER
        and type(layout) is str
    ):
        return None
    shape, v_shape = k.shape, v.shape
    tokens = -2 if layout == "bhtd" else -3
    if len(shape) != 4 or shape[:3] != v_shape[:3]:
        return None
    rest = shape[:tokens] + shape[tokens + 1 :]
    stored = (k.dtype, k.strides, v_shape[3:], v.dtype, v.strides)
    key = (type(q), q.shape, q.dtype, rest, *stored, scale, softcap, layout)
    if mask is window is kv_len is k_scale is v_scale is kv_dtype is None and causal is False:
        return key
    hiding = _hiding_key(mask, causal, window, kv_len)
    numbers = _stored_key(k_scale, v_scale, kv_dtype)
    return None if hiding is None or numbers is None else (key, hiding, numbers)


def _hiding_key(mask: Any, causal: Any, window: Any, kv_len: Any) -> tuple[Any, ...] | None:
    """Give what a spec has of the options that hide keys, likewise."""
    if (
        type(causal) is bool
        and (mask is None or type(mask) is np.ndarray)
        and (window is None or (type(window) is tuple and _SIDE.issuperset(map(type, window))))
        and (kv_len is None or type(kv_len) in _LENGTHS)
    ):
        return causal, None if mask is None else mask.dtype, window, kv_len is None
    return None


def _stored_key(k_scale: Any, v_scale: Any, kv_dtype: Any) -> tuple[Any, ...] | None:
    """Give what a spec has of the options about stored numbers, likewise."""
    known = kv_dtype is None or type(kv_dtype) is str
    if known and all(each is None or type(each) is np.ndarray for each in (k_scale, v_scale)):
        return k_scale is None, v_scale is None, kv_dtype
    return None


_NUMBER = {float, int, type(None)}
_SIDE = {int, type(None)}
_LENGTHS = {np.ndarray, list, int}


def _resolve(q: Any, k: Any, v: Any, options: Options, key: tuple[Any, ...] | None = None) -> tuple[Spec, Args]:
    """Validate a call from scratch, and keep what was found for others with its key."""
    layout, kind, given = check_layout(options.layout), kind_of(q), (q, k, v)
    q = to_bhtd(_four_axes("q", as_array("q", q, FLOAT_DTYPES), layout), layout)
    k = to_bhtd(_four_axes("k", _stored("k", k, options.kv_dtype), layout), layout)
    v = to_bhtd(_four_axes("v", _stored("v", v, options.kv_dtype), layout), layout)
    _check_shapes(q, k, v)
    _check_places(q, k, v)
    state_dtype = "float64" if "float64" in {dtype_name(a) for a in (q, k, v)} else "float32"
    causal, window = check_flag("causal", options.causal), window_pair(options.window)
    args = _args(q, k, v, options, state_dtype, causal or window is not None)
    mask, k_scale, v_scale = args.mask, args.k_scale, args.v_scale
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
        scale=dot_scale(options.scale, q.shape[3], state_dtype),
        softcap=softcap_of(options.softcap, state_dtype),
        causal=causal,
        window=window,
        mask=None if mask is None else "bool" if mask.dtype == bool else "float",
        ragged=args.kv_len is not None,
        layout=layout,
        kind=kind,
        on_device=on_device(q),
    )
    if key is not None and all(array.dtype.isnative for array in given):  # else it is copied, each time
        _keep(key, spec)
    return spec, args


def _keep(key: tuple[Any, ...], spec: Spec) -> None:
    if len(_known) >= KEPT_SPECS:
        _known.clear()
    _known[key] = spec


def _args(q: Array, k: Array, v: Array, options: Options, state_dtype: str, positional: bool) -> Args:
    """Check what may differ from one call with a spec to the next, beside the number of keys."""
    _, mask, _, _, _, q_pos, kv_pos, kv_len, k_scale, v_scale, _, _ = options
    if not positional and mask is q_pos is kv_pos is kv_len is k_scale is v_scale is None:
        return Args(q, k, v)
    lens = lengths(kv_len, q.shape[0], k.shape[2])
    at = _positions(options, positional, q, k, lens)
    seen = _mask(mask, (*q.shape[:3], k.shape[2]), state_dtype)
    k_factors, k_block = block_scale("k_scale", k_scale, k.shape, state_dtype)
    v_factors, v_block = block_scale("v_scale", v_scale, v.shape, state_dtype)
    args = Args(q, k, v, at[0], at[1], lens, seen, k_factors, v_factors, k_block, v_block)
    _check_small_places(args)
    return args


def to_bhtd(array: Array, layout: Layout) -> Array:
    """View ``array`` as (batch, heads, tokens, width); the same call turns such a view back."""
    return array if layout == "bhtd" else array.swapaxes(1, 2)


def check_layout(layout: Any) -> Layout:
    """Give ``layout`` if it is one of `LAYOUTS`; an InputError otherwise."""
    for known in LAYOUTS:
        if isinstance(layout, str) and layout == known:
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
    if q_heads < 1:
        raise InputError.of("q", expected="at least one head", got=0)
    if width < 1:
        raise InputError.of("q", expected="a width of at least 1", got=0)
    _check_axis("k", "batch", k.shape[0], batch, "q's")
    _check_axis("k", "width", k.shape[3], width, "q's")
    if k.shape[1] < 1 or q_heads % k.shape[1]:
        raise InputError.of("k", expected=f"a number of heads that divides q's {q_heads}", got=k.shape[1])
    _check_axis("v", "batch", v.shape[0], batch, "q's")
    _check_axis("v", "number of heads", v.shape[1], k.shape[1], "k's")
    _check_axis("v", "number of tokens", v.shape[2], k.shape[2], "k's")
    if v.shape[3] < 1:
        raise InputError.of("v", expected="a width of at least 1", got=0)


def _check_places(q: Array, k: Array, v: Array) -> None:
    """K and V must be where q is."""
    there = on_device(q)
    for name, array in (("k", k), ("v", v)):
        if on_device(array) != there:
            expected = "an array on a GPU, as q is" if there else "an array in host memory, as q is"
            raise InputError.of(name, expected=expected, got=type(array).__name__)


def _check_small_places(args: Args) -> None:
    """Refuse other arrays on a GPU where q is not on one; they may be on the host in any case."""
    if on_device(args.q):
        return
    for name in ("q_pos", "kv_pos", "kv_len", "mask", "k_scale", "v_scale"):
        array = getattr(args, name)
        if array is not None and on_device(array):
            raise InputError.of(name, expected="an array in host memory, as q is", got="one on a GPU")


def _check_axis(name: str, axis: str, got: int, expected: int, whose: str) -> None:
    if got != expected:
        raise InputError.of(name, expected=f"{whose} {axis} of {expected}", got=got)


def _positions(options: Options, used: bool, q: Array, k: Array, kv_len: Array | None) -> _PositionPair:
    """Give both arrays of positions, or neither where no option asks for them; what the caller passed is checked."""
    if not used and options.q_pos is None and options.kv_pos is None:
        return None, None
    batch, keys = q.shape[0], k.shape[2]
    q_pos, kv_pos = Positions(options.q_pos, options.kv_pos, batch, q.shape[2], keys).resolve(kv_len)
    if not used:
        return None, None
    return q_pos, kv_pos


def _mask(mask: Any, shape: tuple[int, ...], state_dtype: str) -> Array | None:
    if mask is None:
        return None
    array: Array = to_array("mask", mask)
    if array.dtype != bool:
        # Below float32's range means -inf, as it should.
        array = cast(as_array("mask", array, FLOAT_DTYPES, also="bool"), state_dtype)
    try:
        array = broadcast(array, shape)
    except ValueError:
        expected = f"a shape that broadcasts to (batch, q heads, q tokens, kv tokens) = {shape}"
        raise InputError.of("mask", expected=expected, got=array.shape) from None
    return array
