"""The plan "p2p", over cards that are not there: exact merges, and no card believed that doesn't read what is there."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from fake_card import FakeCard
from test_direct import SHAPE, fetched, on_card, state_of

from treeattn import PartialState, TreeComm
from treeattn.errors import BackendError, RankTimeout
from treeattn.gpu import peer_memory
from treeattn.testing import run_ranks
from treeattn.wrapping import team_of


def test_states_of_other_steps_shapes_and_lanes_keep_apart(
    backends: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step's state is another, and rank 1 reads late: a slot that is written too early changes its result."""
    store = peer_memory.PeerExchange._store

    def late(exchange: Any, out: Any) -> None:
        time.sleep(0.003 * exchange._region.peers.rank)
        store(exchange, out)

    monkeypatch.setattr(peer_memory.PeerExchange, "_store", late)

    def numbered(backend: Any, rank: int, step: int, rows: int = 2) -> PartialState:
        packed = np.full((1, rows, 1, 5), 1 + rank + 10 * step, np.float32)
        packed[..., -1] = 0
        return PartialState(backend.runtime.upload(packed), backend.ops)

    def assert_merged(state: Any, size: int, step: int) -> None:
        right = sum(1 + rank + 10 * step for rank in range(size))
        assert (state._packed.get()[..., :-1] == right).all()

    def body(transport: Any) -> None:
        backend = backends[transport.rank]
        with TreeComm(transport, plan="p2p") as comm:
            for step in range(6):
                assert_merged(comm.allreduce(numbered(backend, comm.rank, step)), comm.size, step)
            for step in range(4):
                rows = 2 + step % 2
                begun = [comm.allreduce_begin(numbered(backend, comm.rank, step + each, rows)) for each in (1, 2, 3)]
                merged = comm.allreduce(numbered(backend, comm.rank, step, rows))
                for each, state in enumerate([merged, *(lane.end() for lane in begun)]):
                    assert_merged(state, comm.size, step + each)

    run_ranks(3, body)


