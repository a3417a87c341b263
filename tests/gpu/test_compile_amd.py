"""The kernels' text through clang for AMD cards that are not here, without ROCm."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.table import Specialisation, choose
from treeattn.kernels.gpu.targets import target_of

HERE = Path(__file__).parent
ARCHITECTURES = ["gfx90a", "gfx942", "gfx1100", "gfx1201"]
FEATURES: dict[str, Any] = {"mask": np.zeros((1, 1, 1, 16), np.float32), "causal": True, "softcap": 3.0}

pytestmark = pytest.mark.skipif(
    shutil.which("clang-19") is None, reason="clang-19 is not installed: apt-get install clang-19 lld-19"
)


def special(arch: str, dtype: str, group: int, widths: tuple[int, int], **options: Any) -> Specialisation:
    made = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q = np.zeros((1, group, 1, widths[0]), np.float32 if made.itemsize == 1 else made)
    k, v = (np.zeros((1, 1, 16, width), made) for width in widths)
    return choose(resolve(q, k, v, Options(**options))[0], target_of(arch))


CASES: dict[str, tuple[Any, ...]] = {
    "vector, float32, group 4": ("float32", 4, (128, 128), {}),
    "vector, bfloat16, group 1, features": ("bfloat16", 1, (128, 128), FEATURES),
    "vector, float8, group 2": ("float8_e4m3fn", 2, (128, 128), {}),
    "sixteen bits, width 64, features": ("float16", 8, (64, 64), FEATURES),
    "sixteen bits, width 128, features": ("bfloat16", 8, (128, 128), FEATURES),
    "sixteen bits, width 256": ("bfloat16", 8, (256, 256), {}),
    "sixteen bits, widths 576 and 512": ("bfloat16", 8, (576, 512), {}),
}


def assembly(folder: Path, text: str, defines: dict[str, str], arch: str, *flags: str) -> str:
    written, made = folder / "kernel.hip", folder / "kernel.s"
    written.write_text(text)
    command = ["clang-19", "-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "--no-gpu-bundle-output"]
    command += [f"--offload-arch={arch}", "-O3", "-std=c++17", "-include", str(HERE / "hip_on_clang.h"), *flags]
    command += [f"-D{name}={value}" for name, value in defines.items()]
    done = subprocess.run(
        [*command, "-S", "-o", str(made), str(written)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[:3000]
    return made.read_text()


def numbers(text: str, what: str) -> list[int]:
    return [int(found) for found in re.findall(rf"; {what}: *(\d+)", text)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_compiles_for_every_card_without_scratch(name: str, arch: str, tmp_path: Path) -> None:
    *shape, options = CASES[name]
    chosen = special(arch, *shape, **options)
    made = assembly(tmp_path, source.text(f"{chosen.kernel}.cu"), chosen.defines(), arch)
    assert numbers(made, "ScratchSize") == [0]
    assert numbers(made, "LDSByteSize")[0] <= 64 * 1024
    alone = chosen.target.matrix == "mfma" and chosen.d == 576  # all registers of a SIMD unit are one wave's
    assert numbers(made, "Occupancy")[0] >= (1 if alone else 2)
    assert numbers(made, "WaveSize") in ([], [chosen.target.wave])
    matrix = {"mfma": "v_mfma_f32_16x16x16", "wmma11": "v_wmma_f32_16x16x16", "wmma12": "v_wmma_f32_16x16x16"}
    assert chosen.kernel == "vector" or matrix[str(chosen.target.matrix)] in made
    assert "global_load_dwordx4" in made or "global_load_b128" in made


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_merging_is_compiled_without_fused_operations(arch: str, tmp_path: Path) -> None:
    made = assembly(tmp_path, source.text("states.cu"), source.state_defines(), arch)
    assert numbers(made, "ScratchSize") == [0] * 6
    for name in ("merge", "pack", "merge_rows", "unpack"):
        kernel = made.split(f"treeattn_{name}:")[1].split("s_endpgm")[0]
        assert not re.findall(r"v_(?:pk_)?(?:fma|fmac|mad|mac|dot)\w*_f(?:32|64)", kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_writing_to_a_cache_is_compiled_without_scratch(arch: str, tmp_path: Path) -> None:
    made = assembly(tmp_path, source.text("store.cu"), source.store_defines(target_of(arch)), arch)
    assert numbers(made, "ScratchSize") == [0]
