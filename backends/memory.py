"""Memory in which a cache keeps keys and values: where a backend's kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn import storage
from treeattn.arguments.arrays import cast
from treeattn.arguments.devices import Kind, on_device
from treeattn.errors import InputError

__all__ = ["HostMemory", "KVMemory"]

Array: TypeAlias = npt.NDArray[Any]


class KVMemory(Protocol):
    """What `treeattn.ShardedKVCache` asks of a backend.

    Rows are arrays (batch, KV heads, tokens, width) of its own making, head after head, which the backend's kernels
    take as ``k`` and ``v``, whole or cut along the tokens.
    """

    @property
    def on_device(self) -> bool:
        """Whether rows are where the CPU must not touch them."""

    @property
    def lazy(self) -> bool:
        """Whether memory costs nothing before it is written to, so that a cache takes all of its share at once."""

    def empty(self, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> Any:
        """Allocate rows, not initialised; MemoryError, in one sentence, where there is no room.

        ``dtype`` is one of the backend's ``capabilities.dtypes``, or int64 with a width of 1, for positions.
        """

    def write(self, rows: Sequence[Any], at: int, tokens: Sequence[Any]) -> None:
        """Copy one or two arrays of tokens to their rows from index ``at`` on, converted as NumPy does.

        Tokens have any strides and any float type, or are rows. They may be in host memory or wherever `check` lets
        them be; what is here is not copied over the host. On return NumPy's may be written to.
        """

    def check(self, name: str, array: Any) -> None:
        """Raise an InputError that begins with ``name`` where this memory can't be written from ``array``."""

    def bring(self, array: Array) -> Any:
        """Copy an array of the host to where the backend's kernels read it."""

    def hand_back(self, kind: Kind, array: Any) -> None:
        """Let the library of ``kind``, whose ``array`` was written from, do with that memory what it likes.

        Its streams are its own: whatever it starts there next must come after the reading, or wait for it.
        """


class HostMemory:
    """`KVMemory` for kernels that read NumPy arrays."""

    on_device = False
    lazy = True

    def empty(self, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> Array:
        """Allocate rows; each head's begin on a cache line."""
        batch, heads, tokens, width = shape
        room = storage.whole_lines(tokens, width * dtype.itemsize)
        return storage.empty((batch, heads, room, width), dtype)[:, :, :tokens]

    def write(self, rows: Sequence[Any], at: int, tokens: Sequence[Any]) -> None:
        """Copy; a value out of range becomes an infinity, silently."""
        for room, new in zip(rows, tokens, strict=True):
            room[:, :, at : at + new.shape[2]] = cast(new, room.dtype)

    def check(self, name: str, array: Any) -> None:
        """Refuse arrays of a GPU: nothing is copied from there behind the caller's back."""
        if on_device(array):
            hint = "make the cache with backend='auto' to keep it on the card"
            raise InputError.of(
                name, expected="an array in host memory, where this cache is", got="one on a GPU", hint=hint
            )

    def bring(self, array: Array) -> Array:
        """Give it as it is."""
        return array

    def hand_back(self, kind: Kind, array: Any) -> None:
        """Nothing is read later."""
