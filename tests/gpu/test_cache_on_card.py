"""`ShardedKVCache` in device memory: every test of the host's cache, on fake cards, and what only cards have."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_card import FakeCard, FakeCardBackend, FaultingArray
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn.backends import device_memory
from treeattn.caching import stock
from treeattn.errors import BackendError, InputError
from treeattn.testing.oracle import assert_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_cache import *  # noqa: F403 - its tests are collected here too, with the fixture `make` below
from test_cache import HISTORIES, SHAPE, check_history, on_ranks, outcome, queries, tokens

del test_any_history_decodes_like_the_whole_sequence  # noqa: F821 - which would take its time; see below

WHERE = ["cards", "every other rank's card, from the host"]


@pytest.fixture(scope="module", params=WHERE)
def make(request: Any, emulator: Any) -> Any:
    """Give a class of caches on fake cards, one a rank, that takes and gives arrays of the host."""
    backends = [FakeCardBackend(FakeCard(emulator)) for _ in range(7)]

    class Cache(treeattn.ShardedKVCache):
        def __init__(self, comm: Any, **options: Any) -> None:
            rank = 0 if comm is None else comm.rank
            self.there = request.param == "cards" or rank % 2 == 1
            self.card = backends[rank].runtime
            super().__init__(comm, **options, **({"backend": backends[rank]} if self.there else {}))

        def moved(self, array: Any) -> Any:
            return self.card.upload(array) if request.param == "cards" and isinstance(array, np.ndarray) else array

        def append(self, k: Any, v: Any) -> None:
            super().append(self.moved(k), self.moved(v))

        def prefill(self, k: Any, v: Any) -> None:
            super().prefill(self.moved(k), self.moved(v))

        def decode(self, q: Any, **options: Any) -> Any:
            given_q = self.moved(q)
            found = super().decode(given_q, **options)
            each = found if isinstance(found, tuple) else (found,)
            assert {type(one) for one in each} <= {type(given_q), type(None)}, "results are of q's kind"
            here = tuple(one.get() if isinstance(one, FaultingArray) else one for one in each)
            return here if isinstance(found, tuple) else here[0]

    return Cache


FEW_KERNELS = {  # each type, and each size of a tile of queries, is another one to compile
    "dtype": st.just("float32"),
    "steps": HISTORIES["steps"].map(
        lambda steps: [(word, 3 if value > 1 else 1) if word == "decode" else (word, value) for word, value in steps]
    ),
}


@given(**{**HISTORIES, **FEW_KERNELS})
@settings(deadline=None, max_examples=8)
def test_any_history_on_cards_decodes_like_the_whole_sequence(
    make: Any, size: int, block_size: int, steps: Any, dtype: str
) -> None:
    check_history(make, size, block_size, steps, dtype)


# ---- what only cards have


@pytest.fixture
def backend(card: FakeCard) -> FakeCardBackend:
    return FakeCardBackend(card)


def filled(backend: Any, count: int = 9, **options: Any) -> Any:
    """Give a cache of one process that holds the first ``count`` of 40 tokens, and has room for the others."""
    cache = treeattn.ShardedKVCache(None, **{**SHAPE, "capacity": 100, "backend": backend, **options})
    cache.append(*(backend.runtime.upload(each) for each in tokens(40)))
    cache.truncate(count)
    return cache


def first(count: int) -> Any:
    """Give the tokens that `filled` leaves."""
    return tuple(each[:, :, :count] for each in tokens(40))


def on_card(card: FakeCard, *arrays: Any) -> list[FaultingArray]:
    return [card.upload(each) for each in arrays]


def test_tokens_of_the_card_are_written_without_a_copy_and_those_of_the_host_with_one_each(
    backend: Any, card: FakeCard
) -> None:
    cache = filled(backend)
    k, v = tokens(3)
    there = on_card(card, k, v)
    copies, launches = card.copies, card.launches
    cache.append(*there)
    assert (card.copies, card.launches) == (copies, launches + 1), "keys and values go in one launch"
    cache.append(k, v)
    cache.prefill(there[0], v)
    assert card.copies == copies + 3


def test_a_step_reads_the_cache_in_place(backend: Any, card: FakeCard) -> None:
    cache = filled(backend, 40)
    q = card.upload(queries(1))
    cache.decode(q)
    used, copies = card.used, card.copies
    cache.decode(q)
    small = card.used - used
    assert small < 4096, "the result, and no keys"
    assert card.copies == copies


def test_consecutive_positions_need_no_array_on_the_card(backend: Any, card: FakeCard) -> None:
    cache = filled(backend, 40)
    q = card.upload(queries(3))
    cache.decode(q)
    copies = card.copies
    assert_attention(
        tuple(each.get() for each in cache.decode(q, return_lse=True)), queries(3), *tokens(40), causal=True
    )
    assert card.copies == copies + 1 + 2, "where the queries stand, and what this test has fetched"


def test_other_positions_are_brought_to_the_card_once(emulator: Any) -> None:
    (k, v), q = tokens(40), queries(3)

    def call(comm: Any) -> Any:
        backend = FakeCardBackend(FakeCard(emulator))
        card: Any = backend.runtime
        cache = treeattn.ShardedKVCache(comm, **SHAPE, block_size=2, capacity=60, backend=backend)
        counted = []
        for piece in (slice(0, 30), slice(30, 30), slice(30, 38), slice(38, 40)):
            cache.append(*on_card(card, k[:, :, piece], v[:, :, piece]))
            there, copies = card.upload(q), card.copies
            cache.decode(there)
            staged = 2  # of the state, on its way to the other rank and back
            counted.append(card.copies - copies - staged)
        cache.truncate(33)
        cache.append(*on_card(card, k[:, :, 33:], v[:, :, 33:]))
        return counted, [each.get() for each in cache.decode(card.upload(q), return_lse=True)]

    for (counted, got), last in zip(on_ranks(2, call), ([1], [2]), strict=True):
        assert counted[1:] == [1, 2, *last], "where the queries stand, and once where a rank's new keys do"
        assert_attention(tuple(got), q, k, v, causal=True)


def test_memory_grows_with_the_tokens_up_to_the_share(backend: Any, card: FakeCard) -> None:
    cache = treeattn.ShardedKVCache(None, **SHAPE, capacity=1000, backend=backend)
    cache.decode(queries(1))  # which takes the memory that kernels work in
    before, row = card.used, 2 * 2 * (8 + 5) * 4  # heads of a token, and their bytes
    for _ in range(40):
        cache.append(*tokens(1))
    taken = card.used - before  # nothing is given back here: all that was ever asked for
    assert cache.nbytes == 40 * row
    assert taken < 4 * 64 * row + 2**17, "doubled to 64, after 32, 16, ..., and the tokens that came"
    full = treeattn.ShardedKVCache(None, **SHAPE, capacity=70, backend=backend)
    full.append(*tokens(60))
    full.append(*tokens(1))
    assert full._stock.shard.k.shape[2] == 70, "not 120"


def test_a_full_card_is_one_sentence_and_the_cache_is_as_it_was(backend: Any, card: FakeCard) -> None:
    cache, q = filled(backend, 30), queries(1)
    before = cache.decode(q)
    card.room = card.used + 5000
    with pytest.raises(MemoryError, match=r"^card 0 has no room for [\d,]+ bytes more: Out of memory allocating"):
        cache.append(*tokens(31))
    assert cache.length == 30
    assert cache.decode(q).tobytes() == before.tobytes()
    card.room = card.used + 2**20
    new = tokens(5, seed=3)
    cache.append(*new)
    whole = (np.concatenate(pair, axis=2) for pair in zip(first(30), new, strict=True))
    assert_attention(cache.decode(q, return_lse=True), q, *whole)


def test_a_full_card_of_one_rank_is_heard_of_everywhere(emulator: Any) -> None:
    def call(comm: Any) -> Any:
        backend = FakeCardBackend(FakeCard(emulator))
        card: Any = backend.runtime
        cache = treeattn.ShardedKVCache(comm, **SHAPE, block_size=4, capacity=100, backend=backend)
        cache.append(*tokens(8))
        cache.decode(queries(1))
        card.room = card.used + (1000 if comm.rank == 1 else 2**22)
        cache.append(*tokens(80))
        seen = outcome(lambda: cache.decode(queries(1)))
        cache.truncate(8)
        card.room = 2**26
        return seen, cache.decode(queries(1), return_lse=True)

    for seen, got in on_ranks(3, call):
        assert "MemoryError: card 0 has no room for" in seen
        assert_attention(got, queries(1), *tokens(8))


def test_a_long_prompt_of_the_host_goes_in_pieces(
    backend: Any, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "STAGED_BYTES", 2000)  # 208 bytes a token
    cache, (k, v), q = filled(backend, 0), tokens(50), queries(1)
    copies = card.copies
    cache.append(k, v)
    assert card.copies == copies + 2 * 6, "9 tokens at a time"
    assert_attention(cache.decode(q, return_lse=True), q, k, v)


# ---- where a cache is


@pytest.fixture
def following(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokens of a card lead to the fake one, as `home_of` and a call without ``backend`` find the real one."""
    home_of, find = stock.home_of, treeattn.local.find
    monkeypatch.setattr(stock, "home_of", lambda array: backend if isinstance(array, FaultingArray) else home_of(array))
    monkeypatch.setattr("treeattn.local.find", lambda name, spec=None: find(backend if name == "auto" else name, spec))


