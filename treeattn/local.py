"""Attention over the keys of one process: validate, run a backend, finish. The thin layer under every entry point."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import FLOAT_DTYPES, as_array, cast, dtype_name, narrow_dtype, to_numpy
from treeattn.arguments.checks import check_flag
from treeattn.arguments.devices import fetch, give, kind_of, on_device
from treeattn.arguments.inputs import resolve, to_bhtd
from treeattn.arguments.spec import Args, Options, Spec
from treeattn.arguments.state_arguments import sink_logits
from treeattn.backends.base import Attend, Backend, Prepared
from treeattn.backends.registry import DEFAULT, find, following, load
from treeattn.errors import InputError
from treeattn.state import PartialState, buffer_for, made_of

__all__ = ["attention", "compute_state", "deliver", "energy", "partial_attention", "run_backend"]

Array: TypeAlias = npt.NDArray[Any]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    kv_len: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: Any = None,
    layout: str = "bhtd",
    backend: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Exact attention of ``q`` over ``k`` and ``v``, all held by this process.

    A logit is ``scale * q.k``, then soft-capped, then the float mask is added; then keys are hidden. A key is seen
    only if the bool mask, ``causal``, ``window`` and ``kv_len`` all let it. Hidden keys contribute nothing,
    whatever they hold; a seen NaN gives NaN.

    Parameters
    ----------
    q : array (B, Hq, Tq, D) of float32, float64, float16 or bfloat16
        Queries. Any strides, read-only too; the same holds for ``k`` and ``v``, and nothing is copied.
    k : array (B, Hkv, Tk, D) of those types, float8_e4m3fn, float8_e5m2 or int8
        Keys; Hkv divides Hq, and each of its heads serves Hq / Hkv query heads in a row.
    v : array (B, Hkv, Tk, Dv), of a type that ``k`` may have
        Values; Dv may differ from D.
    scale : float, optional
        Factor of the dot products, ``D**-0.5`` by default; at most 1e36 in magnitude, 1e300 where states are float64.
    mask : array that broadcasts to (B, Hq, Tq, Tk), in either layout
        Bool, True where a key is seen; or float, added to the logits.
    causal : bool
        A key at position p is seen by a query at t only if p <= t.
    window : (left, right), optional
        A key at p is seen by a query at t only if t - left <= p <= t + right; None is no limit.
    softcap : float, optional
        Replaces a logit by ``softcap * tanh(logit / softcap)``; from 1e-36 to 1e36, likewise.
    sink : array (Hq,), optional
        An extra raw logit per query head, with no value behind it: -inf changes nothing, +inf takes all the weight.
    q_pos : integer array (Tq,) or (B, Tq), optional
        Positions of the queries. By default the last one stands on its row's last real key and the others
        consecutively before it.
    kv_pos : int or integer array (Tk,) or (B, Tk), optional
        Positions of the keys, or of the first of a contiguous run; 0 by default. Positions may be negative.
    kv_len : integer array (B,), optional
        How many keys of each row are real. Those behind are never read.
    k_scale, v_scale : array that broadcasts to (B, Hkv, token blocks, 1), optional
        Factors of the stored keys and values, one per block of consecutive tokens. Where a key is seen whose factor is
        not finite, the result is NaN. Factors of values are 0 or, where states are float32, from 1e-30 to 1e30 in
        magnitude: smaller ones lose bits, larger ones may overflow. What they are is not looked at beforehand.
    kv_dtype : str or dtype, optional
        What ``k`` and ``v`` hold, where they come as raw uint8 or uint16.
    layout : "bhtd" or "bthd"
        Order of the axes of q, k, v and ``out``: (batch, heads, tokens, width) or (batch, tokens, heads, width).
    backend : str or Backend, optional
        What computes it; by default the CPU, or the card on which q, k and v are.
    return_lse : bool
        Whether ``lse`` is wanted too.
    out : array in host memory, optional
        Where the output is written: of q's dtype and of the shape that the output has in ``layout``.

    Returns
    -------
    out : array (B, Hq, Tq, Dv) of q's dtype, in q's layout
        A row that sees no key is 0. It is of q's kind, as ``lse`` is: NumPy's, CuPy's, a torch tensor, a JAX array or a
        numba device array, and where q is.
    lse : array (B, Hq, Tq) of float64 if any of q, k, v is, else float32
        Only with ``return_lse``: natural log of the sum of exp of the logits, the sink's included. A row that
        sees no key has -inf, or its sink.

    Raises
    ------
    InputError
        An argument is wrong; the message begins with its name.
    BackendError
        The backend can't run this call.

    Notes
    -----
    Source: arXiv 2408.04093, whose sums (numerator, denominator and maximum) are kept as they are there.

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 8, 1, 64), dtype=np.float32)
    >>> k, v = (rng.standard_normal((1, 2, 100, 64), dtype=np.float32) for _ in "kv")
    >>> out, lse = treeattn.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 8, 1, 64), (1, 8, 1))
    """
    options = Options(scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout)
    spec, args = resolve(q, k, v, options)
    return_lse = check_flag("return_lse", return_lse)
    _check_out(out, spec)
    sink = sink_logits(sink, spec.q_heads, spec.state_dtype, spec.on_device)
    result, lse = _attend_of(spec, backend)(args, sink, return_lse)
    return _hand_over(result, lse, spec, return_lse, out)


