"""The kernels' very text, executed on the CPU against the float64 oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.kernels import reference
from treeattn.kernels.gpu.call import is_wide
from treeattn.kernels.gpu.table import Specialisation, choose
from treeattn.kernels.gpu.targets import target_of
from treeattn.testing.oracle import Answer, assert_close, dense, tolerance

WAVE_32 = target_of("sm_75")  # the vector kernel for every call
WAVE_64 = target_of("gfx908")
MMA, MFMA, WMMA_12, WMMA_11 = map(target_of, ("sm_90", "gfx942", "gfx1201", "gfx1100"))
TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
KEYS = 150
# Rounding q and p to two 16-bit numbers each leaves 2**-17 of bfloat16 products, and 2**-22 of float16 ones.
MATRIX_ERROR = {"bfloat16": 1e-5, "float16": 1e-6}


def array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape, dtype=np.float32).astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


def call(seed: int, *, types: tuple[str, str, str], heads: tuple[int, int], tokens: int = 1, widths: tuple[int, int],
         keys: int = KEYS, batch: int = 2, **options: Any) -> tuple[Any, Any, Any, dict[str, Any]]:  # fmt: skip
    rng = np.random.default_rng(seed)
    q = array(rng, (batch, heads[0], tokens, widths[0]), types[0])
    k = array(rng, (batch, heads[1], keys, widths[0]), types[1])
    v = array(rng, (batch, heads[1], keys, widths[1]), types[2])
    made = {name: make(rng, batch, heads, tokens, keys) if callable(make) else make for name, make in options.items()}
    if types[1] == "int8":
        made["k_scale"] = rng.uniform(0.005, 0.02, (batch, heads[1], 10, 1)).astype(np.float32)
    if types[2] == "int8":
        made["v_scale"] = rng.uniform(-0.02, 0.02, (batch, heads[1], 15, 1)).astype(np.float32)
    return q, k, v, made


def bool_mask(rng: Any, batch: int, heads: Any, tokens: int, keys: int) -> Any:
    return rng.random((batch, 1, tokens, keys)) < 0.7


def float_mask(rng: Any, batch: int, heads: Any, tokens: int, keys: int) -> Any:
    mask = rng.standard_normal((heads[0], tokens, keys), dtype=np.float32)
    mask[rng.random(mask.shape) < 0.2] = -np.inf
    return mask


def shuffled_positions(rng: Any, batch: int, heads: Any, tokens: int, keys: int) -> Any:
    return rng.permutation(keys) - 20


def lengths(rng: Any, batch: int, heads: Any, tokens: int, keys: int) -> Any:
    return np.array([keys - 13, *[0] * (batch - 1)])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bool mask": {"mask": bool_mask},
    "float mask": {"mask": float_mask},
    "causal": {"causal": True},
    "window": {"window": (40, 3), "kv_pos": shuffled_positions, "q_pos": np.array([5, 60, 100])},
    "left window": {"window": (40, None), "causal": True, "kv_pos": -200},
    "softcap": {"softcap": 2.0},
    "kv_len": {"kv_len": lengths},
    "scale": {"scale": -0.3},
    "everything": {
        "mask": float_mask, "causal": True, "window": (90, None), "softcap": 3.0, "kv_len": lengths, "scale": 0.2,
    },
}  # fmt: skip

VECTOR = {
    "types": [((q, k, v), (3, 1), (32, 32), "plain") for q, k, v in [
        *[("float32", each, each) for each in TYPES],
        ("bfloat16", "bfloat16", "int8"), ("float16", "float8_e4m3fn", "float16"), ("bfloat16", "float32", "bfloat16"),
    ]],
    "widths": [(("float32", "bfloat16", "bfloat16"), (2, 2), widths, "plain")
               for widths in [(1, 1), (7, 5), (24, 40), (80, 16), (128, 256), (576, 512)]],
    "groups": [(("float32", "float32", "float32"), heads, (16, 16), "plain")
               for heads in [(1, 1), (2, 1), (8, 1), (15, 3), (11, 1)]],
    "options": [(("float32", "float32", "float32"), (4, 2), (16, 24), name) for name in OPTIONS],
    "options, scaled": [(("bfloat16", "int8", "int8"), (4, 2), (16, 16), name) for name in ("plain", "everything")],
}  # fmt: skip
VECTOR_CASES = [case for cases in VECTOR.values() for case in cases]
MATRIX_CASES = [
    *[((dtype, dtype, dtype), (8, 2), (32, 64), name) for dtype in ("bfloat16", "float16") for name in OPTIONS],
    *[(("float32", "bfloat16", "bfloat16"), heads, widths, "plain")
      for heads, widths in [((8, 1), (128, 128)), ((6, 1), (72, 40)), ((11, 1), (64, 128))]],
]  # fmt: skip
MATRIX = [(MMA, case) for case in MATRIX_CASES] + [
    # What differs between cards is the layout of fragments; options are decided in text that all of them share.
    (target, case)
    for target in (MFMA, WMMA_12, WMMA_11)
    for case in [
        (("bfloat16", "bfloat16", "bfloat16"), (8, 2), (32, 64), "everything"),
        (("float16", "float16", "float16"), (8, 2), (32, 64), "kv_len"),
        (("float32", "bfloat16", "bfloat16"), (11, 1), (56, 24), "plain"),
        (("float32", "bfloat16", "bfloat16"), (6, 1), (128, 128), "plain"),
    ]
]
# Rows cut over the waves of a block: evenly, unevenly, over all of them, and with waves that have nothing of V.
MATRIX += [
    (target, (("float32", "bfloat16", "bfloat16"), (6, 1), widths, name))
    for target, widths, name in [
        (MMA, (192, 192), "plain"), (MMA, (576, 512), "plain"), (MMA, (256, 136), "everything"),
        (MFMA, (256, 256), "plain"), (MFMA, (576, 512), "kv_len"), (WMMA_12, (256, 192), "plain"),
        (WMMA_11, (256, 256), "float mask"),
    ]
]  # fmt: skip


def made(case: Any, seed: int = 0) -> tuple[Any, Any, Any, dict[str, Any]]:
    types, heads, widths, name = case
    return call(seed, types=types, heads=heads, tokens=3, widths=widths, **OPTIONS[name])


@cache
def expected(case: Any) -> tuple[Answer, Answer]:
    """Right answer and limits; states are float32 whatever q is, and held to float32's error."""
    q, k, v, options = made(case)
    q = q.astype(np.float32)
    return dense(q, k, v, **options), tolerance(q, k, v, **options)


