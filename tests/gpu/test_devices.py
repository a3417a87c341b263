"""Device arrays of other libraries: who made them, how they come in, and how results go back."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from fake_card import FakeCard

from treeattn.arguments.devices import DeviceView, broadcast, give, kind_of, on_device, take
from treeattn.errors import InputError, MissingDependencyError


def foreign(module: str, device: int = 2) -> Any:
    """Make an array of the library called ``module``, on a device with DLPack's number."""
    methods = {"__dlpack__": lambda self, **_: None, "__dlpack_device__": lambda self: (device, 0)}
    return type("Array", (), {**methods, "__module__": f"{module}.some.place"})()


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the libraries: what comes out says which function made it."""

    def named(name: str) -> Any:
        return lambda array: (name, array)

    for module, function in (("cupy", "from_dlpack"), ("torch", "from_dlpack"), ("numba.cuda", "as_cuda_array")):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{function: named(f"{module}.{function}")}))
    monkeypatch.setitem(sys.modules, "jax.dlpack", types.SimpleNamespace(from_dlpack=named("jax.dlpack.from_dlpack")))


@pytest.mark.parametrize(
    ("module", "kind"),
    [("cupy._core", "cupy"), ("torch", "torch"), ("jaxlib.xla", "jax"), ("numba.cuda", "numba"), ("mine", "device")],
)
def test_the_maker_of_an_array_is_known_by_its_module(module: str, kind: str) -> None:
    array = foreign(module)
    assert kind_of(array) == kind
    assert kind_of(type("Mine", (type(array),), {"__module__": "elsewhere"})()) == kind


@pytest.mark.parametrize("device", [1, 3, 11])
def test_memory_that_the_cpu_may_touch_is_the_hosts(device: int) -> None:
    assert not on_device(foreign("torch", device))
    assert kind_of(foreign("torch", device)) == "torch"
    for array in (foreign("numba.cuda", device), foreign("mine", device), np.ones(1), [1.0]):
        assert kind_of(array) == "numpy"


@pytest.mark.usefixtures("libraries")
def test_foreign_arrays_come_in_through_dlpack_and_go_back_the_same_way() -> None:
    array = foreign("torch")
    assert take("q", array) == ("cupy.from_dlpack", array)
    assert give("result", "torch") == ("torch.from_dlpack", "result")
    assert give("result", "jax") == ("jax.dlpack.from_dlpack", "result")
    assert give("result", "numba") == ("numba.cuda.as_cuda_array", "result")
    assert give("result", "cupy") == give("result", "device") == "result"


def test_without_cupy_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match=r"arrays on a GPU need CuPy: pip install 'treeattn\[cuda12\]'"):
        take("q", foreign("torch"))


def test_an_array_that_cupy_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise BufferError("no such device")

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=refuse))
    with pytest.raises(InputError, match=r"^k: expected an array, got Array \(no such device\)"):
        take("k", foreign("torch"))


def test_views_have_numpys_strides(card: FakeCard) -> None:
    host = np.zeros((2, 1, 5), np.float32)
    there = card.upload(host)
    for shape in ((2, 1, 5), (2, 3, 5), (4, 2, 3, 5)):
        assert broadcast(there, shape).strides == np.broadcast_to(host, shape).strides
    with pytest.raises(ValueError, match="broadcast"):
        broadcast(there, (2, 1, 4))
    assert DeviceView(there).swapaxes(0, 2).strides == host.swapaxes(0, 2).strides
    assert on_device(DeviceView(there))


def test_views_are_cut_as_numpy_cuts(card: FakeCard) -> None:
    host = np.arange(2 * 3 * 7, dtype=np.float32).reshape(2, 3, 7)
    there = DeviceView(card.upload(host))
    for at in ((slice(1, 2),), (slice(None), slice(1, 3)), (slice(0), slice(-1, None), slice(2, 99))):
        part, right = there[at], host[at]
        assert (part.shape, part.strides) == (right.shape, right.strides)
        assert part.data.ptr - there.data.ptr == right.ctypes.data - host.ctypes.data
    twice = there[1:][:, 1:, 3:].swapaxes(1, 2)
    assert twice.data.ptr - there.data.ptr == host[1:, 1:, 3:].ctypes.data - host.ctypes.data
    np.testing.assert_array_equal(DeviceView(card.upload(host.view(np.int32)), dtype=np.float32).get(), host)
