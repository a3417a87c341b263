"""The made-up cache that ``treeattn decode`` works on, and the right answer for it.

Tokens are random numbers in blocks, each from (seed, number of the block): every rank makes its own shard, any rank
can make any part again, and the whole does not depend on how many ranks there are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import narrow_dtype
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.errors import InputError

if TYPE_CHECKING:
    from treeattn.testing.oracle import Answer

__all__ = ["Verdict", "Workload"]

Array: TypeAlias = npt.NDArray[Any]

BLOCK = 1024
"""Tokens that are drawn together."""

PIECE_ELEMENTS = 2**23
"""Numbers of K and V that the oracle has in memory at once, in float64."""


@dataclass(frozen=True)
class Right:
    """The right output in float64, the largest error allowed, and how they were made."""

    answer: Array
    limit: float
    method: str


@dataclass(frozen=True)
class Verdict:
    """How far an output is from the right one.

    Parameters
    ----------
    error, limit : float
        Largest absolute error, and the largest that is allowed: twice that of plain NumPy in the same precision.
    method : str
        How the right answer was made.
    """

    error: float
    limit: float
    method: str


@dataclass(frozen=True)
class Workload:
    """Shape, type and options of one decode step over ``tokens`` tokens in all."""

    tokens: int
    batch: int
    q_heads: int
    kv_heads: int
    q_tokens: int
    head_dim: int
    v_head_dim: int
    dtype: str
    layout: str
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    seed: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Workload:
        """Take the command line's options; others are passed over."""
        taken = {field.name: options[field.name] for field in fields(cls)}
        return cls(**{**taken, "v_head_dim": taken["v_head_dim"] or taken["head_dim"]})

    def check(self) -> None:
        """Resolve the call with no keys at all, as the library would.

        Raises
        ------
        InputError
            Heads, window or softcap make no sense, or no address is large enough.
        """
        largest = 8 * max(self.batch * self.kv_heads * self.tokens, self._rows) * (self.head_dim + self.v_head_dim)
        if largest > sys.maxsize:
            raise InputError.of("sizes", expected=f"arrays of at most {sys.maxsize:,} bytes", got=f"{largest:,}")
        resolve(self.query(), *self.cache(0, 0), Options(**self.options(0)))

    def span(self, rank: int, size: int) -> tuple[int, int]:
        """Positions that ``rank`` of ``size`` holds: first, and one past the last."""
        return self.tokens * rank // size, self.tokens * (rank + 1) // size

    def options(self, start: int) -> dict[str, Any]:
        """Give the keyword options of a call whose keys begin at position ``start``."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "layout": self.layout,
        }
        if self.causal or self.window is not None:
            options |= {"q_pos": np.arange(self.tokens - self.q_tokens, self.tokens), "kv_pos": start}
        return options

    def query(self) -> Array:
        """Make q, the same everywhere."""
        rng = np.random.default_rng((self.seed, 0))
        return self._stored(rng.standard_normal((self.batch, self.q_heads, self.q_tokens, self.head_dim)))

    def cache(self, start: int, stop: int) -> tuple[Array, Array]:
        """Make K and V of positions ``start`` up to ``stop``."""
        k, v = (self._empty(stop - start, width) for width in (self.head_dim, self.v_head_dim))
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            origin = block * BLOCK
            first, last = max(start, origin), min(stop, origin + BLOCK)
            for stored, drawn in zip((k, v), self._block(block), strict=True):
                self._bhtd(stored)[:, :, first - start : last - start] = drawn[:, :, first - origin : last - origin]
        return k, v

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V on all ranks together, which a step has to read once."""
        return self.tokens * self.batch * self.kv_heads * self._row_bytes

    def shard_bytes(self, size: int) -> int:
        """Bytes of K and V on that of ``size`` ranks which has most."""
        return self.kv_bytes // max(self.tokens, 1) * -(-self.tokens // size)

    def held_bytes(self, size: int) -> int:
        """Bytes of K, V, q and the result on that rank."""
        return self.shard_bytes(size) + self._rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row of k and one of v, or of q and of the result."""
        return (self.head_dim + self.v_head_dim) * narrow_dtype(self.dtype).itemsize

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of one state."""
        return self.batch, self.q_heads, self.q_tokens, self.v_head_dim

    @property
    def state_dtype(self) -> str:
        """Dtype of one state."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return self._rows * (self.v_head_dim + 2) * self._state_itemsize

    @property
    def sums_bytes(self) -> int:
        """Bytes of the two numbers of each row that the paper's scheme holds besides the result: 2·b·n_h elements."""
        return 2 * self._rows * self._state_itemsize

    def paper_bytes(self, size: int) -> int:
        """Bytes that each of ``size`` ranks moves in the paper's three all-reduces: 2 (p - 1) / p (b d + 2 b n_h)."""
        return 2 * (size - 1) * self._rows * (self.v_head_dim + 2) * self._state_itemsize // size

    @property
    def _rows(self) -> int:
        return self.batch * self.q_heads * self.q_tokens

    @property
    def _state_itemsize(self) -> int:
        return np.dtype(self.state_dtype).itemsize

    def verdict(self, out: Array, rounding: float = 0.0) -> Verdict:
        """Compare ``out`` with what is `right`, to within ``rounding`` of the largest value beside what is usual."""
        error = np.max(np.abs(out.astype(np.float64) - self.right.answer), initial=0.0)
        allowed = self.right.limit + (rounding and rounding * self._largest_value)
        return Verdict(float(error), allowed, self.right.method)

    @property
    def _largest_value(self) -> float:
        return max(float(np.max(np.abs(self.cache(*piece)[1].astype(np.float32)))) for piece in self._pieces())

    @cached_property
    def right(self) -> Right:
        """The float64 oracle's answer, made in memory that does not grow with the context.

        Pieces of the cache are answered one by one and weighed by their lse, all in float64 and without any of the
        code that is checked. The yardstick, plain NumPy in the same precision, gets the last tokens, a piece of them:
        no window hides those.
        """
        from treeattn.testing.oracle import dense, tolerance

        q, pieces = self.query(), self._pieces()
        answers = [dense(q, *self.cache(*piece), **self.options(piece[0])) for piece in pieces]
        start = max(0, self.tokens - pieces[0][1])
        limit = tolerance(q, *self.cache(start, self.tokens), **self.options(start)).out
        kind = "whole" if len(pieces) == 1 else f"in {len(pieces)} pieces, weighed by lse"
        return Right(self._weighed(answers), float(limit), f"float64 oracle, {kind}")

    def _pieces(self) -> list[tuple[int, int]]:
        per_token = self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)
        length = max(BLOCK, PIECE_ELEMENTS // per_token // BLOCK * BLOCK)
        return [(start, min(self.tokens, start + length)) for start in range(0, self.tokens, length)]

    def _weighed(self, answers: list[Answer]) -> Array:
        """Add up the pieces' outputs, each by its share of the whole softmax's sum."""
        lse = reduce(np.logaddexp, [answer.lse for answer in answers])
        shares = [np.exp(answer.lse - np.where(np.isneginf(lse), 0, lse))[..., None] for answer in answers]
        weighed: list[Array] = [self._bhtd(share) * answer.out for share, answer in zip(shares, answers, strict=True)]
        total: Array = np.stack(weighed).sum(axis=0)
        return total

    def _block(self, block: int) -> tuple[Array, Array]:
        rng = np.random.default_rng((self.seed, 1 + block))
        shape = self.batch, self.kv_heads, BLOCK
        k, v = (rng.standard_normal((*shape, width), np.float32) for width in (self.head_dim, self.v_head_dim))
        return k, v

    def _empty(self, tokens: int, width: int) -> Array:
        bhtd = self.batch, self.kv_heads, tokens, width
        shape = bhtd if self.layout == "bhtd" else (bhtd[0], bhtd[2], bhtd[1], bhtd[3])
        return np.empty(shape, narrow_dtype(self.dtype))

    def _stored(self, bhtd: Array) -> Array:
        return np.ascontiguousarray(self._bhtd(bhtd)).astype(narrow_dtype(self.dtype))

    def _bhtd(self, array: Array) -> Array:
        """Swap heads and tokens where the layout has them the other way round; its own inverse."""
        return array if self.layout == "bhtd" else array.swapaxes(1, 2)
