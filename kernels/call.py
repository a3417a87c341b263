"""What compiled code knows of a call and of the task at hand: two records of addresses, strides and sizes in memory.

Records keep signatures short, and compile in a tenth of the time that as many arguments take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype
from numba import types as _types
from numba.extending import intrinsic

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["BLOCK", "BUFFERS", "CALL", "STORAGES", "TASK", "Call", "Task", "call_at", "task_at"]

BLOCK = 512
"""Keys that are scored, weighed and summed at a time. Each change from K to V and back costs the memory a moment."""

STORAGES = ("float32", "float64", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
"""Storage types of K and V; compiled code knows each by its index here."""


class Call:
    """What one call reads, where it writes, and how its work is cut into tasks.

    In memory it is an element of dtype ``CALL``.

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
    tasks_to_cut: int  # tasks without splits, by which to decide how many splits there are
    bytes_per_key: int  # of K and V together, that all tasks of a split read
    # where split number s of the state is written: states + s * states_s; where the merge of all goes
    states: int
    states_s: int
    out: int
    out_storage: int  # type of the answer, where one is wanted
    ended: int  # counters of splits that are done, one for each tile of each head
    # how a task's working rows lie: bytes from one to the next, and the order of their elements
    q_row: int
    sums_row: int
    k_order: int
    v_order: int
    pairs: int  # whether working rows of q are bfloat16, for products of pairs
    many: int  # bytes of a number of every row, where rows lie in lanes (`treeattn.kernels.many_rows`); else 0
    columns: int  # of those that a key's products are summed over
    v_unit: float  # what the sums have to be multiplied with in the end
    # inputs
    q_storage: int
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
    k_strip: int  # keys in a strip that is copied; 0 where keys are read where they lie
    k_row: int  # bytes per key of that copy
    k_ahead: int  # bytes per key that are fetched ahead for many rows; 0 where keys are not neighbours
    v: int
    v_b: int
    v_h: int
    v_t: int
    v_d: int
    v_storage: int
    v_strip: int
    v_row: int
    v_ahead: int
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
    kv_run: int  # whether positions of each batch row are consecutive, so that its first one says them all
    causal: int
    left: int
    right: int
    mask: int
    mask_b: int
    mask_h: int
    mask_t: int
    mask_d: int
    mask_additive: int
    # bytes of one thread's workspace
    workspace: int
    # addresses of the compiled parts, and of the 256 values of a float8 type; without `see` every key is seen
    stream: int
    merge: int
    finish: int
    see: int
    widen_k: int
    widen_v: int
    scores: int
    weigh: int
    values: int
    k_float8: int
    v_float8: int


class Task:
    """One thread's task, the block of keys that it is at, and the buffers that it works in; dtype ``TASK``."""

    call: int  # address of the call's record
    b: int
    h: int
    first: int  # query token
    tokens: int
    rows: int  # tokens * group; row = token * group + head
    start: int  # key
    keys: int
    visible: int  # NONE, SOME or ALL of the block's keys are seen (`treeattn.kernels.visibility`)
    marked: int  # whether a weight may be the mark of a hidden key
    # buffers: addresses, each on a cache line
    q: int  # (rows, padded head_dim)
    sums: int  # (rows, padded v_head_dim)
    scores: int  # (rows, BLOCK): scores, then logits, then weights
    m: int  # (rows,)
    l: int  # noqa: E741 - the field's name
    k: int  # (strip, padded head_dim): working copies of stored keys and values
    v: int  # (strip, padded v_head_dim)
    k_scale: int  # (BLOCK,)
    v_scale: int  # (BLOCK,)
    seen: int  # (rows, BLOCK) of uint8: which keys each row sees, where some are
    corrections: int  # (rows,): what older sums of many rows are multiplied with
    merging: int  # room to merge the splits of one head in, and behind it the addresses of their states


BUFFERS = list(Task.__annotations__).index("q")
"""Index of the first buffer among the fields of a task."""


def _record(fields: type) -> np.dtype[Any]:
    """Give the record of a class: 8 bytes a field."""
    kinds = fields.__annotations__.items()
    return np.dtype([(name, np.float64 if kind == "float" else np.int64) for name, kind in kinds])


CALL, TASK = _record(Call), _record(Task)


def _at(dtype: np.dtype[Any]) -> Any:
    record: Any = from_dtype(dtype)

    def at(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), codegen

    return intrinsic(at)


call_at, task_at = _at(CALL), _at(TASK)
"""``call_at(address)`` and ``task_at(address)`` are the records at that address, inside compiled code."""
