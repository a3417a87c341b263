"""`decode` on ranks that are threads: any cut of the keys, any layout of hosts, any wrong rank."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import distributed, errors
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention

SIZES = [1, 2, 3, 5, 8]
B, HQ, HKV, TQ, TK, D, DV = 2, 4, 2, 3, 41, 8, 5


def arrays(seed: int = 0, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = (B, HQ, TQ, D), (B, HKV, TK, D), (B, HKV, TK, DV)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def cuts(size: int, seed: int) -> list[slice]:
    """Cut the keys into ``size`` consecutive uneven shards, some of them empty."""
    ends = np.sort(np.random.default_rng(seed).integers(0, TK + 1, size - 1))
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, TK], strict=True)]


def on_ranks(size: int, call: Any, hosts: Any = None, **options: Any) -> list[Any]:
    """Run ``call(comm)`` on every rank, each with a tree communicator of its own."""

    def rank(transport: Any) -> Any:
        with treeattn.TreeComm(transport, hosts=hosts, **options) as comm:
            return call(comm)

    return run_ranks(size, rank)


def outcome(call: Any) -> str:
    """Give the error's text instead of raising it, so that every rank can report."""
    try:
        return f"gave {type(call()).__name__}"
    except errors.TreeattnError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_uneven_and_empty_shards_give_dense_attention_on_every_rank(size, seed):
    q, k, v = arrays(seed)
    parts = cuts(size, seed)

    def call(comm):
        part = parts[comm.rank]
        return treeattn.decode(q, k[:, :, part], v[:, :, part], comm=comm, return_lse=True)

    results = on_ranks(size, call)
    assert_attention(results[0], q, k, v)
    for out, lse in results[1:]:
        assert out.tobytes() == results[0][0].tobytes()
        assert lse.tobytes() == results[0][1].tobytes()


@given(
    size=st.integers(1, 8),
    seed=st.integers(0, 99),
    causal=st.booleans(),
    window=st.sampled_from([None, (4, 0), (None, 2), (7, None)]),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    layout=st.sampled_from(["bhtd", "bthd"]),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
    hosts=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=25)
def test_options_hold_across_shards_of_interleaved_positions(
    size, seed, causal, window, softcap, sink, layout, dtype, hosts
):
    q, k, v = arrays(seed, dtype)
    owner = np.random.default_rng(seed).integers(0, size, TK)
    labels = [hosts.choice("abc") for _ in range(size)]
    logits = np.linspace(-1, 1, HQ) if sink else None
    options = {"causal": causal, "window": window, "softcap": softcap, "sink": logits, "layout": layout}
    turn = (lambda array: array.swapaxes(1, 2)) if layout == "bthd" else (lambda array: array)
    queries = np.arange(TK - TQ, TK)

    def call(comm):
        mine = np.flatnonzero(owner == comm.rank)
        shard = turn(k[:, :, mine]), turn(v[:, :, mine])
        return treeattn.decode(turn(q), *shard, comm=comm, q_pos=queries, kv_pos=mine, return_lse=True, **options)

    results = on_ranks(size, call, hosts=labels)
    assert_attention(results[-1], turn(q), turn(k), turn(v), q_pos=queries, kv_pos=np.arange(TK), **options)
    assert {out.tobytes() + lse.tobytes() for out, lse in results} == {
        results[0][0].tobytes() + results[0][1].tobytes()
    }


@pytest.mark.parametrize("size", SIZES)
def test_only_the_root_gets_the_result_and_with_the_same_bits(size):
    q, k, v = arrays()

    def call(comm):
        part = slice(comm.rank, None, comm.size)
        everywhere = treeattn.decode(q, k[:, :, part], v[:, :, part], comm=comm)
        for root in range(comm.size):
            out = treeattn.decode(q, k[:, :, part], v[:, :, part], comm=comm, root=root)
            pair = treeattn.decode(q, k[:, :, part], v[:, :, part], comm=comm, root=root, return_lse=True)
            if comm.rank == root:
                assert out.tobytes() == pair[0].tobytes() == everywhere.tobytes()
            else:
                assert out is None
                assert pair == (None, None)
        return comm.rank

    assert on_ranks(size, call) == list(range(size))


def test_a_bare_transport_is_wrapped_once_and_remembered():
    q, k, v = arrays()

    def rank(transport):
        first = treeattn.wrapping.as_tree_comm(transport)
        out = treeattn.decode(q, k[:, :, transport.rank :: 2], v[:, :, transport.rank :: 2], comm=transport)
        assert treeattn.wrapping.as_tree_comm(transport) is first
        return out

    one, other = run_ranks(2, rank)
    assert one.tobytes() == other.tobytes()


