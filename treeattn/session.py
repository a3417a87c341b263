"""What the ranks of one communicator have agreed on, and how they get there; see `treeattn.agreement` for the words.

The hot path sends what the last agreed call's plan says and nothing else. A rank that can't, because it has an error
or a call of another size, goes through the same rounds with headers alone, so that nobody waits for it in vain; the
others learn of it from the headers, and all meet in an exchange of descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treeattn.agreement import CONSULT, ERROR, OTHER, Attempt, Description, Header, Signature, conclude
from treeattn.channel import Channel
from treeattn.direct import DirectOps
from treeattn.executor import Exchange
from treeattn.plan import Plan
from treeattn.state import PartialState
from treeattn.swap import Swap
from treeattn.wire_form import WireForm

__all__ = ["Session"]

KEPT_EXCHANGES = 8
"""Plans whose buffers are kept."""


class Session:
    """The calls of one communicator of several ranks.

    Parameters
    ----------
    channel : Channel
    plan_for : callable
        Gives the plan for (payload bytes, root).
    """

    def __init__(self, channel: Channel, plan_for: Callable[[int, int | None], Plan]) -> None:
        self._channel, self._plan_for = channel, plan_for
        self._agreed: Signature | None = None
        self._exchanges: dict[Any, Exchange] = {}
        self.swap: Swap | None = None
        self._begun = False

    def merge(self, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        """Run the agreed plan until it ends clean, agreeing anew where that is what is missing."""
        self.swap = None
        if self._agreed is None:
            self._describe(attempt)
            self._agreed = attempt.signature
        while True:
            exchange = self._exchange_of(self._agreed, attempt.state)
            attempt, header = self._run(exchange, attempt)
            if header.status not in (0, OTHER):
                self._describe(attempt)
            # Equal digests are agreement: after a clean plan, or one to which all brought the same new signature.
            self._agreed = attempt.signature
            if header.status == 0:
                self._prepare_swap(exchange, attempt)
                return self._result(exchange, attempt, out)

    def _prepare_swap(self, exchange: Exchange, attempt: Attempt) -> None:
        signature, state = attempt.signature, attempt.state
        if not Swap.possible(exchange, state, signature):
            return
        assert state is not None, "only a good attempt is possible"
        assert signature is not None, "only a good attempt is possible"

        def otherwise(state: PartialState, out: PartialState | None) -> PartialState | None:
            self._begun = True
            return self.merge(Attempt(signature, state, None), out)

        self.swap = Swap(exchange, self._channel, state, signature, otherwise)

    def consult(self, description: Description, error: Exception | None) -> list[dict[str, Any]]:
        """Go to the descriptions at once, having told the others so by way of the agreed plan."""
        self.swap = None
        if self._agreed is not None:
            self._pass(self._exchange_of(self._agreed), CONSULT, 0, 0)
        return [each.values for each in self._negotiate(lambda: description, error)]

    def forget(self) -> None:
        """Let go of buffers and shared memory, when the communicator is freed."""
        self.swap = None
        self._exchanges.clear()

    def _run(self, exchange: Exchange, attempt: Attempt) -> tuple[Attempt, Header]:
        """Take part in the agreed plan, with this rank's payload or with what keeps it from sending one."""
        status, state = self._status(attempt), attempt.state
        if status == 0 and state is not None:
            try:
                exchange.load(state)
            except Exception as error:  # a device may fail here, while the others can still be told
                attempt, status = Attempt(None, None, error), ERROR
        digest = 0 if attempt.signature is None else attempt.signature.digest
        return attempt, self._pass(exchange, status, digest, attempt.check)

    def _status(self, attempt: Attempt) -> int:
        if attempt.error is not None or attempt.signature is None:
            return ERROR
        return 0 if self._agreed is not None and attempt.signature.wire == self._agreed.wire else OTHER

    def _pass(self, exchange: Exchange, status: int, digest: int, check: int) -> Header:
        if not self._begun:  # by a swap
            self._channel.step += 1
        self._begun = False
        return self._channel.call(exchange.run, Header(self._channel.step, status, digest, check))

    @staticmethod
    def _result(exchange: Exchange, attempt: Attempt, out: PartialState | None) -> PartialState | None:
        return None if attempt.state is None else exchange.result(attempt.state, out)

    def _exchange_of(self, agreed: Signature | None, state: PartialState | None = None) -> Exchange:
        assert agreed is not None, "there is no plan to follow before the first agreement"
        found = self._exchanges.get(agreed.wire)
        if found is None:
            if len(self._exchanges) >= KEPT_EXCHANGES:
                self._channel.retire(self._exchanges.pop(next(iter(self._exchanges))).transport)
            root, shape, dtype = agreed.wire
            form = WireForm(shape, dtype)
            plan = self._plan_for(form.nbytes, root)
            channel = self._channel
            direct = None if state is None else self._direct(plan, state.ops)
            found = Exchange(plan, channel.branch(), channel.window, form, channel.tally, direct)
            self._exchanges[agreed.wire] = found
        return found

    def _direct(self, plan: Plan, ops: Any) -> DirectOps | None:
        """Give ``ops`` if this rank's messages may be in its card's memory; the others need not know."""
        in_windows = any(each.shared for each in plan.rounds)
        return ops if ops.direct in self._channel.gpu_memory.families and not in_windows else None

    def _describe(self, attempt: Attempt) -> None:
        self._negotiate(lambda: Description.of_attempt(attempt), attempt.error)

    def _negotiate(self, describe: Callable[[], Description], own: Exception | None) -> list[Description]:
        """Exchange descriptions and draw the same conclusion on every rank."""
        try:
            data = describe().encode()
        except Exception as error:  # a description that can't be made is an error like any other
            own = own or error
            data = Description.of_error(own).encode()
        descriptions = [Description.decode(each) for each in self._channel.gather(data)]
        conclude(descriptions, self._channel.hosts, self._channel.rank, own)
        return descriptions
