"""NumPy's array objects, read by compiled code: where their elements are, and how they lie.

Asking NumPy takes longer than a small call: after a call's keys have gone through the caches, each of its functions has
to be fetched from memory again. An array object begins as NumPy's C interface says (``PyArrayObject_fields``): behind
what every Python object has come the elements' address, the number of axes, and the addresses of shape and strides.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64
from functools import cache

import numpy as np

from treeattn.kernels.compilation import inline
from treeattn.kernels.memory import pointer

__all__ = ["check_objects", "data_of", "elements_of", "length_of", "read_array"]

HEAD = object.__basicsize__
"""Bytes that every Python object begins with."""


@inline
def elements_of(array: int) -> int:
    """Give the address of the first element of the array object at an address."""
    elements: int = pointer(array + HEAD, np.int64)[0]
    return elements


@inline
def data_of(array: int, none: int) -> int:
    """Give the address of the first element of an array object; 0 for None, which is at ``none``."""
    return 0 if array == none else elements_of(array)


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
    array = np.zeros((2, 3, 5), np.int16)[:, ::2]
    elements, _, lengths, strides = (c_int64 * 4).from_address(id(array) + HEAD)
    axes = c_int32.from_address(id(array) + HEAD + 8).value
    if elements != array.ctypes.data or axes != 3 or _three(lengths) != array.shape or _three(strides) != array.strides:
        raise RuntimeError(f"NumPy {np.__version__} lays out its arrays in a way that treeattn's kernels don't know")


def _three(address: int) -> tuple[int, ...]:
    return tuple((c_int64 * 3).from_address(address)) if address else ()
