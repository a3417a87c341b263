"""What the kernels must do beyond being accurate: hide, survive any layout and length, and give the same bits again."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.kernels import reference
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.targets import Target, target_of
from treeattn.testing.oracle import assert_close, dense

VECTOR, MMA, MFMA, WMMA = map(target_of, ("sm_75", "sm_90", "gfx942", "gfx1201"))
TARGETS = [VECTOR, MMA, MFMA, WMMA]
HEADS, WIDTH, KEYS = 4, 32, 70
INF, NAN = np.inf, np.nan

every_target = pytest.mark.parametrize("target", TARGETS, ids=["vector", "mma", "mfma", "wmma"])


def inputs(keys: int = KEYS, *, tokens: int = 1, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = (1, HEADS, tokens, WIDTH), (1, 1, keys, WIDTH), (1, 1, keys, WIDTH)
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in shapes)  # type: ignore[return-value]


def state(emulator: Any, target: Target, q: Any, k: Any, v: Any, splits: int = 2, **options: Any) -> Any:
    seed = options.pop("seed", 0)
    spec, args = resolve(q, k, v, Options(**options))
    return emulator.partial(spec, args, target, splits=splits, seed=seed)


def assert_right(packed: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    out, lse = reference.finish(packed, None)
    right = dense(q, k, v, **options)
    assert_close(out, right.out, 2e-5, "out")
    assert_close(lse, right.lse, 2e-5, "lse")


@every_target
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_hidden_keys_hold_never_appears(emulator: Any, target: Target, poison: float) -> None:
    q, k, v = inputs(tokens=2)
    hidden = np.zeros(KEYS, bool)
    hidden[[0, 17, 33, 64]] = True
    k[:, :, hidden] = v[:, :, hidden] = poison
    added = np.where(hidden, np.float32(-INF), np.float32(0))
    for options in ({"mask": ~hidden}, {"mask": added}):
        assert_right(state(emulator, target, q, k, v, **options), q, k, v, **options)


@every_target
def test_a_poisoned_value_reaches_only_the_rows_that_see_it(emulator: Any, target: Target) -> None:
    q, k, v = inputs()
    v[0, 0, 20, 3], v[0, 0, 41, 8], v[0, 0, 42, 9] = NAN, INF, -INF
    mask = np.ones((1, HEADS, 1, KEYS), bool)
    mask[0, 1:, 0, [20, 41]] = False
    assert_right(state(emulator, target, q, k, v, mask=mask), q, k, v, mask=mask)


@every_target
def test_keys_behind_kv_len_are_never_read(emulator: Any, target: Target) -> None:
    q, k, v = inputs()
    k[:, :, 50:] = v[:, :, 50:] = NAN
    assert_right(state(emulator, target, q, k, v, kv_len=50), q, k, v, kv_len=50)


@every_target
def test_a_logit_of_minus_infinity_weighs_nothing_and_plus_infinity_gives_nan(emulator: Any, target: Target) -> None:
    q, k, v = inputs()
    q[..., 0] = 1
    k[0, 0, 5, 0], v[0, 0, 5, 1] = -INF, NAN
    assert_right(state(emulator, target, q, k, v), q, k, v)
    k[0, 0, 6, 0] = INF
    assert np.isnan(reference.finish(state(emulator, target, q, k, v), None)[0]).all()


@every_target
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("keys", [0, 1, 15, 16, 17, 64, 129])
def test_any_number_of_keys_and_splits(emulator: Any, target: Target, keys: int, splits: int) -> None:
    q, k, v = inputs(keys)
    assert_right(state(emulator, target, q, k, v, splits), q, k, v)


@every_target
def test_the_order_of_blocks_changes_no_bit(emulator: Any, target: Target) -> None:
    q, k, v = inputs(200)
    first = state(emulator, target, q, k, v, 4, seed=None)
    for seed in range(4):
        np.testing.assert_array_equal(state(emulator, target, q, k, v, 4, seed=seed), first)


@every_target
def test_large_logits_keep_their_differences(emulator: Any, target: Target) -> None:
    """exp2 of logits times log2(e) would give 0.73035 here: the product has no bits left for the difference."""
    q = np.zeros((1, HEADS, 1, WIDTH), ml_dtypes.bfloat16)
    q[..., :2] = 1
    k = np.zeros((1, 1, 2, WIDTH), ml_dtypes.bfloat16)
    k[0, 0, :, 0] = -59904
    k[0, 0, :, 1] = -96, -97
    v = np.zeros((1, 1, 2, WIDTH), ml_dtypes.bfloat16)
    v[0, 0, 0] = 1
    out, _ = reference.finish(state(emulator, target, q, k, v, scale=1.0), None)
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-1)), rtol=2e-5)


def test_float16_probabilities_far_below_the_largest_still_count(emulator: Any) -> None:
    """One key 11 above 4000 equal ones: unscaled, their probabilities would be a few units of float16's smallest."""
    q = np.zeros((1, HEADS, 1, WIDTH), np.float16)
    q[..., 0] = 1
    k = np.zeros((1, 1, 4001, WIDTH), np.float16)
    k[0, 0, 7, 0] = 11
    v = np.ones((1, 1, 4001, WIDTH), np.float16)
    v[0, 0, 7] = 0
    out, _ = reference.finish(state(emulator, MMA, q, k, v, scale=1.0), None)
    np.testing.assert_allclose(out, 4000 / (4000 + np.exp(11)), rtol=2e-5)


