"""The project's own threads: a few, started once, that wait in compiled code, where they never need Python's lock.

numba's thread layers are not used: its OpenMP layer slows PyTorch's down when it is loaded first, and its work queue
can't be entered by two threads at once. Helpers are Python threads that stay inside `_serve`. A call writes its job
into a slot of the board, rings, works itself, closes the slot so that nobody joins any more, and waits for those who
have. Whatever it does is done even if nobody joins: others may be busy with another call.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types as _types

from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import add_at, call_part, load_acquire, pause, pointer, store_release, swap_if
from treeattn.kernels.processors import fair_share, thread_count

types: Any = _types  # untyped: so are the functions made of it

__all__ = ["Board", "look_again", "team", "work_together"]

BELL, RINGER, SLEEPERS, STOP, LOOKS, BED = 0, 8, 64, 128, 136, 192
"""Where on the board are: how often it was rung, on which processor last, the helpers that sleep, whether they are to
end, how often they look for another job before they sleep, and a semaphore."""

SLOTS, FIRST_SLOT, SLOT_BYTES = 8, 256, 128
"""Calls that can have helpers at once, and where their slots are."""

OWNED, STATE, PART, CALL, WORKSPACE, WORKSPACE_BYTES, END = 0, 8, 16, 24, 32, 40, 64
"""Where in a slot are: whether a call has it, its state, its job, and the semaphore of a caller that sleeps."""

SEAT, ASLEEP = 1 << 32, 1 << 16
"""What a slot's state counts: helpers that may still join in its upper half, those at work in its lowest bits, and
between the two whether the caller sleeps until they are done."""

HELPER_LOOKS, CALLER_LOOKS = 400, 2000
"""Times that a helper looks for another job before it sleeps, and a caller whether its helpers are done: some 200 µs,
and some 50. Helpers leave the processor to whoever waits for it between two looks, and look once where there are more
threads than this process's share of processors."""

ENDED = -1
"""What a helper gives when it is over, in place of a processor's number."""

CALLS_TO_A_LOOK = 32
"""Calls from one look at the processors and the environment to the next."""

sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inline
def work_together(board: int, helpers: int, part: int, call: int, workspace: int, size: int) -> None:
    """Run ``part(call, workspace)`` on this thread and up to ``helpers`` others, until all that began have ended.

    Each has a workspace of its own: they lie ``size`` bytes apart, this thread's first.
    """
    slot = _claim(board) if helpers > 0 else 0
    if slot != 0:
        _open(board, slot, helpers, part, call, workspace, size)
    call_part(part, (call, workspace))
    if slot != 0:
        _close(slot)


@inline
def _claim(board: int) -> int:
    """Take a free slot; 0 where there is none."""
    for slot in range(board + FIRST_SLOT, board + FIRST_SLOT + SLOTS * SLOT_BYTES, SLOT_BYTES):
        if load_acquire(slot + OWNED) == 0 and swap_if(slot + OWNED, 0, 1):
            return slot
    return 0


@inline
def _open(board: int, slot: int, helpers: int, part: int, call: int, workspace: int, size: int) -> None:
    job = pointer(slot + PART, np.int64)
    job[0], job[1], job[2], job[3] = part, call, workspace, size
    store_release(slot + STATE, helpers * SEAT)
    store_release(board + RINGER, sched_getcpu())
    add_at(board + BELL, 1)
    for _ in range(_take(board + SLEEPERS, helpers)):
        sem_post(board + BED)


@inline
def _take(counter: int, wanted: int) -> int:
    """Take up to ``wanted`` from a counter, and give how many they are."""
    while True:
        found = load_acquire(counter)
        taken: int = min(found, wanted)
        if taken == 0 or swap_if(counter, found, found - taken):
            return taken


@inline
def _close(slot: int) -> None:
    """Let nobody join any more, and wait for those who have."""
    found = load_acquire(slot + STATE)
    while not swap_if(slot + STATE, found, found % SEAT):
        found = load_acquire(slot + STATE)
    for _ in range(CALLER_LOOKS):
        if load_acquire(slot + STATE) == 0:
            break
        pause()
    if load_acquire(slot + STATE) != 0 and add_at(slot + STATE, ASLEEP) != 0:
        while sem_wait(slot + END) != 0:  # a signal came
            pass
    store_release(slot + OWNED, 0)


@entry("int64(int64, int64)")
def _serve(board: int, moves: int) -> int:
    """Help whoever rings, as a thread of the team, until told to stop; then give `ENDED`.

    A system may wake a helper on the processor of the caller, while another is idle, and go on to do so: a virtual
    processor that has been halted does not look idle. Where a helper ``moves``, it gives that processor's number then.
    """
    while load_acquire(board + STOP) == 0:
        seen = load_acquire(board + BELL)
        if not _help_any(board) and not _rings(board, seen):
            _sleep(board, seen)
            if moves and sched_getcpu() == load_acquire(board + RINGER):
                return int(load_acquire(board + RINGER))
    return ENDED


