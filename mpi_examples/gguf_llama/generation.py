"""Prefill over all ranks, then token after token, with one sharded key/value cache per layer."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gguf_llama.config import Config
from gguf_llama.errors import LlamaError
from gguf_llama.model import Llama
from gguf_llama.processes import Processes
from treeattn import ShardedKVCache, TreeComm

__all__ = ["Generation", "ShardedAttention"]

Array: TypeAlias = npt.NDArray[np.float32]


class ShardedAttention:
    """Attention of every layer, over caches that are split over the ranks of ``tree``.

    Parameters
    ----------
    config : Config
    tree : TreeComm
    processes : Processes
        The same ranks.
    capacity : int
        Tokens that all ranks together make room for.
    """

    def __init__(self, config: Config, tree: TreeComm, processes: Processes, capacity: int) -> None:
        self.tree, self.processes = tree, processes
        self._caches = [
            ShardedKVCache(
                tree,
                batch=1,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                v_head_dim=config.v_head_dim,
                capacity=capacity,
            )
            for _ in range(config.layers)
        ]

    @property
    def length(self) -> int:
        """Tokens in the cache, on all ranks together."""
        return self._caches[0].length

    @property
    def local_length(self) -> int:
        """Tokens whose keys and values this rank holds."""
        return self._caches[0].local_length

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that this rank holds."""
        return sum(cache.nbytes for cache in self._caches)

    def prefill(self, bounds: Sequence[int]) -> Callable[[int, Array, Array, Array], Array]:
        """Attend for a chunk of tokens of which rank r computes those from ``bounds[r]`` up to ``bounds[r + 1]``.

        In the first chunk, keys and values travel once among the ranks, and every rank attends for its own tokens.
        Later ones stand before a cache that is longer than they are: there keys and values stay on the rank that
        computed them, and only the queries, and what the ranks saw for them, travel.
        """
        counts = np.diff(bounds).tolist()
        mine = slice(bounds[self.tree.rank], bounds[self.tree.rank + 1])
        start = self.length

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            self._caches[layer].prefill(k, v)
            if start == 0:
                own: Array = self._caches[layer].attend(
                    q, q_pos=np.arange(mine.start, mine.stop), algorithm="dist_flash"
                )
                return own
            rows = self.processes.gather_rows(np.ascontiguousarray(_swapped(q)), counts)
            out: Array = self._caches[layer].decode(_swapped(rows))
            return out[:, :, mine]

        return attend

    def step(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Attend for tokens that every rank computes; each rank keeps its share of their keys and values."""
        self._caches[layer].append(k, v)
        out: Array = self._caches[layer].decode(q)
        return out


class Generation:
    """Greedy generation by all ranks together; every method is collective.

    Parameters
    ----------
    model : Llama
    attention : ShardedAttention
    """

    def __init__(self, model: Llama, attention: ShardedAttention) -> None:
        self.model, self.attention = model, attention
        self._tree = attention.tree
        self.prefill_seconds = self.decode_seconds = 0.0

    def prefill(self, prompt: npt.NDArray[np.int64], chunk: int, on_progress: Callable[[int], None]) -> Array:
        """Read the prompt, ``chunk`` tokens at a time over all ranks.

        Returns
        -------
        array (vocab,)
            Logits of the first new token, on every rank.
        """
        started = time.perf_counter()
        for start in range(0, len(prompt), chunk):
            x = self._prefill_chunk(prompt[start : start + chunk], start)
            on_progress(self.attention.length)
        # The last rank always has a chunk's last token.
        last = self._tree.bcast(x[-1] if self._tree.rank == self._tree.size - 1 else None, root=self._tree.size - 1)
        logits: Array = self.model.logits(last)
        self.prefill_seconds += time.perf_counter() - started
        return logits

    def tokens(self, logits: Array, limit: int, ends: Sequence[int]) -> Iterator[int]:
        """Give new tokens one by one, the likeliest each time, up to one of ``ends`` (not given) or ``limit`` tokens.

        Parameters
        ----------
        logits : array (vocab,)
            From `prefill`.

        Raises
        ------
        LlamaError
            On every rank, where the first logits are no numbers.
        """
        started = time.perf_counter()
        choose = self._choice(logits)
        token = choose(logits)
        for count in range(1, limit + 1):
            if token in ends:
                break
            yield token
            if count < limit:
                token = choose(self._step(token))
            self.decode_seconds = time.perf_counter() - started

    def _prefill_chunk(self, ids: npt.NDArray[np.int64], start: int) -> Array:
        size, rank = self._tree.size, self._tree.rank
        bounds = [len(ids) * r // size for r in range(size + 1)]
        attend = self.attention.prefill(bounds)
        return self.model.forward(ids[bounds[rank] : bounds[rank + 1]], start + bounds[rank], attend)

    def _step(self, token: int) -> Array:
        x = self.model.forward(np.array([token]), self.attention.length, self.attention.step)
        return self.model.logits(x[0])

    def _choice(self, logits: Array) -> Callable[[Array], int]:
        """Let each rank choose by itself where all compute the same bits, as ranks on equal processors do.

        Where they don't (another processor has other matrix kernels), a near tie could send ranks apart: rank 0
        chooses for all there.
        """
        told = np.array([[zlib.crc32(logits.tobytes()), np.isfinite(logits).all()]])
        checksums, finite = self.attention.processes.gather_rows(told, [1] * self._tree.size).T
        if not finite.all():
            raise LlamaError("the logits are not numbers: the model's file may be damaged")
        if (checksums == checksums[0]).all():
            return lambda logits: int(logits.argmax())
        return lambda logits: int(self._tree.bcast(np.array([logits.argmax()]), root=0)[0])


def _swapped(array: Array) -> Array:
    """Between (1, H, T, D) and (T, H, D)."""
    swapped: Array = array[0].transpose(1, 0, 2) if array.ndim == 4 else array.transpose(1, 0, 2)[None]
    return swapped
