"""Operations on states in host memory; every backend whose states are NumPy arrays shares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.spec import Spec
from treeattn.kernels import combine, wire_rows
from treeattn.wire_form import WireForm

__all__ = ["HostOps", "StagedOps", "host_reasons"]

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class HostOps:
    """`treeattn.state_ops.StateOps` for packed states that are NumPy arrays.

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

    def finish(self, packed: Array, sink: Array | None) -> tuple[Array, Array]:
        """Give (out, lse), natural base, with the sink counted once."""
        return combine.finish(packed, sink)

    def to_host(self, packed: Array, out: Bytes) -> None:
        """Copy the packed bytes to ``out``."""
        out.reshape(-1)[:] = packed.reshape(-1).view(np.uint8)

    def from_host(self, data: Bytes, packed: Array) -> None:
        """Copy the packed bytes from ``data``."""
        packed.reshape(-1).view(np.uint8)[:] = data.reshape(-1)

    def prepare_pack(self, wire: Bytes, form: WireForm) -> Callable[[Array], None]:
        """Give a function that writes a state's wire rows to ``wire``."""
        return wire_rows.prepare_pack(wire, form)

    def prepare_unpack(self, wire: Bytes, form: WireForm) -> Callable[[Array], None]:
        """Give a function that fills a packed buffer with the state of the wire rows at ``wire``."""
        return wire_rows.prepare_unpack(wire, form)


class StagedOps:
    """Operations on states that NumPy can't see, done on the host, to its bits: merging, finishing and the wire.

    To inherit from; ``to_host`` and ``from_host`` are the backend's.
    """

    direct = ""
    to_host: Callable[[Any, Bytes], None]
    from_host: Callable[[Bytes, Any], None]

    def merge(self, out: Any, sources: list[Any]) -> None:
        """Write the merge of ``sources``, in this order, to ``out``, which may be one of them."""
        merged = np.empty(out.shape, out.dtype)
        combine.merge(merged, [self._fetched(source) for source in sources])
        self.from_host(merged.reshape(-1).view(np.uint8), out)

    def finish(self, packed: Any, sink: Any) -> tuple[Any, Any]:
        """Give (out, lse) in host memory, natural base, with the sink counted once."""
        return combine.finish(self._fetched(packed), sink)

    def _room(self, form: WireForm) -> Array:
        """Allocate host memory for a packed state on its way."""
        return np.empty(form.shape, form.dtype)

    def _fetched(self, packed: Any) -> Array:
        found = np.empty(packed.shape, packed.dtype)
        self.to_host(packed, found.reshape(-1).view(np.uint8))
        return found

    def prepare_pack(self, wire: Bytes, form: WireForm) -> Callable[[Any], None]:
        """Give a function that copies a state to the host and writes its wire rows to ``wire``."""
        staged = self._room(form)
        seen, pack = staged.reshape(-1).view(np.uint8), wire_rows.prepare_pack(wire, form)

        def pack_staged(packed: Any) -> None:
            self.to_host(packed, seen)
            pack(staged)

        return pack_staged

    def prepare_unpack(self, wire: Bytes, form: WireForm) -> Callable[[Any], None]:
        """Give a function that makes the state of the wire rows on the host and copies it to its device."""
        staged = self._room(form)
        seen, unpack = staged.reshape(-1).view(np.uint8), wire_rows.prepare_unpack(wire, form)

        def unpack_staged(packed: Any) -> None:
            unpack(staged)
            self.from_host(seen, packed)

        return unpack_staged


def host_reasons(spec: Spec | None) -> list[str]:
    """Say what keeps a backend that computes in host memory from ``spec``."""
    if spec is None or not spec.on_device:
        return []
    return ["q, k and v are on a GPU: copy them to the host, or leave backend= out"]
