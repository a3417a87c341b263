"""States on the wire: what packing and unpacking keep, and a merge whose bits nothing changes."""

from __future__ import annotations

import importlib.util
import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llvmlite import binding

from treeattn import PartialState
from treeattn.arguments.arrays import narrow_dtype
from treeattn.backends.host import HostOps
from treeattn.kernels import combine, compilation, wire_rows
from treeattn.kernels.narrow import narrowed, widened
from treeattn.testing import over_the_wire
from treeattn.wire_form import ROUNDING, WireForm

OPS = HostOps("cpu")
DTYPES = ["float32", "float64"]
WIDTH = 6
law = settings(deadline=None, max_examples=60)


def rows_of(seed, dtype="float32", rows=8, spread=10.0):
    """Rows of states that saw keys, as (1, rows, 1, WIDTH)."""
    rng = np.random.default_rng(seed)
    packed = rng.standard_normal((1, rows, 1, WIDTH)).astype(dtype)
    packed[..., -2] = rng.uniform(0.5, 100, packed.shape[:-1])
    packed[..., -1] *= np.dtype(dtype).type(spread)
    return packed


def form_of(packed, narrow=None):
    return WireForm(packed.shape, packed.dtype.name, narrow)


def packed_to_wire(packed):
    wire = np.empty(packed.nbytes, np.uint8)
    OPS.prepare_pack(wire, form_of(packed))(packed)
    return wire.view(packed.dtype).reshape(packed.shape)


def unpacked(rows):
    packed = np.empty_like(rows)
    OPS.prepare_unpack(rows.reshape(-1).view(np.uint8), form_of(rows))(packed)
    return packed


def merged(rows, prepare=wire_rows.prepare_merge):
    out = np.empty_like(rows[0])
    as_bytes = [each.reshape(-1).view(np.uint8) for each in (out, *rows)]
    prepare(as_bytes[0], as_bytes[1:], form_of(out))()
    return out


def on_wire(*seeds, spread=10.0, dtype="float32"):
    return [packed_to_wire(rows_of(seed, dtype, spread=spread)) for seed in seeds]


def numbers(rows):
    """What (o, l) of each row stand for, exp(m) and 2**e included, with 60 digits; the last column is m or e."""
    flat = rows.reshape(-1, WIDTH).tolist()
    return [([Decimal(x) for x in row[:-1]], Decimal(row[-1])) for row in flat]


def largest_error(natural, wire):
    """Largest relative difference of what a packed state and wire rows stand for, in units of the last place."""
    worst = Decimal(0)
    with localcontext(Context(prec=60)):
        for (values, m), (rows, e) in zip(numbers(natural), numbers(wire), strict=True):
            factor = (m - e * Decimal(2).ln()).exp()
            right = [value * factor for value in values]
            worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(rows, right, strict=True))])
    return float(worst) / np.finfo(natural.dtype).eps


# Two roundings, of the factor and of the product, are one unit; float64's exp2 and exp add up to 1.25 of their own.
UNITS = {"float32": 1.001, "float64": 2.25}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0, 245_000.0, 3e6])
def test_packing_loses_no_bit_beyond_a_rounding(dtype, spread):
    state = rows_of(1, dtype, rows=40, spread=spread)
    rows = packed_to_wire(state)
    e, scale = rows[..., -1], rows[..., -2] / state[..., -2]
    np.testing.assert_array_equal(e, np.round(e))
    assert ((scale > 0.499) & (scale <= 1)).all()
    assert largest_error(state, rows) <= UNITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 100.0, 245_000.0])
def test_unpacking_loses_no_bit_beyond_a_rounding(dtype, spread):
    rows = packed_to_wire(rows_of(2, dtype, rows=40, spread=spread))
    assert largest_error(unpacked(rows), rows) <= 2 * UNITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1e9, -1e9, 1e30, -1e30, 0.0])
def test_where_floats_no_longer_tell_logits_apart_output_and_lse_stay_right(dtype, m):
    state = rows_of(3, dtype)
    state[..., -1] = m
    back = unpacked(packed_to_wire(state))
    for got, right in zip(combine.finish(back, None), combine.finish(state, None), strict=True):
        np.testing.assert_allclose(got, right, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [0.0, np.nan, np.inf, -np.inf])
