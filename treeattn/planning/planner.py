"""Building plans: from one host label per rank and radices to rounds of messages. Pure; sends nothing.

Inside a host, states go up a tree to the host's leader and are merged in rank order; likewise between the hosts of a
rack, where there is such a level. Leaders then swap *unmerged* states until each holds all of them, and merge them in
host order, so that bits do not depend on the radix; or, by the scheme "reduce", go on up a tree. The result comes down
the same way. ``deterministic`` carries rank states unmerged all the way and merges them once, in rank order.

With several leaders per host the head rows are cut into as many pieces. Each piece follows a plan like that of one
leader, with leaders of its own, and all pieces go through their rounds together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

from treeattn.errors import InputError
from treeattn.planning.plan import Action, Level, Plan, Round
from treeattn.planning.radices import NAMED_RADICES, Radices, read_radices
from treeattn.planning.topology import group_ranks, rack_of
from treeattn.planning.trees import Block, exchange, final_merges, gather, reduction, side_by_side, spread, then_merge

__all__ = ["BY_MODEL", "parse_radices", "plan_allreduce", "plan_bcast", "plan_reduce", "read_plan"]

Groups: TypeAlias = "tuple[tuple[int, ...], ...]"

BY_MODEL = "default", "auto"
"""Names that leave the plan to a cost model: a given one, and one that is measured on first use."""


def parse_radices(plan: Any) -> Radices | None:
    """Give the radices of what ``plan=`` takes, as `read_plan` does; None leaves them to a cost model.

    Examples
    --------
    >>> parse_radices("2,all").inside, parse_radices("default")
    (2, None)
    """
    found = read_plan(plan)
    return found.radices if isinstance(found, Plan) else found


def read_plan(plan: Any) -> Plan | Radices | None:
    """Read what ``plan=`` takes: a name, radices as a sequence or as text, a Plan, or the path of a file with one.

    None leaves it to a cost model.

    Raises
    ------
    InputError
        It is none of these, or the file holds no plan.
    """
    if plan is None or (isinstance(plan, str) and plan in BY_MODEL):
        return None
    if isinstance(plan, (Plan, Radices)):
        return plan
    found = read_radices(plan) or _in_file(plan)
    if found is None:
        from treeattn.planning.saved import no_file

        known = ", ".join(map(repr, (*BY_MODEL, *NAMED_RADICES)))
        shapes = "a pair of radices (inside, between), a triple (inside, rack, between)"
        expected = f"{known}, {shapes}, a Plan or a file with one"
        raise InputError.of("plan", expected=expected, got=repr(plan), hint=no_file(plan))
    return found


def _in_file(path: Any) -> Plan | None:
    from treeattn.planning.saved import text_of  # only what was written elsewhere needs it

    text = text_of("plan", path)
    return None if text is None else Plan.from_json(text)


def plan_allreduce(
    hosts: Iterable[str], radices: Radices | None = None, *, deterministic: bool = False, near: Sequence[int] = ()
) -> Plan:
    """Plan a merge of every rank's state that every rank gets.

    Parameters
    ----------
    hosts : iterable of str
        One label per rank, in any order; what is before its last slash is the host's rack.
    radices : Radices, optional
        One round per level by default.
    deterministic : bool
        Whether rank states travel unmerged.
    near : sequence of int
        Ranks near their host's network card, which are leaders before others.
    """
    return _allreduce(tuple(hosts), radices or Radices(), deterministic, tuple(near))


def plan_reduce(
    hosts: Iterable[str],
    root: int,
    radices: Radices | None = None,
    *,
    deterministic: bool = False,
    near: Sequence[int] = (),
) -> Plan:
    """Plan a merge of every rank's state that ``root`` gets, with the bits of `plan_allreduce`.

    An acknowledgement, a header alone, comes back down, so that every rank learns whether all went well. On its own
    host the root leads every piece.
    """
    return _reduce(tuple(hosts), root, radices or Radices(), deterministic, tuple(near))


def plan_bcast(hosts: Iterable[str], root: int, radices: Radices | None = None) -> Plan:
    """Plan the way of one array from ``root`` to all: to the other hosts' leaders, then inside each host."""
    return _bcast(tuple(hosts), root, radices or Radices())


