"""The streaming kernel against the oracle: shapes, strides, types, masks; what it must not read; equal bits."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treeattn
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.kernels import array_objects, cpu, threads
from treeattn.kernels.plain import partial as plain_partial
from treeattn.kernels.processors import fair_share
from treeattn.kernels.specialisations import parts_of, specialisations
from treeattn.testing.oracle import assert_attention, assert_close, dense

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
NARROW = [np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
STORED = [*FLOATS, *NARROW]
K_WIDTHS, V_WIDTHS = [1, 7, 16, 40, 80, 128, 128, 576], [1, 7, 16, 40, 128, 128, 256, 576]
FEW = {80: [ml_dtypes.bfloat16], 256: [np.float32]}
"""Types that are drawn of widths which have products of their own; a test below counts what has to be compiled."""
STRIDES = ["plain", "token-major", "reversed", "every second", "fortran", "padded", "read-only"]
PORTABLE = ["", "0", "1"]
"""Instructions that the processor gains by, all that it has, and those that every processor has."""
drawn = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def numbers(rng, shape, dtype):
    if np.dtype(dtype) == np.int8:
        return rng.integers(-127, 128, shape, dtype=np.int8)
    return rng.standard_normal(shape).astype(dtype)


def laid_out(array, how):
    """The same numbers, lying in memory in another way."""
    if how == "token-major":
        return np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
    if how == "reversed":
        return np.ascontiguousarray(array[:, :, ::-1, ::-1])[:, :, ::-1, ::-1]
    if how == "every second":
        wide = np.zeros((*array.shape[:3], 2 * array.shape[3]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "padded":
        wide = np.full((*array.shape[:2], array.shape[2] + 3, array.shape[3] + 5), 0x7F, np.int8).astype(array.dtype)
        wide[:, :, : array.shape[2], : array.shape[3]] = array
        return wide[:, :, : array.shape[2], : array.shape[3]]
    array = array.copy()
    array.flags.writeable = how != "read-only"
    return array


@dataclass
class Drawn:
    """One call that hypothesis drew."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self):
        shapes = ", ".join(f"{name} {a.shape} {a.dtype} {a.strides}" for name, a in zip("qkv", self, strict=True))
        return f"Drawn({shapes}, {self.options})"

    def __iter__(self):
        return iter((self.q, self.k, self.v))


@st.composite
def calls(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 16))
    q_tokens = draw(st.sampled_from([1, 1, 2, 4, 17]))
    tokens = draw(st.sampled_from([0, 1, 3, 127, 128, 129, 300]))
    width, v_width = draw(st.sampled_from(K_WIDTHS)), draw(st.sampled_from(V_WIDTHS))
    q = numbers(rng, (batch, kv_heads * group, q_tokens, width), draw(st.sampled_from(FLOATS)))
    k = numbers(rng, (batch, kv_heads, tokens, width), draw(st.sampled_from(FEW.get(width, STORED))))
    v = numbers(rng, (batch, kv_heads, tokens, v_width), draw(st.sampled_from(FEW.get(v_width, STORED))))
    k, v = laid_out(k, draw(st.sampled_from(STRIDES))), laid_out(v, draw(st.sampled_from(STRIDES)))
    return Drawn(laid_out(q, draw(st.sampled_from(STRIDES))), k, v, draw_options(draw, rng, q, k))


def draw_options(draw, rng, q, k):
    batch, _, tokens, _ = k.shape
    options = {}
    if draw(st.booleans()):
        options["kv_len"] = rng.integers(0, tokens + 1, batch)
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 30.0]))
    if draw(st.booleans()):
        options.update(draw_positions(draw, rng, q, tokens))
    mask = draw(st.sampled_from([None, "bool", "float", "holes"]))
    if mask:
        axes = draw(st.tuples(*[st.booleans()] * 4))
        shape = [n if full else 1 for n, full in zip((batch, *q.shape[1:3], tokens), axes, strict=True)]
        shown = rng.random(shape) < 0.5
        added = rng.standard_normal(shape).astype(np.float32)
        options["mask"] = {"bool": shown, "float": added, "holes": np.where(shown, added, -np.inf)}[mask]
    for name in ("k_scale", "v_scale"):
        if tokens and draw(st.booleans()):
            blocks = draw(st.sampled_from([1, min(3, tokens), tokens]))
            options[name] = rng.uniform(-0.02, 0.02, (batch, 1, blocks, 1))
    # Integers of up to 127 make logits in the hundreds, of which a single key would take everything.
    options["scale"] = 1 / (q.shape[-1] * (100 if k.dtype == np.int8 else 1))
    return options


