"""What a rank does of a step between hosts that is no message, in compiled code: before its messages, and after them.

A rank that leads a piece of its host's states gathers it in the window, and passes the result on there in the end; the
others follow it. Slots, flags and headers are those of `treeattn.kernels.window`, so that ranks which go through
the same rounds one by one understand each other with those that do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.kernels.compilation import entry, inline
from treeattn.kernels.memory import itemsize, pointer
from treeattn.kernels.window import (
    BEFORE_STATE,
    DIFFERENT,
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
from treeattn.kernels.wire_storage import KINDS, row_bytes
from treeattn.wire_form import WireForm

__all__ = ["DIFFERENT", "Place", "follow_at", "gather_at", "spread_at", "table"]

Array: TypeAlias = npt.NDArray[Any]

SLEEPS = 2
"""How often a rank sleeps, and once more for each that it waits for, before it gives up and looks at the clock."""

DROWSY = 16
"""So many times it does not spin before it sleeps, where it had to sleep once."""


class Place(NamedTuple):
    """What a rank has of its own, in this order: addresses, but for three numbers.

    Behind them are its two slots, for even uses and for odd ones, for what it publishes before its messages, and the
    same for after them, 0 where it publishes nothing; and then its records of all pieces, each address that of rows
    which are behind their header.
    """

    header: int
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


_HEADER_AT, _ROOM_AT, _SPINS_AT, _YIELDS_AT, _DROWSY_AT, _SLEEP_AT, _STEPS_AT, _USES_AT = range(8)
_BEFORE_AT, _AFTER_AT, _RECORDS_AT = 8, 10, 12

_TARGET, _FIRST, _ROWS, _COUNT, _SOURCES = range(5)


def table(jobs: Sequence[tuple[int, int, int, Sequence[int]]]) -> Array:
    """Write down for compiled code which rows of states are packed, merged or unpacked: a job in each line.

    A job is the address of wire rows to write, 0 where they go to the result alone; which of a state's rows is the
    first of them, and how many there are; and the addresses of wire rows to merge, in that order.
    """
    longest = max((len(sources) for *_, sources in jobs), default=0)
    lines = np.zeros((len(jobs), _SOURCES + longest), np.int64)
    for line, (*rows, sources) in zip(lines, jobs, strict=True):
        line[: _SOURCES + len(sources)] = *rows, len(sources), *sources
    return lines


def gather_at(form: WireForm) -> Any:
    """Compiled: the first part of a step, before a rank's messages.

    Its arguments are the state; jobs that pack it, to slots or records; the slots of the ranks of this host whose
    states are merged then; jobs that merge them, or copy what is alone; and what `Place` names. Of jobs and slots there
    are those for even uses, and then as many for odd ones. It takes the next step's number, packs and publishes in any
    case; what it returns is what it found of the others: there are merged records if that is ``EQUAL``.
    """
    return _GATHER[form.o_dtype]()


def spread_at(form: WireForm) -> Any:
    """Compiled: the last part of a step, after a rank's messages.

    Its arguments are the result; the records that came last, each behind its header; jobs that merge what there is, to
    a slot where there is a target; the slots of ranks of this host that publish other pieces; jobs that unpack these;
    and what `Place` names. Jobs and slots are for even and odd uses. It returns ``DIFFERENT``, and has done nothing, if
    a header is not its own; else it has published, and there is a result if that is ``EQUAL``; if ``WAITING``, others
    are late or differ.
    """
    return _SPREAD[form.o_dtype]()


def follow_at(form: WireForm) -> Any:
    """Compiled: the whole step of a rank without messages.

    Its arguments are the state, and those of the last part and of the first one. It returns 0 if there is a result,
    else 1 or 2 for the part that did not go well.
    """
    return _FOLLOW[form.o_dtype]()


def _gather_of(dtype: Any, kind: Any) -> Any:
    states = f"{np.dtype(dtype).name}[:,:,:,::1]"

    @entry(f"int64({states}, int64[:,::1], int64[::1], int64[:,::1], int64[::1])")
    def gather(state: Array, packs: Array, others: Array, merges: Array, place: Array) -> int:
        found: int = _gather(state, packs, others, merges, place, dtype, kind)
        return found

    return gather


def _spread_of(dtype: Any, kind: Any) -> Any:
    states = f"{np.dtype(dtype).name}[:,:,:,::1]"

    @entry(f"int64({states}, int64[::1], int64[:,::1], int64[::1], int64[:,::1], int64[::1])")
    def spread(out: Array, came: Array, ends: Array, leaders: Array, answers: Array, place: Array) -> int:
        found: int = _spread(out, came, ends, leaders, answers, place, dtype, kind)
        return found

    return spread


def _follow_of(dtype: Any, kind: Any) -> Any:
    states = f"{np.dtype(dtype).name}[:,:,:,::1]"
    tables = "int64[:,::1], int64[::1], int64[:,::1]"

    @entry(f"int64({states}, {states}, {tables}, int64[::1], {tables}, int64[::1])")
    def follow(
        state: Array, out: Array, packs: Array, others: Array, merges: Array,
        came: Array, ends: Array, leaders: Array, answers: Array, place: Array,
    ) -> int:  # fmt: skip
        if _gather(state, packs, others, merges, place, dtype, kind) != EQUAL:
            return 1
        return 0 if _spread(out, came, ends, leaders, answers, place, dtype, kind) == EQUAL else 2

    return follow


@inline
def _gather(
    state: Array, packs: Array, others: Array, merges: Array, place: Array, dtype: Any, kind: Any
) -> int:  # fmt: skip
    width, space, use, found = state.shape[3], place[_ROOM_AT], _begin_step(place), EQUAL
    source, size = np.int64(state.ctypes.data), width * itemsize(dtype)
    packs, merges = _half(packs, use), _half(merges, use)
    for at in range(len(packs)):
        job = packs[at]
        pack_rows(job[_TARGET], source + job[_FIRST] * size, job[_ROWS], width, space, dtype, kind)
    _raise_flag(place[_BEFORE_AT:_AFTER_AT], use, place)
    if others.size > 0:
        found = _await(_half(others, use), use, place)
    if found == EQUAL:
        for at in range(len(merges)):
            _merge(merges[at], width, space, dtype, kind)
    return found


@inline
def _merge(job: Array, width: int, space: int, dtype: Any, kind: Any) -> None:
    """Merge wire rows, or copy those that nothing is merged with."""
    target, rows, sources = job[_TARGET], job[_ROWS], _sources(job)
    if sources.size == 1:
        copy_words(target, sources[0], rows * row_bytes(width, dtype, kind))
    else:
        merge_rows(target, sources, rows, width, space, dtype, kind)


@inline
def _spread(
    out: Array, came: Array, ends: Array, leaders: Array, answers: Array, place: Array, dtype: Any, kind: Any
) -> int:  # fmt: skip
    width, space, use = out.shape[3], place[_ROOM_AT], pointer(place[_USES_AT], np.int64)[0] + 2
    ends, answers = _half(ends, use), _half(answers, use)
    if compare(came, place[_HEADER_AT]) != EQUAL:
        return DIFFERENT
    for at in range(len(ends)):
        if ends[at][_TARGET] != 0:
            merge_rows(ends[at][_TARGET], _sources(ends[at]), ends[at][_ROWS], width, space, dtype, kind)
    _raise_flag(place[_AFTER_AT:_RECORDS_AT], use, place)
    _unpack(out, ends, space, dtype, kind)
    if leaders.size > 0:
        if _await(_half(leaders, use), use, place) != EQUAL:
            return WAITING
        _unpack(out, answers, space, dtype, kind)
    return EQUAL


@inline
def _unpack(out: Array, jobs: Array, space: int, dtype: Any, kind: Any) -> None:
    """Write rows to the result: what was merged to a target, or what is to be merged."""
    to, width = np.int64(out.ctypes.data), out.shape[3]
    for at in range(len(jobs)):
        job = jobs[at]
        sources = _sources(job) if job[_TARGET] == 0 else job[_TARGET : _TARGET + 1]
        merge_to_state(to + job[_FIRST] * width * itemsize(dtype), sources, job[_ROWS], width, space, dtype, kind)


@inline
def _sources(job: Array) -> Array:
    return job[_SOURCES : _SOURCES + job[_COUNT]]


_GATHER = {name: _gather_of(*both) for name, both in KINDS.items()}
_SPREAD = {name: _spread_of(*both) for name, both in KINDS.items()}
_FOLLOW = {name: _follow_of(*both) for name, both in KINDS.items()}


@inline
def _begin_step(place: Array) -> int:
    """Write the next step's number to the header, and that to all records; give the number of the use that is next."""
    steps, header = pointer(place[_STEPS_AT], np.int64), place[_HEADER_AT]
    steps[0] += 1
    pointer(header, np.int64)[0] = steps[0]
    for record in place[_RECORDS_AT:]:
        copy_words(record - HEADER, header, HEADER)
    use: int = pointer(place[_USES_AT], np.int64)[0] + 1
    return use


@inline
def _half(both: Array, use: int) -> Array:
    """Give what is for even uses, the first half, or for odd ones."""
    count, odd = len(both) // 2, use % 2
    return both[odd * count : (odd + 1) * count]


@inline
def _raise_flag(slots: Array, use: int, place: Array) -> None:
    """Publish what is in this rank's slot, where somebody is to read it."""
    slot = _half(slots, use)[0]
    if slot != 0:
        copy_words(slot - HEADER, place[_HEADER_AT], HEADER)
        raise_flag(slot - BEFORE_STATE, use)


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