@lru_cache(maxsize=256)
def _allreduce(hosts: tuple[str, ...], radices: Radices, deterministic: bool, near: tuple[int, ...]) -> Plan:
    layout = Layout.of(hosts, radices, near)
    if radices.inside == "shared" and len(layout.members) == 1 and layout.pieces == 1 and not radices.flat:
        return Plan("allreduce", None, hosts, radices, deterministic, _meeting(layout.members[0]))
    rounds = [_up_and_down(layout.stages(piece), radices, deterministic) for piece in range(layout.pieces)]
    return Plan("allreduce", None, hosts, radices, deterministic, _together(rounds), layout.pieces)


@lru_cache(maxsize=256)
def _reduce(hosts: tuple[str, ...], root: int, radices: Radices, deterministic: bool, near: tuple[int, ...]) -> Plan:
    layout = Layout.of(hosts, radices, near)
    rounds = [_to_root(layout.stages(piece, root), radices, deterministic) for piece in range(layout.pieces)]
    return Plan("reduce", root, hosts, radices, deterministic, _together(rounds), layout.pieces)


@lru_cache(maxsize=256)
def _bcast(hosts: tuple[str, ...], root: int, radices: Radices) -> Plan:
    by_messages = replace(radices, inside=None) if radices.inside == "shared" else radices
    stages = Layout.of(hosts, by_messages, ()).stages(0, root)
    top = side_by_side("between", "broadcast", [spread(stages[-1].leaders, radices.between, 1)])
    rounds = (*top, *_down(stages, "broadcast", 1))
    return Plan("bcast", root, hosts, radices, False, rounds)


@dataclass(frozen=True, slots=True)
class Stage:
    """One level of the tree: groups of ranks, the leader of each first."""

    level: Level
    groups: Groups
    radix: int | None
    shared: bool = False

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leader of each group."""
        return tuple(group[0] for group in self.groups)


@dataclass(frozen=True, slots=True)
class Layout:
    """Who shares a host, and who may lead there.

    Parameters
    ----------
    hosts : tuple of str
    radices : Radices
    members : tuple of tuple of int
        The ranks of each host, in the order of their lowest.
    candidates : tuple of tuple of int
        Those of them that lead, in turns.
    """

    hosts: tuple[str, ...]
    radices: Radices
    members: Groups
    candidates: Groups

    @classmethod
    def of(cls, hosts: tuple[str, ...], radices: Radices, near: tuple[int, ...]) -> Layout:
        """Group the ranks; those ``near`` lead where a host has any."""
        members = tuple((rank,) for rank in range(len(hosts))) if radices.flat else group_ranks(hosts)
        candidates = tuple(tuple(rank for rank in group if rank in near) or group for group in members)
        return cls(hosts, radices, members, candidates)

    @property
    def pieces(self) -> int:
        """In how many pieces the head rows are cut: no more than the most leaders that a host has."""
        most = max(map(len, self.candidates))
        return most if self.radices.leaders == "all" else min(self.radices.leaders, most)

    def stages(self, piece: int, root: int | None = None) -> list[Stage]:
        """Give the levels that one piece goes up and down, with the root's groups, and the root in them, first."""
        radices, groups = self.radices, self._led(piece, root)
        shared = radices.inside == "shared"
        stages = [Stage("inside", groups, None if radices.inside == "shared" else radices.inside, shared)]
        racks = self._racks(stages[-1].leaders)
        if radices.rack != "skip" and not radices.flat and 1 < len(racks) < len(groups):
            stages.append(Stage("rack", racks, radices.rack))
        if radices.scheme == "reduce":
            stages.append(Stage("between", (stages[-1].leaders,), radices.between))
        return stages

    def _led(self, piece: int, root: int | None) -> Groups:
        """Put the leader of each host first; where there is a root, its host comes first, in cyclic order."""
        leaders = [candidates[piece % len(candidates)] for candidates in self.candidates]
        start = 0
        if root is not None:
            (start,) = (index for index, group in enumerate(self.members) if root in group)
            leaders[start] = root
        led = [
            (leader, *(r for r in group if r != leader)) for leader, group in zip(leaders, self.members, strict=True)
        ]
        return (*led[start:], *led[:start])

    def _racks(self, leaders: tuple[int, ...]) -> Groups:
        racks = group_ranks(rack_of(self.hosts[leader]) for leader in leaders)
        return tuple(tuple(leaders[index] for index in rack) for rack in racks)


