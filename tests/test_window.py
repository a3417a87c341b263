"""Memory that ranks of one host share: bits as by messages, no allocation, nothing left, messages where it fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import PartialState, TreeComm
from treeattn.errors import InputError, RankTimeout
from treeattn.execution import window
from treeattn.execution.window import room_for_state
from treeattn.planning.plan import Radices
from treeattn.testing import FakeBackend, over_the_wire, run_ranks
from treeattn.wrapping import team_of

LARGE = 8 * window.SMALL

OPS = PartialState.identity((1, 1, 1, 1), backend="reference").ops


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile before ranks have to wait for it."""
    for dtype in ("float32", "float64"):
        run_ranks(2, lambda t, dtype=dtype: TreeComm(t).allreduce(state_of(t.rank, dtype=dtype)), timeout=120)


@pytest.fixture(autouse=True, scope="module")
def smaller():
    """Let too large states be quick to merge."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "LARGE", LARGE)
        yield


def state_of(rank, heads=3, dtype="float32"):
    rng = np.random.default_rng([rank, heads])
    packed = rng.standard_normal((1, heads, 1, 6)).astype(dtype)
    packed[..., -2] = np.abs(packed[..., -2])
    return PartialState(packed, OPS)


def bits(state):
    return None if state is None else state.packed.tobytes()


CALLS = {
    "allreduce": lambda comm: comm.allreduce(state_of(comm.rank)),
    "other heads": lambda comm: comm.allreduce(state_of(comm.rank, heads=2)),
    "float64": lambda comm: comm.allreduce(state_of(comm.rank, dtype="float64")),
    "large": lambda comm: comm.allreduce(state_of(comm.rank, heads=window.SMALL // 24 + 1)),
    "too large": lambda comm: comm.allreduce(state_of(comm.rank, heads=LARGE // 24 + 1)),
    "first": lambda comm: comm.reduce(state_of(comm.rank)),
    "last": lambda comm: comm.reduce(state_of(comm.rank), root=comm.size - 1),
}


def outcomes(calls, hosts, **options):
    def body(transport):
        with TreeComm(transport, **options) as comm:
            return [bits(CALLS[call](comm)) for call in calls]

    return run_ranks(len(hosts), body, hosts=hosts)


@given(
    st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=8),
    st.lists(st.sampled_from("abc"), min_size=2, max_size=6),
    st.booleans(),
    st.sampled_from([None, "shared,all,leaders=2", "shared,all,leaders=all"]),
)
@settings(deadline=None, max_examples=60)
def test_any_calls_in_any_order_give_the_bits_of_messages(calls, hosts, deterministic, plan):
    """Slots are taken in turn by all plans, so what matters is what ran before."""
    by_messages = outcomes(calls, hosts, plan="oneshot", deterministic=deterministic)
    assert outcomes(calls, hosts, plan=plan, deterministic=deterministic) == by_messages


HEADS = 1, 7, 8, 30, window.SMALL // 24 + 1
"""Fewer rows than parts, and numbers that parts don't divide; the last is more bytes than there always is room for."""


