"""A card without a card: memory that faults when the CPU touches it, and kernels that the emulator executes.

`FakeCard` is a `treeattn.backends.runtime.Runtime`. Its memory is mapped without access, except while a kernel or a
copy runs. So whatever else looks into a device array, treeattn or MPI, ends the process with a segmentation fault.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ml_dtypes  # noqa: F401 - registers its dtypes with NumPy
import numpy as np
from emulation import Emulator

from treeattn.arguments.devices import DeviceView
from treeattn.backends.device import DeviceBackend
from treeattn.backends.pins import Pins
from treeattn.kernels.gpu.targets import target_of

__all__ = ["FakeCard", "FakeCardBackend", "FaultingArray"]

ARENA = 128 * 2**20
ALIGNMENT = 256
NO_ACCESS, READ_WRITE = 0, 3
IDENTITY = """
struct two { float* packed; long long width; };
void identity_of(two at) { treeattn_identity(at.packed, at.width); }
"""
EMULATED = threading.Lock()
"""Ranks that are threads take turns: the fibers of an emulated kernel are one process's."""

_libc = ctypes.CDLL(None, use_errno=True)


def _nothing() -> bool:
    return True


class Pointer:
    """Where a `FaultingArray` begins, under CuPy's name for it."""

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __add__(self, size: int) -> Pointer:
        return Pointer(self.ptr + size, self.device_id)


class FaultingArray:
    """A device array: an address, a shape and a dtype. It keeps its card alive."""

    __module__ = "cupy"  # whose arrays are taken as they are

    def __init__(self, card: FakeCard, at: int, shape: tuple[int, ...], dtype: Any, strides: Any = None) -> None:
        self.card, self.data = card, Pointer(at, card.number)
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.strides = tuple(strides or np.empty(shape, dtype).strides)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = {"shape": self.shape, "typestr": self.dtype.str, "strides": None, "version": 3}
        return {**kind, "data": (self.data.ptr, False)}

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What a careless NumPy would follow into the fault."""
        return self.__cuda_array_interface__

    def __getitem__(self, at: tuple[slice, ...]) -> FaultingArray:
        view = DeviceView(self)[at]
        return FaultingArray(self.card, view.data.ptr, view.shape, view.dtype, view.strides)

    def __setitem__(self, at: tuple[slice, ...], new: FaultingArray) -> None:
        """Write a part, by the card's own engine."""
        part, found = self[at], new.get()
        assert part.shape == new.shape
        with self.card.access():
            raw = (ctypes.c_char * ARENA).from_address(self.card.start)
            start = part.data.ptr - self.card.start
            np.ndarray(part.shape, part.dtype, raw, start, part.strides)[...] = found

    def swapaxes(self, first: int, second: int) -> FaultingArray:
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        shape, strides = ([sizes[axis] for axis in order] for sizes in (self.shape, self.strides))
        return FaultingArray(self.card, self.data.ptr, tuple(shape), self.dtype, strides)

    def astype(self, dtype: Any, copy: bool = True) -> FaultingArray:
        if np.dtype(dtype) == self.dtype and not copy:
            return self
        return self.card.upload(self.get().astype(dtype))

    def get(self) -> np.ndarray[Any, Any]:
        """Copy to the host, as CuPy's ``get`` does."""
        with self.card.access():
            raw = (ctypes.c_char * ARENA).from_address(self.card.start)
            found = np.ndarray(self.shape, self.dtype, raw, self.data.ptr - self.card.start, self.strides).copy("C")
        self.card.copies += 1
        return found


class FakeKernel:
    """A kernel as the emulator compiled it."""

    def __init__(self, card: FakeCard, library: Any, name: str) -> None:
        self._card, self._library, self._name = card, library, name

    def launch(self, blocks: int, *arguments: Any) -> None:
        if self._card.captured is not None:
            kept = [array.copy() for array in arguments]
            self._card.captured.append(lambda: self.launch(blocks, *kept))
            return
        (call,) = arguments if len(arguments) == 1 else (np.array(arguments),)
        order = np.random.default_rng(self._card.launches).permutation(blocks)
        self._card.launches += 1
        with EMULATED, self._card.access_with_peers():
            self._card.emulator.launch(self._library, call, order, self._card.target.wave)

    def resident_blocks(self) -> int:
        return 2


