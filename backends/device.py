"""What the GPU backends share: kernels chosen and launched, states merged where they live, bytes staged to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treeattn.backends.base import Backend, Capabilities, Prepared
from treeattn.backends.host import StagedOps
from treeattn.backends.runtime import Kernel, Runtime
from treeattn.devices import DeviceBytes, broadcast, on_device
from treeattn.errors import BackendError, InputError
from treeattn.inputs import Args, Spec
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.call import address, is_wide, pack_call, pack_finish, pack_merge
from treeattn.kernels.gpu.splits import split_count
from treeattn.kernels.gpu.table import Specialisation, choose
from treeattn.wire_form import WireForm, own_pages

__all__ = ["DeviceBackend", "DeviceOps"]

LIMIT = 2**31
"""Kernels count keys, and the bytes from one key to the next, in 32 bits; products of both in 64."""

Bytes = npt.NDArray[np.uint8]

FAMILIES = {"cuda": "cuda", "hip": "rocm"}
"""What MPI calls the memory of cards whose kernels are of a dialect."""

ON_DEVICE = ("q", "k", "v", "q_pos", "kv_pos", "kv_len", "mask", "k_scale", "v_scale")


class DeviceOps(StagedOps):
    """`treeattn.state.StateOps` for packed float32 states in device memory.

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


class Launch(NamedTuple):
    """One compiled kernel, how it was compiled, and how many of its blocks the card holds."""

    chosen: Specialisation
    kernel: Kernel
    slots: int