@pytest.mark.parametrize(("together", "cores"), [(False, "7"), (True, "1"), (True, "ff")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranks_that_merge_together_have_the_bits_of_those_that_merge_alone(monkeypatch, together, cores, dtype):
    def body(transport):
        comm, found = TreeComm(transport), []
        for heads in HEADS:
            state = state_of(comm.rank, heads, dtype)
            found += [bits(comm.allreduce(state)) for _ in range(4)]
        return found

    monkeypatch.setattr(window, "merge_together", lambda *_: together)
    monkeypatch.setattr(window, "_cores", lambda: cores)
    for ranks in (2, 5):
        right = [bits(over_the_wire([state_of(r, heads, dtype) for r in range(ranks)])) for heads in HEADS]
        assert run_ranks(ranks, body) == [[each for each in right for _ in range(4)]] * ranks


def test_decode_takes_the_short_way_and_its_check_word_counts():
    def body(transport):
        with TreeComm(transport) as comm:
            q, k, v = (np.full((1, 2, n, 4), comm.rank + 1.0, np.float32) for n in (1, 3, 3))
            sink = np.zeros(2, np.float32)
            found = [bits_of(treeattn.decode(np.ones_like(q), k, v, comm=comm, sink=sink)) for _ in range(4)]
            assert team_of(comm).session.shortcut is not None
            with pytest.raises(InputError, match="sink: expected the same on every rank"):
                treeattn.decode(np.ones_like(q), k, v, comm=comm, sink=sink + comm.rank)
            return found

    found = run_ranks(3, body)
    assert len({each for rank in found for each in rank}) == 1


def bits_of(array):
    return array.tobytes()


def test_states_of_one_host_need_no_message():
    def body(transport):
        comm = TreeComm(transport)
        comm.allreduce(state_of(comm.rank))
        before = comm.stats
        comm.allreduce(state_of(comm.rank))
        found = comm.stats - before
        assert (found.rounds, found.messages, found.collectives) == (1, 0, 0)
        return comm.plan.radices

    assert run_ranks(3, body) == [Radices("shared")] * 3


@pytest.mark.parametrize("hosts", ["hhh", "hhhhi"])
def test_the_largest_state_that_there_is_room_for_goes_through_memory_and_no_larger_one(hosts):
    def body(transport):
        with TreeComm(transport, hosts=list(hosts)) as comm:
            largest = room_for_state(hosts) // 24
            found = []
            for heads in (largest, largest + 1):
                state, others = state_of(comm.rank, heads), [state_of(rank, heads) for rank in range(comm.size)]
                grouped = [[each for each, host in zip(others, hosts, strict=True) if host == name] for name in "hi"]
                assert bits(comm.allreduce(state)) == bits(over_the_wire([each for each in grouped if each]))
                found.append(comm.plan_for(24 * heads).radices.inside)
            return found, team_of(comm).session.window.room

    for (inside, above), room in run_ranks(len(hosts), body):
        assert (inside, room) == ("shared", room_for_state(hosts))
        assert above != "shared"


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=400))
def test_windows_are_no_larger_than_they_may_be_and_have_room_for_small_states(hosts):
    room, most = room_for_state(hosts), max(map(hosts.count, hosts))
    assert room == room_for_state(sorted(hosts, reverse=True)), "whatever the order"
    assert window.SMALL <= room <= window.LARGE
    assert room % 64 == 0, "slots begin on cache lines"
    assert room == window.SMALL or 2 * (most + 1) * room <= window.WINDOW_BYTES


def test_states_on_a_device_go_through_memory_too():
    def body(transport):
        fake, mine = FakeBackend(), state_of(transport.rank)
        there = fake.ops.empty(mine.packed.shape, "float32")
        fake.ops.from_host(mine.packed.reshape(-1).view(np.uint8), there)
        with TreeComm(transport) as comm:
            merged = [comm.allreduce(PartialState(there, fake.ops)) for _ in range(3)]
            return [each._packed._memory.tobytes() for each in merged]

    right = bits(over_the_wire([state_of(rank) for rank in range(3)]))
    assert run_ranks(3, body) == [[right] * 3] * 3


@pytest.mark.parametrize("on_device", [{0}, {1}, {0, 2}, {0, 1, 2}], ids=str)
def test_states_of_hosts_and_devices_meet_in_memory(monkeypatch, on_device):
    """Ranks with a device take the longer way; the others merge together what is new in each step."""

    def body(transport):
        fake, found = FakeBackend(), []
        with TreeComm(transport) as comm:
            for step in range(6):
                state = state_of(transport.rank + 4 * step)
                if transport.rank in on_device:
                    there = fake.ops.empty(state.packed.shape, "float32")
                    fake.ops.from_host(state.packed.reshape(-1).view(np.uint8), there)
                    found.append(comm.allreduce(PartialState(there, fake.ops))._packed._memory.tobytes())
                else:
                    found.append(bits(comm.allreduce(state)))
        return found

    monkeypatch.setattr(window, "merge_together", lambda *_: True)
    right = [bits(over_the_wire([state_of(rank + 4 * step) for rank in range(4)])) for step in range(6)]
    assert run_ranks(4, body) == [right] * 4


@pytest.mark.parametrize("hosts", ["hh", "hhii"])
def test_a_step_allocates_nothing_that_grows_and_no_array(mpirun, hosts):
    """In 250 steps the smallest leak would be 12 KB, and one array at a time 16 KB; Python's own lists of free objects
    fill with less."""
    plans = ["default", "shared,all,leaders=all"] if hosts == "hhii" else ["default"]
    for report in mpirun("comm_mpi", len(hosts), "steps", ",".join(hosts), *plans).of_all(len(hosts)):
        assert report["grown"] < 6_000, report
        assert report["peak"] < 10_000, report


