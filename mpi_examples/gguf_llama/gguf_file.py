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
        from gguf import GGUFReader, dequantize  # only the process that unpacks a file needs the package

        self._dequantize = dequantize
        try:
            reader = GGUFReader(path)
        except Exception as error:  # the reader checks little: damage surfaces as whatever it tripped over
            raise LlamaError(f"{path} is a damaged GGUF file: {error}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Give the metadata under ``key``; without a default it must be there."""
        if key in self._fields:
            return self._fields[key].contents()
        if default is _REQUIRED:
            raise LlamaError(f"{self.path} has no {key} in its metadata")
        return default

    def read(self, name: str, out: Array) -> None:
        """Dequantise the tensor ``name`` into ``out``, float32 (rows, columns) or (columns,)."""
        if name not in self._tensors:
            raise LlamaError(f"{self.path} has no tensor {name}")
        tensor = self._tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if shape != out.shape:
            raise LlamaError(f"{self.path}: tensor {name} has shape {shape} where the metadata says {out.shape}")
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
