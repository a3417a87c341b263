"""The kernels' text through NVIDIA's own compilers, for cards that are not here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.kernels.gpu import offline, source
from treeattn.kernels.gpu.table import Specialisation, choose
from treeattn.kernels.gpu.targets import target_of

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
MASK = np.zeros((1, 1, 1, 16), np.float32)
SCALES = np.ones((1, 1, 1, 1), np.float32)
FEATURES: dict[str, Any] = {"mask": MASK, "causal": True, "softcap": 3.0}
SCALED: dict[str, Any] = {"k_scale": SCALES, "v_scale": SCALES}

pytestmark = pytest.mark.skipif(bool(offline.reasons()), reason="; ".join(offline.reasons()))


def special(
    dtype: str, group: int, width: int, value_width: int = 0, arch: str = "sm_90", **options: Any
) -> Specialisation:
    made = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q = np.zeros((1, group, 1, width), np.float32 if made.itemsize == 1 else made)
    k, v = np.zeros((1, 1, 16, width), made), np.zeros((1, 1, 16, value_width or width), made)
    spec, _ = resolve(q, k, v, Options(**options))
    wide = width * made.itemsize % 16 == 0
    return choose(spec, target_of(arch), k_wide=wide, v_wide=wide)


EVERYWHERE = {
    "vector, float32, group 4": special("float32", 4, 128),
    "vector, float8, features": special("float8_e4m3fn", 2, 128, **FEATURES),
    "tensor cores, bfloat16": special("bfloat16", 8, 128),
    "tensor cores, bfloat16, width 256": special("bfloat16", 8, 256),
}
TABLE = {
    **EVERYWHERE,
    "vector, bfloat16, group 1": special("bfloat16", 1, 128),
    "vector, bfloat16, group 4": special("bfloat16", 4, 128, arch="sm_75"),
    "vector, bfloat16, group 8, features": special("bfloat16", 8, 128, arch="sm_75", **FEATURES),
    "vector, float16, width 256": special("float16", 4, 256, arch="sm_75"),
    "vector, bfloat16, widths 576 and 512": special("bfloat16", 16, 576, 512, arch="sm_75"),
    "vector, int8, scaled, features": special("int8", 4, 128, **FEATURES, **SCALED),
    "vector, float32, width 7": special("float32", 4, 7),
    "tensor cores, bfloat16, features": special("bfloat16", 8, 128, **FEATURES),
    "tensor cores, float16, features": special("float16", 8, 64, **FEATURES),
    "tensor cores, bfloat16, width 96": special("bfloat16", 8, 96),
    "tensor cores, float16, width 192, features": special("float16", 8, 192, **FEATURES),
    "tensor cores, bfloat16, widths 576 and 512, features": special("bfloat16", 16, 576, 512, **FEATURES),
}


def assert_fits(found: offline.Resources, chosen: Specialisation) -> None:
    assert found.stack == found.local == 0, "registers spill"
    assert found.registers <= chosen.registers
    assert found.shared <= 48 * 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_compiles_for_every_card_without_spilling(name: str, arch: str) -> None:
    chosen = EVERYWHERE[name]
    [found] = offline.resources(offline.compile_attention(chosen, arch)).values()
    assert_fits(found, chosen)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in EVERYWHERE])
def test_every_kind_of_kernel_keeps_to_its_registers(name: str) -> None:
    [found] = offline.resources(offline.compile_attention(TABLE[name], "sm_90")).values()
    assert_fits(found, TABLE[name])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_merging_is_compiled_without_fused_operations(arch: str) -> None:
    code = offline.compile_states(arch)
    names = {"merge", "finish", "identity", "pack", "merge_rows", "unpack"}
    assert {f"treeattn_{name}" for name in names} == set(offline.resources(code))
    found = dict(re.findall(r"Function : treeattn_(\w+)(.*?)(?=Function :|\Z)", offline.disassemble(code), re.DOTALL))
    for name in names - {"finish"}:  # which divides, and IEEE division is made of fused operations
        assert not re.findall(r"\b[DF]FMA\b", found[name])


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed: it comes with the CUDA toolkit")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_ptxas_agrees_about_registers_and_spills(name: str, tmp_path: Path) -> None:
    chosen = EVERYWHERE[name]
    written = tmp_path / "kernel.ptx"
    written.write_bytes(offline.compile_ptx(chosen, "compute_90"))
    version = re.sub(rb"\.version \d+\.\d+", b".version 8.0", written.read_bytes())  # an older ptxas reads it too
    written.write_bytes(version)
    command = ["ptxas", "-v", "-arch=sm_90", str(written), "-o", str(tmp_path / "kernel.cubin")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in printed
    [registers] = re.findall(r"Used (\d+) registers", printed)
    assert int(registers) <= chosen.registers


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    table = tmp_path_factory.mktemp("slots") / "slots.json"
    script = ROOT / "benchmarks" / "issue_slots.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "--card", "H200", "--json", str(table)]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=200, check=True)
    return {(row["kernel"], row["arch"]): row for row in json.loads(table.read_text())}


def test_the_streaming_loop_loads_sixteen_bytes_at_a_time(slots: dict[Any, Any]) -> None:
    for row in slots.values():
        assert row["narrow_loads"] == 0
        assert row["wide_loads"] * 32 * 16 == row["bytes"]


def test_streaming_at_an_h200s_rate_leaves_issue_slots(slots: dict[Any, Any]) -> None:
    assert slots["vector, bfloat16, group 4", "sm_90"]["share"]["H200"] <= 0.85
    assert slots["tensor cores, bfloat16, group 8", "sm_90"]["share"]["H200"] <= 0.20
    assert slots["tensor cores, float16, group 8", "sm_90"]["share"]["H200"] <= 0.20


def test_the_text_has_no_include_left() -> None:
    for name in ("vector.cu", "matrix.cu", "states.cu"):
        assert "#include" not in source.text(name)
