"""The laws of the partial state: merge, identity, finish, and the exchange of (out, lse)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn.backends.host import HostOps
from treeattn.errors import InputError
from treeattn.state import PartialState
from treeattn.testing import run_ranks

OPS = HostOps("cpu")
DTYPES = [np.float32, np.float64]
SHAPE = (2, 3, 2, 5)
law = settings(deadline=None, max_examples=50)


def packed_state(seed, dtype=np.float32, empty=0.3, spread=10.0):
    """A packed state of random rows, of which some saw no key and hold NaN in o and anything in m."""
    rng = np.random.default_rng(seed)
    batch, heads, tokens, width = SHAPE
    rows = rng.standard_normal((batch, heads, tokens, width + 2)).astype(dtype)
    rows[..., -2] = rng.uniform(0.5, 100, rows.shape[:-1])
    rows[..., -1] *= dtype(spread)
    unseen = rng.random(rows.shape[:-1]) < empty
    rows[unseen] = np.append(np.full(width, np.nan), [0, rng.choice([np.nan, 7, np.inf, -np.inf])])
    return rows


def state(seed, dtype=np.float32, **options):
    return PartialState(packed_state(seed, dtype, **options), OPS)


def exact_merge(states):
    """Sum of the states of disjoint keys in float64, as (o, l) relative to the largest m, and that m."""
    rows = np.stack([s.packed.astype(np.float64) for s in states])
    seen = rows[..., -2] != 0
    m = np.max(np.where(seen, rows[..., -1], -np.inf), axis=0)
    with np.errstate(invalid="ignore"):
        weight = np.where(seen, np.exp(rows[..., -1] - m), 0)
    summed = np.sum(weight[..., None] * np.where(seen[..., None], rows[..., :-1], 0), axis=0)
    return summed[..., :-1], summed[..., -1], m


def assert_near(got, right, dtype, scale, units=8):
    """Within a few units in the last place of the largest term."""
    np.testing.assert_allclose(got, right, rtol=0, atol=units * np.finfo(dtype).eps * scale)


seeds = st.lists(st.integers(0, 10**6), min_size=1, max_size=7, unique=True)


@law
@given(seeds=seeds, dtype=st.sampled_from(DTYPES))
def test_merge_is_the_sum_of_the_states_in_any_order(seeds, dtype):
    states = [state(seed, dtype) for seed in seeds]
    o, l, m = exact_merge(states)  # noqa: E741 - the field's names
    for order in itertools.islice(itertools.permutations(states), 0, 120, 23):
        merged = treeattn.merge(order)
        np.testing.assert_array_equal(merged.m, m)
        assert_near(merged.o, o, dtype, 10 * len(seeds))
        assert_near(merged.l, l, dtype, 100 * len(seeds))


@law
@given(seeds=st.tuples(*[st.integers(0, 10**6)] * 3), dtype=st.sampled_from(DTYPES))
def test_merge_is_associative_to_rounding_and_commutative(seeds, dtype):
    a, b, c = (state(seed, dtype) for seed in seeds)
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert_near(left.o, right.o, dtype, 30)
    assert_near(left.l, right.l, dtype, 300)
    np.testing.assert_array_equal(left.m, right.m)
    np.testing.assert_array_equal(a.merge(b).packed, b.merge(a).packed)


@law
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES), where=st.integers(0, 3))
def test_the_identity_changes_no_bit(seed, dtype, where):
    only = state(seed, dtype, empty=0.0)
    others = [PartialState.identity(SHAPE, dtype=dtype)] * 3
    merged = treeattn.merge([*others[:where], only, *others[where:]])
    assert merged.packed.tobytes() == only.packed.tobytes()


def test_identities_merge_to_the_identity():
    merged = treeattn.merge([PartialState.identity(SHAPE)] * 3)
    assert merged.packed.tobytes() == PartialState.identity(SHAPE).packed.tobytes()


def test_a_single_live_source_keeps_its_bits_even_a_nan_and_a_negative_zero():
    only = packed_state(0, empty=0.0)
    only[..., 0], only[..., 1], only[0, 0, 0, -1] = -0.0, np.nan, np.inf
    dead = np.full_like(only, np.nan)
    dead[..., -2] = 0
    merged = treeattn.merge([PartialState(dead, OPS), PartialState(only, OPS)])
    assert merged.packed.tobytes() == only.tobytes()


@law
@given(seeds=seeds)
def test_a_state_without_keys_never_leaks_what_it_holds(seeds):
    states = [state(seed, empty=0.9) for seed in seeds]
    clean = [s.packed.copy() for s in states]
    for rows in clean:
        rows[rows[..., -2] == 0] = np.append(np.zeros(SHAPE[-1] + 1), -np.inf)
    expected = treeattn.merge([PartialState(rows, OPS) for rows in clean])
    assert treeattn.merge(states).packed.tobytes() == expected.packed.tobytes()


@law
@given(seeds=seeds, into=st.integers(0, 6), dtype=st.sampled_from(DTYPES))
def test_the_output_may_be_one_of_the_sources(seeds, into, dtype):
    expected = treeattn.merge([state(seed, dtype) for seed in seeds])
    states = [state(seed, dtype) for seed in seeds]
    out = states[into % len(states)]
    assert treeattn.merge(states, out=out) is out
    assert out.packed.tobytes() == expected.packed.tobytes()


PACKED = np.ones((1, 3, 2, 6), np.float32)
ODD = {
    "Fortran order": np.asfortranarray(PACKED),
    "every second number": np.ones((1, 3, 2, 12), np.float32)[..., ::2],
    "heads backwards": PACKED[:, ::-1],
    "the other byte order": PACKED.astype(PACKED.dtype.newbyteorder()),
    "not aligned": np.frombuffer(b"1" + PACKED.tobytes(), np.float32, offset=1).reshape(PACKED.shape),
    "16 bit": PACKED.astype(np.float16),
    "whole numbers": PACKED.astype(np.int32),
    "three axes": PACKED[0],
    "no l and m": PACKED[..., :1],
    "a list": PACKED.tolist(),
}


@pytest.mark.parametrize("name", ODD)
def test_a_buffer_that_compiled_code_would_read_wrongly_is_no_state(name):
    with pytest.raises(InputError, match=r"^packed: expected a .*array.*, got "):
        PartialState(ODD[name], HostOps("cpu"))


@pytest.mark.parametrize("into", ["merge", "partial_attention", "allreduce"])
def test_a_read_only_array_is_never_overwritten(into):
    """It can be a state, but no ``out``."""
    q = np.ones((1, 3, 2, 4), np.float32)
    packed = PACKED.copy()
    packed.flags.writeable = False
    state = PartialState(packed, treeattn.PartialState.identity((1, 1, 1, 1)).ops)

    def allreduce(transport):
        with treeattn.TreeComm(transport) as comm:
            for _ in range(3):  # the first steps go the long way
                assert comm.allreduce(state, out=None).shape == (1, 3, 2, 4)
            with pytest.raises(InputError, match=r"^out: expected a state that can be overwritten, got one of a read-"):
                comm.allreduce(state, out=state)

    def alone():
        with pytest.raises(InputError, match=r"^out: expected a state that can be overwritten, got one of a read-only"):
            treeattn.merge([state, state], out=state) if into == "merge" else treeattn.partial_attention(
                q, q, q, out=state
            )

    run_ranks(2, allreduce) if into == "allreduce" else alone()
    assert np.array_equal(packed, PACKED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_seen_nan_reaches_the_output_of_its_row_alone(dtype):
    rows = packed_state(3, dtype, empty=0.0)
    rows[0, 1, 0, -1] = np.nan
    out, lse = treeattn.merge([PartialState(rows, OPS), state(4, dtype, empty=0.0)]).finish(return_lse=True)
    assert np.isnan(out[0, 1, 0]).all()
    assert np.isnan(lse[0, 1, 0])
    assert np.isnan(out).sum() == SHAPE[-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_apart_maxima_neither_overflow_nor_lose_the_larger(dtype):
    low, high = packed_state(0, dtype, empty=0.0), packed_state(1, dtype, empty=0.0)
    low[..., -1], high[..., -1] = -245000, 245000
    merged = treeattn.merge([PartialState(low, OPS), PartialState(high, OPS)])
    assert merged.packed.tobytes() == high.tobytes()


@law
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES), sink=st.floats(-50, 50))
def test_the_sink_is_one_more_logit_with_no_value(seed, dtype, sink):
    held = state(seed, dtype, spread=3.0)
    sinks = np.array([sink, -np.inf, 0.25])
    with np.errstate(all="ignore"):
        m, l = held.m.astype(np.float64), held.l.astype(np.float64)  # noqa: E741 - the field's names
        lse = np.logaddexp(np.where(l == 0, -np.inf, m + np.log(l)), sinks[:, None])
        right = np.where((l == 0)[..., None], 0, held.o * np.exp(m - lse)[..., None])
    out, got = held.finish(sink=sinks, return_lse=True)
    np.testing.assert_allclose(got, lse, rtol=4 * np.finfo(dtype).eps, atol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(out, right, rtol=1e-5 if dtype is np.float32 else 1e-13, atol=np.finfo(dtype).tiny)


def test_a_sink_of_minus_infinity_changes_no_bit():
    held = state(5)
    with_sink = held.finish(sink=np.full(3, -np.inf), return_lse=True)
    for got, expected in zip(with_sink, held.finish(return_lse=True), strict=True):
        assert got.tobytes() == expected.tobytes()


def test_a_row_without_keys_finishes_to_0_and_minus_infinity_or_the_sink():
    empty = PartialState.identity(SHAPE)
    out, lse = empty.finish(return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()
    out, lse = empty.finish(sink=np.array([1.0, -2.0, np.nan]), return_lse=True)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(np.array([1, -2, np.nan])[:, None], lse.shape))


@law
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES), base=st.sampled_from(["e", 2]))
def test_out_and_lse_go_out_and_come_back(seed, dtype, base):
    held = state(seed, dtype)
    back = PartialState.from_lse(*held.to_lse(base=base), base=base)
    for got, right in zip(back.finish(return_lse=True), held.finish(return_lse=True), strict=True):
        np.testing.assert_allclose(got, right, rtol=8 * np.finfo(dtype).eps, atol=0)


def test_the_base_of_lse_is_what_was_asked_for():
    held = state(6, np.float64, empty=0.0)
    natural, binary = held.to_lse(base="e")[1], held.to_lse(base=2)[1]
    np.testing.assert_allclose(binary * math.log(2), natural, rtol=1e-15)


def test_states_cross_the_wire_as_bytes():
    rows = packed_state(7)
    wire = np.empty(rows.nbytes, np.uint8)
    OPS.to_host(rows, wire)
    assert wire.tobytes() == rows.tobytes()
    back = OPS.empty(rows.shape, "float32")
    OPS.from_host(wire, back)
    assert back.tobytes() == rows.tobytes()


def test_a_state_is_immutable_and_says_what_it_is():
    held = state(8, empty=0.0)
    for array in (held.o, held.l, held.m, held.packed):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    for word in ("batch=2", "heads=3", "tokens=2", "width=5", "float32", "cpu", "12 of 12"):
        assert word in repr(held)


@pytest.mark.parametrize(
    ("states", "word"),
    [
        ([], "states"),
        ([1], "states"),
        ([PartialState.identity((1, 1, 1, 2)), PartialState.identity((1, 1, 1, 3))], "shape"),
        ([PartialState.identity(SHAPE), PartialState.identity(SHAPE, dtype="float64")], "dtype"),
    ],
)
def test_states_that_do_not_belong_together_are_refused(states, word):
    with pytest.raises(InputError, match=rf"^states: expected .*{word if word != 'states' else ''}"):
        treeattn.merge(states)


@pytest.mark.parametrize("states", [None, PartialState.identity(SHAPE), 3, np.array(3)])
def test_what_is_no_collection_of_states_is_refused(states):
    with pytest.raises(InputError, match=r"^states: expected an iterable of states, got "):
        treeattn.merge(states)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 2, 1, -1), (1, -2, 1, 3), (1.5, 2, 1, 3), "abcd", None, 5])
def test_the_shape_of_an_identity_is_four_sizes(shape):
    with pytest.raises(InputError, match=r"^shape: expected \(batch, query heads, query tokens, width of v\), got "):
        PartialState.identity(shape)


@pytest.mark.parametrize("dtype", ["float16", int, object(), "nonsense"])
def test_other_precisions_are_refused(dtype):
    with pytest.raises(InputError, match=r"^dtype: expected float32, float64, got "):
        PartialState.identity(SHAPE, dtype=dtype)


@pytest.mark.parametrize("dtype", ["int8", int, object(), "nonsense"])
def test_outputs_of_other_dtypes_are_refused(dtype):
    with pytest.raises(InputError, match=r"^dtype: expected float32, .*, got "):
        state(9).finish(dtype=dtype)


OUT, LSE = np.zeros((1, 2, 1, 4), np.float32), np.zeros((1, 2, 1), np.float32)
BAD_IMPORTS = {
    "three axes": (OUT[0], LSE, r"^out: expected four axes .*, got shape \(2, 1, 4\)"),
    "objects": (OUT.astype(object), LSE, r"^out: expected dtype float32"),
    "complex": (OUT, LSE.astype(complex), r"^lse: expected dtype float32"),
    "masked": (np.ma.array(OUT, mask=True), LSE, r"^out: expected an array, got a masked array"),
    "nothing": (OUT, None, r"^lse: expected an array, got None"),
    "other heads": (OUT, LSE[:, :1], r"^lse: expected shape \(1, 2, 1\), as out has"),
}


@pytest.mark.parametrize("name", BAD_IMPORTS)
def test_what_cannot_be_imported_is_named(name):
    out, lse, message = BAD_IMPORTS[name]
    with pytest.raises(InputError, match=message):
        PartialState.from_lse(out, lse, base="e")


@pytest.mark.parametrize("lost", [np.nan, np.inf])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_an_imported_lse_that_is_lost_makes_its_row_nan_alone_and_merged(lost, others):
    lse = LSE.copy()
    lse[0, 1] = lost
    broken = PartialState.from_lse(OUT, lse, base="e")
    out, lse = treeattn.merge([broken, *[PartialState.from_lse(OUT, LSE, base=2)] * others]).finish(return_lse=True)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 1]).all()
    assert not np.isnan(out[0, 0]).any()
    assert not np.isnan(lse[0, 0]).any()
