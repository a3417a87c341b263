"""What counts as an MPI that takes device pointers."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest

from treeattn.errors import InputError
from treeattn.transports import gpu_mpi
from treeattn.transports.gpu_mpi import Verdict, agreed, ask, judge

NO = {"MPIX_Query_cuda_support": {"cuda": 0}, "MPIX_Query_rocm_support": {"rocm": 0}}


@pytest.mark.parametrize(
    ("kinds", "answers", "families"),
    [
        ("mpi,system", {"MPIX_Query_cuda_support": {"cuda": 1}}, ()),  # the standard's answer outranks the extension's
        ("mpi,system,cuda:device", NO, ("cuda",)),
        ("system, rocm:device, cuda", {}, ("cuda", "rocm")),
        ("mpi,cuda:host", {}, ()),
        (None, NO, ()),
        (None, {**NO, "MPIX_Query_hip_support": {"rocm": 1}}, ("rocm",)),
        (None, {"MPIX_GPU_query_support": {"cuda": 1, "rocm": 0}}, ("cuda",)),
        (None, {}, ()),
    ],
)
def test_only_what_the_library_says_about_itself_counts(kinds: Any, answers: Any, families: Any) -> None:
    assert judge(kinds, answers).families == families


def test_ranks_act_on_what_all_of_them_have() -> None:
    no, cuda, both = Verdict((), "no GPU on this host"), Verdict(("cuda",), "one"), Verdict(("cuda", "rocm"), "two")
    assert agreed([both, no, both]) == no
    assert agreed([both, both]) == both
    assert agreed([both, cuda]) == cuda
    assert agreed([("cuda",), "as it travels"] for _ in range(2)) == Verdict(("cuda",), "as it travels")


class Library:
    """An MPI library that answers for one family, in MPICH's way."""

    def MPIX_GPU_query_support(self, kind: int, answer: Any) -> int:  # noqa: N802 - MPI's name
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = kind == gpu_mpi.GPU_TYPES["rocm"]
        return 0

    def MPIX_Query_cuda_support(self) -> int:  # noqa: N802 - MPI's name
        return 0


def an_mpi(kinds: str | None) -> Any:
    info = types.SimpleNamespace(Get={gpu_mpi.MEMORY_KINDS: kinds}.get, Free=lambda: None)
    return types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(Get_info=lambda: info), __file__="libmpi")


def test_what_is_asked_and_in_which_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu_mpi.VARIABLE, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    found = Verdict(("rocm",), "MPIX_GPU_query_support says yes, MPIX_Query_cuda_support says no")
    assert ask(an_mpi(None)) == found
    assert ask(an_mpi("mpi,system")) == Verdict((), "mpi_memory_alloc_kinds is mpi,system")


@pytest.mark.parametrize(("word", "families"), [("on", ("cuda", "rocm")), ("off", ())])
def test_the_users_word_goes_before_all_of_it(monkeypatch: pytest.MonkeyPatch, word: str, families: Any) -> None:
    monkeypatch.setenv(gpu_mpi.VARIABLE, word)
    assert ask(None) == Verdict(families, f"TREEATTN_GPU_MPI={word}")
    monkeypatch.setenv(gpu_mpi.VARIABLE, "yes")
    with pytest.raises(InputError, match=r"^TREEATTN_GPU_MPI: expected auto, on or off, got 'yes'"):
        ask(None)


def test_the_wheels_mpi_is_not_aware_and_the_doctor_says_so(mpirun: Any) -> None:
    job = mpirun(("-m", "treeattn", "doctor"), 2)
    said = " ".join(job.stdout.split())
    assert "GPU-aware MPI" in said
    assert "no: MPIX_Query_cuda_support says no" in said or "no: mpi_memory_alloc_kinds is mpi,system" in said
    assert "not yet run on a card" in said
