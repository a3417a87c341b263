"""Equipment for checking GPU code without a GPU."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

# These modules are programs' too, which mpirun starts: a plain import finds them there, and from here on in tests.
sys.path.insert(0, str(Path(__file__).parent))

from emulation import Emulator
from fake_card import FakeCard, FakeCardBackend

from treeattn.gpu import cards, peer_memory


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


@pytest.fixture
def backends(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> list[FakeCardBackend]:
    """Give every rank a card, as its thread knows it."""
    made = [FakeCardBackend(FakeCard(emulator)) for _ in range(5)]

    def this_card() -> tuple[Any, list[str]]:
        return made[int(threading.current_thread().name.removeprefix("rank "))].ops, []

    for module in (cards, peer_memory):
        monkeypatch.setattr(module, "this_card", this_card)
    return made
