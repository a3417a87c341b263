"""What the answer is, in float64, and how far from it another answer may be.

The tolerance is not a guess: it is twice the error that plain NumPy makes on the same inputs in the same precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import narrow_dtype, to_numpy
from treeattn.arguments.devices import fetch, on_device
from treeattn.arguments.inputs import resolve, to_bhtd
from treeattn.arguments.spec import Args, Options, Spec
from treeattn.kernels import plain, reference

__all__ = ["Answer", "assert_attention", "assert_close", "dense", "on_host", "tolerance"]

Array: TypeAlias = npt.NDArray[Any]

ORDERS = 4
"""Plain NumPy is run with the width in this many orders: one run's error may be small by luck."""

FLOOR = 4
"""No tolerance is below this many units in the last place of the largest output."""


class Answer(NamedTuple):
    """What attention gives, or the largest error that it may have."""

    out: Any
    lse: Any


def dense(q: Any, k: Any, v: Any, *, sink: Any = None, **options: Any) -> Answer:
    """Attention in float64, from the definition.

    Parameters
    ----------
    q, k, v, sink, **options
        As in `treeattn.attention`.

    Returns
    -------
    Answer
        ``out``, float64, in the caller's layout, and ``lse`` (B, Hq, Tq).

    Examples
    --------
    >>> import numpy as np
    >>> from treeattn.testing.oracle import dense
    >>> dense(np.ones((1, 1, 1, 2)), np.ones((1, 1, 3, 2)), np.full((1, 1, 3, 1), 5.0)).out.item()
    5.0
    """
    spec, args = resolve(q, k, v, Options(**options))
    return _finished(reference.partial(spec, args), spec, sink)


def tolerance(q: Any, k: Any, v: Any, *, sink: Any = None, **options: Any) -> Answer:
    """Largest errors that ``out`` and ``lse`` may have: twice those of plain NumPy, or a few units in the last place.

    Keys and values that are not finite are taken as 0 here: a yardstick has to be a number.
    """
    spec, args = resolve(q, k, v, Options(**options))
    args = args._replace(q=_finite(args.q), k=_finite(args.k), v=_finite(args.v))
    right = _finished(reference.partial(spec, args), spec, sink)
    out, lse = _floor(right, spec, args)
    for seed in range(ORDERS):
        rounded = _finished(plain.partial(spec, _reordered(args, seed)), spec, sink)
        out = max(out, 2 * _largest_error(rounded.out.astype(narrow_dtype(spec.q_dtype)), right.out))
        lse = max(lse, 2 * _largest_error(rounded.lse, right.lse))
    return Answer(out, lse)


def assert_close(got: Any, right: Any, limit: float, what: str = "out") -> None:
    """Assert equal shapes, NaNs and infinities, and that no number is further than ``limit`` from the right one."""
    got, right = on_host(got).astype(np.float64), np.asarray(right)
    assert got.shape == right.shape, f"{what}: shape {got.shape} instead of {right.shape}"
    for kind in (np.isnan, np.isposinf, np.isneginf):
        wrong = np.argwhere(kind(got) != kind(right))
        assert not len(wrong), f"{what}{wrong[0].tolist()}: {got[tuple(wrong[0])]} instead of {right[tuple(wrong[0])]}"
    error = np.where(np.isfinite(right), np.abs(_finite(got) - _finite(right)), 0)
    if error.size and error.max() > limit:
        at = np.unravel_index(np.argmax(error), error.shape)
        raise AssertionError(
            f"{what}{[int(i) for i in at]}: {got[at]} instead of {right[at]}, off by {error[at]:.3g} > {limit:.3g}"
        )


def on_host(array: Any) -> Array:
    """Give what a backend computed as a NumPy array, copied from its card where it is on one."""
    found: Array = fetch(array) if on_device(array) else to_numpy("array", array)
    return found


def assert_attention(got: Any, q: Any, k: Any, v: Any, *, sink: Any = None, **options: Any) -> None:
    """Assert that ``got``, a pair (out, lse), is attention of these inputs to within `tolerance`."""
    out, lse = got
    right, limit = dense(q, k, v, sink=sink, **options), tolerance(q, k, v, sink=sink, **options)
    assert_close(out, right.out, limit.out, "out")
    assert_close(lse, right.lse, limit.lse, "lse")


def _finished(packed: Array, spec: Spec, sink: Any) -> Answer:
    out, lse = reference.finish(packed, None if sink is None else np.asarray(sink, packed.dtype))
    return Answer(to_bhtd(out, spec.layout), lse)


def _finite(array: Array) -> Array:
    return array if array.dtype.kind == "i" else np.where(np.isfinite(array), array, array.dtype.type(0))


def _reordered(args: Args, seed: int) -> Args:
    order = np.random.default_rng(seed).permutation(args.q.shape[-1])
    return args._replace(q=args.q[..., order], k=args.k[..., order])


def _floor(right: Answer, spec: Spec, args: Args) -> tuple[float, float]:
    epsilon = float(np.finfo(spec.state_dtype).eps)
    size = float(np.max(np.abs(_finite(right.lse)), initial=0))
    # Rounding in a logit, and in the terms of its dot product, changes its weight, relatively, by as much; m and
    # log l may cancel in lse. No kernel can do better than a few of those units.
    k_scale = 1.0 if args.k_scale is None else float(np.max(np.abs(args.k_scale), initial=0))
    logit = max(FLOOR, size, _longest(args.q) * _longest(args.k) * k_scale * abs(spec.scale) / 2)
    out = _units(right.out, spec.q_dtype) + _units(right.out, spec.state_dtype) * logit / FLOOR
    return out, epsilon * max(logit, FLOOR * size)


def _longest(rows: Array) -> float:
    return float(np.max(np.linalg.norm(rows.astype(np.float64), axis=-1), initial=0))


def _units(array: Array, dtype: str) -> float:
    """Give ``FLOOR`` units in the last place of the largest finite number in ``array``."""
    epsilon = 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps)
    return FLOOR * epsilon * float(np.max(np.abs(_finite(array)), initial=0))


def _largest_error(got: Array, right: Array) -> float:
    return float(np.max(np.abs(_finite(got.astype(np.float64)) - _finite(right)), initial=0))
