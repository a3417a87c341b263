"""The ranks of one communicator as the rest of the package sees them: every kind of call that they make together.

`treeattn.TreeComm` is the face that users see; `decode`, caches and baselines are made of what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from treeattn.arguments.checks import check_rank
from treeattn.errors import InputError
from treeattn.execution.agreement import Attempt, Description
from treeattn.execution.broadcasting import broadcast, check_alike, describe, sendable
from treeattn.execution.window import open_window
from treeattn.planning.plan import Plan
from treeattn.planning.planner import plan_bcast
from treeattn.ranks.policy import Policy
from treeattn.state import PartialState
from treeattn.steps.attempts import Attempts, with_out
from treeattn.steps.channel import Channel
from treeattn.steps.groups import Beside, Groups
from treeattn.steps.lanes import Lanes, Reduction
from treeattn.steps.session import Session
from treeattn.steps.wire import Wire

__all__ = ["Team"]

Array: TypeAlias = npt.NDArray[Any]
Fields: TypeAlias = "tuple[tuple[str, Any], ...]"
T = TypeVar("T")


class Team:
    """Ranks on a channel, which `treeattn.ranks.joining.join` lets agree on ``policy`` and on shared memory.

    Parameters
    ----------
    channel : Channel

    Attributes
    ----------
    rank, size : int
    policy : Policy
        Which plan a payload takes.
    kept : bool
        Whether something may use it that nobody ends, such as a cache.
    """

    policy: Policy

    def __init__(self, channel: Channel) -> None:
        self.channel, self.rank, self.size = channel, channel.rank, channel.size
        self.session = Session(channel, self._measured_plan)
        self._lanes = Lanes(channel, self._open_lane)
        self._groups = Groups(channel, self._lanes, self.session)
        self._attempts, self.kept = Attempts(channel), False

    @property
    def usable(self) -> bool:
        """Whether it was neither freed nor broken."""
        return self.channel.guard.reason is None

    def plan(self, payload_bytes: int, root: int | None) -> Plan:
        """Give the plan that a state takes: to all ranks, or to ``root``."""
        return self.policy.plan(payload_bytes, root, self.session.shares(payload_bytes))

    def _measured_plan(self, payload_bytes: int, root: int | None, shared: bool) -> Plan:
        if self.policy.has_to_measure:
            self.session.make_room(payload_bytes)
            self.policy.measure(payload_bytes, self.session.window)
        return self.policy.plan(payload_bytes, root, shared)

    def _open_lane(self) -> Session:
        """Make a lane, with memory of its own where the communicator has any; collective."""
        memory = self.session.window and open_window(
            self.channel.hosts, self.rank, partial(self._consult_fields, "TreeComm", ())
        )
        return Session(self.channel, self._measured_plan, memory, self.session.agreed)

    def allreduce(self, state: PartialState, out: PartialState | None) -> PartialState:
        """Merge the states of all ranks, for all of them; see `treeattn.TreeComm.allreduce`."""
        merged = self.exchange(self._attempts.to_all("allreduce", state), out=out)
        assert merged is not None, "without a root, every rank has the result"
        return merged

    def begin(self, state: PartialState, out: PartialState | None) -> Reduction:
        """Begin to merge; see `treeattn.TreeComm.allreduce_begin`."""
        attempt = with_out(self._attempts.to_all("allreduce_begin", state), out)
        if self.size > 1:
            return self._lanes.begin(attempt, out)
        merged = self.exchange(attempt, out=_room_for(attempt) if out is None else out)
        return Reduction(lambda: merged)

    def reduce(self, state: PartialState, root: int) -> PartialState | None:
        """Merge for one rank; see `treeattn.TreeComm.reduce`."""
        return self.exchange(self._attempts.to_root("reduce", state, root))

    def exchange(self, attempt: Attempt, *, out: PartialState | None = None) -> PartialState | None:
        """Merge the attempts of all ranks, or raise on all of them.

        Parameters
        ----------
        attempt : Attempt
            This rank's state and what it believes the call to be, or the error that kept it from having one.
        out : PartialState, optional
            A state to overwrite.

        Returns
        -------
        PartialState or None
            None on ranks that are not the root, where there is one.
        """
        shortcut = self.session.shortcut
        if shortcut is not None and attempt.signature is shortcut.signature:  # kept by those who make signatures
            merged = shortcut.merge(attempt.state, out, attempt)
            if merged is not None:
                return merged
        return self.channel.operate(self._exchange, with_out(attempt, out), out)

    def _exchange(self, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        if self.size > 1:
            return self.session.merge(attempt, out)
        if attempt.error is not None or attempt.state is None:
            raise attempt.error or InputError.of("attempt", expected="a state or an error", got="neither")
        return attempt.state if out is None else _copy(attempt.state, out)

    def in_groups(self, groups: int, attempt: Callable[[int, Beside], Attempt]) -> list[PartialState | None]:
        """Merge groups of one call, the state of one under way while the next one's is computed.

        Parameters
        ----------
        groups : int
        attempt : callable
            As in `treeattn.steps.groups.Groups.run`.

        Returns
        -------
        list of PartialState or None
            By group, what `exchange` would give; states are merged in place.
        """
        if self.size == 1:
            tried = (attempt(index, lambda work: work()) for index in range(groups))
            return [self.exchange(each, out=each.state) for each in tried]
        return self.channel.operate(self._groups.run, groups, attempt)

    def beside(self, work: Callable[[], T]) -> T:
        """Do ``work``, on another thread and without the communicator, while what was begun moves on.

        Messages of MPI only move inside of its calls.
        """
        return self._lanes.beside(work)

    def bcast(self, array: Any, root: int) -> Array:
        """Give every rank the root's array; see `treeattn.TreeComm.bcast`."""
        return self.channel.operate(self._bcast, array, root)

    def _bcast(self, array: Any, root: int) -> Array:
        given, error = None, None
        try:
            root = check_rank("root", root, self.size)
            given = sendable(array, self.rank == root)
        except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
            error = wrong
        told = self._consult(Description("bcast", root, values={"array": describe(given)}), error)
        dtype, shape = check_alike([each["array"] for each in told], root)
        data = given if given is not None and self.rank == root else np.empty(shape, dtype)
        radices = self.policy.radices(data.nbytes, self.session.shares(data.nbytes))
        plan = plan_bcast(self.channel.hosts, root, radices)
        self.channel.call(broadcast, plan, self.channel.transport, data, self.channel.tally)
        return data

    def consult(
        self, operation: str, fields: Fields, values: dict[str, Any], error: Exception | None = None
    ) -> list[dict[str, Any]]:
        """Compare ``fields`` over all ranks and share ``values``; for calls that are not on the hot path.

        Parameters
        ----------
        operation : str
            What the call is, for messages.
        fields : tuple of (name, value)
            What must be the same on every rank; values that JSON can carry.
        values : dict
            What every rank gets to know; likewise.
        error : Exception, optional
            What went wrong on this rank.

        Returns
        -------
        list of dict
            The values, by rank.

        Raises
        ------
        Exception
            On every rank, if any has an error or ``fields`` differ.
        """
        return self.channel.operate(self._consult_fields, operation, fields, values, error)

    def _consult_fields(
        self, operation: str, fields: Fields, values: dict[str, Any], error: Exception | None = None
    ) -> list[dict[str, Any]]:
        return self._consult(Description(operation, None, [list(pair) for pair in fields], values=values), error)

    def _consult(self, description: Description, error: Exception | None) -> list[dict[str, Any]]:
        if error is not None:
            description = Description.of_error(error, description.operation)
        return self.session.consult(description, error)

    def converse(self, function: Callable[[Wire], T]) -> T:
        """Run an operation that has its own pattern of messages; collective.

        Parameters
        ----------
        function : callable
            Gets the `Wire`. Every rank's must send what the others' receive, so agree by `consult` before. What it
            raises breaks the communicator: keep an error of this rank's own until all messages are through, and let
            another `consult` report it.
        """
        result: T = self.channel.operate(self.channel.call, self._conversation, function)
        return result

    def _conversation(self, function: Callable[[Wire], T]) -> T:
        wire = Wire(self.channel)
        result = function(wire)
        self.channel.tally.usage = wire.usage
        return result

    def free(self) -> None:
        """Give everything back; collective; see `treeattn.TreeComm.free`."""
        if self.usable:
            self.consult("free", (), {})
            self._lanes.complete()
            self.channel.free()
            self.session.forget()
            self._lanes.forget()


def _room_for(attempt: Attempt) -> PartialState | None:
    """Give room for a copy of a state that its owner may soon overwrite."""
    state = attempt.state
    return None if state is None else state._like(state.ops.empty(state._packed.shape, state.dtype.name))


def _copy(state: PartialState, out: PartialState) -> PartialState:
    if out is not state:
        state.ops.merge(out._packed, [state._packed])
    return out
