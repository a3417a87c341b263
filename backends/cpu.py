"""The backend ``cpu``: numba kernels on the processor's cores. The default."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.backends.base import Backend, Prepared
from treeattn.backends.host import HostOps
from treeattn.inputs import Args, Spec
from treeattn.kernels import reference

__all__ = ["CpuBackend"]


class CpuBackend(Backend):
    """Runs anywhere, with no GPU."""

    name = "cpu"

    def __init__(self) -> None:
        self.ops = HostOps(self.name)

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Nothing that passed validation is refused."""
        return []

    def prepare(self, spec: Spec) -> Prepared:
        """Give the kernel for ``spec``."""

        def prepared(args: Args, out: Any) -> Any:
            with np.errstate(over="ignore", invalid="ignore"):
                out[...] = reference.partial(spec, args)
            return out

        return prepared