def draw_positions(draw, rng, q, tokens):
    batch, _, q_tokens, _ = q.shape
    left, right = draw(st.sampled_from([(None, None), (0, 0), (9, None), (None, 5), (100, 40)]))
    start = draw(st.sampled_from([-50, 0, 2**40]))
    kv_pos = start + (
        np.arange(tokens) if draw(st.booleans()) else rng.permuted(np.tile(np.arange(tokens), (batch, 1)), axis=1)
    )
    q_pos = start + rng.integers(-3, tokens + 3, (batch, q_tokens))
    window = None if draw(st.booleans()) else (left, right)
    return {"causal": draw(st.booleans()), "window": window, "kv_pos": kv_pos, "q_pos": q_pos}


@drawn
@given(call=calls(), portable=st.sampled_from(PORTABLE))
def test_every_option_at_once_gives_the_oracles_answer(call, portable):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEATTN_PORTABLE", portable)
        got = treeattn.attention(*call, **call.options, return_lse=True, backend="cpu")
        spec, _ = resolve(*call, Options(**call.options))
        listed = dict(specialisations()).values()
        assert all(part in listed for part in parts_of(spec).values())
    assert_attention(got, *call, **call.options)


def test_what_is_drawn_needs_at_most_40_functions_of_a_type_or_width(monkeypatch):
    """Each takes a second to compile; the others are for single and for double precision, whatever the call."""
    monkeypatch.setenv("TREEATTN_PORTABLE", "0")
    names, needed = {part: name for name, part in specialisations()}, set()
    shapes, kinds = list(zip(K_WIDTHS, V_WIDTHS, strict=True)), range(len(STORED))
    for portable, tokens, q_dtype, (width, v_width), i in product(PORTABLE, (1, 17), FLOATS, shapes, kinds):
        monkeypatch.setenv("TREEATTN_PORTABLE", portable)
        k_dtype, v_dtype = (FEW.get(n, STORED)[i % len(FEW.get(n, STORED))] for n in (width, v_width))
        k, v = np.zeros((1, 1, 1, width), k_dtype), np.zeros((1, 1, 1, v_width), v_dtype)
        spec, _ = resolve(np.zeros((1, 1, tokens, width), q_dtype), k, v, Options())
        needed.update(names[each] for each in parts_of(spec).values())
    own = {name for name in needed if name.startswith(("scores", "values", "widened"))}
    assert "scores of float32, width 128" in own
    assert len(own) <= 40


@pytest.mark.parametrize("portable", PORTABLE)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 15])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, *NARROW], ids=lambda dtype: np.dtype(dtype).name)
def test_queries_of_bfloat16_give_the_same_on_both_paths(monkeypatch, dtype, portable, group):
    """Where all elements count, and where one is 10,000 times the others, which then count as little."""
    monkeypatch.setenv("TREEATTN_PORTABLE", portable)
    q, _, _ = standard(ml_dtypes.bfloat16, q_heads=2 * group)
    rng = np.random.default_rng(3)
    k, v = (numbers(rng, (1, 2, 700, 128), dtype) for _ in "kv")
    for loud in (1, 1e4):
        q[..., 5] = (loud * rng.standard_normal(q.shape[:-1])).astype(q.dtype)
        options = {"scale": 0.1 / loud / (70 if dtype is np.int8 else 1)}
        state, right = treeattn.partial_attention(q, k, v, **options), dense(q, k, v, **options)
        assert_close(state.o / state.l[..., None], right.out, 2e-6 * np.abs(right.out).max())


