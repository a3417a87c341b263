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
from treeattn.kernels import products, softmax, streaming, vector_products, visibility, widen
from treeattn.kernels.call import BLOCK, CALL, STORAGES, Call
from treeattn.kernels.combine import merge_at, merge_room
from treeattn.kernels.processors import thread_count
from treeattn.kernels.threads import run_on_threads

__all__ = ["StreamingCall", "address", "prepare"]

Array: TypeAlias = npt.NDArray[Any]

MOST_TOKENS, MOST_ROWS = 16, 256
"""Query tokens, and query rows, that share one pass over the keys."""

LEAST_SPLIT, MOST_SPLITS, ENOUGH_TASKS = 2048, 32, 256
"""Keys that are worth a task; parts that a head's keys are cut into at most, and none for more tasks than this.
They depend on shapes alone, so that the bits of the result don't depend on the threads."""

BYTES_PER_THREAD = 1 << 18
"""Waking another thread costs as much as reading about this much."""


def prepare(spec: Spec) -> StreamingCall:
    """Compile what ``spec`` needs, or load it, and give a function of a step's arguments."""
    return StreamingCall(spec)


class StreamingCall:
    """The streaming kernel for one spec: ``call(args, out)`` fills the packed state ``out`` (B, Hq, Tq, Dv + 2)."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._dtype = np.dtype(spec.state_dtype)
        self._stream = (streaming.stream_double if self._dtype.itemsize == 8 else streaming.stream_single)()
        self._merge = merge_at(self._dtype)
        self._tile = max(1, min(MOST_TOKENS, spec.q_tokens, MOST_ROWS // spec.group))
        self._tiles = -(-spec.q_tokens // self._tile)
        self._fields = self._fixed_fields()
        rows = self._tile * spec.group
        self._scratch = streaming.workspace_bytes(rows, spec.head_dim, spec.v_head_dim, self._dtype.itemsize)
        bytes_per_row = sum(width * narrow_dtype(storage).itemsize for storage, _, width in _stored(spec))
        self._bytes_per_key = spec.batch * spec.kv_heads * self._tiles * bytes_per_row

    def __call__(self, args: Args, out: Array) -> Array:
        """Compute one step; only the arrays and the number of keys may differ from the spec's."""
        split, splits = self._splits(args.kv_tokens)
        states = out if splits == 1 else np.empty((splits, *out.shape), self._dtype)
        q = cast(args.q, self._dtype)
        fields = self._fields.copy()
        _fill(fields, args, q)
        fields[SPLIT] = split, splits, address(states), out.nbytes
        threads = min(thread_count(), 1 + self._bytes_per_key * args.kv_tokens // BYTES_PER_THREAD)
        run_on_threads(lambda: self._stream(address(fields), _workspace(self._scratch)), threads)
        if splits > 1:
            sources = np.arange(splits) * out.nbytes + address(states)
            width = out.shape[-1]
            room = merge_room(splits, out.size // width, width)
            self._merge(address(out), sources, out.size // width, width, address(room))
        return out

    def _splits(self, kv_tokens: int) -> tuple[int, int]:
        """Give the keys per split, whole blocks of them, and the number of splits."""
        tasks = max(1, self._spec.batch * self._spec.kv_heads * self._tiles)
        wanted = min(MOST_SPLITS, -(-ENOUGH_TASKS // tasks), max(1, kv_tokens // LEAST_SPLIT))
        split = max(1, -(-kv_tokens // (wanted * BLOCK))) * BLOCK
        return split, max(1, -(-kv_tokens // split))

    def _fixed_fields(self) -> Array:
        """Give the record of everything that stays from step to step, as integers; the rest is 0."""
        spec, call = self._spec, np.zeros(1, CALL)
        left, right = spec.window or (None, None)
        (k_storage, _, _), (v_storage, _, _) = _stored(spec)
        for name, value in {
            "scale": spec.scale,
            "softcap": spec.softcap or 0.0,
            "batch": spec.batch,
            "kv_heads": spec.kv_heads,
            "group": spec.group,
            "q_tokens": spec.q_tokens,
            "head_dim": spec.head_dim,
            "v_head_dim": spec.v_head_dim,
            "tile": self._tile,
            "tiles": self._tiles,
            "k_storage": STORAGES.index(k_storage),
            "v_storage": STORAGES.index(v_storage),
            "causal": spec.causal,
            "left": -1 if left is None else left,
            "right": -1 if right is None else right,
            "mask_additive": spec.mask == "float",
            "k_float8": address(_float8_values(k_storage)),
            "v_float8": address(_float8_values(v_storage)),
            **_parts(spec),
        }.items():
            call[name] = value
        return call.view(np.int64)


def address(array: Array | None) -> int:
    """Address of an array's first element, 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])


def _parts(spec: Spec) -> dict[str, int]:
    """Addresses of the compiled parts, of which only those that the call needs are compiled."""
    double = spec.state_dtype == "float64"
    k_staged, v_staged = (_staged(spec, *stored) for stored in _stored(spec))
    parts = {
        "scores": _product(spec, vector_products.SCORES_OF, *_stored(spec)[0])
        or (products.scores_double if double else products.scores_single),
        "weigh": softmax.weigh_double if double else softmax.weigh_single,
        "values": _product(spec, vector_products.VALUES_OF, *_stored(spec)[1])
        or (products.values_double if double else products.values_single),
    }
    if spec.positional or spec.mask is not None:
        parts["see"] = visibility.see_double if double else visibility.see_single
    if k_staged or v_staged:
        parts["widen"] = widen.widen_double if double else widen.widen_single
    return {"k_staged": k_staged, "v_staged": v_staged, **{name: compiled() for name, compiled in parts.items()}}


def _stored(spec: Spec) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """Storage type, strides and width of K and of V."""
    kv = spec.kv
    return (kv.k_dtype, kv.k_strides, spec.head_dim), (kv.v_dtype, kv.v_strides, spec.v_head_dim)


def _product(
    spec: Spec, compiled: dict[str, Callable[[], int]], storage: str, strides: tuple[int, ...], width: int
) -> Callable[[], int] | None:
    """Give the product that widens ``storage`` in registers, if there is one for such rows."""
    if spec.state_dtype == "float64" or not vector_products.vectorised(storage, width, strides[3]):
        return None
    return compiled[storage]


def _staged(spec: Spec, storage: str, strides: tuple[int, ...], width: int) -> int:
    """Bytes per key of the working copy; 0 where rows are read where they lie."""
    itemsize = np.dtype(spec.state_dtype).itemsize
    if _product(spec, vector_products.SCORES_OF, storage, strides, width) is not None:
        return 0
    return 0 if storage == spec.state_dtype and strides[3] == itemsize else width * itemsize


@cache
def _float8_values(storage: str) -> Array | None:
    if not storage.startswith("float8"):
        return None
    return np.arange(256, dtype=np.uint8).view(narrow_dtype(storage)).astype(np.float32)


FIELDS = list(Call.__annotations__)
SIZES = [FIELDS.index(name) for name in ("kv_tokens", "k_block", "v_block", "kv_len")]
SPLIT = [FIELDS.index(name) for name in ("split", "splits", "states", "states_s")]
ARRAYS = [FIELDS.index(name) for name in ("q", "k", "v", "k_scale", "v_scale", "q_pos", "kv_pos", "mask")]
"""Where in a record the fields of a step are; an array's address is followed by its strides."""


def _fill(fields: Array, args: Args, q: Array) -> None:
    """Write one step's sizes, addresses and strides into its record."""
    fields[SIZES] = args.kv_tokens, args.k_block, args.v_block, address(args.kv_len)
    arrays = (q, args.k, args.v, args.k_scale, args.v_scale, args.q_pos, args.kv_pos, args.mask)
    for array, first in zip(arrays, ARRAYS, strict=True):
        if array is not None:
            fields[first : first + array.ndim + 1] = address(array), *array.strides


_memory = threading.local()


def _workspace(length: int) -> int:
    """Address of at least ``length`` bytes that belong to this thread."""
    memory: Array | None = getattr(_memory, "bytes", None)
    if memory is None or memory.nbytes < length:
        memory = _memory.bytes = np.zeros(length, np.uint8)
    return address(memory)
