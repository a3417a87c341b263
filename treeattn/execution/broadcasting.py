"""One array from the root to all: what may be sent, what the others expect, and the sending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import KV_DTYPES, narrow_dtype, to_numpy
from treeattn.errors import InputError
from treeattn.execution.tally import Tally
from treeattn.planning.messages import cut
from treeattn.planning.plan import Plan
from treeattn.transports.base import Bytes, Transport

__all__ = ["broadcast", "check_alike", "describe", "sendable"]

Array: TypeAlias = npt.NDArray[Any]


def sendable(array: Any, is_root: bool) -> Array | None:
    """Take ``array`` as one that can travel; None where a rank that is not root has none."""
    if array is None and not is_root:
        return None
    found = to_numpy("array", array)
    if found.dtype.name not in KV_DTYPES and found.dtype.kind not in "biufc":
        raise InputError.of("array", expected="an array of numbers", got=f"dtype {found.dtype}")
    return found


def describe(array: Array | None) -> list[Any] | None:
    """Say what ``array`` is, in a form that JSON can carry."""
    return None if array is None else [array.dtype.name, list(array.shape)]


def check_alike(described: Sequence[list[Any] | None], root: int) -> tuple[npt.DTypeLike, tuple[int, ...]]:
    """Give dtype and shape of the root's array; an array on another rank must be like it."""
    dtype, shape = described[root] or ["", []]
    for rank, each in enumerate(described):
        if each is not None and each != described[root]:
            expected = f"the root's {dtype} of shape {tuple(shape)}, or None"
            raise InputError.of("array", expected=expected, got=f"{each[0]} of shape {tuple(each[1])} on rank {rank}")
    return narrow_dtype(dtype), tuple(shape)


def broadcast(plan: Plan, transport: Transport, data: Array, tally: Tally) -> None:
    """Send the root's ``data`` down the plan's tree, into ``data`` on the other ranks."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    for piece in _messages(flat, False):
        _send_piece(plan, transport, piece, tally)


def _send_piece(plan: Plan, transport: Transport, piece: Bytes, tally: Tally) -> None:
    for step in plan.steps(transport.rank):
        sources, dests = [source for source, _, _ in step.receives], [dest for dest, _ in step.sends]
        coming = [(data, rank) for rank in sources for data in _messages(piece, tally.crosses(rank))]
        going = [(data, rank) for rank in dests for data in _messages(piece, tally.crosses(rank))]
        requests = [transport.irecv(data, rank, step.number) for data, rank in coming]
        requests += [transport.isend(data, rank, step.number) for data, rank in going]
        transport.wait(requests)
        for data, rank in going:
            tally.sent(rank, data.size)
    tally.rounds(len(plan.rounds), plan.rounds_between)


def _messages(data: Bytes, between: bool) -> list[Bytes]:
    """Cut bytes into messages; none are one too."""
    return cut(data, between=between) or [data]
