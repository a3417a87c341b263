"""How many threads a call takes, and why; and that no other library's threads come with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import treeattn
from treeattn.errors import InputError
from treeattn.kernels import processors
from treeattn.kernels.processors import thread_count, thread_share

LAUNCHERS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_LOCALID", "TREEATTN_THREADS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Start without a launcher, a limit or a memory of earlier ones."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processors, "_quota", lambda: sys.maxsize)
    processors._part_of_host.cache_clear()
    yield
    processors._part_of_host.cache_clear()


def share(monkeypatch, own, job, **environment):
    """Threads of a process that may use ``own`` processors, under a launcher that may use ``job``."""
    monkeypatch.setattr(processors, "_processors", lambda pid: job if pid else own)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processors._part_of_host.cache_clear()
    return thread_share()


def test_a_process_alone_takes_all_that_it_may_use(monkeypatch):
    assert share(monkeypatch, own=16, job=1).threads == 16
    assert thread_share().reason == "all 16 processors that this process may use"


@pytest.mark.parametrize(("ranks", "threads"), [("1", 16), ("5", 3), ("16", 1), ("40", 1)])
@pytest.mark.parametrize("launcher", ["OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"])
def test_ranks_of_one_host_share_its_processors(monkeypatch, launcher, ranks, threads):
    assert share(monkeypatch, own=16, job=16, **{launcher: ranks}).threads == threads
    assert ranks == "1" or f"16 processors on this host, for {ranks} rank" in thread_share().reason


def test_slurm_tells_the_ranks_of_each_node(monkeypatch):
    assert share(monkeypatch, own=16, job=16, SLURM_TASKS_PER_NODE="4(x2),3").threads == 16, "outside of its ranks"
    assert share(monkeypatch, own=16, job=16, SLURM_LOCALID="0").threads == 4


def test_a_bound_rank_keeps_the_processors_it_was_given(monkeypatch):
    assert share(monkeypatch, own=4, job=16, OMPI_COMM_WORLD_LOCAL_SIZE="4").threads == 4
    assert share(monkeypatch, own=1, job=16, OMPI_COMM_WORLD_LOCAL_SIZE="4").threads == 1


def test_the_variable_goes_before_everything(monkeypatch):
    found = share(monkeypatch, own=4, job=4, OMPI_COMM_WORLD_LOCAL_SIZE="4", TREEATTN_THREADS=" 07 ")
    assert found == (7, "TREEATTN_THREADS= 07 ")


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", "999999", "1025", "20000", "+2", "1_0", "\u0662", " "])
def test_a_number_of_threads_that_is_none_is_refused(monkeypatch, count):
    monkeypatch.setenv("TREEATTN_THREADS", count)
    ones = np.ones((1, 1, 1, 4), np.float32)
    for _ in range(2):  # it is as wrong the next time
        with pytest.raises(InputError, match=r"^TREEATTN_THREADS: expected a number of threads from 1 to 1024, got"):
            treeattn.attention(ones, ones, ones)


def test_the_most_threads_that_can_be_asked_for(monkeypatch):
    assert share(monkeypatch, own=4, job=4, TREEATTN_THREADS="1024").threads == 1024


def test_an_empty_variable_is_as_if_not_set(monkeypatch):
    assert share(monkeypatch, own=4, job=4, TREEATTN_THREADS="").threads == 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_affinity_is_what_the_system_says_now():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert thread_count() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert thread_count() == len(before)


@pytest.mark.parametrize(
    ("limit", "processors_worth"),
    [("max 100000", sys.maxsize), ("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), (None, sys.maxsize)],
)
@pytest.mark.parametrize("group", ["", "kubepods/pod1"])
def test_a_control_groups_quota_is_read(monkeypatch, tmp_path, group, limit, processors_worth):
    monkeypatch.undo()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"4:memory:/elsewhere\n0::/{group}\n")
    (tmp_path / "sys/fs/cgroup" / group).mkdir(parents=True)
    if limit is not None:
        (tmp_path / "sys/fs/cgroup" / group / "cpu.max").write_text(limit + "\n")
    assert processors._quota(tmp_path) == processors_worth


def test_a_quota_is_shared_like_processors(monkeypatch):
    monkeypatch.setattr(processors, "_quota", lambda: 6)
    assert share(monkeypatch, own=64, job=64).threads == 6
    found = share(monkeypatch, own=64, job=64, MPI_LOCALNRANKS="3")
    assert found == (2, "a quota of 6 processors on this host, for 3 rank(s)")


LOADED = """
import sys, numpy as np, treeattn
q, k = (np.ones((1, 2, n, 8), np.float32) for n in (1, 20000))
treeattn.attention(q, k, k)
print(*(name for name in sys.modules if name.endswith(("omppool", "tbbpool", "workqueue"))))
print(open("/proc/self/maps").read())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="this system doesn't list loaded libraries")
def test_no_openmp_comes_with_a_call():
    """numba's OpenMP layer, loaded before PyTorch, slows PyTorch down."""
    environment = {
        **os.environ,
        "TREEATTN_THREADS": "2",
        "PYTHONPATH": os.path.dirname(os.path.dirname(treeattn.__file__)),
    }
    done = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True)
    layers, maps = done.stdout.split("\n", 1)
    assert layers == ""
    assert "libpython" in maps or "python" in maps
    assert not re.findall(r"lib(?:gomp|omp|iomp5)\S*", maps)
