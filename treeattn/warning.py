"""Warnings of what all ranks know: one rank gives them, and all raise them where it takes warnings for errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Share", "warn_once"]

Share: TypeAlias = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Gives every rank's values, by rank, for this rank's; collective."""


def warn_once(text: str, rank: int, share: Share) -> None:
    """Warn on rank 0; collective.

    Parameters
    ----------
    text : str
    rank : int
        This one.
    share : callable

    Raises
    ------
    UserWarning
        On every rank, if warnings are errors on rank 0: alone, it would leave the others waiting.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error")
    ...     warn_once("no room", 0, lambda values: [values])
    Traceback (most recent call last):
    UserWarning: no room
    """
    refused = False
    try:
        if rank == 0:
            warnings.warn(text, stacklevel=6)
    except UserWarning:
        refused = True
    if any(each["refused"] for each in share({"refused": refused})):
        raise UserWarning(text)
