"""What the kernel's benchmark measures: its rows, and the arrays of each."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn import storage
from treeattn.arguments.arrays import narrow_dtype

__all__ = ["GROUPS", "Case", "make_queries", "make_sets", "options_of", "select", "words_of"]

Array: TypeAlias = npt.NDArray[Any]
KeysAndValues: TypeAlias = tuple[Array, Array]

APART = 600_000_000
"""Bytes read between two uses of the same keys, so that none is still in a cache."""

DRAWN = 4096
"""Tokens that are drawn at random; longer contexts repeat them, shifted."""


@dataclass(frozen=True)
class Case:
    """One row: what is computed, and over what. ``tokens`` are the keys that are stored; fewer may be seen."""

    name: str
    dtype: str = "float32"
    q_heads: int = 32
    kv_heads: int = 8
    width: int = 128
    v_width: int = 128
    tokens: int = 32_768
    q_tokens: int = 1
    causal: bool = False
    window: int = 0  # keys that are seen, the last ones; 0 for all
    kv_len: int = 0  # keys that are real, the first ones; 0 for all
    token_major: bool = False
    latent: bool = False  # values are the first part of the keys, as in MLA
    portable: bool = False  # without the processor's own bfloat16 instructions
    memory: str = "cache"  # as ShardedKVCache stores: on lines and huge pages; or on "small pages", or "off lines"

    @property
    def plain(self) -> bool:
        """Whether every library can do it: one query token that sees every key of an ordinary cache."""
        return replace(self, **SHAPE) == Case(self.name)

    @property
    def seen(self) -> slice:
        """Keys that the last query token sees."""
        stop = self.kv_len or self.tokens
        return slice(stop - self.window if self.window else 0, stop)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are seen, each counted once."""
        width = self.width if self.latent else self.width + self.v_width
        return (self.seen.stop - self.seen.start) * self.kv_heads * width * narrow_dtype(self.dtype).itemsize

    @property
    def q_dtype(self) -> str:
        """Type of the queries: the keys', or bfloat16 for 8-bit keys."""
        return self.dtype if narrow_dtype(self.dtype).itemsize > 1 else "bfloat16"


SHAPE: dict[str, Any] = {
    each: Case.__dataclass_fields__[each].default
    for each in ("dtype", "q_heads", "kv_heads", "width", "v_width", "tokens")
}
"""What an ordinary case may have of its own."""


def _heads(name: str, dtype: str, **others: Any) -> list[Case]:
    return [Case(f"{name}-mha", dtype, q_heads=8, **others), Case(f"{name}-gqa", dtype, **others)]


def _four(base: Case) -> Case:
    return replace(base, name=f"{base.name}-4q", q_tokens=4, causal=True)