@pytest.mark.parametrize("portable", PORTABLE)
@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: np.dtype(dtype).name)
def test_scales_of_any_size_cost_nothing(monkeypatch, dtype, portable):
    monkeypatch.setenv("TREEATTN_PORTABLE", portable)
    q, _, _ = standard(ml_dtypes.bfloat16)
    rng = np.random.default_rng(4)
    k, v = (numbers(rng, (1, 2, 700, 128), dtype) for _ in "kv")
    for heads, blocks, size in ((1, 1, 1e-30), (2, 1, 1e30), (2, 7, 1e-3)):
        scales = {name: size * rng.uniform(0.5, 2, (1, heads, blocks, 1)) for name in ("k_scale", "v_scale")}
        options = {**scales, "scale": 0.1 / size / (70 if dtype is np.int8 else 1)}
        assert_attention(treeattn.attention(q, k, v, **options, return_lse=True), q, k, v, **options)


@pytest.mark.parametrize("q_tokens", [1, 4])
@pytest.mark.parametrize("widths", [(128, 128), (576, 512)])
@pytest.mark.parametrize("dtype", STORED, ids=lambda dtype: np.dtype(dtype).name)
def test_no_type_costs_more_than_two_millionths(dtype, widths, q_tokens):
    """Sums and weights are float32 whatever the storage."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, 8, q_tokens, widths[0]), dtype=np.float32)
    k, v = (numbers(rng, (1, 2, 3000, width), dtype) for width in widths)
    options = {"scale": 1e-3} if dtype is np.int8 else {}
    state, right = treeattn.partial_attention(q, k, v, **options), dense(q, k, v, **options)
    assert_close(state.o / state.l[..., None], right.out, 2e-6 * np.abs(right.out).max())


def test_narrow_values_lose_no_more_bits_than_numpys_matmul():
    """The mean over many calls, for one may be lucky: a single running sum over the keys would lose twice as much."""
    rng, ours, plain = np.random.default_rng(3), [], []
    for _ in range(40):
        q = rng.standard_normal((1, 1, 1, 16), dtype=np.float32)
        k, v = (rng.standard_normal((1, 1, 130, width), dtype=np.float32) for width in (16, 2))
        spec, args = resolve(q, k, v, Options())
        right = dense(q, k, v).out
        state, rounded = treeattn.partial_attention(q, k, v), plain_partial(spec, args)
        ours.append(state.o / state.l[..., None] - right)
        plain.append(rounded[..., :-2] / rounded[..., -2:-1] - right)
    assert np.sqrt(np.mean(np.square(ours))) <= 1.2 * np.sqrt(np.mean(np.square(plain)))


@pytest.mark.parametrize("left", [0, 700])
def test_a_block_that_no_query_sees_is_not_read(left):
    """Keys before the window, and after the query, lie where nothing can be read; whole blocks of them are skipped."""
    q, k, v = standard(tokens=1024, kv_heads=1, q_heads=4)
    position, count = 8 * 1024 + 1023, 17 * 1024
    guarded = [unreadable_around(array, 8 * 1024, count) for array in (k, v)]
    options = {"q_pos": np.array([position]), "kv_pos": 0, "causal": True, "window": (left, None)}
    got = treeattn.attention(q, *guarded, **options, return_lse=True)
    shown = slice(1023 - left, 1024)
    assert_attention(got, q, k[:, :, shown], v[:, :, shown])


@pytest.mark.parametrize("q_tokens", [1, 4], ids=["few rows", "many rows"])
@pytest.mark.parametrize("odd", [None, 0, 1, 511, 700, 1535])
def test_positions_that_are_consecutive_but_for_one(odd, q_tokens):
    """Consecutive positions are known by their first; one other, in one row of the batch, has to be seen."""
    q, k, v = (np.concatenate([array, array[..., ::-1]]) for array in standard(q_tokens=q_tokens, tokens=1536))
    kv_pos = np.arange(1536) + np.array([[-40], [900]])
    if odd is not None:
        kv_pos[1, odd] = 5000
    options = {"causal": True, "window": (1000, None), "q_pos": np.array([[1200], [2434]]) + np.arange(q_tokens)}
    got = treeattn.attention(q, k, v, **options, kv_pos=kv_pos, return_lse=True)
    assert_attention(got, q, k, v, **options, kv_pos=kv_pos)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (9, 0), "kv_pos": 7}], ids=["all", "causal", "window"]
)
def test_a_step_takes_little_memory_beyond_its_inputs(options):
    q = np.ones((1, 4, 1, 8), np.float32)
    k = np.broadcast_to(np.float32(1), (1, 2, 2**19, 8))
    out = treeattn.attention(q, k, k, **options)
    tracemalloc.start()
    try:
        assert np.array_equal(treeattn.attention(q, k, k, **options), out)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def standard(dtype=np.float32, seed=0, q_heads=8, kv_heads=2, q_tokens=1, tokens=5000, width=128):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(shape).astype(dtype)
        for shape in ((1, q_heads, q_tokens, width), (1, kv_heads, tokens, width), (1, kv_heads, tokens, width))
    ]


@pytest.mark.parametrize("dtype", STORED, ids=lambda dtype: np.dtype(dtype).name)
def test_long_keys_are_split_and_merged(dtype):
    q, k, v = standard()
    rng = np.random.default_rng(1)
    k, v = (numbers(rng, k.shape, dtype) for _ in range(2))
    options = {"scale": 1e-3} if dtype is np.int8 else {}
    assert_attention(treeattn.attention(q, k, v, **options, return_lse=True), q, k, v, **options)


def unreadable_around(array, before, count):
    """``count`` keys of which those of ``array`` begin at ``before``, and no other can be read."""
    row, page = array.strides[2], mmap.PAGESIZE
    memory = mmap.mmap(-1, count * row)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    placed = np.frombuffer(memory, array.dtype).reshape(1, 1, count, -1)
    placed[:, :, before : before + array.shape[2]] = array
    for first, stop in ((0, before), (before + array.shape[2], count)):
        assert first * row % page == 0, "the guarded keys must be whole pages"
        assert protect(start + first * row, (stop - first) * row) == 0, os.strerror(ctypes.get_errno())
    return placed


def protect(start, size):
    """Let nobody read these pages."""
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    return mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), 0)


def unreadable_after(array):
    """A copy of ``array`` at the very end of its memory, followed by a page that can't be read."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert protect(start + size, page) == 0, os.strerror(ctypes.get_errno())
    placed = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    placed[...] = array
    return placed


