"""The oracle: attention in float64, one query at a time, as the definition says. Slow on purpose.

Every other kernel is held to it. The rules are those of ``docs/options.md``: logit = scale · q·k, then softcap, then
the float mask, then hide. A hidden key takes no part, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.positions import Consecutive
from treeattn.arguments.spec import Args, Spec

__all__ = ["dequantised", "finish", "logits", "only_finite", "partial", "row_length", "seen_keys"]

Array: TypeAlias = npt.NDArray[Any]


def partial(spec: Spec, args: Args) -> Array:
    """Compute the packed state (B, Hq, Tq, Dv + 2) of this call's keys, in float64."""
    packed = np.zeros(spec.packed_shape)
    packed[..., -1] = -np.inf
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(spec.batch, spec.kv_heads):
            k = dequantised(args.k, only_finite(args.k_scale), args.k_block, b, h, row_length(args, b))
            v = dequantised(args.v, args.v_scale, args.v_block, b, h, row_length(args, b))
            for head, t in _queries(spec, h):
                packed[b, head, t] = _one_query(spec, args, k, v, (b, head, t))
    return packed


def finish(packed: Array, sink: Array | None) -> tuple[Array, Array]:
    """Give (out, lse) of the packed states of all keys, in their own precision; ``sink`` (Hq,) or None."""
    o, l, m = packed[..., :-2], packed[..., -2], packed[..., -1]  # noqa: E741 - the field's names
    with np.errstate(all="ignore"):
        empty = l == 0
        out, lse = o / l[..., None], m + np.log(l)
        if sink is not None:
            extra = np.broadcast_to(sink[:, None], m.shape)
            lse = np.where(empty, extra, np.logaddexp(lse, extra))
            out = out * np.exp(m + np.log(l) - lse)[..., None]
    return np.where(empty[..., None], 0, out).astype(packed.dtype), np.where(empty & (sink is None), -np.inf, lse)


def row_length(args: Args, b: int) -> int:
    """Keys of batch row ``b`` that may be read."""
    return args.kv_tokens if args.kv_len is None else int(args.kv_len[b])


def dequantised(stored: Array, scale: Array | None, block: int, b: int, h: int, length: int) -> Array:
    """Give the first ``length`` keys or values of one head, in float64."""
    values: Array = stored[b, h, :length].astype(np.float64)
    if scale is not None:
        values *= np.repeat(scale[b, h].astype(np.float64), block)[:length, None]
    return values


def only_finite(scale: Array | None) -> Array | None:
    """Give scales of keys with NaN for infinities, of which no dot product could say what they make of it."""
    return None if scale is None else np.where(np.isfinite(scale), scale, np.nan)


def logits(spec: Spec, args: Args, k: Array, row: tuple[int, int, int]) -> Array:
    """Logits of one query against the keys ``k`` (n, D), before anything is hidden."""
    b, head, t = row
    logit: Array = spec.scale * (k @ args.q[b, head, t].astype(k.dtype))
    if spec.softcap is not None:
        logit = spec.softcap * np.tanh(logit / spec.softcap)
    if spec.mask == "float" and args.mask is not None:
        logit = logit + args.mask[b, head, t, : len(k)]
    return logit


def seen_keys(spec: Spec, args: Args, row: tuple[int, int, int], keys: slice) -> Array:
    """Which of ``keys``, none behind ``kv_len``, the query sees; bool."""
    b, head, t = row
    seen = np.ones(keys.stop - keys.start, dtype=bool)
    if args.mask is not None:
        mask = args.mask[b, head, t, keys]
        seen &= mask if mask.dtype == bool else mask != -np.inf
    if args.q_pos is not None and args.kv_pos is not None:
        key = args.kv_pos.of(keys) if isinstance(args.kv_pos, Consecutive) else args.kv_pos[b, keys]
        query = int(args.q_pos[b, t])
        left, right = spec.window or (None, None)
        if spec.causal:
            seen &= key <= query
        if left is not None:
            seen &= key >= query - left
        if right is not None:
            seen &= key <= query + right
    return seen


def _queries(spec: Spec, kv_head: int) -> Iterator[tuple[int, int]]:
    """Query heads and tokens that one KV head serves."""
    for g in range(spec.group):
        for t in range(spec.q_tokens):
            yield kv_head * spec.group + g, t


def _one_query(spec: Spec, args: Args, k: Array, v: Array, row: tuple[int, int, int]) -> Array:
    seen = seen_keys(spec, args, row, slice(0, len(k)))
    logit = logits(spec, args, k, row)[seen]
    # A logit of -inf weighs exactly nothing, however it came about.
    counted = logit != -np.inf
    logit, v = logit[counted], v[seen][counted]
    if not len(logit):
        return np.concatenate([np.zeros(spec.v_head_dim), [0.0, -np.inf]])
    m = logit.max()
    p = np.exp(logit - m)
    return np.concatenate([p @ v, [p.sum(), m]])