def mapped():
    """Files of /dev/shm that are mapped: those without a name are called by a number."""
    return len(re.findall("/dev/shm/(?:#|treeattn-)", Path("/proc/self/maps").read_text()))


def files():
    """Files that this process has made, or one that was killed and had its number."""
    return set(window.FOLDER.glob(f"treeattn-{os.getpid()}-*"))


def test_nothing_is_left():
    kept = []

    def body(transport):
        for _ in range(40):
            with TreeComm(transport) as comm:
                comm.allreduce(state_of(comm.rank))
                kept.append(mapped())

    gc.collect()
    before = mapped(), len(os.listdir("/proc/self/fd")), files()
    run_ranks(2, body)
    assert min(kept) > before[0]
    gc.collect()
    assert (mapped(), len(os.listdir("/proc/self/fd")), files()) == before


KILLED = """
import os, signal, sys
from pathlib import Path
from treeattn import TreeComm
from treeattn.execution import window
from treeattn.testing import run_ranks

window.FOLDER = Path(sys.argv[1])
window._map = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run_ranks(2, TreeComm)
"""


def test_nothing_is_left_by_ranks_that_are_killed_before_they_share_it(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_file_that_needs_a_name_has_it_once_it_is_filled(monkeypatch):
    reserve, before = os.posix_fallocate, files()

    def reserving(*arguments):
        assert files() == before
        reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", reserving)
    with window._file(b"token", 1000, named=True) as path:
        assert Path(path).read_bytes() == b"token" + bytes(995)
    assert files() == before


def test_ranks_share_memory_that_can_not_reach_each_other_by_proc(monkeypatch):
    made, asked = window._file, []

    @contextlib.contextmanager
    def in_containers(token, size, named):
        with made(token, size, named) as path:
            asked.append(path if named else "/proc/0/fd/3")
            yield asked[-1]

    monkeypatch.setattr(window, "_file", in_containers)

    def body(transport):
        with TreeComm(transport) as comm:
            return comm.plan.radices.inside, bits(comm.allreduce(state_of(comm.rank)))

    before = files()
    assert run_ranks(2, body) == [("shared", bits(over_the_wire([state_of(0), state_of(1)])))] * 2
    assert len(asked) == 2
    assert files() == before


ROOM = 64 + 2 * 2 * (64 + 2**16) + 2 * (128 + 2**16)
"""Two slots for each of two ranks, two common results, and what the first rank writes for the other to find."""


def no_room_for(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def no_room(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", no_room_for)
    return f"no room for {ROOM} bytes in /dev/shm of host h: No space left on device"


def another_machine(monkeypatch):
    made = window._file

    def elsewhere(token, size, named):
        return made(bytes(len(token)), size, named)

    monkeypatch.setattr(window, "_file", elsewhere)
    return "ranks 0 and 0 of host h do not share /dev/shm: it is another file"


def another_process(monkeypatch):
    """The number is that of a process that has a pipe there, from which nothing will ever come."""

    @contextlib.contextmanager
    def pipe(*_):
        read, write = os.pipe()
        with open(read), open(write, "w"):
            yield f"/proc/self/fd/{read}"

    monkeypatch.setattr(window, "_file", pipe)
    return "ranks 0 and 0 of host h do not share /dev/shm: it is another file"


def no_folder(monkeypatch):
    monkeypatch.setattr(window, "FOLDER", Path("/nowhere"))
    return f"no room for {ROOM} bytes in /nowhere of host h: No such file or directory"


@pytest.mark.parametrize("failure", [no_room, another_machine, another_process, no_folder])
def test_where_memory_is_not_shared_messages_are_used_and_one_rank_says_so(monkeypatch, failure):
    before, text, hosts = files(), failure(monkeypatch), ["h", "h", "i"]

    def body(transport):
        with TreeComm(transport, hosts=hosts) as comm:
            assert comm.plan.radices.inside is None
            return bits(comm.allreduce(state_of(comm.rank)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(3, body)
    assert found == [bits(over_the_wire([[state_of(0), state_of(1)], state_of(2)]))] * 3
    (warning,) = caught
    assert str(warning.message).startswith(text)
    monkeypatch.undo()
    assert files() == before


def told_by(call):
    try:
        return bits(call())
    except UserWarning as warning:
        return str(warning)


def with_warnings_as_errors(body):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run_ranks(3, body)


def test_where_warnings_are_errors_no_rank_is_left_waiting(monkeypatch):
    text = no_room(monkeypatch)

    def body(transport):
        return told_by(lambda: TreeComm(transport, hosts=["h", "h", "i"]).allreduce(state_of(0)))

    told = with_warnings_as_errors(body)
    assert told == [f"{text}; ranks of one host will use messages"] * 3


def test_where_warnings_are_errors_a_communicator_goes_on_after_them(monkeypatch):
    reserve = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *at: reserve(*at) if at[2] < 2 * ROOM else no_room_for(*at))

    def body(transport):
        with TreeComm(transport) as comm:
            heads = 3, window.SMALL // 24 + 1, 3
            return [told_by(lambda n=n: comm.allreduce(state_of(comm.rank, n))) for n in heads]

    small = bits(over_the_wire([state_of(rank) for rank in range(3)]))
    for first, large, last in with_warnings_as_errors(body):
        assert first == last == small
        assert re.match("no room for .*; ranks of one host will use messages for states of more than", large)


@pytest.mark.parametrize("plan", ["shared", "auto"])
def test_where_there_is_no_room_for_more_only_large_states_are_messages(monkeypatch, plan):
    """Asked for once, whatever comes later; lanes do not ask either."""
    reserve, asked = os.posix_fallocate, []

    def full(file, start, size):
        if size > ROOM:
            asked.append(size)
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def body(transport):
        found = []
        with TreeComm(transport, plan=plan) as comm:
            for heads in (3, window.SMALL // 24 + 1, window.SMALL // 24 + 2, 3):
                merged = (
                    comm.allreduce(state_of(comm.rank, heads)),
                    comm.allreduce_begin(state_of(comm.rank, heads)).end(),
                )
                shared = comm.plan_for(24 * heads).radices.inside == "shared"
                found.append((shared, *map(bits, merged)))
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(2, body)
    heads = 3, window.SMALL // 24 + 1, window.SMALL // 24 + 2, 3
    right = [bits(over_the_wire([state_of(0, each), state_of(1, each)])) for each in heads]
    assert found == [[(24 * h <= window.SMALL, each, each) for h, each in zip(heads, right, strict=True)]] * 2
    (warning,), (_,) = caught, asked
    assert "will use messages for states of more than 65,536 bytes" in str(warning.message)


def test_room_is_made_for_larger_states_and_those_before_keep_theirs():
    heads = 3, window.SMALL // 24 + 1, 3, 4 * window.SMALL // 24, 5

    def body(transport):
        with TreeComm(transport) as comm:
            found = [
                (bits(comm.allreduce(state_of(comm.rank, each))), team_of(comm).session.window.room) for each in heads
            ]
            return found, comm.stats.messages

    right = [bits(over_the_wire([state_of(rank, each) for rank in range(3)])) for each in heads]
    rooms = [factor * window.SMALL for factor in (1, 2, 2, 4, 4)]
    assert run_ranks(3, body) == [([*zip(right, rooms, strict=True)], 0)] * 3


def test_an_error_in_the_middle_of_quick_steps_reaches_all():
    def body(transport):
        comm, found = TreeComm(transport), []
        for step in range(6):
            try:
                found.append(bits(comm.allreduce(None if step == 3 and comm.rank == 1 else state_of(comm.rank))))
            except InputError as error:
                found.append(str(error).startswith("state: expected a PartialState, got NoneType"))
        return found

    right = bits(over_the_wire([state_of(rank) for rank in range(3)]))
    assert run_ranks(3, body) == [[right, right, right, True, right, right]] * 3


def test_a_rank_that_does_not_publish_is_named():
    def body(transport):
        comm = TreeComm(transport)
        comm.allreduce(state_of(comm.rank))
        comm.allreduce(state_of(comm.rank))
        team_of(comm).channel.transport.timeout = 0.3  # only now: on a busy machine the first may take longer
        if comm.rank == 2:
            while len(failed) < 2:
                time.sleep(0.01)
            return None
        with pytest.raises(RankTimeout, match="nothing came from rank 2 on host localhost") as caught:
            comm.allreduce(state_of(comm.rank))
        failed.append(comm.rank)
        return caught.value.ranks, caught.value.step

    failed: list[int] = []
    assert run_ranks(3, body)[:2] == [((2,), 2), ((2,), 2)]
