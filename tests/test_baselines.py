"""The baselines on ranks that are threads: exact, counted as their formulas say, and alike in what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import errors
from treeattn.arguments.spec import Options
from treeattn.baselines import BASELINES, Ulysses, _ring, paper
from treeattn.baselines._call import Call
from treeattn.baselines._schedule import Schedule
from treeattn.steps.wire import Wire
from treeattn.testing import FakeBackend, run_ranks
from treeattn.testing.oracle import assert_attention

ALL = {**BASELINES, "ulysses_gqa": Ulysses(replicate_kv=True)}
SIZES = [1, 2, 3, 5, 8]
B, HQ, HKV, TQ, TK, D, DV = 2, 16, 8, 5, 41, 8, 6


def arrays(seed: int = 0, dtype: Any = np.float32, q_tokens: int = TQ, kv_heads: int = HKV) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = (B, HQ, q_tokens, D), (B, kv_heads, TK, D), (B, kv_heads, TK, DV)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def cuts(size: int, seed: int) -> list[slice]:
    """Cut the keys into ``size`` consecutive uneven shards, some of them empty."""
    ends = np.sort(np.random.default_rng(seed).integers(0, TK + 1, size - 1))
    return [slice(a, b) for a, b in zip([0, *ends], [*ends, TK], strict=True)]


def on_ranks(size: int, call: Any, hosts: Any = None, **world: Any) -> list[Any]:
    def rank(transport: Any) -> Any:
        with treeattn.TreeComm(transport, hosts=hosts) as comm:
            return call(comm)

    return run_ranks(size, rank, timeout=120, **world)  # the first ones compile


def outcome(call: Any) -> str:
    """Give the error's text instead of raising it, so that every rank can report."""
    try:
        return f"gave {type(call()).__name__}"
    except errors.TreeattnError as error:
        return f"{type(error).__name__}: {error}"


# ---- exact, and counted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_uneven_shards_give_dense_attention_and_the_counters_equal_the_formula(name, size):
    q, k, v = arrays(size)
    parts, hosts = cuts(size, size), [f"host {rank % 3}" for rank in range(size)]

    def call(comm):
        shard = [np.ascontiguousarray(array[:, :, parts[comm.rank]]) for array in (k, v)]
        prepared = ALL[name].prepare(q, *shard, Options(), comm=comm, return_lse=True)
        before = comm.stats
        prepared.run()
        counted, cost = comm.stats - before, prepared.baseline.cost(prepared.problem)
        assert counted == cost.stats(comm.rank)
        assert comm.usage.peak_bytes == cost.ranks[comm.rank].peak_bytes
        return prepared.result()

    for result in on_ranks(size, call, hosts):
        assert_attention(result, q, k, v)


@given(
    name=st.sampled_from(sorted(ALL)),
    size=st.integers(1, 8),
    seed=st.integers(0, 99),
    causal=st.booleans(),
    window=st.sampled_from([None, (4, 0), (None, 2), (7, None)]),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    mask=st.sampled_from([None, "bool", "float", "per head"]),
    layout=st.sampled_from(["bhtd", "bthd"]),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
    q_tokens=st.sampled_from([1, 3, 10]),
)
@settings(deadline=None, max_examples=40)
def test_options_and_what_belongs_to_the_keys_travel(
    name, size, seed, causal, window, softcap, sink, mask, layout, dtype, q_tokens
):
    q, k, v = arrays(seed, dtype, q_tokens)
    rng = np.random.default_rng(seed)
    owner, masks = rng.integers(0, size, TK), made_mask(rng, mask, q_tokens)
    logits = np.linspace(-1, 1, HQ) if sink else None
    options = {"causal": causal, "window": window, "softcap": softcap, "sink": logits, "layout": layout}
    turn = (lambda array: array.swapaxes(1, 2)) if layout == "bthd" else (lambda array: array)
    queries = np.arange(TK - q_tokens, TK)

    def call(comm):
        mine = np.flatnonzero(owner == comm.rank)
        shard = turn(k[:, :, mine]), turn(v[:, :, mine])
        part = None if masks is None else masks[..., mine]
        positions = {"q_pos": queries, "kv_pos": mine, "mask": part, "return_lse": True}
        return ALL[name](turn(q), *shard, comm=comm, **positions, **options)

    whole = {"q_pos": queries, "kv_pos": np.arange(TK), "mask": masks}
    for result in on_ranks(size, call):
        assert_attention(result, turn(q), turn(k), turn(v), **whole, **options)


