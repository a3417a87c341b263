"""Swapping states through memory that the ranks of one host share: publish, wait for the others, merge.

Each rank has two slots in the memory and takes them in turn; a use is one publishing of one of them. A slot is a
flag, a header and a state's wire rows, and its address is that of the rows. The flag is the number of the use, stored
last and read first, by atomic operations that order all other accesses, on processors that would reorder them too.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple, TypeAlias

import numba as _numba
import numpy as np
import numpy.typing as npt
from numba import types as _types

from treeattn.kernels.array_objects import check_objects, elements_of
from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import (
    fence,
    hold_threads,
    itemsize,
    let_threads_run,
    load_acquire,
    nanoseconds,
    next_task,
    pointer,
    store_release,
)
from treeattn.kernels.turns import end_turn, take_turn
from treeattn.kernels.wire_rows import Address, merge_to_state, pack_rows, room
from treeattn.kernels.wire_storage import KINDS, row_bytes
from treeattn.wire_form import WireForm

numba: Any = _numba  # untyped, like the next: its names appear at run time
types: Any = _types

__all__ = [
    "BEFORE_STATE",
    "BUSY",
    "DIFFERENT",
    "EQUAL",
    "HEADER",
    "RESULT",
    "WAITING",
    "Own",
    "collect",
    "collect_at",
    "compare",
    "copy_words",
    "numbers_at",
    "publish_at",
    "raise_flag",
    "room",
    "sleep",
    "sleep_at",
    "swap_at",
]

Array: TypeAlias = npt.NDArray[Any]

BEFORE_STATE = 64
"""Bytes of a slot before its state; they begin with the flag."""

HEADER = 32
"""The last bytes before the state, which are the header."""

EQUAL, DIFFERENT, WAITING = 0, 1, 2
"""What a rank finds: all headers are its own; some are not; some rank has not published yet."""

BUSY = -1
"""What a step says that it was not the turn of."""

ASLEEP = 8
"""Where in a slot, after the flag, it is said that somebody sleeps until the flag changes."""

TAKEN, MERGED, RESULT = 0, 64, 128
"""Where, in what ranks that merge together have in common, the parts are counted that were taken and that are merged,
each count on a cache line of its own; and where the result is."""


class Own(NamedTuple):
    """What a rank has of its own in a swap, in this order: addresses, but for numbers of spins, yields, parts."""

    header: int
    room: int
    """As much as `room` gives."""
    spins: int
    yields: int
    parts: int
    """Into which ranks that merge together cut the rows, to take them one by one."""
    steps: int
    uses: int
    rounds: int
    """Where they are counted."""
    peak_bytes: int
    products: int
    """Where it is said what the last operation took."""
    taken_bytes: int
    """What this one takes; it makes no products."""
    even_slot: int
    odd_slot: int
    even_common: int
    odd_common: int
    """What ranks that share the merging have in common; 0 where each merges for itself."""
    rows: int
    width: int
    """Of a state."""
    ranks: int
    guard: int
    """Who gives it its turn: see `treeattn.kernels.turns`."""
    slots: int
    """Where the slots of all ranks are named, in the order of merging, for even uses and for odd ones, with room for
    as many addresses as there are ranks behind them."""


_AWAKE = 20_000_000
"""Nanoseconds in which a rank gives up its core at most, however few times that is.

Beside another program that computes it has its core back after that one's turn, of milliseconds: 5000 times took 24 to
84 s with 4 such programs for each core.
"""

_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 0)
"""Linux's number for the call by which a process sleeps until a word in shared memory changes; 0 where unknown."""

_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1

_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


def publish_at() -> Any:
    """Compiled: (slot, header address, state address, bytes of the state, use)."""
    return _publish_state()


def collect_at() -> Any:
    """Compiled: (slots of the others, header address, use, spins, yields) to what is found there.

    ``spins`` is how often to look at a flag before giving up the core, ``yields`` how often to do that at most for one
    flag, within some milliseconds.
    """
    return _collect_headers()


def sleep_at() -> Any:
    """Compiled: (slots of the others, use, address of seconds and nanoseconds) sleeps until some rank publishes.

    That long at most, and not at all where everyone has published or the system has no such sleep.
    """
    return _sleep_until_published()


