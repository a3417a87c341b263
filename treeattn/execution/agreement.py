"""How ranks agree on a call without a message of its own: signatures, headers, and what to do when they differ.

Every message of a plan begins with a header: the step's number, a status, the digest of the call's signature and a
check word. Headers are combined as they travel (statuses are united; digests or check words that differ set a
status), so after a plan every rank has the same header and draws the same conclusion. Only when it is not clean do
ranks exchange descriptions of their calls, all with all, and conclude from those, again all the same: `conclude`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from treeattn import errors
from treeattn.errors import TOLD_ELSEWHERE, CommError, InputError, TreeattnError
from treeattn.planning.plan import HEADER_BYTES
from treeattn.state import PartialState

__all__ = [
    "CONSULT",
    "DIFFER",
    "ERROR",
    "OTHER",
    "Attempt",
    "Description",
    "Header",
    "Signature",
    "conclude",
    "ranks_in_words",
]

Fields: TypeAlias = "tuple[tuple[str, Any], ...]"

ERROR = 1
"""Status: a rank has an error to report."""
OTHER = 2
"""Status: a rank's payload does not fit the agreed plan, so it sends headers alone."""
DIFFER = 4
"""Status: digests or check words are not the same everywhere."""
CONSULT = 8
"""Status: a rank asks for descriptions, whatever the others want."""

_LAYOUT = struct.Struct("<QIxxxxQQ")
assert _LAYOUT.size == HEADER_BYTES

LONGEST_TEXT = 4000
"""Characters of an error's text that travel."""