def test_a_state_without_room_goes_by_messages(backends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(transport: Any, **options: Any) -> tuple[bytes, int]:
        with TreeComm(transport, **options) as comm:
            before = comm.stats.bytes
            merged = fetched(comm.allreduce(on_card(state_of(comm.rank), backends[comm.rank])))
            return merged, comm.stats.bytes - before

    staged = run_ranks(2, body)
    assert all(sent == 0 for _, sent in run_ranks(2, lambda transport: body(transport, plan="p2p")))
    monkeypatch.setattr(peer_memory, "STATE_BYTES", int(np.prod(SHAPE)) * 4 - 1)
    monkeypatch.setattr(peer_memory, "PATTERN", (1, 1, 1, 8))
    assert run_ranks(2, lambda transport: body(transport, plan="p2p")) == staged


def refused(size: int, hosts: str) -> str:
    def body(transport: Any) -> str:
        with pytest.raises(BackendError) as caught:
            TreeComm(transport, plan="p2p")
        return str(caught.value).partition(" (rank")[0]

    (reason,) = set(run_ranks(size, body, hosts=list(hosts)))
    return reason


@pytest.mark.parametrize("liar", [0, 2])
def test_a_card_that_reads_other_bytes_than_are_there_is_found_out(backends: Any, liar: int) -> None:
    """Its driver maps the others' memory without an error: only the data tell."""
    backends[liar].runtime.lies = True
    pairs = ", ".join(f"{other} to {liar}" for other in range(3) if other != liar)
    reason = f"plan 'p2p' can't be used: other bytes came than were sent, from rank {pairs}: use another plan"
    assert refused(3, "aaa") == reason
    for backend in backends:
        assert backend.runtime.mapped == [], "what was mapped is unmapped"
    backends[liar].runtime.lies = False
    run_ranks(3, lambda transport: TreeComm(transport, plan="p2p").free(), hosts=list("aaa"))


def test_ranks_of_several_hosts_are_refused(backends: Any) -> None:
    assert refused(3, "aab") == "plan 'p2p' can't be used: it is for the ranks of one host, and these are on a, b"


def test_a_rank_without_a_card_is_named_with_its_reasons(backends: Any, monkeypatch: Any) -> None:
    monkeypatch.undo()  # to the real question, which CuPy answers
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "rank 0 on host a: nvidia: CuPy can't be imported" in refused(2, "aa")


@pytest.mark.parametrize("step", ["export", "attach"])
def test_what_a_driver_refuses_is_raised_on_every_rank(backends: Any, monkeypatch: Any, step: str) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("cudaErrorPeerAccessUnsupported")

    monkeypatch.setattr(backends[1].runtime, step, fail)

    def body(transport: Any) -> str:
        with pytest.raises((BackendError, RuntimeError)) as caught:
            TreeComm(transport, plan="p2p")
        return str(caught.value)

    assert all("cudaErrorPeerAccessUnsupported" in text for text in run_ranks(3, body, hosts=list("aaa")))
    assert [backend.runtime.mapped for backend in backends] == [[]] * len(backends)


def test_a_card_that_never_ends_is_given_up_at_the_deadline(backends: Any, monkeypatch: Any) -> None:
    given_up = threading.Event()

    def body(transport: Any) -> None:
        comm = TreeComm(transport, plan="p2p")
        mine = on_card(state_of(comm.rank), backends[comm.rank])
        comm.allreduce(mine)
        team_of(comm).channel.transport.timeout = 0.2  # only now: on a busy machine the first may take longer
        if comm.rank == 1:
            given_up.wait(60)  # with its own work, so that nobody can tell that rank 0 waits in vain
            return
        monkeypatch.setattr(backends[0].runtime, "mark", lambda: lambda: False)
        with pytest.raises(RankTimeout, match=r"nothing came from rank 1 on host a for 0\.2 s"):
            comm.allreduce(mine)
        given_up.set()

    run_ranks(2, body, hosts=list("aa"))


class FakeIpc:
    """As much of CuPy as maps memory."""

    def __init__(self) -> None:
        self.cuda = self.runtime = self
        self.closed: list[int] = []

    def Memory(self, size: int) -> int:  # noqa: N802 - CuPy's name
        return 4096

    def UnownedMemory(self, at: int, size: int, owner: Any) -> int:  # noqa: N802 - CuPy's name
        return at

    def MemoryPointer(self, memory: int, offset: int) -> Any:  # noqa: N802 - CuPy's name
        return type("Pointer", (), {"ptr": memory + offset})()

    def ndarray(self, shape: Any, dtype: str, memptr: Any) -> Any:
        return type("Array", (), {"shape": shape, "data": memptr})()

    def ipcGetMemHandle(self, at: int) -> bytes:  # noqa: N802 - CuPy's name
        return b"name of %d" % at

    def ipcOpenMemHandle(self, name: bytes) -> int:  # noqa: N802 - CuPy's name
        return int(name.split()[-1]) + 10**6

    def ipcCloseMemHandle(self, at: int) -> None:  # noqa: N802 - CuPy's name
        self.closed.append(at)


def test_cupys_handles_are_used_as_they_are_documented() -> None:
    from treeattn.backends.cupy_runtime import CupyRuntime

    runtime: Any = object.__new__(CupyRuntime)
    runtime._cupy = FakeIpc()
    array, name = runtime.export(64)
    there = runtime.attach(name, 64)
    assert (array.data.ptr, there.data.ptr, there.shape) == (4096, 1004096, (64,))
    runtime.detach(there)
    assert runtime._cupy.closed == [1004096]


def test_the_fake_card_faults_where_nothing_is_mapped(card: FakeCard, emulator: Any) -> None:
    """Without `attach`, a kernel of one card does not see another's memory."""
    other = FakeCard(emulator)
    array, name = other.export(4)
    assert card.mapped == []
    card.attach(name, 4)
    assert card.mapped == [other]
    card.detach(array)
    assert card.mapped == []