def swap_at(form: WireForm) -> Any:
    """Compiled: a whole step of ranks that all get the merge of all states.

    Its arguments are addresses, of the array objects of the rank's state and of the result, and of what `Own` names,
    and the header's last word. Where it is not its turn it does nothing and returns ``BUSY``. Else it takes the next
    step's number and publishes; if what it finds and returns is ``EQUAL``, it has merged, counted a use and a round,
    and ended its turn.
    """
    check_objects()
    return _SWAP[form.o_dtype]()


@entry("void(int64, int64, int64, int64, int64)")
def _publish_state(slot: int, header: int, state: int, size: int, use: int) -> None:
    _publish(slot, header, state, size, use)


@entry("int64(int64[::1], int64, int64, int64, int64)")
def _collect_headers(slots: Array, header: int, use: int, spins: int, yields: int) -> int:
    found: int = collect(slots, header, use, spins, yields)
    return found


@entry("void(int64[::1], int64, int64)")
def _sleep_until_published(slots: Array, use: int, limit: int) -> None:
    sleep(slots, use, limit)


@inline
def sleep(slots: Array, use: int, limit: int) -> None:
    """Sleep until the first of these that has not published does so, ``limit`` at most."""
    for slot in slots:
        flag = slot - BEFORE_STATE
        seen = load_acquire(flag)
        if seen != use:
            store_release(flag + ASLEEP, 1)
            fence()
            if _FUTEX != 0 and load_acquire(flag) == seen:
                _syscall(_FUTEX, flag, _FUTEX_WAIT, seen & 0xFFFFFFFF, limit, 0, 0)
            return


def _swap_of(dtype: Any, kind: Any) -> Any:
    @entry("int64(int64, int64, int64, uint64)", nogil=False)
    def swap(state: int, out: int, own: int, check: int) -> int:
        places = pointer(own, np.int64)
        if not take_turn(places[_GUARD_AT]):
            return BUSY
        kept = let_threads_run()
        pointer(places[_HEADER_AT], np.uint64)[_CHECK_AT] = check
        found: int = _swap(elements_of(state), elements_of(out), places, dtype, kind)
        hold_threads(kept)
        if found == EQUAL:
            end_turn(places[_GUARD_AT])
        return found

    return swap


_SWAP = {name: _swap_of(*both) for name, both in KINDS.items()}
_HEADER_AT, _ROOM_AT, _SPINS_AT, _YIELDS_AT, _PARTS_AT, _STEPS_AT, _USES_AT, _ROUNDS_AT = range(8)
_PEAK_AT, _PRODUCTS_AT, _TAKEN_BYTES_AT, _SLOT_AT, _, _COMMON_AT, _ = range(8, 15)
_ROWS_AT, _WIDTH_AT, _RANKS_AT, _GUARD_AT, _SLOTS_AT = range(15, 20)
_CHECK_AT = 3  # word of a header


@inline
def _swap(state: Address, out: Address, own: Any, dtype: Any, kind: Any) -> int:
    header, space, spins, yields = own[_HEADER_AT], own[_ROOM_AT], own[_SPINS_AT], own[_YIELDS_AT]
    rows, width, ranks = own[_ROWS_AT], own[_WIDTH_AT], own[_RANKS_AT]
    steps, uses = pointer(own[_STEPS_AT], np.int64), pointer(own[_USES_AT], np.int64)
    rounds = pointer(own[_ROUNDS_AT], np.int64)
    steps[0] += 1
    pointer(header, np.int64)[0] = steps[0]
    use = uses[0] + 1
    odd = use % 2
    slot, common, slots = own[_SLOT_AT + odd], own[_COMMON_AT + odd], numbers_at(own[_SLOTS_AT], 3 * ranks)
    sources, shifted = slots[odd * ranks : (odd + 1) * ranks], slots[2 * ranks :]
    # All have left the use before the last, so nobody counts here any more, and nobody does again before all have
    # published. Each clears: any of the others may take a longer way through this step, which does not.
    if common != 0:
        pointer(common + TAKEN, np.int64)[0] = 0
        pointer(common + MERGED, np.int64)[0] = 0
    copy_words(slot - HEADER, header, HEADER)
    pack_rows(slot, state, rows, width, space, dtype, kind)
    raise_flag(slot - BEFORE_STATE, use)
    found = collect(sources, header, use, spins, yields)
    if found == EQUAL:
        if common == 0 or not _merge_together(
            out, sources, shifted, rows, width, space, common, own[_PARTS_AT], spins, yields, dtype, kind
        ):
            merge_to_state(out, sources, rows, width, space, dtype, kind)
        uses[0] = use
        rounds[0] += 1
        pointer(own[_PEAK_AT], np.int64)[0] = own[_TAKEN_BYTES_AT]
        pointer(own[_PRODUCTS_AT], np.int64)[0] = 0
    return found


