"""Ranks that run different code are told so when they come together."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import treeattn
from treeattn.errors import CommError
from treeattn.ranks.versions import check_versions, version

HERE = Path(treeattn.__file__).parent


def copied(folder):
    """Copy the package, whose links become folders."""
    return shutil.copytree(HERE, folder / "treeattn", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.mark.parametrize("changed", ["kernels/window.py", "kernels/gpu/merge.cu", "ranks/team.py", "backends/cpu.py"])
def test_a_version_is_the_same_wherever_it_is_installed_and_tells_all_sources(tmp_path, changed):
    folder = copied(tmp_path)
    assert version.__wrapped__(folder) == version()
    with open(folder / changed, "a") as file:
        file.write("\n")
    assert version.__wrapped__(folder) != version()


@pytest.mark.parametrize("changed", ["", "comm.py"])
def test_ranks_with_other_code_are_one_error_on_every_rank(mpirun, tmp_path, changed):
    folder = copied(tmp_path)
    if changed:
        with open(folder / changed, "a") as file:
            file.write("\n")
    reports = mpirun("mixed_versions", 3, tmp_path).reports
    assert [Path(each["file"]).parent == folder for each in reports] == [False, True, False]
    said = {each["said"] for each in reports}
    assert len(said) == 1
    found = r"0\.1\.0 \(([0-9a-f]{12})\)"
    text = "ranks run different versions of treeattn: {0} on ranks 0, 2, host ({1}); {0} on rank 1, host ({1})\\. "
    assert not changed or re.match(text.format(found, "\\S+"), said.pop())
    assert changed or said == {""}


def test_many_ranks_are_named_in_short():
    told = [{"version": "1 (a)", "name": f"n{rank}"} for rank in range(20)] + [{"operation": "TreeComm"}]
    with pytest.raises(CommError) as caught:
        check_versions(told, rank=0)
    assert "1 (a) on ranks 0, 1, 2, 3, 4, 5, 6, 7, 12 more, hosts n0, n1, n2, n3, n4, n5, n6, n7 and 12 more; " in str(
        caught.value
    )
    assert str(caught.value).endswith("one that does not say on rank 20, host unknown. Install the same on every host")
    check_versions(told[:20], rank=0)
