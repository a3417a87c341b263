"""The kernel that writes tokens to a cache, executed on the CPU: NumPy's conversions, and nothing else touched."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeattn.arguments.arrays import FLOAT_DTYPES, cast, narrow_dtype
from treeattn.kernels.gpu import offline, source
from treeattn.kernels.gpu.call import STORE, pack_store
from treeattn.kernels.gpu.targets import target_of

TARGETS = [target_of("sm_90"), target_of("gfx942")]
law = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def store(emulator: Any, pairs: Any, target: Any = TARGETS[0]) -> None:
    """Copy each first array to its second by the kernel, as many blocks as the backend starts."""
    library = emulator.compile(source.text("store.cu"), "treeattn_store", "ta_store", source.store_defines(target))
    rows = sum(int(np.prod(new.shape[:3])) for new, _ in pairs)
    blocks = -(-rows // (source.THREADS // target.wave))
    emulator.launch(library, pack_store(pairs), np.arange(blocks)[::-1], target.wave)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Numbers of all sizes, with infinities, NaN and zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-160, 160, shape)
    x = np.where(rng.random(shape) < 0.2, rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30], shape), x)
    return cast(x, narrow_dtype(dtype))


def assert_same(got: Any, right: Any) -> None:
    """Any NaN is as good as another."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
    assert np.where(np.isnan(got), 0, got).tobytes() == np.where(np.isnan(right), 0, right).tobytes()


@law
@given(
    source_type=st.sampled_from(FLOAT_DTYPES),
    target_type=st.sampled_from(["float32", "float16", "bfloat16"]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9), st.sampled_from([1, 5, 8, 40])),
    at=st.integers(0, 3),
    turned=st.booleans(),
    seed=st.integers(0, 999),
    target=st.sampled_from(TARGETS),
)
def test_tokens_are_converted_as_numpy_does_and_nothing_else_is_touched(
    emulator: Any, source_type: str, target_type: str, sizes: Any, at: int, turned: bool, seed: int, target: Any
) -> None:
    batch, heads, tokens, width = sizes
    new = numbers((batch, tokens, heads, width), source_type, seed).swapaxes(1, 2)
    new = new if turned else np.ascontiguousarray(new)
    room = np.full((batch, heads, 13, width), 7, narrow_dtype(target_type))
    right = room.copy()
    right[:, :, at : at + tokens] = cast(new, right.dtype)
    store(emulator, [(new, room[:, :, at : at + tokens])], target)
    assert_same(room, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_rows_of_one_type_keep_every_bit(emulator: Any, dtype: str, width: int) -> None:
    raw = np.random.default_rng(0).bytes(2 * 3 * 4 * width * np.dtype(narrow_dtype(dtype)).itemsize)
    new = np.frombuffer(raw, narrow_dtype(dtype)).reshape(2, 3, 4, width)
    room = np.zeros_like(new)
    store(emulator, [(new, room)])
    assert room.tobytes() == raw


def test_keys_and_values_are_written_in_one_launch(emulator: Any) -> None:
    k, v = numbers((1, 2, 5, 8), "float32", 0), numbers((1, 2, 5, 3), "float64", 1)
    rooms = np.zeros(k.shape, ml_dtypes.bfloat16), np.zeros(v.shape, ml_dtypes.bfloat16)
    store(emulator, list(zip((k, v), rooms, strict=True)))
    for new, room in zip((k, v), rooms, strict=True):
        assert_same(room, cast(new, room.dtype))


def test_a_double_is_rounded_to_sixteen_bits_once(emulator: Any) -> None:
    """Through float32, what is just above the middle would become the middle, and go down to the even neighbour."""
    above = np.array([1 + 2.0**-8 + 2.0**-40, -(1 + 2.0**-8 + 2.0**-40), 1 + 2.0**-8 - 2.0**-40]).reshape(1, 1, 1, 3)
    room = np.zeros(above.shape, ml_dtypes.bfloat16)
    store(emulator, [(above, room)])
    assert room.astype(float).ravel().tolist() == [1 + 2.0**-7, -1 - 2.0**-7, 1]
    halves = np.array([1 + 2.0**-11 + 2.0**-40, 65520 - 2.0**-30]).reshape(1, 1, 1, 2)
    room = np.zeros(halves.shape, np.float16)
    store(emulator, [(halves, room)])
    assert room.astype(float).ravel().tolist() == [1 + 2.0**-10, 65504]


def test_aligned_rows_of_one_type_are_moved_sixteen_bytes_at_a_time() -> None:
    wide, narrow = np.zeros((1, 1, 2, 64), np.float16), np.zeros((1, 1, 2, 60), np.float16)
    [first, second] = pack_store([(wide, wide), (narrow, narrow)])[0]["copies"]
    assert (first["unit"], first["width"]) == (16, 8)
    assert (second["unit"], second["width"]) == (2, 60)
    assert STORE.itemsize == 2 * 8 * 17


@pytest.mark.skipif(bool(offline.reasons()), reason="; ".join(offline.reasons()))
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_compiles_for_cards_of_all_ages(arch: str) -> None:
    code = offline.compile_text(source.text("store.cu"), source.store_defines(target_of(arch)), arch)
    found = offline.resources(code)["treeattn_store"]
    assert (found.stack, found.local, found.shared) == (0, 0, 0)
