"""Attention as a careful NumPy user writes it, in the state's own precision: matmul, softmax, matmul.

Its error is the yardstick: other kernels may have at most twice as much. Values behind hidden keys must be finite
here, since a weight of 0 multiplies them.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.spec import Args, Spec
from treeattn.kernels.reference import only_finite, row_length, seen_keys

__all__ = ["dequantised", "logits", "partial"]

Array: TypeAlias = npt.NDArray[np.floating]


def partial(spec: Spec, args: Args) -> Array:
    """Compute the packed state (B, Hq, Tq, Dv + 2) of this call's keys, in the state's dtype."""
    packed = np.zeros(spec.packed_shape, spec.state_dtype)
    packed[..., -1] = -np.inf
    with np.errstate(all="ignore"):
        for b in range(spec.batch):
            if length := row_length(args, b):
                _fill_row(spec, args, b, slice(0, length), packed[b])
    return packed


def logits(spec: Spec, args: Args, b: int, keys: slice) -> Array:
    """Logits (Hq, Tq, n) of batch row ``b`` against ``keys``, none behind ``kv_len``; -inf where hidden."""
    k = dequantised(spec, args.k, only_finite(args.k_scale), args.k_block, b, keys)
    q = args.q[b].astype(spec.state_dtype).reshape(spec.kv_heads, -1, spec.head_dim)
    found = (q @ k.swapaxes(1, 2)).reshape(spec.q_heads, spec.q_tokens, k.shape[1]) * k.dtype.type(spec.scale)
    if spec.softcap is not None:
        cap = k.dtype.type(spec.softcap)
        found = cap * np.tanh(found / cap)
    if spec.mask == "float" and args.mask is not None:
        found = found + args.mask[b, :, :, keys]
    return _hide(spec, args, b, keys, found)


def dequantised(
    spec: Spec, stored: npt.NDArray[np.generic], scale: Array | None, block: int, b: int, keys: slice
) -> Array:
    """Keys or values (Hkv, n, width) of batch row ``b``, in the state's dtype."""
    values: Array = stored[b, :, keys].astype(spec.state_dtype)
    if scale is not None:
        values *= scale[b][:, np.arange(keys.start, keys.stop) // block, None]
    return values


def _hide(spec: Spec, args: Args, b: int, keys: slice, found: Array) -> Array:
    if args.mask is None and not spec.positional:
        return found
    seen = np.empty(found.shape, dtype=bool)
    for head, t in np.ndindex(spec.q_heads, spec.q_tokens):
        seen[head, t] = seen_keys(spec, args, (b, head, t), keys)
    return np.where(seen, found, -np.inf).astype(found.dtype)


def _fill_row(spec: Spec, args: Args, b: int, keys: slice, packed: Array) -> None:
    logit = logits(spec, args, b, keys)
    v = dequantised(spec, args.v, args.v_scale, args.v_block, b, keys)
    m = logit.max(axis=-1)
    p = np.exp(logit - np.where(m == -np.inf, 0, m)[..., None])
    packed[..., :-2] = (p.reshape(spec.kv_heads, -1, p.shape[-1]) @ v).reshape(*m.shape, spec.v_head_dim)
    packed[..., -2], packed[..., -1] = p.sum(axis=-1), m