@pytest.mark.parametrize("dtype", STORED, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("tokens", [1, 131, 300])
@pytest.mark.parametrize("q_tokens", [1, 4])
def test_nothing_behind_the_arrays_is_read(dtype, tokens, q_tokens):
    """Few query rows, and so many that they lie in lanes."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 6, q_tokens, 24), dtype=np.float32)
    k, v = (numbers(rng, (1, 2, tokens, width), dtype) for width in (24, 40))
    guarded = [unreadable_after(array) for array in (k, v)]
    got = treeattn.attention(q, *guarded, scale=1e-3, return_lse=True)
    assert_attention(got, q, k, v, scale=1e-3)


def test_keys_at_and_after_kv_len_are_not_read():
    """The arrays claim pages that can't be read: only the row's real keys can."""
    q, k, v = standard(tokens=96, width=32, kv_heads=1)
    guarded = [
        np.lib.stride_tricks.as_strided(unreadable_after(array), (1, 1, 4096, 32), array.strides) for array in (k, v)
    ]
    options = {"kv_len": np.array([96])}
    got = treeattn.attention(q, *guarded, **options, mask=np.ones(4096, bool), causal=True, return_lse=True)
    assert_attention(got, q, k, v)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, *NARROW[1:]], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("q_tokens", [2, 4])  # 8 rows, and 16, which lie in the lanes of vectors
def test_a_value_hidden_from_some_rows_does_not_leak_into_them(q_tokens, dtype, poison):
    q, k, v = standard(q_tokens=q_tokens, tokens=200)
    k, v = k.astype(dtype), v.astype(dtype)
    mask = np.random.default_rng(0).random((1, 8, q_tokens, 200)) < 0.5
    mask[:, 5] = True
    mask[:, 5, :, 77] = False
    v[0, 1, 77] = poison
    out = treeattn.attention(q, k, v, mask=mask)
    sees = mask[0, :, :, 77] & (np.arange(8) >= 4)[:, None]
    np.testing.assert_array_equal(np.isfinite(out[0]).all(-1), ~sees)
    clean = np.where(np.isfinite(v), v, v.dtype.type(0))
    right = dense(q, k, clean, mask=mask).out
    assert_close(out[0][~sees], right[0][~sees], 1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [-245000, 245000])
def test_differences_between_huge_logits_survive(dtype, offset):
    """Whole numbers are exact in both precisions, so that only the softmax can lose anything."""
    differences = np.arange(300) % 7
    k = (offset + differences).astype(dtype).reshape(1, 1, 300, 1)
    v = np.random.default_rng(0).standard_normal((1, 1, 300, 3)).astype(dtype)
    q = np.ones((1, 1, 1, 1), dtype)
    weights = np.exp(differences - differences.max())
    right = weights @ v[0, 0].astype(np.float64) / weights.sum()
    out = treeattn.attention(q, k, v, scale=1.0)[0, 0, 0]
    assert_close(out, right, 8 * np.finfo(dtype).eps)


def test_denormal_inputs_and_weights_stay_exact_enough():
    q, k, v = standard(tokens=300)
    v *= np.float32(1e-40)
    assert_close(treeattn.attention(q, k, v), dense(q, k, v).out, 1e-44)
    tiny = [np.float16(6e-8) * np.sign(a).astype(np.float16) for a in standard(tokens=300)]
    assert_attention(treeattn.attention(*tiny, return_lse=True), *tiny)


def test_rows_that_see_nothing_beside_rows_that_do():
    q, k, v = standard(q_tokens=3, tokens=700)
    options = {"causal": True, "q_pos": np.array([-1, 5, 600]), "kv_pos": 0}
    out, lse = treeattn.attention(q, k, v, **options, return_lse=True)
    assert_attention((out, lse), q, k, v, **options)
    assert not out[:, :, 0].any()
    assert np.isneginf(lse[:, :, 0]).all()


def test_offsets_beyond_31_bits(tmp_path):
    """Two heads that lie 10 GB apart in a file with a hole between them, which takes no room."""
    apart, (q, k, v) = 10 << 30, standard(q_heads=2, tokens=40, width=8)
    memory = np.memmap(tmp_path / "hole", np.float32, "w+", shape=apart // 4 + (1 << 21))
    far_k, far_v = (
        np.lib.stride_tricks.as_strided(memory[start:], k.shape, (0, apart, 32, 4)) for start in (0, 1 << 20)
    )
    far_k[...], far_v[...] = k, v
    assert_attention(treeattn.attention(q, far_k, far_v, return_lse=True), q, k, v)


class TestThreads:
    """The project's own threads."""

    @pytest.fixture(autouse=True)
    def looks_again_afterwards(self):
        yield
        threads.look_again()

    def set_threads(self, monkeypatch, count):
        monkeypatch.setenv("TREEATTN_THREADS", str(count))
        threads.look_again()

    def test_bits_do_not_depend_on_their_number(self, monkeypatch):
        q, k, v = standard(tokens=9000)
        found = set()
        for count in (1, 2, 3, 7):
            self.set_threads(monkeypatch, count)
            found.add(treeattn.partial_attention(q, k, v).packed.tobytes())
            assert threads.team()[1] == count
        assert len(found) == 1

    def test_a_change_of_their_number_is_seen_after_some_calls(self, monkeypatch):
        self.set_threads(monkeypatch, 2)
        assert threads.team()[1] == 2
        monkeypatch.setenv("TREEATTN_THREADS", "1")
        assert [threads.team()[1] for _ in range(threads.CALLS_TO_A_LOOK)][-1] == 1

    def test_helpers_look_longer_only_where_each_has_a_processor(self, monkeypatch):
        looks, share = [], fair_share().threads
        monkeypatch.setattr(threads.Board, "gather", lambda board, helpers, looks_: looks.append(looks_))
        for count in (share, share + 1):
            self.set_threads(monkeypatch, count)
            threads.team()
        assert looks == [threads.HELPER_LOOKS, 1]

    @pytest.mark.parametrize("callers", [6, threads.SLOTS + 4])
    def test_several_python_threads_may_call_at_once(self, monkeypatch, callers):
        self.set_threads(monkeypatch, 3)
        inputs = [standard(seed=seed) for seed in range(callers)]
        expected = [treeattn.attention(*given) for given in inputs]
        wrong = []

        def work(index):
            got = {treeattn.attention(*inputs[index]).tobytes() for _ in range(10)}
            if got != {expected[index].tobytes()}:
                wrong.append(index)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(callers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive()
        assert not wrong

    def test_a_forked_child_has_threads_of_its_own(self, monkeypatch):
        self.set_threads(monkeypatch, 2)
        q, k, v = standard(tokens=9000)
        expected = treeattn.attention(q, k, v).tobytes()
        child = os.fork()
        if child == 0:
            same = treeattn.attention(q, k, v).tobytes() == expected
            os._exit(0 if same and threading.active_count() == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0

    def test_a_call_does_what_helpers_that_do_not_come_would_do(self, monkeypatch):
        q, k, v = standard(tokens=9000)
        expected = treeattn.attention(q, k, v).tobytes()
        nobody = threads.Board()
        monkeypatch.setattr(cpu, "team", lambda: (nobody.address, 3))
        for _ in range(2 * threads.SLOTS):
            assert treeattn.attention(q, k, v).tobytes() == expected

    def test_helpers_that_were_dismissed_are_done_without(self, monkeypatch):
        q, k, v = standard(tokens=9000)
        expected = treeattn.attention(q, k, v).tobytes()
        board = threads.Board()
        board.gather(2)
        monkeypatch.setattr(cpu, "team", lambda: (board.address, 3))
        assert treeattn.attention(q, k, v).tobytes() == expected
        board.dismiss()
        board.gather(2)
        assert not any(helper.is_alive() for helper in board._helpers)
        assert treeattn.attention(q, k, v).tobytes() == expected

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a helper can only move where there are 2 processors")
    def test_a_helper_leaves_its_callers_processor(self):
        allowed, found = os.sched_getaffinity(0), []
        crowded = [*sorted(allowed)[:2], threads.ENDED]

        def serve(board, moves):
            found.append((os.sched_getaffinity(0), moves))
            return crowded[len(found) - 1]

        helper = threading.Thread(target=threads.Board()._help, args=(serve,))
        helper.start()
        helper.join(10)
        assert found == [(allowed, True), *((allowed - {cpu}, True) for cpu in crowded[:2])]
        assert os.sched_getaffinity(0) == allowed

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a helper can only move where there are 2 processors")
    def test_a_helper_stays_where_somebody_has_put_it(self):
        """As ``taskset -a -p`` does with all threads of a process."""
        allowed, found = os.sched_getaffinity(0), []
        first = min(allowed)

        def serve(board, moves):
            found.append((os.sched_getaffinity(0), moves))
            if len(found) == 2:
                os.sched_setaffinity(0, {first})
            return [first, first, first, threads.ENDED][len(found) - 1]

        helper = threading.Thread(target=threads.Board()._help, args=(serve,))
        helper.start()
        helper.join(10)
        assert found == [(allowed, True), (allowed - {first}, True), ({first}, False), ({first}, False)]

    def test_a_call_does_without_threads_that_the_system_does_not_give(self, monkeypatch):
        def start(thread):
            raise RuntimeError("can't start new thread")

        q, k, v = standard(tokens=9000)
        expected, team = treeattn.attention(q, k, v).tobytes(), threads._Team()
        monkeypatch.setattr(threads, "_team", team)
        monkeypatch.setattr(threading.Thread, "start", start)
        self.set_threads(monkeypatch, 3)
        assert treeattn.attention(q, k, v).tobytes() == expected
        assert not team.board._helpers

    def test_signals_are_heard_between_calls(self, monkeypatch):
        self.set_threads(monkeypatch, 2)
        q, k, v = standard(tokens=9000)
        expected, heard = treeattn.attention(q, k, v).tobytes(), []
        before = signal.signal(signal.SIGALRM, lambda *_: heard.append(True))
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        try:
            while len(heard) < 10:
                assert treeattn.attention(q, k, v).tobytes() == expected
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_a_program_may_end_while_a_thread_still_calls(self):
        program = "import numpy as np, threading, treeattn\n" + inspect.getsource(standard) + AT_THE_END
        process = run_program(program, TREEATTN_THREADS="2")
        assert process.communicate(timeout=120)[0].split() == ["done"]
        assert process.returncode == 0


AT_THE_END = """
inputs = standard(tokens=9000)
treeattn.attention(*inputs)
def call():
    while True:
        treeattn.attention(*inputs)
threading.Thread(target=call, daemon=True).start()
for _ in range(20):
    treeattn.attention(*inputs)
print("done", flush=True)
"""


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}], ids=["plain", "options"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8], ids=lambda dtype: np.dtype(dtype).name)
def test_what_was_in_working_memory_does_not_matter(monkeypatch, dtype, options):
    rng = np.random.default_rng(0)
    (q, *_), k, v = standard(), *(numbers(rng, (1, 2, 5000, 128), dtype) for _ in "kv")
    found = set()
    for filling in (0, 0xFF, 0x7F):  # NaN in every type
        memory = cpu.Memory(1 << 20)
        memory._bytes[:] = filling
        monkeypatch.setattr(cpu, "_unused", [memory])
        found.add(treeattn.attention(q, k, v, **options).tobytes())
        assert cpu._unused == [memory]
    assert len(found) == 1


