"""Whether the MPI library takes pointers to GPU memory: asked of the library itself; in doubt the answer is no.

A wrong yes ends every rank with a segmentation fault, so only what MPI says about itself counts: first the memory
kinds of MPI 4.1, then the implementations' own queries. Not ``ompi_info``'s list of extensions, which names CUDA in
builds that have none, and not environment variables of others, which say what was asked for and not what is there.
``TREEATTN_GPU_MPI`` is the user's own word: ``off`` stages always, ``on`` believes him, ``auto`` asks.

Ranks act on what all of them have in common: one that stages and one that doesn't would run different protocols.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from treeattn.errors import InputError

__all__ = ["VARIABLE", "Verdict", "agreed", "ask", "judge", "setting"]

VARIABLE = "TREEATTN_GPU_MPI"
MEMORY_KINDS = "mpi_memory_alloc_kinds"
FAMILIES = ("cuda", "rocm")
QUERIES = {
    "MPIX_Query_cuda_support": "cuda",
    "MPIX_Query_rocm_support": "rocm",
    "MPIX_Query_hip_support": "rocm",
}
"""Functions without arguments that answer 1 or 0; which of them exist depends on the library."""

GPU_QUERY = "MPIX_GPU_query_support"
GPU_TYPES = {"cuda": 0, "rocm": 2}
"""MPICH's numbers of the types that `GPU_QUERY` is asked about: ``MPIX_GPU_SUPPORT_CUDA`` and ``_HIP``."""


class Verdict(NamedTuple):
    """Families of GPU memory, "cuda" and "rocm", that MPI takes pointers to, and how that is known."""

    families: tuple[str, ...]
    reason: str


def judge(kinds: str | None, answers: Mapping[str, Mapping[str, int]]) -> Verdict:
    """Decide from what the library said.

    Parameters
    ----------
    kinds : str or None
        The info value ``mpi_memory_alloc_kinds``; None where the library knows no such key.
    answers : mapping of str to (mapping of str to int)
        What each query that exists returned, by family.

    Examples
    --------
    >>> from treeattn.transports.gpu_mpi import judge
    >>> judge("mpi,system", {"MPIX_Query_cuda_support": {"cuda": 1}})
    Verdict(families=(), reason='mpi_memory_alloc_kinds is mpi,system')
    """
    if kinds is not None:
        listed = {kind.strip() for kind in kinds.split(",")}
        found = tuple(family for family in FAMILIES if listed & {family, f"{family}:device"})
        return Verdict(found, f"{MEMORY_KINDS} is {kinds}")
    if not answers:
        return Verdict((), "the library says nothing about it")
    yes = {family for each in answers.values() for family, answer in each.items() if answer}
    said = [f"{name} says {'yes' if any(each.values()) else 'no'}" for name, each in answers.items()]
    return Verdict(tuple(family for family in FAMILIES if family in yes), ", ".join(said))


def setting() -> str:
    """Give what ``TREEATTN_GPU_MPI`` is set to.

    Raises
    ------
    InputError
        To something else than auto, on and off.
    """
    found = os.environ.get(VARIABLE) or "auto"
    if found not in ("auto", "on", "off"):
        raise InputError.of(VARIABLE, expected="auto, on or off", got=repr(found))
    return found


def ask(mpi: Any) -> Verdict:
    """Ask the MPI library of this process, unless the user has said what is so.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``, of a running MPI.
    """
    said = setting()
    if said != "auto":
        return Verdict(FAMILIES if said == "on" else (), f"{VARIABLE}={said}")
    # The extension module is linked with the library, so that its symbols are found without a path to it.
    return judge(_memory_kinds(mpi), _answers(ctypes.CDLL(mpi.__file__)))


def _memory_kinds(mpi: Any) -> str | None:
    info = mpi.COMM_WORLD.Get_info()
    try:
        kinds: str | None = info.Get(MEMORY_KINDS)
    finally:
        info.Free()
    return kinds


def _answers(library: Any) -> dict[str, dict[str, int]]:
    answers = {
        name: {family: int(getattr(library, name)())} for name, family in QUERIES.items() if hasattr(library, name)
    }
    if hasattr(library, GPU_QUERY):
        answers = {GPU_QUERY: {family: _gpu_query(library, kind) for family, kind in GPU_TYPES.items()}, **answers}
    return answers


def _gpu_query(library: Any, kind: int) -> int:
    answer = ctypes.c_int(0)
    failed = getattr(library, GPU_QUERY)(kind, ctypes.byref(answer))
    return 0 if failed else answer.value


def agreed(verdicts: Iterable[Sequence[Any]]) -> Verdict:
    """Give what all ranks have to act on: the families that every rank's MPI takes."""
    every = [Verdict(tuple(families), reason) for families, reason in verdicts]
    common = tuple(family for family in FAMILIES if all(family in each.families for each in every))
    return Verdict(common, next((each.reason for each in every if set(each.families) == set(common)), every[0].reason))