_buses = itertools.count()


class FakeCard:
    """A `treeattn.backends.runtime.Runtime` of two multiprocessors."""

    def __init__(self, emulator: Emulator, arch: str = "sm_90", number: int = 0) -> None:
        self.number = number
        self.emulator, self.target, self.multiprocessors = emulator, target_of(arch), 2
        self._memory = mmap.mmap(-1, ARENA)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.room = ARENA
        self.used = self.launches = self.copies = self.waits = self.detours = 0
        self.pinned: dict[int, int] = {}
        self.pins = Pins(self.pinned.__setitem__, self.pinned.__delitem__)
        self.bus_id, self.lies = f"{next(_buses):04x}:00:00.0", False
        self.mapped: list[FakeCard] = []
        self.stream, self._engine = 0, threading.Lock()
        self.pending: Callable[[], bool] = _nothing
        self.captured: list[Callable[[], None]] | None = None
        self._protect(NO_ACCESS)

    def _protect(self, access: int) -> None:
        assert _libc.mprotect(ctypes.c_void_p(self.start), ctypes.c_size_t(ARENA), access) == 0

    @contextmanager
    def access(self) -> Iterator[None]:
        """Let the CPU in, as the card's own engines, one at a time: a message may arrive from another thread."""
        with self._engine:
            self._protect(READ_WRITE)
            try:
                yield
            finally:
                self._protect(NO_ACCESS)

    @contextmanager
    def access_with_peers(self) -> Iterator[None]:
        """Let the CPU in as a kernel of this card, which also sees what is mapped of others."""
        with ExitStack() as opened:
            for card in {self, *self.mapped}:
                opened.enter_context(card.access())
            yield

    def empty(self, shape: tuple[int, ...], dtype: str) -> FaultingArray:
        self.refuse_in_capture("an allocation")
        at = self.start + self.used
        array = FaultingArray(self, at, shape, dtype)
        self.used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if self.used > self.room:
            self.used -= -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            raise MemoryError(f"Out of memory allocating {array.nbytes:,} bytes")  # as CuPy's is one
        with self.access():
            ctypes.memset(at, 0xFF, array.nbytes)  # NaN: nothing here is initialised
        return array

    def zeros(self, shape: tuple[int, ...], dtype: str) -> FaultingArray:
        return self.upload(np.zeros(shape, dtype))

    def upload(self, array: np.ndarray[Any, Any]) -> FaultingArray:
        there = self.empty(array.shape, array.dtype)
        if array.size:
            self.copy_in(np.ascontiguousarray(array).reshape(-1).view(np.uint8), there)
        return there

    def copy_in(self, data: np.ndarray[Any, Any], packed: FaultingArray) -> None:
        self.refuse_in_capture("a copy from the host")
        self.copies += 1
        data = np.ascontiguousarray(data)
        self.detours += not self.pins.hold(data.ctypes.data, packed.nbytes)
        with self.access():
            ctypes.memmove(packed.data.ptr, data.ctypes.data, packed.nbytes)

    def copy_out(self, packed: FaultingArray, out: np.ndarray[Any, Any]) -> None:
        self.copies += 1
        self.detours += not self.pins.hold(out.ctypes.data, packed.nbytes)
        with self.access():
            ctypes.memmove(out.ctypes.data, packed.data.ptr, packed.nbytes)

    def pin(self, array: np.ndarray[Any, Any]) -> bool:
        return self.pins.pin(array)

    def wait(self) -> None:
        self.refuse_in_capture("a wait")
        self.waits += 1

    def mark(self) -> Callable[[], bool]:
        pending, self.pending = self.pending, _nothing
        return pending

    def refuse_in_capture(self, what: str) -> None:
        if self.captured is not None:
            raise RuntimeError(f"{what} can't be captured")

    def capture(self, launches: Callable[[], object]) -> Callable[[], None]:
        outside, self.stream = self.stream, self.stream + 1
        launches()
        self.captured = recorded = []
        try:
            launches()
        finally:
            self.captured, self.stream = None, outside
        self.recorded = len(recorded)

        def replay() -> None:
            for each in recorded:
                each()

        return replay

    def group_reasons(self) -> list[str]:
        return []

    def new_group(self) -> bytes:
        return os.urandom(128)

    def join(self, group: bytes, size: int, rank: int) -> FakeGroup:
        return FakeGroup(self, GROUPS.setdefault(group, Meeting(size)), rank)

    def export(self, size: int) -> tuple[FaultingArray, bytes]:
        array, name = self.empty((size,), "uint8"), os.urandom(64)
        EXPORTED[name] = array
        return array, name

    def attach(self, name: bytes, size: int) -> FaultingArray:
        array = EXPORTED[name]
        assert array.nbytes == size
        if self.lies:  # a driver that says yes, and maps what is no longer there: this card never sees a change
            return self.upload(array.get())
        self.mapped.append(array.card)
        return array

    def detach(self, array: FaultingArray) -> None:
        if array.card is not self:
            self.mapped.remove(array.card)

    def compile(self, text: str, kernel: str, defines: dict[str, str], *, contract: bool) -> FakeKernel:
        self.refuse_in_capture("compiling")
        attention = kernel in ("treeattn_vector", "treeattn_matrix")
        others = {"treeattn_finish": "ta_finish", "treeattn_store": "ta_store"}
        struct = "ta_call" if attention else others.get(kernel, "ta_merge")
        if kernel == "treeattn_identity":  # takes two numbers, which the emulator passes as one struct
            text, kernel, struct = text + IDENTITY, "identity_of", "two"
        if self.target.dialect == "hip" and kernel == "treeattn_matrix":
            defines = {**defines, "TA_HIP": "1"}
        return FakeKernel(self, self.emulator.compile(text, kernel, struct, defines), kernel)


