"""What every backend has to do, as tests to inherit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

import treeattn
from treeattn import PartialState
from treeattn.arguments.devices import fetch
from treeattn.backends.base import Backend
from treeattn.errors import BackendError
from treeattn.testing.oracle import assert_attention, assert_close, dense, on_host, tolerance
from treeattn.testing.wire import over_the_wire

__all__ = ["BackendConformance"]

Array: TypeAlias = npt.NDArray[Any]

TOKENS = 37
"""Keys of a test's sequence: odd, so that it fills no kernel's blocks."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.1},
    "bool mask": {"mask": np.arange(TOKENS) % 3 != 0},
    "float mask": {"mask": np.where(np.arange(TOKENS) % 5 == 0, -np.inf, 0.25).astype(np.float32)},
    "kv_len": {"kv_len": np.array([TOKENS, 4])},
    "bthd": {"layout": "bthd"},
}


class BackendConformance:
    """Subclass it, set ``backend``, and pytest runs every check on it.

    Attributes
    ----------
    backend : Backend
        What is tested.
    refused : tuple of str
        Keys of ``CASES`` that it refuses, and has to give reasons for.

    Examples
    --------
    >>> from treeattn.testing import BackendConformance, FakeBackend
    >>> class TestFakeBackend(BackendConformance):
    ...     backend = FakeBackend()
    """

    backend: Backend
    refused: tuple[str, ...] = ()

    def inputs(self, dtype: str = "float32", layout: str = "bhtd") -> tuple[Array, Array, Array]:
        """Two rows, six query heads over two KV heads, three query tokens, and values wider than keys."""
        from treeattn.arguments.arrays import narrow_dtype

        rng = np.random.default_rng(0)
        shapes = ((2, 6, 3, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 11))
        arrays = (rng.standard_normal(shape).astype(narrow_dtype(dtype)) for shape in shapes)
        q, k, v = (each if layout == "bhtd" else np.ascontiguousarray(each.swapaxes(1, 2)) for each in arrays)
        return q, k, v

    def states(self, *cuts: int, dtype: str = "float32") -> list[PartialState]:
        """States of the shards between ``cuts``."""
        q, k, v = self.inputs(dtype)
        edges = (0, *cuts, TOKENS)
        pieces = [slice(start, stop) for start, stop in pairwise(edges)]
        return [treeattn.partial_attention(q, k[:, :, at], v[:, :, at], backend=self.backend) for at in pieces]

    def bits(self, state: PartialState) -> bytes:
        """Give the packed bytes of ``state``, from wherever they are."""
        data = np.empty(state.nbytes, np.uint8)
        self.backend.ops.to_host(state._packed, data)
        return data.tobytes()

    def on_device(self, packed: Array) -> PartialState:
        """Make a state with these packed numbers."""
        there = self.backend.ops.empty(packed.shape, packed.dtype.name)
        self.backend.ops.from_host(np.ascontiguousarray(packed).reshape(-1).view(np.uint8), there)
        return PartialState(there, self.backend.ops)

    def test_reasons_are_sentences(self) -> None:
        """It says why it can't run by a list of texts, which is empty here."""
        assert self.backend.reasons() == []
        assert isinstance(self.backend.name, str)
        assert self.backend.ops.name == self.backend.name

    def test_states_have_what_is_asked_of_them(self) -> None:
        """Shape, dtype and size are NumPy's, wherever the numbers are."""
        (state,) = self.states()
        assert state._packed.shape == (2, 6, 3, 13)
        assert state._packed.dtype == np.float32
        assert state._packed.nbytes == 4 * 2 * 6 * 3 * 13
        assert self.backend.ops.direct in ("", "cuda", "rocm")

    @pytest.mark.parametrize("case", CASES)
    def test_every_option_gives_the_dense_answer(self, case: str) -> None:
        """Within twice the error of plain NumPy, or refused with reasons."""
        q, k, v = self.inputs(layout=CASES[case].get("layout", "bhtd"))
        if case in self.refused:
            with pytest.raises(BackendError, match=r"can't run this: ."):
                treeattn.attention(q, k, v, backend=self.backend, **CASES[case])
            return
        got = treeattn.attention(q, k, v, backend=self.backend, return_lse=True, **CASES[case])
        assert_attention(got, q, k, v, **CASES[case])

    def test_every_dtype_gives_the_dense_answer(self) -> None:
        """Within twice the error of plain NumPy in that dtype."""
        for dtype in self.backend.capabilities.dtypes:
            q, k, v = self.inputs(dtype)
            got = treeattn.attention(q, k, v, backend=self.backend, return_lse=True)
            assert got[0].dtype == q.dtype
            assert_attention(got, q, k, v)

    def test_attention_has_the_bits_of_the_finished_state(self) -> None:
        """Rounded to q's dtype, with and without a sink."""
        for dtype, sink in product(self.backend.capabilities.dtypes, (None, np.arange(6.0))):
            q, k, v = self.inputs(dtype)
            state = treeattn.partial_attention(q, k, v, backend=self.backend)
            expected = state.finish(sink=sink, dtype=q.dtype, return_lse=True)
            for return_lse in (True, False):
                got = treeattn.attention(q, k, v, sink=sink, backend=self.backend, return_lse=return_lse)
                for one, other in zip(got if return_lse else (got,), expected, strict=False):
                    assert one.dtype == other.dtype
                    assert fetch(one).tobytes() == fetch(other).tobytes()

    def test_hidden_keys_contribute_nothing_whatever_they_hold(self) -> None:
        """NaN and infinity behind kv_len or a mask never appear."""
        if "kv_len" in self.refused:
            pytest.skip("kv_len is refused")
        q, k, v = self.inputs()
        k[1, :, 4:], v[1, :, 4:] = np.nan, np.inf
        options: dict[str, Any] = {"kv_len": np.array([TOKENS, 4])}
        got = treeattn.attention(q, k, v, backend=self.backend, return_lse=True, **options)
        assert np.isfinite(got[0]).all()
        assert_attention(got, q, k, v, **options)

    def test_a_row_without_keys_gives_zero_or_its_sink(self) -> None:
        """Out = 0 and lse = -inf, or lse = sink."""
        q, k, v = self.inputs()
        sink = np.arange(6, dtype=np.float32)
        for given, lse in ((None, -np.inf), (sink, sink[:, None])):
            out, got = treeattn.attention(
                q, k[:, :, :0], v[:, :, :0], sink=given, backend=self.backend, return_lse=True
            )
            assert not out.any()
            assert np.array_equal(got, np.broadcast_to(np.float32(lse), got.shape))

    def test_no_rows_or_no_queries_give_an_empty_answer(self) -> None:
        """Of the shape that is asked for."""
        q, k, v = self.inputs()
        for given in ((q[:0], k[:0], v[:0]), (q[:, :, :0], k, v), (q[:, :, :0], k[:, :, :0], v[:, :, :0])):
            assert_attention(treeattn.attention(*given, backend=self.backend, return_lse=True), *given)

    def test_the_sink_is_counted_once(self) -> None:
        """Also where the keys come in shards."""
        q, k, v = self.inputs()
        sink = np.linspace(-1, 2, 6, dtype=np.float32)
        got = treeattn.merge(self.states(5, 20)).finish(sink=sink, return_lse=True)
        assert_attention(got, q, k, v, sink=sink)

    def test_an_infinite_sink_takes_all_the_weight_or_none(self) -> None:
        """Whether the keys come at once or in shards."""
        q, k, v = self.inputs()
        sink = np.array([np.inf, -np.inf, 0, np.inf, 1, -np.inf], np.float32)
        at_once = treeattn.attention(q, k, v, sink=sink, backend=self.backend, return_lse=True)
        for got in (at_once, treeattn.merge(self.states(5, 20)).finish(sink=sink, return_lse=True)):
            assert_attention(got, q, k, v, sink=sink)

    def test_shards_anywhere_and_in_any_order_give_the_dense_answer(self) -> None:
        """Law 2: empty shards too."""
        q, k, v = self.inputs()
        right, limit = dense(q, k, v), tolerance(q, k, v)
        for cuts in ((), (1,), (0, 12, 12, 36), (7, 9, 20, 25, 26, 37, 37)):
            for states in _orders(self.states(*cuts)):
                out, lse = treeattn.merge(states).finish(return_lse=True)
                assert_close(out, right.out, limit.out, f"out of shards at {cuts}")
                assert_close(lse, right.lse, limit.lse, f"lse of shards at {cuts}")

    def test_merge_is_associative_and_commutative_to_rounding(self) -> None:
        """Law 1."""
        q, k, v = self.inputs()
        a, b, c = self.states(10, 22)
        right, limit = dense(q, k, v), tolerance(q, k, v)
        for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b), b.merge(a).merge(c)):
            assert_close(merged.finish(), right.out, limit.out)

    def test_the_identity_is_neutral_exactly(self) -> None:
        """Law 1: not a bit changes."""
        for dtype in {"float32", "float64"} & set(self.backend.capabilities.dtypes):
            (state,) = self.states(dtype=dtype)
            identity = PartialState.identity(state.shape, dtype=dtype, backend=self.backend)
            for merged in (identity.merge(state), state.merge(identity), treeattn.merge([identity, state, identity])):
                assert self.bits(merged) == self.bits(state)

    def test_a_state_of_no_keys_never_leaks_what_it_holds(self) -> None:
        """Law 1: l = 0 means that o is garbage, NaN even."""
        (state,) = self.states()
        garbage = np.full((*state.shape[:3], state.shape[3] + 2), np.nan, np.float32)
        garbage[..., -2], garbage[..., -1] = 0, -np.inf
        empty = self.on_device(garbage)
        assert self.bits(empty.merge(state)) == self.bits(state)
        assert self.bits(state.merge(empty)) == self.bits(state)
        assert not on_host(empty.merge(empty).finish()).any()

    def test_equal_inputs_in_equal_order_give_equal_bits(self) -> None:
        """Law 3, and no difference whether the result overwrites one of the sources."""
        once, again = self.states(3, 17, 30), self.states(3, 17, 30)
        merged = self.bits(treeattn.merge(once))
        assert self.bits(treeattn.merge(again)) == merged
        for position in range(4):
            states = self.states(3, 17, 30)
            assert self.bits(treeattn.merge(states, out=states[position])) == merged

    def test_merging_finishing_and_the_wire_have_the_bits_of_the_host(self) -> None:
        """Law 3: ranks with different backends may meet, and must end alike."""
        states = self.states(3, 17, 17)
        here = [self.on_host(state) for state in states]
        merged = treeattn.merge(states)
        assert self.bits(merged) == treeattn.merge(here).packed.tobytes()
        sink = np.linspace(-1, 2, 6, dtype=np.float32)
        for options in ({}, {"sink": sink}):
            right = treeattn.merge(here).finish(return_lse=True, **options)
            for got, expected in zip(merged.finish(return_lse=True, **options), right, strict=True):
                assert on_host(got).tobytes() == expected.tobytes()
        assert self.bits(over_the_wire(states)) == over_the_wire(here).packed.tobytes()

    def on_host(self, state: PartialState) -> PartialState:
        """Give the same state in host memory."""
        host = PartialState.identity(state.shape, dtype=state.dtype)
        host._packed.reshape(-1).view(np.uint8)[:] = np.frombuffer(self.bits(state), np.uint8)
        return host

    def test_rows_of_a_cache_hold_what_is_written_to_them(self) -> None:
        """In each type that a cache may hold, from any float type and any strides, and nothing else is touched."""
        memory = self.backend.memory
        for dtype, given in product(self.backend.capabilities.dtypes, ("float32", "float64")):
            q, k, v = self.inputs(dtype)
            rows = [memory.empty((2, 2, TOKENS, each.shape[3]), each.dtype) for each in (k, v)]
            tokens = [each.astype(given) for each in (k, v)]
            turned = [np.ascontiguousarray(each.swapaxes(1, 2)).swapaxes(1, 2) for each in tokens]
            for start, stop, new in ((0, 20, turned), (15, TOKENS, tokens), (20, 20, tokens)):
                memory.write(rows, start, [each[:, :, start:stop] for each in new])
            there = q if not memory.on_device else memory.bring(q)
            got = treeattn.attention(there, *rows, backend=self.backend, return_lse=True)
            stored = [each.astype(q.dtype) for each in tokens]
            expected = treeattn.attention(q, *stored, backend=self.backend, return_lse=True)
            assert [fetch(each).tobytes() for each in got] == [each.tobytes() for each in expected]

    def test_a_cache_of_its_memory_gives_the_dense_answer(self) -> None:
        """While it grows, is cut back and grows again; with positions, where they are not refused."""
        q, k, v = self.inputs()
        cache = treeattn.ShardedKVCache(
            None, batch=2, kv_heads=2, head_dim=8, v_head_dim=11, capacity=TOKENS, backend=self.backend
        )
        for start, stop in ((0, 1), (1, 30), (12, TOKENS)):
            cache.truncate(start)
            cache.append(k[:, :, start:stop], v[:, :, start:stop])
        for causal in (False, True)[: 1 if "causal" in self.refused else 2]:
            got = cache.decode(q, return_lse=True, causal=causal)
            assert isinstance(got[0], np.ndarray), "as q is"
            assert_attention(got, q, k, v, causal=causal)
        assert cache.nbytes == 4 * 2 * 2 * TOKENS * (8 + 11)

    def test_bytes_survive_the_way_to_the_host_and_back(self) -> None:
        """What travels between ranks is what was there."""
        packed = np.random.default_rng(1).standard_normal((2, 3, 1, 6)).astype(np.float32)
        assert self.bits(self.on_device(packed)) == packed.tobytes()


def _orders(states: list[PartialState]) -> Iterator[list[PartialState]]:
    yield states
    yield states[::-1]
    yield [states[i] for i in np.random.default_rng(2).permutation(len(states))]