def test_only_small_working_memory_is_kept(monkeypatch):
    monkeypatch.setattr(cpu, "_unused", [])
    q, k, v = standard(tokens=10)
    treeattn.attention(q, k, v)
    (kept,) = cpu._unused
    many = np.concatenate([q] * (cpu.KEPT_BYTES // q.nbytes + 1), axis=2)
    assert_attention(treeattn.attention(many, k, v, return_lse=True), many, k, v)
    assert cpu._unused == []
    assert kept.size <= cpu.KEPT_BYTES


@numba.njit
def look(array, none, found):
    array_objects.read_array(array, none, found.ctypes.data)
    found[-1] = array_objects.length_of(array, 0)


@pytest.mark.parametrize("array", [np.zeros((2, 3, 4), np.int8)[:, ::-2], np.zeros(5).T, np.zeros((0, 2, 1, 3))])
def test_compiled_code_reads_array_objects(array):
    found = np.full(6, -1)
    look(id(array), id(None), found)
    assert found[: array.ndim + 1].tolist() == [array.__array_interface__["data"][0], *array.strides]
    assert found[-1] == len(array)


def test_arrays_that_lie_elsewhere_in_their_objects_are_refused(monkeypatch):
    monkeypatch.setattr(array_objects, "HEAD", array_objects.HEAD + 8)
    with pytest.raises(RuntimeError, match="NumPy"):
        array_objects.check_objects.__wrapped__()


def run_program(program, **environment):
    package = os.path.dirname(os.path.dirname(treeattn.__file__))
    variables = {**os.environ, "PYTHONPATH": package, **environment}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program], env=variables, text=True, stdout=subprocess.PIPE
    )


