"""Memory that the ranks of one host share, in which they swap states without messages.

It is a file in /dev/shm without a name, which the ranks of the host reach through /proc while the first of them has it
open, so that nothing is left of it when they end, however they end. Only where /proc does not show them each other, as
in containers of their own, it has a name, from when it is filled until all have mapped it. That takes two
exchanges between ranks; who is killed meanwhile leaves it, for without a name nobody else could open it.
It is not an MPI window: its room is reserved when it is made, so that a small /dev/shm is an answer and not a bus error
later; making it can't hang; and MPI need not be asked before its end.
Whether ranks share memory is not believed but tried: each reads there what the first has written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.execution.counting import Count
from treeattn.planning.plan import HEADER_BYTES
from treeattn.planning.topology import group_ranks
from treeattn.transports.base import Bytes
from treeattn.warning import Share, warn_once

__all__ = ["Window", "compiled", "open_window", "room_for_state", "room_to_make"]

Array: TypeAlias = npt.NDArray[Any]

FOLDER = Path("/dev/shm")

SMALL, LARGE = 64 * 1024, 4 * 1024 * 1024
"""Bytes of a state for which there is room from the beginning, and of the largest for which room is made."""

WINDOW_BYTES = 32 * 1024 * 1024
"""A window is no larger, unless its slots would be too small: containers have as little as 64 MB in /dev/shm."""

BEFORE_STATE = 64
"""Bytes of a slot before the state: a flag, and, right before the state, a header."""

SPINS, YIELDS = 20_000, 200
CROWDED_SPINS, CROWDED_YIELDS = 100, 5_000
"""Some milliseconds in all, with a core for each rank and without; `treeattn.kernels.window` sees to it.

