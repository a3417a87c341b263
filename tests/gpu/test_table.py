"""Which kernel a call gets, and into how many splits its keys go: rules that need no card."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options, Spec
from treeattn.kernels.gpu.source import MAX_SPLITS, THREADS
from treeattn.kernels.gpu.splits import split_count
from treeattn.kernels.gpu.table import TYPES, choose, without_tensor_cores
from treeattn.kernels.gpu.targets import target_of

law = settings(deadline=None, max_examples=200)
ARCHITECTURES = ["sm_75", "sm_90", "gfx908", "gfx942", "gfx1030", "gfx1100", "gfx1201"]


def spec_of(dtype: str, q_dtype: str, group: int, width: int, value_width: int, **options: Any) -> Spec:
    k_type, q_type = (np.dtype(getattr(ml_dtypes, name, name)) for name in (dtype, q_dtype))
    q = np.zeros((1, group, 1, width), q_type)
    k, v = np.zeros((1, 1, 3, width), k_type), np.zeros((1, 1, 3, value_width), k_type)
    return resolve(q, k, v, Options(**options))[0]


@law
@given(
    dtype=st.sampled_from(list(TYPES)),
    group=st.integers(1, 40),
    widths=st.tuples(st.integers(1, 2000), st.integers(1, 2000)),
    arch=st.sampled_from(ARCHITECTURES),
    wide=st.booleans(),
)
def test_every_call_has_a_kernel_whose_lanes_cover_its_rows(
    dtype: str, group: int, widths: tuple[int, int], arch: str, wide: bool
) -> None:
    chosen = choose(spec_of(dtype, "float32", group, *widths), target_of(arch), k_wide=wide, v_wide=wide)
    assert chosen.rows in (1, 2, 4, 8)
    assert chosen.registers <= 255
    assert chosen.part % 4 == 0
    assert chosen.part >= chosen.rows * (widths[1] + 2)
    if chosen.kernel == "matrix":
        assert THREADS % (chosen.target.wave * chosen.share) == 0
        assert chosen.step == THREADS // chosen.target.wave // chosen.share * 16
    if chosen.kernel == "vector":
        assert THREADS % chosen.team == 0
        assert chosen.team <= 32  # so that a team never crosses a wave, however wide that is
        assert chosen.step * chosen.team == THREADS * chosen.unroll
    assert all(int(value) >= 0 for value in chosen.defines().values())


@pytest.mark.parametrize(
    ("arch", "dtype", "q_dtype", "group", "width", "options", "kernel"),
    [
        ("sm_80", "bfloat16", "bfloat16", 4, 128, {}, "matrix"),
        ("sm_80", "bfloat16", "float32", 8, 128, {}, "matrix"),
        ("sm_80", "float16", "float16", 4, 64, {}, "matrix"),
        ("sm_80", "float16", "float32", 4, 64, {}, "vector"),  # a float32 may lie past float16's range
        ("sm_80", "bfloat16", "bfloat16", 3, 128, {}, "vector"),
        ("sm_80", "bfloat16", "bfloat16", 8, 192, {}, "matrix"),
        ("sm_80", "bfloat16", "bfloat16", 8, 512, {}, "matrix"),
        ("sm_80", "bfloat16", "bfloat16", 8, 520, {}, "vector"),
        ("sm_80", "float32", "float32", 8, 128, {}, "vector"),
        ("sm_75", "bfloat16", "bfloat16", 8, 128, {}, "vector"),
        ("gfx90a", "bfloat16", "bfloat16", 8, 128, {}, "matrix"),
        ("gfx908", "bfloat16", "bfloat16", 8, 128, {}, "vector"),
        ("gfx1100", "float16", "float16", 8, 64, {}, "matrix"),
        ("gfx90a", "bfloat16", "bfloat16", 8, 512, {}, "matrix"),
        ("gfx1100", "float16", "float16", 8, 128, {}, "matrix"),
        ("gfx1100", "float16", "float16", 8, 256, {}, "matrix"),
        ("gfx1100", "float16", "float16", 8, 96, {}, "vector"),  # a wave's part of it would end within a load
        ("gfx1201", "float16", "float16", 8, 128, {}, "matrix"),
        ("gfx1030", "float16", "float16", 8, 128, {}, "vector"),
        ("sm_90", "bfloat16", "bfloat16", 8, 128, {"k_scale": np.ones((1, 1, 1, 1))}, "vector"),
    ],
)
def test_tensor_cores_are_taken_where_they_pay(
    arch: str, dtype: str, q_dtype: str, group: int, width: int, options: Any, kernel: str
) -> None:
    spec = spec_of(dtype, q_dtype, group, width, width, **options)
    assert choose(spec, target_of(arch)).kernel == kernel
    assert bool(without_tensor_cores(spec, target_of(arch))) == (kernel == "vector")
    assert choose(spec, target_of(arch), k_wide=False, v_wide=True).kernel == "vector"


def test_what_keeps_a_call_from_the_tensor_cores_is_said() -> None:
    spec = spec_of("float16", "float32", 3, 520, 520, k_scale=np.ones((1, 1, 1, 1)))
    assert without_tensor_cores(spec, target_of("sm_90"), v_wide=False) == [
        "two numbers of float16 don't hold one of q, float32",
        "K and V have scales",
        "3 query rows of a KV head are too few to pay, fewer than 4",
        "rows of K and V can't be read 16 bytes at a time",
        "rows of 520 and 520 don't fit the registers of a block's waves",
    ]
    [reason] = without_tensor_cores(spec_of("bfloat16", "bfloat16", 8, 64, 64), target_of("gfx1030"))
    assert reason == "gfx1030 has no matrix instruction that is used here"


@law
@given(
    tiles=st.integers(1, 500),
    keys=st.integers(0, 10**6),
    step=st.sampled_from([16, 64, 512]),
    slots=st.integers(1, 2000),
)
def test_splits_are_never_empty_of_reason(tiles: int, keys: int, step: int, slots: int) -> None:
    splits = split_count(tiles, keys, step, slots)
    assert 1 <= splits <= MAX_SPLITS
    assert splits <= max(1, -(-keys // step))
    assert splits == 1 or tiles * (splits - 1) < 2 * slots


def test_a_long_cache_fills_the_card_and_a_short_one_is_not_cut() -> None:
    h200 = 132 * 3
    assert split_count(tiles=8, keys=2**17, step=64, slots=h200) * 8 >= 0.85 * h200
    assert split_count(tiles=1, keys=60, step=64, slots=h200) == 1
    assert split_count(tiles=h200, keys=2**17, step=64, slots=h200) == 1