def partial_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    kv_len: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: Any = None,
    layout: str = "bhtd",
    backend: Any = None,
    out: PartialState | None = None,
) -> PartialState:
    """Attention over some of the keys, as a state that merges with those of the other keys.

    Parameters
    ----------
    q : array (B, Hq, Tq, D)
        Queries.
    k, v : array (B, Hkv, Tk, D) and (B, Hkv, Tk, Dv)
        The keys and values that are here; Tk may be 0.
    scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout, backend
        As in `attention`. ``mask`` and ``kv_len`` are about the keys that are here; where ``causal`` or ``window``
        is asked, give ``q_pos`` and ``kv_pos`` in the whole sequence.
    out : PartialState, optional
        A state of the same shape, dtype and backend whose buffer is overwritten, and which is returned.

    Returns
    -------
    PartialState
        (o, l, m) of shapes (B, Hq, Tq, Dv), (B, Hq, Tq) and (B, Hq, Tq) whatever the layout; float64 if any of
        q, k, v is, else float32. It is where q is, and finishes to arrays of q's kind.

    Raises
    ------
    InputError
        An argument is wrong; the message begins with its name.
    BackendError
        The backend can't run this call.

    Notes
    -----
    Source: arXiv 2408.04093, tree decoding: what each device does with its chunk before the reduction.

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
    >>> shards = [treeattn.partial_attention(q, k[:, :, at], v[:, :, at]) for at in (slice(0, 1), slice(1, 6))]
    >>> np.allclose(treeattn.merge(shards).finish(), treeattn.attention(q, k, v))
    True
    """
    options = Options(scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout)
    _, state = compute_state(q, k, v, options, backend, out)
    return state


def energy(
    q: Any,
    k: Any,
    v: Any,
    zeta: Any,
    *,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    kv_len: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: Any = None,
    layout: str = "bhtd",
    backend: Any = None,
) -> Any:
    """Energy whose gradient is attention: F(zeta) = log sum exp(logit + zeta.v) over the keys.

    The logit is that of `attention`, ``scale * q.k`` where no other option is given. The derivative of F in
    ``zeta`` at ``zeta = 0`` is ``attention(q, k, v)``, and F(0) is its lse.

    Parameters
    ----------
    q : array (B, Hq, Tq, D)
        Queries.
    k, v : array (B, Hkv, Tk, D) and (B, Hkv, Tk, Dv)
        Keys and values.
    zeta : float array that broadcasts to (B, Hq, Tq, Dv), in either layout
        The source term.
    scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout, backend
        As in `attention`.

    Returns
    -------
    array (B, Hq, Tq) of float64 if any of q, k, v is, else float32
        A row that sees no key has -inf. It is of q's kind.

    Raises
    ------
    InputError
        An argument is wrong; the message begins with its name.
    BackendError
        The backend can't run this call.

    Notes
    -----
    Source: arXiv 2408.04093, which derives self-attention as the gradient of this energy function.

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, n, 4)) for n in (1, 6, 6))
    >>> step = np.array([1e-5, 0, 0, 0])
    >>> slope = (treeattn.energy(q, k, v, step) - treeattn.energy(q, k, v, -step)) / 2e-5
    >>> np.allclose(slope, treeattn.attention(q, k, v)[..., 0])
    True
    """
    options = Options(scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout)
    spec, args = resolve(q, k, v, options)
    return give(find(backend, spec).energy(spec, args, _zeta(zeta, spec)), spec.kind)


def compute_state(
    q: Any, k: Any, v: Any, options: Options, backend: Any = None, out: PartialState | None = None
) -> tuple[Spec, PartialState]:
    """Validate a call and compute the state of its keys, into the buffer of ``out`` where one is given."""
    spec, args = resolve(q, k, v, options)
    return spec, run_backend(spec, args, backend, out)


