"""The kernel's benchmark: that it reads what the call reads, drops what was disturbed, and writes what it found."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest

import treeattn
from treeattn.cli.plots import import_pyplot

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def part(monkeypatch):
    """Import one of the benchmark's files."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"kernel_{name}")


def rows(cases):
    return {case.name: case for group in cases.GROUPS.values() for case in group}


def small(case):
    """Make a case of the same kind with few keys, and just one set of them."""
    tokens = max(64, case.tokens // 256)
    window, kv_len = case.window // 256, case.kv_len and tokens - 3
    return replace(case, tokens=tokens, window=window, kv_len=kv_len)


def test_the_plain_read_is_of_the_seen_bytes_once_and_in_order(part, monkeypatch):
    cases = part("cases")
    monkeypatch.setattr(cases, "APART", 0)
    for case in map(small, rows(cases).values()):
        k, v = cases.make_sets(case)[0]
        words = cases.words_of(case, k, v)
        assert sum(run.nbytes for run in words) == case.nbytes, case
        starts = [run.ctypes.data for run in words]
        halves = [starts] if case.latent else [starts[: len(starts) // 2], starts[len(starts) // 2 :]]
        assert all(half == sorted(half) for half in halves), case


def test_what_is_hidden_from_a_row_is_hidden_from_the_call(part, monkeypatch):
    """Keys that the plain read leaves out may be poison: the result does not change."""
    cases = part("cases")
    monkeypatch.setattr(cases, "APART", 0)
    for case in (small(case) for case in rows(cases).values() if case.window or case.kv_len):
        q, (k, v) = cases.make_queries(case), cases.make_sets(case)[0]
        before = treeattn.attention(q, k, v, **cases.options_of(case))
        for array in (k, v):
            array[:, :, : case.seen.start] = np.nan
            array[:, :, case.seen.stop :] = np.nan
        assert np.array_equal(before, treeattn.attention(q, k, v, **cases.options_of(case))), case


def test_rows_are_chosen_by_name_group_and_type(part):
    cases = part("cases")
    assert [case.name for case in cases.select("f32-gqa,dtypes", "float32")] == ["f32-gqa", "f32-mha"]
    assert {case.tokens for case in cases.select("short", tokens=77)} == {77}
    with pytest.raises(ValueError, match=r"^rows: expected some of .*, got 'f31'"):
        cases.select("f31")


@pytest.mark.parametrize(
    ("before", "after", "disturbed", "kept"),
    [(1.0, 1.25, False, True), (1.26, 1.0, False, False), (1.0, 1.0, True, False), (1.0, 1.0, False, True)],
)
def test_samples_whose_reads_differ_or_that_others_disturbed_are_dropped(part, before, after, disturbed, kept):
    assert part("samples").Sample(before, 2.0, after, disturbed).kept is kept


def test_figures_are_medians_of_what_was_kept(part):
    samples = part("samples")
    taken = [samples.Sample(1.0, call, 1.0, call > 5) for call in (2.0, 4.0, 1.0, 10.0)]
    found = samples.summary(taken, nbytes=10**9)
    assert (found["kept"], found["taken"]) == (3, 4)
    assert (found["share"], found["ms"], found["gb_per_s"], found["read_gb_per_s"]) == (0.5, 2000.0, 0.5, 1.0)
    assert "absent" in samples.summary(taken[-1:], nbytes=1)


def test_a_probe_reads_every_word_whatever_the_number_of_threads(part, monkeypatch):
    samples, read = part("samples"), []
    monkeypatch.setattr(samples, "add", lambda words: read.extend(words.tolist()))
    for threads in (1, 2, 3):
        read.clear()
        runs = [[np.arange(10), np.arange(10, 17)], [np.arange(17, 21)]]
        samples.Probe(runs, threads).read(0, 2)
        assert sorted(read) == list(range(21))


def test_a_library_that_is_not_there_is_a_row_with_the_reason(tmp_path):
    """One short run of the whole: a process for each library, a table, and JSON."""
    command = [sys.executable, str(BENCHMARKS / "kernel.py"), "--rows", "bf16-mha-64", "--threads", "1"]
    command += ["--peers", "treeattn,numpy", "--seconds", "0.1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    own, numpy = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert re.search(r"bf16-mha-64 +│ 1 +│ 64 +│ treeattn ", done.stdout)
    assert own["taken"] >= 1
    assert own["error"] < 2e-6
    assert own["extra_bytes"] < 1_000_000
    assert numpy["absent"] == "NumPy has no fast products of bfloat16"


def test_tables_are_written_between_their_marks_from_all_runs(part, monkeypatch, tmp_path):
    docs = part("docs")
    page = tmp_path / "performance.md"
    page.write_text(docs.PAGE.read_text())
    monkeypatch.setattr(docs, "PAGE", page)
    row = {"name": "f32-gqa", "threads": 2, "tokens": 32_768, "ms": 9.0, "extra_bytes": 1, "form": "matmul"}
    for run, share in enumerate((0.9, 0.8, 0.7)):
        found = [
            {**row, "peer": "treeattn", "share": share, "gb_per_s": 30.0},
            {**row, "peer": "torch", "share": 0.3, "gb_per_s": 10.0 + run},
            {**row, "peer": "jax", "absent": "no module"},
        ]
        about = {"machine": "some", "date": "today", "commit": "abc", "versions": {"numpy": "1"}}
        (tmp_path / f"{run}.json").write_text(json.dumps({**about, "rows": found}))
    before = page.read_text()
    docs.main.callback([str(tmp_path / f"{run}.json") for run in range(3)], "dtypes,peers")
    written = page.read_text()
    assert "| `f32-gqa` | 80 (90, 80, 70) | 30.0 (30.0, 30.0, 30.0) | 9.00 (9.00, 9.00, 9.00) |" in written
    assert "| 30 (30, 30, 30) matmul | - | - | 2.7 (3.0, 2.7, 2.5) |" in written
    assert written.count("some; today; commit abc; numpy 1") == 2
    of_options = slice(*(before.index(f"<!-- {words}options") for words in ("", "end of ")))
    assert before[of_options] in written
    docs.main.callback([str(tmp_path / "0.json")], "dtypes", "intel")
    assert page.read_text().count("some; today; commit abc; numpy 1") == 3
    assert "| `f32-gqa` | 80 (90, 80, 70) |" in page.read_text()


def test_a_plot_of_shares_has_a_panel_per_row_and_says_when_there_is_nothing_to_draw(part, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    report, file = part("report"), tmp_path / "shares.svg"
    row = {"name": "f32-gqa", "threads": 2, "peer": "treeattn"}
    shares = {4096: (0.8, 0.7, 0.9), 32768: (0.9, 0.8, 1.2)}
    drawn = [{**row, "tokens": n, "share": share[0], "share_quartiles": share[1:]} for n, share in shares.items()]
    report.draw({"rows": [*drawn, {**row, "name": "f32-mha", "tokens": 4096, "absent": "disturbed"}]}, str(file))
    assert "f32-mha" not in file.read_text()
    (axis,) = import_pyplot().gcf().axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["4,096", "32,768"]
    assert axis.get_ylim()[1] > 120
    with pytest.raises(click.ClickException, match="no row has figures"):
        report.draw({"rows": [{**row, "tokens": 4096, "absent": "disturbed"}]}, str(file))
