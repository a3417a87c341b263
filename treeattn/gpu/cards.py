"""Ranks that have a card each, joined by NCCL or RCCL: states go from card to card without touching the host.

It is the plan "nccl". Every rank gets every state in one all-gather and merges them in rank order, on the stream that
is current. Headers go by messages, as ever, before that: a rank with an error is heard of first, so that no card waits
for it. NCCL is believed only after a trial: cards whose drivers claim to read each other's memory have returned other
bytes than were there, so each rank reads a pattern of every other's before the first state.

Nothing here has run on a card yet.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np

from treeattn.errors import BackendError
from treeattn.execution.agreement import Header
from treeattn.execution.executor import Exchange
from treeattn.state import PartialState
from treeattn.transports.base import Bytes, Meanwhile, nothing

__all__ = ["Card", "CardExchange", "Cards", "Group", "open_cards", "reasons_of", "refuse_wrong_bytes", "this_card"]

PATTERN_BYTES = 2**16
"""Bytes that each rank reads of each other's card before it believes them."""

NAP = 20e-6
"""Seconds between looks at an event: a state's way takes some tens of microseconds."""

Consult = Callable[..., list[dict[str, Any]]]
Wait = Callable[[Callable[[], bool], Callable[[], None]], None]


class Group(Protocol):
    """Cards of several ranks, joined."""

    def gather(self, mine: Any, everyones: Any) -> None:
        """Start to collect every rank's bytes, by rank, on the current stream."""

    def check(self) -> None:
        """Raise what has gone wrong since, if anything has."""

    def free(self) -> None:
        """Give it back; collective."""

    def abort(self) -> None:
        """Give it back where others may be lost."""


class Card(Protocol):
    """What a rank's backend can do towards joining: part of a GPU backend's ``ops``."""

    def join_reasons(self) -> list[str]:
        """Say why this card can't be joined with others."""

    def bus_id(self) -> str:
        """Name the card, among those of its host."""

    def new_group(self) -> bytes:
        """Make the name of a group, which one rank does for all."""

    def join(self, group: bytes, size: int, rank: int) -> Group:
        """Join; collective."""

    def memory(self, size: int) -> Any:
        """Allocate bytes on the card."""

    def mark(self) -> Callable[[], bool]:
        """Give a function that tells whether what was started on the current stream so far is done."""

    def to_host(self, packed: Any, out: Bytes) -> None:
        """Copy to the host."""

    def from_host(self, data: Bytes, packed: Any) -> None:
        """Copy from the host."""


class Cards:
    """The cards of a communicator's ranks, one each.

    Parameters
    ----------
    card : Card
        This rank's.
    group : Group
    size : int
    wait : callable
        Of the transport: waits until a function says so, or raises at the deadline.
    """

    def __init__(self, card: Any, group: Group, size: int, wait: Wait) -> None:
        self.card, self.group, self._size, self._wait_for = card, group, size, wait

    def exchange(self, session: Any, *common: Any) -> CardExchange:
        """Make the exchange of a session; all go through the same group."""
        return CardExchange(self, *common)

    def free(self) -> None:
        """Give the group back; collective."""
        self.group.free()

    def abort(self) -> None:
        """Give the group back where others may be lost."""
        self.group.abort()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Ask until ``ready()``, never by a call that blocks: a card that another rank has left stays busy for ever."""
        self._wait_for(ready, partial(time.sleep, NAP))

    def gather(self, mine: Any, everyones: Any) -> None:
        """Collect every rank's bytes; returns when they are there, or raises."""
        self.group.gather(mine, everyones)
        done = self.card.mark()

        def arrived() -> bool:
            self.group.check()
            return bool(done())

        self.wait(arrived)

    def room(self, size: int) -> list[Any]:
        """Allocate ``size`` bytes of the card for each rank, side by side, after one piece for all of them."""
        whole = self.card.memory(size * self._size)
        return [whole, *(whole[start : start + size] for start in range(0, size * self._size, size))]

    def wrong_ranks(self, rank: int) -> list[int]:
        """Read a pattern of every rank's card, and name the ranks whose came otherwise."""
        patterns = [_pattern(each) for each in range(self._size)]
        whole, *pieces = self.room(PATTERN_BYTES)
        mine, found = self.card.memory(PATTERN_BYTES), np.empty(PATTERN_BYTES, np.uint8)
        self.card.from_host(patterns[rank], mine)
        self.gather(mine, whole)
        wrong = []
        for other, piece in enumerate(pieces):
            self.card.to_host(piece, found)
            if not np.array_equal(found, patterns[other]):
                wrong.append(other)
        return wrong


