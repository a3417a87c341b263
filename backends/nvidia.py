"""The backend ``nvidia``: CUDA cards, through CuPy."""

from __future__ import annotations

from treeattn.backends.cupy_runtime import CupyRuntime, why_not
from treeattn.backends.device import DeviceBackend
from treeattn.backends.runtime import Runtime

__all__ = ["NvidiaBackend"]


class NvidiaBackend(DeviceBackend):
    """Data-centre and workstation cards from sm_70 on; tensor cores from sm_80 on."""

    name = "nvidia"

    def machine_reasons(self) -> list[str]:
        """Say what is missing: CuPy, the driver or the card."""
        return why_not("cuda")

    def open(self) -> Runtime:
        """Take this rank's card."""
        return CupyRuntime()
