"""Building plans: from one host label per rank and a radix per level to rounds of messages. Pure; sends nothing.

Inside a host, states go up a tree to the host's leader and are merged in rank order; between hosts, leaders swap
*unmerged* host states until each holds all of them, and merge them in host order, so that bits do not depend on
the radix; the result goes down a tree inside each host. ``deterministic`` carries rank states unmerged all the way
and merges them once, in rank order.

The exchange is Bruck's all-gather (Bruck et al., IEEE TPDS 8(11), 1997) with a radix: in each round a leader that
holds the states of h hosts gets those of up to (radix - 1) h more. It fits any number of hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, zip_longest
from numbers import Integral
from typing import Any, Literal, TypeAlias

from treeattn.errors import InputError
from treeattn.plan import Action, Level, Merge, Message, Plan, Radices, Round
from treeattn.topology import group_ranks

__all__ = ["NAMED_RADICES", "choose_radices", "parse_radices", "plan_allreduce", "plan_bcast", "plan_reduce"]

Groups: TypeAlias = tuple[tuple[int, ...], ...]

NAMED_RADICES = {
    "shared": Radices(inside="shared"),
    "flat": Radices(flat=True),
    "oneshot": Radices(inside=None, between=None),
    "binary": Radices(inside=2, between=2),
}
"""Plans that have a name; "auto" is `choose_radices`."""

FLAT_RANKS = 4
"""On one host, up to so many ranks swap states directly: one round beats up and down while it is few messages."""

FLAT_BYTES = 64 * 1024
"""...and up to such a payload: beyond it, every rank reading every state costs more than a second round."""

ONESHOT_RANKS = 8
"""Up to so many ranks of a host meet in one round; above, the smallest radix that needs no more rounds than this."""

ONESHOT_HOSTS = 16
"""Likewise for hosts, where a round costs a wire's delay and an exchange's few hundred KB do not."""


def choose_radices(hosts: Sequence[str], payload_bytes: int, *, shared: bool = False) -> Radices:
    """Give the default radices, a pure function of layout and payload.

    Parameters
    ----------
    hosts : sequence of str
        One label per rank.
    payload_bytes : int
    shared : bool
        Whether the ranks of each host share memory in which such a payload has room.

    Examples
    --------
    >>> str(choose_radices(["a", "a"], 16640)), str(choose_radices(["a", "a", "b", "b"], 16640))
    ('flat,all', 'all,all')
    """
    groups = group_ranks(hosts)
    if shared:
        return Radices("shared", _balanced_radix(len(groups), ONESHOT_HOSTS))
    if len(groups) == 1 and len(hosts) <= FLAT_RANKS and payload_bytes <= FLAT_BYTES:
        return Radices(flat=True)
    inside = _balanced_radix(max(map(len, groups)), ONESHOT_RANKS)
    return Radices(inside, _balanced_radix(len(groups), ONESHOT_HOSTS))


def _balanced_radix(count: int, largest: int) -> int | None:
    """Give the smallest radix that needs no more rounds than ``largest`` does; None where one round will do."""
    if count <= largest:
        return None
    rounds = _round_count(count, largest)
    return next(radix for radix in range(2, largest + 1) if _round_count(count, radix) == rounds)


def _round_count(count: int, radix: int) -> int:
    rounds = 0
    while radix**rounds < count:
        rounds += 1
    return rounds


def parse_radices(plan: Any) -> Radices | None:
    """Read what ``plan=`` takes: a name, "auto" (None), radices as a pair or as text like "2,all", or a Plan.

    Examples
    --------
    >>> parse_radices("2,all")
    Radices(inside=2, between=None, flat=False)
    """
    if isinstance(plan, Plan):
        return plan.radices
    if isinstance(plan, Radices):
        return plan
    if isinstance(plan, str):
        if plan == "auto":
            return None
        if plan in NAMED_RADICES:
            return NAMED_RADICES[plan]
        plan = plan.split(",")
    if isinstance(plan, Sequence) and len(plan) == 2:
        if plan[0] == "flat":
            return Radices(between=_radix(plan[1]), flat=True)
        return Radices("shared" if plan[0] == "shared" else _radix(plan[0]), _radix(plan[1]))
    return _refuse_plan(plan if not isinstance(plan, list) else ",".join(map(str, plan)))


def _radix(value: Any) -> int | None:
    if value is None or value == "all":
        return None
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 2:
        raise InputError.of("plan", expected='each radix a number of at least 2, or "all"', got=repr(value))
    return int(number)


def _refuse_plan(plan: Any) -> Radices:
    known = ", ".join(map(repr, ("auto", *NAMED_RADICES)))
    raise InputError.of("plan", expected=f"{known}, a pair of radices (inside, between) or a Plan", got=repr(plan))


def plan_allreduce(hosts: Iterable[str], radices: Radices | None = None, *, deterministic: bool = False) -> Plan:
    """Plan a merge of every rank's state that every rank gets.

    Parameters
    ----------
    hosts : iterable of str
        One label per rank, in any order.
    radices : Radices, optional
        One round per level by default.
    deterministic : bool
        Whether rank states travel unmerged.
    """
    return _allreduce(tuple(hosts), radices or Radices(), deterministic)


def plan_reduce(
    hosts: Iterable[str], root: int, radices: Radices | None = None, *, deterministic: bool = False
) -> Plan:
    """Plan a merge of every rank's state that ``root`` gets, with the bits of `plan_allreduce`.

    An acknowledgement, a header alone, comes back down, so that every rank learns whether all went well.
    """
    return _reduce(tuple(hosts), root, radices or Radices(), deterministic)


def plan_bcast(hosts: Iterable[str], root: int, radices: Radices | None = None) -> Plan:
    """Plan the way of one array from ``root`` to all: to the other hosts' leaders, then inside each host."""
    return _bcast(tuple(hosts), root, radices or Radices())


