"""A decode step's local part as a CUDA or HIP graph: captured once, replayed as the cache grows.

The splits of a captured launch are those of the whole capacity; how much of it is filled, the kernel reads on the card,
in ``kv_len``. So the same graph serves every step, and a step costs one launch and no Python that looks at arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.arguments.devices import on_device
from treeattn.arguments.inputs import resolve
from treeattn.arguments.positions import Consecutive
from treeattn.arguments.spec import Options
from treeattn.backends.registry import find, following
from treeattn.errors import BackendError, InputError
from treeattn.state import PartialState

__all__ = ["CapturedPartial", "capture"]


class CapturedPartial:
    """A captured call of `treeattn.partial_attention`; calling it replays that call on the current stream.

    Attributes
    ----------
    state : PartialState
        Overwritten by each replay.
    """

    def __init__(self, state: PartialState, replay: Callable[[], None], kept: Any) -> None:
        self.state, self._replay, self._kept = state, replay, kept

    def __call__(self) -> PartialState:
        """Compute the state of what the captured arrays hold now."""
        self._replay()
        return self.state


def capture(q: Any, k: Any, v: Any, *, kv_len: Any, backend: Any = None, **options: Any) -> CapturedPartial:
    """Capture `treeattn.partial_attention` of these very arrays.

    Parameters
    ----------
    q : device array (B, Hq, Tq, D)
        Written anew before each replay.
    k, v : device array (B, Hkv, capacity, D) and (B, Hkv, capacity, Dv)
        The cache, filled as far as ``kv_len`` says.
    kv_len : device array (B,) of int64
        Keys that are there, changed before a replay; the host never reads it.
    backend : str or Backend, optional
        By default that of the card on which the arrays are.
    **options
        As in `treeattn.partial_attention`; arrays among them must be on the card, and are those of every replay.

    Returns
    -------
    CapturedPartial

    Raises
    ------
    InputError
        An argument is wrong, or not on the card.
    BackendError
        The backend has no graphs.

    Notes
    -----
    Not yet run on a card.

    Examples
    --------
    Where there is a card::

        lengths = cupy.zeros(1, "int64")
        step = capture(q, k_cache, v_cache, kv_len=lengths)
        for length in range(1, 100):
            ...  # write q and one more row of k_cache and v_cache
            lengths.fill(length)
            out = comm.allreduce(step()).finish()
    """
    spec, args = resolve(q, k, v, Options(kv_len=kv_len, **options))
    found: Any = find(following(spec) if backend is None else backend, spec)
    if not found.capabilities.graphs:
        raise BackendError(f"backend {found.name!r} has no graphs: call partial_attention in each step")
    for name in ("q", "k", "v", "kv_len", "mask", "q_pos", "kv_pos", "k_scale", "v_scale"):
        array = getattr(args, name)
        if array is not None and not isinstance(array, Consecutive) and not on_device(array):
            raise InputError.of(
                name, expected="an array on the card, where a graph finds it again", got="one on the host"
            )
    packed = found.ops.empty(spec.packed_shape, spec.state_dtype)
    prepared = found.prepare(spec)
    replay = found.runtime.capture(lambda: prepared(args, packed))
    return CapturedPartial(PartialState(packed, found.ops, spec.kind), replay, args)
