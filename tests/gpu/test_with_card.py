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
from treeattn.gpu.cards import Cards
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


def torch_on_card() -> Any:
    the_backend()
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no card")
    return torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_come_and_go_without_a_copy_and_in_the_order_of_their_stream(dtype: str) -> None:
    torch = torch_on_card()
    arrays = [np.asarray(array, np.float32) for array in bfloat16_inputs(4000)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.ones(8192, 8192, device="cuda")
        for _ in range(20):  # so that who doesn't wait for this stream reads what is not there yet
            late = late @ late * 1e-4
        there = [torch.from_numpy(array).cuda().to(getattr(torch, dtype)) * late[0, 0].isfinite() for array in arrays]
        out, lse = treeattn.attention(*there, return_lse=True)
        after = out.float() * 1, lse * 1
    stream.synchronize()
    assert (out.device.type, str(out.dtype), str(lse.dtype)) == ("cuda", f"torch.{dtype}", "torch.float32")
    rounded = [each.float().cpu().numpy() for each in there]
    right, limit = dense(*rounded), {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    assert np.abs(after[0].cpu().numpy() - right.out).max() <= limit * np.abs(right.out).max()
    assert np.abs(after[1].cpu().numpy() - right.lse).max() <= 1e-4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_tensors_are_taken_as_they_are(dtype: str) -> None:
    torch = torch_on_card()
    q, k, v = (torch.from_numpy(np.asarray(array, np.float32)).cuda() for array in bfloat16_inputs(500))
    k, v = (array.to(getattr(torch, dtype)) for array in (k, v))
    out = treeattn.attention(q, k, v)
    right = dense(*(array.float().cpu().numpy() for array in (q, k, v))).out
    assert np.abs(out.cpu().numpy() - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays_come_and_go(dtype: str) -> None:
    the_backend()
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() == "cpu":
        pytest.skip("this jax has no card")
    there = [jax.numpy.asarray(np.asarray(array, np.float32)).astype(dtype) for array in bfloat16_inputs(500)]
    out, lse = treeattn.attention(*there, return_lse=True)
    assert isinstance(out, jax.Array)
    assert (out.devices(), out.dtype, lse.dtype) == (there[0].devices(), there[0].dtype, np.float32)
    right = dense(*(np.asarray(array).astype(np.float32) for array in there))
    limit = 1e-5 if dtype == "float32" else 2**-7
    assert np.abs(np.asarray(out).astype(np.float32) - right.out).max() <= limit * np.abs(right.out).max()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_share_a_card_end_with_the_same_bits(mpirun: Any, ranks: int) -> None:
    the_backend()
    job = mpirun(Path(__file__).with_name("decode_on_card.py"), ranks, timeout=100)
    assert len(job.reports) == ranks
    assert len({report["bits"] for report in job.reports}) == 1


def test_ranks_that_share_a_card_read_each_others_memory(mpirun: Any) -> None:
    """Between processes on one card, memory is mapped as it is between cards."""
    the_backend()
    job = mpirun(Path(__file__).with_name("decode_on_card.py"), 2, "p2p", timeout=100)
    assert len({report["bits"] for report in job.reports}) == 1
    assert len(job.reports) == 2


def cache_on_card(dtype: str = "float32", capacity: int = 5000) -> Any:
    return treeattn.ShardedKVCache(
        None, batch=1, kv_heads=8, head_dim=128, dtype=dtype, capacity=capacity, backend=the_backend()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_on_the_card_grows_and_decodes_in_place(dtype: str) -> None:
    cache = cache_on_card(dtype)
    cupy = importlib.import_module("cupy")
    q, k, v = (np.asarray(array, np.float32) for array in bfloat16_inputs(3000))  # which either type holds
    for start, stop in ((0, 1000), (1000, 1001), (1001, 3000)):
        cache.append(*(cupy.asarray(each[:, :, start:stop]) for each in (k, v)))
    out, lse = cache.decode(cupy.asarray(q), return_lse=True)
    assert isinstance(out, cupy.ndarray)
    right = dense(q, k, v)
    assert np.abs(out.get() - right.out).max() <= 2e-5 * np.abs(right.out).max()
    assert np.abs(lse.get() - right.lse).max() <= 1e-4
    cache.truncate(2000)
    cache.append(k[:, :, 2000:], v[:, :, 2000:])  # from the host
    np.testing.assert_array_equal(cache.decode(q), out.get())


def test_tensors_may_be_overwritten_as_soon_as_they_are_appended() -> None:
    torch = torch_on_card()
    cache, arrays = cache_on_card(), [np.asarray(array, np.float32) for array in bfloat16_inputs(3000)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        q, k, v = (torch.from_numpy(array).cuda() for array in arrays)
        cache.append(k, v)
        k.fill_(float("nan"))
        v.fill_(float("nan"))
        out = cache.decode(q) * 1
    stream.synchronize()
    right = dense(*arrays).out
    assert np.abs(out.cpu().numpy() - right).max() <= 1e-5 * np.abs(right).max()


def test_a_full_card_is_one_sentence_and_the_cache_goes_on() -> None:
    cache, (q, k, v) = cache_on_card(capacity=10**6), (np.asarray(each, np.float32) for each in bfloat16_inputs(300))
    pool = importlib.import_module("cupy").get_default_memory_pool()
    cache.append(k, v)
    before = cache.decode(q)
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + 2**20)
    try:
        with pytest.raises(MemoryError, match=r"^card \d+ has no room for [\d,]+ bytes more: "):
            cache.append(*(np.concatenate([each] * 50, axis=2) for each in (k, v)))
    finally:
        pool.set_limit(size=0)
    np.testing.assert_array_equal(cache.decode(q), before)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_share_a_card_share_a_cache(mpirun: Any, ranks: int) -> None:
    the_backend()
    job = mpirun(Path(__file__).with_name("cache_on_card.py"), ranks, timeout=100)
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
