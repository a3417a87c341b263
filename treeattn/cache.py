"""A key/value cache that grows over the ranks of a communicator, each rank holding its share of the positions."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arrays import FLOAT_DTYPES, as_array, narrow_dtype, to_array
from treeattn.backends.base import Backend
from treeattn.backends.registry import DEFAULT, find, home_of, load
from treeattn.checks import check_flag, check_whole
from treeattn.comm import TreeComm
from treeattn.devices import Kind, fetch, give, kind_of, on_device
from treeattn.distributed import Arguments, Decoding
from treeattn.errors import InputError
from treeattn.inputs import Layout, Options, check_layout, to_bhtd
from treeattn.ledger import Ledger, Segment, held_by
from treeattn.prompt import prefill
from treeattn.shard import Shard
from treeattn.wrapping import as_tree_comm, team_of

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
        Most tokens that all ranks together may hold. Memory is taken as tokens come: on the host in pages, where the
        system gives huge ones in steps of 2 MB for each head; on a card by doubling, up to this rank's share.
    layout : str
        "bhtd" (batch, heads, tokens, width) or "bthd", of everything passed in and given back.
    backend : str or Backend, optional
        In whose memory this rank's tokens are, and what computes over them: "nvidia", for instance, keeps them on this
        rank's card. By default they are where the first of them come from: NumPy's stay on the host, those of a card
        there. Ranks may differ. A card's cache takes arrays of the host too, with one copy; a host's takes none of a
        card.

    Raises
    ------
    InputError
        On every rank, if an argument is wrong on any, or differs.
    BackendError
        On every rank, if the backend can't run on one.

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
        backend: Any = None,
    ) -> None:
        self.comm: TreeComm = as_tree_comm(comm)
        self._pending: Exception | None = None
        error, settings = None, {}
        try:
            self.batch = check_whole("batch", batch, 1)
            self.kv_heads = check_whole("kv_heads", kv_heads, 1)
            self.head_dim = check_whole("head_dim", head_dim, 1)
            self.v_head_dim = self.head_dim if v_head_dim is None else check_whole("v_head_dim", v_head_dim, 1)
            self.capacity = check_whole("capacity", capacity, 1)
            self.dtype = _storage_dtype(dtype)
            self.layout: Layout = check_layout(layout)
            self._ledger = Ledger(self.comm.size, check_whole("block_size", block_size, 1))
            self._backend = None if backend is None else find(backend)
            self._follows = backend is None
            self._shard = self._shard_of(self._backend or load(DEFAULT))
            settings = self._settings()
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = wrong
        team_of(self.comm).consult("ShardedKVCache", tuple(settings.items()), {}, error)

    def _settings(self) -> dict[str, Any]:
        """Give what must be the same on every rank, lest they deal tokens differently."""
        names = ("batch", "kv_heads", "head_dim", "v_head_dim", "capacity", "layout")
        chosen = {name: getattr(self, name) for name in names}
        return {**chosen, "dtype": self.dtype.name, "block_size": self.block_size}

    def _shard_of(self, backend: Backend) -> Shard:
        """Make an empty shard in a backend's memory."""
        if self.dtype.name not in backend.capabilities.dtypes:
            expected = f"{', '.join(backend.capabilities.dtypes)}, which backend {backend.name!r} computes with"
            raise InputError.of("dtype", expected=expected, got=repr(self.dtype.name))
        return Shard(
            backend.memory,
            batch=self.batch,
            heads=self.kv_heads,
            widths=(self.head_dim, self.v_head_dim),
            dtype=self.dtype,
            share=min(self.capacity, -(-self.capacity // self.comm.size) + self._ledger.block_size),
        )

    @property
    def block_size(self) -> int:
        """Consecutive appended tokens that go to one rank before the next rank's turn."""
        return self._ledger.block_size

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
        positions: Array = self._shard.positions[: self.local_length].copy()
        return positions

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, without room to grow."""
        return self.batch * self.kv_heads * self.local_length * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    def __repr__(self) -> str:
        return (
            f"ShardedKVCache(batch={self.batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"v_head_dim={self.v_head_dim}, dtype={self.dtype.name!r}, length={self.length} of {self.capacity}, "
            f"{self.local_length} here on rank {self.comm.rank} of {self.comm.size}"
            f"{', on its card' if self._shard.memory.on_device else ''})"
        )

    def append(self, k: Any, v: Any) -> None:
        """Add the next tokens, the same on every rank; each rank keeps its share of them.

        Parameters
        ----------
        k : array (B, Hkv, T, D), any float dtype
        v : array (B, Hkv, T, Dv)

        Raises
        ------
        InputError, MemoryError
            At once on one rank; on several, from the next `decode` or `prefill` on all of them, since this call
            sends nothing. Cut every rank back to one length with `truncate` to go on after it.
        """
        kinds = kind_of(k), kind_of(v)
        try:
            k, v = self._tokens(k, v)
            self._check_room(k.shape[2])
        except Exception as error:
            self._defer(error)
            return
        start = self.length
        self._keep(start, self._ledger.append(k.shape[2]), k, v, kinds)

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
        MemoryError
            There is no room for this rank's piece: raised as `append` does.
        """
        error, kinds = self._take_pending(), (kind_of(k), kind_of(v))
        try:
            k, v = self._tokens(k, v)
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = error or wrong
        tokens = 0 if error else k.shape[2]
        fields = (("cache length", self.length),)
        lengths = [each["tokens"] for each in team_of(self.comm).consult("prefill", fields, {"tokens": tokens}, error)]
        self._check_room(sum(lengths))
        start = self.length + sum(lengths[: self.comm.rank])
        self._keep(start, self._ledger.prefill(lengths), k, v, kinds)

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on, on every rank.

        Parameters
        ----------
        length : int
            From 0 to the cache's own `length`; the same on every rank.
        """
        try:
            length = check_whole("length", length, 0, self.length)
        except Exception as error:
            self._defer(error)
            return
        self._ledger.truncate(length)

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
            Queries, the same on every rank. Those of the host are copied to the card of a cache that is there.
        q_pos : array of int (Tq,) or (B, Tq), optional
            Their positions; by default they are the last Tq tokens of the cache.
        causal, window, softcap, scale, sink, root, return_lse, pipeline
            As in `treeattn.decode`, except that ``causal`` is True unless said otherwise.
        backend : str or Backend, optional
            As in `treeattn.decode`; by default the cache's.

        Returns
        -------
        out, lse
            As `treeattn.decode`.
        """
        decoding = Decoding(
            team_of(self.comm),
            root=root,
            return_lse=return_lse,
            sink=sink,
            backend=self._backend if backend is None else backend,
            pipeline=pipeline,
            shared=(("cache length", self.length), ("tokens of each rank", tuple(self._ledger.counts))),
        )

        def arguments() -> Arguments:
            if error := self._take_pending():
                raise error
            here, shape = self._queries(q)
            placed = self._placed(shape, q_pos, causal, window)
            options = Options(scale=scale, softcap=softcap, layout=self.layout, **placed)
            return here, self._held(self._shard.k), self._held(self._shard.v), options

        return self._as_callers(decoding(arguments), q)

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
        than the new tokens, or on a card, let queries travel instead: pass all of them to `decode`.

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
        team_of(self.comm).consult("attend", same, {}, self._take_pending() or self._cannot_travel())
        return prefill(
            q,
            self._held(self._shard.k),
            self._held(self._shard.v),
            self.comm,
            algorithm=algorithm,
            return_lse=return_lse,
            sink=sink,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            q_pos=q_pos,
            kv_pos=self._shard.kv_pos(self.local_length),
            layout=self.layout,
            backend=self._backend if backend is None else backend,
        )

    def _cannot_travel(self) -> InputError | None:
        if not self._shard.memory.on_device:
            return None
        hint = "keys and values travel from host memory only; pass all ranks' queries to decode"
        return InputError.of("cache", expected="one in host memory", got="one on a card", hint=hint)

    def _queries(self, q: Any) -> tuple[Any, tuple[int, ...]]:
        """Give ``q`` where keys and values are, the caller's own array if it is there; and its shape."""
        found = to_array("q", q)
        self._check_queries(found.shape)
        self._follow(found)
        memory = self._shard.memory
        memory.check("q", found)
        return q if on_device(found) == memory.on_device else memory.bring(found), found.shape

    def _check_queries(self, shape: tuple[int, ...]) -> None:
        """Refuse queries that don't fit the cache, before its keys are blamed, which the caller has not passed."""
        if len(shape) != 4:
            return  # as the library says
        sizes = dict(zip(self.layout, shape, strict=True))
        for axis, name, wanted in (("b", "batch", self.batch), ("d", "width", self.head_dim)):
            if sizes[axis] != wanted:
                raise InputError.of("q", expected=f"the cache's {name} of {wanted}", got=sizes[axis])
        if sizes["h"] % self.kv_heads:
            expected = f"a number of heads that the cache's {self.kv_heads} divide"
            raise InputError.of("q", expected=expected, got=sizes["h"])

    def _as_callers(self, result: Any, q: Any) -> Any:
        """Give back where ``q`` was what a card has computed from a copy of it."""
        if not self._shard.memory.on_device or on_device(q):
            return result
        if isinstance(result, tuple):
            return tuple(self._as_callers(each, q) for each in result)
        return None if result is None else give(fetch(result), kind_of(q))

    def _placed(self, shape: tuple[int, ...], q_pos: Any, causal: Any, window: Any) -> dict[str, Any]:
        """Position options; none for one query on the last token, which sees every key there is."""
        causal = check_flag("causal", causal)
        tokens = shape[self.layout.index("t")] if len(shape) == 4 else 1
        if q_pos is None and tokens == 1 and window is None:
            return {}
        if q_pos is None:
            q_pos = np.arange(self.length - tokens, self.length)
        kv_pos = self._shard.kv_pos(self.local_length)
        return {"causal": causal, "window": window, "q_pos": q_pos, "kv_pos": kv_pos}

    def _held(self, rows: Any) -> Any:
        return to_bhtd(rows[:, :, : self.local_length], self.layout)

    def _follow(self, array: Any) -> None:
        """Move to where ``array`` is, while there is nothing in the cache and nobody has said where it shall be."""
        if self._follows and on_device(array) != self._shard.memory.on_device:
            self._shard = self._shard_of(home_of(array))

    def _tokens(self, k: Any, v: Any) -> tuple[Array, Array]:
        """View new keys and values as (B, Hkv, T, width), checked."""
        k, v = self._checked("k", k, self.head_dim), self._checked("v", v, self.v_head_dim)
        if v.shape[2] != k.shape[2]:
            raise InputError.of("v", expected=f"k's number of tokens of {k.shape[2]}", got=v.shape[2])
        self._follow(k)
        for name, array in (("k", k), ("v", v)):
            self._shard.memory.check(name, array)
        return k, v

    def _checked(self, name: str, value: Any, width: int) -> Array:
        array = as_array(name, value, FLOAT_DTYPES)
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

    def _keep(self, start: int, dealt: list[Segment], k: Array, v: Array, kinds: tuple[Kind, Kind]) -> None:
        """Store this rank's parts of what was dealt; ``k`` and ``v`` begin at position ``start``."""
        own = held_by(self.comm.rank, dealt)
        self._follows = self._follows and not k.shape[2]
        try:
            at = self.local_length - sum(stop - first for first, stop in own)
            self._shard.reserve(self.local_length, at, self.capacity)
            for first, stop in own:
                piece = slice(first - start, stop - start)
                at = self._shard.write(at, first, k[:, :, piece], v[:, :, piece])
            for kind, array in zip(kinds, (k, v), strict=True):
                self._shard.memory.hand_back(kind, array)
        except Exception as error:  # out of memory: the others, who have theirs, must hear of it
            if dealt:
                self._ledger.truncate(dealt[0].start)
            self._defer(error)


def _storage_dtype(dtype: Any) -> np.dtype[Any]:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if name not in FLOAT_DTYPES:
        raise InputError.of("dtype", expected=", ".join(FLOAT_DTYPES), got=repr(dtype))
    return narrow_dtype(name)
