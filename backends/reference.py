"""The backend ``reference``: the float64 oracle behind the public interface, for checking other backends."""

from __future__ import annotations

from typing import Any

import numpy as np

from treeattn.arguments.spec import Args, Spec
from treeattn.backends.base import Backend, Prepared
from treeattn.backends.host import HostOps, host_reasons
from treeattn.kernels import reference

__all__ = ["ReferenceBackend"]


class ReferenceBackend(Backend):
    """Computes in float64, one query at a time, and rounds the state to the precision that was asked for."""

    name = "reference"

    def __init__(self) -> None:
        self.ops = HostOps(self.name)

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Refuse arrays that the CPU can't touch; nothing else that passed validation."""
        return host_reasons(spec)

    def prepare(self, spec: Spec) -> Prepared:
        """Give the oracle for ``spec``."""

        def prepared(args: Args, out: Any) -> Any:
            with np.errstate(over="ignore", invalid="ignore"):
                out[...] = reference.partial(spec, args)
            return out

        return prepared
