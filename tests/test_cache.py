"""`ShardedKVCache` on ranks that are threads, against one array that holds everything.

The tests of cards run this very file with caches of cards: what makes a cache here is the fixture `make`.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import errors
from treeattn.caching import stock
from treeattn.caching.shard import Shard
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention

B, HQ, HKV, D, DV = 2, 4, 2, 8, 5
SHAPE = {"batch": B, "kv_heads": HKV, "head_dim": D, "v_head_dim": DV}


def tokens(count: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((B, HKV, count, width), dtype=np.float32) for width in (D, DV))


def queries(count: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal((B, HQ, count, D), dtype=np.float32)


@pytest.fixture(scope="module")
def make():
    """Give what makes a cache."""
    return treeattn.ShardedKVCache


def on_ranks(size: int, call: Any) -> list[Any]:
    def rank(transport: Any) -> Any:
        with treeattn.TreeComm(transport) as comm:
            return call(comm)

    return run_ranks(size, rank, timeout=120)  # the first ones compile


def outcome(call: Any) -> str:
    try:
        return f"gave {type(call()).__name__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 9)),
        st.tuples(st.just("prefill"), st.integers(0, 30)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
        st.tuples(st.just("decode"), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=8,
)


def check_history(make, size, block_size, steps, dtype):
    """Do ``steps`` to a cache, and compare each decode with attention over one array."""
    stored = np.float32 if dtype == "float32" else ml_dtypes.bfloat16

    def call(comm):
        cache = make(comm, **SHAPE, dtype=dtype, block_size=block_size, capacity=400)
        k, v = (array[:, :, :0] for array in tokens(0))
        for number, (word, value) in enumerate([*steps, ("decode", 1)]):
            if word == "truncate":
                length = int(value * cache.length)
                cache.truncate(length)
                k, v = k[:, :, :length], v[:, :, :length]
            elif word == "decode":
                check_decode(cache, k, v, value)
            else:
                new = tokens(value, seed=number)
                add(cache, comm, word, new, number)
                k, v = (np.concatenate(pair, axis=2) for pair in zip((k, v), new, strict=True))
            assert cache.length == k.shape[2]
        return cache.local_length, cache.positions

    def check_decode(cache, k, v, count):
        count = min(count, k.shape[2]) or 1
        q = queries(count)
        got = cache.decode(q, return_lse=True)
        where = {"q_pos": np.arange(k.shape[2] - count, k.shape[2]), "kv_pos": 0}
        assert_attention(got, q, k.astype(stored), v.astype(stored), causal=True, **where)

    def add(cache, comm, word, new, seed):
        if word == "append":
            cache.append(*new)
            return
        ends = np.sort(np.random.default_rng(seed).integers(0, new[0].shape[2] + 1, comm.size - 1))
        piece = slice([0, *ends][comm.rank], [*ends, None][comm.rank])
        cache.prefill(*(array[:, :, piece] for array in new))

    held = on_ranks(size, call)
    positions = np.sort(np.concatenate([where for _, where in held]))
    assert positions.tolist() == list(range(sum(length for length, _ in held)))


HISTORIES = {
    "size": st.integers(1, 6),
    "block_size": st.integers(1, 4),
    "steps": STEPS,
    "dtype": st.sampled_from(["float32", "bfloat16"]),
}


@given(**HISTORIES)
@settings(deadline=None, max_examples=25)
def test_any_history_decodes_like_the_whole_sequence(make, size, block_size, steps, dtype):
    check_history(make, size, block_size, steps, dtype)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_no_rank_gets_all_the_new_tokens(make, size):
    def call(comm):
        cache = make(comm, **SHAPE, block_size=4, capacity=4000)
        for seed in range(50):
            cache.append(*tokens(1 + seed % 7, seed))
        return cache.local_length

    held = on_ranks(size, call)
    assert max(held) - min(held) <= 4


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_layout_window_softcap_sink_and_root(make, layout):
    turn = (lambda array: array.swapaxes(1, 2)) if layout == "bthd" else (lambda array: array)
    (k, v), q, sink = tokens(60), queries(2), np.linspace(-1, 1, HQ)
    options = {"window": (9, 0), "softcap": 3.0, "scale": 0.7, "sink": sink}

    def call(comm):
        cache = make(comm, **SHAPE, block_size=3, capacity=60, layout=layout)
        cache.append(turn(k), turn(v))
        return cache.decode(turn(q), root=1, return_lse=True, **options)

    nothing, got, nobody = on_ranks(3, call)
    assert nothing == nobody == (None, None)
    assert_attention(got, turn(q), turn(k), turn(v), layout=layout, q_pos=[58, 59], kv_pos=0, causal=True, **options)


def test_queries_may_stand_anywhere(make):
    (k, v), q = tokens(40), queries(3)

    def call(comm):
        cache = make(comm, **SHAPE, block_size=2, capacity=40)
        cache.append(k, v)
        return cache.decode(q, q_pos=[3, 39, 17], return_lse=True)

    for got in on_ranks(3, call):
        assert_attention(got, q, k, v, q_pos=np.array([3, 39, 17]), kv_pos=0, causal=True)


@pytest.mark.parametrize("size", [1, 3])
def test_rows_hide_their_padding_by_a_mask_of_local_tokens(make, size):
    (k, v), (more_k, more_v), q = tokens(40), tokens(5, 2), queries(2)
    padding = np.array([0, 23])  # before each row's prompt, on ranks that then have none of its tokens too
    k[1, :, :23] = v[1, :, :23] = np.nan

    def call(comm):
        cache = make(comm, **SHAPE, block_size=4, capacity=60)
        first, last = 40 * comm.rank // size, 40 * (comm.rank + 1) // size
        cache.prefill(k[:, :, first:last], v[:, :, first:last])
        cache.append(more_k, more_v)
        seen = cache.positions >= padding[:, None, None, None]
        return cache.decode(q, mask=seen, return_lse=True)

    whole = np.concatenate([k, more_k], axis=2), np.concatenate([v, more_v], axis=2)
    seen = np.arange(45) >= padding[:, None, None, None]
    for got in on_ranks(size, call):
        assert_attention(got, q, *whole, mask=seen, q_pos=[43, 44], kv_pos=0, causal=True)


def test_a_mask_of_other_tokens_than_a_ranks_own_is_an_error_on_all(make):
    def call(comm):
        cache = make(comm, **SHAPE, block_size=4, capacity=60)
        cache.append(*tokens(9))
        return outcome(lambda: cache.decode(queries(1), mask=np.ones(cache.local_length + (comm.rank == 1), bool)))

    told, raised = on_ranks(2, call)
    assert raised.startswith("InputError: mask: expected a shape that broadcasts to ")
    assert told == f"{raised} (rank 1 on host localhost)"


def test_lopsided_prefill_grows_past_a_ranks_share(make):
    k, v = tokens(90)

    def call(comm):
        cache = make(comm, **SHAPE, block_size=1, capacity=100)
        mine = slice(0, 90 if comm.rank == 2 else 0)
        cache.prefill(k[:, :, mine], v[:, :, mine])
        cache.append(*tokens(10, seed=5))
        return cache.decode(queries(1), return_lse=True), cache.local_length

    rest = tokens(10, seed=5)
    for (got, held), length in zip(on_ranks(4, call), [4, 3, 90, 3], strict=True):
        assert_attention(got, queries(1), np.concatenate([k, rest[0]], 2), np.concatenate([v, rest[1]], 2))
        assert held == length


def test_bytes_are_those_of_the_tokens_held(make):
    cache = make(None, batch=1, kv_heads=2, head_dim=8, dtype="bfloat16", capacity=64)
    cache.append(*(np.ones((1, 2, 10, 8), np.float32) for _ in "kv"))
    assert cache.nbytes == 10 * 2 * 8 * 2 * 2
    assert "length=10 of 64" in repr(cache)


BAD_CACHES = {
    "batch": (0, "an integer of at least 1"),
    "kv_heads": (1.5, "an integer of at least 1"),
    "head_dim": (True, "an integer of at least 1"),
    "v_head_dim": (-1, "an integer of at least 1"),
    "dtype": ("int8", "float32"),
    "block_size": (0, "an integer of at least 1"),
    "capacity": (None, "an integer of at least 1"),
    "layout": ("thbd", "'bhtd' or 'bthd'"),
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_each_argument_of_a_cache_is_checked(make, name):
    value, expected = BAD_CACHES[name]
    with pytest.raises(errors.InputError, match=f"^{name}: expected .*{expected}"):
        make(None, **{**SHAPE, "capacity": 10, name: value})


@pytest.mark.parametrize("name", BAD_CACHES)
def test_a_cache_that_one_rank_cannot_make_is_an_error_everywhere(make, name):
    value, expected = BAD_CACHES[name]

    def call(comm):
        wrong = {name: value} if comm.rank == 1 else {}
        seen = outcome(lambda: make(comm, **{**SHAPE, "capacity": 10, **wrong}))
        cache = make(comm, **SHAPE, capacity=10)
        cache.append(K, V)
        return seen, cache.decode(queries(1), return_lse=True)

    for seen, got in on_ranks(3, call):
        assert re.match(f"InputError: {name}: expected .*{expected}", seen)
        assert_attention(got, queries(1), K, V)


@pytest.mark.parametrize(
    "other",
    [{"block_size": 3}, {"capacity": 99}, {"dtype": "float16"}, {"layout": "bthd"}, {"head_dim": 4}, {"batch": 1}],
    ids=str,
)
def test_caches_that_differ_between_ranks_are_an_error(make, other):
    (name,) = other

    def call(comm):
        return outcome(lambda: make(comm, **{**SHAPE, "capacity": 10, **(other if comm.rank == 1 else {})}))

    for seen in on_ranks(3, call):
        assert re.match(f"InputError: {name}: expected the same on every rank, got .* {other[name]} on rank 1$", seen)


K, V = tokens(4)


class Unreadable:
    def __array__(self, *_, **__):
        raise KeyError("gone")


BAD_TOKENS = {
    "a wrong width": ((K[..., :-1], V), r"k: expected shape \(2, 2, tokens, 8\), got shape \(2, 2, 4, 7\)"),
    "a missing axis": ((K[0], V), "k: expected shape"),
    "other heads of v": ((K, V[:, :1]), "v: expected shape"),
    "other tokens of v": ((K, V[:, :, :3]), "v: expected k's number of tokens of 4, got 3"),
    "integers": ((K.astype(int), V), "k: expected dtype"),
    "no array": ((None, V), "k: expected"),
    "too many": (tokens(30), "k: expected at most 20 more tokens, .* capacity of 20"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_one_process_raises_at_once_and_keeps_what_it_had(make, name):
    new, text = BAD_TOKENS[name]
    cache = make(None, **SHAPE, capacity=20)
    for add in (cache.append, cache.prefill):
        with pytest.raises(errors.InputError, match=text):
            add(*new)
        assert cache.length == 0


@pytest.mark.parametrize("name", BAD_TOKENS)
@pytest.mark.parametrize("word", ["append", "prefill"])
def test_a_wrong_piece_on_one_rank_is_one_error_everywhere(make, name, word):
    new, text = BAD_TOKENS[name]

    def call(comm):
        cache = make(comm, **SHAPE, block_size=1, capacity=20)
        mine = new if comm.rank == 1 else (K, V)
        if word == "append":
            cache.append(*mine)
            seen = outcome(lambda: cache.decode(queries(1)))
            cache.truncate(0)
        else:
            seen = outcome(lambda: cache.prefill(*mine))
        assert cache.length == 0
        cache.append(K, V)
        return seen, cache.decode(queries(1), return_lse=True)

    for seen, got in on_ranks(3, call):
        assert re.match(f"InputError: {text}", seen) or (name == "too many" and "k: expected at most" in seen)
        assert_attention(got, queries(1), K, V)


@pytest.mark.parametrize("word", ["append", "prefill"])
def test_tokens_that_cannot_be_read_are_heard_of_everywhere(make, word):
    def call(comm):
        cache = make(comm, **SHAPE, block_size=1, capacity=20)
        seen = outcome(lambda: getattr(cache, word)(Unreadable() if comm.rank == 1 else K, V))
        seen = outcome(lambda: cache.decode(queries(1))) if word == "append" else seen
        cache.truncate(0)
        cache.append(K, V)
        return seen, cache.decode(queries(1), return_lse=True)

    for seen, got in on_ranks(3, call):
        assert "KeyError: 'gone'" in seen
        assert_attention(got, queries(1), K, V)


@pytest.mark.parametrize("word", ["append", "prefill"])
def test_a_rank_without_room_for_its_share_is_heard_of_everywhere(make, word, monkeypatch):
    reserve, calls = Shard.reserve, []

    def full(shard, *sizes):
        if threading.current_thread().name == "rank 1":
            calls.append(sizes)
            if len(calls) == 2:
                raise MemoryError("no room")
        return reserve(shard, *sizes)

    monkeypatch.setattr(Shard, "reserve", full)
    whole = tokens(6)

    def call(comm):
        cache = make(comm, **SHAPE, block_size=3, capacity=20)
        cache.append(*(each[:, :, :2] for each in whole))
        added = [each[:, :, 2:4] if word == "append" or comm.rank == 0 else each[:, :, :0] for each in whole]
        getattr(cache, word)(*added)
        seen = outcome(lambda: cache.decode(queries(1)))
        cache.truncate(2)
        cache.append(*(each[:, :, 2:] for each in whole))
        return seen, cache.decode(queries(1), return_lse=True)

    for seen, got in on_ranks(3, call):
        assert "MemoryError: no room" in seen
        assert_attention(got, queries(1), *whole)


def test_after_a_failed_append_ranks_cut_back_to_one_length_deal_alike(make):
    whole = tokens(20)

    def call(comm):
        cache = make(comm, **SHAPE, block_size=16, capacity=20)
        cache.append(*(each[:, :, :5] for each in whole))
        cache.append(*(None if comm.rank == 1 else each[:, :, 5:8] for each in whole))
        seen = outcome(lambda: cache.decode(queries(1)))
        cache.truncate(5)
        cache.append(*(each[:, :, 5:] for each in whole))
        return seen, cache.decode(queries(1), return_lse=True)

    for seen, got in on_ranks(3, call):
        assert seen.startswith("InputError: k: expected an array")
        assert_attention(got, queries(1), *whole)


def test_ranks_that_dealt_differently_hear_of_it(make):
    def call(comm):
        cache = make(comm, **SHAPE, block_size=4, capacity=20)
        cache.append(*tokens(2))
        if comm.rank == 2:
            cache.truncate(2)  # which no other rank does
        cache.append(*tokens(2))
        return outcome(lambda: cache.decode(queries(1)))

    for seen in on_ranks(3, call):
        assert seen == (
            "InputError: tokens of each rank: expected the same on every rank, "
            "got (4, 0, 0) on ranks 0, 1 and (2, 2, 0) on rank 2"
        )


def test_tokens_beyond_the_range_of_the_storage_become_infinite_in_silence(make):
    cache = make(None, **SHAPE, dtype="float16", capacity=20)
    cache.append(K, 1e9 * V)
    assert np.isinf(cache.decode(queries(1))).any()


def test_queries_that_are_no_array_are_named(make):
    cache = make(None, **SHAPE, capacity=20)
    with pytest.raises(errors.InputError, match=r"^q: expected an array, got list"):
        cache.decode([[1], [2, 3]])


def test_ranks_that_appended_differently_hear_of_it(make):
    def call(comm):
        cache = make(comm, **SHAPE, capacity=20)
        cache.append(*tokens(3 + (comm.rank == 2)))
        return outcome(lambda: cache.decode(queries(1)))

    for seen in on_ranks(3, call):
        assert seen == (
            "InputError: cache length: expected the same on every rank, got 3 on ranks 0, 1 and 4 on rank 2"
        )


@pytest.mark.parametrize("length", [-1, 5, 1.5, None])
def test_truncate_takes_a_length_that_is_there(make, length):
    cache = make(None, **SHAPE, capacity=20)
    cache.append(K, V)
    with pytest.raises(errors.InputError, match=r"^length: expected"):
        cache.truncate(length)
    assert cache.length == 4


def test_causal_is_checked_where_it_makes_no_difference_too(make):
    cache = make(None, **SHAPE, capacity=20)
    cache.append(K, V)
    with pytest.raises(errors.InputError, match="causal: expected True or False, got 'yes'"):
        cache.decode(queries(1), causal="yes")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, 4, 1, 6), "q: expected the cache's width of 8, got 6"),
        ((2, 4, 1, 8), "q: expected the cache's batch of 1, got 2"),
        ((1, 3, 1, 8), "q: expected a number of heads that the cache's 2 divide, got 3"),
        ((4, 1, 8), "q: expected four axes"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_queries_that_do_not_fit_are_blamed_and_not_the_keys(make, shape, text, layout):
    cache = make(None, batch=1, kv_heads=2, head_dim=8, capacity=4, layout=layout)
    q = np.zeros(shape, np.float32)
    q = q.swapaxes(1, 2) if layout == "bthd" and q.ndim == 4 else q
    with pytest.raises(errors.InputError, match=f"^{re.escape(text)}"):
        cache.decode(q)


IN_USE = "^this cache is in use by another thread"


def begun_in(cache, place, call, monkeypatch):
    """Let ``call`` begin in the middle of what comes by ``place`` of the cache's tokens, as another thread's may."""
    stock, found = cache._stock, []
    original = getattr(stock, place)

    def meanwhile(*arguments):
        monkeypatch.setattr(stock, place, original)
        found.append(outcome(call))
        return original(*arguments)

    monkeypatch.setattr(stock, place, meanwhile)
    return found


@pytest.mark.parametrize("word", ["append", "truncate", "prefill"])
def test_what_changes_beside_a_decode_is_refused(make, word, monkeypatch):
    cache, (k, v), q = make(None, **SHAPE, capacity=100), tokens(9), queries(1)
    cache.append(k, v)
    change = {"append": lambda: cache.append(k, v), "prefill": lambda: cache.prefill(k, v)}
    found = begun_in(cache, "keys_and_values", change.get(word, lambda: cache.truncate(2)), monkeypatch)
    assert_attention(cache.decode(q, return_lse=True), q, k, v)
    assert re.match(IN_USE, found[0].removeprefix("CommError: "))
    assert cache.length == 9


@pytest.mark.parametrize("word", ["append", "prefill"])
def test_a_decode_beside_what_changes_is_refused_and_sees_no_token_that_is_not_there(make, word, monkeypatch):
    cache, (k, v), q = make(None, **SHAPE, capacity=100), tokens(9), queries(1)
    seen = begun_in(cache, "_write", lambda: cache.length, monkeypatch)
    getattr(cache, word)(k, v)
    found = begun_in(cache, "_write", lambda: cache.decode(q), monkeypatch)
    getattr(cache, word)(k, v)
    assert seen == ["gave int"]
    assert re.match(IN_USE, found[0].removeprefix("CommError: "))
    both = [np.concatenate([each, each], axis=2) for each in (k, v)]
    assert_attention(cache.decode(q, return_lse=True), q, *both)


@pytest.mark.parametrize("word", ["decode", "attend", "prefill"])
def test_a_change_that_was_refused_on_one_rank_is_heard_of_everywhere(make, word, monkeypatch):
    def call(comm):
        cache, (k, v), q = make(comm, **SHAPE, block_size=2, capacity=100), tokens(9), queries(1)
        cache.append(k, v)
        if comm.rank == 1:
            begun_in(cache, "keys_and_values", lambda: cache.append(k, v), monkeypatch)
        assert_attention(cache.decode(q, return_lse=True), q, k, v)
        calls = {"attend": lambda: cache.attend(q, q_pos=[8]), "prefill": lambda: cache.prefill(k, v)}
        told = outcome(calls.get(word, lambda: cache.decode(q)))
        assert_attention(cache.decode(q, return_lse=True), q, k, v)
        return told

    told = on_ranks(3, call)
    if word == "attend":
        told = told[1:2]  # on cards, the others have an error of their own
    assert all(re.match("CommError: this cache is in use by another thread", each) for each in told)


def spoilt(array, where):
    changed = array.copy()
    changed[where] += 1
    return changed


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("next_call", ["decode", "prefill"])
def test_check_compares_what_is_appended(monkeypatch, make, which, next_call):
    """By the last token of all, which only one rank keeps."""
    monkeypatch.setenv("TREEATTN_CHECK", "1")
    k, v = tokens(7)

    def call(comm):
        cache = make(comm, **SHAPE, capacity=100, block_size=2)
        calls = {"decode": lambda: cache.decode(queries(1)), "prefill": lambda: cache.prefill(*tokens(comm.rank))}
        cache.append(k, v)
        seen = [outcome(calls[next_call])]
        cache.truncate(7)
        wrong = {each: spoilt(array, np.s_[-1, -1, -1, -1]) for each, array in (("k", k), ("v", v))}
        mine = {"k": k, "v": v} | ({which: wrong[which]} if comm.rank == 1 else {})
        cache.append(mine["k"], mine["v"])
        seen.append(outcome(calls[next_call]))
        cache.truncate(7)
        cache.append(k.astype(np.float64), v)
        return [*seen, outcome(calls[next_call])]

    for first, second, third in on_ranks(3, call):
        assert first.startswith("gave ")
        assert second.startswith("InputError: k and v of append: expected the same on every rank, got ")
        assert third.startswith("gave ")


def test_an_append_that_one_rank_alone_has_checked_is_named(monkeypatch, make):
    checked = threading.local()  # ranks are threads here, which share their environment
    monkeypatch.setattr(stock, "checks", lambda: checked.here)

    def call(comm):
        checked.here = comm.rank == 1
        cache = make(comm, **SHAPE, capacity=100)
        cache.append(*tokens(3))
        return outcome(lambda: cache.decode(queries(1)))

    text = "InputError: TREEATTN_CHECK: expected the same on every rank, got None on ranks 0, 2 and 1 on rank 1"
    assert on_ranks(3, call) == [text] * 3
