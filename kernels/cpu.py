"""The streaming kernel from Python: a Spec becomes a prepared call, and Args its addresses."""

from __future__ import annotations

import threading
from array import array
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arrays import cast, narrow_dtype
from treeattn.inputs import Args, Spec
from treeattn.kernels import streaming
from treeattn.kernels.call import BLOCK, CALL, STORAGES, Call
from treeattn.kernels.combine import merge_at, merge_room
from treeattn.kernels.loads import padded, stored_bytes
from treeattn.kernels.many_rows import whole_rows
from treeattn.kernels.processors import thread_count
from treeattn.kernels.specialisations import (
    has_many_rows,
    k_strip,
    multiplies_pairs,
    parts_of,
    stored,
    tile_tokens,
    v_strip,
)
from treeattn.kernels.threads import run_on_threads

__all__ = ["StreamingCall", "address", "prepare"]

Array: TypeAlias = npt.NDArray[Any]

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
        self._tile = tile_tokens(spec)
        self._tiles = -(-spec.q_tokens // self._tile)
        self._fields = self._fixed_fields()
        rows = self._tile * spec.group
        rows = whole_rows(rows) if has_many_rows(spec) else rows
        self._scratch = streaming.workspace_bytes(rows, spec.head_dim, spec.v_head_dim, self._dtype.itemsize)
        bytes_per_row = sum(kv.width * narrow_dtype(kv.storage).itemsize for kv in stored(spec))
        self._bytes_per_key = spec.batch * spec.kv_heads * self._tiles * bytes_per_row

    def __call__(self, args: Args, out: Array) -> Array:
        """Compute one step; only the arrays and the number of keys may differ from the spec's."""
        split, splits = self._splits(args.kv_tokens)
        states = out if splits == 1 else np.empty((splits, *out.shape), self._dtype)
        q = cast(args.q, self._dtype)
        fields = self._fields.copy()
        _fill(fields, args, q)
        fields[SPLIT : SPLIT + 4] = split, splits, address(states), out.nbytes
        record = array("q", fields)
        place = record.buffer_info()[0]
        threads = min(thread_count(), 1 + self._bytes_per_key * args.kv_tokens // BYTES_PER_THREAD)
        run_on_threads(lambda: self._stream(place, _workspace(self._scratch)), threads)
        if splits > 1:
            sources = np.arange(splits) * out.nbytes + address(states)
            width = out.shape[-1]
            room = merge_room(splits, out.size // width, width)
            self._merge(address(out), sources, out.size // width, width, address(room))
        return out

    def _splits(self, kv_tokens: int) -> tuple[int, int]:
        """Give the keys per split, whole blocks of them, and the number of splits."""
        tasks = max(1, self._spec.batch * self._spec.cut_heads * self._tiles)
        wanted = min(MOST_SPLITS, -(-ENOUGH_TASKS // tasks), max(1, kv_tokens // LEAST_SPLIT))
        split = max(1, -(-kv_tokens // (wanted * BLOCK))) * BLOCK
        return split, max(1, -(-kv_tokens // split))

    def _fixed_fields(self) -> list[int]:
        """Give the fields of everything that stays from step to step, as integers; the rest is 0."""
        spec, call = self._spec, np.zeros(1, CALL)
        left, right = spec.window or (None, None)
        for name, value in {
            "softcap": spec.softcap or 0.0,
            "batch": spec.batch,
            "kv_heads": spec.kv_heads,
            "group": spec.group,
            "q_tokens": spec.q_tokens,
            "head_dim": spec.head_dim,
            "v_head_dim": spec.v_head_dim,
            "tile": self._tile,
            "tiles": self._tiles,
            "causal": spec.causal,
            "left": -1 if left is None else left,
            "right": -1 if right is None else right,
            "mask_additive": spec.mask == "float",
            **_stored_fields(spec),
            **{name: part() for name, part in parts_of(spec).items()},
        }.items():
            call[name] = value
        numbers: list[int] = call.view(np.int64).tolist()
        return numbers


def address(values: Array | None) -> int:
    """Address of an array's first element, 0 for None."""
    return 0 if values is None else int(values.__array_interface__["data"][0])


def _stored_fields(spec: Spec) -> dict[str, float]:
    """Fields that say how stored keys and values are read."""
    k, v = stored(spec)
    pairs = multiplies_pairs(spec)
    return {
        "scale": spec.scale * (1.0 if pairs else k.unit),
        "q_row": k.row_bytes,
        "sums_row": v.row_bytes,
        "k_paired": k.paired and not pairs,
        "v_paired": v.paired,
        "pairs": pairs,
        "many": whole_rows(tile_tokens(spec) * spec.group) * stored_bytes(k.dtype) if k.many else 0,
        "columns": k.width // 2 if pairs else padded(k.width) if k.paired else k.width,
        "v_unit": v.unit,
        "k_storage": STORAGES.index(k.storage),
        "v_storage": STORAGES.index(v.storage),
        "k_strip": k_strip(k, pairs),
        "v_strip": v_strip(v),
        "k_row": k.row_bytes,
        "v_row": v.row_bytes,
        "k_ahead": k.bytes_in_order,
        "v_ahead": v.bytes_in_order,
        "k_float8": address(_float8_values(k.storage)),
        "v_float8": address(_float8_values(v.storage)),
    }


@cache
def _float8_values(storage: str) -> Array | None:
    if not storage.startswith("float8"):
        return None
    return np.arange(256, dtype=np.uint8).view(narrow_dtype(storage)).astype(np.float32)


FIELDS = list(Call.__annotations__)
SPLIT = FIELDS.index("split")  # followed by splits, states and states_s
KV_TOKENS, K_BLOCK, V_BLOCK, KV_LEN = (FIELDS.index(name) for name in ("kv_tokens", "k_block", "v_block", "kv_len"))
ARRAYS = [FIELDS.index(name) for name in ("q", "k", "v", "k_scale", "v_scale", "q_pos", "kv_pos", "mask")]
"""Where in a record the fields of a step are; an array's address is followed by its strides."""


def _fill(fields: list[int], args: Args, q: Array) -> None:
    """Write one step's sizes, addresses and strides into its record."""
    fields[KV_TOKENS], fields[KV_LEN] = args.kv_tokens, address(args.kv_len)
    fields[K_BLOCK], fields[V_BLOCK] = args.k_block, args.v_block
    arrays = (q, args.k, args.v, args.k_scale, args.v_scale, args.q_pos, args.kv_pos, args.mask)
    for each, first in zip(arrays, ARRAYS, strict=True):
        if each is not None:
            fields[first : first + each.ndim + 1] = address(each), *each.strides


_memory = threading.local()


def _workspace(length: int) -> int:
    """Address of at least ``length`` bytes that belong to this thread."""
    memory: Array | None = getattr(_memory, "bytes", None)
    if memory is None or memory.nbytes < length:
        memory = _memory.bytes = np.zeros(length, np.uint8)
    return address(memory)
