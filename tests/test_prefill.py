"""`prefill` on ranks that are threads: each rank's rows, by every algorithm, and tokens dealt out evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import errors
from treeattn.arguments.spec import Options
from treeattn.prompt import ALGORITHMS
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention

B, HQ, HKV, T, D, DV = 2, 4, 2, 48, 8, 6


def arrays(seed: int = 0, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = (B, HQ, T, D), (B, HKV, T, D), (B, HKV, T, DV)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def on_ranks(size: int, call: Any, hosts: Any = None) -> list[Any]:
    def rank(transport: Any) -> Any:
        with treeattn.TreeComm(transport, hosts=hosts) as comm:
            return call(comm)

    return run_ranks(size, rank, timeout=120)  # the first ones compile


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zigzag_prompts_give_each_rank_its_rows_and_the_counters_equal_the_formula(algorithm, size):
    q, k, v = arrays(size)

    def call(comm):
        at = treeattn.zigzag(T, size, comm.rank)
        shard = [np.ascontiguousarray(array[:, :, at]) for array in (q, k, v)]
        options = Options(causal=True, q_pos=at, kv_pos=at)
        prepared = ALGORITHMS[algorithm].prepare(*shard, options, comm=comm, return_lse=True, replicated=False)
        before = comm.stats
        prepared.run()
        cost = prepared.baseline.cost(prepared.problem)
        assert comm.stats - before == cost.stats(comm.rank)
        assert comm.usage.peak_bytes == cost.ranks[comm.rank].peak_bytes
        return at, prepared.result()

    for at, result in on_ranks(size, call, [f"host {rank % 3}" for rank in range(size)]):
        assert_attention(result, q[:, :, at], k, v, causal=True, q_pos=at, kv_pos=np.arange(T))


@given(
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    size=st.integers(1, 8),
    seed=st.integers(0, 99),
    prefix=st.integers(0, 20),
    causal=st.booleans(),
    window=st.sampled_from([None, (4, 0), (None, 2), (7, None)]),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    layout=st.sampled_from(["bhtd", "bthd"]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
@settings(deadline=None, max_examples=30)
def test_any_deal_of_tokens_behind_any_cached_prefix(
    algorithm, size, seed, prefix, causal, window, softcap, sink, layout, dtype
):
    q, k, v = arrays(seed, dtype)
    owner = np.random.default_rng(seed).integers(0, size, T)
    options = {"causal": causal, "window": window, "softcap": softcap, "layout": layout}
    options["sink"] = np.linspace(-1, 1, HQ) if sink else None
    turn = (lambda array: array.swapaxes(1, 2)) if layout == "bthd" else (lambda array: array)

    def call(comm):
        keys = np.flatnonzero(owner == comm.rank)
        rows = keys[keys >= prefix]
        shard = turn(q[:, :, rows]), turn(k[:, :, keys]), turn(v[:, :, keys])
        places = {"q_pos": rows, "kv_pos": keys, "return_lse": True}
        return rows, treeattn.prefill(*shard, comm, algorithm=algorithm, **places, **options)

    for rows, result in on_ranks(size, call):
        places = {"q_pos": rows, "kv_pos": np.arange(T)}
        assert_attention(result, turn(q[:, :, rows]), turn(k), turn(v), **places, **options)


@given(tokens=st.integers(0, 300), size=st.integers(1, 16))
def test_zigzag_deals_every_token_once(tokens, size):
    dealt = [treeattn.zigzag(tokens, size, rank) for rank in range(size)]
    assert sorted(np.concatenate(dealt).tolist()) == list(range(tokens))
    assert all((np.diff(each) > 0).all() for each in dealt)


ZIGZAG = [
    ((-1, 2, 0), "tokens: expected an integer from 0 to 2305843009213693952, got -1"),
    ((2**70, 2, 0), "tokens: expected an integer from 0 to 2305843009213693952, got 1180591620717411303424"),
    ((8.0, 2, 0), "tokens: expected an integer from 0 to 2305843009213693952, got 8.0"),
    ((8, 0, 0), "size: expected an integer of at least 1, got 0"),
    ((8, True, 0), "size: expected an integer of at least 1, got True"),
    ((8, 2, 2), "rank: expected an integer from 0 to 1, got 2"),
    ((8, 2, -1), "rank: expected an integer from 0 to 1, got -1"),
    ((8, 2, None), "rank: expected an integer from 0 to 1, got None"),
]


@pytest.mark.parametrize(("arguments", "message"), ZIGZAG)
def test_zigzag_names_what_is_no_rank_of_any(arguments, message):
    with pytest.raises(errors.InputError) as caught:
        treeattn.zigzag(*arguments)
    assert str(caught.value) == message


def test_zigzag_takes_no_longer_for_more_ranks():
    assert treeattn.zigzag(8, 2**70, 0).tolist() == [7]


@given(each=st.integers(1, 20), size=st.integers(1, 16))
def test_zigzag_gives_every_rank_as_many_visible_pairs(each, size):
    pairs = [int((treeattn.zigzag(2 * each * size, size, rank) + 1).sum()) for rank in range(size)]
    assert len(set(pairs)) == 1


@pytest.mark.parametrize("algorithm", ["ring", "dist_flash"])
def test_zigzag_gives_every_kernel_the_same_work(algorithm):
    q, k, v = arrays()

    def call(comm, at):
        treeattn.prefill(*(array[:, :, at] for array in (q, k, v)), comm, algorithm=algorithm, q_pos=at, kv_pos=at)
        return comm.usage.products

    work = on_ranks(4, lambda comm: call(comm, treeattn.zigzag(T, 4, comm.rank)))
    assert work == [T * T // 4] * 4
    pieces = on_ranks(4, lambda comm: call(comm, np.arange(12 * comm.rank, 12 * comm.rank + 12)))
    expected = [144 * (rank + 1) for rank in range(4)] if algorithm == "ring" else [360] * 4
    assert pieces == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_cache_attends_for_each_ranks_own_rows(algorithm):
    q, k, v = arrays()

    def call(comm):
        cache = treeattn.ShardedKVCache(
            comm, batch=B, kv_heads=HKV, head_dim=D, v_head_dim=DV, capacity=T, block_size=5
        )
        cache.append(k[:, :, :20], v[:, :, :20])
        mine = treeattn.zigzag(28, comm.size, comm.rank) + 20
        cache.append(k[:, :, 20:], v[:, :, 20:])
        return mine, cache.attend(q[:, :, mine], q_pos=mine, algorithm=algorithm, return_lse=True)

    for mine, result in on_ranks(3, call):
        assert_attention(result, q[:, :, mine], k, v, causal=True, q_pos=mine, kv_pos=np.arange(T))


@pytest.mark.parametrize("wrong", [False, True])
def test_check_lets_rows_differ_from_rank_to_rank_and_not_what_is_appended(monkeypatch, wrong):
    monkeypatch.setenv("TREEATTN_CHECK", "1")
    q, k, v = arrays()

    def call(comm):
        cache = treeattn.ShardedKVCache(comm, batch=B, kv_heads=HKV, head_dim=D, v_head_dim=DV, capacity=99)
        cache.append(k, v + (wrong and comm.rank == 1))
        return outcome(lambda: cache.attend(q[:, :, comm.rank :], q_pos=range(comm.rank, T)))

    expected = "InputError: k and v of append: expected the same on every rank" if wrong else "gave "
    assert all(each.startswith(expected) for each in on_ranks(3, call))


def test_a_wrong_append_is_reported_by_attend_on_every_rank():
    q, k, v = arrays()

    def call(comm):
        cache = treeattn.ShardedKVCache(comm, batch=B, kv_heads=HKV, head_dim=D, v_head_dim=DV, capacity=T)
        cache.append(*((k[..., :3], v) if comm.rank == 1 else (k, v)))
        return outcome(lambda: cache.attend(q[:, :, :2], q_pos=[0, 1]))

    for seen in on_ranks(3, call):
        assert seen.startswith("InputError: k: expected shape")


def outcome(call: Any) -> str:
    try:
        return f"gave {type(call()).__name__}"
    except errors.TreeattnError as error:
        return f"{type(error).__name__}: {error}"


WRONG = {
    "an unknown algorithm": ({"algorithm": "spiral"}, "algorithm: expected 'ring' or"),
    "no positions": ({"q_pos": None}, "q_pos: expected global positions"),
    "positions of other rows": ({"q_pos": np.arange(3)}, "q_pos: expected shape"),
    "another window": ({"window": (3, 0)}, "window: expected the same on every rank"),
    "other heads": ({"q": np.zeros((B, 2 * HQ, 6, D), np.float32)}, "q.shape without tokens: expected the same"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_wrong_rank_is_one_error_everywhere_and_all_live_on(algorithm, wrong):
    change, text = WRONG[wrong]
    q, k, v = arrays()

    def call(comm):
        at = np.arange(6 * comm.rank, 6 * comm.rank + 6)
        good = {"q": q[:, :, at], "k": k[:, :, at], "v": v[:, :, at], "q_pos": at, "kv_pos": at, "algorithm": algorithm}
        mine = good | change if comm.rank == 1 else good
        seen = outcome(lambda: treeattn.prefill(**mine, comm=comm))
        assert outcome(lambda: treeattn.prefill(**good, comm=comm)) == "gave ndarray"
        return seen

    for seen in on_ranks(3, call):
        assert seen.startswith("InputError: ")
        assert text in seen
