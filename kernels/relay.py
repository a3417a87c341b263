"""What a rank does of a step between hosts that is no message, in compiled code: before its messages, and after them.

A rank that leads a piece of its host's states gathers it in the window, and passes the result on there in the end; the
others follow it. Slots, flags and headers are those of `treeattn.kernels.window`, so that ranks which go through
the same rounds one by one understand each other with those that do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.kernels.array_objects import check_objects, elements_of
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
    numbers_at,
    raise_flag,
    sleep,
)
from treeattn.kernels.wire_rows import Address, merge_rows, merge_to_state, pack_rows
from treeattn.kernels.wire_storage import KINDS, row_bytes
from treeattn.wire_form import WireForm

__all__ = ["DIFFERENT", "Place", "Tables", "follow_at", "gather_at", "place_of", "spread_at", "table"]

Array: TypeAlias = npt.NDArray[Any]

SLEEPS = 2
"""How often a rank sleeps, and once more for each that it waits for, before it gives up and looks at the clock."""

DROWSY = 16
"""So many times it does not spin before it sleeps, where it had to sleep once."""


class Place(NamedTuple):
    """What a rank has of its own, in this order: addresses, but for these numbers.

    Behind them, as `place_of` has it, are its two slots, for even uses and for odd ones, for what it publishes before
    its messages, and the same for after them, 0 where it publishes nothing; then where the tables of `Tables` are; and
    then its records of all pieces, each address that of rows which are behind their header.
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
    width: int
    """Of a packed state."""
    records: int
    """How many there are."""


class Tables(NamedTuple):
    """What there is to do in a step, and with whom; all but ``came`` for even uses, and then for odd ones.

    Jobs are lines of `table`, slots are addresses.
    """

    packs: Array
    """Jobs that pack the state, to slots or records."""
    others: Array
    """Slots of the ranks of this host whose states are merged then."""
    merges: Array
    """Jobs that merge them, or copy what is alone."""
    came: Array
    """Records that come last in messages, each behind its header."""
    ends: Array
    """Jobs that merge what there is in the end, to a slot where there is a target."""
    leaders: Array
    """Slots of ranks of this host that publish other pieces."""
    answers: Array
    """Jobs that unpack these."""


_HEADER_AT, _ROOM_AT, _SPINS_AT, _YIELDS_AT, _DROWSY_AT, _SLEEP_AT, _STEPS_AT, _USES_AT = range(8)
_WIDTH_AT, _RECORD_COUNT_AT, _BEFORE_AT, _AFTER_AT = 8, 9, 10, 12
_PACKS_AT, _OTHERS_AT, _MERGES_AT, _CAME_AT, _ENDS_AT, _LEADERS_AT, _ANSWERS_AT, _RECORDS_AT = range(14, 38, 3)

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


def place_of(own: Place, slots: Sequence[int], tables: Tables, records: Sequence[int]) -> Array:
    """Write down for compiled code what a rank has; ``tables`` have to be kept, for only their addresses are there."""
    where = [(each.ctypes.data, len(each), each[:1].size) for each in tables]
    return np.array([*own, *slots, *chain(*where), *records], np.int64)


def gather_at(form: WireForm) -> Any:
    """Compiled: the first part of a step, before a rank's messages.

    Its arguments are addresses: of the state's array object, and of what `place_of` gives. It takes the next step's
    number, packs and publishes in any case; what it returns is what it found of the others: there are merged records
    if that is ``EQUAL``.
    """
    check_objects()
    return _GATHER[form.o_dtype]()


def spread_at(form: WireForm) -> Any:
    """Compiled: the last part of a step, after a rank's messages.

    Its arguments are addresses: of the result's array object, and of what `place_of` gives. It returns ``DIFFERENT``,
    and has done nothing, if a header is not its own; else it has published, and there is a result if that is ``EQUAL``;
    if ``WAITING``, others are late or differ.
    """
    check_objects()
    return _SPREAD[form.o_dtype]()


def follow_at(form: WireForm) -> Any:
    """Compiled: the whole step of a rank without messages.

    Its arguments are the addresses of the array objects of the state and of the result, and of what `place_of` gives.
    It returns 0 if there is a result, else 1 or 2 for the part that did not go well.
    """
    check_objects()
    return _FOLLOW[form.o_dtype]()


def _gather_of(dtype: Any, kind: Any) -> Any:
    @entry("int64(int64, int64)")
    def gather(state: int, place: int) -> int:
        found: int = _gather(elements_of(state), pointer(place, np.int64), dtype, kind)
        return found

    return gather