def made_mask(rng: Any, kind: str | None, q_tokens: int) -> Any:
    shape = (B, HQ, q_tokens, TK) if kind == "per head" else (1, 1, q_tokens, TK) if kind == "bool" else (B, 1, 1, TK)
    return None if kind is None else rng.standard_normal(shape) if kind == "float" else rng.random(shape) < 0.7


@pytest.mark.parametrize("name", ALL)
def test_row_lengths_and_block_scales_travel(name):
    q, _, _ = arrays()
    rng = np.random.default_rng(0)
    k, v = (rng.integers(-9, 9, (B, HKV, 3 * 12, width)).astype(np.int8) for width in (D, DV))
    scales = rng.random((2, B, HKV, 9, 1), dtype=np.float32)
    lengths = np.array([[12, 3], [0, 12], [7, 7]])
    seen = np.arange(12) < lengths[..., None]  # (rank, B, 12)
    whole = np.concatenate(list(seen), axis=-1)[:, None, None]

    def call(comm):
        at, blocks = slice(12 * comm.rank, 12 * comm.rank + 12), slice(3 * comm.rank, 3 * comm.rank + 3)
        k_scale, v_scale = scales[:, :, :, blocks]
        shard = {"k_scale": k_scale, "v_scale": v_scale, "kv_len": lengths[comm.rank], "return_lse": True}
        return ALL[name](q, k[:, :, at], v[:, :, at], comm=comm, **shard)

    for result in on_ranks(3, call):
        assert_attention(result, q, k, v, mask=whole, k_scale=scales[0], v_scale=scales[1])


@pytest.mark.parametrize("name", ALL)
def test_only_the_root_gets_the_result(name):
    q, k, v = arrays()

    def call(comm):
        shard = [np.ascontiguousarray(array[:, :, comm.rank :: 4]) for array in (k, v)]
        for root in (0, 3):
            prepared = ALL[name].prepare(q, *shard, Options(), comm=comm, root=root, return_lse=True)
            before = comm.stats
            prepared.run()
            assert comm.stats - before == prepared.baseline.cost(prepared.problem).stats(comm.rank)
            result = prepared.result()
            if comm.rank == root:
                assert_attention(result, q, k, v)
            else:
                assert result == (None, None)

    on_ranks(4, call)


@pytest.mark.parametrize("name", ALL)
def test_late_sends_and_chance_arrivals_change_nothing(name):
    q, k, v = arrays()

    def call(comm):
        shard = k[:, :, comm.rank :: 4], v[:, :, comm.rank :: 4]
        return ALL[name](q, *shard, comm=comm, return_lse=True)

    for result in on_ranks(4, call, rendezvous=True, seed=7):
        assert_attention(result, q, k, v)


@pytest.mark.parametrize("name", ALL)
def test_states_on_a_device_travel_by_way_of_the_host(name):
    q, k, v = arrays()

    def call(comm):
        shard = k[:, :, comm.rank :: 3], v[:, :, comm.rank :: 3]
        return ALL[name](q, *shard, comm=comm, backend=FakeBackend(), return_lse=True)

    for result in on_ranks(3, call):
        assert_attention(result, q, k, v)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("name", [name for name in ALL if name != "ring_query"])
