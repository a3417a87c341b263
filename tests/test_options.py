"""What the options mean: each sentence of ``docs/options.md``, tested on its own.

Most tests say what an option means by the set of keys that a query sees, and compare with a softmax over just those,
written out here and independent of the package.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn.backends.base import Backend
from treeattn.backends.registry import find
from treeattn.errors import BackendError, InputError
from treeattn.testing.oracle import assert_attention, assert_close, dense, tolerance

B, HQ, HKV, TQ, TK, D, DV = 2, 6, 2, 3, 11, 8, 5
F32, F64 = np.float32, np.float64
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NAN, INF = float("nan"), float("inf")
KEYS = np.arange(TK)


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    return request.param


def call(dtype=F32, seed=0, **changes):
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, HQ, TQ, D), "k": (B, HKV, TK, D), "v": (B, HKV, TK, DV)}
    return {**{name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}, **changes}


def softmax_over(given, seen=True, logit=lambda s: s, sink=None):
    """Attention over the keys that ``seen``, broadcast to (B, Hq, Tq, Tk), names; ``logit`` changes scale · q·k."""
    q, k, v = (given[name].astype(F64) for name in "qkv")
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    found = logit(q @ k.swapaxes(2, 3) * D**-0.5)
    weights = np.where(np.broadcast_to(seen, found.shape), np.exp(found), 0)
    extra = 0 if sink is None else np.exp(np.asarray(sink, F64))[:, None]
    total = weights.sum(-1) + extra
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(weights @ v / total[..., None]), np.log(total)


def assert_computes(given, expected, backend):
    """The call gives what is expected, within what plain NumPy in the same precision gives of it."""
    got = treeattn.attention(**given, backend=backend, return_lse=True)
    limit = tolerance(**given)
    assert_close(got[0], expected[0], limit.out, "out")
    assert_close(got[1], expected[1], limit.lse, "lse")
    return got


def same(one, other):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


# ---- the vocabulary: heads, widths, tokens


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (5, 1), (9, 3)])
def test_a_kv_head_serves_consecutive_query_heads(backend, q_heads, kv_heads):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((B, q_heads, TQ, D), dtype=F32)
    k, v = (rng.standard_normal((B, kv_heads, TK, n), dtype=F32) for n in (D, DV))
    assert_computes({"q": q, "k": k, "v": v}, softmax_over({"q": q, "k": k, "v": v}), backend)


@pytest.mark.parametrize(("width", "v_width"), [(1, 1), (7, 3), (64, 64), (72, 128), (200, 128)])
def test_widths_need_not_be_equal_nor_round(backend, width, v_width):
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 2, n, w), dtype=F32) for n, w in ((1, width), (TK, width), (TK, v_width)))
    got = treeattn.attention(q, k, v, backend=backend, return_lse=True)
    assert got[0].shape == (1, 2, 1, v_width)
    assert_attention(got, q, k, v)


# ---- order


def test_scale_defaults_to_one_over_the_root_of_the_width(backend):
    assert_computes(call(), softmax_over(call()), backend)
    given = treeattn.attention(**call(scale=D**-0.5), backend=backend, return_lse=True)
    assert same(given, treeattn.attention(**call(), backend=backend, return_lse=True))


@pytest.mark.parametrize("scale", [0, -0.7, 3])
def test_scale_multiplies_the_dot_products(backend, scale):
    given = call(scale=scale)
    assert_computes(given, softmax_over(given, logit=lambda s: s * D**0.5 * scale), backend)


def test_softcap_comes_after_scale_and_before_a_float_mask(backend):
    bias = np.random.default_rng(3).normal(size=(TQ, TK)).astype(F32) * 4
    given = call(softcap=1.5, mask=bias, scale=2.0)
    assert_computes(given, softmax_over(given, logit=lambda s: 1.5 * np.tanh(s * D**0.5 * 2.0 / 1.5) + bias), backend)


def test_keys_are_hidden_after_softcap(backend):
    hidden = np.where(KEYS % 3 == 0, -INF, 0).astype(F32)
    given = call(softcap=0.5, mask=hidden)
    assert_computes(given, softmax_over(given, hidden == 0, logit=lambda s: 0.5 * np.tanh(s / 0.5)), backend)


def test_a_key_is_seen_only_if_mask_causal_window_and_kv_len_all_let_it(backend):
    mask = np.random.default_rng(4).random((B, HQ, TQ, TK)) < 0.7
    q_pos, kv_pos, kv_len = np.array([2, 5, 8]), np.array(KEYS[::-1]), np.array([7, 9])
    query, key = q_pos[:, None], kv_pos[None, :]
    seen = mask & (key <= query) & (key >= query - 4) & (key <= query + 1) & (kv_len[:, None, None, None] > KEYS)
    given = call(mask=mask, causal=True, window=(4, 1), q_pos=q_pos, kv_pos=kv_pos, kv_len=kv_len)
    assert_computes(given, softmax_over(given, seen), backend)


def test_the_sink_is_a_raw_logit_without_scale_or_softcap(backend):
    sink = np.linspace(-2, 4, HQ)
    given = call(scale=0.1, softcap=0.5, sink=sink)
    assert_computes(
        given, softmax_over(given, logit=lambda s: 0.5 * np.tanh(s * D**0.5 * 0.1 / 0.5), sink=sink), backend
    )


# ---- hidden keys

HIDING = {
    "kv_len": ({"kv_len": [7, 7]}, KEYS < 7),
    "causal": ({"causal": True, "q_pos": [6, 6, 6]}, KEYS <= 6),
    "window": ({"window": (2, 2), "q_pos": [5, 5, 5]}, abs(KEYS - 5) <= 2),
    "mask False": ({"mask": KEYS % 2 == 0}, KEYS % 2 == 0),
    "mask -inf": ({"mask": np.where(KEYS % 2, -INF, 0.25).astype(F32)}, KEYS % 2 == 0),
}


@pytest.mark.parametrize("dtype", [F32, F64, np.float16, BF16])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("how", HIDING)
def test_hidden_keys_contribute_nothing_whatever_they_hold(backend, how, poison, dtype):
    options, seen = HIDING[how]
    clean = call(dtype, **options)
    dirty = {**clean, "k": clean["k"].copy(), "v": clean["v"].copy()}
    dirty["k"][:, :, ~seen], dirty["v"][:, :, ~seen] = poison, poison
    got = treeattn.attention(**dirty, backend=backend, return_lse=True)
    assert same(got, treeattn.attention(**clean, backend=backend, return_lse=True))
    assert np.isfinite(got[0].astype(F32)).all()


def test_a_float_mask_of_minus_infinity_hides_a_key_whose_logit_is_infinite(backend):
    given = call(mask=np.where(KEYS == 3, -INF, 0).astype(F32))
    clean = treeattn.attention(**given, backend=backend)
    given["k"][:, :, 3] = np.inf * np.sign(given["q"][:, :HKV, 0])
    assert np.array_equal(treeattn.attention(**given, backend=backend), clean)


GUARDED = """
import ctypes, mmap
import numpy as np
import treeattn

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
tokens = page // 64  # rows of 16 float32: this many fill a page