@pytest.mark.usefixtures("following")
def test_a_cache_that_was_not_told_follows_its_first_tokens(card: FakeCard) -> None:
    (k, v), q = tokens(6), queries(1)
    there = on_card(card, k, v, q)
    cache = treeattn.ShardedKVCache(None, **SHAPE, capacity=20)
    assert isinstance(cache.decode(there[2]), FaultingArray), "of an empty cache too"
    assert isinstance(cache.decode(q), np.ndarray)
    cache.append(*there[:2])
    assert repr(cache).endswith("on its card)")
    cache.truncate(0)
    cache.append(k, v)  # where it is by now
    out, lse = cache.decode(there[2], return_lse=True)
    assert_attention((out.get(), lse.get()), q, k, v)


@pytest.mark.usefixtures("following")
def test_a_cache_of_the_host_takes_nothing_of_a_card(card: FakeCard) -> None:
    k, v, q = on_card(card, *tokens(4), queries(1))
    text = (
        r": expected an array in host memory, where this cache is, got one on a GPU; make the cache with backend='auto'"
    )
    told = treeattn.ShardedKVCache(None, **SHAPE, capacity=20, backend="cpu")
    led = treeattn.ShardedKVCache(None, **SHAPE, capacity=20)
    led.append(*tokens(4))
    for cache in (told, led):
        with pytest.raises(InputError, match=f"^k{text}"):
            cache.append(k, v)
        with pytest.raises(InputError, match=f"^v{text}"):
            cache.append(tokens(4)[0], v)
        with pytest.raises(InputError, match=f"^q{text}"):
            cache.decode(q)