def test_every_rank_gets_the_same_bits(name, size):
    """So with all-reduces of our own; MPI's promise nothing, and of `ring_query` its file says why not."""
    assert ALL[name].same_bits or name == "allreduce3"
    q, k, v = arrays(size)
    parts = cuts(size, size + 1)

    def call(comm):
        out, lse = ALL[name](q, k[:, :, parts[comm.rank]], v[:, :, parts[comm.rank]], comm=comm, return_lse=True)
        return out.tobytes() + lse.tobytes()

    assert len(set(on_ranks(size, call))) == 1


# ---- what each scheme is


def test_a_ring_rank_sends_2btd_kv_elements_in_each_of_its_steps():
    q, k, _ = arrays()

    def call(comm):
        shard = k[:, :, comm.rank :: 4][:, :, :10], k[:, :, comm.rank :: 4][:, :, :10]
        before = comm.stats
        treeattn.baselines.ring(q, *shard, comm=comm)
        return comm.stats - before

    for stats in on_ranks(4, call):
        assert stats.rounds == 3
        assert stats.bytes == 4 * (2 * B * 10 * HKV * D) * 3  # float32


def test_a_ring_starts_to_send_before_it_computes(monkeypatch):
    q, k, v = arrays()
    events = []
    for owner, name in ((Wire, "start"), (Wire, "finish"), (Call, "state")):
        monkeypatch.setattr(owner, name, noted(events, name, getattr(owner, name)))

    on_ranks(4, lambda comm: treeattn.baselines.ring(q, k[:, :, :9], v[:, :, :9], comm=comm))
    assert events == ["start", "state", "finish"] * 3 + ["state"]