def guarded(values):
    # Pages in pairs, one per (batch, head): the first holds the real keys, the second can't be touched.
    memory = mmap.mmap(-1, 8 * page)
    array = np.frombuffer(memory, np.float32).reshape(2, 2, 2 * tokens, 16)
    array[:, :, :tokens] = values
    for start in range(array.ctypes.data + page, array.ctypes.data + 8 * page, 2 * page):
        assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0) == 0
    return array

rng = np.random.default_rng(0)
q = rng.standard_normal((2, 4, 2, 16), dtype=np.float32)
k, v = (rng.standard_normal((2, 2, tokens, 16), dtype=np.float32) for _ in "kv")
for backend in ("cpu", "reference"):
    for options in ({}, {"causal": True, "q_pos": [0, 1]}, {"mask": np.ones((2, 1, 1, 2 * tokens), np.float32)}):
        out = treeattn.attention(q, guarded(k), guarded(v), kv_len=[tokens, tokens], backend=backend, **options)
        if "mask" not in options:
            assert np.allclose(out, treeattn.attention(q, k, v, backend=backend, **options), atol=1e-6)
        treeattn.attention(q, guarded(k), guarded(v), kv_len=[3, 0], backend=backend, **options)
print("unharmed")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages with Linux's mprotect")
def test_keys_at_and_after_kv_len_are_never_read():
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(GUARDED)], capture_output=True, text=True, timeout=120)
    assert run.stdout == "unharmed\n", f"status {run.returncode}: {run.stderr}"


