"""The tokens of a cache: which rank holds which, and those of this rank, in memory that is theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import to_array
from treeattn.arguments.checks import check_flag
from treeattn.arguments.devices import Kind, fetch, give, kind_of, on_device
from treeattn.arguments.digests import CHECK_VARIABLE, checks
from treeattn.arguments.inputs import to_bhtd
from treeattn.backends.base import Backend
from treeattn.backends.registry import DEFAULT, find, home_of, load
from treeattn.caching.appended import Appended
from treeattn.caching.cache_spec import CacheSpec
from treeattn.caching.ledger import Deal, Ledger, held_by
from treeattn.caching.shard import Shard
from treeattn.errors import InputError

__all__ = ["Stock", "Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """New keys and values as (B, Hkv, T, width), checked, and whose arrays they are."""

    k: Any
    v: Any
    kinds: tuple[Kind, Kind]

    @property
    def count(self) -> int:
        """Number of tokens."""
        return int(self.k.shape[2])


class Stock:
    """A ledger, and the shard that is this rank's part of it.

    Parameters
    ----------
    spec : CacheSpec
    size, rank : int
    backend : str, Backend or None
        In whose memory the shard is; None is the memory from which the first tokens come.
    """

    def __init__(self, spec: CacheSpec, size: int, rank: int, backend: Any) -> None:
        self.spec, self._size, self._rank = spec, size, rank
        self.ledger, self._appended = Ledger(size, spec.block_size), Appended()
        self.backend = None if backend is None else find(backend)
        self._follows = backend is None
        self.shard = self._shard_of(self.backend or load(DEFAULT))

    def _shard_of(self, backend: Backend) -> Shard:
        """Make an empty shard in a backend's memory."""
        spec, known = self.spec, backend.capabilities.dtypes
        if spec.dtype.name not in known:
            expected = f"{', '.join(known)}, which backend {backend.name!r} computes with"
            raise InputError.of("dtype", expected=expected, got=repr(spec.dtype.name))
        return Shard(
            backend.memory,
            batch=spec.batch,
            heads=spec.kv_heads,
            widths=spec.widths,
            dtype=spec.dtype,
            share=spec.share(self._size),
        )

    @property
    def held(self) -> int:
        """Tokens of this rank."""
        return self.ledger.counts[self._rank]

    def positions(self) -> npt.NDArray[np.int64]:
        """Copy the positions of this rank's tokens, ascending."""
        return self.shard.positions[: self.held].astype(np.int64)

    @property
    def on_device(self) -> bool:
        """Whether they are where the CPU must not touch them."""
        return self.shard.memory.on_device

    @property
    def agreed(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same on every rank for a call on all tokens to make sense."""
        counts = ("cache length", self.ledger.length), ("tokens of each rank", self.ledger.counts)
        return (*counts, *self.agreed_tokens)

    @property
    def agreed_tokens(self) -> tuple[tuple[str, Any], ...]:
        """What must be the same of tokens that all ranks have appended, where they check that."""
        if not self._appended.seen:
            return ()
        return (CHECK_VARIABLE, 1), ("k and v of append", self._appended.upto(self.ledger.length))

    def tokens(self, k: Any, v: Any) -> Tokens:
        """Check new keys and values."""
        kinds = kind_of(k), kind_of(v)
        k, v = self.spec.tokens(k, v)
        self._follow(k)
        for name, array in (("k", k), ("v", v)):
            self.shard.memory.check(name, array)
        return Tokens(k, v, kinds)

    def append(self, new: Tokens) -> None:
        """Deal tokens that all ranks have, and keep this rank's."""
        length = self.ledger.length
        self.spec.check_room(length, new.count)
        self._keep(length, self.ledger.deal(new.count), new)
        if self._size > 1 and checks():
            self._appended.add(length, *(fetch(array).astype(self.spec.dtype) for array in (new.k, new.v)))

    def prefill(self, new: Tokens, lengths: Sequence[int]) -> None:
        """Keep this rank's piece of tokens of which each rank has so many."""
        start = self.ledger.length + sum(lengths[: self._rank])
        self._keep(start, self.ledger.deal_pieces(lengths), new)

    def _keep(self, start: int, deal: Deal, new: Tokens) -> None:
        """Store this rank's parts of what was dealt, of which ``new`` begins at position ``start``; then it counts."""
        self._follows = self._follows and not new.count
        self._appended.cut(self.ledger.length)
        self._write(start, held_by(self._rank, deal.parts), new)
        for kind, array in zip(new.kinds, (new.k, new.v), strict=True):
            self.shard.memory.hand_back(kind, array)
        self.ledger.take(deal)

    def _write(self, start: int, own: list[tuple[int, int]], new: Tokens) -> None:
        at = self.held
        self.shard.reserve(at + sum(stop - first for first, stop in own), at, self.spec.capacity)
        for first, stop in own:
            piece = slice(first - start, stop - start)
            at = self.shard.write(at, first, new.k[:, :, piece], new.v[:, :, piece])

    def _follow(self, array: Any) -> None:
        """Move to where ``array`` is, while there is nothing in the cache and nobody has said where it shall be."""
        if self._follows and on_device(array) != self.on_device:
            self.shard = self._shard_of(home_of(array))

    def keys_and_values(self) -> tuple[Any, Any]:
        """View this rank's, in the caller's layout."""
        shard, held, layout = self.shard, self.held, self.spec.layout
        return to_bhtd(shard.k[:, :, :held], layout), to_bhtd(shard.v[:, :, :held], layout)

    def cannot_travel(self) -> InputError | None:
        """Say why keys and values can't go to other ranks, if they can't."""
        if not self.on_device:
            return None
        hint = "keys and values travel from host memory only; pass all ranks' queries to decode"
        return InputError.of("cache", expected="one in host memory", got="one on a card", hint=hint)

    def kv_pos(self) -> Any:
        """Give their positions, as kernels take them."""
        return self.shard.kv_pos(self.held)

    def queries(self, q: Any) -> tuple[Any, int]:
        """Give ``q`` where keys and values are, the caller's own array if it is there; and how many queries it has."""
        found = to_array("q", q)
        count = self.spec.query_tokens(found.shape)
        self._follow(found)
        memory = self.shard.memory
        memory.check("q", found)
        return q if on_device(found) == memory.on_device else memory.bring(found), count

    def placed(self, count: int, q_pos: Any, causal: Any, window: Any) -> dict[str, Any]:
        """Position options; none for one query on the last token, which sees every key there is."""
        causal = check_flag("causal", causal)
        if q_pos is None and count == 1 and window is None:
            return {}
        if q_pos is None:
            q_pos = np.arange(self.ledger.length - count, self.ledger.length)
        return {"causal": causal, "window": window, "q_pos": q_pos, "kv_pos": self.kv_pos()}

    def as_callers(self, result: Any, q: Any) -> Any:
        """Give back where ``q`` was what a card has computed from a copy of it."""
        if not self.on_device or on_device(q):
            return result
        if isinstance(result, tuple):
            return tuple(self.as_callers(each, q) for each in result)
        return None if result is None else give(fetch(result), kind_of(q))
