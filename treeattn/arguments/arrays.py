"""What counts as an array here: names of dtypes, raw storage, and foreign arrays taken without a copy."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.devices import DeviceView, on_device, take, view_as
from treeattn.errors import InputError, MissingDependencyError

__all__ = [
    "FLOAT_DTYPES",
    "KV_DTYPES",
    "as_array",
    "cast",
    "dtype_name",
    "known_dtype",
    "narrow_dtype",
    "reinterpret",
    "to_array",
    "to_numpy",
]

Array: TypeAlias = npt.NDArray[Any]

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
"""What q may be."""

KV_DTYPES = (*FLOAT_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
"""What stored K and V may be."""

_NUMPY_NAME = re.compile("[<>=|]?[b-z][a-z]*[0-9]*")
"""Names and codes of NumPy's dtypes of numbers; it warns of some others."""

_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def dtype_name(array: Array) -> str:
    """Name of an array's dtype, the same for NumPy's own and for ``ml_dtypes``."""
    return _name(array.dtype)


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # NumPy makes it anew each time, which takes longer than the rest of a validation


def known_dtype(name: str, value: Any, known: Sequence[str], *, also: str = "") -> str:
    """Name the dtype that ``value`` stands for, if it is one of ``known``; an InputError about ``name`` otherwise.

    Parameters
    ----------
    name : str
        The argument's.
    value : str, dtype or type
        A name, or a dtype or type of NumPy, ml_dtypes, PyTorch or JAX.
    known : sequence of str
    also : str
        What else the argument may be, for the error.

    Examples
    --------
    >>> import numpy as np
    >>> [known_dtype("dtype", each, FLOAT_DTYPES) for each in ("bfloat16", np.float16, np.dtype("f4"), float)]
    ['bfloat16', 'float16', 'float32', 'float64']
    """
    found = _spelled(value)
    if found in known:
        return found
    raise InputError.of(name, expected=", ".join((also, *known) if also else known), got=repr(value))


def _spelled(value: Any) -> str:
    """Give NumPy's name for a dtype, however it is written; "" for what is none."""
    kind = type(value)
    if (kind.__module__, kind.__qualname__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        return _numpy_name(value) if _NUMPY_NAME.fullmatch(value) else value
    if not isinstance(value, (type, np.dtype)):
        return ""
    carried = getattr(value, "dtype", None)  # by JAX's types
    return _numpy_name(carried if isinstance(carried, np.dtype) else value)


def _numpy_name(value: Any) -> str:
    try:
        return str(np.dtype(value).name)
    except (TypeError, ValueError):  # what ml_dtypes adds, or nothing
        return str(value)


def narrow_dtype(name: str) -> np.dtype[Any]:
    """Give the NumPy dtype called ``name``, one of ``KV_DTYPES``; ``ml_dtypes`` is imported only when needed."""
    if name not in _NARROW:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(f"{name} needs the package ml_dtypes: pip install ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def as_array(name: str, value: Any, dtypes: Iterable[str], *, also: str = "") -> Array:
    """Take ``value`` as an array of one of ``dtypes``, without a copy where it already is one.

    Foreign CPU arrays come in through the buffer protocol, ``__array__`` or DLPack and are NumPy's from then on; those
    of a GPU stay where they are.
    """
    array: Array = to_array(name, value)
    if dtype_name(array) in dtypes:
        return array
    known = ", ".join((also, *dtypes) if also else dtypes)
    raise InputError.of(name, expected=f"dtype {known}", got=array.dtype, hint=_hint(array, dtypes))


def _hint(array: Array, dtypes: Iterable[str]) -> str:
    raw = array.dtype.name in ("uint8", "uint16") and "int8" in dtypes
    return "name what raw storage holds with kv_dtype=" if raw else ""


def cast(array: Array, dtype: npt.DTypeLike) -> Array:
    """Give ``array`` as ``dtype``, itself where it is; a value out of range becomes an infinity, silently."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)


def reinterpret(name: str, value: Any, kv_dtype: Any) -> Array:
    """Read raw uint8 or uint16 storage as ``kv_dtype``; anything else must already be of that dtype."""
    wanted = narrow_dtype(known_dtype("kv_dtype", kv_dtype, KV_DTYPES))
    array: Array = to_array(name, value)
    if array.dtype == wanted:
        return array
    if array.dtype.kind == "u" and array.dtype.itemsize == wanted.itemsize:
        viewed: Array = view_as(array, wanted)
        return viewed
    expected = f"{wanted.name} or uint{8 * wanted.itemsize}, as kv_dtype says"
    raise InputError.of(name, expected=expected, got=array.dtype)


def to_array(name: str, value: Any) -> Any:
    """Take ``value`` as a NumPy array, or as the view that CuPy has of it where it is on a GPU; no copy either way."""
    if not on_device(value):
        return to_numpy(name, value)
    narrow = _torch_dtype(value)
    if narrow.startswith("float8"):  # which no other library takes from PyTorch
        return DeviceView(take(name, _raw(value)), dtype=narrow_dtype(narrow))
    return take(name, value)


def to_numpy(name: str, value: Any) -> Array:
    """Take ``value`` as a plain NumPy array of whatever dtype, in this machine's byte order.

    Raises
    ------
    InputError
        It is no array, or a masked one, whose hidden elements nothing here would hide.
    """
    if value is None or isinstance(value, np.ma.MaskedArray):
        hint = "" if value is None else "fill it, and pass mask= for what is hidden"
        raise InputError.of(name, expected="an array", got="None" if value is None else "a masked array", hint=hint)
    try:
        array = _imported(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise InputError.of(name, expected="an array", got=f"{type(value).__name__} ({error})") from None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _imported(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if narrow := _torch_dtype(value):
        return np.asarray(_raw(value)).view(narrow_dtype(narrow))
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray(value)


def _torch_dtype(value: Any) -> str:
    """Name the dtype of a tensor for which NumPy has no name; else ""."""
    torch = sys.modules.get("torch")  # which is there where someone has a tensor
    if torch is None or not isinstance(value, torch.Tensor):
        return ""
    name = str(value.dtype).removeprefix("torch.")
    return name if name in _NARROW else ""


def _raw(tensor: Any) -> Any:
    """View such a tensor as unsigned numbers."""
    return tensor.view(getattr(sys.modules["torch"], f"uint{8 * tensor.element_size()}"))
