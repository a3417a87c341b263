"""One call of a baseline, agreed on by all ranks: what each holds, and this rank's share of the computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.spec import Args, Spec
from treeattn.backends.base import Backend
from treeattn.baselines._parcel import Manifest, Parcel
from treeattn.local import run_backend
from treeattn.state import PartialState, merge
from treeattn.steps.wire import Wire

__all__ = ["Call", "Holding", "Span"]

Array: TypeAlias = npt.NDArray[Any]
Span: TypeAlias = "tuple[int, int] | None"
"""First and last position; None where positions do not matter, or there is nothing that has one."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What every rank knows of one rank: its parcel, its number of query rows, and where both stand."""

    manifest: Manifest
    q_tokens: int
    q_span: Span
    kv_span: Span

    @classmethod
    def of(cls, spec: Spec, args: Args) -> Holding:
        """Describe this rank's."""
        return cls(Parcel.of(args).manifest, spec.q_tokens, span_of(args.q_pos), span_of(args.kv_positions))

    def to_json(self) -> dict[str, Any]:
        """Give it as lists, numbers and strings."""
        spans = [self.q_span, self.kv_span]
        return {"parts": self.manifest.to_json(), "rows": self.q_tokens, "spans": spans}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Holding:
        """Read what `to_json` gave."""
        q_span, kv_span = (None if span is None else (span[0], span[1]) for span in told["spans"])
        return cls(Manifest.from_json(told["parts"]), told["rows"], q_span, kv_span)


def span_of(positions: Array | None) -> Span:
    """Give the first and the last of some positions."""
    if positions is None or positions.size == 0:
        return None
    return int(positions.min()), int(positions.max())


@dataclass
class Call:
    """What a baseline works on.

    Parameters
    ----------
    rank, size : int
    spec, args : Spec, Args
        This rank's call.
    holdings : sequence of Holding
        By rank.
    backend : Backend
    root : int or None
        The only rank that wants the result.
    replicated : bool
        Whether every rank has the same queries, as in decoding; else each has its own, as in prefill.
    error : Exception or None
        What went wrong here on the way; the messages go on, and it is reported behind them.
    """

    rank: int
    size: int
    spec: Spec
    args: Args
    holdings: Sequence[Holding]
    backend: Backend
    root: int | None = None
    replicated: bool = True
    error: Exception | None = field(default=None, init=False)

    @property
    def manifests(self) -> list[Manifest]:
        """Every rank's parcel."""
        return [holding.manifest for holding in self.holdings]

    @property
    def others(self) -> list[int]:
        """Every rank but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def sees(self, q_span: Span, keys_of: int) -> bool:
        """Whether queries that stand in ``q_span`` can see any key of a rank, as far as positions tell."""
        keys, spec = self.holdings[keys_of], self.spec
        if not keys.manifest.tokens:
            return False
        if q_span is None or keys.kv_span is None:
            return True
        left, right = spec.window or (None, None)
        ahead = min(0 if spec.causal else np.inf, np.inf if right is None else right)
        behind = np.inf if left is None else left
        return keys.kv_span[0] <= q_span[1] + ahead and keys.kv_span[1] >= q_span[0] - behind

    def state(
        self,
        wire: Wire,
        parcel: Parcel,
        rows: slice | None = None,
        q: Array | None = None,
        q_pos: Array | None = None,
    ) -> PartialState:
        """Compute the state of queries over a parcel's keys; by default of all of this rank's queries.

        Parameters
        ----------
        wire : Wire
            Counts the work.
        parcel : Parcel
        rows : slice, optional
            Which of this rank's query rows.
        q, q_pos : array, optional
            Other queries than this rank's, and where they stand; ``rows`` is then what the mask calls them.
        """
        at = slice(0, self.spec.q_tokens) if rows is None else rows
        if q is None:
            q, q_pos = self.args.q[:, :, at], None if self.args.q_pos is None else self.args.q_pos[:, at]
        spec, args = parcel.call(self.spec, q, q_pos, at)
        if q.shape[2] and args.kv_tokens:
            wire.work(q.shape[2] * args.kv_tokens)
        return self.kept(lambda: self._run(wire, spec, args), spec.packed_shape)

    def _run(self, wire: Wire, spec: Spec, args: Args) -> PartialState:
        """Run the kernel; one that keeps this rank's processors busy, while messages move on."""
        if self.backend.queues:
            return run_backend(spec, args, self.backend)
        return wire.compute(lambda: run_backend(spec, args, self.backend))

    def kept(self, make: Callable[[], PartialState], packed_shape: tuple[int, ...]) -> PartialState:
        """Give what ``make`` makes, or, with the error kept, a state of that shape that is as good as any."""
        try:
            return make()
        except Exception as error:  # the other ranks count on our messages; they hear of it behind them
            self.error = self.error or error
            return self.identity(packed_shape)

    def identity(self, packed_shape: tuple[int, ...]) -> PartialState:
        """Make the state of no keys."""
        batch, heads, tokens, width = packed_shape
        shape = batch, heads, tokens, width - 2
        return PartialState.identity(shape, dtype=self.spec.state_dtype, backend=self.backend)

    def merged(self, states: Sequence[PartialState]) -> PartialState:
        """Merge states, in this order; what goes wrong is kept."""
        return self.kept(lambda: merge(states), states[0]._packed.shape)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of the packed state of this rank's queries."""
        return self.spec.packed_shape

    def pack(self, state: PartialState) -> Array:
        """Give the packed state in host memory."""
        if isinstance(state._packed, np.ndarray):
            return state._packed
        packed = np.empty(state._packed.shape, self.spec.state_dtype)
        state.ops.to_host(state._packed, packed.reshape(-1).view(np.uint8))
        return packed

    @staticmethod
    def unpack(packed: Array, like: PartialState) -> PartialState:
        """Give a state that came in host memory as one that lives where ``like`` does; on the host, without a copy."""
        if isinstance(like._packed, np.ndarray):
            return PartialState(packed, like.ops)
        own = like.ops.empty(packed.shape, packed.dtype.name)
        like.ops.from_host(packed.reshape(-1).view(np.uint8), own)
        return PartialState(own, like.ops)
