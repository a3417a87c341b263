"""One rank's part in one round of messages, with its requests and merges prepared.

Rounds have the same methods, here and in `treeattn.execution.window_round`, which `treeattn.execution.executor` calls
in turn: ``post`` sends and asks for what is to come, ``arrived`` says whether all of it is here, ``wait`` waits until
it is, ``headers`` gives the headers that came, and ``merge`` merges what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treeattn.execution.records import Records, Share, places_of
from treeattn.execution.tally import Tally
from treeattn.planning.messages import cut
from treeattn.planning.plan import HEADER_BYTES, RankRound
from treeattn.transports.base import Bytes, Meanwhile, Silence, Usual

__all__ = ["MessageRound"]


class MessageRound:
    """A round of messages between this rank and others.

    Parameters
    ----------
    share : Share
    tally : Tally
    busy : set of (piece, record)
        Records that receives can't be started for a step ahead, since they are in use until this round begins.

    Attributes
    ----------
    ahead : list
        Receives to start a step ahead.
    """

    def __init__(self, share: Share, tally: Tally, busy: set[tuple[int, int]]) -> None:
        self._transport, self._tally, self._number = share.transport, tally, share.number
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._late: list[Any] = []
        self.ahead: list[Any] = []
        self._sizes: list[tuple[int, int]] = []
        self._alone: list[tuple[int, Bytes, int]] = []
        self._headers: list[memoryview] = []
        self._mergers: list[Callable[[], None]] = []
        for step in share.steps:
            records = share.parts[step.piece]
            self._prepare_sends(step, records, share)
            self._prepare_receives(step, records, share, busy)
            self._mergers += [records.merger([records.payloads[at] for at in sources]) for sources in step.merges]
        self._both, self._total = [*self._receives, *self._sends], tally.total(self._sizes)
        self._awaited: list[Any] = []
        self._usual = Usual()

    def _prepare_sends(self, step: RankRound, records: Records, share: Share) -> None:
        for dest, slots in step.sends:
            for part, data in enumerate(cut(records.cut(0, slots), between=self._tally.crosses(dest))):
                tag = share.tag(step.piece, part)
                self._sends.append(self._transport.send_init(data, dest, tag))
                self._sizes.append((dest, data.size))
                alone = data[: 0 if part else HEADER_BYTES]  # what a rank with no payload sends of it
                self._alone.append((dest, alone, tag))

    def _prepare_receives(self, step: RankRound, records: Records, share: Share, busy: set[tuple[int, int]]) -> None:
        for source, slots, at in step.receives:
            parts = enumerate(cut(records.cut(at, slots), between=self._tally.crosses(source)))
            requests = [self._transport.recv_init(data, source, share.tag(step.piece, part)) for part, data in parts]
            late = not busy.isdisjoint((step.piece, place) for place in places_of((source, slots, at)))
            (self._late if late else self.ahead).extend(requests)
            self._receives += requests
            self._headers.append(records.headers[at])

    def post(self, full: bool) -> None:
        """Send, and ask for what is to come; without a payload, ``full`` false, headers alone are sent."""
        if self._late:
            self._transport.start(self._late)
        if full:
            if self._sends:
                self._transport.start(self._sends)
            self._awaited = self._both
            self._tally.sent_all(self._total)
        else:
            self._awaited = [*self._receives, *(self._send_header(*each) for each in self._alone)]

    def arrived(self) -> bool:
        """Whether all is here; `wait` then only hands it over."""
        return self._transport.progress(self._awaited)

    def wait(self, meanwhile: Meanwhile) -> None:
        """Wait until all is here."""
        try:
            self._transport.wait(self._awaited, meanwhile, self._usual)
        except Silence as silence:
            silence.round = self._number
            raise

    def headers(self) -> Sequence[memoryview]:
        """Give the headers that came."""
        return self._headers

    def _send_header(self, dest: int, header: Bytes, tag: int) -> Any:
        self._tally.sent(dest, header.size)
        return self._transport.isend(header, dest, tag)

    def merge(self) -> None:
        """Merge what came."""
        for merge in self._mergers:
            merge()