OTHER_PROCESSORS = """
import ml_dtypes, numpy as np, treeattn
from treeattn.kernels.vectors import LANES
from treeattn.testing.oracle import assert_attention
print(LANES)
rng = np.random.default_rng(0)
for dtype, width in ((np.float32, 128), (ml_dtypes.bfloat16, 80), (np.float16, 33)):
    for group, options in ((1, {}), (7, {"mask": rng.random(300) < 0.5, "softcap": 3.0})):
        q = rng.standard_normal((1, group, 2, width), dtype=np.float32)
        k, v = (rng.standard_normal((1, 1, 300, width)).astype(dtype) for _ in "kv")
        assert_attention(treeattn.attention(q, k, v, **options, return_lse=True), q, k, v, **options)
"""


@pytest.mark.parametrize(("setting", "lanes"), [("NUMBA_CPU_NAME=generic", "4"), ("TREEATTN_LANES=8", "8")])
def test_shorter_vectors_give_the_same(tmp_path, setting, lanes):
    variable, _, value = setting.partition("=")
    process = run_program(OTHER_PROCESSORS, **{variable: value}, NUMBA_CACHE_DIR=str(tmp_path))
    assert process.communicate(timeout=120)[0].split() == [lanes]
    assert process.returncode == 0


FOR_ARM = """
import re, sys
from llvmlite import binding
from treeattn.kernels.many_values import many_values_of
from treeattn.kernels.scores import WIDENED, scores_of
from treeattn.kernels.values import values_of
binding.initialize_all_targets()
binding.initialize_all_asmprinters()
try:
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
except RuntimeError:
    sys.exit(3)
for storage in ("float32", "bfloat16", "float16", "float8_e4m3fn"):
    few = scores_of(storage, 80, WIDENED), values_of(storage, 80, looked_up=False)
    for part in (*few, many_values_of("bfloat16")):
        (compiled,) = (cell.cell_contents for cell in part.__closure__)
        text = re.sub(r'"target-(cpu|features)"="[^"]*"', "", compiled()._library.get_llvm_str())
        text = re.sub(r'target (triple|datalayout) = "[^"]*"', "", text)
        assembly = target.create_target_machine().emit_assembly(binding.parse_assembly(text))
        print(storage, assembly.count("fmla"))
"""


