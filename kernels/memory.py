"""Memory by address, and the clock, inside compiled code.

Kernels take addresses and strides instead of arrays: numba would compile a variant for every mix of layout, dtype
and read-only flag, and addresses have none of these.
"""

from __future__ import annotations

import platform
import time
from typing import Any

from llvmlite import ir
from numba import types as _types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

types: Any = _types  # untyped: so are the functions made of them
cgutils: Any = _cgutils

__all__ = [
    "add_at",
    "call_part",
    "fence",
    "hold_threads",
    "itemsize",
    "let_threads_run",
    "load_acquire",
    "nanoseconds",
    "next_task",
    "pause",
    "pointer",
    "store_release",
    "swap_if",
]


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


def _call_part(typingctx: Any, address: Any, arguments: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = [builder.extract_value(args[1], i) for i in range(arguments.count)]
        function = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


def _next_task(typingctx: Any, counter: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(64)
        at = builder.inttoptr(args[0], integer.as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(integer, 1), "acq_rel")

    return types.int64(types.int64), codegen


def _load_acquire(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(types.int64), codegen


def _store_release(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], at, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _add_at(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


def _swap_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        found = builder.cmpxchg(at, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


def _pause(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            void = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, void, "llvm.x86.sse2.pause"), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _nanoseconds(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, integer = ir.IntType(32), ir.IntType(64)
        both = cgutils.alloca_once(builder, ir.ArrayType(integer, 2))
        function = ir.FunctionType(number, [number, both.type])
        clock = cgutils.get_or_insert_function(builder.module, function, "clock_gettime")
        builder.call(clock, [ir.Constant(number, time.CLOCK_MONOTONIC), both])
        seconds, rest = (builder.extract_value(builder.load(both), at) for at in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(integer, 10**9)), rest)

    return types.int64(), codegen


def _let_threads_run(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_python_api(builder).save_thread()

    return types.voidptr(), codegen


def _hold_threads(typingctx: Any, kept: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.get_python_api(builder).restore_thread(args[0])
        return context.get_dummy_value()

    return types.void(types.voidptr), codegen


def _fence(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


pointer: Any = intrinsic(_pointer)
"""``pointer(address, np.float32)[i]`` is the i-th float32 at that address (int64)."""

itemsize: Any = intrinsic(_itemsize)
"""``itemsize(np.float32)`` is the number of bytes of one element."""

call_part: Any = intrinsic(_call_part)
"""``call_part(address, (a, b, ...))`` calls the part (`treeattn.kernels.compilation.part`) at that address."""

next_task: Any = intrinsic(_next_task)
"""``next_task(address)`` takes the next number from the counter (int64) there; several threads may ask at once.

What was written before it is there for who takes a later number."""

load_acquire: Any = intrinsic(_load_acquire)
"""``load_acquire(address)`` is the int64 there; nothing that is read after it is read before it."""

store_release: Any = intrinsic(_store_release)
"""``store_release(address, value)`` stores an int64 there, after all that was written before."""

add_at: Any = intrinsic(_add_at)
"""``add_at(address, value)`` adds to the int64 there, at once for all threads, and gives what it was before."""

let_threads_run: Any = intrinsic(_let_threads_run)
"""``kept = let_threads_run()`` gives up Python's lock (GIL), in code that holds it."""

hold_threads: Any = intrinsic(_hold_threads)
"""``hold_threads(kept)`` takes it again."""

swap_if: Any = intrinsic(_swap_if)
"""``swap_if(address, expected, value)`` replaces the int64 there if it is ``expected``, and tells whether it was."""

pause: Any = intrinsic(_pause)
"""``pause()`` rests for a moment, in a loop that waits for another thread."""

nanoseconds: Any = intrinsic(_nanoseconds)
"""``nanoseconds()`` of the clock that is never set back."""

fence: Any = intrinsic(_fence)
"""``fence()``: what was stored before it is there for others before anything behind it is read."""