Even with a core for each, Linux may leave two ranks on one for a long time: whoever spins keeps the other from running.
So a rank gives up its core after some 15 µs, several times what a step takes where nobody is late.
"""

BEFORE_RESULT = 128
"""Bytes before a result that ranks merge together: what they count."""

_TOKEN_BYTES = 32


def room_for_state(hosts: Sequence[str]) -> int:
    """Say how large a state may be to go through shared memory, where /dev/shm has room for it.

    It is a pure function of the host map: plans depend on it, and all ranks have to follow the same.

    Examples
    --------
    >>> [room_for_state(["a"] * ranks) // 1024 for ranks in (2, 4, 8, 100)]
    [4096, 3264, 1792, 128]
    """
    most = max(len(group) for group in group_ranks(hosts))
    return min(max(WINDOW_BYTES // (2 * most + 2) // SMALL * SMALL, SMALL), LARGE)


def room_to_make(nbytes: int, most: int) -> int:
    """Give the room of a window for states of so many bytes, which soon may be twice as large; ``most`` at most."""
    doublings = (max(nbytes - 1, 0) // SMALL).bit_length()
    return min(SMALL << doublings, most)


def compiled() -> ModuleType:
    """Give the compiled code for windows, which loads numba."""
    from treeattn.kernels import window

    return window


class Window:
    """The slots of one host's ranks, two for each, and two places for a result that they merge together; in turn.

    A rank may write to a slot again when everyone has read what it held two uses ago: every plan ends with every
    rank having heard of every rank, so whoever is in a plan has seen all others begin it, and they have left the
    plans before.

    Parameters
    ----------
    memory : mmap
    members : tuple of int
        The ranks of the host.
    cores : int
        That they have.
    room : int
        Bytes for a state in each slot; an attribute too.

    Attributes
    ----------
    uses : Count
        Uses so far, the same on every rank of the host between operations.
    spins, yields : int
        How often a swap looks at a flag before it gives up the core, and how often it does that before it becomes a
        round like others: it may spin for long where every rank has a core.
    parts : int
        Into which ranks that merge together cut the rows: one for each that can run at the same time. With more, cores
        take the count of them from each other more often: with 8 parts, 8 ranks on 2 cores of different dies took 60 us
        a step of 16,640 bytes, and 52 with 2.
    """

    def __init__(self, memory: mmap.mmap, members: tuple[int, ...], cores: int, room: int) -> None:
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)[_TOKEN_BYTES + (-_TOKEN_BYTES) % 64 :]
        self._index = {rank: number for number, rank in enumerate(members)}
        self._start = int(self._bytes.ctypes.data)
        self.uses, self.room, self._cores, roomy = Count(), room, cores, cores >= len(members)
        self.parts = min(cores, len(members))
        self.spins, self.yields = (SPINS, YIELDS) if roomy else (CROWDED_SPINS, CROWDED_YIELDS)

    def _offset(self, rank: int, use: int) -> int:
        return (2 * self._index[rank] + use % 2) * (BEFORE_STATE + self.room) + BEFORE_STATE

    def address(self, rank: int, use: int) -> int:
        """Address of a slot, which is that of its state."""
        return self._start + self._offset(rank, use)

    def common(self, use: int, nbytes: int) -> int:
        """Address of what ranks have in common that merge a state together; 0 where each merges for itself."""
        ranks = len(self._index)
        if nbytes > self.room or not merge_together(ranks, self._cores, nbytes):
            return 0
        return self._start + 2 * ranks * (BEFORE_STATE + self.room) + use % 2 * (BEFORE_RESULT + self.room)

    def header(self, rank: int, use: int) -> memoryview:
        """Header in a slot."""
        at = self._offset(rank, use)
        return memoryview(self._bytes.data)[at - HEADER_BYTES : at]

    def payload(self, rank: int, use: int, size: int) -> Bytes:
        """State in a slot, as bytes."""
        at = self._offset(rank, use)
        return self._bytes[at : at + size]


def open_window(
    hosts: tuple[str, ...], rank: int, share: Share, room: int = SMALL, larger_than: str = ""
) -> Window | None:
    """Map memory with the other ranks of this host; collective over all hosts.

    None where no two ranks share a host, and where the ranks of any host can't share memory: then all ranks use
    messages, and rank 0 warns of it once.

    Parameters
    ----------
    hosts : tuple of str
    rank : int
    share : callable
        Gives every rank's values, by rank, for this rank's.
    room : int
        Bytes for a state in each slot.
    larger_than : str
        What is said of the states that will be messages.
    """
    (members,) = (group for group in group_ranks(hosts) if rank in group)
    if len(set(hosts)) == len(hosts):
        return None
    for named in (False, True):
        memory, found, problems = _map_together(hosts, rank, members, _size(len(members), room), named, share)
        if not problems:
            cores = reduce(or_, (int(found[each]["cores"], 16) for each in members)).bit_count()
            return Window(memory or mmap.mmap(-1, _size(1, room)), members, cores, room)
        if any(each["path"] is None for each in found):  # no room, with a name or without
            break
    warn_once(f"{problems[0]}; ranks of one host will use messages{larger_than}", rank, share)
    return None


def _map_together(
    hosts: Sequence[str], rank: int, members: Sequence[int], size: int, named: bool, share: Share
) -> tuple[mmap.mmap | None, list[dict[str, Any]], list[str]]:
    """Map a new file with the other ranks of this host; give it, what every rank has told, and all ranks' problems."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    path: str | None = ""
    memory = problem = None
    with contextlib.ExitStack() as made:
        try:
            if members[0] == rank and len(members) > 1:
                path = made.enter_context(_file(token, size, named))
        except OSError as error:
            path, problem = None, f"no room for {size} bytes in {FOLDER} of host {hosts[rank]}: {error.strerror}"
        found = share({"path": path, "token": token.hex(), "cores": _cores()})
        told = found[members[0]]
        try:
            if len(members) > 1 and told["path"] is not None:
                memory = _map(told["path"], bytes.fromhex(told["token"]), size, named)
        except OSError as error:
            problem = f"ranks {members[0]} and {rank} of host {hosts[rank]} do not share {FOLDER}: {error.strerror}"
        problems = [each["problem"] for each in share({"problem": problem}) if each["problem"]]
    return memory, found, problems


def _size(members: int, room: int) -> int:
    return 64 + 2 * members * (BEFORE_STATE + room) + 2 * (BEFORE_RESULT + room)


def merge_together(ranks: int, cores: int, nbytes: int) -> bool:
    """Whether ranks each merge a part of a state's rows and copy the rest, instead of merging all.

    Every rank merging everything costs as many merges as there are ranks, each of as many states; together it is one
    merge, and a wait. The bits are the same. On 2 cores, together was faster at 4 ranks and at 8, and slower at 2. That
    large states gain by it where more ranks have a core each is what the bytes say, and was not measured.
    """
    return ranks > cores or (ranks > 2 and nbytes > SMALL)


def _cores() -> str:
    """Give the cores that this rank may use, as the bits of a number."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


@contextlib.contextmanager
def _file(token: bytes, size: int, named: bool) -> Iterator[str]:
    """Make a file whose room is reserved and that begins with ``token``; give the path to it for as long as that."""
    nameless = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)  # tempfile's can't have a name later
    with open(nameless, "w+b") as file, contextlib.ExitStack() as removed:
        os.posix_fallocate(file.fileno(), 0, size)
        file.write(token)
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        if named:  # only now: what ends this rank while there is a name leaves the file
            name = FOLDER / f"treeattn-{os.getpid()}-{secrets.token_hex(4)}"
            os.link(path, name, src_dir_fd=file.fileno())  # which has Python follow the link that ``path`` is
            removed.callback(name.unlink, missing_ok=True)
            path = str(name)
        yield path


def _map(path: str, token: bytes, size: int, named: bool) -> mmap.mmap:
    """Map a file, which may be another one on this host: what can't be it is not opened, nor what a name leads to."""
    found = os.stat(path, follow_symlinks=not named)
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise OSError(0, "it is another file")
    with open(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW * named), "r+b") as file:
        if file.read(_TOKEN_BYTES) != token:
            raise OSError(0, "it is another file")
        return mmap.mmap(file.fileno(), size)