@lru_cache(maxsize=256)
def _allreduce(hosts: tuple[str, ...], radices: Radices, deterministic: bool) -> Plan:
    groups = _groups(hosts, radices)
    if radices.inside == "shared" and len(groups) == 1 and not radices.flat:
        return Plan("allreduce", None, hosts, radices, deterministic, _meeting(groups[0]))
    up, blocks = _up(groups, radices, deterministic)
    across = _exchange(groups, blocks, radices.between)
    rounds = _then_merge([*up, *across], _leader_merges(groups, blocks))
    down = _inside(radices, "broadcast", [_spread(group, _messages(radices.inside), 1) for group in groups])
    return Plan("allreduce", None, hosts, radices, deterministic, (*rounds, *down))


@lru_cache(maxsize=256)
def _reduce(hosts: tuple[str, ...], root: int, radices: Radices, deterministic: bool) -> Plan:
    groups = _rooted(_groups(hosts, radices), root)
    up, blocks = _up(groups, radices, deterministic)
    leaders = tuple(group[0] for group in groups)
    across = _together("between", "gather", [_gather(leaders, blocks, radices.between)])
    rounds = _then_merge([*up, *across], _leader_merges(groups, blocks)[:1])
    answer = _together("between", "acknowledge", [_spread(leaders, radices.between, 0)])
    answers = _inside(radices, "acknowledge", [_spread(group, _messages(radices.inside), 0) for group in groups])
    return Plan("reduce", root, hosts, radices, deterministic, (*rounds, *answer, *answers))


@lru_cache(maxsize=256)
def _bcast(hosts: tuple[str, ...], root: int, radices: Radices) -> Plan:
    groups = _rooted(_groups(hosts, radices), root)
    leaders = tuple(group[0] for group in groups)
    across = _together("between", "broadcast", [_spread(leaders, radices.between, 1)])
    down = _together("inside", "broadcast", [_spread(group, _messages(radices.inside), 1) for group in groups])
    return Plan("bcast", root, hosts, radices, False, (*across, *down))


def _groups(hosts: tuple[str, ...], radices: Radices) -> Groups:
    return tuple((rank,) for rank in range(len(hosts))) if radices.flat else group_ranks(hosts)


def _rooted(groups: Groups, root: int) -> Groups:
    """Put the root's host first and the root first in it; the other hosts follow in cyclic order."""
    (index,) = (index for index, group in enumerate(groups) if root in group)
    own = (root, *(rank for rank in groups[index] if rank != root))
    return (own, *groups[index + 1 :], *groups[:index])


@dataclass(frozen=True, slots=True)
class _Part:
    """One group's share of a round."""

    messages: tuple[Message, ...]
    merges: tuple[Merge, ...] = ()


def _together(level: Level, action: Action, parts: Iterable[list[_Part]]) -> list[Round]:
    """Let groups go through their rounds side by side; one with fewer rounds waits for the others."""
    rounds = zip_longest(*parts, fillvalue=_Part(()))
    return [
        Round(level, action, tuple(chain(*(p.messages for p in side))), tuple(chain(*(p.merges for p in side))))
        for side in rounds
    ]


def _up(groups: Groups, radices: Radices, deterministic: bool) -> tuple[list[Round], Groups]:
    """Bring each host's states to its leader; also give what the leader's records then hold.

    A host's block is a tuple of keys, one per record, whose order is the order of the final merge: ranks where
    they come unmerged, else the host's lowest rank.
    """
    if deterministic:
        parts = [_gather(group, tuple((rank,) for rank in group), _messages(radices.inside)) for group in groups]
        return _inside(radices, "gather", parts), groups
    parts = [_reduction(tuple(sorted(group)), group[0], _messages(radices.inside)) for group in groups]
    return _inside(radices, "reduce", parts), tuple((min(group),) for group in groups)