def _pattern(rank: int) -> Bytes:
    return np.random.default_rng(rank).integers(0, 256, PATTERN_BYTES, np.uint8)


class CardExchange(Exchange):
    """One plan for headers, and an all-gather for states."""

    with_payloads = False

    def __init__(self, cards: Cards, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cards, self._done = cards, _nothing_to_wait_for
        self._whole, *self._states = cards.room(self.form.nbytes)
        self._state: PartialState | None = None

    def load(self, state: PartialState) -> None:
        """Take this rank's state, which has to be on its card."""
        if isinstance(state._packed, np.ndarray):
            raise BackendError(f"plan 'nccl' merges states on cards, and this one of {state.ops.name!r} is on the host")
        self._state = state

    def complete(self, meanwhile: Meanwhile = nothing) -> Header:
        """Follow the plan with headers alone, and, where all is well, collect the states; ranks end in one order."""
        header = super().complete(meanwhile)
        if header.status == 0 and self._state is not None:
            self._cards.wait(self._done)  # the last merge may have been on another stream
            self._cards.gather(self._state._packed, self._whole)
        self._state = None
        return header

    def _store(self, out: PartialState) -> None:
        """Merge what was collected, in rank order."""
        out.ops.merge(out._packed, self._states)
        self._done = self._cards.card.mark()


def _nothing_to_wait_for() -> bool:
    return True


def open_cards(
    rank: int,
    hosts: Sequence[str],
    consult: Consult,
    wait: Wait,
    watched: Callable[[str], AbstractContextManager[None]],
) -> Cards:
    """Join the cards of all ranks; collective.

    Raises
    ------
    BackendError
        On every rank: a rank has no card or no NCCL, ranks share a card, or bytes came otherwise than they were.
    """
    card, reasons = this_card()
    reasons = reasons or card.join_reasons()
    told = consult("TreeComm", (), {"bus": card.bus_id() if card else "", "reasons": reasons})
    if problems := [*reasons_of(told, hosts), *_shared_cards(told, hosts)]:
        raise BackendError(f"plan 'nccl' can't be used: {'; '.join(problems)}")
    (name, *_) = (
        each["group"] for each in consult("TreeComm", (), {"group": card.new_group().hex() if not rank else ""})
    )
    cards, wrong, error = None, list[int](), None
    try:
        with watched("joining the cards"):
            group = card.join(bytes.fromhex(name), len(hosts), rank)
        cards = Cards(card, group, len(hosts), wait)
        wrong = cards.wrong_ranks(rank)
    except Exception as failed:  # whatever it is, the others must hear of it before it is raised here
        error = failed
    found = [each["wrong"] for each in consult("TreeComm", (), {"wrong": wrong}, error)]
    assert cards is not None, "an error was raised on every rank"
    if any(found):
        cards.abort()
    remedy = "set NCCL_P2P_DISABLE=1, which keeps cards from reading each other's memory, or use another plan"
    refuse_wrong_bytes("nccl", found, remedy)
    return cards


def this_card() -> tuple[Any, list[str]]:
    """Give this rank's card, or None and the reasons why there is none."""
    from treeattn.backends import registry  # here: the backends know nothing of communicators

    reasons = {name: registry.load(name).reasons() for name in ("nvidia", "amd")}
    for name, found in reasons.items():
        if not found:
            return registry.load(name).ops, []
    return None, [f"{name}: {', '.join(found)}" for name, found in reasons.items()]


def reasons_of(told: list[dict[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Put together why ranks can't be joined, each rank's with its number and host."""
    return [
        f"rank {rank} on host {hosts[rank]}: {'; '.join(each['reasons'])}"
        for rank, each in enumerate(told)
        if each["reasons"]
    ]


def _shared_cards(told: list[dict[str, Any]], hosts: Sequence[str]) -> list[str]:
    places = Counter((host, each["bus"]) for host, each in zip(hosts, told, strict=True) if each["bus"])
    return [
        f"{count} ranks of host {host} share the card {bus}, and NCCL wants one for each rank"
        for (host, bus), count in places.items()
        if count > 1
    ]


def refuse_wrong_bytes(plan: str, wrong: list[list[int]], remedy: str) -> None:
    """Raise if any rank's card read other bytes than another's held: ``wrong`` has those others, by rank."""
    if pairs := [f"{source} to {rank}" for rank, sources in enumerate(wrong) for source in sources]:
        others = f"other bytes came than were sent, from rank {', '.join(pairs)}"
        raise BackendError(f"plan {plan!r} can't be used: {others}: {remedy}")