@pytest.mark.parametrize("dtype", [F32, F64, np.float16, BF16])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_seen_nan_gives_nan(backend, where, dtype):
    given = call(dtype, kv_len=[TK, TK - 4])
    given[where][1, 1, 2, 0] = NAN
    out, lse = treeattn.attention(**given, backend=backend, return_lse=True)
    wrong = np.isnan(out.astype(F32))
    if where == "q":
        assert wrong[1, 1, 2].all()
        assert wrong.sum() == DV
    if where == "k":
        assert wrong[1, 3:].all()
        assert np.isnan(lse[1, 3:]).all()
        assert wrong.sum() == 3 * TQ * DV
    if where == "v":
        assert wrong[1, 3:, :, 0].all()
        assert wrong.sum() == 3 * TQ
        assert np.isfinite(lse).all()


def test_a_seen_nan_gives_nan_even_where_its_weight_is_nothing(backend):
    given = call(mask=np.where(KEYS == 4, -1e30, 0).astype(F32))
    given["v"][0, 0, 4, 0] = NAN
    assert np.isnan(treeattn.attention(**given, backend=backend)[0, :3, :, 0]).all()


def test_a_nan_in_a_float_mask_is_seen(backend):
    given = call(mask=np.where(KEYS == 4, NAN, 0).astype(F32))
    assert np.isnan(treeattn.attention(**given, backend=backend)).all()
    hidden = {**given, "kv_len": [4, 4]}
    assert np.isfinite(treeattn.attention(**hidden, backend=backend)).all()


def test_a_seen_logit_of_plus_infinity_gives_nan(backend):
    given = call(mask=np.where(KEYS == 4, INF, 0).astype(F32))
    assert np.isnan(treeattn.attention(**given, backend=backend)).all()
    states = [
        treeattn.partial_attention(given["q"], given["k"][:, :, at], given["v"][:, :, at], mask=given["mask"][at],
                                   backend=backend) for at in (slice(0, 4), slice(4, 6), slice(6, TK))
    ]  # fmt: skip
    assert np.isnan(treeattn.merge(states).finish()).all()


@pytest.mark.parametrize("dtype", [F32, np.float16, BF16])
def test_no_warning_escapes(backend, dtype):
    with np.errstate(all="raise"):
        given = call(dtype, scale=1e30, mask=np.array([-INF, NAN, INF, -1e300, *[0.0] * (TK - 4)]), sink=[INF] * HQ)
        treeattn.attention(**given, backend=backend)
        treeattn.attention(**call(dtype, mask=np.zeros(TK, bool)), backend=backend)
        treeattn.attention(**call(dtype, mask=np.full(TK, -INF)), backend=backend)
        treeattn.energy(**call(dtype, mask=np.full(TK, -INF)), zeta=np.array(1e30), backend=backend)
        huge = {name: np.full_like(array, 6e4) for name, array in call(dtype).items()}
        assert np.isfinite(treeattn.attention(**huge, backend=backend).astype(F32)).all()


def test_an_output_beyond_the_range_of_q_is_infinite(backend):
    given = call(np.float16, v=np.full((B, HKV, TK, DV), 1e5, F32))
    assert np.all(treeattn.attention(**given, backend=backend) == np.float16(INF))


# ---- positions


def test_positions_may_be_negative(backend):
    given = call(causal=True, window=(3, None), q_pos=[-7, -5, 0], kv_pos=-10)
    key, query = KEYS - 10, np.array([-7, -5, 0])[:, None]
    assert_computes(given, softmax_over(given, (key <= query) & (key >= query - 3)), backend)


def test_causal_shows_keys_up_to_the_querys_own_position(backend):
    given = call(causal=True, q_pos=[0, 4, 20])
    assert_computes(given, softmax_over(given, np.array([0, 4, 20])[:, None] >= KEYS), backend)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 3), (None, 0), (2, None), (None, None), (100, 100)])
def test_a_window_shows_keys_from_left_before_to_right_behind(backend, left, right):
    query = np.array([1, 5, 9])[:, None]
    seen = np.ones((TQ, TK), bool)
    seen &= True if left is None else query - left <= KEYS
    seen &= True if right is None else query + right >= KEYS
    given = call(window=(left, right), q_pos=query[:, 0])
    assert_computes(given, softmax_over(given, seen), backend)


