"""Everything to be learned from a card, in one run that leaves files: for the day that one is at hand.

    python benchmarks/gpu_report.py [--out FOLDER]
    make gpu-report CUPY=cuda12

Runs, one after the other, whatever the last one did: `treeattn doctor`, the checks of ``make test-gpu`` (ranks that
share the card among them), ``benchmarks/gpu.py``, and PyTorch's and CuPy's attention on the same card and shapes. Each
leaves its output in the folder (``$OUT``, or ``gpu-report``), and ``summary.txt`` has a line for each with its exit
status and seconds. Without a card each says why it can't run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 240
"""Seconds that one of them may take: a card that is lent for minutes must come to the next."""


def commands(out: Path) -> dict[str, list[str]]:
    """Give what is run, by the name of the file that its output goes to."""
    python = sys.executable
    return {
        "doctor.txt": [python, "-m", "treeattn", "doctor"],
        "card.txt": ["nvidia-smi"],
        "tests.txt": [python, "-m", "pytest", "-m", "gpu", "-ra", "-q", str(ROOT / "tests" / "gpu")],
        "kernels.txt": [python, str(ROOT / "benchmarks" / "gpu.py"), "--json", str(out / "kernels.json")],
        "peers.txt": [python, str(ROOT / "benchmarks" / "gpu_peers.py"), "--json", str(out / "peers.json")],
        "issue_slots.txt": [python, str(ROOT / "benchmarks" / "issue_slots.py")],
    }


def run(command: list[str], file: Path) -> str:
    """Run one command, keep all it prints, and give its line of the summary."""
    start = time.perf_counter()
    try:
        with file.open("w") as output:
            done = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT, check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        ended = f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"cut off after {LIMIT} s"
    except OSError as error:
        ended = f"not run: {error}"
    return f"{file.name:16} {ended}, {time.perf_counter() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-report"), help="folder")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "summary.txt").open("w") as summary:
        print(time.strftime("%Y-%m-%d %H:%M:%S %z"), file=summary)
        for name, command in commands(out).items():
            line = run(command, out / name)
            print(line, file=summary, flush=True)
            print(line, flush=True)


if __name__ == "__main__":
    main()
