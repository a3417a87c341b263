"""How many threads a call may use, and why: this rank's share of what its host gives.

Ranks of one host don't crowd each other out: each takes as many threads as it was bound to processors, and no more
than its part of those of the whole job. A container's quota counts too, since threads beyond it are only made to wait.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from treeattn.errors import InputError

__all__ = ["VARIABLE", "Share", "fair_share", "thread_count", "thread_share"]

VARIABLE = "TREEATTN_THREADS"
MOST_THREADS = 1024
"""What the variable may ask for: all of them are started, needed or not, and a slip of the keyboard is no wish."""


class Share(NamedTuple):
    """Threads that a call may use, and what decided it."""

    threads: int
    reason: str


def thread_count() -> int:
    """Threads that a call may use: ``TREEATTN_THREADS``, or this rank's share of the host's processors.

    Raises
    ------
    InputError
        ``TREEATTN_THREADS`` is not a whole number from 1 to `MOST_THREADS`; where it is empty, it is as if not set.
    """
    return thread_share().threads


def thread_share() -> Share:
    """Give what `thread_count` gives, with the reason."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        return Share(_number(wanted), f"{VARIABLE}={wanted}")
    return fair_share()


def fair_share() -> Share:
    """Give this rank's share of the host's processors, whatever ``TREEATTN_THREADS`` says."""
    own, host = _processors(0), _part_of_host()
    return host if host.threads < own else Share(own, f"all {own} processors that this process may use")


@cache
def _number(wanted: str) -> int:
    number = int(wanted) if re.fullmatch(r"\s*0*\d{1,4}\s*", wanted, re.ASCII) else 0
    if not 1 <= number <= MOST_THREADS:
        raise InputError.of(VARIABLE, expected=f"a number of threads from 1 to {MOST_THREADS}", got=repr(wanted))
    return number


@cache
def _part_of_host() -> Share:
    """Divide what all ranks of this host have together; looked at once, since it doesn't change."""
    ranks, quota = _ranks_on_host(), _quota()
    processors = _processors(os.getppid()) if ranks > 1 else sys.maxsize
    limit = f"a quota of {quota}" if quota < processors else f"the job's {processors}"
    return Share(max(1, min(quota, processors) // ranks), f"{limit} processors on this host, for {ranks} rank(s)")


def _processors(pid: int) -> int:
    """Processors that a process may use; the launcher's are those of the whole job, before it bound its ranks."""
    try:
        return len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _ranks_on_host() -> int:
    """Ranks that share this host, from the launcher's environment; 1 without a launcher."""
    names = ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"]
    if "SLURM_LOCALID" in os.environ:  # an allocation sets the others outside of its ranks too
        names += ["SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]
    for name in names:
        if found := re.match(r"\d+", os.environ.get(name, "")):
            return max(1, int(found.group()))
    return 1


def _quota(root: Path = Path("/")) -> int:
    """Processors' worth of time that this process's control group may take, rounded up; sys.maxsize without a limit.

    Source: the Linux kernel's documentation of cgroup v2, ``cpu.max``: microseconds, or "max", in each period.
    """
    try:
        group = (root / "proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        limit, period = (root / "sys/fs/cgroup" / group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return sys.maxsize
    return sys.maxsize if limit == "max" else -(-int(limit) // int(period))
