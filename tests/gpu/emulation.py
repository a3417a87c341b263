"""Kernels on the CPU: their very text, compiled with g++ and executed on fibers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from treeattn.arguments.spec import Args, Spec
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.call import is_wide, pack_call
from treeattn.kernels.gpu.table import Specialisation, choose
from treeattn.kernels.gpu.targets import Target

__all__ = ["Emulator"]

HERE = Path(__file__).parent
# No optimisation, and no mathematics of C++17: each kernel runs for milliseconds, and compiles in half the time.
FLAGS = ["-std=gnu++14", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-w"]


class Emulator:
    """Compiles kernels with g++ and launches them; each compiled once a session."""

    def __init__(self, folder: Path, *, portable: bool = False) -> None:
        self.folder = folder
        self._flags = [*FLAGS, "-DFIBERS_PORTABLE"] if portable else FLAGS
        self._loaded: dict[Path, Any] = {}

    def compile(self, text: str, kernel: str, struct: str, defines: dict[str, str]) -> Path:
        """Give the library of one kernel."""
        macros = [f"-D{name}={value}" for name, value in defines.items()]
        key = hashlib.sha256("\0".join([text, kernel, *macros, *self._flags]).encode()).hexdigest()[:16]
        library = self.folder / f"{key}.so"
        if not library.exists():
            mine = Path(tempfile.mkdtemp(dir=self.folder))  # other ranks may be compiling the same
            written, made = mine / "kernel.cu", mine / "kernel.so"
            written.write_text(text)
            names = [f'-DKERNEL_TEXT="{written}"', f"-DKERNEL_NAME={kernel}", f"-DKERNEL_STRUCT={struct}"]
            command = ["g++", *self._flags, *macros, *names, f"-I{HERE}", str(HERE / "launch.cpp"), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr[:3000]
            made.rename(library)
        return library

    def build(self, chosen: Specialisation) -> Path:
        """Give the library of an attention kernel."""
        defines = chosen.defines()
        if chosen.target.dialect == "hip" and chosen.kernel == "matrix":
            defines["TA_HIP"] = "1"  # chooses AMD's fragments; the rest of the dialect is the emulator's own
        text = source.text(f"{chosen.kernel}.cu")
        return self.compile(text, f"treeattn_{chosen.kernel}", "ta_call", defines)

    def build_all(self, chosen: set[Specialisation]) -> None:
        """Compile many at once, on as many cores as there are."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.build, chosen))

    def launch(self, library: Path, call: np.ndarray[Any, Any], order: np.ndarray[Any, Any], wave: int) -> None:
        """Run blocks in ``order``; divergence raises RuntimeError."""
        if library not in self._loaded:
            self._loaded[library] = ctypes.CDLL(str(library)).launch
            self._loaded[library].restype = ctypes.c_char_p
        order = np.ascontiguousarray(order, np.int32)
        pointers = (ctypes.c_void_p(call.ctypes.data), ctypes.c_void_p(order.ctypes.data))
        if report := self._loaded[library](*pointers, len(order), wave):
            raise RuntimeError(report.decode())

    def partial(self, spec: Spec, args: Args, target: Target, *, splits: int = 1, seed: int | None = 0) -> Any:
        """Compute the packed state of a call as ``target`` would, its blocks in an order drawn from ``seed``."""
        chosen = choose(spec, target, k_wide=is_wide(args.k), v_wide=is_wide(args.v))
        tiles = spec.batch * spec.kv_heads * -(-spec.group * spec.q_tokens // chosen.rows)
        out = np.full(spec.packed_shape, np.nan, np.float32)
        part = np.full(tiles * splits * chosen.part + 4, np.nan, np.float32)
        part = part[-part.ctypes.data % 16 // 4 :]
        arrived = np.zeros(tiles, np.int32)
        addresses = {"out": out.ctypes.data, "part": part.ctypes.data, "arrived": arrived.ctypes.data}
        call = pack_call(spec, chosen, args, splits=splits, **addresses)
        blocks = np.arange(tiles * splits)
        order = blocks if seed is None else np.random.default_rng(seed).permutation(blocks)
        self.launch(self.build(chosen), call, order, target.wave)
        assert not arrived.any(), "counters must be 0 for the next launch"
        return out