def test_a_row_without_keys_is_the_identity_whatever_it_holds(dtype, m):
    empty, other = np.full((1, 8, 1, WIDTH), np.nan, dtype), packed_to_wire(rows_of(4, dtype))
    empty[..., -2:] = 0, m
    rows = packed_to_wire(empty)
    assert np.array_equal(rows, np.broadcast_to([*[0] * (WIDTH - 1), -np.inf], rows.shape))
    for order in ([rows, other], [other, rows], [rows, other, rows, rows]):
        np.testing.assert_array_equal(merged(order), other)
    np.testing.assert_array_equal(unpacked(merged([rows, rows])), rows)


@law
@given(seeds=st.lists(st.integers(0, 999), min_size=1, max_size=7), spread=st.sampled_from([1.0, 30.0, 245_000.0]))
def test_the_merge_is_the_sum_and_its_lse_as_good_as_the_precision_allows(seeds, spread):
    states = [rows_of(seed, spread=spread) for seed in seeds]
    wide = np.stack(states).astype(np.float64)
    m = wide[..., -1].max(0)
    o, l = np.moveaxis((np.exp(wide[..., -1] - m)[..., None] * wide[..., :-1]).sum(0), -1, 0)[[0, -1]]  # noqa: E741
    out, lse = over_the_wire([PartialState(each, OPS) for each in states]).finish(return_lse=True)
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(out[..., 0], o / l, rtol=0, atol=2 * len(seeds) * eps * np.abs(wide[..., :-2]).max())
    right = m + np.log(l)
    np.testing.assert_allclose(lse, right, rtol=0, atol=4 * len(seeds) * eps * max(1, np.abs(right).max()))


@law
@given(first=st.integers(0, 999), second=st.integers(0, 999), apart=st.integers(-200, 200))
def test_the_sum_of_two_rows_is_exact_but_for_one_rounding(first, second, apart):
    a, b = on_wire(first, second)
    b[..., -1] = a[..., -1] + apart
    found = merged([a, b])
    for ours, *rows in zip(*(each.reshape(-1, WIDTH).tolist() for each in (found, a, b)), strict=True):
        top = max(row[-1] for row in rows)
        assert ours[-1] == top
        for j in range(WIDTH - 1):
            right = sum(Fraction(row[j]) * Fraction(2) ** int(row[-1] - top) for row in rows)
            half_a_unit = Fraction(float(np.spacing(np.float32(abs(ours[j]))))) / 2
            assert abs(Fraction(ours[j]) - right) <= half_a_unit


def test_what_falls_below_the_normal_range_is_rounded_once_and_what_is_out_of_range_is_dropped():
    a, b = on_wire(5, 6)
    a[..., :-1] = 0
    for apart in (-100, -126, -127, -140, -149, -150, -1000, -5000):
        b[..., -1] = a[..., -1] + apart
        right = np.ldexp(b[..., :-1], apart)
        right[..., :-1] *= apart > -150  # l is summed in float64, and takes part to the last
        np.testing.assert_array_equal(merged([a, b])[..., :-1], right)


@law
@given(seeds=st.tuples(st.integers(0, 999), st.integers(0, 999)), spread=st.sampled_from([1.0, 90.0, 245_000.0]))
def test_two_rows_give_the_same_bits_in_either_order(seeds, spread):
    a, b = on_wire(*seeds, spread=spread)
    assert merged([a, b]).tobytes() == merged([b, a]).tobytes()


def contracted(module):
    """Compile a module of kernels as GPU compilers do by default: products and sums fused where they can be."""
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    spec = importlib.util.spec_from_file_location(f"contracted_{module.__name__.rpartition('.')[2]}", module.__file__)
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "inline", numba.njit(**options))
        patch.setattr(compilation, "entry", lambda signature: lambda body: lambda: numba.njit(**options)(body))
        spec.loader.exec_module(found)
    return found


@pytest.mark.skipif(not binding.get_host_cpu_features().get("fma"), reason="this processor fuses nothing")
def test_bits_are_the_same_where_a_compiler_contracts():
    fused = contracted(wire_rows).prepare_merge
    for count in (1, 2, 3, 8):
        for spread in (1.0, 30.0):
            rows = on_wire(*range(count), spread=spread)
            assert merged(rows, fused).tobytes() == merged(rows).tobytes()
    states = [rows_of(seed) for seed in range(3)]
    found = [np.empty_like(states[0]) for _ in range(2)]
    combine.prepare_merge(found[0], states)()
    contracted(combine).prepare_merge(found[1], states)()
    assert found[0].tobytes() != found[1].tobytes(), "compiled so, a merge of natural states has other bits"