def test_positions_are_of_all_rows_or_of_each(backend):
    q_pos = np.array([[3, 4, 5], [0, 9, 2]])
    kv_pos = np.stack([KEYS, np.random.default_rng(5).permutation(TK)])
    seen = kv_pos[:, None, None, :] <= q_pos[:, None, :, None]
    given = call(causal=True, q_pos=q_pos, kv_pos=kv_pos)
    assert_computes(given, softmax_over(given, seen), backend)
    mixed = call(causal=True, q_pos=q_pos[0], kv_pos=kv_pos)
    assert_computes(mixed, softmax_over(mixed, kv_pos[:, None, None, :] <= q_pos[0, :, None]), backend)


def test_one_position_is_that_of_the_first_key_and_0_by_default(backend):
    options = {"causal": True, "q_pos": [101, 103, 106], "backend": backend}
    one = treeattn.attention(**call(), **options, kv_pos=100)
    assert np.array_equal(one, treeattn.attention(**call(), **options, kv_pos=KEYS + 100))
    shifted = treeattn.attention(**call(), **{**options, "q_pos": [1, 3, 6]})
    assert np.array_equal(one, shifted)


def test_by_default_the_last_query_stands_on_the_last_real_key_of_its_row(backend):
    given = call(causal=True, kv_len=[4, 9])
    last = np.array([[1, 2, 3], [6, 7, 8]])
    assert_computes(given, softmax_over(given, last[:, None, :, None] >= KEYS), backend)


def test_the_last_real_key_is_that_of_index_kv_len_minus_1_wherever_it_stands(backend):
    kv_pos = np.array([40, 30, 20, 35, 34, 33, 32, 50, 50, 50, 50])
    given = call(causal=True, kv_len=[4, 4], kv_pos=kv_pos)
    seen = (np.array([33, 34, 35])[:, None] >= kv_pos) & (KEYS < 4)
    assert_computes(given, softmax_over(given, seen), backend)


def test_more_queries_than_keys_begin_before_the_first_key(backend):
    given = call(causal=True, kv_len=[2, 0])
    out, lse = treeattn.attention(**given, backend=backend, return_lse=True)
    assert not out[0, :, 0].any()
    assert np.all(lse[0, :, 0] == -INF)
    assert np.isfinite(lse[0, :, 1:]).all()
    assert not out[1].any()


# ---- masks and lengths

MASK_SHAPES = [(), (TK,), (TQ, 1), (TQ, TK), (HQ, 1, 1), (B, 1, 1, TK), (1, HQ, TQ, TK), (B, HQ, TQ, TK)]


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", MASK_SHAPES)
def test_a_mask_broadcasts_to_batch_heads_queries_and_keys_in_every_layout(backend, shape, kind, layout):
    drawn = np.random.default_rng(6).normal(size=shape)
    mask = np.asarray(drawn > -0.5) if kind == "bool" else np.asarray(drawn, F32)
    given = call(mask=mask)
    right = softmax_over(given, mask) if kind == "bool" else softmax_over(given, logit=lambda s: s + mask)
    if layout == "bthd":
        given = {**given, **{name: given[name].swapaxes(1, 2) for name in "qkv"}, "layout": layout}
        right = (right[0].swapaxes(1, 2), right[1])
    assert_computes(given, right, backend)


@pytest.mark.parametrize("dtype", [F64, np.float16, BF16])
def test_a_float_mask_may_be_of_any_float_type(backend, dtype):
    bias = (np.arange(TK) / 4).astype(dtype)
    assert np.array_equal(
        treeattn.attention(**call(mask=bias), backend=backend),
        treeattn.attention(**call(mask=bias.astype(F32)), backend=backend),
    )
    assert treeattn.attention(**call(mask=bias), backend=backend, return_lse=True)[1].dtype == F32


def test_kv_len_counts_the_keys_of_each_row(backend):
    given = call(kv_len=[4, 0])
    seen = np.array([4, 0])[:, None, None, None] > KEYS
    assert_computes(given, softmax_over(given, seen), backend)


# ---- layouts and strides


