"""Every message of a wrong argument, and every form in which a right one may come."""

from __future__ import annotations

import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn.arguments import inputs
from treeattn.arguments.inputs import resolve
from treeattn.arguments.positions import POSITION_LIMIT, Consecutive
from treeattn.arguments.spec import Options
from treeattn.errors import InputError

B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 3, 10, 8, 6
F32 = np.float32
NAN, INF = float("nan"), float("inf")
MASKED = np.ma.masked_array(np.zeros((B, HQ, TQ, D), F32))


def arrays(dtype=F32):
    rng = np.random.default_rng(0)
    shapes = {"q": (B, HQ, TQ, D), "k": (B, HKV, TK, D), "v": (B, HKV, TK, DV)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def refusal(function=treeattn.attention, **changes):
    with pytest.raises(InputError) as caught:
        function(**{**arrays(), **changes})
    return str(caught.value)


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


WRONG = [
    # what k and v must share with q
    ("q", zeros(HQ, TQ, D), "q: expected four axes (batch, heads, tokens, width), got shape (4, 3, 8)"),
    ("k", zeros(B, 3, TK, D), "k: expected a number of heads that divides q's 4, got 3"),
    ("k", zeros(B, 0, TK, D), "k: expected a number of heads that divides q's 4, got 0"),
    ("k", zeros(B, HKV, TK, D + 1), "k: expected q's width of 8, got 9"),
    ("k", zeros(1, HKV, TK, D), "k: expected q's batch of 2, got 1"),
    ("v", zeros(3, HKV, TK, DV), "v: expected q's batch of 2, got 3"),
    ("v", zeros(B, 1, TK, DV), "v: expected k's number of heads of 2, got 1"),
    ("v", zeros(B, HKV, TK - 1, DV), "v: expected k's number of tokens of 10, got 9"),
    ("v", zeros(B, HKV, TK, 0), "v: expected a width of at least 1, got 0"),
    ("q", zeros(B, 0, TQ, D), "q: expected at least one head, got 0"),
    # what is no array of numbers that we take
    ("q", zeros(B, HQ, TQ, D, dtype=int), "q: expected dtype float32, float64, float16, bfloat16, got int64"),
    ("q", zeros(B, HQ, TQ, D, dtype=complex), "q: expected dtype float32, float64, float16, bfloat16, got complex128"),
    ("q", zeros(B, HQ, TQ, D, dtype=object), "q: expected dtype float32, float64, float16, bfloat16, got object"),
    ("q", zeros(B, HQ, TQ, D, dtype=ml_dtypes.float8_e5m2), "q: expected dtype float32, .*, got float8_e5m2"),
    ("q", np.zeros((B, HQ, TQ, D), np.longdouble), r"q: expected dtype float32, .*, got (float128|float96|float64)"),
    ("k", zeros(B, HKV, TK, D, dtype=np.int32), "k: expected dtype float32, .*, int8, got int32"),
    ("k", zeros(B, HKV, TK, D, dtype=np.uint8), "k: expected dtype .*, got uint8; .*kv_dtype="),
    ("q", None, "q: expected an array, got None"),
    ("v", None, "v: expected an array, got None"),
    ("k", "keys", "k: expected dtype .*, got <U4"),
    ("q", [[1.0], [1.0, 2.0]], r"q: expected an array, got list \(.*\)"),
    ("q", MASKED, "q: expected an array, got a masked array; fill it, and pass mask= for what is hidden"),
    # scalars
    ("scale", NAN, "scale: expected a finite number, got nan"),
    ("scale", INF, "scale: expected a finite number, got inf"),
    ("scale", 10**400, "scale: expected a finite number, got inf"),
    ("scale", 1.1e36, "scale: expected -1e[+]36 to 1e[+]36, as logits are float32, got 1.1e[+]36"),
    ("scale", -1e300, "scale: expected -1e[+]36 to 1e[+]36, as logits are float32, got -1e[+]300"),
    ("scale", True, "scale: expected a finite number, got True"),
    ("scale", "big", "scale: expected a finite number, got 'big'"),
    ("scale", 1j, "scale: expected a finite number, got 1j"),
    ("softcap", 0, "softcap: expected a positive number or None, got 0"),
    ("softcap", -1.5, "softcap: expected a positive number or None, got -1.5"),
    ("softcap", 1e300, "softcap: expected 1e-36 to 1e[+]36, as logits are float32, got 1e[+]300"),
    ("softcap", 1e-300, "softcap: expected 1e-36 to 1e[+]36, as logits are float32, got 1e-300"),
    ("softcap", NAN, "softcap: expected a finite number, got nan"),
    ("causal", 1, "causal: expected True or False, got 1"),
    ("causal", None, "causal: expected True or False, got None"),
    ("layout", "thbd", "layout: expected 'bhtd' or 'bthd', got 'thbd'"),
    ("layout", None, "layout: expected 'bhtd' or 'bthd', got None"),
    ("layout", np.array(["bhtd", "bthd"]), "layout: expected 'bhtd' or 'bthd', got array(.*)"),
    # windows
    ("window", 5, r"window: expected a pair \(left, right\), got 5"),
    ("window", (1, 2, 3), r"window: expected a pair \(left, right\), got \(1, 2, 3\)"),
    ("window", "ab", r"window: expected a pair \(left, right\), got 'ab'"),
    ("window", (1.5, 0), r"window: expected \(left, right\), each an integer or None, got \(1.5, 0\)"),
    ("window", (True, 0), r"window: expected \(left, right\), each an integer or None, got \(True, 0\)"),
    ("window", (-1, -1), r"window: expected \(left, right\), none negative, got \(-1, -1\); write None for a side .*"),
    # positions, checked even where nothing asks for them
    ("q_pos", np.arange(TK), r"q_pos: expected shape \(3,\) or \(2, 3\), got shape \(10,\)"),
    ("q_pos", 3, r"q_pos: expected shape \(3,\) or \(2, 3\), got shape \(\)"),
    ("q_pos", [0.0, 1.0, 2.0], "q_pos: expected integer positions, got dtype float64"),
    ("q_pos", [[0, 1, 2], [3]], r"q_pos: expected an array, got list \(.*\)"),
    ("q_pos", [0, 1, 2**61 + 1], "q_pos: expected positions from .*, got 2305843009213693953"),
    ("q_pos", [0, 1, 2**70], "q_pos: expected integer positions, got dtype object"),
    ("kv_pos", np.arange(TK + 1), r"kv_pos: expected shape \(10,\) or \(2, 10\), got shape \(11,\)"),
    ("kv_pos", np.zeros((1, TK), int), r"kv_pos: expected shape \(10,\) or \(2, 10\), got shape \(1, 10\)"),
    ("kv_pos", -(2**61) - 1, r"kv_pos: expected positions from -2\*\*61 to 2\*\*61, got -2305843009213693953"),
    ("kv_pos", np.full(TK, 2**63 + 1, np.uint64), "kv_pos: expected positions from .*, got 9223372036854775809"),
    ("kv_pos", True, "kv_pos: expected integer positions, got dtype bool"),
    ("kv_pos", 0.5, "kv_pos: expected integer positions, got dtype float64"),
    ("kv_pos", "start", "kv_pos: expected integer positions, got dtype <U5"),
    # row lengths
    ("kv_len", [TK, TK + 1], "kv_len: expected lengths from 0 to 10, this call's keys, got 11"),
    ("kv_len", [-1, 5], "kv_len: expected lengths from 0 to 10, this call's keys, got -1"),
    ("kv_len", [1, 2, 3], r"kv_len: expected shape \(2,\), one length per row, got shape \(3,\)"),
    ("kv_len", [[1, 2]], r"kv_len: expected shape \(2,\), one length per row, got shape \(1, 2\)"),
    ("kv_len", [1.0, 2.0], "kv_len: expected integers, the keys of each row, got dtype float64"),
    ("kv_len", [True, True], "kv_len: expected integers, the keys of each row, got dtype bool"),
    # masks
    ("mask", zeros(TQ, TK + 1, dtype=bool), r"mask: expected a shape that broadcasts to .*, got \(3, 11\)"),
    ("mask", zeros(1, B, HQ, TQ, TK), r"mask: expected a shape that broadcasts to .*, got \(1, 2, 4, 3, 10\)"),
    ("mask", zeros(TQ, TK, dtype=int), "mask: expected dtype bool, float32, .*, got int64"),
    ("mask", zeros(TQ, TK, dtype=complex), "mask: expected dtype bool, float32, .*, got complex128"),
    ("mask", [[True], [True, False]], r"mask: expected an array, got list \(.*\)"),
    ("mask", np.ma.masked_array(zeros(TQ, TK)), "mask: expected an array, got a masked array.*"),
    # scales of stored blocks
    ("k_scale", zeros(B, HQ, 1, 1), r"k_scale: expected a shape that .* = \(2, 2, blocks, 1\), got \(2, 4, 1, 1\)"),
    ("k_scale", zeros(B, HKV, 1, D), r"k_scale: expected a shape that broadcasts to .*, got \(2, 2, 1, 8\)"),
    ("k_scale", zeros(1, B, HKV, 1, 1), r"k_scale: expected a shape that broadcasts to .*, got \(1, 2, 2, 1, 1\)"),
    ("v_scale", zeros(TK + 1, 1), r"v_scale: expected a number of equal token blocks .* 10 tokens, got 11 blocks"),
    ("v_scale", zeros(6, 1), r"v_scale: expected a number of equal token blocks .* 10 tokens, got 6 blocks"),
    ("v_scale", zeros(0, 1), r"v_scale: expected a number of equal token blocks .* 10 tokens, got 0 blocks"),
    ("v_scale", 2, "v_scale: expected dtype float32, .*, got int64"),
    # raw storage
    ("kv_dtype", "float8", "kv_dtype: expected float32, .*, int8, got 'float8'"),
    ("kv_dtype", 3, "kv_dtype: expected float32, .*, int8, got 3"),
    ("kv_dtype", "bfloat16", "k: expected bfloat16 or uint16, as kv_dtype says, got float32"),
    # the rest
    ("sink", zeros(HQ + 1), r"sink: expected shape \(4,\), one logit per query head, got shape \(5,\)"),
    ("sink", 0.0, r"sink: expected shape \(4,\), one logit per query head, got shape \(\)"),
    ("sink", zeros(HQ, dtype=complex), "sink: expected dtype float32, .*, got complex128"),
    ("sink", ["a"] * HQ, "sink: expected dtype float32, .*, got <U1"),
    ("backend", "tpu", "backend: expected one of 'cpu', 'reference'.*, got 'tpu'"),
    ("backend", ["cpu"], "backend: expected a name or a Backend object, got list"),
    ("out", zeros(B, HQ, TQ, D), r"out: expected shape \(2, 4, 3, 6\), the output's, got shape \(2, 4, 3, 8\)"),
    ("out", zeros(B, HQ, TQ, DV, dtype=np.float64), "out: expected q's dtype float32, got float64"),
    ("out", [0.0], "out: expected a NumPy array or a torch tensor, in host memory, got list"),
    ("out", np.broadcast_to(F32(0), (B, HQ, TQ, DV)), "out: expected an array to write to, got a read-only one"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{w[0]}-{i}" for i, w in enumerate(WRONG)])
def test_a_wrong_argument_is_named_with_what_was_expected_and_what_came(name, value, message):
    found = refusal(**{name: value})
    assert found == message or re.fullmatch(message, found), found


def test_the_axes_that_an_error_names_are_those_of_the_layout():
    assert refusal(q=zeros(TQ, HQ, D), layout="bthd").startswith("q: expected four axes (batch, tokens, heads, width)")


def test_out_has_the_shape_of_the_layout():
    swapped = {name: np.swapaxes(array, 1, 2) for name, array in arrays().items()}
    message = refusal(**swapped, layout="bthd", out=zeros(B, HQ, TQ, DV))
    assert message == "out: expected shape (2, 3, 4, 6), the output's, got shape (2, 4, 3, 6)"


def test_partial_attention_takes_no_other_out_than_a_fitting_state():
    assert refusal(treeattn.partial_attention, out=zeros(1)) == "out: expected a PartialState, got ndarray"
    other = treeattn.PartialState.identity((B, HQ, TQ, DV + 1))
    message = refusal(treeattn.partial_attention, out=other)
    assert message.startswith("out: expected a float32 state of shape (2, 4, 3, 6) on 'cpu', got PartialState(")


def test_zeta_broadcasts_or_is_refused():
    assert refusal(treeattn.energy, zeta=zeros(DV + 1)).startswith("zeta: expected a shape that broadcasts to")
    assert refusal(treeattn.energy, zeta=zeros(DV, dtype=int)).startswith("zeta: expected dtype float32")


def test_errors_are_value_errors():
    with pytest.raises(ValueError, match=r"^k: expected"):
        treeattn.attention(**{**arrays(), "k": zeros(B, 3, TK, D)})


def resolved(**changes):
    given = {**arrays(), **changes}
    q, k, v = (given.pop(name) for name in "qkv")
    return resolve(q, k, v, Options(**given))


def test_the_spec_is_hashable_and_equal_for_equal_calls():
    first, second = resolved(causal=True)[0], resolved(causal=np.True_)[0]
    assert first == second
    assert hash(first) == hash(second)
    assert first != resolved()[0]


def test_the_spec_does_not_depend_on_the_number_of_keys():
    given = arrays()
    store_k, store_v = given["k"], given["v"]
    specs = {resolved(k=store_k[:, :, :n], v=store_v[:, :, :n])[0] for n in range(1, TK)}
    assert len(specs) == 1


NEARLY = [
    {"causal": 0},
    {"scale": True},
    {"softcap": True},
    {"v": zeros(B, HKV, TK - 1, DV)},
    {"q": zeros(B, HQ, TQ, D, dtype=int)},
    {"k": zeros(B, HKV, TK, D + 1)},
]


@pytest.mark.parametrize("changes", NEARLY, ids=lambda changes: next(iter(changes)))
def test_a_call_that_is_nearly_one_that_was_seen_is_checked_all_the_same(changes):
    seen = {"scale": 1.0, "softcap": 1.0}
    resolved(**seen)
    with pytest.raises(InputError, match=f"^{next(iter(changes))}: expected"):
        resolved(**{**seen, **changes})


def test_calls_that_were_seen_differ_by_all_that_their_specs_say():
    given, wide = arrays(), zeros(B, HQ, TQ, 2 * D)[..., ::2]
    changes = [
        {},
        {"scale": 0.5},
        {"softcap": 2.0},
        {"q": given["q"].astype("f8")},
        {"k": given["k"][..., ::-1]},
        {"v": given["v"].astype("f2")},
        {"causal": True},
        {"causal": True, "window": (1, 2)},
        {"window": (1, 2)},
        {"window": (None, 2)},
        {"kv_len": np.array([3, 4])},
        {"mask": zeros(TQ, TK, dtype=bool)},
        {"mask": zeros(TQ, TK)},
        {"k_scale": zeros(1, 1)},
        {"v_scale": zeros(1, 1)},
        {"k": zeros(B, HKV, TK, D, dtype=np.uint8), "v": given["v"].astype(np.int8), "kv_dtype": "int8"},
        {"k": given["k"].astype(np.int8), "v": zeros(B, HKV, TK, DV, dtype=np.uint8), "kv_dtype": "int8", "softcap": 1},
        {"layout": "bthd", **{name: array.swapaxes(1, 2) for name, array in given.items()}},
    ]
    first, again = ([resolved(**each)[0] for each in changes] for _ in "12")
    assert first == again
    assert len(set(first)) == len(changes)
    assert resolved(q=wide)[0] == first[0]  # q's strides are the arrays', not the spec's


def test_a_call_that_was_seen_runs_on_its_own_arrays():
    resolved()
    given = arrays()
    _, args = resolved(**given)
    assert all(args[i] is given["qkv"[i]] for i in range(3))
    assert args[3:] == (None,) * 6 + (1, 1)


RIGHT = {
    **{"scale": 1, "softcap": 2.0, "causal": True, "window": (3, 1), "layout": "bhtd"},
    **{"mask": zeros(TQ, TK, dtype=bool), "q_pos": np.arange(TQ), "kv_pos": np.arange(TK), "kv_len": [TK, 3]},
    **{"k_scale": zeros(2, 1), "v_scale": zeros(B, HKV, TK, 1)},
}
OF_OPTIONS = [each for each in WRONG if each[0] in ("q", "k", "v", *RIGHT)]


@pytest.mark.parametrize(("name", "value", "message"), OF_OPTIONS, ids=[w[0] for w in OF_OPTIONS])
def test_a_wrong_argument_is_refused_where_a_right_one_was_seen(name, value, message):
    resolved(**RIGHT)
    found = refusal(resolved, **{**RIGHT, name: value})
    assert found == message or re.fullmatch(message, found), found


@pytest.mark.parametrize("left_out", ["", *RIGHT])
def test_a_call_that_was_seen_has_the_arrays_of_its_own_options(left_out):
    options = {name: value for name, value in RIGHT.items() if name != left_out}
    spec, _ = resolved(**options)
    given, tokens = arrays(), TK - 4
    shorter = {"k": given["k"][:, :, :tokens], "v": given["v"][:, :, :tokens]}
    changed = {"mask": zeros(tokens), "q_pos": np.full((B, TQ), 7), "kv_pos": -2, "kv_len": np.array([1, 0])}
    options |= {name: value for name, value in changed.items() if name != left_out}
    options |= {} if left_out == "v_scale" else {"v_scale": zeros(HKV, tokens, 1)}
    if left_out != "mask":
        options["mask"] = options["mask"].astype(bool)
    again, found = resolved(**options, **shorter)
    inputs._known.clear()
    fresh, right = resolved(**options, **shorter)
    assert spec == again == fresh
    assert all(np.array_equal(one, other) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("kv_len", [None, [0, TK - 4]], ids=["whole", "ragged"])
@pytest.mark.parametrize("tokens", [1, TK - 4, TK])
def test_a_call_that_was_seen_has_positions_of_its_own_keys(tokens, kv_len):
    given, ends = arrays(), [tokens, tokens] if kv_len is None else [min(tokens, n) for n in kv_len]
    lengths = None if kv_len is None else np.array(ends)
    for kept in (TK, tokens):
        given = {**given, "k": given["k"][:, :, :kept], "v": given["v"][:, :, :kept]}
        _, args = resolved(**given, causal=True, kv_len=lengths)
    assert args.kv_positions.tolist() == [[*range(tokens)]] * B
    assert args.q_pos.tolist() == [[*range(max(n, 1) - TQ, max(n, 1))] for n in ends]


@pytest.mark.parametrize("scale", [0.5, F32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_scale_is_any_real_number(scale):
    assert resolved(scale=scale)[0].scale == 0.5


def test_windows_wider_than_any_distance_are_cut_to_it():
    spec, _ = resolved(window=[2**80, None])
    assert spec.window == (2 * POSITION_LIMIT, None)


def test_extreme_positions_and_windows_do_not_overflow():
    given = arrays()
    ends = np.where(np.arange(TK) % 2, POSITION_LIMIT, -POSITION_LIMIT)
    q_pos = np.array([-POSITION_LIMIT, 0, POSITION_LIMIT])
    out = treeattn.attention(**given, q_pos=q_pos, kv_pos=ends, window=(2**80, 2**80))
    assert np.array_equal(out, treeattn.attention(**given, mask=np.ones((TQ, TK), bool), window=None))
    causal = treeattn.attention(**given, q_pos=q_pos, kv_pos=ends, causal=True, return_lse=True)[1]
    first = treeattn.attention(**given, mask=ends == -POSITION_LIMIT, return_lse=True)[1]
    assert np.allclose(causal[:, :, :2], first[:, :, :2], rtol=1e-6)


def test_nested_lists_are_arrays_of_float64():
    given = {name: array.tolist() for name, array in arrays(np.float64).items()}
    out = treeattn.attention(**given)
    assert out.dtype == np.float64
    assert np.array_equal(out, treeattn.attention(**arrays(np.float64)))


def test_byte_swapped_arrays_are_read_as_what_they_are():
    given = arrays()
    swapped = {name: array.astype(array.dtype.newbyteorder()) for name, array in given.items()}
    assert np.array_equal(treeattn.attention(**swapped), treeattn.attention(**given))


def test_byte_swapped_raw_storage_is_read_as_what_it_is():
    given = arrays(ml_dtypes.bfloat16)
    raw = given["k"].view(np.uint16)
    _, args = resolved(**{**given, "k": raw.astype(raw.dtype.newbyteorder())}, kv_dtype="bfloat16")
    assert np.array_equal(args.k, given["k"])


@pytest.mark.parametrize("kv_pos", [None, -40])
def test_consecutive_positions_take_no_memory(kv_pos):
    k = np.broadcast_to(np.float32(1), (1, 1, 2**40, 8))
    _, args = resolved(q=np.ones((1, 1, 1, 8), np.float32), k=k, v=k, window=(5, 0), kv_pos=kv_pos)
    assert args.kv_pos == Consecutive(kv_pos or 0)
    assert args.q_pos.tolist() == [[2**40 - 1 + (kv_pos or 0)]]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_kv_dtype_is_a_name_a_type_or_a_dtype(kv_dtype):
    given = arrays(ml_dtypes.bfloat16)
    _, args = resolved(q=given["q"], k=given["k"].view(np.uint16), v=given["v"], kv_dtype=kv_dtype)
    assert args.k.dtype == ml_dtypes.bfloat16
    assert np.array_equal(args.k, given["k"])


@pytest.mark.parametrize(("axis", "name"), [(2, "Tk"), (2, "Tq"), (0, "B")])
def test_zero_size_axes_give_zero_size_or_zero_output(axis, name):
    given = arrays()
    for which in {"Tk": "kv", "Tq": "q", "B": "qkv"}[name]:
        given[which] = np.take(given[which], [], axis=axis)
    out, lse = treeattn.attention(**given, causal=True, return_lse=True)
    assert out.shape == (given["q"].shape[0], HQ, given["q"].shape[2], DV)
    assert lse.shape == out.shape[:3]
    assert not out.any()
    assert np.all(lse == -np.inf)


@pytest.mark.parametrize("blocks", [0, 1])
def test_an_empty_shard_has_scales_of_no_block_or_of_one(blocks):
    given = arrays()
    given["k"], given["v"] = given["k"][:, :, :0], given["v"][:, :, :0]
    state = treeattn.partial_attention(**given, k_scale=np.ones((B, HKV, blocks, 1)))
    assert not state.l.any()


def test_a_scalar_or_empty_option_is_taken_where_it_can_mean_one_thing():
    assert resolved(kv_len=4)[1].kv_len.tolist() == [4, 4]
    assert resolved(kv_pos=np.int16(-3), causal=True)[1].kv_positions[0].tolist() == list(range(-3, TK - 3))
    assert resolved(q_pos=np.array([1, 2, 3], np.uint8), causal=True)[1].q_pos.dtype == np.int64


class OnlyDlpack:
    """A foreign array with DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnlyBuffer:
    """A foreign array that NumPy reads through its interface."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


@pytest.mark.parametrize("kind", [OnlyDlpack, OnlyBuffer, memoryview])
def test_foreign_arrays_come_in_without_a_copy(kind):
    given = arrays()
    _, args = resolved(**{name: kind(array) for name, array in given.items()})
    assert np.shares_memory(args.k, given["k"])
    assert np.array_equal(args.v, given["v"])


def test_a_memory_map_is_an_array(tmp_path):
    given = arrays()
    given["k"].tofile(tmp_path / "k")
    mapped = np.memmap(tmp_path / "k", F32, mode="r", shape=given["k"].shape)
    assert np.array_equal(treeattn.attention(**{**given, "k": mapped}), treeattn.attention(**given))
