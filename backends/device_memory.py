"""Keys and values in a card's memory: written by one kernel, from there or from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treeattn.arguments.devices import DeviceView, Kind, give, on_device
from treeattn.backends.runtime import Kernel, Runtime
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.call import pack_store
from treeattn.storage import whole_lines

if TYPE_CHECKING:
    from treeattn.backends.device import DeviceBackend

__all__ = ["DeviceMemory"]

STAGED_BYTES = 2**26
"""Host arrays go to the card in pieces of at most so many bytes: a prompt has room there once, in the cache."""

RAW = {2: "int16", 4: "float32", 8: "int64"}
"""What CuPy allocates for elements of so many bytes, whatever they hold."""


class DeviceMemory:
    """`treeattn.backends.memory.KVMemory` on one card. Not yet run on a card.

    Parameters
    ----------
    backend : DeviceBackend
        Whose runtime is used; it is asked for at the first operation and not before.
    """

    on_device = True
    lazy = False

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._reading: list[tuple[Callable[[], bool], Any]] = []

    @property
    def _runtime(self) -> Runtime:
        return self._backend.runtime

    @cached_property
    def _flag(self) -> Any:
        return self._runtime.zeros((1,), "float32")

    def empty(self, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> DeviceView:
        """Allocate rows; each head's begin on a cache line, and so where 16 bytes may be read at a time."""
        batch, heads, tokens, width = shape
        room = whole_lines(tokens, width * dtype.itemsize)
        with self._one_sentence(batch * heads * room * width * dtype.itemsize):
            raw = self._runtime.empty((batch, heads, room, width), RAW[dtype.itemsize])
        return DeviceView(raw, dtype=dtype)[:, :, :tokens]

    def write(self, rows: Sequence[Any], at: int, tokens: Sequence[Any]) -> None:
        """Copy in one launch what is on the card; what is on the host goes there first, once."""
        for piece in _pieces(tokens):
            there = [each[:, :, piece] for each in tokens]
            self._store(rows, at + piece.start, [each if on_device(each) else self.bring(each) for each in there])

    def check(self, name: str, array: Any) -> None:
        """Refuse arrays of another card."""
        if on_device(array):
            self._backend.check_card(name, array)

    def bring(self, array: npt.NDArray[Any]) -> DeviceView:
        """Copy to the card."""
        with self._one_sentence(array.nbytes):
            return DeviceView(self._backend.upload(array), dtype=array.dtype)

    def hand_back(self, kind: Kind, array: Any) -> None:
        """Order PyTorch's stream behind this one; hold what JAX would give to others, until it has been read."""
        self._reading = [(done, held) for done, held in self._reading if not done()]
        if kind == "torch":
            give(self._flag, kind)  # which orders its stream, as DLPack has it, whatever array is given
        elif kind == "jax":
            self._reading.append((self._runtime.mark(), array))

    def _store(self, rows: Sequence[Any], at: int, tokens: Sequence[Any]) -> None:
        cut = [room[:, :, at : at + new.shape[2]] for room, new in zip(rows, tokens, strict=True)]
        pairs = [(new, part) for new, part in zip(tokens, cut, strict=True) if 0 not in new.shape]
        if pairs:
            waves = source.THREADS // self._runtime.target.wave
            copied = sum(new.shape[0] * new.shape[1] * new.shape[2] for new, _ in pairs)
            self._kernel.launch(-(-copied // waves), pack_store(pairs))

    @cached_property
    def _kernel(self) -> Kernel:
        defines = source.store_defines(self._runtime.target)
        return self._backend.compiled(source.text("store.cu"), "treeattn_store", defines, contract=True)

    @contextmanager
    def _one_sentence(self, size: int) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            raise MemoryError(f"card {self._runtime.number} has no room for {size:,} bytes more: {error}") from error


def _pieces(tokens: Sequence[Any]) -> Iterator[slice]:
    """Cut tokens so that what comes from the host stays small."""
    count = tokens[0].shape[2]
    coming = sum(each.nbytes for each in tokens if not on_device(each))
    step = max(1, count * STAGED_BYTES // coming) if coming else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
