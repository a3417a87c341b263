"""How a rank waits: it looks first, naps when it takes long, and ends at the deadline or when the roll is called."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn.transports import waiting
from treeattn.transports.base import REMEMBERED, REST, SHORTEST_REST, Silence, Usual
from treeattn.transports.waiting import Patience


def counted(looks):
    """Something that is there at the ``looks``-th look."""
    seen = []

    def ready():
        seen.append(None)
        return len(seen) == looks

    return ready, seen


def test_what_is_there_costs_one_look_and_no_clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", None)
    ready, seen = counted(1)
    Patience(1.0, lambda: pytest.fail("the roll was looked for")).wait(ready)
    assert len(seen) == 1


@pytest.fixture
def by_clock(monkeypatch):
    """Time that passes by looks at it, 50 us each, and by naps; gives the naps: when they began, and how long."""
    now, naps = [0.0], []

    def tick():
        now[0] += 50e-6
        return now[0]

    def nap(seconds=0.0):
        naps.append((now[0], seconds))
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", tick)
    monkeypatch.setattr(waiting, "nap", nap)
    return naps


def test_a_long_wait_naps_late_and_the_next_one_soon(by_clock):
    patience = Patience(0, lambda: False)
    patience.wait(counted(1000)[0])
    first, began = by_clock[0][0], len(by_clock)
    assert first > waiting.NAP_AFTER
    patience.wait(counted(100)[0])
    assert len(by_clock) - began > 100 - 1 - waiting.NAP_AFTER / 50e-6
    before = len(by_clock)
    patience.wait(counted(3)[0])  # a short one
    patience.wait(counted(30)[0])
    assert len(by_clock) == before


def test_a_wait_that_usually_takes_long_is_slept_through_at_first(by_clock):
    usual = Usual()
    for _ in range(REMEMBERED):
        usual.took(16e-3)
    patience = Patience(0, lambda: False)
    patience.wait(lambda: len(by_clock) > 20, usual=usual)
    longest = waiting.LONGEST_NAP
    assert [seconds for _, seconds in by_clock[:3]] == pytest.approx([longest, longest, 12e-3 - 2 * longest], abs=1e-3)
    assert all(seconds < max(waiting.NAP, start / 100) for start, seconds in by_clock[3:])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_a_rest_ends_before_the_shortest_of_the_last_waits_did(waits):
    usual = Usual()
    for number, seconds in enumerate(waits, 1):
        usual.took(seconds)
        shortest = min(waits[max(number - REMEMBERED, 0) : number]) if number >= REMEMBERED else 0.0
        assert usual.rest in (0.0, REST * shortest)
        assert (usual.rest > 0) == (REST * shortest > SHORTEST_REST)


def test_waits_are_remembered_where_they_are(by_clock):
    usual, patience = Usual(), Patience(0, lambda: False)
    for _ in range(REMEMBERED):
        patience.wait(counted(200)[0], usual=usual)
    assert usual.rest > SHORTEST_REST
    patience.wait(counted(1)[0], usual=usual)
    assert usual.rest == 0


def test_a_sleep_of_ones_own_is_used_soon_and_in_place_of_naps(by_clock):
    slept = []
    Patience(0, lambda: False).wait(counted(10)[0], lambda: slept.append(None))
    assert len(slept) > 10 - 3 - waiting.SOON / 50e-6
    assert not by_clock


@pytest.mark.parametrize(("timeout", "alarm"), [(5e-3, False), (0, True)])
def test_a_wait_ends_at_the_deadline_or_when_the_roll_is_called(by_clock, timeout, alarm):
    with pytest.raises(Silence):
        Patience(timeout, lambda: alarm).wait(lambda: False)


def test_a_nap_is_not_twice_as_long():
    """Of many, the shortest: whatever else the machine does can only make them longer, and it may do so for long."""
    waiting.nap()

    def seconds():
        start = time.perf_counter()
        waiting.nap()
        return time.perf_counter() - start

    shortest = min(seconds() for _ in range(50))
    deadline = time.monotonic() + 60
    while shortest >= 2 * waiting.NAP and time.monotonic() < deadline:
        shortest = min(shortest, seconds())
    assert waiting.NAP <= shortest < 2 * waiting.NAP


def test_a_sleeper_is_woken_by_what_is_published_and_not_by_what_was():
    from treeattn.kernels import window

    memory = np.zeros(256, np.uint8)
    slot = memory.ctypes.data + window.BEFORE_STATE
    header, limit = np.zeros(window.HEADER, np.uint8), np.array([60, 0], np.int64)
    publish = window.publish_at()
    others, sleep = np.array([slot], np.int64), window.sleep_at()
    sleep(others, 0, limit.ctypes.data)  # use 0 is there: no sleep
    thread = threading.Thread(target=lambda: sleep(others, 1, limit.ctypes.data))
    thread.start()
    while not memory[window.ASLEEP]:
        time.sleep(1e-3)
    publish(slot, header.ctypes.data, 0, 0, 1)
    thread.join(60)
    assert not thread.is_alive()
    sleep(others, 1, limit.ctypes.data)


def test_compiled_code_looks_at_the_clock_where_giving_up_the_core_takes_long():
    """As beside other programs that compute: it would do so for weeks if it only counted."""
    from treeattn.kernels import window

    memory, header = np.zeros(256, np.uint8), np.zeros(window.HEADER, np.uint8)
    others = np.array([memory.ctypes.data + window.BEFORE_STATE], np.int64)
    assert window.collect_at()(others, header.ctypes.data, 1, 1, 2**40) == window.WAITING
