"""CuPy under the GPU backends: CUDA and ROCm alike. Not yet run on a card."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from treeattn.backends import cupy_nccl
from treeattn.backends.pins import Pins
from treeattn.kernels.gpu.source import THREADS
from treeattn.kernels.gpu.targets import target_of
from treeattn.launch import launched

__all__ = ["CupyRuntime", "why_not"]

POLLS = 2000
"""Looks at an event before a wait begins to nap between them: a state's copy takes microseconds."""

NAP = 20e-6
"""Seconds of such a nap."""


def why_not(dialect: str) -> list[str]:
    """Say why CuPy can't drive a card of ``dialect`` ("cuda" or "hip") here; an empty list means it can."""
    install = "pip install 'treeattn[rocm]'" if dialect == "hip" else "pip install 'treeattn[cuda12]' (or [cuda13])"
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        first = str(error).strip().partition("\n")[0]
        return [f"CuPy can't be imported ({first}): {install}"]
    built_for = "hip" if cupy.cuda.runtime.is_hip else "cuda"
    if built_for != dialect:
        return [f"the CuPy that is installed is for {'ROCm' if built_for == 'hip' else 'CUDA'}: {install}"]
    return _without_card(cupy, dialect)


def _without_card(cupy: Any, dialect: str) -> list[str]:
    tool = "rocm-smi" if dialect == "hip" else "nvidia-smi"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [f"the driver finds no card ({error}): install the driver, and see that {tool} lists the card"]
    return [] if count else [f"there is no card: see that {tool} lists one, and what CUDA_VISIBLE_DEVICES hides"]


