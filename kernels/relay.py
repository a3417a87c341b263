"""What a rank does of a step between hosts that is no message, in compiled code: before its host's messages, and after.

The leader of a host gathers the states of its host's ranks in the window, and passes the result on there in the end;
the others follow it. Slots, flags and headers are those of `treeattn.kernels.window`, so that ranks which go through
the same rounds one by one understand each other with those that do this.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import pointer
from treeattn.kernels.window import (
    BEFORE_STATE,
    EQUAL,
    HEADER,
    WAITING,
    collect,
    compare,
    copy_words,
    raise_flag,
    sleep,
)
from treeattn.kernels.wire_rows import merge_rows, merge_to_state, pack_rows
from treeattn.kernels.wire_storage import KINDS
from treeattn.wire_form import WireForm

__all__ = ["Place", "follow_at", "gather_at", "spread_at"]

Array: TypeAlias = npt.NDArray[Any]

SLEEPS = 2
"""How often a rank sleeps, and once more for each that it waits for, before it gives up and looks at the clock."""

DROWSY = 16
"""So many times it does not spin before it sleeps, where it had to sleep once."""


class Place(NamedTuple):
    """What a rank has of its own, in this order: addresses, but for three numbers."""

    header: int
    record: int
    """Of its rows, which are behind their header."""
    room: int
    """As much as `treeattn.kernels.window.room` gives."""
    spins: int
    yields: int
    drowsy: int
    """How many times more it will not spin."""
    sleep: int
    """Seconds and nanoseconds of a sleep at most."""
    steps: int
    uses: int
    """Where they are counted."""
    even_slot: int
    odd_slot: int
    """0 where nobody is there to read them."""


_HEADER_AT, _RECORD_AT, _ROOM_AT, _SPINS_AT, _YIELDS_AT, _DROWSY_AT = range(6)
_SLEEP_AT, _STEPS_AT, _USES_AT, _SLOT_AT = range(6, 10)


def follow_at(form: WireForm) -> Any:
    """Compiled: the step of a rank that is not its host's leader.

    Its arguments are the state; the result; the leader's slots, for even uses and for odd ones; and what `Place` names.
    It takes the next step's number and publishes in any case; what it returns is what it found of the leader, and there
    is a result if that is ``EQUAL``.
    """
    return _FOLLOW[form.o_dtype]()


def gather_at(form: WireForm) -> Any:
    """Compiled: the first part of a leader's step, before its messages.

    Its arguments are the state; the slots of the other ranks of the host, for even uses and then for odd ones;
    likewise the rows to merge, its own record among them, in the order of merging; and what `Place` names. It takes the
    next step's number and packs in any case; what it returns is what it found of the others: there is a merged record
    if that is ``EQUAL``.
    """
    return _GATHER[form.o_dtype]()


def spread_at(form: WireForm) -> Any:
    """Compiled: the last part of a leader's step, after its messages.

    Its arguments are the result; the rows to merge, in that order, each behind its header; and what `Place` names. It
    returns whether all headers are its own: if that is ``EQUAL``, it has published, where somebody is to read it, and
    there is a result.
    """
    return _SPREAD[form.o_dtype]()


def _follow_of(dtype: Any, kind: Any) -> Any:
    states = f"{np.dtype(dtype).name}[:,:,:,::1]"

    @entry(f"int64({states}, {states}, int64[::1], int64[::1])")
    def follow(state: Array, out: Array, leader: Array, place: Array) -> int:
        width, space, use = state.shape[3], place[_ROOM_AT], _begin_step(place)
        rows, slot, answer = state.size // width, _half(place[_SLOT_AT:], use)[0], _half(leader, use + 1)
        copy_words(slot - HEADER, place[_HEADER_AT], HEADER)
        pack_rows(slot, np.int64(state.ctypes.data), rows, width, space, dtype, kind)
        raise_flag(slot - BEFORE_STATE, use)
        found: int = _await(answer, use + 1, place)
        if found == EQUAL:
            merge_to_state(np.int64(out.ctypes.data), answer, rows, width, space, dtype, kind)
        return found

    return follow


def _gather_of(dtype: Any, kind: Any) -> Any:
    states = f"{np.dtype(dtype).name}[:,:,:,::1]"

    @entry(f"int64({states}, int64[::1], int64[::1], int64[::1])")
    def gather(state: Array, others: Array, sources: Array, place: Array) -> int:
        width, space, use = state.shape[3], place[_ROOM_AT], _begin_step(place)
        rows, record, found = state.size // width, place[_RECORD_AT], EQUAL
        copy_words(record - HEADER, place[_HEADER_AT], HEADER)
        pack_rows(record, np.int64(state.ctypes.data), rows, width, space, dtype, kind)
        if others.size > 0:
            found = _await(_half(others, use), use, place)
            if found == EQUAL:
                merge_rows(record, _half(sources, use), rows, width, space, dtype, kind)
        return found

    return gather


def _spread_of(dtype: Any, kind: Any) -> Any:
    states = f"{np.dtype(dtype).name}[:,:,:,::1]"

    @entry(f"int64({states}, int64[::1], int64[::1])")
    def spread(out: Array, sources: Array, place: Array) -> int:
        width, space, found = out.shape[3], place[_ROOM_AT], compare(sources, place[_HEADER_AT])
        if found == EQUAL:
            rows, use = out.size // width, pointer(place[_USES_AT], np.int64)[0] + 2
            slot = _half(place[_SLOT_AT:], use)
            if slot[0] != 0:
                copy_words(slot[0] - HEADER, place[_HEADER_AT], HEADER)
                merge_rows(slot[0], sources, rows, width, space, dtype, kind)
                raise_flag(slot[0] - BEFORE_STATE, use)
                sources = slot
            merge_to_state(np.int64(out.ctypes.data), sources, rows, width, space, dtype, kind)
        return found

    return spread


_FOLLOW = {name: _follow_of(*both) for name, both in KINDS.items()}
_GATHER = {name: _gather_of(*both) for name, both in KINDS.items()}
_SPREAD = {name: _spread_of(*both) for name, both in KINDS.items()}


@inline
def _begin_step(place: Array) -> int:
    """Write the next step's number to the header; give the number of the use that is next."""
    steps = pointer(place[_STEPS_AT], np.int64)
    steps[0] += 1
    pointer(place[_HEADER_AT], np.int64)[0] = steps[0]
    use: int = pointer(place[_USES_AT], np.int64)[0] + 1
    return use


@inline
def _half(both: Array, use: int) -> Array:
    """Give what is for even uses, the first half, or for odd ones."""
    size, odd = both.size // 2, use % 2
    return both[odd * size : (odd + 1) * size]


@inline
def _await(slots: Array, use: int, place: Array) -> int:
    """Look for what others publish, and sleep until they do."""
    header, spins, yields = place[_HEADER_AT], place[_SPINS_AT], place[_YIELDS_AT]
    if place[_DROWSY_AT] > 0:
        place[_DROWSY_AT] -= 1
        spins, yields = 1, 0
    found = collect(slots, header, use, spins, yields)
    sleeps = SLEEPS + slots.size
    while found == WAITING and sleeps > 0:
        place[_DROWSY_AT] = DROWSY
        sleep(slots, use, place[_SLEEP_AT])
        found = collect(slots, header, use, 1, 0)
        sleeps -= 1
    return found
