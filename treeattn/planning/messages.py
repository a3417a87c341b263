"""How bytes are cut into messages. Pure.

Between hosts MPI sends short messages at once, and asks before longer ones, which takes two delays more: over TCP Open
MPI asks above 64 KiB with its own header (btl_tcp_eager_limit). Several short messages are there sooner, until their
number costs more than the asking. Inside a host nobody is far away.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["AT_ONCE", "LARGEST_MESSAGE", "MOST_PARTS", "count_messages", "cut", "largest_message"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

LARGEST_MESSAGE = 2**30
"""MPI counts in 32 bits: what is longer travels as several messages of at most this many bytes."""

AT_ONCE = 60 * 2**10
"""Between hosts a message is cut into parts of so many bytes, which leaves room for MPI's own header."""

MOST_PARTS = 16
"""What would take more of these parts goes whole."""


def count_messages(nbytes: int, *, between: bool) -> int:
    """Count the messages that so many bytes take, which go to another host or not; nothing takes none.

    Examples
    --------
    >>> [count_messages(nbytes, between=True) for nbytes in (0, 16640, 66560, 10**6)]
    [0, 1, 2, 1]
    """
    largest, rest = divmod(nbytes, LARGEST_MESSAGE)
    return largest + -(-rest // _part(rest, between))


def largest_message(nbytes: int, *, between: bool) -> int:
    """Give the bytes of the largest of these messages."""
    return min(nbytes, _part(nbytes, between))


def cut(data: Bytes, *, between: bool) -> list[Any]:
    """Cut bytes into messages; ``data`` may be in a card's memory."""
    largest = _every(LARGEST_MESSAGE, data)
    return [message for each in largest for message in _every(_part(each.size, between), each)]


def _part(nbytes: int, between: bool) -> int:
    return AT_ONCE if between and nbytes <= MOST_PARTS * AT_ONCE else LARGEST_MESSAGE


def _every(size: int, data: Bytes) -> list[Any]:
    return [data[start : start + size] for start in range(0, data.size, size)]