@pytest.mark.parametrize("lost", [np.nan, np.inf])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_lost_sum_makes_its_row_nan_and_no_other(lost, count):
    broken = rows_of(7)
    broken[0, 1, 0, -2:] = np.nan, lost
    states = [broken, *(rows_of(seed) for seed in range(count - 1))]
    out, lse = over_the_wire([PartialState(each, OPS) for each in states]).finish(return_lse=True)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 1]).all()
    assert np.isfinite(np.delete(out, 1, axis=1)).all()
    assert np.isfinite(np.delete(lse, 1, axis=1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_do_not_overflow(dtype):
    state = rows_of(8, dtype)
    state[..., 0] = np.finfo(dtype).max
    assert np.isfinite(packed_to_wire(state)).all()


@pytest.mark.parametrize("into", range(5))
def test_the_result_may_overwrite_a_source(into):
    rows = on_wire(*range(5))
    right = merged(rows).tobytes()
    as_bytes = [each.reshape(-1).view(np.uint8) for each in rows]
    wire_rows.prepare_merge(as_bytes[into], as_bytes, form_of(rows[0]))()
    assert rows[into].tobytes() == right


def test_a_state_may_be_packed_where_it_is():
    state = rows_of(9)
    right = packed_to_wire(state).tobytes()
    OPS.prepare_pack(state.reshape(-1).view(np.uint8), form_of(state))(state)
    assert state.tobytes() == right


def test_the_parts_of_log2_e_are_short_and_their_sum_is_right():
    parts = [Fraction(part) for part in (wire_rows.LOG2E_HIGH, wire_rows.LOG2E_MIDDLE, wire_rows.LOG2E_LOW)]
    assert all(part.numerator.bit_length() <= 27 for part in parts[:2])
    with localcontext(Context(prec=60)):
        right = 1 / Decimal(2).ln()
    assert abs(sum(parts) - Fraction(right)) < Fraction(1, 2**105)
    assert math.isclose(float(sum(parts)), math.log2(math.e), rel_tol=2e-16)


# ---- o in 16 bit

NARROW = ["bfloat16", "float16"]
BITS = np.arange(2**16, dtype=np.uint16)
STORED = {"bfloat16": (np.uint16, narrow_dtype("bfloat16")), "float16": (np.int16, np.dtype(np.float16))}


@numba.njit(error_model="numpy")
def as_bfloat16(numbers, found):
    for i in range(numbers.size):
        found[i] = narrowed(numbers[i], np.uint16)


@numba.njit(error_model="numpy")
def as_float16(numbers, found):
    for i in range(numbers.size):
        found[i] = narrowed(numbers[i], np.int16)


@numba.njit(error_model="numpy")
def as_wide(stored, found):
    for i in range(stored.size):
        found[i] = widened(stored[i])


ROUND = {"bfloat16": as_bfloat16, "float16": as_float16}


def assert_same_numbers(got, right):
    """Any NaN is as good as another."""
    got, right = got.astype(np.float32), right.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
    np.testing.assert_array_equal(*(np.where(np.isnan(each), 0, each).view(np.uint32) for each in (got, right)))


@pytest.mark.parametrize("narrow", NARROW)
def test_numbers_of_16_bit_are_read_and_rounded_as_numpy_does(narrow):
    kind, dtype = STORED[narrow]
    every, found = BITS.view(dtype), np.empty(2**16, np.float32)
    as_wide(BITS.view(kind), found)
    assert_same_numbers(found, every)
    drawn = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        between = (found[1:] + found[:-1]) / 2  # ties, and their neighbours
        numbers = np.concatenate([found, between, np.nextafter(between, 0), np.nextafter(between, 9), drawn])
        rounded = np.empty(numbers.size, kind)
        ROUND[narrow](numbers.astype(np.float32), rounded)
        assert_same_numbers(rounded.view(dtype), numbers.astype(np.float32).astype(dtype))


def over_narrow_wire(states, narrow):
    """Merge states whose o travels in 16 bit: the rows on the wire, the merged ones first, and the state at the end."""
    form = form_of(states[0], narrow)
    wires = [np.empty(form.nbytes, np.uint8) for _ in range(len(states) + 1)]
    for state, wire in zip(states, wires[1:], strict=True):
        OPS.prepare_pack(wire, form)(state)
    wire_rows.prepare_merge(wires[0], wires[1:], form)()
    packed = np.empty_like(states[0])
    OPS.prepare_unpack(wires[0], form)(packed)
    return wires, packed


@law
@given(
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=5),
    narrow=st.sampled_from(NARROW),
    sizes=st.lists(st.sampled_from([0.0, 1e-38, 1e-20, 1.0, 1e5, 1e20, 1e35]), min_size=5, max_size=5),
    spread=st.sampled_from([1.0, 60.0, 245_000.0]),
)
@example(seeds=[422, 251], narrow="float16", sizes=[0.0, 1e20, 0.0, 0.0, 0.0], spread=60.0)  # out is 2**-120
def test_what_is_rounded_off_is_within_the_bound_whatever_the_values(seeds, narrow, sizes, spread):
    states = [rows_of(seed, spread=spread) for seed in seeds]
    for state, size in zip(states, sizes, strict=False):
        state[..., :-2] *= np.float32(size)
    wide = np.stack(states).astype(np.float64)
    weight = np.exp(wide[..., -1] - wide[..., -1].max(0))
    l = (weight * wide[..., -2]).sum(0)  # noqa: E741 - the field's name
    right = (weight[..., None] * wide[..., :-2]).sum(0) / l[..., None]
    out, lse = combine.finish(over_narrow_wire(states, narrow)[1], None)
    u, eps = ROUNDING[narrow], np.finfo(np.float32).eps
    each = (weight[..., None] * np.abs(wide[..., :-2])).sum(0) / l[..., None]
    allowed = (2 * u * (1 + u) + 8 * len(seeds) * eps) * each + 2**-36 * each.max(-1, keepdims=True)
    assert (np.abs(out - right) <= allowed + 2.0**-124).all()
    right = wide[..., -1].max(0) + np.log(l)
    np.testing.assert_allclose(lse, right, rtol=4 * eps, atol=4 * eps * len(seeds))


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize(("logit", "total"), [(0.0, 1.0), (np.inf, np.nan), (np.nan, np.nan)])
def test_a_merge_to_a_state_at_once_has_the_bits_of_a_merge_on_the_wire(narrow, logit, total):
    """Also of rows of which l is NaN, as it is where a logit is no number."""
    states = [rows_of(seed, rows=40) for seed in range(3)]
    states[1][0, 3, 0, -2:] = total, logit
    wires, packed = over_narrow_wire(states, narrow)
    form, at_once = form_of(states[0], narrow), np.empty_like(packed)
    space, sources = wire_rows.room(3, form), np.array([wire.ctypes.data for wire in wires[1:]])
    wire_rows.state_at(form)(at_once.ctypes.data, sources, form.rows, form.width, space.ctypes.data)
    assert_same_numbers(at_once, packed)


@pytest.mark.parametrize("narrow", NARROW)
def test_rows_without_keys_and_infinite_values_stay_what_they_are(narrow):
    empty, other = np.full((1, 8, 1, WIDTH), np.nan, np.float32), rows_of(3)
    empty[..., -2] = 0
    other[0, 2, 0, 1] = np.inf
    alone = over_narrow_wire([other], narrow)[1]
    for order in ([empty, other], [other, empty, empty]):
        np.testing.assert_array_equal(over_narrow_wire(order, narrow)[1], alone)
    out, _ = combine.finish(alone, None)
    assert np.isposinf(out[0, 2, 0, 1])
    assert np.isfinite(np.delete(out[0, 2, 0], 1)).all()
    out, lse = combine.finish(over_narrow_wire([empty, empty], narrow)[1], None)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("width", [1, 2, 3, 128])
def test_rows_of_any_width_are_whole_words(width):
    form = WireForm((1, 2, 1, width + 2), "float32", "float16")
    assert form.row_bytes == 8 + 4 * math.ceil(width / 2)
    state = np.ones((1, 2, 1, width + 2), np.float32)
    state[..., -1] = 0
    np.testing.assert_array_equal(combine.finish(over_narrow_wire([state, state], "float16")[1], None)[0], 1)


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_the_sign_of_a_nan_changes_no_number(narrow):
    """Processors and compilers choose it: negative where x86 makes a NaN, positive elsewhere."""

    def wire_of(sign):
        state = rows_of(0)
        state[..., -2] = np.copysign(np.float32(np.nan), sign)
        wire = np.empty(form_of(state, narrow).nbytes, np.uint8)
        OPS.prepare_pack(wire, form_of(state, narrow))(state)
        return wire.reshape(8, -1)

    behind = 2 * (WIDTH - 2)
    up, down = wire_of(1), wire_of(-1)
    assert np.array_equal(up[:, :behind], down[:, :behind])
    assert np.array_equal(up[:, behind + 4 :], down[:, behind + 4 :])
