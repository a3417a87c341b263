"""NumPy's array objects, read by compiled code: where their elements are, and how they lie.

Asking NumPy takes longer than a small call: after a call's keys have gone through the caches, each of its functions has
to be fetched from memory again. An array object begins as NumPy's C interface says (``PyArrayObject_fields``): behind
what every Python object has come the elements' address, the number of axes, and the addresses of shape and strides.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import pointer

__all__ = ["check_objects", "data_of", "length_of", "read_array"]

HEAD = object.__basicsize__
"""Bytes that every Python object begins with."""


@inline
def data_of(array: int, none: int) -> int:
    """Give the address of the first element of the array object at an address; 0 for None, which is at ``none``."""
    return 0 if array == none else int(pointer(array + HEAD, np.int64)[0])


@inline
def length_of(array: int, axis: int) -> int:
    """Give an array's length along an axis."""
    length: int = pointer(pointer(array + HEAD, np.int64)[2], np.int64)[axis]
    return length


@inline
def read_array(array: int, none: int, target: int) -> None:
    """Write the address of the first element, and the strides behind it, to ``target``; nothing for None."""
    if array == none:
        return
    into, fields, axes = pointer(target, np.int64), pointer(array + HEAD, np.int64), pointer(array + HEAD + 8, np.int32)
    into[0] = fields[0]
    for axis in range(axes[0]):
        into[axis + 1] = pointer(fields[3], np.int64)[axis]


@cache
def check_objects() -> None:
    """Make sure that NumPy's objects are as this module takes them to be; a RuntimeError if they are not."""
    array, found = np.zeros((2, 3, 5), np.int16)[:, ::2], np.zeros(5, np.int64)
    _look()(id(array), id(None), found)
    if found.tolist() != [array.__array_interface__["data"][0], *array.strides, array.shape[0]]:
        raise RuntimeError(f"NumPy {np.__version__} lays out its arrays in a way that treeattn's kernels don't know")


@entry("void(int64, int64, int64[::1])")
def _look(array: int, none: int, found: npt.NDArray[np.int64]) -> None:
    read_array(array, none, found.ctypes.data)
    found[-1] = length_of(array, 0)