EXPORTED: dict[bytes, FaultingArray] = {}


class Meeting:
    """Where the ranks of a group leave what they gather; one of them may stay away."""

    def __init__(self, size: int) -> None:
        self.left: dict[tuple[int, int], bytes] = {}
        self.size = size


GROUPS: dict[bytes, Meeting] = {}


class FakeGroup:
    """A `treeattn.gpu.cards.Group` of cards in one process: an all-gather is done when the last rank has come to it."""

    def __init__(self, card: FakeCard, meeting: Meeting, rank: int) -> None:
        self._card, self._meeting, self._rank = card, meeting, rank
        self._turn = 0
        self.error: Exception | None = None
        self.ended = ""

    def gather(self, mine: Any, everyones: Any) -> None:
        self._turn += 1
        data = np.empty(mine.nbytes, np.uint8)
        self._card.copy_out(mine, data)
        if self._card.lies:  # a driver that promises what the cards don't keep
            data[1000:1004] ^= 1
        self._meeting.left[self._turn, self._rank] = data.tobytes()
        self._card.pending = lambda turn=self._turn: self._arrived(turn, everyones)  # type: ignore[misc]

    def _arrived(self, turn: int, everyones: Any) -> bool:
        found = [self._meeting.left.get((turn, rank)) for rank in range(self._meeting.size)]
        if None in found:
            return False
        self._card.copy_in(np.frombuffer(b"".join(each or b"" for each in found), np.uint8), everyones)
        return True

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def free(self) -> None:
        self.ended += "freed"

    def abort(self) -> None:
        self.ended += "aborted"


class FakeCardBackend(DeviceBackend):
    """The GPU backends' own code, on a fake card."""

    name = "fake card"

    def __init__(self, card: FakeCard) -> None:
        self._card = card
        super().__init__()

    def machine_reasons(self) -> list[str]:
        return []

    def open(self) -> FakeCard:
        return self._card
