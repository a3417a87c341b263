"""States to merge, and what tests compare of them."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn import PartialState
from treeattn.errors import InputError


def sequence(seed, tokens):
    rng = np.random.default_rng(seed)
    shapes = ((1, 2, 1, 4), (1, 1, tokens, 4), (1, 1, tokens, 5))
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def states_of(size, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    ops = PartialState.identity((1, 1, 1, 1), backend="reference").ops
    packed = rng.standard_normal((size, 2, 3, 1, 6)).astype(dtype)
    packed[..., -2] = np.abs(packed[..., -2])
    return [PartialState(each, ops) for each in packed]


def bits(state):
    return state.packed.tobytes()


def message_of(call):
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)
