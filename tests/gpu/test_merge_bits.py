"""The GPU's merge and finish against the CPU's: not close, but the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from treeattn.kernels import combine, wire_rows
from treeattn.kernels.gpu import source
from treeattn.kernels.gpu.call import FINISH, MERGE, pack_finish, pack_merge
from treeattn.wire_form import WireForm

WIDTH = 7
SHAPE = (1, 2, 2, WIDTH)
ROWS = 4
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1.0, -np.inf, np.inf, np.nan, -0.0, 88.0, -87.5, 1e-40])
STATES = arrays(np.float32, SHAPE, elements=FLOATS)
law = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def kernels(emulator: Any) -> dict[str, Any]:
    def build(name: str, struct: str) -> Any:
        return emulator.compile(source.text("states.cu"), f"treeattn_{name}", struct, source.state_defines())

    return {"merge": build("merge", "ta_merge"), "finish": build("finish", "ta_finish")}


def assert_same_bits(got: Any, right: Any) -> None:
    """Any NaN is as good as another: IEEE 754 leaves the sign and the payload to the processor."""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
    np.testing.assert_array_equal(*(np.where(np.isnan(a), 0, a).view(np.uint32) for a in (got, right)))


def merged(emulator: Any, library: Any, states: list[Any], out: Any) -> Any:
    call = pack_merge([state.ctypes.data for state in states], out.ctypes.data, width=WIDTH)
    emulator.launch(library, call, np.arange(ROWS)[::-1], 32)
    return out


@law
@given(states=st.lists(STATES, min_size=1, max_size=5))
def test_merge_gives_the_bits_of_the_cpu(emulator: Any, kernels: Any, states: list[Any]) -> None:
    right = np.empty(SHAPE, np.float32)
    combine.merge(right, states)
    assert_same_bits(merged(emulator, kernels["merge"], states, np.empty_like(right)), right)


def test_merge_gives_the_bits_of_the_cpu_for_ordinary_states(emulator: Any, kernels: Any) -> None:
    rng = np.random.default_rng(0)
    for count in (2, 3, 17, source.MAX_SOURCES):
        states = [rng.standard_normal(SHAPE, dtype=np.float32) * 5 for _ in range(count)]
        for state in states:
            state[..., -2] = np.abs(state[..., -2]) + 1
        right = np.empty(SHAPE, np.float32)
        combine.merge(right, states)
        assert_same_bits(merged(emulator, kernels["merge"], states, np.empty_like(right)), right)


def test_merge_may_write_over_a_source(emulator: Any, kernels: Any) -> None:
    rng = np.random.default_rng(1)
    states = [np.abs(rng.standard_normal(SHAPE, dtype=np.float32)) for _ in range(3)]
    right = np.empty(SHAPE, np.float32)
    combine.merge(right, states)
    assert_same_bits(merged(emulator, kernels["merge"], states, states[1]), right)


@law
@given(state=STATES, sink=st.none() | arrays(np.float32, (2,), elements=FLOATS))
def test_finish_gives_the_bits_of_the_cpu(emulator: Any, kernels: Any, state: Any, sink: Any) -> None:
    right = combine.finish(state, sink)
    out, lse = np.empty_like(right[0]), np.empty_like(right[1])
    sink_at = 0 if sink is None else sink.ctypes.data
    addresses = {"packed": state.ctypes.data, "sink": sink_at, "out": out.ctypes.data, "lse": lse.ctypes.data}
    call = pack_finish(heads=2, tokens=2, width=WIDTH, **addresses)
    emulator.launch(kernels["finish"], call, np.arange(ROWS), 64)
    assert_same_bits(out, right[0])
    assert_same_bits(lse, right[1])


@pytest.fixture(scope="module")
def wire(emulator: Any) -> dict[str, Any]:
    defines = source.state_defines()
    return {
        name: emulator.compile(source.text("states.cu"), f"treeattn_{name}", "ta_merge", defines)
        for name in ("pack", "merge_rows", "unpack")
    }


@law
@given(states=st.lists(STATES, min_size=1, max_size=5))
def test_wire_rows_have_the_bits_of_the_cpu(emulator: Any, wire: Any, states: list[Any]) -> None:
    form = WireForm(SHAPE, "float32")
    rows = [np.empty(form.nbytes, np.uint8) for _ in states]
    for state, row in zip(states, rows, strict=True):
        wire_rows.prepare_pack(row, form)(state)
        assert_same_bits(merged(emulator, wire["pack"], [state], np.empty_like(state)), floats(row))
    right = np.empty(form.nbytes, np.uint8)
    wire_rows.prepare_merge(right, rows, form)()
    there = [floats(row).copy() for row in rows]
    unpacked = np.empty(SHAPE, np.float32)
    wire_rows.prepare_unpack(right, form)(unpacked)
    assert_same_bits(merged(emulator, wire["unpack"], there, np.empty_like(unpacked)), unpacked)
    assert_same_bits(merged(emulator, wire["merge_rows"], there, there[-1]), floats(right))


def floats(rows: Any) -> Any:
    return rows.view(np.float32).reshape(SHAPE)


def test_structs_are_as_long_as_their_fields() -> None:
    assert MERGE.itemsize == 8 * (source.MAX_SOURCES + 3)
    assert FINISH.itemsize == 8 * 7
