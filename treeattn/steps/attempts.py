"""From what a user passes to an attempt at merging it: what is wrong on one rank must be heard of on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treeattn.arguments.checks import check_rank
from treeattn.errors import InputError
from treeattn.execution.agreement import Attempt, Signature
from treeattn.state import PartialState, check_writable
from treeattn.steps.channel import Channel

__all__ = ["Attempts", "check_travels", "with_out"]


class Attempts:
    """The attempts of one communicator; calls that are alike share a signature.

    Parameters
    ----------
    channel : Channel
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._signatures: dict[Any, Signature] = {}

    def to_all(self, operation: str, state: Any) -> Attempt:
        """Try to merge ``state`` with those of all ranks, for all of them."""
        return self._tried(operation, state, lambda: None)

    def to_root(self, operation: str, state: Any, root: Any) -> Attempt:
        """Try the same for ``root``."""
        return self._tried(operation, state, lambda: check_rank("root", root, self._channel.size))

    def _tried(self, operation: str, state: Any, rooted: Callable[[], int | None]) -> Attempt:
        try:
            return Attempt(self._signature(operation, rooted(), state), state, None)
        except Exception as error:  # whatever it is, the others must hear of it before it is raised here
            return Attempt(None, None, error)

    def _signature(self, operation: str, root: int | None, state: Any) -> Signature:
        if not isinstance(state, PartialState):
            raise InputError.of("state", expected="a PartialState", got=type(state).__name__)
        batch, heads, tokens, width = state._packed.shape
        shape = batch, heads, tokens, width
        key = operation, root, shape, state._packed.dtype
        found = self._signatures.get(key)
        if found is None:
            check_travels(state.dtype.name, self._channel.wire_dtype)
            fields = (("state.shape", state.shape), ("state.dtype", state.dtype.name))
            found = Signature(operation, root, fields, shape, state.dtype.name)
            self._signatures[key] = found
        return found


def check_travels(dtype: str, wire_dtype: str | None) -> None:
    """Refuse states that are more precise than ``wire_dtype`` is for.

    Raises
    ------
    InputError
        They are float64.
    """
    if wire_dtype is not None and dtype == "float64":
        hint = "float64 states travel whole: leave wire_dtype out, or compute in float32"
        raise InputError.of("wire_dtype", expected="None for float64 states", got=repr(wire_dtype), hint=hint)


def with_out(attempt: Attempt, out: Any) -> Attempt:
    """Let an ``out`` that can't take the result count as this rank's error."""
    state = attempt.state
    if out is None or state is None or attempt.error is not None:
        return attempt
    try:
        _check_out(state, out)
    except InputError as error:
        return replace(attempt, error=error)
    return attempt


def _check_out(state: PartialState, out: Any) -> None:
    alike = isinstance(out, PartialState) and (
        (state.shape, state.dtype, state.ops.name) == (out.shape, out.dtype, out.ops.name)
    )
    if not alike:
        raise InputError.of("out", expected=f"a state like {state!r}", got=repr(out))
    check_writable(out)
