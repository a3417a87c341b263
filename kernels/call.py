"""One call of the streaming kernel, as compiled code sees it: a record of addresses, strides in bytes and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype
from numba import types as _types
from numba.extending import intrinsic

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["BLOCK", "CALL", "STORAGES", "Call", "call_at"]

BLOCK = 128
"""Keys that are scored, weighed and summed at a time."""

STORAGES = ("float32", "float64", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
"""Storage types of K and V; compiled code knows each by its index here."""


class Call:
    """What one call reads, where it writes, and how its work is cut into tasks.

    Compiled code reads the fields of a record in memory, an element of dtype ``CALL``: passed as a tuple, so many
    values would take half a minute to compile.

    A name that ends in ``_b``, ``_h``, ``_t`` or ``_d`` is a stride in bytes along batch, head, token or width. An
    address of 0 means that the option is not used.
    """

    counter: int  # first, so that its address is the record's: it hands out the tasks
    scale: float
    softcap: float  # 0 for none
    # sizes
    batch: int
    kv_heads: int
    group: int
    q_tokens: int
    kv_tokens: int
    head_dim: int
    v_head_dim: int
    # tasks: tiles of query tokens, and splits of the keys
    tile: int
    tiles: int
    split: int
    splits: int
    # where split number s of the state is written: states + s * states_s
    states: int
    states_s: int
    # inputs; q is of the state's dtype
    q: int
    q_b: int
    q_h: int
    q_t: int
    q_d: int
    k: int
    k_b: int
    k_h: int
    k_t: int
    k_d: int
    k_storage: int
    k_staged: int  # bytes per key of a working copy; 0 where keys are read where they lie
    v: int
    v_b: int
    v_h: int
    v_t: int
    v_d: int
    v_storage: int
    v_staged: int
    # scales of stored keys and values, of the state's dtype
    k_scale: int
    k_scale_b: int
    k_scale_h: int
    k_scale_t: int
    k_block: int
    v_scale: int
    v_scale_b: int
    v_scale_h: int
    v_scale_t: int
    v_block: int
    # what decides who is seen
    kv_len: int
    q_pos: int
    q_pos_b: int
    q_pos_t: int
    kv_pos: int
    kv_pos_b: int
    kv_pos_t: int
    causal: int
    left: int
    right: int
    mask: int
    mask_b: int
    mask_h: int
    mask_t: int
    mask_d: int
    mask_additive: int
    # addresses of the compiled parts, and of the 256 values of a float8 type
    widen: int
    scores: int
    values: int
    k_float8: int
    v_float8: int


CALL = np.dtype([(name, np.float64 if kind == "float" else np.int64) for name, kind in Call.__annotations__.items()])
"""The record: 8 bytes a field, in the order of `Call`."""


def _call_at(typingctx: Any, address: Any) -> Any:
    record: Any = from_dtype(CALL)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64), codegen


call_at: Any = intrinsic(_call_at)
"""``call_at(address)`` is the record (`Call`) at that address, inside compiled code."""
