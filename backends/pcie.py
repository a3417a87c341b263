"""The backend ``pcie``: consumer cards without a path between them but the host, of either family.

On a card it is what `nvidia` or `amd` is. The difference is a promise about the wire: states travel through pinned
host memory, whatever a driver or an MPI claims to be able to. Cards read each other's memory only on the plans that are
asked for by name and try it with data first, "p2p" and "nccl".
"""

from __future__ import annotations

from treeattn.backends.cupy_runtime import CupyRuntime, why_not
from treeattn.backends.device import DeviceBackend
from treeattn.backends.runtime import Runtime

__all__ = ["PcieBackend"]


class PcieBackend(DeviceBackend):
    """Cards that meet on PCIe only, such as the GeForce and Radeon ones."""

    name = "pcie"
    always_staged = True

    def machine_reasons(self) -> list[str]:
        """Say what is missing for either family; one that works is enough."""
        cuda = why_not("cuda")
        return cuda and why_not("hip") and cuda

    def open(self) -> Runtime:
        """Take this rank's card."""
        return CupyRuntime()
