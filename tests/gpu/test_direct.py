"""Device memory straight to a transport that takes it: the bits of the staged way, and never where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_card import FakeCard, FakeCardBackend

import treeattn
from treeattn import PartialState, TreeComm
from treeattn.arguments.devices import DeviceBytes
from treeattn.errors import InputError
from treeattn.testing import run_ranks
from treeattn.testing.ranks import ThreadTransport
from treeattn.transports.gpu_mpi import Verdict

CUDA = Verdict(("cuda",), "it says so")
SHAPE = (1, 3, 2, 9)


class CardBytes:
    """Where an MPI that takes GPU memory writes what has come."""

    def __init__(self, data: DeviceBytes) -> None:
        self._data, self.size = data, data.size

    def __setitem__(self, at: slice, arrived: Any) -> None:
        self._data.array.card.copy_in(np.ascontiguousarray(arrived), self._data[at])


def aware(transport: ThreadTransport, verdict: Verdict = CUDA) -> Any:
    """Give a transport that copies device memory by the card's engine, as a GPU-aware MPI does, and counts sends."""

    class Aware(ThreadTransport):
        sent_from_card = sent_from_host = asked_for = 0  # of this rank, its branches among them

        def gpu_memory(self) -> Verdict:
            return verdict

        def isend(self, data: Any, dest: int, tag: int) -> Any:
            if not isinstance(data, DeviceBytes):
                Aware.sent_from_host += tag >= 0
                return super().isend(data, dest, tag)
            Aware.sent_from_card += 1
            seen = np.empty(data.size, np.uint8)
            data.array.card.copy_out(data, seen)
            return super().isend(seen, dest, tag)

        def irecv(self, data: Any, source: int, tag: int) -> Any:
            Aware.asked_for += isinstance(data, DeviceBytes)
            arriving: Any = CardBytes(data) if isinstance(data, DeviceBytes) else data
            return super().irecv(arriving, source, tag)

    return Aware(transport._world, transport.rank)


def state_of(rank: int) -> PartialState:
    rng = np.random.default_rng(rank)
    packed = rng.standard_normal(SHAPE, dtype=np.float32)
    packed[..., -2] = np.abs(packed[..., -2]) + 0.5
    packed[..., -1] *= 20
    if rank == 1:
        packed[0, 0], packed[0, 0, :, -1] = 0, -np.inf  # no keys
    host = PartialState.identity((*SHAPE[:3], SHAPE[3] - 2))
    host._packed[...] = packed
    return host


def on_card(state: PartialState, backend: FakeCardBackend) -> PartialState:
    return PartialState(backend.runtime.upload(state._packed), backend.ops)


def fetched(state: PartialState) -> bytes:
    packed: Any = state._packed
    return (packed if isinstance(packed, np.ndarray) else packed.get()).tobytes()


def staged(size: int, hosts: list[str], **options: Any) -> list[bytes]:
    def body(transport: Any) -> bytes:
        with TreeComm(transport, **options) as comm:
            return fetched(comm.allreduce(state_of(comm.rank)))

    return run_ranks(size, body, hosts=hosts)


@pytest.mark.parametrize(
    ("hosts", "options"),
    [("ab", {}), ("abcde", {}), ("abcde", {"plan": "binary"}), ("aabb", {"plan": "2,all"}), ("aab", {"plan": "flat"})],
    ids=str,
)
def test_states_go_from_card_to_card_with_the_bits_of_the_staged_way(emulator: Any, hosts: str, options: Any) -> None:
    def body(transport: Any) -> tuple[list[bytes], bool]:
        backend = FakeCardBackend(FakeCard(emulator))
        sender = aware(transport)
        with TreeComm(sender, **options) as comm:
            mine = on_card(state_of(comm.rank), backend)
            merged = [fetched(comm.allreduce(mine)) for _ in range(3)]
            merged.append(fetched(comm.allreduce(mine, out=mine)))
            return merged, sender.sent_from_host == 0 < sender.sent_from_card

    right = staged(len(hosts), list(hosts), **options)
    assert len(set(right)) == 1
    assert run_ranks(len(hosts), body, hosts=list(hosts)) == [([right[0]] * 4, True)] * len(hosts)


