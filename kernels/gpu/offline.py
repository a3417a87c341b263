"""Compile the kernels with NVRTC alone: no card, no driver and no CuPy. For checks and for counting instructions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from treeattn.errors import BackendError, MissingDependencyError
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.table import Specialisation

__all__ = [
    "Resources",
    "compile_attention",
    "compile_ptx",
    "compile_states",
    "compile_text",
    "disassemble",
    "reasons",
    "resources",
]

INSTALL = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


class Resources(NamedTuple):
    """What one kernel takes of a multiprocessor: registers a thread, bytes of stack a thread, shared bytes a block."""

    registers: int
    stack: int
    shared: int
    local: int


def reasons() -> list[str]:
    """Say why kernels can't be compiled here; an empty list means they can."""
    missing = [name for name in ("cuda.bindings.nvrtc", "nvidia.cu13") if not _found(name)]
    return [f"{', '.join(missing)} not installed: {INSTALL}"] if missing else []


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def compile_attention(chosen: Specialisation, arch: str) -> bytes:
    """Give the machine code of an attention kernel for ``arch``, such as ``sm_90``."""
    return compile_text(source.text(f"{chosen.kernel}.cu"), chosen.defines(), arch)


def compile_states(arch: str) -> bytes:
    """Give the machine code of the kernels that work on states, without fused multiply-add."""
    return compile_text(source.text("states.cu"), source.state_defines(), arch, "-fmad=false")


def compile_ptx(chosen: Specialisation, virtual: str) -> bytes:
    """Give the PTX of an attention kernel for ``virtual``, such as ``compute_90``."""
    return compile_text(source.text(f"{chosen.kernel}.cu"), chosen.defines(), virtual).rstrip(b"\0")


def compile_text(text: str, defines: dict[str, str], arch: str, *options: str) -> bytes:
    """Compile ``text``.

    Raises
    ------
    BackendError
        It doesn't compile; the compiler's messages are in the text.
    MissingDependencyError
        NVRTC isn't installed.
    """
    if missing := reasons():
        raise MissingDependencyError(missing[0])
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"treeattn.cu", 0, [], [])
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", "-std=c++17", *options, *macros)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(status):
        log = _bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise BackendError(f"NVRTC refuses the text for {arch}: {log.decode(errors='replace')}")
    ptx = arch.startswith("compute_")
    size, get = (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if ptx else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    code = _bytes(program, size, get)
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _bytes(program: Any, size: Any, get: Any) -> bytes:
    _, length = size(program)
    found = bytes(length)  # which NVRTC fills in place
    get(program, found)
    return found


def resources(code: bytes) -> dict[str, Resources]:
    """Give the resources of each kernel in ``code``, by name."""
    printed = _cuobjdump("-res-usage", code)
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    return {name: Resources(*map(int, numbers)) for name, *numbers in re.findall(pattern, printed)}


def disassemble(code: bytes) -> str:
    """Give the machine instructions as text."""
    return _cuobjdump("-sass", code)


def _cuobjdump(option: str, code: bytes) -> str:
    tool = _tool()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        paths = {"PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # it looks for nvdisasm there
        command = [str(tool), option, file.name]
        done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise BackendError(f"cuobjdump failed: {done.stderr.strip()}")
    return done.stdout


def _tool() -> Path:
    found = importlib.util.find_spec("nvidia.cu13")
    for folder in (found.submodule_search_locations or ()) if found else ():
        tool = Path(folder) / "bin" / "cuobjdump"
        if tool.exists():
            return tool
    raise MissingDependencyError(f"cuobjdump is not installed: {INSTALL}")
