"""Everything to be learned from a card, in one run that leaves files: for the day that one is at hand.

    python benchmarks/gpu_report.py [--out FOLDER] [--minutes M] [--only PART ...]
    make gpu-report CUPY=cuda12

Runs, one after the other and whatever became of the last: `treeattn doctor` with the driver's and CuPy's own words,
``benchmarks/gpu.py``, ``benchmarks/gpu_cache.py``, the checks of ``make test-gpu`` (ranks that share the card among
them), and PyTorch's and CuPy's attention on the same card and shapes. Each leaves what it prints in the folder
(``$OUT``, or ``gpu-report``) as it comes, and ``summary.txt`` has a line for each with its exit status and seconds.
Together they take at most M minutes, 9.5 by default: a part that is slow or hangs is ended, with all that it has
started. Without a card each says why it can't run.

Nothing has to be installed but CuPy, pytest, pytest-timeout, hypothesis and what treeattn itself needs: any Python that
has them will do. Without mpirun the checks on several ranks are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).parents[1]


class Part(NamedTuple):
    """Commands whose output goes to one file, and the seconds that they may take together."""

    file: str
    limit: float
    commands: list[list[str]]


def parts(out: Path) -> list[Part]:
    """Give what is run: what is most worth knowing first."""
    python = sys.executable
    bench = ROOT / "benchmarks"
    pytest = [python, "-m", "pytest", "-m", "gpu", "-ra", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
    # A newer library's warning is worth a line in the report, and not a failed check.
    tests = [*pytest, "-W", "default", "--rootdir", str(ROOT), str(ROOT / "tests" / "gpu")]
    about = [["nvidia-smi"], ["rocm-smi"], [python, "-c", "import cupy; cupy.show_config()"]]
    return [
        Part("doctor.txt", 90, [*about, [python, "-m", "treeattn", "doctor"]]),
        Part("kernels.txt", 150, [[python, str(bench / "gpu.py"), "--json", str(out / "kernels.json")]]),
        Part("cache.txt", 30, [[python, str(bench / "gpu_cache.py")]]),
        Part("tests.txt", 270, [tests]),
        Part("peers.txt", 120, [[python, str(bench / "gpu_peers.py"), "--json", str(out / "peers.json")]]),
    ]


def run_part(part: Part, out: Path, end: float) -> str:
    """Run a part's commands until ``end`` at the latest, and give its line of the summary."""
    start = time.monotonic()
    end = min(end, start + part.limit)
    with (out / part.file).open("w") as file:
        ended = [run(command, file, end) for command in part.commands]
    return f"{part.file:12} {'; '.join(ended)}; {time.monotonic() - start:.0f} s"


def run(command: Sequence[str], file: TextIO, end: float) -> str:
    """Run one command, keep all it prints, and say how it ended."""
    print("$", *command, file=file, flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "PYTHONUNBUFFERED": "1"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else JAX takes most of the card's memory from the others
    left = end - time.monotonic()
    if left <= 0:
        return "not run: no time was left"
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    except OSError as error:
        return f"no {command[0]} ({error.strerror})"
    try:
        return f"exit status {process.wait(left)}"
    except subprocess.TimeoutExpired:
        return f"cut off after {left:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started may outlive it, and hold the card
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-report"), help="folder")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all together")
    parser.add_argument("--only", action="append", help="a part's file, such as tests.txt; may be repeated")
    arguments = parser.parse_args()
    out, end = arguments.out.resolve(), time.monotonic() + 60 * arguments.minutes
    out.mkdir(parents=True, exist_ok=True)
    with (out / "summary.txt").open("a") as summary:
        print(time.strftime("%Y-%m-%d %H:%M:%S %z"), file=summary)
        for part in parts(out):
            if arguments.only is None or part.file in arguments.only:
                line = run_part(part, out, end)
                print(line, file=summary, flush=True)
                print(line, flush=True)


if __name__ == "__main__":
    main()
