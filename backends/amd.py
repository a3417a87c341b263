"""The backend ``amd``: ROCm cards, through CuPy."""

from __future__ import annotations

from treeattn.backends.cupy_runtime import CupyRuntime, why_not
from treeattn.backends.device import DeviceBackend
from treeattn.backends.runtime import Runtime

__all__ = ["AmdBackend"]


class AmdBackend(DeviceBackend):
    """CDNA (MFMA) and RDNA (WMMA from RDNA3 on); the same kernels as on NVIDIA's cards."""

    name = "amd"

    def machine_reasons(self) -> list[str]:
        """Say what is missing: CuPy for ROCm, the driver or the card."""
        return why_not("hip")

    def open(self) -> Runtime:
        """Take this rank's card."""
        return CupyRuntime()
