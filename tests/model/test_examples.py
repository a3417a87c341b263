"""The small examples run as their docstrings say, alone and on ranks, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "mpi_examples"


def alone(name: str) -> str:
    """Run an example without MPI and give what it prints."""
    command = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout


def assert_decode(output: str, ranks: int) -> None:
    """Every rank prints its share and one checksum; rank 0 is right to float32's rounding."""
    assert len(re.findall(rf"of {ranks}: {4096 // ranks}\d* of 4096 keys", output)) >= 1
    assert len(set(re.findall(r"output (\w{8})", output))) == 1
    assert float(re.search(r", (\S+) from one process", output)[1]) < 1e-6


def assert_cache(output: str, ranks: int) -> None:
    held = re.findall(rf"rank \d of {ranks}, host: (\d+) of 2008 tokens", output)
    assert (len(held), sum(map(int, held))) == (ranks, 2008)
    assert len(set(re.findall(r"output (\w{8})", output))) == 1
    assert float(re.search(r", (\S+) from one process", output)[1]) < 1e-6


def assert_custom_backend(output: str, ranks: int) -> None:
    errors = re.findall(r"rank \d of \d: (\S+) from the built-in backend", output)
    assert len(errors) == ranks
    assert max(map(float, errors)) < 1e-6
    assert output.count("backend 'numpy' can't run this: softcap is not supported; use backend='cpu'") == 1


def assert_host_map(output: str, ranks: int) -> None:
    assert f"allreduce over {ranks} rank" in output
    pairs = re.findall(r"sent (.*); predicted (.*)", output)
    assert len(pairs) == ranks
    assert all(sent == predicted for sent, predicted in pairs)


CHECKS = {
    "decode.py": assert_decode,
    "cache.py": assert_cache,
    "custom_backend.py": assert_custom_backend,
    "host_map.py": assert_host_map,
}


def assert_says(name: str, output: str, ranks: int) -> None:
    """Assert what an example is there to show."""
    CHECKS[name](output, ranks)


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_alone(name: str) -> None:
    assert_says(name, alone(name), 1)


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_on_ranks(mpirun: Any, name: str) -> None:
    assert_says(name, mpirun(EXAMPLES / name, 2).stdout, 2)
