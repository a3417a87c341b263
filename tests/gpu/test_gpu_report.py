"""The report that is made on the day a card is at hand: nothing in it may keep the rest from being made."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_report.py"


@pytest.fixture(scope="module")
def report() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_fails_hangs_or_is_missing_leaves_its_words_and_lets_the_rest_run(
    report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = ["sh", "-c", "sleep 60 & echo before $!; wait"]  # which takes no time to start
    made = [
        report.Part("missing.txt", 30, [["no-such-command"], python("print('after')")]),
        report.Part("failing.txt", 30, [python("print('so far'); raise SystemExit(3)")]),
        report.Part("hanging.txt", 1, [hanging, python("print('never')")]),
        report.Part("last.txt", 30, [python("import treeattn; print(treeattn.__version__)")]),
    ]
    monkeypatch.setattr(report, "parts", lambda out: made)
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--out", str(tmp_path)])
    report.main()
    said = capsys.readouterr().out.splitlines()
    assert "no no-such-command (No such file or directory); exit status 0" in said[0]
    assert "exit status 3" in said[1]
    assert "cut off after 1 s; not run: no time was left" in said[2]
    assert "exit status 0" in said[3]
    assert (tmp_path / "summary.txt").read_text().splitlines()[1:] == said
    assert "so far" in (tmp_path / "failing.txt").read_text()
    before = (tmp_path / "hanging.txt").read_text().rpartition("before ")[2].split()[0]
    assert not alive(int(before)), "what a part has started must not hold the card"


def alive(process: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True


def test_the_minutes_are_those_of_all_parts_together(
    report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = python("import time; time.sleep(60)")
    monkeypatch.setattr(report, "parts", lambda out: [report.Part(f"{i}.txt", 50, [slow]) for i in range(3)])
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--out", str(tmp_path), "--minutes", "0.01"])
    start = time.monotonic()
    report.main()
    assert time.monotonic() - start < 20
    assert (tmp_path / "summary.txt").read_text().count("not run: no time was left") == 2


def test_the_parts_fit_into_a_short_loan_and_into_eight_files(report: Any, tmp_path: Path) -> None:
    """A card is lent for minutes, and a session's reply carries eight files."""
    found = report.parts(tmp_path)
    assert sum(part.limit for part in found) <= 11 * 60
    named = {part.file for part in found} | {"summary.txt"}
    named |= {
        Path(word).name for part in found for command in part.commands for word in command if word.endswith(".json")
    }
    assert len(named) <= 8
