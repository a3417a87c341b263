"""The energy: its gradient at 0 is attention, its value there is the lse, and options mean what they mean there."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn

B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 3, 12, 8, 5
OPTIONS = {
    "none": {},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 1.2},
    "bool mask": {"mask": np.arange(TK) % 3 > 0},
    "float mask": {"mask": np.linspace(-2, 2, TQ * TK).reshape(TQ, TK)},
    "causal": {"causal": True},
    "window": {"window": (3, 1), "q_pos": [2, 5, 9]},
    "kv_len": {"kv_len": [5, 12], "causal": True},
    "k_scale and v_scale": {"k_scale": np.full((HKV, 1, 1), 0.5), "v_scale": np.full((B, 1, 3, 1), 2.0)},
}


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    return request.param


def call(dtype=np.float64, seed=0, **changes):
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, HQ, TQ, D), "k": (B, HKV, TK, D), "v": (B, HKV, TK, DV)}
    return {**{name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}, **changes}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_gradient_at_0_is_attention(backend, options):
    given = call(**options)
    slope = np.empty((B, HQ, TQ, DV))
    for j, step in enumerate(1e-5 * np.eye(DV)):
        ahead, back = (treeattn.energy(**given, zeta=sign * step, backend=backend) for sign in (1, -1))
        slope[..., j] = (ahead - back) / 2e-5
    # Central differences are off by h**2 / 6 of the third derivative, and by rounding of F over h.
    assert np.allclose(slope, treeattn.attention(**given, backend=backend), atol=1e-9)


@given(seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_the_derivative_in_any_direction_is_attention_along_it(seed):
    given = call(seed=seed, causal=True)
    along = np.random.default_rng(seed).standard_normal((B, HQ, TQ, DV))
    ahead, back = (treeattn.energy(**given, zeta=sign * 1e-5 * along) for sign in (1, -1))
    assert np.allclose((ahead - back) / 2e-5, (treeattn.attention(**given) * along).sum(-1), atol=1e-8)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_without_a_source_it_is_the_lse(backend, dtype, options):
    given = call(dtype, **options)
    found = treeattn.energy(**given, zeta=np.zeros(1), backend=backend)
    lse = treeattn.attention(**given, backend=backend, return_lse=True)[1]
    assert found.dtype == lse.dtype
    assert np.allclose(found, lse, rtol=1e-6 if lse.dtype == np.float32 else 1e-14, atol=1e-6)


def test_a_source_adds_its_product_with_v_to_each_logit(backend):
    given = call(softcap=0.7)
    zeta = np.random.default_rng(1).standard_normal((B, HQ, TQ, DV))
    q, k, v = given["q"], *(np.repeat(given[x], HQ // HKV, axis=1) for x in "kv")
    logit = 0.7 * np.tanh(q @ k.swapaxes(2, 3) * D**-0.5 / 0.7) + zeta @ v.swapaxes(2, 3)
    right = np.log(np.exp(logit).sum(-1))
    assert np.allclose(treeattn.energy(**given, zeta=zeta, backend=backend), right, atol=1e-13)
    turned = {**given, **{x: given[x].swapaxes(1, 2) for x in "qkv"}, "layout": "bthd"}
    assert np.allclose(treeattn.energy(**turned, zeta=zeta, backend=backend), right, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (1,), (DV,), (TQ, 1), (HQ, 1, 1), (B, 1, 1, DV), (B, HQ, TQ, DV)])
def test_the_source_broadcasts(backend, shape):
    zeta = np.asarray(np.random.default_rng(2).standard_normal(shape))
    full = np.broadcast_to(zeta, (B, HQ, TQ, DV)).copy()
    found = treeattn.energy(**call(), zeta=zeta, backend=backend)
    assert found.shape == (B, HQ, TQ)
    assert np.array_equal(found, treeattn.energy(**call(), zeta=full, backend=backend))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options", [{"kv_len": [7, 7]}, {"mask": np.arange(TK) < 7}, {"causal": True, "q_pos": [6] * TQ}]
)
def test_hidden_keys_contribute_nothing_whatever_they_hold(backend, options, poison):
    given, zeta = call(**options), np.ones(DV)
    clean = treeattn.energy(**given, zeta=zeta, backend=backend)
    given["k"][:, :, 7:], given["v"][:, :, 7:] = poison, poison
    assert np.array_equal(treeattn.energy(**given, zeta=zeta, backend=backend), clean)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_seen_nan_gives_nan(backend, where):
    given = call()
    given[where][...] = np.nan
    assert np.isnan(treeattn.energy(**given, zeta=np.ones(DV), backend=backend)).all()


def test_a_row_that_sees_no_key_has_minus_infinity(backend):
    found = treeattn.energy(**call(kv_len=[0, 4]), zeta=np.ones(DV), backend=backend)
    assert np.all(found[0] == -np.inf)
    assert np.isfinite(found[1]).all()
    empty = {name: array[:, :, :0] if name in "kv" else array for name, array in call().items()}
    assert np.all(treeattn.energy(**empty, zeta=np.ones(DV), backend=backend) == -np.inf)


def test_long_sequences_are_computed_in_blocks():
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 8, 1, 16), dtype=np.float32)
    k, v = (rng.standard_normal((1, 1, 40_000, 16), dtype=np.float32) for _ in "kv")
    zeta = rng.standard_normal(16, dtype=np.float32)
    tracemalloc.start()
    found = treeattn.energy(q, k, v, zeta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000 * 8 * 4 * 2, f"{peak} bytes: as much as all logits twice"
    logit = (q * 0.25).astype(np.float64) @ k.swapaxes(2, 3) + (v @ zeta)[:, :, None, :]
    assert np.allclose(found, np.log(np.exp(logit).sum(-1)), rtol=1e-6)
