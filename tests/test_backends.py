"""Where backends come from: a table, and what other packages offer by entry points, good and bad."""

import types
from importlib.metadata import EntryPoint

import numpy as np
import pytest

import treeattn
from treeattn.backends import registry
from treeattn.errors import BackendError, InputError
from treeattn.testing import FakeBackend


class Strange(FakeBackend):
    def __init__(self):
        super().__init__("strange")


@pytest.fixture
def plugins(monkeypatch):
    """Let a package offer backends: a good one, one that raises, one that is none, one whose name is taken."""
    offered = types.SimpleNamespace(Good=Strange, Broken=lambda: 1 / 0, Other=lambda: "no backend")
    monkeypatch.setitem(__import__("sys").modules, "stranger", offered)
    places = {"strange": "Good", "broken": "Broken", "absent": "Gone", "other": "Other", "cpu": "Good"}
    points = [EntryPoint(name, f"stranger:{place}", registry.GROUP) for name, place in places.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    for cached in (registry.load, registry._plugins):
        cached.cache_clear()
    yield
    for cached in (registry.load, registry._plugins):
        cached.cache_clear()


def test_the_fake_is_taken_by_name_and_not_offered():
    assert "fake" not in registry.names()
    assert "fake" not in registry.available()
    assert registry.load("fake").name == "fake"
    with pytest.raises(InputError, match=r"^backend: expected one of 'cpu', 'reference', 'nvidia', 'amd', 'pcie', "):
        registry.load("none such")


@pytest.mark.usefixtures("plugins")
def test_another_package_offers_a_backend_by_name():
    with pytest.warns(UserWarning, match=r"backend 'cpu' of stranger:Good is ignored: the name is taken"):
        assert registry.names()[-4:] == ["strange", "broken", "absent", "other"]
    x = np.ones((1, 1, 2, 4), np.float32)
    assert np.array_equal(treeattn.attention(x, x, x, backend="strange"), x)
    assert isinstance(registry.load("cpu"), treeattn.backends.cpu.CpuBackend)


@pytest.mark.usefixtures("plugins")
@pytest.mark.filterwarnings("ignore:backend 'cpu' of stranger:UserWarning")
def test_a_broken_plug_in_warns_and_the_others_are_there():
    with pytest.warns(UserWarning, match="is left out") as warned:
        found = registry.available()
    assert found["strange"] == found["cpu"] == []
    assert found["broken"] == [
        "BackendError: stranger:Broken could not be loaded (ZeroDivisionError: division by zero)"
    ]
    texts = [str(each.message) for each in warned]
    assert [sum(f"backend '{name}' is left out" in text for text in texts) for name in ("broken", "absent")] == [1, 1]
    with pytest.raises(BackendError, match=r"stranger:Gone could not be loaded \(AttributeError"):
        registry.find("absent")
    with pytest.raises(BackendError, match=r"'other' is not a treeattn.backends.base.Backend but str"):
        registry.find("other")
