"""The law of shards: cut the keys anywhere, deal them out in any way, merge in any order, and it is dense attention.

hypothesis draws calls with any combination of the options. Every call is held to the float64 oracle twice: computed
at once, and merged from the states of 1 to 8 uneven shards with empty ones among them.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn.testing.oracle import assert_close, dense, tolerance

BF16 = ml_dtypes.bfloat16
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": BF16}
STORED = {**DTYPES, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
WIDTHS = [(8, 8), (7, 3), (16, 5)]
GROUPS = [(1, 1), (4, 4), (4, 1), (6, 2), (9, 3)]
FINISHING = ("sink",)


@st.composite
def calls(draw, kinds=tuple(DTYPES)):
    """Arguments of one call; positions are given whenever causal or window asks for them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, tokens, keys = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 40))
    (heads, kv_heads), (width, v_width) = draw(st.sampled_from(GROUPS)), draw(st.sampled_from(WIDTHS))
    q_kind, kv_kind = draw(st.sampled_from(tuple(DTYPES))), draw(st.sampled_from(kinds))
    loud = draw(st.sampled_from([1, 1, 8]))
    q = (loud * rng.standard_normal((batch, heads, tokens, width))).astype(DTYPES[q_kind])
    call = {"q": q, "k": values(rng, (batch, kv_heads, keys, width), kv_kind)}
    call["v"] = values(rng, (batch, kv_heads, keys, v_width), kv_kind)
    call |= draw(hiding(rng, (batch, heads, tokens, keys)))
    call |= draw(st.fixed_dictionaries({}, optional={"scale": st.sampled_from([-0.3, 0.0, 1.0])}))
    call |= draw(st.fixed_dictionaries({}, optional={"softcap": st.sampled_from([0.5, 30.0])}))
    call |= draw(st.fixed_dictionaries({}, optional={"sink": st.just(rng.normal(size=heads) * 3)}))
    if kv_kind not in DTYPES or draw(st.booleans()):
        call |= {f"{x}_scale": rng.uniform(0.01, 0.03, (batch, kv_heads, keys, 1)) for x in "kv"}
    return call


def values(rng, shape, kind):
    drawn = rng.standard_normal(shape)
    return np.round(drawn * 40).astype(np.int8) if kind == "int8" else drawn.astype(STORED[kind])


@st.composite
def hiding(draw, rng, shape):
    """Options that hide keys, in any combination."""
    batch, _, tokens, keys = shape
    options = {}
    if draw(st.booleans()):
        options["kv_len"] = rng.integers(0, keys + 1, batch)
    if draw(st.booleans()):
        mask_shape = draw(st.sampled_from([shape, (tokens, keys), (batch, 1, 1, keys), (keys,), (1, keys)]))
        drawn = rng.normal(size=mask_shape)
        options["mask"] = drawn > -1 if draw(st.booleans()) else np.where(drawn > -1, drawn, -np.inf)
    side = st.one_of(st.none(), st.integers(0, 20))
    if draw(st.booleans()):
        options |= draw(st.sampled_from([{"causal": True}, {"causal": False}])) | {"window": (draw(side), draw(side))}
    elif draw(st.booleans()):
        options["causal"] = True
    start = draw(st.sampled_from([0, -25, 10**12]))
    options["kv_pos"] = start + rng.permutation(3 * keys)[:keys] if draw(st.booleans()) else start + np.arange(keys)
    options["q_pos"] = start + rng.integers(-1, keys + 2, (batch, tokens))
    return options


@st.composite
def deals(draw):
    """How keys go to shards: which shard each key goes to, and in what order the states are merged."""
    shards = draw(st.integers(1, 8))
    how = draw(st.sampled_from(["runs", "in turn", "at random"]))
    return shards, how, draw(st.permutations(range(shards))), draw(st.integers(0, 2**32 - 1))


def shards_of(keys, deal):
    """Indices of each shard's keys, ascending within it, since ``kv_len`` speaks of the first ones."""
    shards, how, order, seed = deal
    rng = np.random.default_rng(seed)
    if how == "runs":
        parts = np.split(np.arange(keys), np.sort(rng.integers(0, keys + 1, shards - 1)))
    else:
        owner = np.arange(keys) % shards if how == "in turn" else rng.integers(0, shards, keys) // 2 * 2
        parts = [np.flatnonzero(owner == shard) for shard in range(shards)]
    return [parts[i] for i in order]


def shard(call, at):
    """The arguments of one shard: what speaks of keys is cut, and what finishes a state is left out."""
    part = {name: value for name, value in call.items() if name not in FINISHING}
    part |= {name: call[name][:, :, at] for name in ("k", "v", "k_scale", "v_scale") if name in call}
    part |= {name: call[name][..., at] for name in ("mask", "kv_pos") if name in call}
    if "kv_len" in call:
        part["kv_len"] = (at[None, :] < call["kv_len"][:, None]).sum(1)
    return part


def check_both(call, deal, backend):
    right, limit = dense(**call), tolerance(**call)
    parts = [
        treeattn.partial_attention(**shard(call, at), backend=backend) for at in shards_of(call["k"].shape[2], deal)
    ]
    merged = treeattn.merge(parts).finish(sink=call.get("sink"), dtype=call["q"].dtype.name, return_lse=True)
    at_once = treeattn.attention(**call, backend=backend, return_lse=True)
    for how, (out, lse) in (("at once", at_once), ("merged", merged)):
        assert_close(out, right.out, limit.out, f"out {how}")
        assert_close(lse, right.lse, limit.lse, f"lse {how}")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@given(call=calls(), deal=deals())
@settings(deadline=None, max_examples=200)
def test_any_cut_of_any_call_merges_to_dense_attention(backend, call, deal):
    check_both(call, deal, backend)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@given(call=calls(kinds=("float8_e4m3fn", "float8_e5m2", "int8")), deal=deals())
@settings(deadline=None, max_examples=30)
def test_any_cut_of_quantised_keys_merges_to_dense_attention(backend, call, deal):
    check_both(call, deal, backend)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_long_shards_merge_to_dense_attention(backend, layout):
    rng = np.random.default_rng(0)
    keys = 1500
    call = {"q": rng.standard_normal((1, 6, 2, 64), dtype=np.float32) * 3}
    call |= {x: rng.standard_normal((1, 2, keys, 64), dtype=np.float32) for x in "kv"}
    call |= {"causal": True, "window": (1200, None), "q_pos": np.array([1400, 1499]), "kv_pos": np.arange(keys)}
    right, limit = dense(**call), tolerance(**call)
    parts = []
    for at in np.split(np.arange(keys), [0, 1, 700, 700, 1499]):
        part = shard(call, at)
        part |= {x: part[x].swapaxes(1, 2) for x in "qkv"} if layout == "bthd" else {}
        parts.append(treeattn.partial_attention(**part, layout=layout, backend=backend))
    out, lse = treeattn.merge(parts[::-1]).finish(return_lse=True)
    assert_close(out, right.out, limit.out)
    assert_close(lse, right.lse, limit.lse, "lse")
