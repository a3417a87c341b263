"""Captured local parts, on a fake card that refuses in a capture what a real one refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_card import FakeCard, FakeCardBackend

import treeattn
from treeattn import graphs
from treeattn.backends.auto import AutoBackend
from treeattn.errors import BackendError, InputError
from treeattn.graphs import capture
from treeattn.testing.oracle import assert_attention, assert_close, dense

CAPACITY = 300


def inputs(dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    shapes = ((1, 8, 1, 32), (1, 2, CAPACITY, 32), (1, 2, CAPACITY, 32))
    return tuple(rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.fixture
def backend(card: FakeCard) -> FakeCardBackend:
    return FakeCardBackend(card)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["vector", "tensor cores"])
def test_one_graph_follows_a_growing_cache(backend: Any, card: FakeCard, dtype: Any) -> None:
    q, k, v = inputs(dtype)
    there, lengths = [card.upload(array) for array in (q, k, v)], card.upload(np.array([0]))
    step = capture(*there, kv_len=lengths, backend=backend)
    limit = 1e-5 * np.abs(np.float32(v)).max()  # what the tensor cores' two halves of bfloat16 leave
    assert card.recorded == 1, "the local part is one launch"
    used = card.used
    for length in (0, 1, 17, 150, CAPACITY):
        card.copy_in(np.array([length]).view(np.uint8), lengths)
        assert step() is step.state
        assert card.used == used, "a replay allocates nothing"
        out, lse = step.state.finish(return_lse=True)
        used = card.used
        right = dense(q, k, v, kv_len=np.array([length]))
        assert_close(out.get(), right.out, limit, "out")
        assert_close(lse.get(), right.lse, limit, "lse")


def test_a_graph_masks_by_positions_on_the_card(backend: Any, card: FakeCard) -> None:
    (q, k, v), options = inputs(), {"causal": True, "window": (50, None)}
    there = [card.upload(array) for array in (q, k, v)]
    lengths, where = card.upload(np.array([CAPACITY])), card.upload(np.array([0]))
    step = capture(*there, kv_len=lengths, q_pos=where, backend=backend, **options)
    for at in (0, 77, CAPACITY - 1):
        card.copy_in(np.array([at]).view(np.uint8), where)
        out, lse = step().finish(return_lse=True)
        assert_attention((out.get(), lse.get()), q, k, v, q_pos=np.array([at]), kv_pos=0, **options)


def test_a_capture_that_names_no_backend_finds_the_cards(
    backend: Any, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = AutoBackend()
    monkeypatch.setitem(auto.__dict__, "chosen", backend)
    monkeypatch.setattr(graphs, "find", lambda name, spec: auto if name == "auto" else None)
    q, k, v = inputs()
    there = [card.upload(array) for array in (q, k, v)]
    step = capture(*there, kv_len=card.upload(np.array([20])))
    out, lse = step().finish(return_lse=True)
    assert_attention((out.get(), lse.get()), q, k, v, kv_len=np.array([20]))


def test_the_bits_are_those_of_a_call_with_the_same_capacity(backend: Any, card: FakeCard) -> None:
    there, lengths = [card.upload(array) for array in inputs()], card.upload(np.array([123]))
    step = capture(*there, kv_len=lengths, backend=backend)
    called = treeattn.partial_attention(*there, kv_len=lengths, backend=backend)
    np.testing.assert_array_equal(step().packed.get(), called.packed.get())


def test_q_and_keys_may_change_in_place(backend: Any, card: FakeCard) -> None:
    q, k, v = inputs()
    there, lengths = [card.upload(array) for array in (q, k, v)], card.upload(np.array([CAPACITY]))
    step = capture(*there, kv_len=lengths, backend=backend)
    card.copy_in((2 * q).reshape(-1).view(np.uint8), there[0])
    out, lse = step().finish(return_lse=True)
    assert_attention((out.get(), lse.get()), 2 * q, k, v)


def test_what_a_graph_could_not_find_again_is_refused(backend: Any, card: FakeCard) -> None:
    there, lengths = [card.upload(array) for array in inputs()], card.upload(np.array([3]))
    with pytest.raises(InputError, match=r"^kv_len: expected an array on the card, where a graph finds it again"):
        capture(*there, kv_len=np.array([3]), backend=backend)
    mask = np.ones((1, 1, 1, CAPACITY), bool)
    with pytest.raises(InputError, match=r"^mask: expected an array on the card"):
        capture(*there, kv_len=lengths, mask=mask, backend=backend)
    capture(*there, kv_len=lengths, mask=card.upload(mask), backend=backend)


def test_a_backend_without_graphs_says_so() -> None:
    with pytest.raises(BackendError, match="backend 'cpu' has no graphs: call partial_attention in each step"):
        capture(*inputs(), kv_len=np.array([3]), backend="cpu")


def test_the_fake_refuses_what_a_card_would(card: FakeCard) -> None:
    def twice(what: Any) -> Any:
        runs = iter((lambda: None, what))  # the first run is before the capture
        return lambda: next(runs)()

    for what in (lambda: card.empty((1,), "float32"), card.wait, lambda: card.upload(np.ones(1))):
        with pytest.raises(RuntimeError, match="can't be captured"):
            card.capture(twice(what))
