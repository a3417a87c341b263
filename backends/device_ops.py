"""Operations on packed states in a card's memory: merged where they live, and taken to the wire and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treeattn.arguments.devices import DeviceBytes, on_device
from treeattn.backends.host import StagedOps
from treeattn.backends.runtime import Kernel, Runtime
from treeattn.errors import BackendError
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.call import address, pack_finish, pack_merge
from treeattn.wire_form import WireForm, own_pages

if TYPE_CHECKING:
    from treeattn.backends.device import DeviceBackend

__all__ = ["DeviceOps"]

Bytes = npt.NDArray[np.uint8]

FAMILIES = {"cuda": "cuda", "hip": "rocm"}
"""What MPI calls the memory of cards whose kernels are of a dialect."""


class DeviceOps(StagedOps):
    """`treeattn.state_ops.StateOps` for packed float32 states in device memory.

    Parameters
    ----------
    name : str
        The backend's name.
    backend : DeviceBackend
        Whose runtime is used; it is asked for at the first operation and not before.
    """

    def __init__(self, name: str, backend: DeviceBackend) -> None:
        self._name, self._backend = name, backend

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self._name

    @property
    def direct(self) -> str:  # type: ignore[override]
        """Family of the card's memory, unless the backend always stages."""
        return "" if self._backend.always_staged else FAMILIES[self._runtime.target.dialect]

    @property
    def _runtime(self) -> Runtime:
        return self._backend.runtime

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate a packed buffer on the card."""
        if dtype != "float32":
            raise BackendError(f"backend {self._name!r} keeps states in float32, not {dtype}: use backend='cpu'")
        return self._runtime.empty(shape, dtype)

    def fill_identity(self, packed: Any) -> None:
        """Write the state of no keys."""
        if rows := _rows(packed):
            self._kernel("identity").launch(rows, np.int64(address(packed)), np.int64(packed.shape[-1]))

    def merge(self, out: Any, sources: list[Any]) -> None:
        """Merge in one launch, with the bits that the CPU would give."""
        if rows := _rows(out):
            call = pack_merge([address(each) for each in sources], address(out), width=out.shape[-1])
            self._kernel("merge").launch(rows, call)

    def finish(self, packed: Any, sink: Any) -> tuple[Any, Any]:
        """Give (out, lse) on the card."""
        batch, heads, tokens, width = packed.shape
        out = self._runtime.empty((batch, heads, tokens, width - 2), "float32")
        lse = self._runtime.empty((batch, heads, tokens), "float32")
        sink = sink if sink is None or on_device(sink) else self._runtime.upload(sink)
        if rows := _rows(packed):
            at = {"packed": address(packed), "sink": address(sink), "out": address(out), "lse": address(lse)}
            self._kernel("finish").launch(rows, pack_finish(heads=heads, tokens=tokens, width=width, **at))
        return out, lse

    def to_host(self, packed: Any, out: Bytes) -> None:
        """Copy the packed bytes to host memory through pinned memory."""
        if packed.nbytes:
            self._runtime.copy_out(packed, out)

    def from_host(self, data: Bytes, packed: Any) -> None:
        """Copy the packed bytes from host memory through pinned memory."""
        if packed.nbytes:
            self._runtime.copy_in(data, packed)

    def mark(self) -> Callable[[], bool]:
        """Give a function that tells whether what was started on the current stream so far is done."""
        return self._runtime.mark()

    def memory(self, size: int) -> DeviceBytes:
        """Allocate bytes on the card, for wire rows that MPI sends from there."""
        return DeviceBytes(self._runtime.empty((size,), "uint8"), 0, size)

    def prepare_pack(self, wire: Any, form: WireForm) -> Callable[[Any], None]:
        """Give a function that writes wire rows: made on the card in one launch, and copied to ``wire`` on the host.

        Where the driver can't pin ``wire``, and in 16 bit, the host makes them of a copy of the state.
        """
        if isinstance(wire, DeviceBytes):
            return lambda packed: self.on_rows("pack", wire, [packed], form)
        if form.narrow or not self._runtime.pin(wire):
            return super().prepare_pack(wire, form)
        return PinnedRows(self, wire, form).pack

    def prepare_unpack(self, wire: Any, form: WireForm) -> Callable[[Any], None]:
        """Give a function that makes a state of wire rows, likewise."""
        if isinstance(wire, DeviceBytes):
            return lambda packed: self.on_rows("unpack", packed, [wire], form)
        if form.narrow or not self._runtime.pin(wire):
            return super().prepare_unpack(wire, form)
        return PinnedRows(self, wire, form).unpack

    def _room(self, form: WireForm) -> Any:
        """Allocate host memory for a packed state on its way, pinned where the driver does that."""
        size = math.prod(form.shape) * np.dtype(form.dtype).itemsize
        room = own_pages(size)
        self._runtime.pin(room)
        return room[:size].view(form.dtype).reshape(form.shape)

    def prepare_merge_rows(
        self, out: DeviceBytes, sources: Sequence[DeviceBytes], form: WireForm
    ) -> Callable[[], None]:
        """Give a function that merges wire rows on the card, in one launch."""
        return lambda: self.on_rows("merge_rows", out, sources, form)

    def join_reasons(self) -> list[str]:
        """Say why this card can't be joined with those of other ranks."""
        return self._runtime.group_reasons()

    def bus_id(self) -> str:
        """Name the card, among those of its host."""
        return self._runtime.bus_id

    def new_group(self) -> bytes:
        """Make the name of a group of cards."""
        return self._runtime.new_group()

    def join(self, group: bytes, size: int, rank: int) -> Any:
        """Join the cards of other ranks; collective."""
        return self._runtime.join(group, size, rank)

    def export(self, size: int) -> tuple[DeviceBytes, bytes]:
        """Allocate bytes on the card that other processes' cards can map, and give their name."""
        array, name = self._runtime.export(size)
        return DeviceBytes(array, 0, size), name

    def attach(self, name: bytes, size: int) -> DeviceBytes:
        """Map what another process on this host has exported."""
        return DeviceBytes(self._runtime.attach(name, size), 0, size)

    def detach(self, memory: DeviceBytes) -> None:
        """Unmap it."""
        self._runtime.detach(memory.array)

    def on_rows(self, name: str, out: Any, sources: Sequence[Any], form: WireForm) -> None:
        """Start the kernel ``name`` on wire rows."""
        if form.rows:
            call = pack_merge([address(each) for each in sources], address(out), width=form.width)
            self._kernel(name).launch(form.rows, call)

    def _kernel(self, name: str) -> Kernel:
        text, defines = source.text("states.cu"), source.state_defines()
        return self._backend.compiled(text, f"treeattn_{name}", defines, contract=False)


class PinnedRows:
    """Wire rows that go between a card and pinned host memory in one copy, with no other on the host.

    Parameters
    ----------
    ops : DeviceOps
    wire : array of uint8
        In pinned memory.
    form : WireForm
    """

    def __init__(self, ops: DeviceOps, wire: Bytes, form: WireForm) -> None:
        self._ops, self._wire, self._form, self._rows = ops, wire, form, ops.memory(form.nbytes)
        self._read: Callable[[], bool] = _at_once

    def pack(self, packed: Any) -> None:
        """Make the rows of a state on the card, and copy them to the wire."""
        self._ops.on_rows("pack", self._rows, [packed], self._form)
        self._ops.to_host(self._rows, self._wire)

    def unpack(self, packed: Any) -> None:
        """Copy the rows to the card, once the last ones have been read there, on whatever stream, and unpack them."""
        while not self._read():
            pass
        self._ops.from_host(self._wire, self._rows)
        self._ops.on_rows("unpack", packed, [self._rows], self._form)
        self._read = self._ops.mark()


def _at_once() -> bool:
    return True


def _rows(packed: Any) -> int:
    batch, heads, tokens, _ = packed.shape
    return int(batch * heads * tokens)
