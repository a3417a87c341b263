"""The benchmarks for cards, walked through without one: NumPy stands in for CuPy, and the CPU for the card."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn.backends import registry
from treeattn.kernels.gpu import offline

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Event:
    """Events whose clock is a counter of what was started."""

    clock = 0.0

    def record(self) -> None:
        self.at = Event.clock
        Event.clock += 1e-3

    def synchronize(self) -> None:
        pass


class Kernels:
    """Compiled kernels that do nothing but take their time."""

    def __init__(self, code: str, options: Any) -> None:
        self.code = code

    def get_function(self, name: str) -> Any:
        assert f"void {name}(" in self.code

        def launch(grid: Any, block: Any, arguments: Any) -> None:
            Event.clock += 2e-3

        return launch


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the benchmarks with the stand-ins in place."""
    rng = np.random.default_rng(0)
    cuda = types.SimpleNamespace(Event=Event, get_elapsed_time=lambda start, end: end.at - start.at)
    random = types.SimpleNamespace(standard_normal=lambda shape, dtype: rng.standard_normal(shape, dtype=dtype))
    same = {name: getattr(np, name) for name in ("zeros", "full", "exp")}
    cupy = types.SimpleNamespace(cuda=cuda, random=random, RawModule=Kernels, **same)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("gpu", "gpu_cache", "gpu_peers", "gpu_timing")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    gpu, cache, peers, timing = map(__import__, names)
    backend: Any = registry.load("cpu")
    monkeypatch.setattr(backend, "runtime", types.SimpleNamespace(multiprocessors=2), raising=False)
    monkeypatch.setattr(timing, "REPEATS", 2)
    monkeypatch.setattr(gpu, "COLD_BYTES", 2**20)
    monkeypatch.setattr(gpu, "capture", lambda *_, **__: lambda: None)
    for module in (gpu, cache, peers):
        monkeypatch.setattr(module, "the_backend", lambda: backend)
    return types.SimpleNamespace(gpu=gpu, cache=cache, peers=peers, timing=timing)


def test_the_table_of_kernels_is_made_row_by_row(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--keys", "40", "--keys", "-1", "--keys", "70", "--json", str(table)])
    benchmarks.gpu.main()
    first, failed, last = json.loads(table.read_text())
    assert "failed" in failed
    for row, keys in ((first, 40), (last, 70)):
        assert row["keys"] == keys
        assert row["us of a read"] == pytest.approx(5.0)  # an event and two launches
        assert row["error"] <= 2e-5, "the CPU's kernel is as exact as that"
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_cache_is_filled_and_decoded_at_each_length(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_cache.py", "--keys", "40", "--keys", "-1"])
    benchmarks.cache.main()
    first, failed = capsys.readouterr().out.splitlines()
    assert "failed" in failed
    found = re.findall(r"(us [a-z ]+|error) ([\d.e+-]+)", first)
    times = ["us to fill", "us from the host", "us to append", "us to decode", "us for three", "us of a step in all"]
    assert [name for name, _ in found] == [*times, "error"]
    assert float(found[-1][1]) <= 2**-7, "out is bfloat16"


def test_who_is_not_there_leaves_the_other_rows(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    rows = {row["who"]: row for row in benchmarks.peers.rows(50)}
    assert list(rows) == ["treeattn", "CuPy", "PyTorch", "PyTorch, FlashAttention"]
    assert rows["treeattn"]["error"] <= 2**-7, "out is bfloat16"
    assert rows["CuPy"]["error"] <= 2e-6
    assert "torch" in rows["PyTorch"]["failed"]


def test_normal_numbers_are_rounded_to_bfloat16(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(1).standard_normal(1000, dtype=np.float32)
    cupy = types.SimpleNamespace(random=types.SimpleNamespace(standard_normal=lambda *_, **__: drawn.copy()))
    found = benchmarks.timing.normal(cupy, (1000,))
    assert found.dtype == ml_dtypes.bfloat16
    assert np.abs(found.astype(np.float32) - drawn).max() <= 2**-8 * np.abs(drawn).max()


@pytest.mark.skipif(bool(offline.reasons()), reason="; ".join(offline.reasons()))
def test_the_reading_kernel_reads_sixteen_bytes_at_a_time(benchmarks: Any) -> None:
    code = offline.disassemble(offline.compile_text(benchmarks.timing.TEXT, {}, "sm_90"))
    loads = re.findall(r"\bLDG\.\S+", str(code))
    assert len(loads) >= 8
    assert all("128" in load for load in loads)
