"""What a card can do, from the name that its compiler has for it: ``sm_90``, ``gfx942``, ..."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Matrix", "Target", "target_of"]

Matrix: TypeAlias = Literal["mma", "mfma", "wmma11", "wmma12"]


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture.

    Parameters
    ----------
    arch : str
        The compiler's name for it.
    dialect : "cuda" or "hip"
    wave : int
        Lanes that run in step.
    matrix : str or None
        Its instruction for 16-bit matrices, as far as a kernel here uses it.
    """

    arch: str
    dialect: Literal["cuda", "hip"]
    wave: int
    matrix: Matrix | None

    def defines(self) -> dict[str, str]:
        """Give the macros that the kernels' text expects of an architecture."""
        found = {"TA_WAVE": str(self.wave)}
        if self.matrix == "mfma":
            found["TA_MFMA"] = "1"
        elif self.matrix in ("wmma11", "wmma12"):
            found["TA_WMMA"] = self.matrix.removeprefix("wmma")
        return found


def target_of(arch: str) -> Target:
    """Describe the architecture called ``arch``.

    Examples
    --------
    >>> from treeattn.kernels.gpu.targets import target_of
    >>> target_of("gfx942")
    Target(arch='gfx942', dialect='hip', wave=64, matrix='mfma')
    """
    if arch.startswith("gfx"):
        name = arch.partition(":")[0]  # features such as xnack follow a colon
        return Target(name, "hip", 64 if name.startswith("gfx9") else 32, _amd_matrix(name))
    return Target(arch, "cuda", 32, "mma" if int(arch.removeprefix("sm_")) >= 80 else None)


def _amd_matrix(name: str) -> Matrix | None:
    """bfloat16 in one step of sixteen came with gfx90a; older CDNA and RDNA take the vector kernel."""
    if name in ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"):
        return "mfma"
    if name.startswith("gfx11"):
        return "wmma11"
    return "wmma12" if name.startswith("gfx12") else None
