"""What a GPU backend needs of the machine under it: memory, copies, compiled kernels. CuPy's is `CupyRuntime`.

The tests bring another: memory that faults when the CPU touches it, and kernels executed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from treeattn.kernels.gpu.targets import Target

__all__ = ["Kernel", "Runtime"]


class Kernel(Protocol):
    """One compiled kernel."""

    def launch(self, blocks: int, *arguments: Any) -> None:
        """Start it on the current stream; structs are NumPy arrays of one element."""

    def resident_blocks(self) -> int:
        """Tell how many of its blocks one multiprocessor holds at the same time."""


class Runtime(Protocol):
    """One card and its current stream."""

    target: Target
    multiprocessors: int
    number: int
    """Of the card in this process, as the ``data.device_id`` of its arrays has it."""
    bus_id: str

    @property
    def stream(self) -> int:
        """The current stream, as a number that tells streams apart."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate device memory, not initialised: an array with CuPy's shape, dtype, strides, nbytes and data.ptr."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate device memory of zeros."""

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """Copy a host array to new device memory, on the current stream."""

    def copy_in(self, data: npt.NDArray[np.uint8], packed: Any) -> None:
        """Copy host bytes to a device array; ``data`` may be reused on return."""

    def copy_out(self, packed: Any, out: npt.NDArray[np.uint8]) -> None:
        """Copy a device array's bytes to host memory, complete on return; waits for the current stream only."""

    def pin(self, array: npt.NDArray[np.uint8]) -> bool:
        """Let this card copy to and from the memory that holds ``array`` without a detour, and say whether it can."""

    def mark(self) -> Callable[[], bool]:
        """Record an event on the current stream; give a function that tells whether it has come to pass."""

    def capture(self, launches: Callable[[], object]) -> Callable[[], None]:
        """Record what ``launches`` starts, after a first run; give a function that runs it on the current stream."""

    def group_reasons(self) -> list[str]:
        """Say why this card can't be joined with others."""

    def new_group(self) -> bytes:
        """Make the name of a group."""

    def join(self, group: bytes, size: int, rank: int) -> Any:
        """Join the other ranks' cards, when all have come; gives what `treeattn.gpu.cards.Group` describes."""

    def export(self, size: int) -> tuple[Any, bytes]:
        """Allocate bytes that other processes' cards can map; give them, and the name under which they do."""

    def attach(self, name: bytes, size: int) -> Any:
        """Map what another process on this host has exported."""

    def detach(self, array: Any) -> None:
        """Unmap it."""

    def compile(self, text: str, kernel: str, defines: dict[str, str], *, contract: bool) -> Kernel:
        """Compile a kernel; without ``contract``, no multiplication and addition may be fused."""
