"""Operations on states in host memory; every backend whose states are NumPy arrays shares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.inputs import Spec
from treeattn.kernels import combine

__all__ = ["HostOps", "host_reasons"]

Array: TypeAlias = npt.NDArray[Any]


class HostOps:
    """`treeattn.state.StateOps` for packed states that are NumPy arrays.

    Parameters
    ----------
    name : str
        The backend's name; states of differently named backends don't mix.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self._name

    direct = ""

    @property
    def staged(self) -> HostOps:
        """States in host memory need no copy."""
        return self

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate a packed buffer, not initialised."""
        return np.empty(shape, dtype)

    def fill_identity(self, packed: Array) -> None:
        """Write the state of no keys."""
        packed[..., :-1] = 0
        packed[..., -1] = -np.inf

    def merge(self, out: Array, sources: list[Array]) -> None:
        """Write the merge of ``sources``, in this order, to ``out``, which may be one of them."""
        combine.merge(out, sources)

    def prepare_merge(self, out: Array, sources: list[Array]) -> Callable[[], None]:
        """Give a function that merges ``sources`` to ``out`` each time it is called, allocating nothing."""
        return combine.prepare_merge(out, sources)

    def finish(self, packed: Array, sink: Array | None) -> tuple[Array, Array]:
        """Give (out, lse), natural base, with the sink counted once."""
        return combine.finish(packed, sink)

    def to_host(self, packed: Array, out: npt.NDArray[np.uint8]) -> None:
        """Copy the packed bytes to ``out``."""
        out.reshape(-1)[:] = packed.reshape(-1).view(np.uint8)

    def from_host(self, data: npt.NDArray[np.uint8], packed: Array) -> None:
        """Copy the packed bytes from ``data``."""
        packed.reshape(-1).view(np.uint8)[:] = data.reshape(-1)

    def wait(self) -> None:
        """Nothing runs beside the caller."""


def host_reasons(spec: Spec | None) -> list[str]:
    """Say what keeps a backend that computes in host memory from ``spec``."""
    if spec is None or spec.home == "numpy":
        return []
    return ["q, k and v are on a GPU: copy them to the host, or leave backend= out"]
