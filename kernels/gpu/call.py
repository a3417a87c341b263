"""One call's arguments as the kernels take them: the struct of ``call.cu``, filled from ``Args``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treeattn.arguments.positions import Consecutive
from treeattn.arguments.spec import Args, Spec
from treeattn.errors import BackendError
from treeattn.kernels.gpu.source import MAX_SOURCES
from treeattn.kernels.gpu.table import TYPES, Specialisation

__all__ = [
    "CALL",
    "FINISH",
    "MERGE",
    "STORE",
    "address",
    "is_wide",
    "pack_call",
    "pack_finish",
    "pack_merge",
    "pack_store",
]

UNLIMITED = 2**62
"""A window's side without a limit: past every distance between positions, and no sum with one overflows."""

CALL = np.dtype(
    [
        ("q", "i8"),
        ("k", "i8"),
        ("v", "i8"),
        ("q_stride", "i8", 4),
        ("k_stride", "i8", 4),
        ("v_stride", "i8", 4),
        ("q_pos", "i8"),
        ("kv_pos", "i8"),
        ("q_pos_stride", "i8", 2),
        ("kv_pos_stride", "i8", 2),
        ("kv_start", "i8"),
        ("before", "i8"),
        ("after", "i8"),
        ("kv_len", "i8"),
        ("mask", "i8"),
        ("mask_stride", "i8", 4),
        ("k_scale", "i8"),
        ("v_scale", "i8"),
        ("k_scale_stride", "i8", 3),
        ("v_scale_stride", "i8", 3),
        ("k_block", "i8"),
        ("v_block", "i8"),
        ("part", "i8"),
        ("arrived", "i8"),
        ("out", "i8"),
        ("kv_heads", "i8"),
        ("group", "i8"),
        ("q_tokens", "i8"),
        ("kv_tokens", "i8"),
        ("splits", "i8"),
        ("tiles", "i8"),
        ("q_type", "i8"),
        ("scale", "f4"),
        ("softcap", "f4"),
    ]
)
"""``struct ta_call``, field by field. Addresses are integers."""

MERGE = np.dtype([("sources", "i8", MAX_SOURCES), ("out", "i8"), ("count", "i8"), ("width", "i8")])
"""``struct ta_merge``."""

FINISH = np.dtype([(name, "i8") for name in ("packed", "sink", "out", "lse", "heads", "tokens", "width")])
"""``struct ta_finish``."""

COPY = np.dtype(
    [
        ("from", "i8"),
        ("to", "i8"),
        ("from_stride", "i8", 4),
        ("to_stride", "i8", 4),
        *((name, "i8") for name in ("heads", "tokens", "width", "rows", "from_type", "to_type", "unit")),
    ]
)
"""``struct ta_copy``."""

STORE = np.dtype([("copies", COPY, 2)])
"""``struct ta_store``."""

STORED_TYPES = {**TYPES, "float64": 6, "int64": 7}
"""Numbers of the types in ``store.cu``."""


def address(array: Any) -> int:
    """Where an array's first element is, on whatever device; 0 for None."""
    if array is None:
        return 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def is_wide(array: Any) -> bool:
    """Whether rows of ``array`` (batch, heads, tokens, width) may be read 16 bytes at a time."""
    itemsize = array.dtype.itemsize
    outer = zip(array.strides[:3], array.shape[:3], strict=True)
    aligned = all(stride % 16 == 0 for stride, size in outer if size > 1) and address(array) % 16 == 0
    return aligned and array.strides[3] == itemsize and array.shape[3] * itemsize % 16 == 0


def pack_call(
    spec: Spec, chosen: Specialisation, args: Args, *, out: int, part: int, arrived: int, splits: int
) -> npt.NDArray[Any]:
    """Fill one ``struct ta_call``.

    Parameters
    ----------
    spec, chosen, args
        The call, and how its kernel was compiled.
    out, part, arrived : int
        Addresses of the packed result, of the splits' states and of the counters.
    splits : int

    Returns
    -------
    array (1,)
        Of dtype `CALL`; CuPy passes it by value.
    """
    call = np.zeros(1, CALL)
    record = call[0]
    for name in ("q", "k", "v"):
        _put(record, name, getattr(args, name))
    for name in ("q_pos", "kv_pos", "mask", "k_scale", "v_scale"):
        array = getattr(args, name)
        if isinstance(array, Consecutive):
            record["kv_start"] = array.start
        elif array is not None:
            _put(record, name, array)
    record["kv_len"] = address(args.kv_len)
    record["before"], record["after"] = _window(spec)
    record["k_block"], record["v_block"] = args.k_block, args.v_block
    record["out"], record["part"], record["arrived"] = out, part, arrived
    record["kv_heads"], record["group"], record["q_tokens"] = spec.kv_heads, spec.group, spec.q_tokens
    record["kv_tokens"], record["splits"] = args.kv_tokens, splits
    record["tiles"] = -(-spec.group * spec.q_tokens // chosen.rows)
    record["q_type"] = TYPES[spec.q_dtype]
    record["scale"], record["softcap"] = spec.scale, spec.softcap or 0.0
    return call


def pack_merge(sources: Sequence[int], out: int, *, width: int) -> npt.NDArray[Any]:
    """Fill one ``struct ta_merge``: addresses of states or wire rows, merged in this order.

    Raises
    ------
    BackendError
        They are more than ``MAX_SOURCES``.
    """
    if len(sources) > MAX_SOURCES:
        raise BackendError(f"a GPU merges at most {MAX_SOURCES} states at a time, not {len(sources)}")
    call = np.zeros(1, MERGE)
    call["sources"][0, : len(sources)] = sources
    call["out"], call["count"], call["width"] = out, len(sources), width
    return call


def pack_finish(**fields: int) -> npt.NDArray[Any]:
    """Fill one ``struct ta_finish``, whose fields are the keywords."""
    return np.array([tuple(fields[name] for name in FINISH.names or ())], FINISH)


def pack_store(pairs: Sequence[tuple[Any, Any]]) -> npt.NDArray[Any]:
    """Fill one ``struct ta_store``.

    Parameters
    ----------
    pairs : sequence of (from, to)
        One or two; arrays (batch, heads, tokens, width) of one shape each, of the types that ``store.cu`` knows.
    """
    call = np.zeros(1, STORE)
    for copy, (source, target) in zip(call[0]["copies"], pairs, strict=False):
        batch, copy["heads"], copy["tokens"], copy["width"] = source.shape
        copy["from"], copy["from_stride"] = address(source), source.strides
        copy["to"], copy["to_stride"] = address(target), target.strides
        copy["rows"] = batch * copy["heads"] * copy["tokens"]
        copy["from_type"], copy["to_type"] = (STORED_TYPES[each.dtype.name] for each in (source, target))
        if source.dtype == target.dtype:
            _move_whole(copy, source, target)
    return call


def _move_whole(copy: Any, source: Any, target: Any) -> None:
    """Say in which pieces rows of one type are copied, whatever they hold."""
    copy["unit"] = itemsize = source.dtype.itemsize
    if is_wide(source) and is_wide(target):
        copy["unit"], copy["width"] = 16, copy["width"] * itemsize // 16
        copy["from_stride"][3] = copy["to_stride"][3] = 16


def _put(record: Any, name: str, array: Any) -> None:
    record[name] = address(array)
    record[f"{name}_stride"] = array.strides


def _window(spec: Spec) -> tuple[int, int]:
    left, right = spec.window or (None, None)
    before = UNLIMITED if left is None else left
    after = UNLIMITED if right is None else right
    return before, min(after, 0) if spec.causal else after
