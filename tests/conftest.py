"""Fixtures that start real MPI processes. Pure test code that others may want is in `treeattn.testing`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from treeattn.backends import Backend, find
from treeattn.errors import TreeattnError
from treeattn.launch import Runtime, find_runtime, mpirun_command, mpirun_environment

TESTS = Path(__file__).parent
MPICH_PYTHON = TESTS.parent / ".venv-mpich" / "bin" / "python"
LAUNCHER_VARIABLES = ("OMPI_", "PMI", "PMIX_", "PRTE_", "SLURM_", "MPI_LOCAL", "HYDRA", "I_MPI_", "MPIR_")
JOB_VARIABLE = "TREEATTN_TEST_JOB"

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has all children ignore it, which the launcher's would go by

COMPILED = pytest.StashKey[list[str]]()

SEGMENTS = "sm_segment.*", "mpich_shm_*"
"""What Open MPI and MPICH have in /dev/shm, and leave there when a rank is killed."""

# Takes the host names of all ranks, `--` and a command: sets this rank's name and becomes the command.
BE_NAMED = """
shift "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" && hostname "$1"
while [ "$1" != -- ]; do shift; done
shift && exec "$@"
"""


@dataclass(frozen=True)
class Job:
    """What an MPI job left: exit status, all output, and the JSON lines that its ranks printed, by rank."""

    rc: int
    stdout: str
    stderr: str
    reports: list[dict[str, Any]]

    def of_all(self, ranks: int) -> list[dict[str, Any]]:
        """Give the reports, after a look whether each rank has sent one."""
        assert [report["rank"] for report in self.reports] == list(range(ranks)), self
        return self.reports

    def __str__(self) -> str:
        return f"exit status {self.rc}\n--- stdout of all ranks\n{self.stdout}\n--- stderr of all ranks\n{self.stderr}"


class MpiRun:
    """Runs ``tests/ranks/PROGRAM.py`` on real MPI ranks; the fixture `mpirun` gives one.

    A program is plain Python: it makes a communicator, asserts what only it can see, and prints at most one JSON
    object, in one write of less than 4096 bytes so that ranks don't cut into each other's lines::

        report = json.dumps({"rank": comm.rank, "total": total})
        os.write(1, (report + "\\n").encode())

    and the test looks at all of them::

        def test_total(mpirun):
            job = mpirun("total", 3, "--width", 64)
            assert [report["total"] for report in job.of_all(3)] == [3, 3, 3]

    Ranks fail by raising: call ``treeattn.launch.install_abort_hook()`` first thing, so that one rank's exception
    ends the others too, and with the output of all ranks in the test's failure.
    """

    def __init__(self, python: str = sys.executable) -> None:
        self.python, self.runtime = python, find_runtime(python)

    def __call__(
        self,
        program: str | Path | Sequence[str],
        ranks: int,
        *arguments: object,
        hosts: Sequence[str] | None = None,
        launcher: Callable[[list[str]], list[str]] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = True,
    ) -> Job:
        """Run a program on ``ranks`` ranks and wait for its end.

        Parameters
        ----------
        program : str, Path or sequence of str
            A name in ``tests/ranks`` (without ``.py``), the path of another script, or Python's own arguments, such
            as ``("-m", "treeattn", "doctor")``.
        ranks : int
        *arguments
            The program's arguments; numbers are fine.
        hosts : sequence of str, optional
            One host name per rank, which the ranks then really have, each in a UTS namespace of its own. The test is
            skipped where that is not allowed. (They still share memory. To only *tell* a communicator of a layout,
            pass the list as an argument instead.)
        launcher : callable, optional
            Turns the command of one rank into that of all, in place of ``mpirun -n``.
        env : mapping, optional
            Variables on top of a clean environment with one thread per rank.
        timeout : float
            Seconds until every rank's stack is printed and the test fails. Nobody outlives it.
        check : bool
            Whether an exit status other than 0 fails the test, as it should unless the failure is what is tested.
        """
        command = [self.python, *_python_arguments(program), *map(str, arguments)]
        if hosts is not None:
            command = [*_named_host(hosts, ranks), *command]
        environment = clean_environment(env or {}, self.runtime, ranks)
        started = mpirun_command(self.runtime, ranks, command) if launcher is None else launcher(command)
        job = run_job(started, environment, timeout)
        if check and job.rc != 0:
            pytest.fail(f"{program} on {ranks} ranks: {job}", pytrace=False)
        return job


def clean_environment(extra: Mapping[str, str], runtime: Runtime | None = None, ranks: int = 1) -> dict[str, str]:
    """Give this process's environment without any launcher's variables, for children that start MPI afresh."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    kept |= {"OMP_NUM_THREADS": "1", "TREEATTN_THREADS": "1"}
    kept |= {"PYTHONFAULTHANDLER": "1", "PYTHONWARNINGS": "error::RuntimeWarning"}
    return {**(kept if runtime is None else mpirun_environment(runtime, ranks, kept)), **extra}


