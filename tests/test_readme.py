"""What the README shows is what is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_the_script_is_the_example_to_the_letter():
    assert blocks("python")[0] in (ROOT / "mpi_examples" / "decode.py").read_text()


def test_the_other_python_code_runs_and_prints_what_its_comment_says():
    code = blocks("python")[1]
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert job.returncode == 0, job.stderr
    assert job.stdout.strip() == code.rstrip().rpartition("# ")[2]


def test_a_baseline_is_timed_as_the_page_says():
    page = (ROOT / "docs" / "comparison.md").read_text()
    code = re.search(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1]
    arrays = "import numpy as np, treeattn\ncomm = treeattn.TreeComm()\nq = k = v = np.ones((1, 2, 3, 4), np.float32)\n"
    program = f"{arrays}{code}\nassert out.shape == q.shape"
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True)


def test_every_file_it_links_to_is_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("target", re.findall(r"`?make ([a-z-]+)", README))
def test_every_make_target_it_names_is_there(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("inherited", [False, True])
def test_the_demo_asks_any_question_to_the_letter(inherited):
    asked = {"RANKS": "2", "QUESTION": 'What is "exact" here? It\'s $5 & more'}
    variables = [] if inherited else [f"{name}={value}" for name, value in asked.items()]
    environ = os.environ | (asked if inherited else {}) | {"MAKEFLAGS": ""}  # those of a `make test` above
    make = ["make", "--dry-run", "--no-print-directory", "demo", *variables]
    job = subprocess.run(make, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True)
    words = shlex.split(job.stdout.splitlines()[-1])
    assert [words[words.index(option) + 1] for option in ("--ranks", "--question")] == list(asked.values())


COMMANDS = re.findall(r"^\$ (?:mpirun -n 2 )?treeattn ([^#\n]+)", README, flags=re.MULTILINE)
COMMANDS += re.findall(r"`treeattn (\w+ --[^`]+)`", README)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_it_shows_is_one(command):
    word, *arguments = command.split()
    job = subprocess.run(
        [sys.executable, "-m", "treeattn", word, "--help"], capture_output=True, text=True, timeout=120, check=True
    )
    assert [option for option in arguments if option.startswith("--") and option not in job.stdout] == []