def test_what_comes_is_asked_for_a_step_ahead_once_no_kernel_reads_its_place(emulator: Any) -> None:
    def body(transport: Any) -> tuple[list[int], int]:
        backend = FakeCardBackend(FakeCard(emulator))
        sender, card, looks = aware(transport), backend.runtime, []

        def mark() -> Any:  # what was started is done at the third look
            pending = iter([False, False])

            def done() -> bool:
                looks.append(0)
                return next(pending, True)

            return done

        card.mark = mark
        with TreeComm(sender) as comm:
            mine = on_card(state_of(comm.rank), backend)
            asked = []
            for _ in range(4):
                comm.allreduce(mine)
                asked.append(sender.asked_for)
            return asked, len(looks)

    for asked, looks in run_ranks(2, body, hosts=list("ab")):
        assert asked == [2, 3, 4, 5], "one receive a step, and one more than there were steps"
        assert looks >= 3 * 3


def test_cards_and_cpus_meet(emulator: Any) -> None:
    """Rank 1 has its state in host memory, first always and then every other time: a message is the same bytes."""

    def body(transport: Any) -> list[bytes]:
        backend = FakeCardBackend(FakeCard(emulator))
        with TreeComm(aware(transport)) as comm:
            states = [on_card(state_of(comm.rank), backend), state_of(comm.rank)]
            return [fetched(comm.allreduce(states[comm.rank == 1 and turn != 2])) for turn in range(4)]

    right = staged(3, list("abc"))
    assert run_ranks(3, body, hosts=list("abc")) == [[each] * 4 for each in right]

    def alternating(transport: Any) -> list[bytes]:
        backend = FakeCardBackend(FakeCard(emulator))
        with TreeComm(aware(transport)) as comm:
            states = [on_card(state_of(comm.rank), backend), state_of(comm.rank)]
            return [fetched(comm.allreduce(states[turn % 2])) for turn in range(3)]

    assert run_ranks(3, alternating, hosts=list("abc")) == [[each] * 3 for each in right]


@pytest.mark.parametrize("verdict", [Verdict((), "no"), Verdict(("rocm",), "other cards only")])
@pytest.mark.parametrize("doubter", [0, 2])
def test_one_rank_whose_mpi_says_no_keeps_all_from_it(emulator: Any, verdict: Verdict, doubter: int) -> None:
    def body(transport: Any) -> tuple[bytes, int]:
        backend = FakeCardBackend(FakeCard(emulator))
        sender = aware(transport, verdict if transport.rank == doubter else CUDA)
        with TreeComm(sender) as comm:
            return fetched(comm.allreduce(on_card(state_of(comm.rank), backend))), sender.sent_from_card

    right = staged(3, list("abc"))
    assert run_ranks(3, body, hosts=list("abc")) == [(each, 0) for each in right]


def test_a_backend_that_always_stages_does(emulator: Any) -> None:
    def body(transport: Any) -> tuple[bytes, int]:
        backend = FakeCardBackend(FakeCard(emulator))
        backend.always_staged = True
        sender = aware(transport)
        with TreeComm(sender) as comm:
            return fetched(comm.allreduce(on_card(state_of(comm.rank), backend))), sender.sent_from_card

    assert run_ranks(2, body, hosts=list("ab")) == [(each, 0) for each in staged(2, list("ab"))]
    assert treeattn.backends.registry.load("pcie").always_staged


def test_an_error_on_one_rank_is_raised_on_all_and_the_cards_go_on(emulator: Any) -> None:
    def body(transport: Any) -> tuple[str, bytes]:
        backend = FakeCardBackend(FakeCard(emulator))
        with TreeComm(aware(transport)) as comm:
            mine = on_card(state_of(comm.rank), backend)
            comm.allreduce(mine)
            with pytest.raises(InputError) as caught:
                comm.allreduce(None if comm.rank == 1 else mine)  # type: ignore[arg-type]
            return str(caught.value).partition(" (")[0], fetched(comm.allreduce(mine))

    found = run_ranks(3, body, hosts=list("abc"))
    assert {text for text, _ in found} == {"state: expected a PartialState, got NoneType"}
    assert [each for _, each in found] == staged(3, list("abc"))
