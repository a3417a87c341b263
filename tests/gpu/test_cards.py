"""Plans of cards, over cards and an NCCL that are not there: exact merges, equal bits, errors, and who may use them."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
from fake_card import FakeCard
from test_direct import fetched, on_card, state_of

import treeattn
from treeattn import PartialState, TreeComm
from treeattn.backends import cupy_nccl
from treeattn.errors import BackendError, InputError, RankTimeout
from treeattn.testing import run_ranks
from treeattn.testing.oracle import assert_attention
from treeattn.wrapping import team_of


def merged_in_rank_order(size: int) -> bytes:
    return fetched(treeattn.merge([state_of(rank) for rank in range(size)]))


PLANS = ["nccl", "p2p"]
"""Both are held to what follows; what else p2p promises is in `test_peer_memory`."""


@pytest.mark.parametrize(
    ("plan", "hosts"),
    [("nccl", "aa"), ("nccl", "ab"), ("nccl", "aabba"), ("p2p", "a"), ("p2p", "aa"), ("p2p", "aaa")],
)
def test_every_rank_ends_with_the_merge_in_rank_order(backends: Any, plan: str, hosts: str) -> None:
    size = len(hosts)

    def body(transport: Any) -> list[bytes]:
        with TreeComm(transport, plan=plan) as comm:
            assert f"plan='{plan}'" in repr(comm)
            mine = on_card(state_of(comm.rank), backends[comm.rank])
            found = [fetched(comm.allreduce(mine)) for _ in range(5)]
            reduced = comm.reduce(mine, root=size - 1)
            assert (reduced is not None) == (comm.rank == size - 1)
            return [*found, fetched(comm.allreduce(mine, out=mine))]

    assert run_ranks(size, body, hosts=list(hosts)) == [[merged_in_rank_order(size)] * 6] * size


@pytest.mark.parametrize("plan", PLANS)
def test_decode_gives_the_dense_answer(backends: Any, plan: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, n, 16), dtype=np.float32) for heads, n in ((4, 1), (2, 40), (2, 40)))

    def body(transport: Any) -> Any:
        backend, mine = backends[transport.rank], slice(0, 15) if transport.rank == 0 else slice(15, 40)
        with TreeComm(transport, plan=plan) as comm:
            there = [backend.runtime.upload(np.ascontiguousarray(array)) for array in (q, k[:, :, mine], v[:, :, mine])]
            out, lse = treeattn.decode(*there, comm=comm, backend=backend, return_lse=True)
            return out.get(), lse.get()

    for found in run_ranks(2, body):
        assert_attention(found, q, k, v)


@pytest.mark.parametrize("plan", PLANS)
def test_an_error_on_one_rank_is_raised_on_all_before_any_card_waits(backends: Any, plan: str) -> None:
    def body(transport: Any) -> tuple[str, str, bytes]:
        with TreeComm(transport, plan=plan) as comm:
            mine = on_card(state_of(comm.rank), backends[comm.rank])
            with pytest.raises(InputError) as wrong:
                comm.allreduce(None if comm.rank == 1 else mine)  # type: ignore[arg-type]
            comm.allreduce(mine)
            with pytest.raises(BackendError) as host:
                comm.allreduce(state_of(0) if comm.rank == 0 else mine)
            texts = [str(each.value).partition(" (")[0] for each in (wrong, host)]
            return texts[0], texts[1], fetched(comm.allreduce(mine))

    on_host = f"plan {plan!r} merges states on cards, and this one of 'cpu' is on the host"
    right = ("state: expected a PartialState, got NoneType", on_host, merged_in_rank_order(3))
    assert run_ranks(3, body) == [right] * 3


def refused(backends: Any, size: int = 2, hosts: str = "aa") -> set[str]:
    def body(transport: Any) -> str:
        with pytest.raises(BackendError) as caught:
            TreeComm(transport, plan="nccl")
        return str(caught.value).partition(" (rank")[0]

    return set(run_ranks(size, body, hosts=list(hosts)))


def test_ranks_that_share_a_card_are_refused(backends: Any) -> None:
    backends[1].runtime.bus_id = backends[0].runtime.bus_id = "0000:01:00.0"
    [reason] = refused(backends)
    assert reason.endswith("2 ranks of host a share the card 0000:01:00.0, and NCCL wants one for each rank")
    run_ranks(2, lambda transport: TreeComm(transport, plan="nccl").free(), hosts=["a", "b"])  # one card each


def test_cards_whose_bytes_come_otherwise_are_refused(backends: Any) -> None:
    """Whatever a driver claims, and only the data tell: rank 1's card gives other bytes than were written."""
    backends[1].runtime.lies = True
    [reason] = refused(backends, 3, "aaa")
    assert "other bytes came than were sent, from rank 1 to 0, 1 to 1, 1 to 2: set NCCL_P2P_DISABLE=1" in reason