def _inside(radices: Radices, action: Action, parts: Iterable[list[_Part]]) -> list[Round]:
    """Go through rounds inside hosts, by messages or in shared memory."""
    rounds = _together("inside", action, parts)
    return [replace(each, shared=True) for each in rounds] if radices.inside == "shared" else rounds


def _messages(inside: int | Literal["shared"] | None) -> int | None:
    """In shared memory all meet in one round, as they do by messages of radix None."""
    return None if inside == "shared" else inside


def _meeting(ranks: tuple[int, ...]) -> tuple[Round, ...]:
    """Let all ranks of the only host read all states in shared memory."""
    alone = tuple((rank,) for rank in ranks)
    rounds = _then_merge(_exchange(alone, alone, None), _leader_merges(alone, alone))
    return tuple(replace(each, level="inside", shared=True) for each in rounds)


def _reduction(group: tuple[int, ...], leader: int, radix: int | None) -> list[_Part]:
    """Merge neighbours, then neighbouring runs, in rank order, until one state is left at ``leader``.

    Who is merged with whom does not depend on the leader, so neither do the bits; only the place does: a run that
    holds the leader is merged there, any other at its first rank.
    """
    count, home = len(group), group.index(leader)
    radix = radix or max(count, 2)

    def owner(start: int, length: int) -> int:
        return home if start <= home < start + length else start

    parts, stride = [], 1
    while stride < count:
        messages: list[Message] = []
        merges = []
        for start in range(0, count, stride * radix):
            runs = [owner(run, stride) for run in range(start, min(start + stride * radix, count), stride)]
            if len(runs) > 1:
                parent = owner(start, stride * radix)
                at = {run: number for number, run in enumerate((run for run in runs if run != parent), 1)}
                messages += [Message(group[run], group[parent], 1, at[run]) for run in at]
                merges.append(Merge(group[parent], tuple(at.get(run, 0) for run in runs)))
        parts.append(_Part(tuple(messages), tuple(merges)))
        stride *= radix
    return parts


def _gather(order: tuple[int, ...], blocks: Groups, radix: int | None) -> list[_Part]:
    """Bring every block, unmerged, to ``order[0]``: its records end up in the order of ``order``."""
    starts = (0, *accumulate(map(len, blocks)))
    return [
        _Part(
            tuple(
                Message(order[child], order[parent], starts[end] - starts[child], starts[child] - starts[parent])
                for parent, child, end in edges
            )
        )
        for edges in _tree(len(order), radix)
    ]


def _spread(order: tuple[int, ...], radix: int | None, slots: int) -> list[_Part]:
    """Bring one record, or a header alone, from ``order[0]`` to all."""
    return [
        _Part(tuple(Message(order[parent], order[child], slots) for parent, child, _ in edges))
        for edges in reversed(_tree(len(order), radix))
    ]


def _tree(count: int, radix: int | None) -> list[list[tuple[int, int, int]]]:
    """Give the edges (parent, child, end of the child's run) of each round of a tree of runs that double, or more."""
    radix = radix or max(count, 2)
    rounds, stride = [], 1
    while stride < count:
        rounds.append(
            [
                (start, child, min(child + stride, count))
                for start in range(0, count, stride * radix)
                for child in range(start + stride, min(start + stride * radix, count), stride)
            ]
        )
        stride *= radix
    return rounds


def _exchange(groups: Groups, blocks: Groups, radix: int | None) -> list[Round]:
    """Swap blocks between leaders until each has all, its own first and the others in cyclic order."""
    count = len(groups)
    radix = radix or max(count, 2)
    sizes = [len(block) for block in blocks]
    starts = (0, *accumulate(sizes + sizes))
    rounds, held = [], 1
    while held < count:
        messages = []
        for index, group in enumerate(groups):
            for offset in range(held, min(held * radix, count), held):
                source = (index + offset) % count
                end = source + min(held, count - offset)
                at = starts[index + offset] - starts[index]
                messages.append(Message(groups[source][0], group[0], starts[end] - starts[source], at))
        rounds.append(Round("between", "exchange", tuple(messages)))
        held = min(held * radix, count)
    return rounds


def _leader_merges(groups: Groups, blocks: Groups) -> list[Merge]:
    """Every leader merges all it holds: the same states in the same order, so the same bits."""
    cyclic = (*blocks, *blocks)
    merges = []
    for index, group in enumerate(groups):
        keys = tuple(chain(*cyclic[index : index + len(groups)]))
        merges.append(Merge(group[0], tuple(sorted(range(len(keys)), key=keys.__getitem__))))
    return merges


def _then_merge(rounds: list[Round], merges: list[Merge]) -> list[Round]:
    """Hang the last merges on the last round; a single record needs none."""
    merges = [merge for merge in merges if len(merge.sources) > 1]
    if not merges:
        return rounds
    return [*rounds[:-1], replace(rounds[-1], merges=(*rounds[-1].merges, *merges))]