def noted(events: list[str], name: str, function: Any) -> Any:
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.rank == 0:
            events.append(name)
        return function(self, *args, **kwargs)

    return noting


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_the_folded_schedule_gives_every_rank_the_same_work_under_a_causal_mask(size):
    each = 6
    tokens = each * size
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, tokens, D), dtype=np.float32) for heads in (4, 2, 2))

    def call(comm, algorithm):
        mine = slice(each * comm.rank, each * comm.rank + each)
        positions = {"causal": True, "q_pos": np.arange(tokens), "kv_pos": mine.start}
        out = algorithm(q, k[:, :, mine], v[:, :, mine], comm=comm, return_lse=True, **positions)
        return out, comm.usage.products

    folded = on_ranks(size, lambda comm: call(comm, treeattn.baselines.dist_flash))
    for result, _ in folded:
        assert_attention(result, q, k, v, causal=True)
    # One's own pair and half of all others that can be seen, of each * each products.
    assert [products for _, products in folded] == [each * each * (size + 1) // 2] * size


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_the_folded_schedule_meets_every_pair_once(size):
    call = Call(0, size, None, None, [], None, replicated=True)  # type: ignore[arg-type]
    schedule = Schedule(call, ["a"] * size)
    schedule.__dict__["rows"] = [slice(10 * rank, 10 * rank + 10) for rank in range(size)]
    met: list[tuple[int, int]] = []
    for step in range(1, size // 2 + 1):
        for owner in range(size):
            fetched, helped = schedule.fetched(owner, step), schedule.helped(owner, step)
            met += [(row, (owner - step) % size) for row in range(fetched.start, fetched.stop)]
            met += [(row, (owner + step) % size) for row in range(helped.start, helped.stop)]
    assert sorted(met) == [(row, keys) for row in range(10 * size) for keys in range(size) if keys != row // 10]


def test_ulysses_needs_a_head_per_rank_and_says_so_on_every_rank():
    q, k, v = arrays(kv_heads=2)
    seen = on_ranks(3, lambda comm: outcome(lambda: treeattn.baselines.ulysses(q, k, v, comm=comm)))
    for text in seen:
        assert text.startswith("InputError: k: expected at least 3 heads, since ulysses deals whole heads to 3 ranks")
        assert "got 2" in text
        assert "replicate_kv=True" in text
    seen = on_ranks(3, lambda comm: outcome(lambda: ALL["ulysses_gqa"](q[:, :2], k, v, comm=comm)))
    assert {text.startswith("InputError: q: expected at least 3 heads") for text in seen} == {True}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [3, 5, 8])
def test_ulysses_replicates_kv_heads_when_asked(kv_heads, size):
    q, k, v = arrays(kv_heads=kv_heads)

    def call(comm):
        shard = [np.ascontiguousarray(array[:, :, comm.rank :: size]) for array in (k, v)]
        prepared = ALL["ulysses_gqa"].prepare(q, *shard, Options(), comm=comm, return_lse=True)
        before = comm.stats
        prepared.run()
        cost = prepared.baseline.cost(prepared.problem)
        assert comm.stats - before == cost.stats(comm.rank)
        assert comm.usage.peak_bytes == cost.ranks[comm.rank].peak_bytes
        return prepared.result()

    for result in on_ranks(size, call):
        assert_attention(result, q, k, v)


def test_three_allreduces_move_what_the_paper_says_where_ranks_divide_the_rows():
    q, k, v = arrays(q_tokens=1)

    def call(comm):
        before = comm.stats
        treeattn.baselines.allreduce3(q, k, v, comm=comm)
        return (comm.stats - before).bytes

    expected = 4 * paper.tree_elements(B, HQ * DV, HQ, 4)
    assert on_ranks(4, call) == [expected] * 4


def test_the_papers_memory_gap_follows_from_its_formulas_and_ring_has_it():
    assert round(paper.peak_gap_bytes(1, 64_000, 2048, 16) / 1e6) == 524
    assert 1040 <= paper.peak_gap_bytes(1, 64_000, 4096, 32) / 1e6 < 1050  # the paper printed 1040
    q, k, v = (np.zeros((1, 4, n, 8), np.float32) for n in (1, 500, 500))

    def call(comm, algorithm):
        algorithm(q, k, v, comm=comm)
        return comm.usage.peak_bytes

    of_ring, _ = on_ranks(2, lambda comm: call(comm, treeattn.baselines.ring))
    of_tree, _ = on_ranks(2, lambda comm: call(comm, treeattn.decode))
    b, t, d, n_h = 1, 500, 32, 4
    beyond_arguments = paper.ring_peak_elements(b, t, d) - 2 * b * t * d - 2 * b * d  # without own K and V, q and out
    assert of_ring == 4 * beyond_arguments
    assert of_ring - of_tree == pytest.approx(paper.peak_gap_bytes(b, t, d, n_h, 4), rel=0.02)


# ---- wrong ranks

WRONG = {
    "k that is no array": ({"k": "keys"}, "k: expected"),
    "v of other tokens": ({"v": np.zeros((B, HKV, 1, DV), np.float32)}, "v: expected k's number of tokens"),
    "an unknown backend": ({"backend": "abacus"}, "backend: expected one of"),
    "a root out of range": ({"root": 99}, "root: expected None or a rank from 0 to"),
    "causal without positions": ({"causal": True}, "q_pos: expected global positions"),
    "other query rows": ({"q": np.zeros((B, HQ, 1, D), np.float32)}, "q.shape: expected the same on every rank"),
    "another root": ({"root": 0}, "root: expected the same on every rank"),
    "a sink of its own": ({"sink": np.ones(HQ)}, "sink: expected the same on every rank"),
    "groups of heads": ({"pipeline": 2}, "pipeline: expected 1, for a baseline, got 2"),
    "no number of groups": ({"pipeline": "all"}, "pipeline: expected a number of groups from 1 to 8, got 'all'"),
    "float64 keys": ({"k": np.zeros((B, HKV, 10, D))}, "dtype of the state: expected the same on every rank"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", ["ring", "dist_flash", "ulysses"])
def test_one_wrong_rank_is_one_error_everywhere_and_all_live_on(name, wrong):
    change, text = WRONG[wrong]
    q, k, v = arrays()

    def call(comm):
        shard = {"q": q, "k": k[:, :, :10], "v": v[:, :, :10]}
        mine = shard | change if comm.rank == 2 else shard
        first = outcome(lambda: BASELINES[name](**mine, comm=comm))
        treeattn.decode(**shard, comm=comm)
        later = outcome(lambda: BASELINES[name](**mine, comm=comm))
        assert outcome(lambda: BASELINES[name](**shard, comm=comm)) == "gave ndarray"
        return first, later

    for seen in on_ranks(3, call):
        for told in seen:
            assert text in told
            assert told.startswith("InputError: ")


class OnACard:
    """What a baseline sees of an array on a GPU: CuPy's attributes, and no way to its values."""

    def __init__(self, like: Any) -> None:
        self.shape, self.dtype, self.strides, self.ndim = like.shape, like.dtype, like.strides, like.ndim
        self.data = memoryview(b"")
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "typestr": like.dtype.str,
            "data": (0, True),
            "version": 3,
        }

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this array is on a device")


@pytest.mark.parametrize("name", ALL)
def test_arrays_on_a_device_are_refused_by_name_on_every_rank(name):
    q, k, v = arrays()

    def call(comm):
        mine = map(OnACard, (q, k, v)) if comm.rank == 1 else (q, k, v)
        seen = outcome(lambda: ALL[name](*mine, comm=comm, backend=FakeBackend()))
        assert outcome(lambda: ALL[name](q, k, v, comm=comm)) == "gave ndarray"
        return seen

    for seen in on_ranks(2, call):
        assert seen.startswith("InputError: q: expected an array in host memory, got one on a device")
        assert "copy" in seen


def test_another_algorithm_on_one_rank_is_an_error_on_all():
    q, k, v = arrays()

    def call(comm):
        algorithm = treeattn.baselines.gather if comm.rank == 1 else treeattn.baselines.ring
        return outcome(lambda: algorithm(q, k, v, comm=comm))

    for text in on_ranks(3, call):
        assert text.startswith("InputError: operation: expected the same on every rank")


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_that_fails_on_the_way_is_heard_of_on_all_and_all_live_on(name, exhausted):
    q, k, v = arrays()

    def call(comm):
        broken = exhausted if comm.rank == 1 else None
        shard = q, k[:, :, :10], v[:, :, :10]
        if comm.rank == 1:
            with pytest.raises(MemoryError, match="no room"):
                ALL[name](*shard, comm=comm, backend=broken)
            text = "own"
        else:
            text = outcome(lambda: ALL[name](*shard, comm=comm, backend=broken))
        assert outcome(lambda: ALL[name](*shard, comm=comm)) == "gave ndarray"
        return text

    first, own, last = on_ranks(3, call, hosts=["a", "b", "b"])
    assert own == "own"
    assert first == last == "CommError: rank 1 on host b failed with MemoryError: no room"


# ---- outside one process


def test_baselines_run_on_mpi_ranks(mpirun):
    reports = mpirun("baselines", 3).of_all(3)
    for report in reports:
        assert report["checked"] == sorted(ALL)
        assert report["collectives of allreduce3"] == 3
        assert report["rounds of the ring"] == 2
    # Emulated latency of 20 ms holds what the first rank sends through both rounds, however late others start.
    starts, ends = ([report[name] for report in reports] for name in ("start", "end"))
    assert min(ends) >= min(starts) + 2 * 0.02


def test_the_skeleton_is_the_same_everywhere():
    wanted = inspect.signature(treeattn.decode)
    for name, baseline in ALL.items():
        assert baseline.name == name
        assert inspect.signature(baseline) == wanted
        assert baseline.cost.__doc__
    assert _ring.ring is treeattn.baselines.ring
