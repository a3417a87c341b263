"""What ranks would make of some states: packed, merged as wire rows and unpacked, with no rank at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from treeattn.state import PartialState
from treeattn.wire_form import Bytes, WireForm, merger

__all__ = ["over_the_wire"]

Nested: TypeAlias = "PartialState | Sequence[Nested]"


def over_the_wire(states: Nested) -> PartialState:
    """Merge states as ranks do, in the order given; states that are nested are merged among themselves first.

    A state that is alone does not travel, and is given back.

    Examples
    --------
    >>> import treeattn
    >>> from treeattn.testing import over_the_wire
    >>> empty = treeattn.PartialState.identity((1, 2, 1, 4))
    >>> over_the_wire([[empty, empty], empty]).l.tolist()
    [[[0.0], [0.0]]]
    """
    if isinstance(states, PartialState) or len(states) == 1:
        return states if isinstance(states, PartialState) else over_the_wire(states[0])
    first = states[0]
    while not isinstance(first, PartialState):
        first = first[0]
    form = WireForm(first._packed.shape, first.dtype.name)
    merged = first._like(first.ops.empty(form.shape, form.dtype))
    first.ops.prepare_unpack(_rows(states, form), form)(merged._packed)
    return merged


def _rows(states: Nested, form: WireForm) -> Bytes:
    rows = np.empty(form.nbytes, np.uint8)
    if isinstance(states, PartialState):
        states.ops.prepare_pack(rows, form)(states._packed)
    else:
        merger(rows, [_rows(each, form) for each in states], form)()
    return rows