class CupyRuntime:
    """`treeattn.backends.runtime.Runtime` on the current card, and on CuPy's current stream."""

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._pinned = importlib.import_module("cupyx").empty_pinned
        _choose_card(self._cupy)
        device = self._cupy.cuda.Device()
        properties = self._cupy.cuda.runtime.getDeviceProperties(device.id)
        hip = self._cupy.cuda.runtime.is_hip
        self.target = target_of(_text(properties["gcnArchName"]) if hip else f"sm_{device.compute_capability}")
        self.number = int(device.id)
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.bus_id = str(self._cupy.cuda.runtime.deviceGetPCIBusId(device.id))
        self._modules: dict[Any, Any] = {}
        self._staging: dict[int, npt.NDArray[np.uint8]] = {}
        driver = self._cupy.cuda.runtime
        self._pins = Pins(lambda start, size: driver.hostRegister(start, size, 0), driver.hostUnregister)

    @property
    def stream(self) -> int:
        """Address of the current stream."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate from CuPy's pool, whose memory MPI and CUDA IPC may take, unlike cudaMallocAsync's."""
        return self._cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate zeros."""
        return self._cupy.zeros(shape, dtype)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """Copy to the card."""
        return self._cupy.asarray(np.ascontiguousarray(array))

    def copy_in(self, data: npt.NDArray[np.uint8], packed: Any) -> None:
        """Copy from pinned memory, or through some, which is kept until the copy is done."""
        at = data.ctypes.data
        if not self._pins.hold(at, packed.nbytes):
            staging = self._stage(packed.nbytes)
            staging[:], at = data.reshape(-1), staging.ctypes.data
        packed.data.copy_from_host_async(at, packed.nbytes, self._cupy.cuda.get_current_stream())
        self.wait()

    def copy_out(self, packed: Any, out: npt.NDArray[np.uint8]) -> None:
        """Copy to pinned memory, or through some; waits by event for this stream only."""
        pinned = self._pins.hold(out.ctypes.data, packed.nbytes)
        target = out if pinned else self._stage(packed.nbytes)
        packed.data.copy_to_host_async(target.ctypes.data, packed.nbytes, self._cupy.cuda.get_current_stream())
        self.wait()
        if not pinned:
            out.reshape(-1)[:] = target

    def _stage(self, size: int) -> npt.NDArray[np.uint8]:
        if size not in self._staging:
            self._staging[size] = self._pinned(size, np.uint8)
        return self._staging[size]

    def pin(self, array: npt.NDArray[np.uint8]) -> bool:
        """Register whole pages, once; a driver that refuses leaves the detour."""
        return self._pins.pin(array)

    def wait(self) -> None:
        """Wait by asking: a blocking call would hold this thread even where the card has died."""
        done, polls = self.mark(), 0
        while not done():
            polls += 1
            if polls > POLLS:
                time.sleep(NAP)

    def mark(self) -> Callable[[], bool]:
        """Record an event on the current stream, and give what asks for it."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._cupy.cuda.get_current_stream())
        return lambda: bool(event.done)

    def capture(self, launches: Callable[[], object]) -> Callable[[], None]:
        """Capture on a stream of its own, since the default one can't be; the graph may run on any."""
        caller, stream = self._cupy.cuda.get_current_stream(), self._cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(caller.record())
        with stream:
            launches()  # compiles, and allocates what this stream's launches share: neither can be captured
            self.wait()
            stream.begin_capture()
            try:
                launches()
            finally:
                graph = stream.end_capture()

        def replay(kept: Any = stream) -> None:  # while the stream lives, no other gets its number and its memory
            graph.launch(self._cupy.cuda.get_current_stream())

        return replay

    def group_reasons(self) -> list[str]:
        """Say why CuPy can't use NCCL."""
        return cupy_nccl.why_not()

    def new_group(self) -> bytes:
        """Ask NCCL for a name."""
        return cupy_nccl.new_group()

    def join(self, group: bytes, size: int, rank: int) -> cupy_nccl.NcclGroup:
        """Join by NCCL."""
        return cupy_nccl.NcclGroup(lambda: self.stream, group, size, rank)

    def export(self, size: int) -> tuple[Any, bytes]:
        """Allocate apart from CuPy's pool: a piece of a larger allocation has no name of its own."""
        memory = self._cupy.cuda.MemoryPointer(self._cupy.cuda.Memory(size), 0)
        return self._cupy.ndarray((size,), "uint8", memory), self._cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)

    def attach(self, name: bytes, size: int) -> Any:
        """Map by name; where cards can't read each other at all, the driver's error says so."""
        mapped = self._cupy.cuda.runtime.ipcOpenMemHandle(name)
        memory = self._cupy.cuda.UnownedMemory(mapped, size, self)
        return self._cupy.ndarray((size,), "uint8", self._cupy.cuda.MemoryPointer(memory, 0))

    def detach(self, array: Any) -> None:
        """Unmap."""
        self._cupy.cuda.runtime.ipcCloseMemHandle(array.data.ptr)

    def compile(self, text: str, kernel: str, defines: dict[str, str], *, contract: bool) -> CupyKernel:
        """Compile with NVRTC or hiprtc; CuPy keeps the machine code on disk."""
        options = ["-std=c++17", *(f"-D{name}={value}" for name, value in defines.items())]
        if not contract:
            options.append("-ffp-contract=off" if self.target.dialect == "hip" else "-fmad=false")
        key = text, tuple(options)
        if key not in self._modules:  # several kernels may be of one text
            self._modules[key] = self._cupy.RawModule(code=text, options=tuple(options))
        return CupyKernel(self._cupy, self._modules[key].get_function(kernel))


class CupyKernel:
    """`treeattn.backends.runtime.Kernel`."""

    def __init__(self, cupy: Any, raw: Any) -> None:
        self._cupy, self._raw = cupy, raw

    def launch(self, blocks: int, *arguments: Any) -> None:
        """Start it; CuPy passes arrays of one element, and scalars, by value."""
        self._raw((blocks,), (THREADS,), arguments)

    def resident_blocks(self) -> int:
        """Ask the driver."""
        occupancy = self._cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        return max(1, int(occupancy(self._raw.kernel.ptr, THREADS, 0)))


def _choose_card(cupy: Any) -> None:
    """Take the card of this rank's number on its host; once MPI has started, whoever started it has chosen."""
    here, mpi = launched(), sys.modules.get("mpi4py.MPI")
    if here is None or here.local_rank is None or (mpi is not None and mpi.Is_initialized()):
        return
    cupy.cuda.Device(here.local_rank % cupy.cuda.runtime.getDeviceCount()).use()


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
