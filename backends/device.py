"""What the GPU backends share: kernels chosen, launched and given memory to work in; for states see `device_ops`."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from treeattn.arguments.devices import broadcast, on_device
from treeattn.arguments.positions import Consecutive
from treeattn.arguments.spec import Args, Spec
from treeattn.backends.base import Backend, Capabilities, Prepared
from treeattn.backends.device_memory import DeviceMemory
from treeattn.backends.device_ops import DeviceOps
from treeattn.backends.runtime import Kernel, Runtime
from treeattn.errors import BackendError, InputError
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.call import address, is_wide, pack_call
from treeattn.kernels.gpu.splits import split_count
from treeattn.kernels.gpu.table import Specialisation, choose

__all__ = ["DeviceBackend"]

LIMIT = 2**31
"""Kernels count keys, and the bytes from one key to the next, in 32 bits; products of both in 64."""

ON_DEVICE = ("q", "k", "v", "q_pos", "kv_pos", "kv_len", "mask", "k_scale", "v_scale")


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
        self.memory = DeviceMemory(self)
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
        """Bring to the card what is not there. Arrays that are there are never looked into."""
        moved = {}
        for name in ON_DEVICE:
            array = getattr(args, name)
            if array is None or isinstance(array, Consecutive):
                continue
            if on_device(array):
                self.check_card(name, array)
            else:
                moved[name] = self.upload(array)
        return args._replace(**moved) if moved else args

    def check_card(self, name: str, array: Any) -> None:
        """Refuse arrays of another card: a kernel that follows their addresses ends the process's use of this one."""
        here = self.runtime.number
        if (there := getattr(array.data, "device_id", here)) != here:
            expected = f"an array on card {here}, which this process computes on"
            raise InputError.of(name, expected=expected, got=f"one on card {there}")

    def upload(self, array: Any) -> Any:
        """Copy an array once, without the repetitions of its broadcast axes."""
        once = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        # The card is told the type by its number; what CuPy has no name for goes as raw bytes.
        there = self.runtime.upload(once.view(f"u{once.dtype.itemsize}") if once.dtype.isbuiltin != 1 else once)
        if once.shape == array.shape:
            return there
        return broadcast(there, array.shape)
