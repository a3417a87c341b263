"""Every backend that ships, and the fake, through the conformance suite that ships."""

import runpy
from pathlib import Path

import numpy as np
import pytest

import treeattn
from treeattn.backends.host import StagedOps
from treeattn.backends.reference import ReferenceBackend
from treeattn.backends.registry import find
from treeattn.testing import BackendConformance, FakeBackend
from treeattn.testing.fake_backend import DeviceArray


class TestCpu(BackendConformance):
    backend = find("cpu")


class TestReference(BackendConformance):
    backend = find("reference")


class TestFake(BackendConformance):
    backend = FakeBackend()


class LeastOps(StagedOps):
    """No more than the guide asks for where NumPy can't see states."""

    name = "least"

    def empty(self, shape, dtype):
        return DeviceArray(np.full(shape, np.nan, dtype))

    def fill_identity(self, packed):
        packed._memory[..., :-1], packed._memory[..., -1] = 0, -np.inf

    def to_host(self, packed, out):
        out[:] = packed._memory.reshape(-1).view(np.uint8)

    def from_host(self, data, packed):
        packed._memory.reshape(-1).view(np.uint8)[:] = data


class LeastBackend(ReferenceBackend):
    name = "least"

    def __init__(self):
        self.ops = LeastOps()

    def prepare(self, spec):
        compute = super().prepare(spec)
        return lambda args, out: compute(args, out._memory)


class TestTheLeastThatAPlugInCanWrite(BackendConformance):
    backend = LeastBackend()


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