def _spread_of(dtype: Any, kind: Any) -> Any:
    @entry("int64(int64, int64)")
    def spread(out: int, place: int) -> int:
        found: int = _spread(elements_of(out), pointer(place, np.int64), dtype, kind)
        return found

    return spread


def _follow_of(dtype: Any, kind: Any) -> Any:
    @entry("int64(int64, int64, int64)")
    def follow(state: int, out: int, at: int) -> int:
        place = pointer(at, np.int64)
        if _gather(elements_of(state), place, dtype, kind) != EQUAL:
            return 1
        return 0 if _spread(elements_of(out), place, dtype, kind) == EQUAL else 2

    return follow


@inline
def _gather(state: Address, place: Any, dtype: Any, kind: Any) -> int:
    width, space, use, found = place[_WIDTH_AT], place[_ROOM_AT], _begin_step(place), EQUAL
    packs, merges, others = _jobs(place, _PACKS_AT, use), _jobs(place, _MERGES_AT, use), _slots(place, _OTHERS_AT, use)
    for at in range(len(packs)):
        job = packs[at]
        pack_rows(job[_TARGET], state + job[_FIRST] * width * itemsize(dtype), job[_ROWS], width, space, dtype, kind)
    _raise_flag(place, _BEFORE_AT, use)
    if others.size > 0:
        found = _await(others, use, place)
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
def _spread(out: Address, place: Any, dtype: Any, kind: Any) -> int:
    width, space, use = place[_WIDTH_AT], place[_ROOM_AT], pointer(place[_USES_AT], np.int64)[0] + 2
    ends, leaders = _jobs(place, _ENDS_AT, use), _slots(place, _LEADERS_AT, use)
    if compare(numbers_at(place[_CAME_AT], place[_CAME_AT + 1]), place[_HEADER_AT]) != EQUAL:
        return DIFFERENT
    for at in range(len(ends)):
        if ends[at][_TARGET] != 0:
            merge_rows(ends[at][_TARGET], _sources(ends[at]), ends[at][_ROWS], width, space, dtype, kind)
    _raise_flag(place, _AFTER_AT, use)
    _unpack(out, ends, width, space, dtype, kind)
    if leaders.size > 0:
        if _await(leaders, use, place) != EQUAL:
            return WAITING
        _unpack(out, _jobs(place, _ANSWERS_AT, use), width, space, dtype, kind)
    return EQUAL


@inline
def _unpack(out: Address, jobs: Array, width: int, space: int, dtype: Any, kind: Any) -> None:
    """Write rows to the result: what was merged to a target, or what is to be merged."""
    for at in range(len(jobs)):
        job = jobs[at]
        sources = _sources(job) if job[_TARGET] == 0 else job[_TARGET : _TARGET + 1]
        merge_to_state(out + job[_FIRST] * width * itemsize(dtype), sources, job[_ROWS], width, space, dtype, kind)


@inline
def _sources(job: Array) -> Array:
    return job[_SOURCES : _SOURCES + job[_COUNT]]


_GATHER = {name: _gather_of(*both) for name, both in KINDS.items()}
_SPREAD = {name: _spread_of(*both) for name, both in KINDS.items()}
_FOLLOW = {name: _follow_of(*both) for name, both in KINDS.items()}


@inline
def _begin_step(place: Any) -> int:
    """Write the next step's number to the header, and that to all records; give the number of the use that is next."""
    steps, header = pointer(place[_STEPS_AT], np.int64), place[_HEADER_AT]
    steps[0] += 1
    pointer(header, np.int64)[0] = steps[0]
    for at in range(place[_RECORD_COUNT_AT]):
        copy_words(place[_RECORDS_AT + at] - HEADER, header, HEADER)
    use: int = pointer(place[_USES_AT], np.int64)[0] + 1
    return use


@inline
def _jobs(place: Any, at: int, use: int) -> Array:
    """Give the lines of a table that are for even uses, the first half, or for odd ones."""
    count, columns = place[at + 1] // 2, place[at + 2]
    jobs: Array = numbers_at(place[at] + 8 * (use % 2) * count * columns, (count, columns))
    return jobs


@inline
def _slots(place: Any, at: int, use: int) -> Array:
    """Give the slots that are for even uses, or for odd ones."""
    count = place[at + 1] // 2
    slots: Array = numbers_at(place[at] + 8 * (use % 2) * count, count)
    return slots


@inline
def _raise_flag(place: Any, at: int, use: int) -> None:
    """Publish what is in this rank's slot, where somebody is to read it."""
    slot = place[at + use % 2]
    if slot != 0:
        copy_words(slot - HEADER, place[_HEADER_AT], HEADER)
        raise_flag(slot - BEFORE_STATE, use)


@inline
def _await(slots: Array, use: int, place: Any) -> int:
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
