"""Every backend that ships, and the fake, through the conformance suite that ships."""

import runpy
from pathlib import Path

import numpy as np
import pytest

import treeattn
from treeattn.backends.registry import find
from treeattn.testing import BackendConformance, FakeBackend


class TestCpu(BackendConformance):
    backend = find("cpu")


class TestReference(BackendConformance):
    backend = find("reference")


class TestFake(BackendConformance):
    backend = FakeBackend()


class TestTheExampleOfABackend(BackendConformance):
    backend = runpy.run_path(str(Path(__file__).parent.parent / "mpi_examples" / "custom_backend.py"))["NumpyBackend"]()
    refused = ("causal", "window", "softcap", "bool mask", "float mask", "kv_len")


def test_the_fake_refuses_with_its_reasons():
    with pytest.raises(treeattn.errors.BackendError, match="no such card; try another"):
        find(FakeBackend(refusals=["no such card", "try another"]))


def test_the_fake_fails_when_told_to():
    fake = FakeBackend(failures={"finish": MemoryError("full")})
    with pytest.raises(MemoryError, match="full"):
        treeattn.PartialState.identity((1, 1, 1, 2), backend=fake).finish()
    assert fake.calls == ["empty", "fill_identity", "finish"]


def test_the_fakes_memory_is_out_of_numpys_reach():
    state = treeattn.PartialState.identity((1, 1, 1, 2), backend=FakeBackend())
    with pytest.raises(TypeError, match="on a device"):
        np.asarray(state._packed)
