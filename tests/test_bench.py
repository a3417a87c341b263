"""`treeattn bench`: every row is checked, whatever its time; tests look at no time."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from treeattn import cli
from treeattn.cli.comparison import Row
from treeattn.cli.contender import ALGORITHMS
from treeattn.cli.plots import draw, import_pyplot
from treeattn.cli.workload import Workload

SMALL = (
    "--tokens",
    "60,100",
    "--q-heads",
    "8",
    "--kv-heads",
    "4",
    "--head-dim",
    "8",
    "--repeats",
    "2",
    "--warmup",
    "1",
)


@pytest.fixture
def bench(capfd, monkeypatch):
    """Run ``treeattn bench`` with some arguments in this process, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(("bench", *map(str, arguments)))
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_every_algorithm_on_every_workload_is_a_checked_row(bench, tmp_path):
    arguments = ("--threads", "--ranks", "2,3", "--batch", "1,2", "--csv", tmp_path / "rows.csv", "--json", "-")
    status, out, err = bench(*SMALL, *arguments)
    assert (status, err) == (0, "")
    told = json.loads(out)
    rows = told["rows"]
    cases = {(row["ranks"], row["tokens"], row["batch"], row["algorithm"]) for row in rows}
    assert len(rows) == len(cases) == 2 * 2 * 2 * len(ALGORITHMS)
    for row in rows:
        assert row["correct"]
        assert row["as_stated"]
        assert row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert {"machine", "ranks are", "backend", "plan"} <= told["environment"].keys()
    with (tmp_path / "rows.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["algorithm"] for row in written] == [row["algorithm"] for row in rows]


def test_tables_have_the_papers_bytes_beside_the_counted_ones(bench):
    status, out, _ = bench(*SMALL, "--threads", "--ranks", "2", "--algorithms", "tree,ring", "--tokens", "100")
    assert status == 0
    assert "2 ranks on 1 host, 100 tokens, batch 1" in out
    tree, ring = (
        [line.split() for line in out.splitlines() if line.strip().startswith(name)] for name in ("tree ", "ring ")
    )
    shard = 2 * 4 * 50 * 8 * 4  # K and V of 50 tokens, bytes
    q_and_out = 2 * 8 * 8 * 4
    sent, papers, memory, papers_memory = map("".join, zip(ring[1][2::2], ring[1][3::2], strict=True))
    assert (sent, papers) == (f"{shard / 1000:.3g}kB", f"{2 * shard / 1000:.3g}kB")
    assert memory == papers_memory == f"{(2 * shard + q_and_out) / 1000:.3g}kB"
    assert "".join(tree[1][-2:]) == f"{(shard + q_and_out + 2 * 8 * 4) / 1000:.3g}kB"


def test_an_algorithm_that_refuses_is_a_row_with_its_reason(bench):
    arguments = ("--threads", "--ranks", "5", "--algorithms", "tree,ulysses,ulysses_gqa", "--tokens", "60")
    status, out, _ = bench(*SMALL, *arguments)
    assert status == 0
    assert "refused" in out
    assert "ulysses on 5 ranks: k: expected at least 5 heads" in out


def test_emulated_latency_and_hosts_are_told(bench):
    arguments = ("--emulate-latency", "0:0.01", "--ranks", "4", "--algorithms", "tree,ring", "--tokens", "60")
    status, out, _ = bench(*SMALL, *arguments, "--ranks-per-host", "2", "--json", "-")
    assert status == 0
    told = json.loads(out)
    assert told["environment"]["emulated latency (ms)"] == "0:0.01"
    assert {row["hosts"] for row in told["rows"]} == {2}


@pytest.mark.parametrize("plan", ["default", "binary"])
def test_the_tree_takes_what_its_plan_is_forecast_to_take(bench, plan):
    """On imagined clocks, by which a second of delay outweighs whatever this machine does meanwhile."""
    arguments = ("--emulate-latency", "1000", "--algorithms", "tree,ring", "--tokens", "60", "--plan", plan)
    status, out, _ = bench(*SMALL, *arguments, "--ranks", "2,8", "--json", "-")
    assert status == 0
    rows = {(row["algorithm"], row["ranks"]): row for row in json.loads(out)["rows"]}
    rounds = {2: 1, 8: 3 if plan == "binary" else 1}
    for ranks in (2, 8):
        row = rows["tree", ranks]
        assert row["median_ms"] == pytest.approx(row["forecast_ms"], rel=0.05)
        assert row["forecast_ms"] == pytest.approx(1000 * rounds[ranks] + row["alone_ms"], rel=0.05)
        assert rows["ring", ranks]["median_ms"] == pytest.approx(1000 * (ranks - 1), rel=0.15)
        assert rows["ring", ranks]["forecast_ms"] is None


def test_a_wrong_row_is_shown_and_fails(bench, monkeypatch):
    right = Workload.right.func(Workload(60, 1, 8, 4, 1, 8, 8, "float32", "bhtd", False, None, None, 0))
    monkeypatch.setattr(Workload, "right", replace(right, answer=right.answer + 1))
    status, out, err = bench(*SMALL, "--threads", "--ranks", "2", "--algorithms", "tree,ring", "--tokens", "60")
    assert status == 1
    assert " > " in out
    assert err.strip() == "treeattn: 2 of 2 rows are wrong, of tree, ring"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--algorithms", "tree,rign"), "expected all, or any of tree, ring, "),
        (("--ranks", "2,x"), "expected positive numbers between commas, such as 2,4,8, got '2,x'"),
        (("--emulate-latency", "soon"), "latency: expected milliseconds between hosts"),
        (("--kv-heads", "3"), "k: expected a number of heads that divides q's 8, got 3"),
        (("--plan", "bushy"), "plan: expected"),
    ],
    ids=str,
)
def test_wrong_options_are_one_sentence_before_anything_starts(bench, arguments, sentence):
    status, out, err = bench(*SMALL, *arguments)
    assert status != 0
    assert out == ""
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_a_plot_without_matplotlib_names_the_extra(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = bench(*SMALL, "--plot", tmp_path / "rows.png")
    assert status == 1
    assert "pip install 'treeattn[plot]'" in err


def test_plots_are_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed")
    arguments = ("--threads", "--ranks", "2,3", "--algorithms", "tree,ring", "--plot", tmp_path / "rows.png")
    status, _, _ = bench(*SMALL, *arguments)
    assert status == 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_one_rank_goes_to_the_file_that_was_named(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed")
    status, _, err = bench(*SMALL, "--threads", "--ranks", "1", "--algorithms", "tree", "--plot", tmp_path / "rows")
    assert (status, err) == (0, "")
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("file", ["/nowhere/rows.png", "rows.spiral"])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(bench, file):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed")
    status, out, err = bench("--plot", file)
    assert status
    assert out == ""
    assert re.match("treeattn: (/nowhere/rows.png: No such file|.*expected a name that ends in one of)", err)


def test_an_algorithm_has_one_colour_in_all_panels_of_a_plot(monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib", reason="matplotlib (extra `plot`) is not installed") and import_pyplot()
    drawn = []
    monkeypatch.setattr(pyplot.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    numbers = {"hosts": 1, "tokens": 64, "batch": 1, "payload_bytes": 8, "median_ms": 1.0, "peak_bytes": 1}
    rows = [Row(name, ranks, **numbers) for ranks in (2, 16) for name in ("tree", "ulysses", "gather")]
    draw([row for row in rows if (row.algorithm, row.ranks) != ("ulysses", 16)], str(tmp_path / "rows.png"))
    colors = [{line.get_label(): line.get_color() for line in axis.get_lines()} for axis in drawn[0].axes]
    assert colors[0].keys() == {"tree", "ulysses", "gather"}
    assert colors[1] == {name: colors[0][name] for name in ("tree", "gather")}


def test_mpi_ranks_report_to_the_command_that_started_them(bench, mpirun):
    arguments = ("--ranks", "2", "--algorithms", "tree,allreduce3", "--tokens", "60", "--backend", "reference")
    status, out, err = bench(*SMALL, *arguments, "--json", "-")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["environment"]["ranks are"] == mpirun.runtime.banner
    assert [(row["algorithm"], row["collectives"], row["correct"]) for row in told["rows"]] == [
        ("tree", 0, True),
        ("allreduce3", 3, True),
    ]
    assert np.isfinite([row["median_ms"] for row in told["rows"]]).all()
