"""Checks that need a card: ``make test-gpu``. Each skips with the reason why there is none."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeattn
from treeattn.backends import registry
from treeattn.backends.base import Backend
from treeattn.cards import Cards
from treeattn.graphs import capture
from treeattn.kernels import combine, wire_rows
from treeattn.testing import BackendConformance
from treeattn.testing.oracle import assert_attention, dense
from treeattn.wire_form import WireForm

pytestmark = pytest.mark.gpu

FAMILIES = ("nvidia", "amd")


def the_backend() -> Backend:
    """Give the backend of the card that is here; skip where none is."""
    found = {name: registry.load(name).reasons() for name in FAMILIES}
    for name, reasons in found.items():
        if not reasons:
            return registry.load(name)
    pytest.skip("; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in found.items()))


class TestCard(BackendConformance):
    """Every check that a backend must pass, on the card that is here."""

    @pytest.fixture(autouse=True)
    def _backend(self) -> None:
        self.backend = the_backend()


def bfloat16_inputs(keys: int) -> tuple[Any, Any, Any]:
    import ml_dtypes

    rng = np.random.default_rng(0)
    shapes = (1, 32, 1, 128), (1, 8, keys, 128), (1, 8, keys, 128)
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in shapes)  # type: ignore[return-value]


def test_tensor_cores_are_near_float32() -> None:
    backend = the_backend()
    q, k, v = bfloat16_inputs(5000)
    state = treeattn.partial_attention(q, k, v, backend=backend)
    out = state.finish().get()
    right = dense(q.astype(np.float32), k, v).out
    assert np.abs(out - right).max() <= 2e-5 * np.abs(right).max()


def test_merging_gives_the_bits_of_the_cpu() -> None:
    backend = the_backend()
    q, k, v = bfloat16_inputs(3000)
    shards = [slice(0, 700), slice(700, 701), slice(701, 3000)]
    states = [treeattn.partial_attention(q, k[:, :, at], v[:, :, at], backend=backend) for at in shards]
    packed = [state.packed.get() for state in states]
    right = np.empty_like(packed[0])
    combine.merge(right, packed)
    merged = treeattn.merge(states)
    np.testing.assert_array_equal(merged.packed.get(), right)
    for got, expected in zip(merged.finish(return_lse=True), combine.finish(right, None), strict=True):
        np.testing.assert_array_equal(got.get(), expected)


def test_arrays_of_the_card_stay_there() -> None:
    the_backend()
    cupy = importlib.import_module("cupy")
    arrays = [np.asarray(array, np.float32) for array in bfloat16_inputs(300)]
    out, lse = treeattn.attention(*map(cupy.asarray, arrays), return_lse=True)
    assert isinstance(out, cupy.ndarray)
    assert_attention((out.get(), lse.get()), *arrays)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_share_a_card_end_with_the_same_bits(mpirun: Any, ranks: int) -> None:
    the_backend()
    job = mpirun(Path(__file__).with_name("decode_on_card.py"), ranks, timeout=180)
    assert len(job.reports) == ranks
    assert len({report["bits"] for report in job.reports}) == 1


def test_a_captured_graph_follows_the_lengths_on_the_card() -> None:
    backend = the_backend()
    cupy = importlib.import_module("cupy")
    q, k, v = (cupy.asarray(np.asarray(array, np.float32)) for array in bfloat16_inputs(600))
    lengths = cupy.asarray(np.array([600]))
    step = capture(q, k, v, kv_len=lengths, backend=backend)
    for length in (10, 599):
        lengths.fill(length)
        out = step().finish(return_lse=True)
        assert_attention(
            tuple(each.get() for each in out), *(each.get() for each in (q, k, v)), kv_len=np.array([length])
        )


def test_one_card_alone_gathers_by_nccl_what_it_has() -> None:
    card: Any = the_backend().ops
    if reasons := card.join_reasons():
        pytest.skip("; ".join(reasons))
    cards = Cards(card, card.join(card.new_group(), 1, 0), 1, lambda ready, sleep: _spin(ready))
    assert cards.wrong_ranks(0) == []
    cards.group.free()


def _spin(ready: Any) -> None:
    while not ready():
        pass


def test_wire_rows_have_the_bits_of_the_cpu() -> None:
    ops: Any = the_backend().ops
    state = treeattn.partial_attention(*bfloat16_inputs(300), backend=the_backend())
    form = WireForm(state.packed.shape, "float32")
    there, here = ops.memory(form.nbytes), np.empty(form.nbytes, np.uint8)
    ops.prepare_pack(there, form)(state._packed)
    wire_rows.prepare_pack(here, form)(state.packed.get())
    found = np.empty_like(here)
    ops.to_host(there, found)
    np.testing.assert_array_equal(found, here)
