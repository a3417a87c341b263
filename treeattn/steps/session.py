"""What the ranks of one communicator have agreed on, and how they get there; `agreement` has the words.

The hot path sends what the last agreed call's plan says and nothing else. A rank that can't, because it has an error
or a call of another size, goes through the same rounds with headers alone, so that nobody waits for it in vain; the
others learn of it from the headers, and all meet in an exchange of descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn.execution.agreement import CONSULT, ERROR, OTHER, Attempt, Description, Header, Signature, conclude
from treeattn.execution.collective import CollectiveExchange
from treeattn.execution.direct import DirectOps
from treeattn.execution.direct_exchange import DirectExchange
from treeattn.execution.executor import Exchange
from treeattn.execution.window import Window, open_window, room_to_make
from treeattn.planning.plan import Plan
from treeattn.state import PartialState, merge
from treeattn.steps.channel import Channel
from treeattn.steps.relay import relay_of
from treeattn.steps.shortcut import NEVER, Shortcut
from treeattn.steps.swap import Swap
from treeattn.transports.base import Meanwhile, nothing
from treeattn.wire_form import WireForm

if TYPE_CHECKING:
    from treeattn.steps.groups import Groups

__all__ = ["Session", "make_together"]

KEPT_EXCHANGES = 8
"""Plans whose buffers are kept."""


class _Nothing:
    """What there is in place of a short way: no call repeats what it has."""

    is_allreduce, repeated = False, NEVER


class Session:
    """The calls of one communicator of several ranks.

    Parameters
    ----------
    channel : Channel
    plan_for : callable
        Gives the plan for (payload bytes, root, whether ranks of a host share memory for that).
    window : Window, optional
        Memory of this session alone.
    agreed : Signature, optional
        What all ranks agree on already, if anything.

    Attributes
    ----------
    shortcut : Shortcut or None
        The short way of the next call, if it is like the last.
    quick
        The same for `TreeComm.allreduce`, which asks before all else; where there is none, one that fits no call.
    """

    def __init__(
        self,
        channel: Channel,
        plan_for: Callable[[int, int | None, bool], Plan],
        window: Window | None = None,
        agreed: Signature | None = None,
    ) -> None:
        self._channel, self._plan_for, self.window, self.agreed = channel, plan_for, window, agreed
        self._exchanges: dict[Any, Exchange] = {}
        self._exchange: Exchange | None = None
        self._use(None)
        self._made: Shortcut | None = None
        self._made_for: tuple[Any, ...] = ()
        self._begun = False
        self.groups: Groups | None = None

    def merge(self, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """Run the agreed plan until it ends clean, agreeing anew where that is what is missing."""
        self.begin(attempt)
        merged = self.end(out)
        self._prepare_shortcut()
        return merged

    def begin(self, attempt: Attempt, *, lent: bool = False) -> None:
        """Start to run the agreed plan, with this rank's payload or with what keeps it from sending one.

        A state that is ``lent`` may be overwritten once this returns.
        """
        self._use(None)
        if self.agreed is None:
            self._describe(attempt)
            self.agreed = attempt.signature
        self._exchange = self._agreed_exchange(attempt.state)
        self._channel.call(self._start, self._exchange, attempt, lent)

    def _start(self, exchange: Exchange, attempt: Attempt, lent: bool) -> None:
        self._attempt, header = self._load(exchange, attempt, lent)
        exchange.begin(header)

    def advance(self) -> None:
        """Go on with what was begun, without waiting."""
        self._running.advance()

    @property
    def ready(self) -> bool:
        """Whether to begin needs nothing but messages, neither an agreement nor new buffers."""
        return self.agreed is not None and self.agreed.wire in self._exchanges

    @property
    def _running(self) -> Exchange:
        assert self._exchange is not None, "nothing was begun"
        return self._exchange

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for in what was begun."""
        return self._running.over

    def complete(self) -> None:
        """Wait for the end of what was begun, and leave its result."""
        self._running.complete()

    def end(self, out: PartialState | None, meanwhile: Meanwhile = nothing) -> PartialState | None:
        """End what was begun; ``meanwhile()`` is called during waits."""
        while True:
            header = self._channel.call(self._running.complete, meanwhile)
            attempt = self._attempt
            if header.status not in (0, OTHER):
                self._describe(attempt)
            # Equal digests are agreement: after a clean plan, or one to which all brought the same new signature.
            self.agreed = attempt.signature
            if header.status == 0:
                return self._result(self._running, attempt, out)
            self.begin(attempt)

    def _use(self, shortcut: Shortcut | None) -> None:
        self.shortcut = shortcut
        self.quick: Any = _Nothing if shortcut is None else shortcut

    def _prepare_shortcut(self) -> None:
        """Make ready for more calls like the one that has ended."""
        exchange, attempt = self._running, self._attempt
        signature, state = attempt.signature, attempt.state
        if (
            signature is None
            or signature.root is not None
            or state is None
            or not isinstance(state._packed, np.ndarray)
        ):
            return
        if self._made_for != (exchange, signature, state.ops):
            self._made = self._shortcut(exchange, state, signature)
            self._made_for = exchange, signature, state.ops
        self._use(self._made)

    def _shortcut(self, exchange: Exchange, state: PartialState, signature: Signature) -> Shortcut | None:
        """Give the short way through an exchange, where there is one."""
        if not exchange.on_host:
            return None
        common = exchange, self._channel, state, signature
        if Swap.possible(exchange.plan):
            return Swap(*common, self._begin_again)
        way = relay_of(exchange.plan, self._channel.rank)
        return None if way is None else way(*common, partial(self._go_on, exchange))

    def _begin_again(self, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """Go through a step from its beginning that a shortcut has counted."""
        self._begun = True
        return self.merge(attempt, out)

    def _go_on(self, exchange: Exchange, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """Go on with a step that a shortcut has begun."""
        self._exchange, self._attempt = exchange, attempt
        merged = self.end(out)
        self._prepare_shortcut()
        return merged

    def consult(self, description: Description, error: Exception | None) -> list[dict[str, Any]]:
        """Go to the descriptions at once, having told the others so by way of the agreed plan."""
        self._use(None)
        if self.agreed is not None:
            self._channel.call(self._agreed_exchange().run, self._step(CONSULT, 0, 0))
        return [each.values for each in self._negotiate(lambda: description, error)]

    def retire(self) -> None:
        """Give back what its plans travel on, while the communicator lives; collective."""
        for exchange in self._exchanges.values():
            self._channel.retire(exchange.transport)
        self.forget()

    def forget(self) -> None:
        """Let go of buffers and shared memory, when the communicator is freed."""
        self._use(None)
        self._made = self.window = self._exchange = None
        self._made_for = ()
        self._exchanges.clear()

    def _load(self, exchange: Exchange, attempt: Attempt, lent: bool) -> tuple[Attempt, Header]:
        """Take this rank's payload, if it has one that fits; give what there is to tell the others."""
        status, state = self._status(attempt), attempt.state
        if status != ERROR and state is not None:
            try:
                if status == 0:
                    exchange.load(state)
                elif lent:  # it is sent in the end, once all have agreed on that
                    attempt = replace(attempt, state=merge([state]))
            except Exception as error:  # a device may fail here, while the others can still be told
                attempt, status = Attempt(None, None, error), ERROR
        digest = 0 if attempt.signature is None else attempt.signature.digest
        return attempt, self._step(status, digest, attempt.check)

    def _status(self, attempt: Attempt) -> int:
        if attempt.error is not None or attempt.signature is None:
            return ERROR
        return 0 if self.agreed is not None and attempt.signature.wire == self.agreed.wire else OTHER

    def _step(self, status: int, digest: int, check: int) -> Header:
        """Count a step and give its header."""
        if not self._begun:  # by a swap
            self._channel.steps.value += 1
        self._begun = False
        return Header(self._channel.step, status, digest, check)

    @staticmethod
    def _result(exchange: Exchange, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        return None if attempt.state is None else exchange.result(attempt.state, out)

    def _agreed_exchange(self, state: PartialState | None = None) -> Exchange:
        """Give the exchange for what was agreed on, made for states such as this one where there is none yet."""
        wire = self._wire
        if wire not in self._exchanges:
            if len(self._exchanges) >= KEPT_EXCHANGES:
                self._channel.retire(self._exchanges.pop(next(iter(self._exchanges))).transport)
            if self._channel.cards is not None:
                self._exchanges[wire] = self._channel.cards.exchange(self, *self._common())
            else:
                make_together(self._channel, [(self, state)])
        return self._exchanges[wire]

    @property
    def _wire(self) -> Any:
        assert self.agreed is not None, "there is no plan to follow before the first agreement"
        return self.agreed.wire

    def _common(self) -> tuple[Any, ...]:
        """Give what all exchanges take, for what was agreed on: a plan, a branch and so on; collective."""
        root, shape, dtype = self._wire
        form = WireForm(shape, dtype, self._channel.wire_dtype)
        return self._plan(form.nbytes, root), self._channel.branch(), self.window, form, self._channel.tally

    def _exchange_on(self, common: tuple[Any, ...], state: PartialState | None) -> Exchange:
        """Make an exchange of what `_common` gives."""
        if self._channel.collective == "mpi":
            return CollectiveExchange(*common)
        plan, branch, window, form, tally = common
        device = state is not None and not isinstance(state._packed, np.ndarray)
        direct = self._direct(plan, state.ops) if state is not None and device else None
        if direct is not None:
            return DirectExchange(plan, branch, form, tally, direct)
        return Exchange(plan, branch, window, form, tally, pinnable=device)

    def _plan(self, nbytes: int, root: int | None) -> Plan:
        """Give the plan for states of so many bytes, once there is the room that it wants; collective."""
        plan = self._plan_for(nbytes, root, self.shares(nbytes))
        if any(each.shared for each in plan.rounds) and not self.make_room(nbytes):
            plan = self._plan_for(nbytes, root, False)
        return plan

    def shares(self, nbytes: int) -> bool:
        """Whether ranks of a host share memory for states of so many bytes, or are to, as far as is known."""
        return self.window is not None and nbytes <= self._channel.most_room

    def make_room(self, nbytes: int) -> bool:
        """Let states of so many bytes have room in shared memory, if they may; give whether they have; collective."""
        if self.window is not None and self.window.room < nbytes <= self._channel.most_room:
            channel, most = self._channel, self._channel.most_room
            larger_than = f" for states of more than {self.window.room:,} bytes"
            channel.most_room = self.window.room  # if there is no more, and where to be told so is an error
            found = open_window(channel.hosts, channel.rank, channel.share, room_to_make(nbytes, most), larger_than)
            if found is not None:
                self.window, channel.most_room = found, most
        return self.window is not None and nbytes <= self.window.room

    def _direct(self, plan: Plan, ops: Any) -> DirectOps | None:
        """Give ``ops`` if this rank's messages may be in its card's memory; the others need not know.

        Pieces are cut on the host, numbers of 16 bit made there, and windows are there.
        """
        on_host = plan.pieces > 1 or self._channel.wire_dtype or any(each.shared for each in plan.rounds)
        return ops if ops.direct in self._channel.gpu_memory.families and not on_host else None

    def _describe(self, attempt: Attempt) -> None:
        self._negotiate(lambda: Description.of_attempt(attempt), attempt.error)

    def _negotiate(self, describe: Callable[[], Description], own: Exception | None) -> list[Description]:
        """Exchange descriptions and draw the same conclusion on every rank."""
        lanes = 0 if self.groups is None else self.groups.unagreed
        try:
            data = replace(describe(), lanes=lanes).encode()
        except Exception as error:  # a description that can't be made is an error like any other
            own = own or error
            data = replace(Description.of_error(own), lanes=lanes).encode()
        descriptions = [Description.decode(each) for each in self._channel.gather(data)]
        if self.groups is not None:
            self.groups.settle(max(each.lanes for each in descriptions))
        conclude(descriptions, self._channel.hosts, self._channel.rank, own)
        return descriptions


def make_together(channel: Channel, wanted: Sequence[tuple[Session, PartialState | None]]) -> None:
    """Make the exchanges for what sessions have agreed on, for states such as these; collective.

    Where a rank can't, for which the others would wait, none has any: they are told what keeps it from that.
    """
    made, problem, common = list[Exchange](), None, [session._common() for session, _ in wanted]
    try:
        made = [session._exchange_on(each, state) for each, (session, state) in zip(common, wanted, strict=True)]
    except Exception as error:  # whatever it is, such as no memory for the buffers
        problem = error
    if any(channel.gather(b"" if problem is None else b"failed")):
        for (_, branch, *_), (session, _) in zip(common, wanted, strict=True):
            session._channel.retire(branch)
            session.agreed = None
        first, _ = wanted[0]
        first._negotiate(lambda: Description("") if problem is None else Description.of_error(problem), problem)
    for exchange, (session, _) in zip(made, wanted, strict=True):
        session._exchanges[session._wire] = exchange
