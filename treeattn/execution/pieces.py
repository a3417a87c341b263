"""The records of a state that travels in pieces: each piece is some of the head rows, with records of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from treeattn.execution.records import Records
from treeattn.planning.plan import spans
from treeattn.state import PartialState
from treeattn.wire_form import Bytes, WireForm

__all__ = ["Pieces", "records_of"]


def records_of(counts: Sequence[int], form: WireForm, pinnable: bool = False) -> list[Records]:
    """Make so many records of each piece; one has no rows where a state has fewer than there are pieces."""
    if len(counts) == 1:
        return [Records(counts[0], form, pinnable)]
    rows = spans(form.rows, len(counts))
    forms = [replace(form, shape=(1, 1, len(span), form.width)) for span in rows]
    return [Records(count, each) for count, each in zip(counts, forms, strict=True)]


class Pieces:
    """A rank's records of all pieces of a state.

    Parameters
    ----------
    parts : list of Records
        By piece.
    form : WireForm
        Of the whole state.
    pinnable : bool
        Whether it comes from a card.

    Attributes
    ----------
    whole : Records
        Where the state is packed and unpacked: the only part, or a record apart.
    """

    def __init__(self, parts: list[Records], form: WireForm, pinnable: bool = False) -> None:
        self.parts, self.whole = parts, parts[0]
        self._places: list[Bytes] = []
        if len(parts) > 1:
            self.whole = Records(1, form, pinnable)
            ends = list(accumulate(part.payload_bytes for part in parts))
            self._places = [self.whole.payloads[0][start:end] for start, end in pairwise([0, *ends])]

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        apart = self.whole.buffer.nbytes if self._places else 0
        return apart + sum(part.buffer.nbytes for part in self.parts)

    def write_header(self, header: bytes) -> None:
        """Write the header that all pieces are sent with."""
        for part in self.parts:
            part.headers[0][:] = header

    def load(self, state: PartialState) -> None:
        """Pack a state, and deal its rows out."""
        self.whole.load(state)
        for part, place in zip(self.parts, self._places, strict=False):
            np.copyto(part.payloads[0], place)

    def store(self, out: PartialState) -> None:
        """Put the rows together, and unpack them to ``out``."""
        for part, place in zip(self.parts, self._places, strict=False):
            np.copyto(place, part.payloads[0])
        self.whole.store(out)
