"""A plan: the rounds of messages and merges that one collective follows, as plain data.

Nothing here sends anything. `treeattn.planning.planner` builds plans from a host map and radices; an executor asks for
``plan.steps(rank)`` and needs to know nothing about topology; ``plan.predict(payload_bytes)`` says what it will cost.

A rank keeps *records*: a record is a header and room for one packed state. Record 0 starts as the rank's own
state. A message carries the first ``slots`` records of its source, whole, and lands from record ``at`` on at its
destination; one that carries no record is a header alone. Where a plan cuts the head rows into pieces, a rank has
records for each piece, and a message or a merge belongs to one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, Literal, TypeAlias

from treeattn.arguments.checks import check_rank, check_size
from treeattn.errors import InputError
from treeattn.planning.messages import MOST_PARTS, count_messages
from treeattn.planning.radices import Radices, read_radices

__all__ = [
    "HEADER_BYTES",
    "Merge",
    "Message",
    "Plan",
    "Prediction",
    "Radices",
    "RankRound",
    "Round",
    "Stats",
    "Usage",
    "spans",
]

HEADER_BYTES = 32
"""Bytes of the header that stands before each record, and that travels alone where there is nothing else to say."""

Level: TypeAlias = Literal["inside", "rack", "between"]
Action: TypeAlias = Literal["reduce", "gather", "exchange", "broadcast", "acknowledge"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a round: the first ``slots`` records of ``source``, to records ``at`` and on of ``dest``."""

    source: int
    dest: int
    slots: int
    at: int = 0
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """After the messages of a round, ``rank`` merges ``sources``, in this order, into its record 0."""

    rank: int
    sources: tuple[int, ...]
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that travel in parallel, and the merges that follow them.

    In a ``shared`` round they stand for what ranks of a host read in memory where the others publish, and none is sent.
    """

    level: Level
    action: Action
    messages: tuple[Message, ...]
    merges: tuple[Merge, ...] = ()
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RankRound:
    """What one rank does for one piece in one round: post receives, send, wait for all, merge.

    ``sends`` holds (dest, slots), ``receives`` (source, slots, at), ``merges`` the sources of each merge.
    """

    number: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int, int], ...]
    merges: tuple[tuple[int, ...], ...]
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Rounds, messages and bytes, in all and between hosts.

    Messages and bytes are counted where they are sent, and add up over ranks. Rounds are the plan's, the same on
    every rank. A call of an MPI collective (an agreement) counts as one in ``collectives``; the messages that MPI
    makes of it are not claimed.
    """

    rounds: int = 0
    messages: int = 0
    bytes: int = 0
    rounds_between: int = 0
    messages_between: int = 0
    bytes_between: int = 0
    collectives: int = 0

    def __add__(self, other: Stats) -> Stats:
        return Stats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Stats) -> Stats:
        return Stats(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @classmethod
    def total(cls, per_rank: Iterable[Stats]) -> Stats:
        """Add up messages and bytes over ranks; rounds and collectives are shared by all and are not added."""
        ranks = list(per_rank)
        shared = {"rounds", "rounds_between", "collectives"}
        values = {f.name: [getattr(rank, f.name) for rank in ranks] for f in fields(cls)}
        return cls(**{name: max(each) if name in shared else sum(each) for name, each in values.items()})


@dataclass(frozen=True, slots=True)
class Usage:
    """What one operation took on this rank besides messages.

    Parameters
    ----------
    peak_bytes : int
        Most bytes of message buffers that it held at once, beside its arguments and its result.
    products : int
        Query-key products, per batch row and head, that it gave to a kernel; a tree's merges make none.
    """

    peak_bytes: int = 0
    products: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one call of a plan costs: each rank's share, and all of them together."""

    per_rank: tuple[Stats, ...]
    total: Stats


@dataclass(frozen=True)
class Plan:
    """The tree that one collective follows.

    Parameters
    ----------
    operation : "allreduce", "reduce" or "bcast"
    root : int or None
        Who gets, or gives, the result; None where all do.
    hosts : tuple of str
        One label per rank.
    radices : Radices
    deterministic : bool
        Rank states travel unmerged, so that the bits of the result do not depend on ``hosts``.
    rounds : tuple of Round
    pieces : int
        In how many pieces the head rows are cut.

    Examples
    --------
    >>> from treeattn.planning.planner import plan_allreduce
    >>> plan = plan_allreduce(["a", "a", "b"])
    >>> len(plan.rounds), plan.predict(16640).total.messages_between
    (3, 2)
    >>> print(plan)
    allreduce over 3 ranks on 2 hosts, radices all,all: 3 rounds, 4 messages
    """

    operation: str
    root: int | None
    hosts: tuple[str, ...]
    radices: Radices
    deterministic: bool
    rounds: tuple[Round, ...] = field(repr=False)
    pieces: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @cached_property
    def rounds_between(self) -> int:
        """Rounds in which some message goes from one host to another."""
        return sum(any(self.crosses(message) for message in each.messages) for each in self.rounds)

    def __str__(self) -> str:
        ranks, hosts = _count(self.size, "rank"), _count(len(set(self.hosts)), "host")
        kind = f"{self.operation} over {ranks} on {hosts}, radices {self.radices}"
        messages = sum(len(each.messages) for each in self.rounds if not each.shared)
        cost = f"{_count(len(self.rounds), 'round')}, {_count(messages, 'message')}"
        return f"{kind}{', deterministic' * self.deterministic}: {cost}"

    def steps(self, rank: int) -> tuple[RankRound, ...]:
        """Give what ``rank`` does, by round and piece; those in which it has nothing to do are left out."""
        rank = check_rank("rank", rank, self.size)
        found = (
            self._rank_round(number, each, rank, piece)
            for number, each in enumerate(self.rounds)
            for piece in range(self.pieces)
        )
        return tuple(step for step in found if step.sends or step.receives or step.merges)

    @staticmethod
    def _rank_round(number: int, each: Round, rank: int, piece: int) -> RankRound:
        messages = [message for message in each.messages if message.piece == piece]
        merges = [merge for merge in each.merges if merge.piece == piece]
        return RankRound(
            number,
            tuple((message.dest, message.slots) for message in messages if message.source == rank),
            tuple((message.source, message.slots, message.at) for message in messages if message.dest == rank),
            tuple(merge.sources for merge in merges if merge.rank == rank),
            piece,
        )

    def records(self, rank: int, piece: int = 0) -> int:
        """Give the number of records of a piece that ``rank`` needs room for."""
        steps = (step for step in self.steps(rank) if step.piece == piece)
        ends = (at + max(slots, 1) for step in steps for _, slots, at in step.receives)
        return max((1, *ends))

    def piece_bytes(self, payload_bytes: int, rows: int | None = None) -> tuple[int, ...]:
        """Give the bytes of each piece of a state of so many head ``rows``; of equal pieces, without rows."""
        row, rows = (1, payload_bytes) if not rows else (payload_bytes // rows, rows)
        return tuple(row * len(span) for span in spans(rows, self.pieces))

    def message_bytes(self, slots: int, payload_bytes: int) -> int:
        """Give the bytes of a message of ``slots`` records, each of a header and ``payload_bytes``."""
        if self.operation == "bcast":  # agreed on beforehand: the array travels as it is, without a header
            return slots * payload_bytes
        return slots * (HEADER_BYTES + payload_bytes) if slots else HEADER_BYTES

    def predict(self, payload_bytes: int, rows: int | None = None) -> Prediction:
        """Say what one call costs when every state has ``payload_bytes`` bytes.

        Parameters
        ----------
        payload_bytes : int
        rows : int, optional
            Head rows of a state, at whose borders it is cut, where a plan has several leaders per host.

        Notes
        -----
        With n ranks on H hosts, S = 32 + ``payload_bytes``, an allreduce of radices (k, r) takes

        - inside the hosts 2 ceil(log_k(largest host)) rounds, 2 (n - H) messages, 2 (n - H) S bytes;
        - between hosts ceil(log_r H) rounds; a round that starts with each leader holding h host states has
          min(r - 1, ceil(H / h) - 1) messages per leader; H (H - 1) S bytes in all, whatever r is.

        Inside hosts in shared memory, there are one round up and one down, and no messages; on one host one round.
        ``flat`` is the case of n hosts with one rank each. A deterministic plan sends all its ranks' states where
        a host would send one: n (H - 1) S bytes between hosts. A reduce takes n - 1 messages up and n - 1 of 32
        bytes down, H - 1 of each between hosts; in one round per level, (n - 1) (S + 32) bytes. A bcast takes
        n - 1 messages of ``payload_bytes``, H - 1 of them between hosts.

        What is longer than 60 KiB goes between hosts, and counts, as up to 16 messages of 60 KiB, and whole where that
        is not enough (`treeattn.planning.messages`). What is longer than 1 GiB goes as so many messages as that takes;
        an array goes down a bcast's rounds once for each.

        The scheme "reduce" takes 2 (H - 1) messages of S bytes between hosts, in 2 ceil(log_r H) rounds. A level of
        racks is like one of hosts, with R racks for H hosts between them. With L pieces, everything is sent L times,
        of states of ``payload_bytes`` / L: the same bytes but for headers, from L ranks of a host.

        The paper's scheme, for comparison, is three all-reduces of together 2 (p - 1) / p (b d + 2 b n_h) elements
        per device (arXiv 2408.04093, section 5), with messages that are the library's affair.
        """
        payload_bytes = check_size("payload_bytes", payload_bytes, 0)
        rows = None if rows is None else check_size("rows", rows, 0)
        sent, pieces = [[0, 0, 0, 0] for _ in self.hosts], self.piece_bytes(payload_bytes, rows)
        for message in (message for each in self.rounds if not each.shared for message in each.messages):
            size, between = self.message_bytes(message.slots, pieces[message.piece]), self.crosses(message)
            tally, parts = sent[message.source], max(1, count_messages(size, between=between))
            for index, more in enumerate((parts, size, between * parts, between * size)):
                tally[index] += more
        times = max(1, count_messages(payload_bytes, between=False)) if self.operation == "bcast" else 1
        rounds, across = times * len(self.rounds), times * self.rounds_between
        per_rank = tuple(Stats(rounds, a, b, across, c, d) for a, b, c, d in sent)
        return Prediction(per_rank, Stats.total(per_rank))

    @property
    def tags(self) -> int:
        """How many tags keep its messages apart, and their parts, where none is longer than a GiB."""
        return len(self.rounds) * self.pieces * MOST_PARTS

    def crosses(self, message: Message) -> bool:
        """Whether a message goes from one host to another."""
        return self.hosts[message.source] != self.hosts[message.dest]

    def to_json(self) -> str:
        """Write it as JSON, which `from_json` reads."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({**found, "radices": str(self.radices), "rounds": [asdict(each) for each in self.rounds]})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises
        ------
        InputError
            It is something else.

        Examples
        --------
        >>> from treeattn.planning.planner import plan_allreduce
        >>> plan = plan_allreduce(["a", "a", "b"])
        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        from treeattn.planning.saved import check_plan, loaded  # only what was written elsewhere needs them

        expected = "JSON as Plan.to_json writes it"
        found = loaded("plan", text, expected)
        try:
            rounds = tuple(map(_round, found.pop("rounds")))
            hosts, radices = found.pop("hosts"), read_radices(found.pop("radices"))
            if radices is None or not isinstance(hosts, list) or not hosts:
                raise ValueError("no radices, or no list of hosts")
            return check_plan(cls(hosts=tuple(map(str, hosts)), radices=radices, rounds=rounds, **found))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError.of("plan", expected=expected, got=repr(error)) from None

    def draw(self) -> str:
        """Draw the tree as text: hosts and their ranks, then the rounds."""
        from treeattn.planning.drawing import draw  # only the command line draws

        return draw(self)


def _round(found: dict[str, Any]) -> Round:
    messages = tuple(Message(**each) for each in found.pop("messages"))
    merges = tuple(Merge(**{**each, "sources": tuple(each["sources"])}) for each in found.pop("merges"))
    return Round(messages=messages, merges=merges, **found)


def spans(count: int, pieces: int) -> tuple[range, ...]:
    """Cut ``count`` into ``pieces`` whose sizes differ by one at most, larger ones first.

    Examples
    --------
    >>> spans(5, 3)
    (range(0, 2), range(2, 4), range(4, 5))
    """
    size, larger = divmod(count, pieces)
    edges = [piece * size + min(piece, larger) for piece in range(pieces + 1)]
    return tuple(starmap(range, pairwise(edges)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
