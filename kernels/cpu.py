"""The streaming kernel from Python: a Spec becomes a prepared call, and Args its addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arrays import cast, narrow_dtype
from treeattn.inputs import Args, Spec
from treeattn.kernels import products, softmax, streaming, visibility, widen
from treeattn.kernels.call import BLOCK, CALL, STORAGES, Call
from treeattn.kernels.combine import merge_at
from treeattn.kernels.threads import run_on_threads, thread_count

__all__ = ["address", "fill", "prepare"]

Array: TypeAlias = npt.NDArray[Any]

MOST_TOKENS, MOST_ROWS = 16, 256
"""Query tokens, and query rows, that share one pass over the keys."""

LEAST_SPLIT, MOST_SPLITS, ENOUGH_TASKS = 2048, 32, 256
"""Keys that are worth a task; parts that a head's keys are cut into at most, and none for more tasks than this.
They depend on shapes alone, so that the bits of the result don't depend on the threads."""

BYTES_PER_THREAD = 1 << 18
"""Waking another thread costs as much as reading about this much."""


def prepare(spec: Spec) -> Callable[[Args, Array], Array]:
    """Compile what ``spec`` needs and give ``run(args, out)``, which fills the packed state ``out``."""
    dtype = np.dtype(spec.state_dtype)
    stream, merge = _entries(dtype)
    fixed = _fixed(spec)
    tiles, rows = int(fixed["tiles"]), int(fixed["tile"]) * spec.group
    scratch = streaming.workspace_bytes(rows, spec.head_dim, spec.v_head_dim, dtype.itemsize)
    bytes_per_key = spec.batch * spec.kv_heads * tiles * (_row_bytes(spec, "k") + _row_bytes(spec, "v"))

    def run(args: Args, out: Array) -> Array:
        q = cast(args.q, dtype)
        split, splits = _splits(spec, tiles, args.kv_tokens)
        states = out if splits == 1 else np.empty((splits, *out.shape), out.dtype)
        call = fixed.copy()
        fill(call, args, q)
        call["split"], call["splits"] = split, splits
        call["states"], call["states_s"] = address(states), out.nbytes
        run_on_threads(lambda: stream(address(call), _scratch(scratch)), _threads(bytes_per_key * args.kv_tokens))
        if splits > 1:
            sources = np.arange(splits) * out.nbytes + address(states)
            merge(address(out), sources, out.size // out.shape[-1], out.shape[-1])
        return out

    return run


def address(array: Array | None) -> int:
    """Address of an array's first element, 0 for None."""
    return 0 if array is None else array.__array_interface__["data"][0]


def _entries(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Compiled stream and merge."""
    stream = streaming.stream_double if dtype.itemsize == 8 else streaming.stream_single
    return stream(), merge_at(dtype)


def _parts(spec: Spec) -> dict[str, int]:
    """Addresses of the compiled parts, of which only those that the call needs are compiled."""
    double = spec.state_dtype == "float64"
    parts = {
        "scores": products.scores_double if double else products.scores_single,
        "weigh": softmax.weigh_double if double else softmax.weigh_single,
        "values": products.values_double if double else products.values_single,
    }
    if spec.positional or spec.mask is not None:
        parts["see"] = visibility.see_double if double else visibility.see_single
    if _staged(spec, "k") or _staged(spec, "v"):
        parts["widen"] = widen.widen_double if double else widen.widen_single
    return {name: compiled() for name, compiled in parts.items()}


def _fixed(spec: Spec) -> Array:
    """Give the record with everything about the call that stays from step to step; the rest is 0."""
    tile = max(1, min(MOST_TOKENS, spec.q_tokens, MOST_ROWS // spec.group))
    left, right = spec.window or (None, None)
    call = np.zeros((), CALL)
    for name, value in {
        "scale": spec.scale,
        "softcap": spec.softcap or 0.0,
        "batch": spec.batch,
        "kv_heads": spec.kv_heads,
        "group": spec.group,
        "q_tokens": spec.q_tokens,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "tile": tile,
        "tiles": -(-spec.q_tokens // tile),
        "k_storage": STORAGES.index(spec.kv.k_dtype),
        "v_storage": STORAGES.index(spec.kv.v_dtype),
        "k_staged": _staged(spec, "k"),
        "v_staged": _staged(spec, "v"),
        "causal": spec.causal,
        "left": -1 if left is None else left,
        "right": -1 if right is None else right,
        "mask_additive": spec.mask == "float",
        **_parts(spec),
        "k_float8": address(_float8_values(spec.kv.k_dtype)),
        "v_float8": address(_float8_values(spec.kv.v_dtype)),
    }.items():
        call[name] = value
    return call


def _staged(spec: Spec, which: str) -> int:
    """Bytes per key of the working copy, or 0 where rows are contiguous and in working precision already."""
    storage, strides, width = _stored(spec, which)
    itemsize = np.dtype(spec.state_dtype).itemsize
    if storage == spec.state_dtype and strides[3] == itemsize:
        return 0
    return width * itemsize


@cache
def _float8_values(storage: str) -> Array | None:
    if not storage.startswith("float8"):
        return None
    return np.arange(256, dtype=np.uint8).view(narrow_dtype(storage)).astype(np.float32)


def _row_bytes(spec: Spec, which: str) -> int:
    storage, _, width = _stored(spec, which)
    return width * narrow_dtype(storage).itemsize


def _stored(spec: Spec, which: str) -> tuple[str, tuple[int, ...], int]:
    """Storage type, strides and width of K or V."""
    if which == "k":
        return spec.kv.k_dtype, spec.kv.k_strides, spec.head_dim
    return spec.kv.v_dtype, spec.kv.v_strides, spec.v_head_dim


def _splits(spec: Spec, tiles: int, kv_tokens: int) -> tuple[int, int]:
    """Give the keys per split, whole blocks of them, and the number of splits."""
    tasks = max(1, spec.batch * spec.kv_heads * tiles)
    wanted = min(MOST_SPLITS, -(-ENOUGH_TASKS // tasks), max(1, kv_tokens // LEAST_SPLIT))
    split = max(1, -(-kv_tokens // (wanted * BLOCK))) * BLOCK
    return split, max(1, -(-kv_tokens // split))


def fill(call: Array, args: Args, q: Array) -> None:
    """Write the addresses and strides of one step's arrays into its record."""
    call["kv_tokens"], call["k_block"], call["v_block"] = args.kv_tokens, args.k_block, args.v_block
    call["kv_len"] = address(args.kv_len)
    integers = call.reshape(1).view(np.int64)
    for array, first in zip(
        (q, args.k, args.v, args.k_scale, args.v_scale, args.q_pos, args.kv_pos, args.mask), _FIRST, strict=True
    ):
        if array is not None:
            integers[first : first + array.ndim + 1] = address(array), *array.strides


_FIRST = [
    list(Call.__annotations__).index(name) for name in ("q", "k", "v", "k_scale", "v_scale", "q_pos", "kv_pos", "mask")
]
"""Where each array's address is in the record; its strides follow."""


def _threads(total_bytes: int) -> int:
    return min(thread_count(), 1 + total_bytes // BYTES_PER_THREAD)


_memory = threading.local()


def _scratch(length: int) -> int:
    """Address of at least ``length`` bytes (and what alignment may skip) that belong to this thread."""
    memory: Array | None = getattr(_memory, "block", None)
    if memory is None or memory.nbytes < length + 64:
        memory = _memory.block = np.zeros(length + 64, np.uint8)
    return address(memory)