def test_a_rank_without_a_card_is_named_with_its_reasons(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # to the real question, which CuPy answers
    monkeypatch.setitem(sys.modules, "cupy", None)
    [reason] = refused(backends)
    assert reason.startswith("plan 'nccl' can't be used: rank 0 on host a: nvidia: CuPy can't be imported")
    assert "pip install 'treeattn[rocm]'" in reason


def test_a_failure_to_join_is_raised_on_every_rank(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise BackendError("NCCL_ERROR_SYSTEM_ERROR")

    monkeypatch.setattr(FakeCard, "join", fail)
    assert refused(backends) == {"NCCL_ERROR_SYSTEM_ERROR"}


def test_an_asynchronous_error_breaks_the_communicator(backends: Any) -> None:
    def body(transport: Any) -> tuple[str, str]:
        comm = TreeComm(transport, plan="nccl")
        mine: PartialState = on_card(state_of(comm.rank), backends[comm.rank])
        comm.allreduce(mine)
        group: Any = team_of(comm).channel.cards.group  # type: ignore[union-attr]
        group.error = RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR")
        with pytest.raises(treeattn.errors.CommError) as caught:
            comm.allreduce(mine)
        return str(caught.value), group.ended

    for text, ended in run_ranks(2, body):
        assert text.endswith("NCCL_ERROR_UNHANDLED_CUDA_ERROR")
        assert ended == "aborted"


def test_a_card_that_never_ends_is_given_up_at_the_deadline(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()

    def body(transport: Any) -> str:
        comm = TreeComm(transport, plan="nccl")
        mine = on_card(state_of(comm.rank), backends[comm.rank])
        comm.allreduce(mine)
        team_of(comm).channel.transport.timeout = 0.2  # only now: on a busy machine the first may take longer
        if comm.rank == 1:
            comm.allreduce(mine)
            given_up.wait(60)  # with its own work, so that nobody can tell that rank 0 waits in vain
            return ""
        monkeypatch.setattr(backends[0].runtime, "mark", lambda: lambda: False)
        with pytest.raises(RankTimeout, match=r"nothing came from rank 1 on host localhost for 0\.2 s"):
            comm.allreduce(mine)
        given_up.set()
        return str(team_of(comm).channel.cards.group.ended)  # type: ignore[union-attr]

    assert run_ranks(2, body) == ["aborted", ""]


def test_cupys_nccl_is_called_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Communicator:
        def __init__(self, size: int, name: tuple[int, ...], rank: int) -> None:
            calls.append((size, name, rank))

        def allGather(self, *arguments: int) -> None:  # noqa: N802 - CuPy's name
            calls.append(arguments)

    name = tuple((i * 37) % 256 - 128 for i in range(128))
    nccl = types.SimpleNamespace(
        available=True, NCCL_UINT8=1, NcclCommunicator=Communicator, get_unique_id=lambda: name
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    assert cupy_nccl.why_not() == []
    group = cupy_nccl.NcclGroup(lambda: 77, cupy_nccl.new_group(), 4, 2)
    there = [types.SimpleNamespace(data=types.SimpleNamespace(ptr=at), nbytes=64) for at in (1000, 2000)]
    group.gather(*there)
    assert calls == [(4, name, 2), (1000, 2000, 64, 1, 77)]
    nccl.available = False
    assert cupy_nccl.why_not() == ["the CuPy that is installed was built without NCCL"]
