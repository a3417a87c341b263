"""A backend whose states live where NumPy can't see them, as on a GPU, and that can be told to refuse or to fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.spec import Args, Spec
from treeattn.backends.base import Backend, Prepared
from treeattn.backends.host import HostOps, StagedOps
from treeattn.kernels import reference

__all__ = ["DeviceArray", "FakeBackend"]

Array: TypeAlias = npt.NDArray[Any]


class DeviceArray:
    """A packed state on the fake device: a shape and a dtype, and nothing that NumPy could read by accident."""

    __slots__ = ("_memory",)

    def __init__(self, memory: Array) -> None:
        self._memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        """Like an array's."""
        return self._memory.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Like an array's."""
        return self._memory.dtype

    @property
    def nbytes(self) -> int:
        """Like an array's."""
        return self._memory.nbytes

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this array is on a device: copy it with its backend's operations")


class FakeOps(StagedOps):
    """`treeattn.state_ops.StateOps` on `DeviceArray`, recording each call."""

    def __init__(self, name: str, calls: list[str], failures: dict[str, Exception]) -> None:
        self._host, self._calls, self._failures = HostOps(name), calls, failures

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self._host.name

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate on the device; what was there before is garbage, and here it is NaN."""
        self._record("empty")
        return DeviceArray(np.full(shape, np.nan, dtype))

    def fill_identity(self, packed: Any) -> None:
        """Write the state of no keys."""
        self._record("fill_identity")
        self._host.fill_identity(packed._memory)

    def merge(self, out: Any, sources: list[Any]) -> None:
        """Merge on the device."""
        self._record("merge")
        self._host.merge(out._memory, [source._memory for source in sources])

    def finish(self, packed: Any, sink: Array | None) -> tuple[Array, Array]:
        """Finish on the device; what comes out is for the caller, so it is a NumPy array."""
        self._record("finish")
        return self._host.finish(packed._memory, sink)

    def to_host(self, packed: Any, out: npt.NDArray[np.uint8]) -> None:
        """Copy from the device."""
        self._record("to_host")
        self._host.to_host(packed._memory, out)

    def from_host(self, data: npt.NDArray[np.uint8], packed: Any) -> None:
        """Copy to the device."""
        self._record("from_host")
        self._host.from_host(data, packed._memory)

    def _record(self, name: str) -> None:
        self._calls.append(name)
        if name in self._failures:
            raise self._failures[name]


class FakeBackend(Backend):
    """Computes with the float64 oracle, behind the manners of a GPU backend.

    Parameters
    ----------
    name : str
    refusals : sequence of str
        Reasons why it can't run, for tests of what is said then.
    failures : dict of str to Exception, optional
        What each operation (``prepare``, ``merge``, ``to_host``, ...) raises when it is called; may be changed later.

    Attributes
    ----------
    calls : list of str
        Names of the operations called so far.

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> from treeattn.testing import FakeBackend
    >>> fake = FakeBackend()
    >>> x = np.ones((1, 1, 2, 4), np.float32)
    >>> treeattn.attention(x, x, x, backend=fake).tolist() == x.tolist()
    True
    >>> fake.calls
    ['prepare', 'empty', 'finish']
    """

    def __init__(
        self, name: str = "fake", refusals: Sequence[str] = (), failures: dict[str, Exception] | None = None
    ) -> None:
        self.name, self.refusals = name, list(refusals)
        self.calls: list[str] = []
        self.failures = {} if failures is None else failures
        self._ops = FakeOps(name, self.calls, self.failures)
        self.ops = self._ops

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Give the refusals."""
        return list(self.refusals)

    def prepare(self, spec: Spec) -> Prepared:
        """Give the oracle for ``spec``."""
        self._ops._record("prepare")

        def prepared(args: Args, out: Any) -> Any:
            with np.errstate(over="ignore", invalid="ignore"):
                out._memory[...] = reference.partial(spec, args)
            return out

        return prepared
