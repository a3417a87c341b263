"""What a rank can say of its communicator by itself, without asking the others."""

from __future__ import annotations

from treeattn.arguments.checks import check_root, check_size
from treeattn.arguments.state_arguments import state_dtype, state_shape
from treeattn.calibration.timing import Calibration
from treeattn.planning.plan import Plan, Stats, Usage
from treeattn.ranks.team import Team
from treeattn.wire_form import ROUNDING, WireForm

__all__ = ["Facts"]

TYPICAL_SHAPE = (1, 32, 1, 128)
"""Shape of one decode step's state. ``TreeComm.plan`` is for this."""


class Facts:
    """The half of `treeattn.TreeComm` that is not collective; the other half is made of its team.

    Parameters
    ----------
    team : Team

    Attributes
    ----------
    rank, size : int
    """

    def __init__(self, team: Team) -> None:
        self._team, self.rank, self.size = team, team.rank, team.size

    @property
    def hosts(self) -> tuple[str, ...]:
        """One host label per rank, the same on every rank."""
        return self._team.channel.hosts

    @property
    def wire_dtype(self) -> str | None:
        """What o travels in, if it is not the states' own dtype."""
        return self._team.channel.wire_dtype

    @property
    def deterministic(self) -> bool:
        """Whether rank states travel unmerged."""
        return self._team.policy.deterministic

    @property
    def usable(self) -> bool:
        """Whether it was neither freed nor broken."""
        return self._team.usable

    @property
    def stats(self) -> Stats:
        """What this rank has sent, and how many rounds it went through, since the communicator was made."""
        return self._team.channel.tally.stats

    @property
    def usage(self) -> Usage:
        """What the last merge, or other operation that sends, took on this rank besides messages."""
        return self._team.channel.tally.usage

    @property
    def calibration(self) -> Calibration | None:
        """What was measured for ``plan="auto"``, once a merge or another communicator of these ranks has done it."""
        return self._team.policy.calibration

    @property
    def plan(self) -> Plan:
        """The plan of `allreduce` for one decode step's state (32 heads of width 128 in float32)."""
        return self.plan_for(self.wire_bytes(TYPICAL_SHAPE))

    def plan_for(self, payload_bytes: int, root: int | None = None) -> Plan:
        """Give the plan that a state takes: to all ranks, or to ``root``.

        Parameters
        ----------
        payload_bytes : int
            Bytes of a state on the wire; see `wire_bytes`.
        root : int, optional
            The only rank that wants the result.

        Returns
        -------
        Plan
            Pure data: print it, ``draw`` it, or let it ``predict`` what a call costs.

        Examples
        --------
        >>> import treeattn
        >>> comm = treeattn.TreeComm()
        >>> nbytes = comm.wire_bytes((1, 32, 1, 128))
        >>> comm.plan_for(nbytes).predict(nbytes).total.messages
        0
        """
        payload_bytes = check_size("payload_bytes", payload_bytes, 0)
        return self._team.plan(payload_bytes, check_root(root, self.size))

    def wire_bytes(self, shape: tuple[int, int, int, int], dtype: str = "float32") -> int:
        """Give the bytes that a state takes on the wire, which is what `plan_for` and ``Plan.predict`` take.

        Parameters
        ----------
        shape : tuple of int
            (B, Hq, Tq, Dv), the state's.
        dtype : str or dtype
            The state's.

        Returns
        -------
        int
            Bytes, without headers.
        """
        *rows, width = state_shape(shape)
        return WireForm((*rows, width + 2), state_dtype(dtype), self.wire_dtype).nbytes

    def wire_error(self, payload_bytes: int, root: int | None = None) -> float:
        """Say by how much of the largest ``v``, at most, ``wire_dtype`` adds to the error of ``out``.

        Parameters
        ----------
        payload_bytes, root
            As in `plan_for`.

        Returns
        -------
        float
            0 without ``wire_dtype``; else u for the state and for each merge of the plan.

        Examples
        --------
        >>> import treeattn
        >>> comm = treeattn.TreeComm(wire_dtype="bfloat16")
        >>> comm.wire_error(comm.wire_bytes((1, 32, 1, 128)))  # of one rank, which sends nothing
        0.0
        """
        rounds = self.plan_for(payload_bytes, root).rounds
        if self.wire_dtype is None or self.size == 1:
            return 0.0
        merges = sum(any(each.merges) for each in rounds)
        return (1 + merges) * ROUNDING[self.wire_dtype]

    def __repr__(self) -> str:
        hosts = len(set(self.hosts))
        kind = f"rank {self.rank} of {self.size} on {hosts} host{'s' * (hosts != 1)}"
        plan = self._team.channel.collective or str(self._team.policy)
        end = "" if self.usable else ", freed" if self._team.channel.freed else ", broken"
        return f"TreeComm({kind}, plan={plan!r}{end})"
