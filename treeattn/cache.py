"""A key/value cache that grows over the ranks of a communicator, each rank holding its share of the positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from treeattn.arguments.checks import check_whole, refuse_copies
from treeattn.arguments.spec import Options
from treeattn.caching.cache_spec import CacheSpec
from treeattn.caching.deferral import Deferral
from treeattn.caching.stock import Stock
from treeattn.caching.turns import Turns
from treeattn.comm import TreeComm
from treeattn.distributed import Arguments, Decoding
from treeattn.prompt import prefill
from treeattn.wrapping import as_tree_comm, team_of

__all__ = ["ShardedKVCache"]


class ShardedKVCache:
    """Keys and values of one attention layer, sharded by position over the ranks of a communicator.

    Every rank makes the same calls in the same order; making one is collective too. `append` and `truncate` send
    nothing; what goes wrong there on one rank of several is reported by the next `decode` or `prefill`, on every rank.
    Threads may decode at once on one process; what one of them changes while another uses the cache is such an error.

    Parameters
    ----------
    comm : TreeComm, mpi4py communicator or None
        As in `treeattn.decode`.
    batch, kv_heads, head_dim : int
        B, Hkv and D.
    v_head_dim : int, optional
        Dv; D by default.
    dtype : str or dtype
        Storage type: float32, float64, float16 or bfloat16, by name or as NumPy, ml_dtypes, PyTorch or JAX write it.
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
    >>> np.allclose(cache.decode(q), treeattn.attention(q, k, v))
    True
    >>> cache.truncate(4)
    >>> cache.prefill(k[:, :, 4:], v[:, :, 4:])  # of which each rank passes its own piece
    >>> np.allclose(cache.attend(q, q_pos=[5]), cache.decode(q))
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
        dtype: Any = "float32",
        block_size: int = 16,
        capacity: int,
        layout: str = "bhtd",
        backend: Any = None,
    ) -> None:
        self.comm: TreeComm = as_tree_comm(comm)
        self._team = team_of(self.comm)
        self._team.kept = True
        self._deferred, self._turns = Deferral(alone=self.comm.size == 1), Turns("cache")
        sizes = {"batch": batch, "kv_heads": kv_heads, "block_size": block_size, "capacity": capacity}
        agreed, error = None, None
        try:
            spec = CacheSpec.read(**sizes, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, layout=layout)
            self._stock = Stock(spec, self.comm.size, self.comm.rank, backend)
            agreed = spec.agreed
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = wrong
        self._team.consult("ShardedKVCache", agreed or (), {}, error)
        self.batch, self.kv_heads, self.capacity = spec.batch, spec.kv_heads, spec.capacity
        self.head_dim, self.v_head_dim = spec.widths
        self.dtype, self.layout, self.block_size = spec.dtype, spec.layout, spec.block_size

    @property
    def length(self) -> int:
        """Tokens on all ranks together; the next token's position."""
        return self._stock.ledger.length

    @property
    def local_length(self) -> int:
        """Tokens that this rank holds."""
        return self._stock.held

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Positions of the tokens that this rank holds, ascending, int64 (local_length,)."""
        return self._stock.positions()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's keys and values, without room to grow."""
        return self.batch * self.kv_heads * self.local_length * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    def __reduce__(self) -> NoReturn:
        refuse_copies(self)

    def __repr__(self) -> str:
        names = ("batch", "kv_heads", "head_dim", "v_head_dim")
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        here = f"{self.local_length} here on rank {self.comm.rank} of {self.comm.size}"
        held = f"dtype={self.dtype.name!r}, length={self.length} of {self.capacity}, {here}"
        return f"ShardedKVCache({sizes}, {held}{', on its card' * self._stock.on_device})"

    def append(self, k: Any, v: Any) -> None:
        """Add the next tokens, the same on every rank; each rank keeps its share of them.

        Parameters
        ----------
        k, v : array (B, Hkv, T, D) and (B, Hkv, T, Dv), any float dtype

        Raises
        ------
        InputError, MemoryError
            At once on one rank; on several, from the next `decode` or `prefill` on all of them, since this call
            sends nothing. Cut every rank back to one length with `truncate` to go on after it. Tokens that differ are
            such an error where ``TREEATTN_CHECK=1`` is in the environment.
        """
        self._turns.change(partial(self._try, lambda: self._stock.append(self._stock.tokens(k, v))))

    def _try(self, change: Callable[[], None], refusal: Exception | None) -> None:
        """Change something on this rank, of which others hear later what goes wrong."""
        try:
            if refusal is not None:
                raise refusal
            change()
        except Exception as error:
            self._deferred.put(error)

    def prefill(self, k: Any, v: Any) -> None:
        """Add the next tokens, of which each rank passes, and keeps, its own consecutive piece; collective.

        Nothing moves but the lengths. The pieces follow each other in rank order.

        Parameters
        ----------
        k, v : array (B, Hkv, T, D) and (B, Hkv, T, Dv), any float dtype
            This rank's piece; T may differ from rank to rank and may be 0.

        Raises
        ------
        InputError
            On every rank, if any rank's piece is wrong or all together don't fit; nothing is added then.
        MemoryError
            There is no room for this rank's piece: raised as `append` does.
        """
        self._turns.change(partial(self._prefill, k, v))

    def _prefill(self, k: Any, v: Any, refusal: Exception | None) -> None:
        error, new = refusal or self._deferred.take(), None
        try:
            new = self._stock.tokens(k, v)
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = error or wrong
        tokens = 0 if new is None else new.count
        fields = ("cache length", self.length), *self._stock.agreed_tokens
        lengths = [each["tokens"] for each in self._team.consult("prefill", fields, {"tokens": tokens}, error)]
        assert new is not None, "whose error was raised"
        self._stock.spec.check_room(self.length, sum(lengths))
        try:
            self._stock.prefill(new, lengths)
        except Exception as wrong:  # out of memory: the others, who have theirs, must hear of it
            self._deferred.put(wrong)

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on, on every rank.

        Parameters
        ----------
        length : int
            From 0 to the cache's own `length`; the same on every rank.
        """
        ledger = self._stock.ledger
        self._turns.change(partial(self._try, lambda: ledger.truncate(check_whole("length", length, 0, self.length))))

    def decode(
        self,
        q: Any,
        *,
        mask: Any = None,
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
        mask : bool or float array, optional
            As in `treeattn.decode`: its last axis is this rank's tokens, which stand at `positions`. Rows of a batch
            with prompts of unlike lengths hide their padding by it.
        causal, window, softcap, scale, sink, root, return_lse, pipeline
            As in `treeattn.decode`, except that ``causal`` is True unless said otherwise.
        backend : str or Backend, optional
            As in `treeattn.decode`; by default the cache's.

        Returns
        -------
        out, lse
            As `treeattn.decode`.
        """
        stock = self._stock
        decoding = Decoding(
            self._team,
            root=root,
            return_lse=return_lse,
            sink=sink,
            backend=stock.backend if backend is None else backend,
            pipeline=pipeline,
            shared=stock.agreed,
        )

        def arguments(refusal: Exception | None) -> Arguments:
            if error := refusal or self._deferred.take():
                raise error
            here, count = stock.queries(q)
            placed = stock.placed(count, q_pos, causal, window)
            options = Options(scale=scale, mask=mask, softcap=softcap, layout=self.layout, **placed)
            return here, *stock.keys_and_values(), options

        return self._turns.read(lambda refusal: stock.as_callers(decoding(partial(arguments, refusal)), q))

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
        return self._turns.read(
            partial(
                self._attend,
                q,
                algorithm=algorithm,
                return_lse=return_lse,
                sink=sink,
                scale=scale,
                causal=causal,
                window=window,
                softcap=softcap,
                q_pos=q_pos,
                backend=self._stock.backend if backend is None else backend,
            )
        )

    def _attend(self, q: Any, refusal: Exception | None, **options: Any) -> Any:
        stock = self._stock
        error = refusal or self._deferred.take() or stock.cannot_travel()
        self._team.consult("attend", stock.agreed, {}, error)
        k, v = stock.keys_and_values()
        return prefill(q, k, v, self.comm, kv_pos=stock.kv_pos(), layout=self.layout, **options)