def test_tokens_of_another_card_are_refused_before_a_kernel_follows_them(backend: Any, emulator: Any) -> None:
    other = FakeCard(emulator, number=3)
    cache = filled(backend)
    with pytest.raises(InputError, match=r"^v: expected an array on card 0, which .*, got one on card 3"):
        cache.append(tokens(2)[0], other.upload(tokens(2)[1]))
    with pytest.raises(InputError, match=r"^q: expected an array on card 0"):
        cache.decode(other.upload(queries(1)))
    assert cache.length == 9


def test_what_a_card_cannot_do_is_said_when_the_cache_is_made(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^dtype: expected float32, .*, which backend 'fake card' computes with, got"):
        treeattn.ShardedKVCache(None, **SHAPE, capacity=9, dtype="float64", backend=backend)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match="backend 'nvidia' can't run this: CuPy can't be imported"):
        treeattn.ShardedKVCache(None, **SHAPE, capacity=9, backend="nvidia")


def test_keys_on_a_card_do_not_travel(backend: Any) -> None:
    cache = filled(backend)
    with pytest.raises(InputError, match=r"^cache: expected one in host memory, got one on a card; .* decode$"):
        cache.attend(queries(2), q_pos=[0, 1])


def test_queries_of_the_host_are_compared_over_ranks_where_that_is_asked(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEATTN_CHECK", "1")
    cache, q = filled(backend, dtype="bfloat16"), queries(1).astype(ml_dtypes.bfloat16)
    out, lse = cache.decode(q, return_lse=True)
    assert out.dtype == q.dtype
    k, v = (each.astype(q.dtype) for each in first(9))
    assert_attention((out, lse), q, k, v)


# ---- other libraries' arrays


class Foreign:
    """A tensor of a library with streams of its own."""

    def __init__(self, array: FaultingArray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> FaultingArray:
        return self.array[:, :, :]


@pytest.fixture
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for CuPy and a library; give the latter's arrays, and the launches before each that it was handed."""
    handed: list[int] = []

    def take(array: FaultingArray) -> Foreign:
        handed.append(array.card.launches)
        return Foreign(array)

    monkeypatch.setattr(Foreign, "__module__", request.param)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=lambda array: array.__dlpack__()))
    stand_in = types.SimpleNamespace(from_dlpack=take, Tensor=Foreign, dlpack=types.SimpleNamespace(from_dlpack=take))
    for name in ("torch", "jax.dlpack"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return handed


@pytest.mark.parametrize("library", ["torch", "jax"], indirect=True)
def test_results_are_of_the_librarys_kind(backend: Any, card: FakeCard, library: Any) -> None:
    (k, v), q = tokens(12), queries(1)
    cache = treeattn.ShardedKVCache(None, **SHAPE, capacity=20, backend=backend)
    cache.append(*map(Foreign, on_card(card, k, v)))
    found = cache.decode(Foreign(card.upload(q)), return_lse=True)
    assert [type(each) for each in found] == [Foreign, Foreign]
    assert_attention(tuple(each.array.get() for each in found), q, k, v)


@pytest.mark.parametrize("library", ["torch"], indirect=True)
def test_what_torch_starts_next_comes_after_the_reading(backend: Any, card: FakeCard, library: Any) -> None:
    cache = filled(backend)
    launches = card.launches
    cache.append(*map(Foreign, on_card(card, *tokens(3))))
    assert library == [launches + 1, launches + 1], "DLPack orders torch's stream behind the launch"


@pytest.mark.parametrize("library", ["jax"], indirect=True)
def test_what_jax_could_give_to_others_is_held_until_it_was_read(backend: Any, card: FakeCard, library: Any) -> None:
    cache, read = filled(backend), []
    card.pending = lambda: bool(read)
    there = on_card(card, *tokens(3))
    cache.append(*map(Foreign, there))

    def held() -> bool:
        gc.collect()
        at = {each.data.ptr for each in there}
        return any(
            each.data.ptr in at and each not in there for each in gc.get_objects() if type(each) is FaultingArray
        )

    assert held()
    read.append(True)
    cache.append(*on_card(card, *tokens(1)))
    assert not held()


def test_no_device_pointer_of_a_cache_reaches_mpi(mpirun: Any, emulator: Any) -> None:
    job = mpirun(Path(__file__).with_name("cache_on_fake_card.py"), 3, emulator.folder)
    assert len({report["bits"] for report in job.reports}) == 1
    assert len(job.reports) == 3