def deliver(state: PartialState, spec: Spec, sink: Any = None, return_lse: bool = False, out: Any = None) -> Any:
    """Finish the state of all keys and hand over what the caller asked for, in his dtype, layout and kind."""
    return _hand_over(*state.ops.finish(state._packed, sink), spec, return_lse, out)


def _hand_over(result: Any, lse: Any, spec: Spec, return_lse: bool, out: Any) -> Any:
    if not spec.on_device:  # states that a GPU has computed from arrays of the host
        result, lse = fetch(result), lse if lse is None else fetch(lse)
    result = to_bhtd(result, spec.layout)
    if out is None:
        if spec.q_dtype != spec.state_dtype and dtype_name(result) != spec.q_dtype:
            result = cast(result, narrow_dtype(spec.q_dtype))
        if spec.layout != "bhtd" and isinstance(result, np.ndarray):
            result = np.ascontiguousarray(result)
        out = give(result, spec.kind)
    else:
        room = _writable(out)
        room[...] = cast(result, room.dtype)
    return (out, give(lse, spec.kind)) if return_lse else out


def backend_of(spec: Spec, backend: Any) -> Backend:
    """Give the backend that was asked for, or the one that follows the arrays."""
    if backend is None and not spec.on_device:
        return load(DEFAULT)  # which can always run; what it can't do with this call, `_prepared` finds out
    return find(following(spec) if backend is None else backend)


def run_backend(spec: Spec, args: Args, backend: Any, out: PartialState | None = None) -> PartialState:
    """Compute the state of a validated call's keys."""
    found = backend_of(spec, backend)
    packed = buffer_for(out, spec.packed_shape, spec.state_dtype, found.ops)
    _prepared(found, spec)(args, packed)
    return made_of(packed, found.ops, spec.kind) if out is None else out


@lru_cache(maxsize=256)
def _prepared(backend: Backend, spec: Spec) -> Prepared:
    """Choose a call's kernels once: the steps of a decode differ only in their arrays."""
    return find(backend, spec).prepare(spec)


def _attend_of(spec: Spec, backend: Any) -> Attend:
    """Give what `_attending` does, at once where it is the same as the last time: the layers of a model are alike."""
    global _last
    if backend is not None:
        return _attending(backend_of(spec, backend), spec)
    found = _last
    if found is None or found[0] is not spec:
        found = _last = spec, _attending(backend_of(spec, None), spec)
    return found[1]


_last: tuple[Spec, Attend] | None = None


@lru_cache(maxsize=256)
def _attending(backend: Backend, spec: Spec) -> Attend:
    """As `_prepared`, for calls whose keys are all there are."""
    return find(backend, spec).prepare_attention(spec)


def _writable(out: Any) -> Array:
    """View ``out`` as NumPy does."""
    if isinstance(out, np.ndarray):
        return out
    if kind_of(out) == "numpy" or on_device(out):
        expected = "a NumPy array or a torch tensor, in host memory"
        raise InputError.of("out", expected=expected, got=type(out).__name__)
    return to_numpy("out", out)


def _check_out(out: Any, spec: Spec) -> None:
    if out is None:
        return
    room = _writable(out)
    shape = (spec.batch, spec.q_heads, spec.q_tokens, spec.v_head_dim)
    if room.ndim != 4 or to_bhtd(room, spec.layout).shape != shape:
        expected = shape if spec.layout == "bhtd" else (shape[0], shape[2], shape[1], shape[3])
        raise InputError.of("out", expected=f"shape {expected}, the output's", got=f"shape {room.shape}")
    if room.dtype.name != spec.q_dtype:
        raise InputError.of("out", expected=f"q's dtype {spec.q_dtype}", got=room.dtype)
    if not room.flags.writeable:
        raise InputError.of("out", expected="an array to write to", got="a read-only one")


def _zeta(zeta: Any, spec: Spec) -> Array:
    array = as_array("zeta", zeta, FLOAT_DTYPES)
    if on_device(array) and not spec.on_device:
        raise InputError.of("zeta", expected="an array in host memory, as q is", got="one on a GPU")
    array = cast(array, spec.state_dtype)
    shape = (spec.batch, spec.q_heads, spec.q_tokens, spec.v_head_dim)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        expected = f"a shape that broadcasts to (batch, q heads, q tokens, width of v) = {shape}"
        raise InputError.of("zeta", expected=expected, got=array.shape) from None