def test_products_compile_for_arm(tmp_path):
    """To machine code only: nothing here runs it. (Code from the disk would have no LLVM text to start from.)"""
    process = run_program(FOR_ARM, TREEATTN_LANES="4", NUMBA_CACHE_DIR=str(tmp_path))
    found = process.communicate(timeout=120)[0].split()
    if process.returncode == 3:
        pytest.skip("this LLVM compiles for no ARM processor")
    assert process.returncode == 0
    assert len(found) == 24
    assert min(map(int, found[1::2])) >= 10, "multiply-adds of whole vectors are missing"


@pytest.mark.parametrize("dtype", STORED, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize(("width", "group"), [(32, 1), (33, 1), (128, 1), (128, 7)])
@pytest.mark.parametrize("portable", PORTABLE)
def test_every_stored_number_is_read_as_what_it_is(monkeypatch, dtype, width, group, portable):
    """All bit patterns of 16 bits and less, as values of a single key each; whole vectors and not."""
    monkeypatch.setenv("TREEATTN_PORTABLE", portable)
    size = np.dtype(dtype).itemsize
    patterns = np.arange(1 << min(8 * size, 16), dtype=np.dtype(f"u{min(size, 2)}"))
    values = patterns.view(dtype) if size <= 2 else np.random.default_rng(0).standard_normal(4096).astype(dtype)
    values = np.resize(values, (1, -(-values.size // width), 1, width))
    q = np.ones((1, group * values.shape[1], 1, 1), np.float32)
    out = treeattn.partial_attention(q, q[:, ::group], values).o
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(out, np.repeat(values.astype(out.dtype), group, axis=1))


@pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("portable", PORTABLE)
def test_every_key_of_8_bits_is_multiplied_as_what_it_is(monkeypatch, dtype, group, portable):
    """All bit patterns, each in another place of a key that is 0 elsewhere; for queries of bfloat16."""
    monkeypatch.setenv("TREEATTN_PORTABLE", portable)
    heads, width = np.arange(256), 128
    k = np.zeros((1, heads.size, 1, width), dtype)
    k[0, heads, 0, 37 * heads % width] = heads.astype(np.uint8).view(dtype)
    q = np.zeros((1, heads.size, group, 1, width), ml_dtypes.bfloat16)
    q[0, heads, :, 0, 37 * heads % width] = np.arange(1, group + 1)
    state = treeattn.partial_attention(q.reshape(1, -1, 1, width), k, k, scale=1.0)
    with np.errstate(invalid="ignore"):
        right = heads.astype(np.uint8).view(dtype).astype(np.float32)[:, None] * np.arange(1, group + 1)
        np.testing.assert_array_equal(state.m.reshape(-1, group), np.where(np.isnan(right), -np.inf, right))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize("heads", [1, 4])  # 3 rows, and 12, which lie in the lanes of vectors
def test_hidden_keys_stay_hidden_whatever_the_sign_of_scale(heads, scale):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, *shape, 8), np.float32) for shape in ((heads, 3), (1, 20), (1, 20)))
    options = {"causal": True, "q_pos": np.array([-1, 12, 30]), "kv_pos": np.arange(20), "scale": scale}
    assert_attention(treeattn.attention(q, k, v, **options, return_lse=True), q, k, v, **options)


@pytest.mark.parametrize("blocks", [1, 3, 100, 1200])
def test_scales_of_blocks_reach_their_own_keys(blocks):
    q, k, v = standard(tokens=1200)
    rng = np.random.default_rng(1)
    k, v = (numbers(rng, k.shape, np.int8) for _ in range(2))
    options = {name: rng.uniform(0.01, 0.02, (1, 2, blocks, 1)).astype(np.float32) for name in ("k_scale", "v_scale")}
    assert_attention(treeattn.attention(q, k, v, **options, return_lse=True), q, k, v, **options)