def run_job(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Job:
    """Run a command, of which nothing is left afterwards, whatever happens."""
    job, start = uuid.uuid4().hex, time.time()
    process = subprocess.Popen(
        command, env={**environment, JOB_VARIABLE: job}, start_new_session=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        return _job(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        _signal_job(job, signal.SIGABRT, only="python")  # faulthandler prints the ranks' stacks
        time.sleep(1)
        _signal_job(job, signal.SIGKILL)
        stdout, stderr = process.communicate()
        late = f"no end after {timeout} s: {' '.join(command)}: {_job(-9, stdout, stderr)}"
        raise pytest.fail.Exception(late, pytrace=False) from None
    finally:
        _end_job(job)
        remove_segments(start)


def remove_segments(since: float, folder: Path = Path("/dev/shm")) -> None:
    """Remove memory of MPI that is no older than that and that nobody has: some containers have only 64 MB for it."""
    found = [path for pattern in SEGMENTS for path in folder.glob(pattern)]
    used = "\n".join(map(_uses, Path("/proc").glob("[0-9]*"))) if found else ""
    for path in found:
        with contextlib.suppress(OSError):  # who made it has removed it, or it is not ours
            if path.stat().st_mtime >= since and str(path) not in used:
                path.unlink()


def _uses(process: Path) -> str:
    """Name the files that a process has open, and then those that it maps: it closes a file after it has mapped it.

    One that is dying gives its memory back before it closes its files, and uses nothing any more.
    """
    with contextlib.suppress(OSError):  # it ended while we looked, or is not ours
        opened = [*map(_target, (process / "fd").iterdir())]
        mapped = (process / "maps").read_text()
        return "\n".join([*opened, mapped]) if mapped else ""
    return ""


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):  # it was closed while we looked
        return os.readlink(link)
    return ""


def _job(rc: int, stdout: str, stderr: str) -> Job:
    stdout, stderr = stdout.replace("\0", ""), stderr.replace("\0", "")  # Open MPI prints NULs after an abort
    reports = [json.loads(line) for line in stdout.splitlines() if line.startswith("{") and line.endswith("}")]
    return Job(rc, stdout, stderr, sorted(reports, key=lambda report: report.get("rank", 0)))


def _end_job(job: str) -> None:
    """Kill what is left of a job and see it gone: until then it maps memory, and a busy machine takes its time."""
    deadline = time.monotonic() + 30
    while _signal_job(job, signal.SIGKILL):
        assert time.monotonic() < deadline, f"processes of job {job} do not die"
        time.sleep(0.002)


def _signal_job(job: str, number: signal.Signals, only: str = "") -> int:
    """Signal every process that has the job in its environment: ranks have groups and sessions of their own."""
    marker, signalled = f"{JOB_VARIABLE}={job}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked, or is not ours
            marked = marker in (process / "environ").read_bytes().split(b"\0")
            if marked and (process / "comm").read_text().startswith(only):
                os.kill(int(process.name), number)
                signalled += 1
    return signalled


def _python_arguments(program: str | Path | Sequence[str]) -> list[str]:
    if isinstance(program, str):
        return [str(TESTS / "ranks" / f"{program}.py")]
    return [str(program)] if isinstance(program, Path) else list(program)


def _named_host(hosts: Sequence[str], ranks: int) -> list[str]:
    """Give the words before a command that run each rank under its own host name."""
    assert len(hosts) == ranks, f"hosts: expected {ranks} names, got {len(hosts)}"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("host names of our own need root (unshare --uts)")
    return ["unshare", "--uts", "sh", "-c", BE_NAMED, "sh", *hosts, "--"]


def _no_mpi() -> str | None:
    """Give the reason why no MPI job can run here, if there is one."""
    try:
        import mpi4py  # noqa: F401 - only whether it is there

        find_runtime()
    except (ImportError, TreeattnError) as error:
        return f"no MPI here: {error}"
    return None


@pytest.fixture(scope="session")
def mpirun() -> MpiRun:
    """Run programs of ``tests/ranks`` on real MPI ranks; see `MpiRun`. The test gets the marker ``mpi``."""
    if (reason := _no_mpi()) is not None:
        pytest.skip(reason)
    return MpiRun()


@pytest.fixture(scope="session")
def mpich_run() -> MpiRun:
    """Run programs under MPICH, from an environment of its own: two MPIs in one environment break each other."""
    if not MPICH_PYTHON.exists():
        pytest.skip(f"no MPICH here: `make test` makes {MPICH_PYTHON.parent.parent.name}")
    return MpiRun(str(MPICH_PYTHON))


@pytest.fixture
def compiled_while_reading(request: pytest.FixtureRequest) -> list[str]:
    """Names of functions that were compiled, or loaded, before the first test."""
    return request.config.stash[COMPILED]


@pytest.fixture(params=["mpirun", "mpich_run"])
def each_mpi(request: pytest.FixtureRequest) -> MpiRun:
    """Run the test once under the MPI of this environment, and once under MPICH."""
    found: MpiRun = request.getfixturevalue(request.param)
    return found


def pytest_configure() -> None:
    """Give tests a home where the environment has none: Open MPI does not start without."""
    os.environ.setdefault("HOME", str(Path.home()))


@pytest.hookimpl(tryfirst=True)  # xdist reads its groups in a hook of the same name, which would else come before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test that starts MPI ranks, and skip marked ones where no MPI is; share the work out."""
    for item in items:
        if {"mpirun", "mpich_run", "each_mpi"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("mpi")
    if any(item.get_closest_marker("mpi") for item in items) and (reason := _no_mpi()) is not None:
        for item in filter(lambda item: item.get_closest_marker("mpi"), items):
            item.add_marker(pytest.mark.skip(reason=reason))
    if getattr(config.option, "loadgroup", False):
        _share_out(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what was compiled while files were read, for `test_reading.py`."""
    compilation = sys.modules.get("treeattn.kernels.compilation")
    session.config.stash[COMPILED] = [each.name for each in compilation.compilations()] if compilation else []


def _share_out(items: list[pytest.Item]) -> None:
    """Let one worker run all MPI jobs, so that they never meet, and else give each what is next, file by file.

    Code for cards comes first: it keeps both workers busy, and what it compiles for the host, ranks then only load.
    """
    turns = {"ranks": 1}
    for item in items:
        group = "ranks" if item.get_closest_marker("mpi") else item.path.relative_to(TESTS).as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
        turns.setdefault(group, 0 if TESTS / "gpu" in item.path.parents else 2)
    items.sort(key=lambda item: turns[next(item.iter_markers("xdist_group")).args[0]])


class Exhausted(Backend):
    """A backend whose every kernel fails."""

    name, ops = "cpu", find("cpu").ops

    def reasons(self, spec: Any = None) -> list[str]:
        return []

    def prepare(self, spec: Any) -> Callable[[Any, Any], Any]:
        def run(args: Any, out: Any) -> None:
            raise MemoryError("no room")

        return run


@pytest.fixture
def exhausted() -> Backend:
    """Give a backend that raises MemoryError in every kernel."""
    return Exhausted()
