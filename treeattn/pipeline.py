"""Decoding in groups of heads: one group's states travel while the next group's are computed.

It pays where computing and travelling take about as long, and where travelling takes long because of the bytes: states
of many queries on a wire of some rate. The last group's latency comes after all computing, in groups or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from treeattn.arguments.spec import Args, Spec
from treeattn.errors import InputError
from treeattn.local import backend_of, run_backend
from treeattn.state import PartialState
from treeattn.steps.groups import Beside
from treeattn.steps.lanes import IN_FLIGHT

__all__ = ["Part", "check_pipeline", "compute_part", "parts_of", "together"]


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
    found = args._replace(
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


def compute_part(part: Part, backend: Any, beside: Beside) -> PartialState:
    """Compute a group's state while those of the groups before it travel."""

    def compute() -> PartialState:
        return run_backend(part.spec, part.args, backend)

    # A backend that queues its work leaves this thread free, and counts on it.
    state: PartialState = compute() if backend_of(part.spec, backend).queues else beside(compute)
    return state


def together(spec: Spec, parts: list[Part], merged: list[PartialState | None]) -> PartialState:
    """Put the groups' states together."""
    states = [each for each in merged if each is not None]
    ops = states[0].ops
    packed = ops.empty(spec.packed_shape, spec.state_dtype)
    for part, state in zip(parts, states, strict=True):
        packed[:, part.first : part.last] = state._packed
    return PartialState(packed, ops)
