"""Arrays of other libraries through DLPack, real ones: taken where they are, and given back without a copy."""

from __future__ import annotations

import numpy as np
import pytest

import treeattn
from treeattn.arrays import to_array
from treeattn.devices import give

pytestmark = pytest.mark.peers


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed; `make test-peers` installs what it can")


def arrays_of(name):
    """q, k and v as NumPy has them, and the same as the library has them."""
    rng = np.random.default_rng(0)
    ours = [rng.standard_normal((1, heads, n, 16), dtype=np.float32) for heads, n in ((4, 1), (2, 30), (2, 30))]
    module = library("jax.numpy" if name == "jax" else name)
    return ours, [module.asarray(array) for array in ours]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_they_are_taken_without_a_copy_and_give_the_bits_of_numpys(name):
    ours, theirs = arrays_of(name)
    for array in theirs:
        assert to_array("q", array).ctypes.data == np.from_dlpack(array).ctypes.data
    assert np.array_equal(treeattn.attention(*theirs), treeattn.attention(*ours))


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_results_go_back_as_the_callers_kind_without_a_copy(name):
    out = treeattn.attention(*arrays_of(name)[0])
    given = give(out, name)
    assert type(given).__module__.partition(".")[0] in (name, "jaxlib")
    assert np.array_equal(np.asarray(given), out)
    if name == "torch":  # JAX may copy what is not aligned as it likes
        assert given.data_ptr() == out.ctypes.data
