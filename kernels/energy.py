"""The energy whose gradient is attention, in NumPy, over blocks of keys.

F(zeta) = log sum exp(logit + zeta·v). Its memory beyond the inputs is one block's logits, whatever the number of
keys. Source: arXiv 2408.04093, the energy function of self-attention.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.spec import Args, Spec
from treeattn.kernels.plain import dequantised, logits
from treeattn.kernels.reference import row_length

__all__ = ["energy"]

Array: TypeAlias = npt.NDArray[np.floating]

BLOCK = 4096
"""Keys at a time."""


def energy(spec: Spec, args: Args, zeta: Array) -> Array:
    """Compute F(zeta), (B, Hq, Tq) in the state's dtype; ``zeta`` (B, Hq, Tq, Dv) is of that dtype."""
    m = np.full(spec.packed_shape[:3], -np.inf, spec.state_dtype)
    total = np.zeros_like(m)
    zeta = np.ascontiguousarray(zeta)  # products with a broadcast array may add in another order
    with np.errstate(all="ignore"):
        for b in range(spec.batch):
            length = row_length(args, b)
            for start in range(0, length, BLOCK):
                exponent = _exponents(spec, args, zeta[b], b, slice(start, min(start + BLOCK, length)))
                _add_block(exponent, m[b], total[b])
        found: Array = np.where(total == 0, -np.inf, m + np.log(total)).astype(spec.state_dtype)
    return found


def _exponents(spec: Spec, args: Args, zeta: Array, b: int, keys: slice) -> Array:
    """Logit + zeta·v, (Hq, Tq, n); -inf where the key is hidden, whatever its value holds."""
    logit = logits(spec, args, b, keys)
    v = dequantised(spec, args.v, args.v_scale, args.v_block, b, keys)
    source = zeta.reshape(spec.kv_heads, -1, spec.v_head_dim) @ v.swapaxes(1, 2)
    return np.where(logit == -np.inf, logit, logit + source.reshape(logit.shape))


def _add_block(exponent: Array, m: Array, total: Array) -> None:
    """Add one block to the running maxima and sums of a batch row, both (Hq, Tq)."""
    highest = np.maximum(m, exponent.max(axis=-1))
    base = np.where(highest == -np.inf, 0, highest)  # -inf minus -inf would be NaN
    total[...] = total * np.exp(m - base) + np.exp(exponent - base[..., None]).sum(axis=-1)
    m[...] = highest
