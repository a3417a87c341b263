"""Equipment for checking GPU code without a GPU."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

# These modules are programs' too, which mpirun starts: a plain import finds them there, and from here on in tests.
sys.path.insert(0, str(Path(__file__).parent))

from emulation import Emulator
from fake_card import FakeCard


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Give the emulator; skip where there is no C++ compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: the kernels' text can't be executed on the CPU")
    return Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def card(emulator: Emulator) -> FakeCard:
    """Give a card whose memory faults when the CPU touches it."""
    return FakeCard(emulator)