@inline
def _merge_together(
    out: Address, sources: Array, shifted: Array, rows: int, width: int, space: int, common: int, parts: int,
    spins: int, yields: int, dtype: Any, kind: Any,
) -> bool:  # fmt: skip
    """Merge parts of the rows, as many as this rank gets hold of, and copy all; false where others don't end theirs."""
    size, wire_size, each = width * itemsize(dtype), row_bytes(width, dtype, kind), (rows + parts - 1) // parts
    parts = (rows + each - 1) // each
    part = next_task(common + TAKEN)
    while part < parts:
        first = part * each
        for index in range(sources.size):
            shifted[index] = sources[index] + first * wire_size
        merge_to_state(common + RESULT + first * size, shifted, min(each, rows - first), width, space, dtype, kind)
        next_task(common + MERGED)
        part = next_task(common + TAKEN)
    if not _reached(common + MERGED, parts, spins, yields):
        return False
    copy_words(out, common + RESULT, rows * size)
    return True


@inline
def _reached(counter: int, wanted: int, spins: int, yields: int) -> bool:
    looks, until = 0, 0
    while load_acquire(counter) != wanted:
        looks += 1
        if looks == spins:
            if yields == 0:
                return False
            until = _give_way(until)
            yields = yields - 1 if until >= 0 else 0
            looks = 0
    return True


@inline
def _give_way(until: int) -> int:
    """Give up the core, from the first time on, which ``until=0`` says, for `_AWAKE` in all; -1 when that is over."""
    _sched_yield()
    now: int = nanoseconds()
    if until == 0:
        return now + _AWAKE
    return until if now < until else -1


@inline
def _publish(slot: int, header: int, state: int, size: int, use: int) -> None:
    copy_words(slot - HEADER, header, HEADER)
    copy_words(slot, state, size)
    raise_flag(slot - BEFORE_STATE, use)


@inline
def raise_flag(flag: int, use: int) -> None:
    """Say that what belongs to this use is there, and wake who sleeps until then."""
    store_release(flag, use)
    fence()
    if load_acquire(flag + ASLEEP) != 0:
        store_release(flag + ASLEEP, 0)
        _syscall(_FUTEX, flag, _FUTEX_WAKE, _EVERYONE, 0, 0, 0)


@inline
def numbers_at(address: int, shape: Any) -> Array:
    """Give the numbers (int64) at an address as an array."""
    found: Array = numba.carray(pointer(address, np.int64), shape)
    return found


@inline
def copy_words(target: Address, source: Address, size: int) -> None:
    """Copy a multiple of 4 bytes."""
    to, words = pointer(np.int64(target), np.uint32), pointer(np.int64(source), np.uint32)
    for word in range(size // 4):
        to[word] = words[word]


@inline
def collect(slots: Array, header: int, use: int, spins: int, yields: int) -> int:
    """Look until each has published, as often as is said, and compare their headers with the own one."""
    for slot in slots:
        if not _reached(slot - BEFORE_STATE, use, spins, yields):
            return WAITING
    return compare(slots, header)


@inline
def compare(slots: Array, header: int) -> int:
    """Compare the headers before these states with the own one."""
    mine = pointer(header, np.int64)
    for slot in slots:
        theirs = pointer(slot - HEADER, np.int64)
        for word in range(HEADER // 8):
            if theirs[word] != mine[word]:
                return DIFFERENT
    return EQUAL
