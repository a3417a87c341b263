"""Rules that hold for the kernels' text itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import treeattn.kernels.gpu

FOLDER = Path(treeattn.kernels.gpu.__file__).parent
FILES = sorted(FOLDER.glob("*.cu"))


def code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_wave_width_is_written_as_a_number(path: Path) -> None:
    found = re.findall(
        r"\bwarpSize\b|lane\s*[%/&]\s*(?:31|32|63|64)\b|threadIdx\.x\s*[%/&]\s*(?:31|32|63|64)\b", code(path)
    )
    assert not found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_masks_of_lanes_appear_only_where_hip_does_not_come(path: Path) -> None:
    text = re.sub(r"#ifdef TA_HIP\n.*?#else\n(.*?)#endif", "", code(path), flags=re.DOTALL)
    assert not re.findall(r"_sync\b|0xffffffffu?\b", text.replace("mma.sync", ""))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_files_of_this_folder_are_included(path: Path) -> None:
    included = re.findall(r"#\s*include\s*(\S+)", code(path))
    assert all(re.fullmatch(r'"\w+\.cu"', name) and (FOLDER / name.strip('"')).exists() for name in included)


def test_inline_assembly_stays_in_the_dialects() -> None:
    assert {path.name for path in FILES if re.search(r"\basm\b", code(path))} <= {
        "dialect.cu",
        "matrix_nvidia.cu",
        "types.cu",
    }
