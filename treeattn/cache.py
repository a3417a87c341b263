"""A key/value cache that grows over the ranks of a communicator, each rank holding its share of the positions."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn import storage
from treeattn.arrays import FLOAT_DTYPES, as_array, cast, narrow_dtype, to_array
from treeattn.comm import TreeComm, as_tree_comm
from treeattn.devices import on_device
from treeattn.distributed import Arguments, Decoding
from treeattn.errors import InputError
from treeattn.inputs import Layout, Options, check_flag, check_layout, to_bhtd
from treeattn.ledger import Ledger, Segment
from treeattn.prompt import prefill

__all__ = ["ShardedKVCache"]

Array: TypeAlias = npt.NDArray[Any]


class ShardedKVCache:
    """Keys and values of one attention layer, sharded by position over the ranks of a communicator.

    Every rank makes the same calls in the same order; making one is collective too. `append` and `truncate` send
    nothing; what goes wrong there on one rank of several is reported by the next `decode` or `prefill`, on every rank.

    Parameters
    ----------
    comm : TreeComm, mpi4py communicator or None
        As in `treeattn.decode`.
    batch, kv_heads, head_dim : int
        B, Hkv and D.
    v_head_dim : int, optional
        Dv; D by default.
    dtype : str
        Storage type: float32, float64, float16 or bfloat16.
    block_size : int
        Consecutive appended tokens that go to one rank before the next rank's turn.
    capacity : int
        Most tokens that all ranks together may hold. Memory is taken as tokens come, where the system gives huge
        pages in steps of 2 MB for each head.
    layout : str
        "bhtd" (batch, heads, tokens, width) or "bthd", of everything passed in and given back.

    Raises
    ------
    InputError
        On every rank, if an argument is wrong on any, or differs.

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
    >>> cache = treeattn.ShardedKVCache(None, batch=1, kv_heads=2, head_dim=4, capacity=100)
    >>> cache.append(k, v)
    >>> cache.length
    6
    >>> np.allclose(cache.decode(q), treeattn.attention(q, k, v))
    True
    """

    def __init__(
        self,
        comm: Any,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: str = "float32",
        block_size: int = 16,
        capacity: int,
        layout: str = "bhtd",
    ) -> None:
        self.comm: TreeComm = as_tree_comm(comm)
        self._pending: Exception | None = None
        error, settings = None, {}
        try:
            self.batch = _count("batch", batch)
            self.kv_heads = _count("kv_heads", kv_heads)
            self.head_dim = _count("head_dim", head_dim)
            self.v_head_dim = self.head_dim if v_head_dim is None else _count("v_head_dim", v_head_dim)
            self.capacity = _count("capacity", capacity)
            self.dtype = _storage_dtype(dtype)
            self.layout: Layout = check_layout(layout)
            self._ledger = Ledger(self.comm.size, _count("block_size", block_size))
            self._allocate(min(self.capacity, -(-self.capacity // self.comm.size) + self._ledger.block_size))
            settings = self._settings()
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = wrong
        self.comm.consult("ShardedKVCache", tuple(settings.items()), {}, error)

    def _settings(self) -> dict[str, Any]:
        """Give what must be the same on every rank, lest they deal tokens differently."""
        names = ("batch", "kv_heads", "head_dim", "v_head_dim", "capacity", "layout")
        chosen = {name: getattr(self, name) for name in names}
        return {**chosen, "dtype": self.dtype.name, "block_size": self._ledger.block_size}

    @property
    def length(self) -> int:
        """Tokens on all ranks together; the next token's position."""
        return self._ledger.length

    @property
    def local_length(self) -> int:
        """Tokens that this rank holds."""
        return self._ledger.counts[self.comm.rank]

    @property
    def positions(self) -> Array:
        """Positions of the tokens that this rank holds, ascending, int64 (local_length,)."""
        positions: Array = self._positions[: self.local_length].copy()
        return positions

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, without room to grow."""
        return self.batch * self.kv_heads * self.local_length * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    def __repr__(self) -> str:
        return (
            f"ShardedKVCache(batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"v_head_dim={self.v_head_dim}, dtype={self.dtype.name!r}, length={self.length} of {self.capacity}, "
            f"{self.local_length} here on rank {self.comm.rank} of {self.comm.size})"
        )

    def append(self, k: Any, v: Any) -> None:
        """Add the next tokens, the same on every rank; each rank keeps its share of them.

        Parameters
        ----------
        k : array (B, Hkv, T, D), any float dtype
        v : array (B, Hkv, T, Dv)

        Raises
        ------
        InputError
            At once on one rank; on several, from the next `decode` or `prefill` on all of them, since this call
            sends nothing. Cut every rank back to one length with `truncate` to go on after it.
        """
        try:
            k, v = self._tokens(k, v)
            self._check_room(k.shape[2])
        except Exception as error:
            self._defer(error)
            return
        start = self.length
        self._keep(start, self._ledger.append(k.shape[2]), k, v)

    def prefill(self, k: Any, v: Any) -> None:
        """Add the next tokens, of which each rank passes, and keeps, its own consecutive piece; collective.

        Nothing moves but the lengths. The pieces follow each other in rank order.

        Parameters
        ----------
        k : array (B, Hkv, T, D), any float dtype
            This rank's piece; T may differ from rank to rank and may be 0.
        v : array (B, Hkv, T, Dv)

        Raises
        ------
        InputError
            On every rank, if any rank's piece is wrong or all together don't fit; nothing is added then.
        """
        error = self._take_pending()
        try:
            k, v = self._tokens(k, v)
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = error or wrong
        tokens = 0 if error else k.shape[2]
        fields = (("cache length", self.length),)
        lengths = [each["tokens"] for each in self.comm.consult("prefill", fields, {"tokens": tokens}, error)]
        self._check_room(sum(lengths))
        start = self.length + sum(lengths[: self.comm.rank])
        self._keep(start, self._ledger.prefill(lengths), k, v)

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on, on every rank.

        Parameters
        ----------
        length : int
            From 0 to `length`; the same on every rank.
        """
        try:
            if not 0 <= _whole("length", length) <= self.length:
                raise InputError.of("length", expected=f"0 to {self.length}, the tokens in the cache", got=length)
        except Exception as error:
            self._defer(error)
            return
        self._ledger.truncate(int(length))

    def decode(
        self,
        q: Any,
        *,
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sink: Any = None,
        q_pos: Any = None,
        root: int | None = None,
        return_lse: bool = False,
        backend: Any = None,
        pipeline: int = 1,
    ) -> Any:
        """Attention of ``q`` over every token in the cache; collective.

        Parameters
        ----------
        q : array (B, Hq, Tq, D)
            Queries, the same on every rank.
        q_pos : array of int (Tq,) or (B, Tq), optional
            Their positions; by default they are the last Tq tokens of the cache.
        causal, window, softcap, scale, sink, root, return_lse, backend, pipeline
            As in `treeattn.decode`, except that ``causal`` is True unless said otherwise.

        Returns
        -------
        out, lse
            As `treeattn.decode`.
        """
        decoding = Decoding(
            self.comm,
            root=root,
            return_lse=return_lse,
            sink=sink,
            backend=backend,
            pipeline=pipeline,
            shared=(("cache length", self.length), ("tokens of each rank", tuple(self._ledger.counts))),
        )

        def arguments() -> Arguments:
            if error := self._take_pending():
                raise error
            placed = self._placed(q, q_pos, causal, window)
            options = Options(scale=scale, softcap=softcap, layout=self.layout, **placed)
            return q, self._held(self._k), self._held(self._v), options

        return decoding(arguments)

    def attend(
        self,
        q: Any,
        *,
        q_pos: Any,
        algorithm: str = "ring",
        causal: bool = True,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        sink: Any = None,
        return_lse: bool = False,
        backend: Any = None,
    ) -> Any:
        """Attention of queries that differ from rank to rank over every token in the cache; collective.

        Keys and values travel, each rank's rows stay: for a prompt that was just added. Where the cache is much longer
        than the new tokens, let queries travel instead: pass all of them to `decode`.

        Parameters
        ----------
        q : array (B, Hq, Tq, D)
            This rank's queries; Tq may differ from rank to rank and may be 0.
        q_pos : array of int (Tq,) or (B, Tq)
            Their positions.
        algorithm : str
            As in `treeattn.prefill`.
        causal, window, softcap, scale, sink, return_lse, backend
            As in `treeattn.decode`, except that ``causal`` is True unless said otherwise.

        Returns
        -------
        out, lse
            As `treeattn.prefill`: this rank's rows.
        """
        same = (("cache length", self.length), ("tokens of each rank", tuple(self._ledger.counts)))
        self.comm.consult("attend", same, {}, self._take_pending())
        return prefill(
            q,
            self._held(self._k),
            self._held(self._v),
            self.comm,
            algorithm=algorithm,
            return_lse=return_lse,
            sink=sink,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            q_pos=q_pos,
            kv_pos=self._positions[: self.local_length],
            layout=self.layout,
            backend=backend,
        )

    def _placed(self, q: Any, q_pos: Any, causal: Any, window: Any) -> dict[str, Any]:
        """Position options; none for one query on the last token, which sees every key there is."""
        causal, found = check_flag("causal", causal), to_array("q", q)
        _check_here("q", found)
        shape = found.shape
        tokens = shape[self.layout.index("t")] if len(shape) == 4 else 1
        if q_pos is None and tokens == 1 and window is None:
            return {}
        if q_pos is None:
            q_pos = np.arange(self.length - tokens, self.length)
        return {"causal": causal, "window": window, "q_pos": q_pos, "kv_pos": self._positions[: self.local_length]}

    def _held(self, rows: Array) -> Array:
        return to_bhtd(rows[:, :, : self.local_length], self.layout)

    def _tokens(self, k: Any, v: Any) -> tuple[Array, Array]:
        """View new keys and values as (B, Hkv, T, width), checked."""
        k, v = self._checked("k", k, self.head_dim), self._checked("v", v, self.v_head_dim)
        if v.shape[2] != k.shape[2]:
            raise InputError.of("v", expected=f"k's number of tokens of {k.shape[2]}", got=v.shape[2])
        return k, v

    def _checked(self, name: str, value: Any, width: int) -> Array:
        array = as_array(name, value, FLOAT_DTYPES)
        _check_here(name, array)
        sizes = {"b": self.batch, "h": self.kv_heads, "t": "tokens", "d": width}
        wanted = tuple(sizes[axis] for axis in self.layout)
        if array.ndim != 4 or any(n != w for n, w in zip(array.shape, wanted, strict=True) if w != "tokens"):
            shape = ", ".join(map(str, wanted))
            raise InputError.of(name, expected=f"shape ({shape})", got=f"shape {array.shape}")
        return to_bhtd(array, self.layout)

    def _check_room(self, tokens: int) -> None:
        if self.length + tokens > self.capacity:
            expected = (
                f"at most {self.capacity - self.length} more tokens, the room left of a capacity of {self.capacity}"
            )
            raise InputError.of("k", expected=expected, got=tokens)

    def _defer(self, error: Exception) -> None:
        """Raise at once where there is nobody else; else keep the first error for the next collective call."""
        if self.comm.size == 1:
            raise error
        self._pending = self._pending or error

    def _take_pending(self) -> Exception | None:
        error, self._pending = self._pending, None
        return error

    def _allocate(self, tokens: int) -> None:
        # Head-major: the kernel reads each head's rows in the order of their addresses.
        self._k, self._v = (self._rows(tokens, width) for width in (self.head_dim, self.v_head_dim))
        self._positions = np.empty(tokens, np.int64)

    def _rows(self, tokens: int, width: int) -> Array:
        """Memory for rows of ``width``, each head's beginning on a cache line."""
        room = storage.whole_lines(tokens, width * self.dtype.itemsize)
        return storage.empty((self.batch, self.kv_heads, room, width), self.dtype)[:, :, :tokens]

    def _keep(self, start: int, dealt: list[Segment], k: Array, v: Array) -> None:
        """Store this rank's parts of what was dealt; ``k`` and ``v`` begin at position ``start``."""
        own = [part for part in dealt if part.owner == self.comm.rank]
        try:
            at = self._reserve(own)
            for part in own:
                piece = slice(part.start - start, part.stop - start)
                at = self._store(at, part, k[:, :, piece], v[:, :, piece])
        except Exception as error:  # out of memory: the others, who have theirs, must hear of it
            if dealt:
                self._ledger.truncate(dealt[0].start)
            self._defer(error)

    def _reserve(self, new: list[Segment]) -> int:
        """Make room for parts that the ledger has just dealt to this rank; give the index of the first."""
        held = self.local_length - sum(map(len, new))
        room = len(self._positions)
        if self.local_length > room:
            k, v, positions = self._k, self._v, self._positions
            self._allocate(min(max(self.local_length, 2 * room), self.capacity))
            self._k[:, :, :held], self._v[:, :, :held] = k[:, :, :held], v[:, :, :held]
            self._positions[:held] = positions[:held]
        return held

    def _store(self, at: int, part: Segment, k: Array, v: Array) -> int:
        """Write a part from index ``at`` on; give the index behind it."""
        end = at + len(part)
        self._k[:, :, at:end], self._v[:, :, at:end] = cast(k, self.dtype), cast(v, self.dtype)
        self._positions[at:end] = np.arange(part.start, part.stop)
        return end


def _check_here(name: str, array: Array) -> None:
    if on_device(array):
        raise InputError.of(name, expected="an array in host memory, where this cache is", got="one on a GPU")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise InputError.of(name, expected="an integer", got=repr(value))


def _count(name: str, value: Any) -> int:
    if _whole(name, value) < 1:
        raise InputError.of(name, expected="a positive integer", got=value)
    return int(value)


def _storage_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if name not in FLOAT_DTYPES:
        raise InputError.of("dtype", expected=", ".join(FLOAT_DTYPES), got=repr(dtype))
    return narrow_dtype(name)
