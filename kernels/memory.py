"""Memory by address, inside compiled code.

Kernels take addresses and strides instead of arrays: numba would compile a variant for every mix of layout, dtype
and read-only flag, and addresses have none of these.
"""

from __future__ import annotations

from typing import Any

from numba import types as _types
from numba.extending import intrinsic

types: Any = _types  # untyped: so are the functions made of them

__all__ = ["itemsize", "pointer"]


def _pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    result = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, dtype), codegen


def _itemsize(typingctx: Any, dtype: Any) -> Any:
    size = dtype.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.int64, size)

    return types.int64(dtype), codegen


pointer: Any = intrinsic(_pointer)
"""``pointer(address, np.float32)[i]`` is the i-th float32 at that address (int64)."""

itemsize: Any = intrinsic(_itemsize)
"""``itemsize(np.float32)`` is the number of bytes of one element."""