class DeviceBackend(Backend):
    """Runs ``kernels/gpu`` on one card. Subclasses say which, and bring the runtime."""

    note = "not yet run on a card"
    capabilities = Capabilities(("float32", "float16", "bfloat16"), graphs=True)
    always_staged = False
    """Whether states take the way through pinned host memory even where MPI could take the card's."""
    queues = True

    def __init__(self) -> None:
        self.ops = DeviceOps(self.name, self)
        self._compiled: dict[Any, Kernel] = {}
        self._workspaces: dict[tuple[int, int], tuple[Any, Any]] = {}

    def open(self) -> Runtime:
        """Open the card; called once, at its first use."""
        raise NotImplementedError

    @cached_property
    def runtime(self) -> Runtime:
        """The card."""
        return self.open()

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Say what the machine lacks, or what ``spec`` asks for that no kernel does."""
        found = self.machine_reasons() or list(self._trial)
        return found if spec is None else found + self._refusals(spec)

    def _refusals(self, spec: Spec) -> list[str]:
        found = []
        if spec.state_dtype != "float32":
            found.append(f"float64 runs on the CPU only: use backend='cpu', or float32 with backend={self.name!r}")
        if max(abs(strides[2]) for strides in (spec.kv.k_strides, spec.kv.v_strides)) >= LIMIT:
            found.append("the keys of one head lie 2 GiB or more apart: copy k and v to a closer layout")
        return found

    def machine_reasons(self) -> list[str]:
        """Say why no card of this family can be used here; an empty list means one can."""
        raise NotImplementedError

    @cached_property
    def _trial(self) -> list[str]:
        """Compile and run one small kernel: CuPy may import and make arrays where its compiler can't work."""
        seen = np.zeros(12, np.uint8)
        try:
            packed = self.ops.empty((1, 1, 1, 3), "float32")
            self.ops.fill_identity(packed)
            self.ops.to_host(packed, seen)
        except Exception as error:  # whatever a driver or a compiler throws, it is a reason
            first = str(error).strip().partition("\n")[0]
            return [f"a first kernel doesn't compile or run ({type(error).__name__}: {first})"]
        right = np.array([0, 0, -np.inf], np.float32)
        return [] if np.array_equal(seen.view(np.float32), right) else ["a first kernel gives wrong numbers"]

    def prepare(self, spec: Spec) -> Prepared:
        """Give a function that launches one kernel for ``spec``, on the stream that is current when it is called."""
        launches: dict[tuple[bool, bool], Launch] = {}

        def prepared(args: Args, out: Any) -> Any:
            if 0 in out.shape:
                return out
            if args.kv_tokens >= LIMIT:
                raise BackendError(f"backend {self.name!r} takes at most 2**31 - 1 keys in one call: split them")
            args = self._uploaded(args)
            wide = is_wide(args.k), is_wide(args.v)
            if wide not in launches:
                launches[wide] = self._launch_for(choose(spec, self.runtime.target, k_wide=wide[0], v_wide=wide[1]))
            self._start(spec, launches[wide], args, out)
            return out

        return prepared

    def energy(self, spec: Spec, args: Args, zeta: Any) -> Any:
        """Not on the card: the CPU computes it, for arrays that are there."""
        if any(on_device(array) for array in (args.q, args.k, args.v, zeta)):
            raise BackendError(f"backend {self.name!r} does not compute energy: pass NumPy arrays, or backend='cpu'")
        return super().energy(spec, args, zeta)

    def compiled(self, text: str, name: str, defines: dict[str, str], *, contract: bool) -> Kernel:
        """Compile a kernel once."""
        key = (name, tuple(sorted(defines.items())))
        if key not in self._compiled:
            self._compiled[key] = self.runtime.compile(text, name, defines, contract=contract)
        return self._compiled[key]

    def _launch_for(self, chosen: Specialisation) -> Launch:
        text = source.text(f"{chosen.kernel}.cu")
        kernel = self.compiled(text, f"treeattn_{chosen.kernel}", chosen.defines(), contract=True)
        return Launch(chosen, kernel, self.runtime.multiprocessors * kernel.resident_blocks())

    def _start(self, spec: Spec, launch: Launch, args: Args, out: Any) -> None:
        chosen = launch.chosen
        tiles_per_head = spec.batch * -(-spec.group * spec.q_tokens // chosen.rows)
        tiles = tiles_per_head * spec.kv_heads
        splits = split_count(tiles_per_head * spec.cut_heads, args.kv_tokens, chosen.step, launch.slots)
        part, arrived = self._workspace(tiles, splits * chosen.part)
        at = {"out": address(out), "part": address(part), "arrived": address(arrived)}
        launch.kernel.launch(tiles * splits, pack_call(spec, chosen, args, splits=splits, **at))

    def _workspace(self, tiles: int, floats: int) -> tuple[Any, Any]:
        """Memory for the splits' states, one for each stream: launches of one stream follow each other."""
        key = self.runtime.stream, tiles
        part, arrived = self._workspaces.get(key, (None, None))
        if part is None or part.shape[0] < tiles * floats:
            part = self.runtime.empty((tiles * floats,), "float32")
            arrived = self.runtime.zeros((tiles,), "int32") if arrived is None else arrived
            self._workspaces[key] = part, arrived
        return part, arrived

    def _uploaded(self, args: Args) -> Args:
        """Bring to the card what is not there. Arrays that are there are never looked into.

        Those of another card are refused: a kernel that follows their addresses ends the process's use of this one.
        """
        moved, here = {}, self.runtime.number
        for name in ON_DEVICE:
            array = getattr(args, name)
            if array is None:
                continue
            if not on_device(array):
                moved[name] = self._upload(array)
            elif (there := getattr(array.data, "device_id", here)) != here:
                expected = f"an array on card {here}, which this process computes on"
                raise InputError.of(name, expected=expected, got=f"one on card {there}")
        return replace(args, **moved) if moved else args

    def _upload(self, array: Any) -> Any:
        """Copy an array once, without the repetitions of its broadcast axes."""
        once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        # The card is told the type by its number; what CuPy has no name for goes as raw bytes.
        there = self.runtime.upload(once.view(f"u{once.dtype.itemsize}") if once.dtype.isbuiltin != 1 else once)
        if once.shape == array.shape:
            return there
        return broadcast(there, array.shape)


def _rows(packed: Any) -> int:
    batch, heads, tokens, _ = packed.shape
    return int(batch * heads * tokens)
