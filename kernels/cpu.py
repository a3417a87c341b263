"""The streaming kernel from Python: a Spec becomes a prepared call, and Args its addresses."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import narrow_dtype
from treeattn.arguments.positions import Consecutive
from treeattn.arguments.spec import Args, Spec
from treeattn.kernels import combine, streaming
from treeattn.kernels.array_objects import check_objects
from treeattn.kernels.call import CALL, STORAGES
from treeattn.kernels.loads import padded, stored_bytes
from treeattn.kernels.many_rows import whole_rows
from treeattn.kernels.specialisations import (
    has_many_rows,
    k_strip,
    parts_of,
    stored,
    tile_tokens,
    v_strip,
)
from treeattn.kernels.step import run_step
from treeattn.kernels.streaming import workspace_bytes
from treeattn.kernels.threads import look_again, team
from treeattn.kernels.vectors import LINE

__all__ = ["StreamingCall", "address", "prepare"]

Array: TypeAlias = npt.NDArray[Any]


def prepare(spec: Spec) -> StreamingCall:
    """Compile what ``spec`` needs, or load it, and give a function of a step's arguments."""
    return StreamingCall(spec)


class StreamingCall:
    """The streaming kernel for one spec: ``call(args, out)`` fills the packed state ``out`` (B, Hq, Tq, Dv + 2)."""

    def __init__(self, spec: Spec) -> None:
        check_objects()
        self._fixed = _fixed_record(spec)
        self._address, self._run = address(self._fixed), run_step()
        batch, heads, tokens, width = spec.packed_shape
        self._lse_shape, self._out_shape = (batch, heads, tokens), (batch, heads, tokens, width - 2)
        self._dtype, self._out_dtype = np.dtype(spec.state_dtype), narrow_dtype(_out_dtype(spec))
        look_again()

    def __call__(self, args: Args, out: Array) -> Array:
        """Compute one step; only the arrays and the number of keys may differ from the spec's."""
        self._work(args, out, None, None, None)
        return out

    def attend(self, args: Args, sink: Array | None, return_lse: bool) -> tuple[Array, Array | None]:
        """Compute one step and finish it; see `treeattn.backends.base.Attend`."""
        answer = np.empty(self._out_shape, self._out_dtype)
        lse = np.empty(self._lse_shape, self._dtype) if return_lse else None
        self._work(args, None, answer, lse, sink)
        return answer, lse

    def _work(self, args: Args, out: Array | None, answer: Array | None, lse: Array | None, sink: Array | None) -> None:
        try:
            memory = _unused.pop()
        except IndexError:
            memory = Memory(0)
        results = id(None), id(out), id(answer), id(lse), id(sink)
        while (needed := self._step(args, results, memory)) > memory.size:
            memory = Memory(needed)
        if memory.size <= KEPT_BYTES:
            _unused.append(memory)

    def _step(self, args: Args, results: tuple[int, ...], memory: Memory) -> int:
        """Compute one step if there is enough memory; give the bytes that it takes."""
        q, k, v, q_pos, kv_pos, kv_len, mask, k_scale, v_scale, k_block, v_block = args
        if type(kv_pos) is Consecutive:
            kv_pos = kv_pos.first(len(k))
        needed: int = self._run(
            self._address, memory.address, memory.size, *team(), *results, id(q), id(k), id(v), id(q_pos), id(kv_pos),
            id(kv_len), id(mask), id(k_scale), id(v_scale), k_block, v_block,
        )  # fmt: skip
        return needed


class Memory:
    """Room to work in, on a cache line, that one call has at a time."""

    __slots__ = ("_bytes", "address", "size")

    def __init__(self, size: int) -> None:
        self._bytes = np.empty(size + LINE, np.uint8)
        self.address, self.size = -(-address(self._bytes) // LINE) * LINE, size


KEPT_BYTES = 1 << 22
"""Larger memory is given back to the system: the call that needs it takes long enough to get new one."""

_unused: list[Memory] = []
"""What no call is using now. Taking from a list and giving back are one operation each, safe between threads."""


def _fixed_record(spec: Spec) -> Array:
    """Give a call's record with everything that stays from step to step; the rest is 0."""
    call = np.zeros(1, CALL)
    for name, value in {**_shape_fields(spec), **_stored_fields(spec), **_part_fields(spec)}.items():
        call[name] = value
    return call


def _shape_fields(spec: Spec) -> dict[str, float]:
    left, right = spec.window or (None, None)
    tile, size = tile_tokens(spec), np.dtype(spec.state_dtype).itemsize
    tiles, rows = -(-spec.q_tokens // tile), tile * spec.group
    bytes_per_row = sum(kv.width * narrow_dtype(kv.storage).itemsize for kv in stored(spec))
    return {
        "softcap": spec.softcap or 0.0,
        "batch": spec.batch,
        "kv_heads": spec.kv_heads,
        "group": spec.group,
        "q_tokens": spec.q_tokens,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "tile": tile,
        "tiles": tiles,
        "tasks_to_cut": max(1, spec.batch * spec.cut_heads * tiles),
        "bytes_per_key": spec.batch * spec.kv_heads * tiles * bytes_per_row,
        "states_s": math.prod(spec.packed_shape) * size,
        "q_storage": STORAGES.index(spec.q_dtype),
        "out_storage": STORAGES.index(_out_dtype(spec)),
        "causal": spec.causal,
        "left": -1 if left is None else left,
        "right": -1 if right is None else right,
        "mask_additive": spec.mask == "float",
        "workspace": workspace_bytes(
            whole_rows(rows) if has_many_rows(spec) else rows, spec.head_dim, spec.v_head_dim, size
        ),
    }


def _out_dtype(spec: Spec) -> str:
    """Type that an answer is rounded to here: q's, unless sums are float64, which compiled code can't round to it."""
    return spec.q_dtype if spec.state_dtype == "float32" else spec.state_dtype


def _part_fields(spec: Spec) -> dict[str, int]:
    """Addresses of the compiled parts."""
    double = spec.state_dtype == "float64"
    parts = parts_of(spec) | {
        "stream": streaming.stream_double if double else streaming.stream_single,
        "merge": combine.merge_part_double if double else combine.merge_part_single,
        "finish": combine.finish_part_double if double else combine.finish_part_single,
    }
    return {name: part() for name, part in parts.items()}


def address(values: Array | None) -> int:
    """Address of an array's first element, 0 for None."""
    return 0 if values is None else int(values.__array_interface__["data"][0])


def _stored_fields(spec: Spec) -> dict[str, float]:
    """Fields that say how stored keys and values are read."""
    k, v = stored(spec)
    return {
        "scale": spec.scale * k.unit,
        "q_row": k.row_bytes,
        "sums_row": v.row_bytes,
        "k_order": k.order,
        "v_order": v.order,
        "pairs": k.pairs,
        "many": whole_rows(tile_tokens(spec) * spec.group) * stored_bytes(k.dtype) if k.many else 0,
        "columns": k.width // 2 if k.pairs else padded(k.width) if k.order else k.width,
        "v_unit": v.unit,
        "k_storage": STORAGES.index(k.storage),
        "v_storage": STORAGES.index(v.storage),
        "k_strip": k_strip(k),
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