def layouts(array: Any) -> dict[str, Any]:
    wide = np.zeros((*array.shape[:3], 2 * array.shape[3] + 1), array.dtype)
    wide[..., 1::2] = array
    backwards = np.ascontiguousarray(array[:, :, ::-1])[:, :, ::-1]
    token_major = np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
    return {
        "gaps between elements": wide[..., 1::2],
        "backwards": backwards,
        "token-major": token_major,
        "Fortran order": np.asfortranarray(array),
        "one element off alignment": np.concatenate([array[..., :1], array], -1)[..., 1:],
    }


@pytest.mark.parametrize("layout", list(layouts(inputs()[1])))
def test_any_strides(emulator: Any, layout: str) -> None:
    q, k, v = inputs()
    q, k, v = (layouts(array)[layout] for array in (q, k, v))
    assert_right(state(emulator, MMA, q, k, v), q, k, v)


def test_counters_are_ready_for_the_next_launch(emulator: Any) -> None:
    q, k, v = inputs()
    first = state(emulator, VECTOR, q, k, v, 3)
    np.testing.assert_array_equal(state(emulator, VECTOR, q, k, v, 3), first)


def test_the_portable_switch_of_stacks_gives_the_same_bits(emulator: Any) -> None:
    q, k, v = inputs()
    portable = type(emulator)(emulator.folder, portable=True)
    np.testing.assert_array_equal(state(portable, VECTOR, q, k, v), state(emulator, VECTOR, q, k, v))


@pytest.mark.parametrize("barrier", [0, 1, 3, 4, 5])
def test_every_barrier_is_needed_and_the_emulator_shows_it(
    emulator: Any, barrier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop one barrier from the text: some order of lanes must give another answer, or none.

    Barrier 2 orders memory between blocks, which an emulation that runs one after the other can't show.
    """
    text = source.text("vector.cu")
    at = [found.start() for found in re.finditer(r"__syncthreads\(\);", text)]
    assert len(at) == 6
    arrays = inputs(800)
    right = state(emulator, VECTOR, *arrays, 3)
    broken = text[: at[barrier]] + text[at[barrier] + len("__syncthreads();") :]
    monkeypatch.setattr(source, "text", lambda _: broken)
    assert not all(same_answer(emulator, arrays, seed, right) for seed in range(6))


def test_waves_that_share_a_row_must_wait_for_each_other(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    shapes = (1, 4, 1, 256), (1, 1, 100, 256), (1, 1, 100, 256)
    arrays = [rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in shapes]
    text = source.text("matrix.cu")
    at = text.index("__syncthreads();", text.index("ta_add_portions("))
    right = state(emulator, MMA, *arrays, 3)
    broken = text[:at] + text[at + len("__syncthreads();") :]
    monkeypatch.setattr(source, "text", lambda _: broken)
    assert not all(same_answer(emulator, arrays, seed, right, MMA) for seed in range(6))


def same_answer(emulator: Any, arrays: Any, seed: int, right: Any, target: Target = VECTOR) -> bool:
    try:
        return np.array_equal(state(emulator, target, *arrays, 3, seed=seed), right)
    except (RuntimeError, AssertionError):  # divergence, or counters that were left behind
        return False


DIVERGENT = {
    "a lane misses its wave's shuffle": "if (threadIdx.x != 3) *out = TA_SHUFFLE(1.f, 0, 32);",
    "lanes meet at different operations": "*out = threadIdx.x % 2 ? TA_SHUFFLE(1.f, 0, 32) : (float)TA_ALL(true);",
    "a thread ends before the block's barrier": "if (threadIdx.x < 64) __syncthreads();",
}


@pytest.mark.parametrize("what", DIVERGENT)
def test_divergence_is_reported(emulator: Any, what: str) -> None:
    text = (
        f"struct probe {{ float* out; }};\nvoid kernel(const probe call) {{ float* out = call.out; {DIVERGENT[what]} }}"
    )
    library = emulator.compile(text, "kernel", "probe", {"TA_THREADS": "128"})
    out = np.zeros(1, np.float32)
    call = np.array([out.ctypes.data])
    with pytest.raises(RuntimeError, match=what):
        emulator.launch(library, call, np.arange(1), 32)