WRONG = {
    "k of another width": ({"k": np.zeros((B, HKV, 5, D + 1), np.float32)}, "k: expected q's width of 8"),
    "k that is no array": ({"k": "keys"}, "k: expected"),
    "q with three axes": ({"q": np.zeros((B, HQ, D), np.float32)}, "q: expected four axes"),
    "v of other tokens": ({"v": np.zeros((B, HKV, 1, DV), np.float32)}, "v: expected k's number of tokens"),
    "a NaN scale": ({"scale": float("nan")}, "scale: expected a finite number"),
    "an unknown backend": ({"backend": "abacus"}, "backend: expected one of"),
    "a sink of another shape": ({"sink": np.zeros(HQ + 1)}, "sink: expected shape"),
    "a root out of range": ({"root": 99}, "root: expected None or a rank from 0 to"),
    "a causal for each row": ({"causal": np.array([True, False])}, "causal: expected True or False"),
    "causal without positions": ({"causal": True}, "q_pos: expected global positions"),
    "kv_len beyond the shard": ({"kv_len": [99] * B}, "kv_len: expected lengths from 0 to"),
    "other query heads": ({"q": np.zeros((B, 2 * HQ, TQ, D), np.float32)}, "q.shape: expected the same on every rank"),
    "another dtype of q": ({"q": np.zeros((B, HQ, TQ, D), np.float16)}, "q.dtype: expected the same on every rank"),
    "another scale": ({"scale": 2.0}, "scale: expected the same on every rank, got 0.35"),
    "another root": ({"root": 0}, "root: expected the same on every rank"),
    "a sink of its own": ({"sink": np.ones(HQ)}, "sink: expected the same on every rank"),
    "other widths of v": (
        {"v": np.zeros((B, HKV, 10, DV + 1), np.float32)},
        "v.width: expected the same on every rank",
    ),
}


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("size", [2, 5])
def test_one_wrong_rank_is_one_error_everywhere_and_all_live_on(wrong, size):
    change, text = WRONG[wrong]
    q, k, v = arrays()

    def call(comm):
        shard = {"q": q, "k": k[:, :, :10], "v": v[:, :, :10]}
        mine = shard | change if comm.rank == size - 1 else shard
        seen = [outcome(lambda: treeattn.decode(**mine, comm=comm))]  # the very first call
        good = treeattn.decode(**shard, comm=comm)
        seen.append(outcome(lambda: treeattn.decode(**mine, comm=comm)))  # and one in the middle of good ones
        again = treeattn.decode(**shard, comm=comm)
        assert again.tobytes() == good.tobytes()
        return seen

    for first, later in on_ranks(size, call):
        assert text in first
        assert text in later
        assert first.startswith("InputError: ")


def test_the_error_of_another_rank_says_whose_it_is():
    q, k, v = arrays()

    def call(comm):
        scale = float("nan") if comm.rank == 1 else None
        return outcome(lambda: treeattn.decode(q, k, v, comm=comm, scale=scale))

    own = "InputError: scale: expected a finite number, got nan"
    other = own + " (rank 1 on host b)"
    assert on_ranks(3, call, hosts=["a", "b", "b"]) == [other, own, other]


def test_a_kernel_that_fails_on_one_rank_is_heard_of_on_all(exhausted):
    q, k, v = arrays()

    def call(comm):
        backend = exhausted if comm.rank == 0 else None
        if comm.rank == 0:
            with pytest.raises(MemoryError, match="no room"):
                treeattn.decode(q, k, v, comm=comm, backend=backend)
            return "own"
        return outcome(lambda: treeattn.decode(q, k, v, comm=comm, backend=backend))

    first, second = on_ranks(2, call, hosts=["a", "b"])
    assert first == "own"
    assert second == "CommError: rank 0 on host a failed with MemoryError: no room"


def test_check_compares_the_queries_themselves(monkeypatch):
    q, k, v = arrays()

    def call(comm):
        return outcome(lambda: treeattn.decode(q + (comm.rank == 2), k, v, comm=comm))

    assert on_ranks(3, call) == ["gave ndarray"] * 3
    monkeypatch.setenv("TREEATTN_CHECK", "1")
    for text in on_ranks(3, call):
        assert text.startswith("InputError: q: expected the same on every rank")


def test_a_check_that_one_rank_alone_is_to_make_is_named(monkeypatch):
    q, k, v = arrays()
    wanted = threading.local()  # ranks are threads here, which share their environment
    monkeypatch.setattr(distributed, "checks", lambda: wanted.here)

    def call(comm):
        wanted.here = comm.rank == 1
        return outcome(lambda: treeattn.decode(q, k, v, comm=comm))

    text = "InputError: TREEATTN_CHECK: expected the same on every rank, got None on ranks 0, 2 and 1 on rank 1"
    assert on_ranks(3, call) == [text] * 3


@pytest.mark.parametrize("value", ["true", "2", " 1"])
def test_a_check_is_on_or_off(monkeypatch, value):
    q, k, v = arrays()
    monkeypatch.setenv("TREEATTN_CHECK", value)
    with pytest.raises(errors.InputError, match=f"^TREEATTN_CHECK: expected 0 or 1, got '{value}'$"):
        treeattn.decode(q, k, v, comm=None)


def test_check_takes_queries_in_any_byte_order(monkeypatch):
    monkeypatch.setenv("TREEATTN_CHECK", "1")
    q, k, v = arrays()

    def call(comm):
        mine = q.astype(">f4") if comm.rank == 1 else q
        return outcome(lambda: treeattn.decode(mine, k, v, comm=comm))

    assert on_ranks(3, call) == ["gave ndarray"] * 3


def test_other_arguments_from_call_to_call_are_agreed_on_again():
    q, k, v = arrays()

    def call(comm):
        part = slice(comm.rank, None, comm.size)
        for tokens in (1, 3, 1, 2, 3, 1):
            for dtype in (np.float32, np.float64):
                shard = [array.astype(dtype) for array in (q[:, :, :tokens], k[:, :, part], v[:, :, part])]
                out, lse = treeattn.decode(*shard, comm=comm, return_lse=True)
                assert_attention((out, lse), q[:, :, :tokens].astype(dtype), k.astype(dtype), v.astype(dtype))
        return True

    assert on_ranks(3, call) == [True] * 3