def _options(base: Case) -> list[Case]:
    """Rows for what an option costs, beside the row that has none."""
    name, tokens = base.name, base.tokens
    return [
        base,
        replace(base, name=f"{name}-causal", causal=True),
        replace(base, name=f"{name}-kv_len", kv_len=tokens - 100),
        replace(base, name=f"{name}-window", window=tokens // 4),
        replace(base, name=f"{name}-token-major", token_major=True),
    ]


WIDE = (("f32", "float32"), ("bf16", "bfloat16"))
F32, BF16, F16 = _heads("f32", "float32"), _heads("bf16", "bfloat16"), _heads("f16", "float16")
GROUPS: dict[str, list[Case]] = {
    "dtypes": [
        *F32,
        *BF16,
        Case("bf16-gqa-portable", "bfloat16", portable=True),
        *F16,
        Case("int8-gqa", "int8"),
        Case("e4m3-gqa", "float8_e4m3fn"),
        Case("e5m2-gqa", "float8_e5m2"),
    ],
    "options": [*_options(F32[0]), *_options(F32[1]), *_options(BF16[1])],
    "many": [
        F32[0],
        _four(F32[0]),
        F32[1],
        _four(F32[1]),
        BF16[1],
        _four(BF16[1]),
        Case("bf16-mla", "bfloat16", q_heads=16, kv_heads=1, width=576, v_width=512, tokens=131_072, latent=True),
    ],
    "groups": [
        *(Case(f"{short}-gqa{group}", dtype, q_heads=8 * group) for short, dtype in WIDE for group in (2, 3, 6, 8)),
    ],
    "widths": [
        *(Case(f"f32-gqa-d{width}", width=width, v_width=width) for width in (64, 80, 96, 256)),
    ],
    "memory": [
        F32[0],
        *(replace(F32[0], name=f"f32-mha {kind}", memory=kind) for kind in ("small pages", "off lines")),
    ],
    "peers": [*F32, *BF16, F16[1]],
    "fixed": [
        replace(case, name=f"{case.name}-{tokens}", tokens=tokens) for case in (*F32, *BF16) for tokens in (64, 4096)
    ],
}
GROUPS["short"] = [*F32, *BF16, F16[1], Case("int8-gqa", "int8")]


def select(words: str, dtypes: str = "", tokens: int | None = None) -> list[Case]:
    """Give the rows that have one of these names, or are in a group of that name, each once.

    Raises
    ------
    ValueError
        There is no such row or group.
    """
    rows = {case.name: case for group in GROUPS.values() for case in group}
    found: dict[str, Case] = {}
    for word in words.split(","):
        if word not in rows and word not in GROUPS:
            raise ValueError(f"rows: expected some of {', '.join([*GROUPS, *rows])}, got {word!r}")
        found |= {case.name: case for case in GROUPS.get(word, [rows[word]] if word in rows else [])}
    wanted = [case for case in found.values() if not dtypes or case.dtype in dtypes.split(",")]
    return [replace(case, tokens=tokens) for case in wanted] if tokens else wanted


def make_queries(case: Case) -> Array:
    """Draw q (1, Hq, Tq, D)."""
    shape = 1, case.q_heads, case.q_tokens, case.width
    return np.random.default_rng(1).standard_normal(shape, np.float32).astype(narrow_dtype(case.q_dtype))


def make_sets(case: Case) -> list[KeysAndValues]:
    """Make as many sets of K and V as keep each out of the caches; (1, Hkv, T, D), on cache lines."""
    rng = np.random.default_rng(0)
    drawn = [_draw(rng, case, width) for width in (case.width, case.v_width)]
    sets = []
    for _ in range(1 + math.ceil(APART / case.nbytes)):
        k = _fill(case, drawn[0])
        sets.append((k, k[..., : case.v_width] if case.latent else _fill(case, drawn[1])))
    return sets


def _draw(rng: np.random.Generator, case: Case, width: int) -> Array:
    shape = case.kv_heads, min(case.tokens, DRAWN), width
    if case.dtype == "int8":
        return rng.integers(-127, 128, shape, np.int8)
    return rng.standard_normal(shape, np.float32).astype(narrow_dtype(case.dtype))


def _fill(case: Case, drawn: Array) -> Array:
    """Store the drawn tokens again and again, shifted, until the context is full."""
    heads, _, width = drawn.shape
    shape = (1, case.tokens, heads, width) if case.token_major else (1, heads, case.tokens, width)
    stored = _memory(case.memory, shape, drawn.dtype)
    stored = stored.swapaxes(1, 2) if case.token_major else stored
    for start in range(0, case.tokens, DRAWN):
        part = stored[0, :, start : start + DRAWN]
        part[...] = np.roll(drawn, 7 * start // DRAWN, axis=1)[:, : part.shape[1]]
    return stored


def _memory(kind: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    if kind == "cache":
        return storage.empty(shape, dtype)
    if kind == "off lines":  # where malloc begins, behind 16 bytes of its own
        return storage.empty((size + 16,), np.dtype(np.uint8))[16:].view(dtype).reshape(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def options_of(case: Case) -> dict[str, Any]:
    """Give the keyword options of `treeattn.attention`."""
    options: dict[str, Any] = {"causal": case.causal}
    if case.window:
        options["window"] = (case.window - 1, 0)
    if case.kv_len:
        options["kv_len"] = np.array([case.kv_len])
    if narrow_dtype(case.dtype).itemsize == 1:
        scale = np.full((1, case.kv_heads, 1, 1), 1 / 64 if case.dtype == "int8" else 1, np.float32)
        options |= {"k_scale": scale, "v_scale": scale}
    return options


def words_of(case: Case, k: Array, v: Array) -> list[Array]:
    """View all that is seen of K and V as runs of 8-byte words, in the order of the addresses."""
    arrays = [k[0, :, case.seen]] if case.latent else [k[0, :, case.seen], v[0, :, case.seen]]
    return [run.view(np.int64) for array in arrays for run in _runs(array)]


def _runs(array: Array) -> list[Array]:
    for view in (array, array.swapaxes(0, 1)):
        if view.flags.c_contiguous:
            return [view.reshape(-1)]
    return [head.reshape(-1) for head in array]
