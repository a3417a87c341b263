"""Decoding in groups of heads: one group's states travel while the next group's are computed.

It pays where computing and travelling take about as long: states of many queries, or a slow wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from treeattn.agreement import Attempt
from treeattn.comm import TreeComm
from treeattn.errors import InputError
from treeattn.inputs import Args, Spec
from treeattn.lanes import IN_FLIGHT, Reduction
from treeattn.local import backend_of, run_backend
from treeattn.state import PartialState

__all__ = ["Part", "check_pipeline", "compute_part", "exchange_in_groups", "parts_of", "together"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some KV heads of a call, and their query heads ``first`` up to ``last``."""

    spec: Spec
    args: Args
    first: int
    last: int


def check_pipeline(pipeline: Any) -> int:
    """Refuse a number of groups that can't be in flight."""
    if isinstance(pipeline, (int, np.integer)) and not isinstance(pipeline, bool) and 1 <= pipeline <= IN_FLIGHT:
        return int(pipeline)
    raise InputError.of("pipeline", expected=f"a number of groups from 1 to {IN_FLIGHT}", got=repr(pipeline))


def parts_of(spec: Spec, args: Args, groups: int) -> list[Part]:
    """Cut a call into ``groups`` of KV heads, about equally many each; bits are those of the whole.

    Raises
    ------
    InputError
        There are fewer KV heads than groups.
    """
    heads = spec.kv_heads
    if groups > heads:
        raise InputError.of("pipeline", expected=f"at most {heads} groups, the number of KV heads", got=groups)
    bounds = [heads * index // groups for index in range(groups + 1)]
    return [_part(spec, args, *pair) for pair in pairwise(bounds)]


def _part(spec: Spec, args: Args, first: int, last: int) -> Part:
    kv, queries = slice(first, last), slice(first * spec.group, last * spec.group)
    found = replace(
        args,
        q=args.q[:, queries],
        k=args.k[:, kv],
        v=args.v[:, kv],
        mask=None if args.mask is None else args.mask[:, queries],
        k_scale=None if args.k_scale is None else args.k_scale[:, kv],
        v_scale=None if args.v_scale is None else args.v_scale[:, kv],
    )
    heads, of_whole = last - first, spec.kv_heads
    part = replace(spec, kv_heads=heads, q_heads=heads * spec.group, whole_kv_heads=of_whole)
    return Part(part, found, queries.start, queries.stop)


def compute_part(comm: TreeComm, part: Part, backend: Any) -> PartialState:
    """Compute a group's state while those of the groups before it travel."""

    def compute() -> PartialState:
        return run_backend(part.spec, part.args, backend)

    # A backend that queues its work leaves this thread free, and counts on it.
    return compute() if backend_of(part.spec, backend).queues else comm.beside(compute)


def exchange_in_groups(comm: TreeComm, groups: int, attempt: Callable[[int], Attempt]) -> list[PartialState | None]:
    """Compute and merge one group after the other, each exchange begun before the next group is computed; collective.

    Parameters
    ----------
    comm : TreeComm
    groups : int
        How many exchanges there are, on every rank.
    attempt : callable
        Computes a group's state, given its number, or says what went wrong.

    Returns
    -------
    list of PartialState or None
        Merged states by group; None on ranks that are not the root, where there is one.

    Raises
    ------
    Exception
        On every rank, what went wrong on any; nothing is in flight then.
    """
    begun: list[Reduction] = []
    try:
        for index in range(groups):
            tried = attempt(index)
            begun.append(comm.begin(tried, out=tried.state))
    finally:
        ended = _end(begun)
    return ended


def together(spec: Spec, parts: list[Part], merged: list[PartialState | None]) -> PartialState:
    """Put the groups' states together."""
    states = [each for each in merged if each is not None]
    ops = states[0].ops
    packed = ops.empty(spec.packed_shape, spec.state_dtype)
    for part, state in zip(parts, states, strict=True):
        packed[:, part.first : part.last] = state._packed
    return PartialState(packed, ops)


def _end(begun: list[Reduction]) -> list[PartialState | None]:
    """End all, whatever becomes of each, and raise the first error."""
    ended: list[PartialState | None] = []
    errors: list[Exception] = []
    for each in begun:
        try:
            ended.append(each.end_at_root())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return ended
