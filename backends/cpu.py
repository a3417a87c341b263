"""The backend ``cpu``: numba kernels on the processor's cores. The default."""

from __future__ import annotations

from treeattn.arguments.spec import Spec
from treeattn.backends.base import Attend, Backend, Prepared
from treeattn.backends.host import HostOps, host_reasons

__all__ = ["CpuBackend"]


class CpuBackend(Backend):
    """Runs anywhere, with no GPU."""

    name = "cpu"

    def __init__(self) -> None:
        self.ops = HostOps(self.name)

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Refuse arrays that the CPU can't touch; nothing else that passed validation."""
        return host_reasons(spec)

    def prepare(self, spec: Spec) -> Prepared:
        """Compile the streaming kernel for ``spec``, or load it."""
        from treeattn.kernels import cpu  # here: states can be merged without the kernel

        return cpu.prepare(spec)

    def prepare_attention(self, spec: Spec) -> Attend:
        """Compile the streaming kernel for ``spec``, or load it; its last thread finishes."""
        from treeattn.kernels import cpu  # as above

        return cpu.prepare(spec).attend
