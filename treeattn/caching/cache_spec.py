"""What a cache is made for, the same on every rank: its sizes, and which arrays fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import FLOAT_DTYPES, as_array, known_dtype, narrow_dtype
from treeattn.arguments.checks import LARGEST, check_size
from treeattn.arguments.inputs import check_layout, to_bhtd
from treeattn.arguments.spec import Layout
from treeattn.errors import InputError

__all__ = ["CacheSpec"]

Array: TypeAlias = npt.NDArray[Any]

POSITION_BYTES = 8
"""Of a token's position, which is held beside its key and value."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The arguments of ``ShardedKVCache`` on which all ranks must agree, lest they deal tokens differently."""

    batch: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: np.dtype[Any]
    block_size: int
    capacity: int
    layout: Layout

    @classmethod
    def read(cls, *, head_dim: Any, v_head_dim: Any, dtype: Any, layout: Any, **sizes: Any) -> CacheSpec:
        """Check what the user passed; ``sizes`` are ``batch``, ``kv_heads``, ``block_size`` and ``capacity``."""
        widths = {"head_dim": head_dim, "v_head_dim": head_dim if v_head_dim is None else v_head_dim}
        whole = {name: check_size(name, value, 1) for name, value in {**sizes, **widths}.items()}
        stored = narrow_dtype(known_dtype("dtype", dtype, FLOAT_DTYPES))
        spec = cls(dtype=stored, layout=check_layout(layout), **whole)
        spec._check_bytes()
        return spec

    @property
    def widths(self) -> tuple[int, int]:
        """D and Dv."""
        return self.head_dim, self.v_head_dim

    @property
    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """All of it, by name, in a form that JSON can carry."""
        chosen = {each.name: getattr(self, each.name) for each in fields(self)}
        return tuple({**chosen, "dtype": self.dtype.name}.items())

    def _check_bytes(self) -> None:
        widest = max(self.batch * self.kv_heads * max(self.widths) * self.dtype.itemsize, POSITION_BYTES)
        if self.capacity * widest > LARGEST:
            expected = f"at most {LARGEST // widest} tokens of {widest} bytes each, as offsets are 64-bit"
            raise InputError.of("capacity", expected=expected, got=self.capacity)

    def share(self, size: int) -> int:
        """Give the tokens that one of ``size`` ranks holds at most where tokens are appended."""
        return min(self.capacity, -(-self.capacity // size) + self.block_size)

    def tokens(self, k: Any, v: Any) -> tuple[Array, Array]:
        """View new keys and values as (B, Hkv, T, width)."""
        k, v = self._fitting("k", k, self.head_dim), self._fitting("v", v, self.v_head_dim)
        if v.shape[2] != k.shape[2]:
            raise InputError.of("v", expected=f"k's number of tokens of {k.shape[2]}", got=v.shape[2])
        return k, v

    def _fitting(self, name: str, value: Any, width: int) -> Array:
        array = as_array(name, value, FLOAT_DTYPES)
        sizes = {"b": self.batch, "h": self.kv_heads, "t": "tokens", "d": width}
        wanted = tuple(sizes[axis] for axis in self.layout)
        if array.ndim != 4 or any(n != w for n, w in zip(array.shape, wanted, strict=True) if w != "tokens"):
            shape = ", ".join(map(str, wanted))
            raise InputError.of(name, expected=f"shape ({shape})", got=f"shape {array.shape}")
        return to_bhtd(array, self.layout)

    def check_room(self, held: int, tokens: int) -> None:
        """Refuse more tokens than the cache may hold."""
        room = self.capacity - held
        if tokens > room:
            expected = f"at most {room} more tokens, the room left of a capacity of {self.capacity}"
            raise InputError.of("k", expected=expected, got=tokens)

    def query_tokens(self, shape: Sequence[int]) -> int:
        """Give the number of queries of an array, which must fit the cache, before keys are blamed."""
        if len(shape) != 4:
            return 1  # as the library says soon
        sizes = dict(zip(self.layout, shape, strict=True))
        for axis, name, wanted in (("b", "batch", self.batch), ("d", "width", self.head_dim)):
            if sizes[axis] != wanted:
                raise InputError.of("q", expected=f"the cache's {name} of {wanted}", got=sizes[axis])
        if sizes["h"] % self.kv_heads:
            expected = f"a number of heads that the cache's {self.kv_heads} divide"
            raise InputError.of("q", expected=expected, got=sizes["h"])
        return sizes["t"]