@dataclass(frozen=True)
class Signature:
    """What must be the same on every rank for one call to make sense.

    Parameters
    ----------
    operation : str
    root : int or None
    fields : tuple of (name, value)
        Names as errors call them; values that JSON can carry.
    payload_shape : tuple of int
        Shape of the packed state, (B, Hq, Tq, Dv + 2).
    payload_dtype : str
    """

    operation: str
    root: int | None
    fields: Fields
    payload_shape: tuple[int, int, int, int]
    payload_dtype: str

    @cached_property
    def digest(self) -> int:
        """64 bits that are the same in every process."""
        data = json.dumps(
            [self.operation, self.root, self.fields, self.payload_shape, self.payload_dtype], default=_plain
        )
        return int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "little")

    @cached_property
    def wire(self) -> tuple[int | None, tuple[int, int, int, int], str]:
        """What decides the plan and the size of its messages; calls that share it can share a plan's buffers."""
        return self.root, self.payload_shape, self.payload_dtype


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rank's part in a collective call, good or bad: a bad one must be heard of before it is raised.

    Parameters
    ----------
    signature : Signature or None
    state : PartialState or None
        This rank's share; None with an error.
    error : Exception or None
        What went wrong here.
    check : int
        64 bits that must be the same on every rank, beside the signature.
    details : callable, optional
        What ``check`` was made of, by name; asked only when check words differ.
    """

    signature: Signature | None
    state: PartialState | None
    error: Exception | None
    check: int = 0
    details: Callable[[], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """The 32 bytes before every record; see the module."""

    step: int
    status: int
    digest: int
    check: int

    def pack(self) -> bytes:
        """Give the bytes that travel."""
        return _LAYOUT.pack(self.step, self.status, self.digest, self.check)

    @classmethod
    def unpack(cls, data: Any) -> Header:
        """Read the bytes that came."""
        return cls(*_LAYOUT.unpack(data))

    def combine(self, other: Header) -> Header:
        """Unite what two ranks know. Associative, commutative and idempotent, so any plan gives all ranks the same.

        Raises
        ------
        CommError
            The other is at another step: this communicator's ranks have not made the same calls.
        """
        if other.step != self.step:
            raise CommError(f"ranks are out of step: one is at step {other.step}, another at step {self.step}")
        differ = DIFFER if (self.digest, self.check) != (other.digest, other.check) else 0
        digest, check = min((self.digest, self.check), (other.digest, other.check))
        return Header(self.step, self.status | other.status | differ, digest, check)


@dataclass(frozen=True, slots=True)
class Description:
    """All that a rank tells the others about its call, when they exchange descriptions."""

    operation: str
    root: int | None = None
    fields: list[list[Any]] = field(default_factory=list)
    shape: list[int] | None = None
    dtype: str | None = None
    digest: int = 0
    check: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    error_kind: str | None = None
    error_text: str | None = None
    lanes: int = 0
    """Lanes that the rank has entered in this call; see `treeattn.steps.groups`."""

    def encode(self) -> bytes:
        """Give the bytes that travel; NumPy's numbers travel as Python's."""
        return json.dumps(asdict(self), default=_plain).encode()

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """Read the bytes that came."""
        return cls(**json.loads(data))

    @classmethod
    def of_attempt(cls, attempt: Attempt) -> Description:
        """Describe a call that merges states."""
        if attempt.error is not None or attempt.signature is None:
            return cls.of_error(attempt.error or CommError("a rank came without a signature and without an error"))
        signature = attempt.signature
        return cls(
            signature.operation,
            signature.root,
            [[name, value] for name, value in signature.fields],
            list(signature.payload_shape),
            signature.payload_dtype,
            signature.digest,
            attempt.check,
            {} if attempt.details is None else attempt.details(),
        )

    @classmethod
    def of_error(cls, error: Exception, operation: str = "") -> Description:
        """Describe a call that failed on this rank."""
        ours = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        kind = next(ours, type(error).__name__)
        return cls(operation, error_kind=kind, error_text=_text(error)[:LONGEST_TEXT])


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as worse:  # a rank that can't even say what is wrong must not keep the others waiting
        return f"its text could not be made ({type(worse).__name__})"


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def conclude(descriptions: Sequence[Description], hosts: Sequence[str], rank: int, own: Exception | None) -> None:
    """Find out from every rank's description whether they fit together; the same answer on every rank.

    Parameters
    ----------
    descriptions : sequence of Description
        By rank.
    hosts : sequence of str
        By rank, for messages.
    rank : int
        This rank.
    own : Exception or None
        This rank's own error, which is raised as it is.

    Raises
    ------
    Exception
        ``own``, where there is one.
    TreeattnError
        Another rank's error, of its class and with its words, rank and host.
    InputError
        Something differs that must be the same: what, and who has which value.
    """
    failed = [number for number, each in enumerate(descriptions) if each.error_kind is not None]
    error = own or (_error_of(descriptions[failed[0]], failed, hosts) if failed else _difference(descriptions))
    if error is not None:
        speaker = failed[0] if failed else 0
        setattr(error, TOLD_ELSEWHERE, rank != speaker)
        raise error


def _difference(descriptions: Sequence[Description]) -> InputError | None:
    for name, values in _comparisons(descriptions):
        if any(value != values[0] for value in values):
            return InputError.of(name, expected="the same on every rank", got=_who_has_what(values))
    return None


def _error_of(description: Description, failed: list[int], hosts: Sequence[str]) -> TreeattnError:
    kind, text = description.error_kind or "", description.error_text or ""
    where = f"rank {failed[0]} on host {hosts[failed[0]]}"
    others = f", and {ranks_in_words(failed[1:])}" if failed[1:] else ""
    if kind not in errors.__all__:
        return CommError(f"{where} failed with {kind}: {text}" if text else f"{where} failed with {kind}")
    error: TreeattnError = getattr(errors, kind)(f"{text} ({where}{others})")
    return error


def _comparisons(descriptions: Sequence[Description]) -> list[tuple[str, list[Any]]]:
    """Give what must be equal, by name and rank, in the order in which differences are worth telling."""
    named = [dict(each.fields) for each in descriptions]
    details = [each.details for each in descriptions]
    return [
        ("operation", [each.operation for each in descriptions]),
        ("root", [each.root for each in descriptions]),
        *_by_name(named),
        ("shape of the packed state", [each.shape for each in descriptions]),
        ("dtype of the state", [each.dtype for each in descriptions]),
        *_by_name(details),
        ("check word", [each.check for each in descriptions]),
        ("signature", [each.digest for each in descriptions]),
    ]


def _by_name(dicts: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    names = dict.fromkeys(name for each in dicts for name in each)
    return [(name, [each.get(name) for each in dicts]) for name in names]


def _who_has_what(values: Sequence[Any]) -> str:
    """Write "1 on ranks 0, 2 and 3 on rank 1"."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(_words(value), []).append(rank)
    return _listed([f"{value} on {ranks_in_words(ranks)}" for value, ranks in holders.items()])


def _words(value: Any) -> str:
    return f"({', '.join(map(_words, value))}{',' * (len(value) == 1)})" if isinstance(value, list) else str(value)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Write "rank 3", or "ranks 0, 1, 2", and of many the first eight.

    Examples
    --------
    >>> ranks_in_words(range(10))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7, 2 more'
    """
    shown = [str(rank) for rank in ranks[:8]]
    more = [f"{len(ranks) - 8} more"] if len(ranks) > 8 else []
    return f"rank {shown[0]}" if len(ranks) == 1 else f"ranks {', '.join([*shown, *more])}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
