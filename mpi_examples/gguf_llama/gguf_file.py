"""A GGUF file: its metadata by key, and its tensors as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gguf_llama.errors import LlamaError

__all__ = ["GGUFFile"]

Array: TypeAlias = npt.NDArray[Any]

_REQUIRED = object()
_ROWS = 4096  # dequantised at a time: temporaries stay small beside the result


class GGUFFile:
    """A GGUF file, opened for reading.

    Parameters
    ----------
    path : Path

    Raises
    ------
    LlamaError
        There is no such file, it is not GGUF, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_magic(path)
        from gguf import dequantize  # only the process that unpacks a file needs the package

        self._dequantize = dequantize
        try:
            reader = _reader(path)
        except Exception as error:  # damage surfaces as whatever the reader tripped over
            raise LlamaError(f"{path} is a damaged GGUF file: {error}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """Give the metadata under ``key``, which must be of a ``kind``; without a default it must be there."""
        value = self._value(key) if key in self._fields else default
        if value is _REQUIRED:
            raise LlamaError(f"{self.path} has no {key} in its metadata")
        if key in self._fields and not isinstance(value, kind):
            raise LlamaError(f"{self.path}: {key}: expected {_names(kind)}, got {value!r:.80}")
        return value

    def get_all(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> list[Any]:
        """Give the array under ``key``, whose elements must be of a ``kind``."""
        values: list[Any] = self.get(key, list, default)
        if wrong := [value for value in values if not isinstance(value, kind)]:
            raise LlamaError(f"{self.path}: {key}: expected an array of {_names(kind)}, got {wrong[0]!r:.80} in it")
        return values

    def _value(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise LlamaError(f"{self.path}: {key}: expected text in UTF-8, got {error.object!r:.80}") from None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a file in which no tensor ``name`` of this shape is."""
        if name not in self._tensors:
            raise LlamaError(f"{self.path} has no tensor {name}")
        found = tuple(int(n) for n in reversed(self._tensors[name].shape))
        if found != shape:
            raise LlamaError(f"{self.path}: tensor {name} has shape {found} where the metadata says {shape}")

    def read(self, name: str, out: Array) -> None:
        """Dequantise the tensor ``name`` into ``out``, float32 (rows, columns) or (columns,)."""
        self.check(name, out.shape)
        tensor = self._tensors[name]
        for start in range(0, len(out), _ROWS):
            rows = slice(start, start + _ROWS)
            out[rows] = self._plain(name, tensor.data[rows], tensor.tensor_type)

    def _plain(self, name: str, data: Array, kind: Any) -> Array:
        try:
            return self._dequantize(data, kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise LlamaError(f"{self.path}: tensor {name} is {kind.name}, which can't be dequantised") from error


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LlamaError(f"{path} can't be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise LlamaError(f"{path} is not a GGUF file: it begins with {magic!r}")


def _reader(path: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """A reader that does not go on behind the file's end, where it would find nothing as often as asked."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Array:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)} and should go on to {end}")
            found: Array = super()._get(offset, dtype, count, *order, **named)
            return found

    return Reader(path)


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
