"""The way through the host: pinned memory, one copy each way, and nothing copied on the host itself."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest
from fake_card import FakeCard, FakeCardBackend
from test_direct import fetched, on_card, staged, state_of

from treeattn import TreeComm
from treeattn.backends.pins import Pins
from treeattn.testing import run_ranks
from treeattn.wire_form import own_pages


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab"])
@pytest.mark.parametrize("options", [{}, {"wire_dtype": "bfloat16"}], ids=str)
def test_a_step_takes_one_copy_each_way_into_the_memory_that_travels(emulator: Any, hosts: str, options: Any) -> None:
    def body(transport: Any) -> tuple[list[bytes], tuple[int, int]]:
        backend = FakeCardBackend(FakeCard(emulator))
        with TreeComm(transport, **options) as comm:
            mine, card = on_card(state_of(comm.rank), backend), backend.runtime
            out = comm.allreduce(mine)
            merged = [fetched(comm.allreduce(mine)) for _ in range(2)]
            before = card.copies, card.detours
            comm.allreduce(mine, out=out)
            took = card.copies - before[0], card.detours - before[1]
            return [*merged, fetched(out)], took

    size = len(hosts)
    right = staged(size, list(hosts), **options)[0] if size > 1 else fetched(state_of(0))
    found = run_ranks(size, body, hosts=list(hosts))
    assert found == [([right] * 3, (2, 0) if size > 1 else (0, 0))] * size


def test_a_driver_that_pins_nothing_leaves_the_detour(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "pin", lambda self, array: False)

    def body(transport: Any) -> tuple[bytes, bool]:
        backend = FakeCardBackend(FakeCard(emulator))
        with TreeComm(transport) as comm:
            return fetched(comm.allreduce(on_card(state_of(comm.rank), backend))), backend.runtime.detours > 0

    assert run_ranks(2, body, hosts=list("ab")) == [(each, True) for each in staged(2, list("ab"))]


def test_ranks_with_cards_and_without_meet_in_a_window(emulator: Any) -> None:
    """Rank 1's state is on the host every other time: what was left in its slot must not be taken for it."""

    def body(transport: Any) -> list[bytes]:
        backend = FakeCardBackend(FakeCard(emulator))
        with TreeComm(transport) as comm:
            states = [on_card(state_of(comm.rank), backend), state_of(comm.rank)]
            turns = [comm.allreduce(states[comm.rank == 1 and turn % 2]) for turn in range(5)]
            with pytest.raises(Exception, match="state: expected a PartialState"):
                comm.allreduce(None if comm.rank == 2 else states[0])  # type: ignore[arg-type]
            turns += [comm.allreduce(states[comm.rank == 1]), comm.allreduce(states[0])]
            return [fetched(each) for each in turns]

    assert run_ranks(3, body, hosts=list("aaa")) == [[each] * 7 for each in staged(3, list("aaa"))]


class Driver:
    """One that pins pages, and refuses the third time."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def register(self, start: int, size: int) -> None:
        if len(self.pinned) == 2:
            raise RuntimeError("cudaErrorMemoryAllocation")
        assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        self.pinned[start] = size


def test_memory_is_pinned_as_a_whole_once_and_until_it_is_freed() -> None:
    driver = Driver()
    pins = Pins(driver.register, driver.pinned.__delitem__)
    room = own_pages(10_000)
    for part in (room[100:200], room, room[5000:].view(np.uint16)):
        assert pins.pin(part)
    assert driver.pinned == {room.ctypes.data: 3 * mmap.PAGESIZE}
    assert pins.hold(room.ctypes.data + 7, 10)
    assert not pins.hold(room.ctypes.data + 9_995, 10)
    del room, part
    gc.collect()
    assert driver.pinned == {}


def test_what_shares_pages_or_is_refused_is_not_pinned() -> None:
    driver = Driver()
    pins = Pins(driver.register, driver.pinned.__delitem__)
    assert not pins.pin(np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint8, offset=1)), "not from a page's start"
    rooms = [own_pages(10) for _ in range(3)]
    assert [pins.pin(room) for room in rooms] == [True, True, False]
    driver.pinned.popitem()
    assert not pins.pin(rooms[2]), "a driver is asked once"
