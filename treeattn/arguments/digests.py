"""Digests of what must hold the same on every rank, and whether they are wanted where they cost a pass over it."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

from treeattn.errors import InputError

__all__ = ["CHECK_VARIABLE", "checks", "digest", "digest_of_array"]

CHECK_VARIABLE = "TREEATTN_CHECK"


def checks() -> bool:
    """Whether ranks compare the values of what all of them pass.

    Raises
    ------
    InputError
        ``TREEATTN_CHECK`` is neither 0 nor 1; where it is empty, it is as if not set.
    """
    wanted = os.environ.get(CHECK_VARIABLE) or "0"
    if wanted not in ("0", "1"):
        raise InputError.of(CHECK_VARIABLE, expected="0 or 1", got=repr(wanted))
    return wanted == "1"


def digest_of_array(array: Any) -> int:
    """Give 64 bits for an array's values, whatever its strides."""
    return digest(np.ascontiguousarray(array).tobytes())


def digest(data: bytes) -> int:
    """Give 64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