@inline
def _help_any(board: int) -> bool:
    """Join a call that still takes helpers, and tell whether there was one."""
    for slot in range(board + FIRST_SLOT, board + FIRST_SLOT + SLOTS * SLOT_BYTES, SLOT_BYTES):
        found = load_acquire(slot + STATE)
        while found >= SEAT:
            if swap_if(slot + STATE, found, found - SEAT + 1):
                _help(slot, found // SEAT)
                return True
            found = load_acquire(slot + STATE)
    return False


@inline
def _help(slot: int, number: int) -> None:
    """Do the slot's job in workspace ``number``. Once the last helper has left, the slot is the caller's alone."""
    job = pointer(slot + PART, np.int64)
    call_part(job[0], (job[1], job[2] + number * job[3]))
    if add_at(slot + STATE, -1) == ASLEEP + 1:
        sem_post(slot + END)


@inline
def _rings(board: int, seen: int) -> bool:
    for _ in range(load_acquire(board + LOOKS)):
        if load_acquire(board + BELL) != seen:
            return True
        sched_yield()
    return False


@inline
def _sleep(board: int, seen: int) -> None:
    """Sleep until woken, unless it rang meanwhile; who wakes a helper has taken it off the counter before."""
    add_at(board + SLEEPERS, 1)
    if load_acquire(board + BELL) != seen and _take(board + SLEEPERS, 1) == 1:
        return
    while sem_wait(board + BED) != 0:  # a signal came
        pass


class Board:
    """Where calls and helpers meet. Helpers are daemons: they hold nothing that has to be put in order."""

    def __init__(self) -> None:
        self._memory = np.zeros(FIRST_SLOT + (SLOTS + 1) * SLOT_BYTES, np.uint8)
        self.address = -(-self._memory.ctypes.data // SLOT_BYTES) * SLOT_BYTES
        self._c, self._lock = ctypes.CDLL(None), threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._dismissed = False
        for semaphore in (BED, *(FIRST_SLOT + i * SLOT_BYTES + END for i in range(SLOTS))):
            self._c.sem_init(ctypes.c_void_p(self.address + semaphore), 0, 0)

    def gather(self, helpers: int, looks: int = 1) -> None:
        """See to it that there are so many helpers, which look so often for another job before they sleep.

        Where the system gives fewer threads, calls do without the others.
        """
        self._write(LOOKS, looks)
        with self._lock:
            while len(self._helpers) < helpers and not self._dismissed:
                helper = threading.Thread(target=self._help, args=(_serve(),), name="treeattn", daemon=True)
                try:
                    helper.start()
                except RuntimeError:  # there are too many, or the program ends
                    return
                self._helpers.append(helper)

    def _write(self, place: int, number: int) -> None:
        ctypes.c_int64.from_address(self.address + place).value = number

    def _help(self, serve: Callable[[int, bool], int]) -> None:
        """Be a helper, on other processors than that of a caller on which it has been woken."""
        allowed = chosen = os.sched_getaffinity(0)
        while (crowded := serve(self.address, len(allowed) > 1)) != ENDED:
            now = os.sched_getaffinity(0)
            if now != chosen:  # somebody has said anew where this process may run
                allowed = now
            chosen = allowed - {crowded} or allowed
            with contextlib.suppress(OSError):  # they may not be ours any more: then it stays where it is
                os.sched_setaffinity(0, chosen)

    def dismiss(self) -> None:
        """End the helpers, before the code that they run is unloaded; calls do without them from now on."""
        with self._lock:
            self._dismissed = True
        self._write(STOP, 1)
        for _ in self._helpers:
            self._c.sem_post(ctypes.c_void_p(self.address + BED))
        for helper in self._helpers:
            helper.join(1.0)


class _Team:
    """The board, and how many threads a call may use. To look at that takes longer than a small call."""

    def __init__(self) -> None:
        self.board = Board()
        self.threads = self.calls = 0

    def look(self) -> None:
        """Look again how many threads there may be."""
        self.threads, self.calls = thread_count(), CALLS_TO_A_LOOK - 1
        self.board.gather(self.threads - 1, HELPER_LOOKS if self.threads <= fair_share().threads else 1)


def team() -> tuple[int, int]:
    """Give the address of the board, and the number of threads that a call may use as it was some calls ago."""
    _team.calls -= 1
    if _team.calls < 0:
        _team.look()
    return _team.board.address, _team.threads


def look_again() -> None:
    """Have the next call look anew how many threads it may use."""
    _team.calls = 0


_team = _Team()


def _start_anew() -> None:
    """Forget the team in a forked child, where the helpers are gone and the board was caught in the middle."""
    global _team
    _team = _Team()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)

atexit.register(lambda: _team.board.dismiss())
