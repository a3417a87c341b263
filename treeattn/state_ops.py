"""What a backend can do with packed states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from treeattn.wire_form import WireForm

__all__ = ["StateOps"]

Array: TypeAlias = npt.NDArray[Any]


class StateOps(Protocol):
    """What a backend can do with packed states; a state carries its backend's, and the tree merges through them.

    A packed state is an array (B, Hq, Tq, Dv + 2) of float32 or float64, C-contiguous: per head row the Dv
    numbers of ``o``, then ``l``, then ``m``.
    """

    @property
    def name(self) -> str:
        """Name of the backend, for messages."""

    @property
    def direct(self) -> str:
        """Family of the device memory, "cuda" or "rocm", that a GPU-aware MPI may be given as it is; "" for none."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate a packed buffer, not initialised."""

    def fill_identity(self, packed: Array) -> None:
        """Write the state of no keys: o = 0, l = 0, m = -inf."""

    def merge(self, out: Array, sources: list[Array]) -> None:
        """Write the merge of ``sources``, taken in this order, to ``out``, which may be one of them."""

    def finish(self, packed: Array, sink: Array | None) -> tuple[Array, Array]:
        """Give (out, lse) of shapes (B, Hq, Tq, Dv) and (B, Hq, Tq), natural base; ``sink`` (Hq,) or None."""

    def to_host(self, packed: Array, out: npt.NDArray[np.uint8]) -> None:
        """Copy the packed bytes to host memory, complete on return."""

    def from_host(self, data: npt.NDArray[np.uint8], packed: Array) -> None:
        """Copy the packed bytes from host memory, complete on return."""

    def prepare_pack(self, wire: npt.NDArray[np.uint8], form: WireForm) -> Callable[[Array], None]:
        """Give a function that writes a state's wire rows to ``wire``, in host memory, complete on return."""

    def prepare_unpack(self, wire: npt.NDArray[np.uint8], form: WireForm) -> Callable[[Array], None]:
        """Give a function that fills a packed buffer with the state of the wire rows at ``wire``."""
