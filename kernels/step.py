"""A prepared call in compiled code, from the arrays of one step to the state: Python only says where they are."""

from __future__ import annotations

import numpy as np

from treeattn.kernels.array_objects import data_of, length_of, read_array
from treeattn.kernels.call import BLOCK, CALL, Call, call_at
from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import call_part, pointer
from treeattn.kernels.streaming import MOST_SPLITS
from treeattn.kernels.threads import work_together
from treeattn.kernels.vectors import LINE
from treeattn.kernels.visibility import are_consecutive

__all__ = ["run_step"]

LEAST_SPLIT, ENOUGH_TASKS = 2048, 256
"""Keys that are worth a task, and tasks that are enough. Parts of the keys depend on shapes alone, so that the bits of
the result don't depend on the threads."""

BYTES_PER_THREAD = 1 << 18
"""Bytes that are worth one thread more: one that is awake gains from a quarter of it on, one that sleeps from 4 times.
Which it will be is not known here."""

CALL_BYTES = CALL.itemsize

FIELDS = list(Call.__annotations__)
Q, K, V, K_SCALE, V_SCALE, Q_POS, KV_POS, MASK = (
    8 * FIELDS.index(name) for name in ("q", "k", "v", "k_scale", "v_scale", "q_pos", "kv_pos", "mask")
)
"""Where in a call's record arrays are; an address is followed by its strides."""


@entry(f"int64({', '.join(['int64'] * 21)})")
def run_step(
    fixed: int, memory: int, size: int, board: int, threads: int, none: int,
    out: int, answer: int, lse: int, sink: int, q: int, k: int, v: int, q_pos: int, kv_pos: int,
    kv_len: int, mask: int, k_scale: int, v_scale: int, k_block: int, v_block: int,
) -> int:  # fmt: skip
    """Fill the state ``out``, and finish it, if ``size`` bytes of memory are enough; give the bytes that it takes.

    Parameters
    ----------
    fixed : int
        Address of a call's record (`treeattn.kernels.call.CALL`) with all that stays from step to step.
    memory, size : int
        Memory that this call alone uses, on a cache line.
    board, threads : int
        As `treeattn.kernels.threads.team` gives them.
    none, out, answer, lse, sink, q, k, v, q_pos, kv_pos, kv_len, mask, k_scale, v_scale : int
        Addresses of objects: None, and arrays or None. One position for each row is that of its first key, where keys
        are consecutive. The state may be None where an answer is wanted, which is of the type ``out_storage`` of the
        record.
    k_block, v_block : int
        Tokens that a scale is for.
    """
    kept, kv_tokens = call_at(fixed), length_of(k, 2)
    split = _keys_per_split(kept.tasks_to_cut, kv_tokens)
    splits, tiles = max(1, -(-kv_tokens // split)), kept.batch * kept.kv_heads * kept.tiles
    threads = max(1, min(threads, 1 + kept.bytes_per_key * kv_tokens // BYTES_PER_THREAD, tiles * splits))
    ended = memory + CALL_BYTES
    whole = _on_line(ended + 8 * tiles)
    states = _on_line(whole + (kept.states_s + 8 * (kept.v_head_dim + 2) if out == none else 0))
    workspace = _on_line(states + (splits * kept.states_s if splits > 1 else 0))
    needed: int = workspace + threads * kept.workspace - memory
    if needed > size:
        return needed
    for i in range(CALL_BYTES // 8):
        pointer(memory, np.int64)[i] = pointer(fixed, np.int64)[i]
    for i in range(tiles):
        pointer(ended, np.int64)[i] = 0
    call = call_at(memory)
    call.kv_tokens, call.split, call.splits, call.ended = kv_tokens, split, splits, ended
    call.out = whole if out == none else data_of(out, none)
    call.states = states if splits > 1 else call.out
    call.kv_len, call.k_block, call.v_block = data_of(kv_len, none), k_block, v_block
    for array, at in ((q, Q), (k, K), (v, V), (q_pos, Q_POS), (kv_pos, KV_POS), (mask, MASK)):
        read_array(array, none, memory + at)
    for scale, at in ((k_scale, K_SCALE), (v_scale, V_SCALE)):
        read_array(scale, none, memory + at)
    call.kv_run = (kv_pos != none and length_of(kv_pos, 1) == 1) or are_consecutive(call)
    work_together(board, threads - 1, call.stream, memory, workspace, call.workspace)
    if answer != none:
        _finish(call, data_of(answer, none), data_of(lse, none), data_of(sink, none))
    return needed


@inline
def _finish(call: Call, answer: int, lse: int, sink: int) -> None:
    heads = call.kv_heads * call.group
    shape = (call.batch * heads * call.q_tokens, heads, call.q_tokens, call.v_head_dim + 2)
    call_part(call.finish, (answer, call.out_storage, lse, call.out, sink, *shape))


@inline
def _keys_per_split(tasks: int, kv_tokens: int) -> int:
    """Give the keys per split, whole blocks of them."""
    wanted: int = min(MOST_SPLITS, -(-ENOUGH_TASKS // tasks), max(1, kv_tokens // LEAST_SPLIT))
    return max(1, -(-kv_tokens // (wanted * BLOCK))) * BLOCK


@inline
def _on_line(address: int) -> int:
    return -(-address // LINE) * LINE
