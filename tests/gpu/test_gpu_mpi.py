"""What counts as an MPI that takes device pointers."""

from __future__ import annotations

from typing import Any

import pytest

from treeattn.gpu_mpi import Verdict, agreed, judge


@pytest.mark.parametrize(
    ("kinds", "answers", "aware"),
    [
        ("mpi,system", {"MPIX_Query_cuda_support": 1}, False),  # the standard's answer outranks the extension's
        ("mpi,system,cuda:device", {"MPIX_Query_cuda_support": 0}, True),
        ("system, rocm:device", {}, True),
        ("mpi,cuda:host", {}, False),
        (None, {"MPIX_Query_cuda_support": 0, "MPIX_Query_rocm_support": 0}, False),
        (None, {"MPIX_Query_cuda_support": 0, "MPIX_Query_rocm_support": 1}, True),
        (None, {}, False),
    ],
)
def test_only_what_the_library_says_about_itself_counts(kinds: Any, answers: Any, aware: bool) -> None:
    assert judge(kinds, answers).aware is aware


def test_one_rank_that_says_no_decides_for_all() -> None:
    no = Verdict(False, "no GPU on this host")
    assert agreed([Verdict(True, "yes"), no, Verdict(True, "yes")]) == no
    assert agreed([Verdict(True, "yes")] * 2).aware


def test_the_wheels_mpi_is_not_aware_and_the_doctor_says_so(mpirun: Any) -> None:
    job = mpirun(("-m", "treeattn", "doctor"), 2)
    said = " ".join(job.stdout.split())
    assert "GPU-aware MPI" in said
    assert "not yet run on a card" in said
