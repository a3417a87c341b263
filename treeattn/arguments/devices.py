"""Arrays of other libraries, on a GPU or not: recognised by protocol, taken without a copy, given back as theirs."""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias

import numpy as np

from treeattn.errors import InputError, MissingDependencyError

__all__ = [
    "DeviceBytes",
    "DeviceView",
    "Kind",
    "always_on_device",
    "broadcast",
    "fetch",
    "give",
    "kind_of",
    "on_device",
    "take",
    "view_as",
]

Kind: TypeAlias = Literal["numpy", "cupy", "torch", "jax", "numba", "device"]
"""Whose array the caller passed, and wants back.

"numpy" is whatever else NumPy can read, "device" any other array on a GPU that has CuPy's attributes.
"""

CPU_DEVICES = (1, 3, 11)
"""DLPack's numbers of memory that a CPU may touch: plain, and pinned by CUDA or ROCm."""

_PACKAGES: dict[str, Kind] = {
    "numpy": "numpy",
    "cupy": "cupy",
    "torch": "torch",
    "jaxlib": "jax",
    "jax": "jax",
    "numba": "numba",
}


class DeviceView:
    """A device array seen with another dtype, shape or strides: what kernels need of one, and no more.

    Parameters
    ----------
    array : device array
        It keeps the memory.
    dtype : dtype, optional
        What its elements are; CuPy itself knows no float8.
    shape, strides : tuple of int, optional
        Strides are in bytes; one of 0 repeats an axis.
    start : int
        Bytes from the array's first element to the view's.
    """

    __slots__ = ("_array", "data", "dtype", "shape", "strides")

    def __init__(
        self, array: Any, *, dtype: Any = None, shape: Any = None, strides: Any = None, start: int = 0
    ) -> None:
        self._array, self.data = array, array.data + start if start else array.data
        self.dtype: np.dtype[Any] = np.dtype(array.dtype if dtype is None else dtype)
        self.shape: tuple[int, ...] = tuple(array.shape if shape is None else shape)
        self.strides: tuple[int, ...] = tuple(array.strides if strides is None else strides)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def first_of_last(self) -> DeviceView:
        """The first element along the last axis, which goes away."""
        return DeviceView(self, shape=self.shape[:-1], strides=self.strides[:-1])

    def __getitem__(self, at: slice | tuple[slice, ...]) -> DeviceView:
        """Give a part of the first axes; steps are 1."""
        at = at if isinstance(at, tuple) else (at,)
        cuts = [cut.indices(size) for cut, size in zip(at, self.shape, strict=False)]
        sizes = [max(stop - start, 0) for start, stop, _ in cuts]
        skipped = sum(start * stride for (start, _, _), stride in zip(cuts, self.strides, strict=False))
        return DeviceView(self, shape=(*sizes, *self.shape[len(sizes) :]), start=skipped)

    def swapaxes(self, first: int, second: int) -> DeviceView:
        """Give a view with two axes exchanged."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        shape, strides = ([sizes[axis] for axis in order] for sizes in (self.shape, self.strides))
        return DeviceView(self, shape=shape, strides=strides)

    def get(self) -> Any:
        """Copy a view of the whole array to the host."""
        assert (self.shape, self.strides) == (self._array.shape, self._array.strides), "a view of a part"
        return self._array.get().view(self.dtype)


class DeviceBytes:
    """A run of bytes in a device array, cut like a NumPy array and sent like one by an MPI that takes GPU memory.

    Parameters
    ----------
    array : device array
        It keeps the memory; its ``data`` counts in bytes.
    start, size : int
    """

    __slots__ = ("_start", "array", "data", "size")

    def __init__(self, array: Any, start: int, size: int) -> None:
        self.array, self._start, self.data, self.size = array, start, array.data + start, size

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size

    def __getitem__(self, at: slice) -> DeviceBytes:
        start, end, _ = at.indices(self.size)
        return DeviceBytes(self.array, self._start + start, end - start)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.data.ptr, False), "version": 3}


def view_as(array: Any, dtype: np.dtype[Any]) -> Any:
    """View raw storage, wherever it is, as ``dtype``."""
    return array.view(dtype) if isinstance(array, np.ndarray) else DeviceView(array, dtype=dtype)


def broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    """View ``array``, wherever it is, with ``shape``; ValueError where it doesn't broadcast."""
    if isinstance(array, np.ndarray):
        return np.broadcast_to(array, shape)
    if np.broadcast_shapes(array.shape, shape) != shape:
        raise ValueError(f"shape {array.shape} does not broadcast to {shape}")
    missing = len(shape) - len(array.shape)
    strides = [0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return DeviceView(array, shape=shape, strides=[0] * missing + strides)


def on_device(value: Any) -> bool:
    """Whether ``value`` is an array in memory that the CPU must not touch."""
    if isinstance(value, np.ndarray):
        return False
    if always_on_device(value):
        return True  # CuPy would ask the driver, each time
    where = getattr(value, "__dlpack_device__", None)
    if where is None:
        return hasattr(value, "__cuda_array_interface__")
    try:
        return int(where()[0]) not in CPU_DEVICES
    except (TypeError, ValueError, BufferError, RuntimeError):  # nowhere, as PyTorch's "meta" is: NumPy will say so
        return False


def always_on_device(value: Any) -> bool:
    """Whether ``value`` is of a type that has no arrays in host memory, and that kernels take as it is."""
    return isinstance(value, DeviceView) or type(value).__module__.partition(".")[0] == "cupy"


def kind_of(value: Any) -> Kind:
    """Tell whose array ``value`` is, wherever it is."""
    if isinstance(value, np.ndarray):
        return "numpy"
    packages = (each.__module__.partition(".")[0] for each in type(value).__mro__)
    found: Kind = next((_PACKAGES[package] for package in packages if package in _PACKAGES), "device")
    return found if found in ("torch", "jax") or on_device(value) else "numpy"


def take(name: str, value: Any) -> Any:
    """View a device array as CuPy does, without a copy.

    Raises
    ------
    InputError
        It can't be viewed; the message begins with ``name``.
    MissingDependencyError
        CuPy is not installed.
    """
    if kind_of(value) in ("cupy", "device"):
        return value
    cupy = _module("cupy", "arrays on a GPU need CuPy: pip install 'treeattn[cuda12]', [cuda13] or [rocm]")
    try:
        return cupy.from_dlpack(value) if hasattr(value, "__dlpack__") else cupy.asarray(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InputError.of(name, expected="an array", got=f"{type(value).__name__} ({error})") from None


def fetch(array: Any) -> Any:
    """Give ``array``, NumPy's or CuPy's, as NumPy's: copied to the host where it is not there."""
    return array if isinstance(array, np.ndarray) else array.get()


def give(array: Any, kind: Kind) -> Any:
    """Give ``array``, NumPy's or CuPy's, as one of ``kind`` in the same memory, and itself where ``kind`` is neither's.

    JAX copies what is in host memory and does not begin on a cache line, or is bfloat16.
    """
    if kind == "torch":
        return _as_torch(array)
    if kind == "jax":
        return _as_jax(array)
    return _module("numba.cuda").as_cuda_array(array) if kind == "numba" else array


def _as_torch(array: Any) -> Any:
    torch = _module("torch")
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":  # which NumPy does not export
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _as_jax(array: Any) -> Any:
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":  # as above
        return _module("jax.numpy").asarray(array)
    return _module("jax.dlpack").from_dlpack(array)


def _module(name: str, missing: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(missing or f"{name} is not installed") from error
