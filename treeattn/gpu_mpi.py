"""Whether the MPI library could take a pointer to GPU memory: asked of the library itself; in doubt the answer is no.

A wrong yes ends every rank with a segmentation fault, so only what MPI says about itself counts: first the memory
kinds of MPI 4.1, then the implementations' own queries. Not ``ompi_info``'s list of extensions, which names CUDA in
builds that have none, and not environment variables, which say what was asked for and not what is there.

Today nothing depends on the answer but `treeattn doctor`: states always travel through pinned host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["QUERIES", "Verdict", "agreed", "ask", "judge"]

QUERIES = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support", "MPIX_Query_hip_support")
"""Functions without arguments that answer 1 or 0; which of them exist depends on the library."""

DEVICE_KINDS = ("cuda:device", "rocm:device", "cuda", "rocm")
MEMORY_KINDS = "mpi_memory_alloc_kinds"


class Verdict(NamedTuple):
    """Whether MPI takes device pointers, and how that is known."""

    aware: bool
    reason: str


def judge(kinds: str | None, answers: Mapping[str, int]) -> Verdict:
    """Decide from what the library said.

    Parameters
    ----------
    kinds : str or None
        The info value ``mpi_memory_alloc_kinds``; None where the library knows no such key.
    answers : mapping of str to int
        What each of `QUERIES` that exists returned.

    Examples
    --------
    >>> from treeattn.gpu_mpi import judge
    >>> judge("mpi,system", {"MPIX_Query_cuda_support": 1})
    Verdict(aware=False, reason='mpi_memory_alloc_kinds is mpi,system')
    """
    if kinds is not None:
        listed = {kind.strip() for kind in kinds.split(",")}
        return Verdict(bool(listed & set(DEVICE_KINDS)), f"{MEMORY_KINDS} is {kinds}")
    if not answers:
        return Verdict(False, "the library says nothing about it")
    said = ", ".join(f"{name} says {'yes' if answer else 'no'}" for name, answer in answers.items())
    return Verdict(any(answers.values()), said)


def ask() -> Verdict:
    """Ask the MPI library of this process, which must be running."""
    from treeattn.mpi_transport import import_mpi

    mpi: Any = import_mpi()
    info = mpi.COMM_WORLD.Get_info()
    try:
        kinds = info.Get(MEMORY_KINDS)
    finally:
        info.Free()
    # The extension module is linked with the library, so that its symbols are found without a path to it.
    library = ctypes.CDLL(mpi.__file__)
    return judge(kinds, {name: int(getattr(library, name)()) for name in QUERIES if hasattr(library, name)})


def agreed(verdicts: Iterable[Verdict]) -> Verdict:
    """Give the verdict that all ranks have to act on: no, if any says no."""
    verdicts = list(verdicts)
    return next((each for each in verdicts if not each.aware), verdicts[0])