def _up_and_down(stages: list[Stage], radices: Radices, deterministic: bool) -> list[Round]:
    top, (up, blocks) = stages[-1].leaders, _up(stages, deterministic)
    across = side_by_side("between", "exchange", [exchange(top, blocks, radices.between)])
    rounds = then_merge([*up, *across], final_merges(top, blocks))
    return [*rounds, *_down(stages, "broadcast", 1)]


def _to_root(stages: list[Stage], radices: Radices, deterministic: bool) -> list[Round]:
    top, (up, blocks) = stages[-1].leaders, _up(stages, deterministic)
    across = side_by_side("between", "gather", [gather(top, blocks, radices.between)])
    rounds = then_merge([*up, *across], final_merges(top, blocks)[:1])
    answer = side_by_side("between", "acknowledge", [spread(top, radices.between, 0)])
    return [*rounds, *answer, *_down(stages, "acknowledge", 0)]


def _up(stages: list[Stage], deterministic: bool) -> tuple[list[Round], list[Block]]:
    """Bring the states of each group to its leader; also give what the last leaders' records then hold.

    Where states are merged on their way, a leader's block is one key, the lowest rank of all below it.
    """
    held: dict[int, Block] = {rank: (rank,) for group in stages[0].groups for rank in group}
    rounds: list[Round] = []
    for stage in stages:
        parts = []
        for group in stage.groups:
            blocks = [held[rank] for rank in group]
            if deterministic:
                parts.append(gather(group, blocks, stage.radix))
                held[group[0]] = tuple(chain(*blocks))
            else:
                parts.append(reduction(sorted(group, key=held.__getitem__), group[0], stage.radix))
                held[group[0]] = min(blocks)
        action: Action = "gather" if deterministic else "reduce"
        rounds += side_by_side(stage.level, action, parts, shared=stage.shared)
    return rounds, [held[leader] for leader in stages[-1].leaders]


def _down(stages: list[Stage], action: Action, slots: int) -> list[Round]:
    """Bring one record, or a header alone, from the last leaders to all."""
    rounds: list[Round] = []
    for stage in reversed(stages):
        parts = [spread(group, stage.radix, slots) for group in stage.groups]
        rounds += side_by_side(stage.level, action, parts, shared=stage.shared)
    return rounds


def _meeting(ranks: tuple[int, ...]) -> tuple[Round, ...]:
    """Let all ranks of the only host read all states in shared memory."""
    alone = [(rank,) for rank in ranks]
    swap = side_by_side("inside", "exchange", [exchange(ranks, alone, None)], shared=True)
    return tuple(then_merge(swap, final_merges(ranks, alone)))


def _together(pieces: list[list[Round]]) -> tuple[Round, ...]:
    """Let all pieces go through their rounds at once; they have equally many."""
    if len(pieces) == 1:
        return tuple(pieces[0])
    numbered = [[_of_piece(each, piece) for each in rounds] for piece, rounds in enumerate(pieces)]
    return tuple(
        replace(
            same[0],
            messages=tuple(chain(*(each.messages for each in same))),
            merges=tuple(chain(*(each.merges for each in same))),
        )
        for same in zip(*numbered, strict=True)
    )


def _of_piece(each: Round, piece: int) -> Round:
    return replace(
        each,
        messages=tuple(replace(message, piece=piece) for message in each.messages),
        merges=tuple(replace(merge, piece=piece) for merge in each.merges),
    )