def test_layout_is_of_q_k_v_and_the_output_while_states_and_lse_keep_theirs(backend):
    given = call(causal=True)
    turned = {**given, **{name: np.ascontiguousarray(given[name].swapaxes(1, 2)) for name in "qkv"}, "layout": "bthd"}
    out, lse = treeattn.attention(**turned, backend=backend, return_lse=True)
    assert out.shape == (B, TQ, HQ, DV)
    assert out.flags.c_contiguous
    assert same((out.swapaxes(1, 2), lse), treeattn.attention(**given, backend=backend, return_lse=True))
    state = treeattn.partial_attention(**turned, backend=backend)
    assert (state.o.shape, state.l.shape, state.m.shape) == ((B, HQ, TQ, DV), (B, HQ, TQ), (B, HQ, TQ))


def field(array):
    """The same values inside records, where no element is aligned."""
    records = np.zeros(array.shape, [("before", "u1"), ("value", array.dtype)])
    records["value"] = array
    return records["value"]


STORAGE = {
    "Fortran order": np.asfortranarray,
    "token-major": lambda a: np.ascontiguousarray(a.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3),
    "width outermost": lambda a: np.ascontiguousarray(a.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0),
    "reversed": lambda a: np.ascontiguousarray(a[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "every other element": lambda a: np.repeat(np.repeat(a, 2, axis=3), 3, axis=2)[:, :, ::3, ::2],
    "unaligned": field,
    "a window in something larger": lambda a: np.pad(a, 3, constant_values=NAN)[3:-3, 3:-3, 3:-3, 3:-3],
}


@pytest.mark.parametrize("dtype", [F32, np.float16, BF16])
@pytest.mark.parametrize("storage", STORAGE)
def test_any_strides_give_the_same_answer_and_read_only_arrays_too(backend, storage, dtype):
    given = call(dtype, causal=True)
    stored = {**given, **{name: STORAGE[storage](given[name]) for name in "qkv"}}
    for name in "qkv":
        stored[name].flags.writeable = False
    assert_attention(treeattn.attention(**stored, backend=backend, return_lse=True), **given)


def test_broadcast_keys_are_read_where_they_are(backend):
    given = call()
    shared = {**given, "k": np.broadcast_to(given["k"][:1, :1], given["k"].shape)}
    assert_computes(shared, softmax_over(shared), backend)


@pytest.mark.parametrize("storage", ["as it is", "Fortran order", "token-major", "unaligned"])
def test_nothing_is_copied_and_heads_are_not_repeated(storage):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 16, 1, 16), dtype=F32)
    k, v = (STORAGE.get(storage, np.asarray)(rng.standard_normal((1, 2, 20_000, 16), dtype=F32)) for _ in "kv")
    options = {"mask": np.ones(20_000, bool), "kv_len": [19_999], "layout": "bhtd"}
    treeattn.attention(q, k, v, **options)  # compiles
    tracemalloc.start()
    treeattn.attention(q, k, v, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < k.nbytes / 4, f"{peak} bytes beyond the inputs, of which k has {k.nbytes}"


# ---- types


@pytest.mark.parametrize("v_dtype", [F32, F64, np.float16, BF16])
@pytest.mark.parametrize("k_dtype", [F32, F64, np.float16, BF16])
@pytest.mark.parametrize("q_dtype", [F32, F64, np.float16, BF16])
def test_types_may_differ_and_the_widest_decides_the_states(backend, q_dtype, k_dtype, v_dtype):
    given = call()
    given = {name: given[name].astype(t) for name, t in zip("qkv", (q_dtype, k_dtype, v_dtype), strict=True)}
    out, lse = treeattn.attention(**given, backend=backend, return_lse=True)
    wide = F64 if F64 in (q_dtype, k_dtype, v_dtype) else F32
    assert (out.dtype, lse.dtype) == (q_dtype, wide)
    assert_attention((out, lse), **given)
    state = treeattn.partial_attention(**given, backend=backend)
    assert {array.dtype for array in (state.o, state.l, state.m, state.finish())} == {np.dtype(wide)}
    assert np.array_equal(state.finish(dtype=q_dtype), out)


RAW = {
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.uint8,
}


def stored(name, seed=8):
    dtype = {"bfloat16": BF16, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2}.get(name, name)
    given = call(seed=seed)
    factor = 40 if name == "int8" else 1
    return {**given, **{x: (given[x] * factor).astype(dtype) for x in "kv"}}


@pytest.mark.parametrize("name", RAW)
def test_kv_dtype_reads_raw_storage_as_what_it_is(backend, name):
    given = stored(name)
    raw = {**given, **{x: given[x].view(RAW[name]) for x in "kv"}, "kv_dtype": name}
    out = treeattn.attention(**raw, backend=backend)
    assert np.array_equal(out, treeattn.attention(**given, backend=backend))
    wide = {**given, **{x: given[x].astype(F32) for x in "kv"}}
    assert_close(out, dense(**wide).out, tolerance(**wide).out)


SCALE_SHAPES = [(), (1, 1), (HKV, 1, 1), (B, 1, 1, 1), (B, HKV, 1, 1), (B, HKV, 2, 1), (B, HKV, 3, 1), (B, HKV, TK, 1)]


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
@pytest.mark.parametrize("shape", SCALE_SHAPES)
def test_scales_multiply_stored_keys_and_values_by_blocks_of_tokens(backend, shape, name):
    rng = np.random.default_rng(9)
    k_scale, v_scale = (rng.uniform(0.01, 0.03, shape) for _ in "kv")
    given = stored(name)
    block = -(-TK // (shape[-2] if len(shape) > 1 else 1))
    wide = dict(given)
    for x, scale in (("k", k_scale), ("v", v_scale)):
        full = np.repeat(np.broadcast_to(scale, (B, HKV, -(-TK // block), 1)), block, axis=2)[:, :, :TK]
        wide[x] = given[x].astype(F64) * full.astype(F32)
    out, lse = treeattn.attention(**given, k_scale=k_scale, v_scale=v_scale, backend=backend, return_lse=True)
    limit = tolerance(**given, k_scale=k_scale, v_scale=v_scale)
    right = softmax_over(wide)
    assert_close(out, right[0], limit.out)
    assert_close(lse, right[1], limit.lse, "lse")


FAR_APART = [(1e30, 1e10, 1e-35), (-1e30, 1e10, 1e-35), (1e36, None, 1e-36), (1e-44, None, 1e33), (1e-60, 1e10, 1.0)]


@pytest.mark.parametrize("q_tokens", [1, 40])  # rows one by one, and rows in lanes
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("hide", [{}, {"causal": True}])
@pytest.mark.parametrize(("scale", "k_scale", "size"), FAR_APART)
def test_factors_may_be_far_from_each_other(backend, scale, k_scale, size, hide, name, q_tokens):
    """float32 holds neither 1e30 * 1e10 nor 1e-60, but the logits that come of them."""
    given = stored(name)
    given["q"] = np.random.default_rng(10).standard_normal((B, HQ, q_tokens, D), F32) * F32(size)
    options = {"scale": scale, "k_scale": k_scale and np.full((B, HKV, 1, 1), k_scale), **hide}
    got = treeattn.attention(**given, **options, backend=backend, return_lse=True)
    assert_attention(got, **given, **options)


@pytest.mark.parametrize("q_tokens", [1, 40])
@pytest.mark.parametrize("blocks", [1, 3, TK])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_scale_of_keys_that_is_not_finite_gives_nan_where_they_are_seen(backend, value, blocks, q_tokens):
    given = stored("int8")
    given["q"] = np.random.default_rng(10).standard_normal((B, HQ, q_tokens, D), F32)
    right = np.full((B, HKV, blocks, 1), 0.02)
    wrong = right.copy()
    wrong[:, 0, -1] = value
    clean = treeattn.attention(**given, k_scale=right, backend=backend, return_lse=True)
    for got, other in zip(
        treeattn.attention(**given, k_scale=wrong, backend=backend, return_lse=True), clean, strict=True
    ):
        assert np.isnan(got[:, : HQ // HKV]).all()
        assert np.array_equal(got[:, HQ // HKV :], other[:, HQ // HKV :])
    hidden = {"kv_len": TK - -(-TK // blocks)} if blocks > 1 else {"mask": np.zeros(TK, bool)}
    got, clean = (treeattn.attention(**given, k_scale=each, **hidden, backend=backend) for each in (wrong, right))
    assert np.array_equal(got, clean)


@pytest.mark.parametrize("q_tokens", [1, 40])
@pytest.mark.parametrize("blocks", [1, 3, TK])
@pytest.mark.parametrize("v_scale", [1e-30, -1e-10, 1e10, -1e30])
def test_scales_of_values_are_exact_over_the_range_that_is_promised(backend, v_scale, blocks, q_tokens):
    given = stored("int8")
    given["q"] = np.random.default_rng(10).standard_normal((B, HQ, q_tokens, D), F32)
    options = {"k_scale": np.full((1, 1, 1, 1), 0.02), "v_scale": np.full((B, HKV, blocks, 1), v_scale)}
    assert_attention(treeattn.attention(**given, **options, backend=backend, return_lse=True), **given, **options)


# ---- the sink, empty rows and lse


@pytest.mark.parametrize("option", [{}, {"causal": True}, {"window": (2, 2)}, {"softcap": 2.0}, {"kv_len": 0}])
@pytest.mark.parametrize(("batch", "q_tokens"), [(0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("kv_tokens", [0, 5])
def test_no_rows_or_no_queries_give_an_empty_answer(backend, batch, q_tokens, kv_tokens, option):
    q, k, v = (np.ones((batch, h, t, D), F32) for h, t in ((HQ, q_tokens), (HKV, kv_tokens), (HKV, kv_tokens)))
    assert_attention(treeattn.attention(q, k, v, backend=backend, return_lse=True, **option), q, k, v, **option)
    energy = treeattn.energy(q, k, v, np.zeros(D, F32), backend=backend, **option)
    assert energy.shape == (batch, HQ, q_tokens)


def test_the_sink_is_counted_once_for_all_shards(backend):
    given, sink = call(), np.linspace(-1, 3, HQ).astype(F32)
    cuts = [slice(0, 5), slice(5, 5), slice(5, TK)]
    states = [
        treeattn.partial_attention(given["q"], given["k"][:, :, at], given["v"][:, :, at], backend=backend)
        for at in cuts
    ]
    out, lse = treeattn.merge(states).finish(sink=sink, return_lse=True)
    right, limit = softmax_over(given, sink=sink), tolerance(**given, sink=sink)
    assert_close(out, right[0], limit.out)
    assert_close(lse, right[1], limit.lse, "lse")


def test_a_row_that_sees_no_key_gives_0_and_minus_infinity_or_the_sink(backend):
    given, sink = call(kv_len=[0, 3]), np.linspace(-1, 3, HQ).astype(F32)
    out, lse = treeattn.attention(**given, backend=backend, return_lse=True)
    assert not out[0].any()
    assert np.all(lse[0] == -INF)
    out, lse = treeattn.attention(**given, sink=sink, backend=backend, return_lse=True)
    assert not out[0].any()
    assert np.array_equal(lse[0], np.broadcast_to(sink[:, None], (HQ, TQ)))


def test_a_sink_of_minus_infinity_is_none(backend):
    with_it = treeattn.attention(**call(sink=np.full(HQ, -INF)), backend=backend, return_lse=True)
    assert same(with_it, treeattn.attention(**call(), backend=backend, return_lse=True))


def test_a_sink_of_infinity_takes_all_the_weight_of_keys_that_are_finite(backend):
    given, sink = call(), np.array([INF, 0.5, INF, -INF, 1e39, 2.0])  # 1e39 is +inf in float32
    out, lse = treeattn.attention(**given, sink=sink, backend=backend, return_lse=True)
    whole = sink > 1e38
    assert not out[:, whole].any()
    assert np.all(lse[:, whole] == INF)
    right, limit = softmax_over(given, sink=np.where(whole, 0, sink)), tolerance(**given, sink=np.where(whole, 0, sink))
    assert_close(out[:, ~whole], right[0][:, ~whole], limit.out)
    assert_close(lse[:, ~whole], right[1][:, ~whole], limit.lse, "lse")


@pytest.mark.parametrize("seen", [NAN, INF])
def test_a_sink_of_infinity_hides_no_nan_that_is_seen(backend, seen):
    given = call(mask=np.where(KEYS == 4, seen, 0).astype(F32), sink=np.full(HQ, INF))
    assert np.isnan(treeattn.attention(**given, backend=backend)).all()


def test_lse_is_natural_unless_a_base_is_named(backend):
    state = treeattn.partial_attention(**call(), backend=backend)
    out, lse = state.finish(return_lse=True)
    assert same(state.to_lse(base="e"), (out, lse))
    assert np.allclose(state.to_lse(base=2)[1], lse / np.log(2), rtol=1e-6)
    for base in ("e", 2):
        back = treeattn.PartialState.from_lse(*state.to_lse(base=base), base=base)
        assert np.allclose(back.finish(), out, rtol=1e-6)
        assert np.allclose(back.to_lse(base="e")[1], lse, rtol=1e-6)


@pytest.mark.parametrize("base", [10, "2", None, True, np.e, np.zeros(2), [2]])
def test_other_bases_are_refused(base):
    state = treeattn.partial_attention(**call())
    with pytest.raises(InputError, match=r"^base: expected 'e' or 2, got "):
        state.to_lse(base=base)


def test_the_base_is_a_required_keyword():
    state = treeattn.partial_attention(**call())
    with pytest.raises(TypeError, match="base"):
        state.to_lse()
    with pytest.raises(TypeError, match="base"):
        treeattn.PartialState.from_lse(*state.to_lse(base="e"))


@pytest.mark.parametrize("offset", [60_000, -60_000, 245_000, -245_000])
def test_logits_stay_natural_so_that_large_ones_keep_their_difference(backend, offset):
    k = np.array([offset, offset - 1], F32).reshape(1, 1, 2, 1)
    v = np.array([1, 0], F32).reshape(1, 1, 2, 1)
    out, lse = treeattn.attention(np.ones((1, 1, 1, 1), F32), k, v, scale=1, backend=backend, return_lse=True)
    assert abs(out.item() - 1 / (1 + np.exp(-1))) < 1e-6
    assert abs(lse.item() - (offset + np.log1p(np.exp(-1)))) <= np.spacing(F32(abs(offset)))


# ---- where results are written


@pytest.mark.parametrize("dtype", [F32, np.float16, BF16])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_out_is_written_and_returned(backend, layout, dtype):
    given = {name: array.swapaxes(1, 2) if layout == "bthd" else array for name, array in call(dtype).items()}
    right, lse = treeattn.attention(**given, layout=layout, backend=backend, return_lse=True)
    target = np.full((*right.shape[:3], 2 * DV), NAN, dtype)[..., ::2]
    got = treeattn.attention(**given, layout=layout, backend=backend, return_lse=True, out=target)
    assert got[0] is target
    assert same(got, (right, lse))


def test_a_states_buffer_is_used_again(backend):
    state = treeattn.partial_attention(**call(seed=1), backend=backend)
    before = state.packed
    again = treeattn.partial_attention(**call(seed=2), backend=backend, out=state)
    assert again is state
    assert np.shares_memory(state.packed, before)
    assert np.array_equal(state.packed, treeattn.partial_attention(**call(seed=2), backend=backend).packed)
    empty = call()
    empty["k"], empty["v"] = empty["k"][:, :, :0], empty["v"][:, :, :0]
    treeattn.partial_attention(**empty, backend=backend, out=state)
    assert not state.l.any()
    assert np.all(state.m == -INF)


def test_inputs_are_not_changed_and_equal_calls_give_equal_bits(backend):
    given = call(causal=True, softcap=2.0, sink=np.zeros(HQ))
    kept = {name: given[name].copy() for name in "qkv"}
    first = treeattn.attention(**given, backend=backend, return_lse=True)
    assert same(first, treeattn.attention(**given, backend=backend, return_lse=True))
    assert all(np.array_equal(given[name], kept[name]) for name in "qkv")


def test_states_of_different_backends_do_not_mix():
    one, other = (treeattn.partial_attention(**call(), backend=name) for name in ("cpu", "reference"))
    with pytest.raises(InputError, match=r"^states: expected backend 'cpu', got 'reference'; states of different"):
        treeattn.merge([one, other])


# ---- backends


class Narrow(Backend):
    """Counts its preparations, and takes no more than four query heads."""

    name = "narrow"

    def __init__(self):
        self.ops = find("reference").ops
        self.prepared = 0

    def reasons(self, spec=None):
        return ["it takes at most 4 query heads"] if spec is not None and spec.q_heads > 4 else []

    def prepare(self, spec):
        self.prepared += 1
        return find("reference").prepare(spec)


def test_a_growing_cache_is_prepared_once():
    backend, given = Narrow(), call()
    given["q"] = given["q"][:, :4]
    for length in range(1, TK):
        step = {**given, "k": given["k"][:, :, :length], "v": given["v"][:, :, :length]}
        assert np.array_equal(
            treeattn.attention(**step, backend=backend), treeattn.attention(**step, backend="reference")
        )
    assert backend.prepared == 1


def test_a_backend_that_cannot_says_why():
    with pytest.raises(BackendError, match=r"^backend 'narrow' can't run this: it takes at most 4 query heads$"):
        treeattn.attention(**call(), backend=Narrow())