def chosen(case: Any, target: Any) -> Specialisation:
    q, k, v, options = made(case)
    spec, args = resolve(q, k, v, Options(**options))
    return choose(spec, target, k_wide=is_wide(args.k), v_wide=is_wide(args.v))


@pytest.fixture(scope="module", autouse=True)
def _compiled(emulator: Any) -> None:
    """Compile everything at once: one after the other takes as many times longer as there are cores."""
    wanted = {chosen(case, target) for case in VECTOR_CASES for target in (WAVE_32, WAVE_64)}
    wanted |= {chosen(case, target) for target, case in MATRIX}
    emulator.build_all(wanted)


def check(emulator: Any, target: Any, case: Any, splits: int, error: float = 0) -> None:
    q, k, v, options = made(case)
    spec, args = resolve(q, k, v, Options(**options))
    out, lse = reference.finish(emulator.partial(spec, args, target, splits=splits), None)
    right, limit = expected(case)
    assert_close(out, right.out, max(limit.out, error * largest(right.out)), "out")
    assert_close(lse, right.lse, max(limit.lse, error * largest(right.lse)), "lse")


def largest(values: Any) -> float:
    return float(np.max(np.abs(values[np.isfinite(values)]), initial=0))


@pytest.mark.parametrize("target", [WAVE_32, WAVE_64], ids=["wave 32", "wave 64"])
@pytest.mark.parametrize("case", VECTOR_CASES, ids=str)
def test_vector_kernel_is_as_good_as_plain_numpy(emulator: Any, case: Any, target: Any) -> None:
    assert chosen(case, target).kernel == "vector"
    check(emulator, target, case, splits=3)


@pytest.mark.parametrize(("target", "case"), MATRIX, ids=lambda part: getattr(part, "matrix", str(part)))
def test_tensor_core_kernel_is_near_float32(emulator: Any, case: Any, target: Any) -> None:
    assert chosen(case, target).kernel == "matrix"
    check(emulator, target, case, splits=2, error=MATRIX_ERROR[case[0][1]])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_scale_of_keys_that_is_not_finite_gives_nan(emulator: Any, value: float) -> None:
    case = ("bfloat16", "int8", "int8"), (4, 2), (16, 16), "plain"
    q, k, v, options = made(case)
    options["k_scale"][:, 0, 3] = value
    spec, args = resolve(q, k, v, Options(**options))
    found = reference.finish(emulator.partial(spec, args, WAVE_32, splits=3), None)
    for got, right in zip(found, expected(case)[0], strict=True):
        assert np.isnan(got[:, :2]).all()
        assert_close(got[:, 2:], right[:, 2:], largest(right) * 1e-5)
