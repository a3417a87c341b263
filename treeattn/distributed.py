"""Decoding over the ranks of a communicator: a state per shard, merged over the tree, finished on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

from treeattn.arguments.arrays import to_array
from treeattn.arguments.checks import check_flag, check_root
from treeattn.arguments.devices import fetch, on_device
from treeattn.arguments.digests import CHECK_VARIABLE, checks, digest, digest_of_array
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options, Spec
from treeattn.arguments.state_arguments import sink_logits
from treeattn.errors import InputError
from treeattn.execution.agreement import Attempt, Signature
from treeattn.local import compute_state, deliver
from treeattn.pipeline import Part, check_pipeline, compute_part, parts_of, together
from treeattn.ranks.team import Team
from treeattn.state import PartialState
from treeattn.steps.attempts import check_travels
from treeattn.steps.groups import Beside
from treeattn.wrapping import team_of

__all__ = ["Arguments", "Decoding", "agreed_fields", "check_positions", "decode", "fingerprints"]

Arguments: TypeAlias = tuple[Any, Any, Any, Options]
"""q, k, v and the options of one call, not yet validated."""


def decode(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    root: int | None = None,
    return_lse: bool = False,
    sink: Any = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    kv_len: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: Any = None,
    layout: str = "bhtd",
    backend: Any = None,
    pipeline: int = 1,
) -> Any:
    """Attention of ``q`` over keys and values that are split over the ranks of ``comm``; collective.

    Every rank computes the partial state of its own shard; the states are merged over the communicator's tree
    with one message per edge.

    Parameters
    ----------
    q : array (B, Hq, Tq, D)
        Queries, the same on every rank. ``TREEATTN_CHECK=1`` in the environment verifies that, as it does what
        `ShardedKVCache.append` gets.
    k : array (B, Hkv, Tk, D)
        This rank's keys; Tk may differ from rank to rank and may be 0.
    v : array (B, Hkv, Tk, Dv)
        This rank's values.
    comm : TreeComm, mpi4py communicator or None
        A bare communicator is wrapped once and remembered; None is the world, or one process without a launcher.
    root : int, optional
        Only this rank gets the result.
    return_lse : bool
        Whether ``lse`` is wanted too.
    sink : array (Hq,), optional
        An extra raw logit per head without a value, counted once for the whole sequence.
    scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout, backend
        As in `treeattn.attention`; ``mask``, ``kv_pos`` and ``kv_len`` are of this rank's keys. On more than one
        rank ``causal`` and ``window`` need ``q_pos`` and ``kv_pos``.
    pipeline : int
        Groups of KV heads, the same on every rank, at most 8: the states of one group travel while the next group's
        are computed. More messages, the same bits; it pays where both take about as long, and travelling takes long
        because of the bytes: it hides no latency.

    Returns
    -------
    out : array (B, Hq, Tq, Dv) of q's dtype, in q's layout
        The same bits on every rank, of q's kind, as in `treeattn.attention`; None on the ranks that are not ``root``.
    lse : array (B, Hq, Tq) of the state's dtype
        Only with ``return_lse``; None where ``out`` is.

    Raises
    ------
    InputError
        On every rank, if an argument is wrong on any rank or differs where it must be the same.

    Notes
    -----
    Source: arXiv 2408.04093, Algorithm 3, with its three all-reduces replaced by one exchange of packed states.

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
    >>> out = treeattn.decode(q, k, v, comm=None)
    >>> np.array_equal(out, treeattn.attention(q, k, v))
    True
    """
    options = Options(scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout)
    decoding = Decoding(team_of(comm), root=root, return_lse=return_lse, sink=sink, backend=backend, pipeline=pipeline)
    return decoding(lambda: (q, k, v, options))


@dataclass(frozen=True, slots=True)
class Decoding:
    """One collective decode, whoever prepares its arguments.

    Parameters
    ----------
    team : Team
    root, return_lse, sink, backend, pipeline
        As in `decode`.
    shared : tuple of (str, value)
        More that every rank must agree on, by the names that an error would call it; values that JSON can carry.
    """

    team: Team
    root: int | None = None
    return_lse: bool = False
    sink: Any = None
    backend: Any = None
    shared: tuple[tuple[str, Any], ...] = ()
    pipeline: int = 1

    def __call__(self, arguments: Callable[[], Arguments]) -> Any:
        """Run it; what ``arguments`` raises, like any other local failure, is raised on every rank."""
        try:
            groups = check_pipeline(self.pipeline)
        except InputError as error:
            self.team.exchange(Attempt(None, None, error))
            raise
        if groups > 1:
            return self._in_groups(arguments, groups)
        attempt, finish = self._attempt(arguments)
        state = self.team.exchange(attempt, out=attempt.state)  # which is ours
        if state is None or finish is None:
            return (None, None) if self.return_lse else None
        return finish(state)

    def _attempt(self, arguments: Callable[[], Arguments]) -> tuple[Attempt, Callable[[PartialState], Any] | None]:
        """Compute this rank's state, or what went wrong, and how the merged state is to be finished."""
        try:
            return self._computed(*arguments())
        except Exception as error:  # whatever it is, the other ranks must hear of it before it is raised here
            return Attempt(None, None, error), None

    def _computed(self, q: Any, k: Any, v: Any, options: Options) -> tuple[Attempt, Callable[[PartialState], Any]]:
        check_root(self.root, self.team.size)
        spec, state = compute_state(q, k, v, options, self.backend)
        sink = self._checked(spec, options)
        attempt = self._attempt_of(_signature(spec, self.root), state, self._shared(q, sink))
        return attempt, partial(deliver, spec=spec, sink=sink, return_lse=self.return_lse)

    def _checked(self, spec: Spec, options: Options) -> Any:
        """Refuse what a call over several ranks can't do; give the sink as it is used."""
        check_flag("return_lse", self.return_lse)
        check_travels(spec.state_dtype, self.team.channel.wire_dtype)
        if self.team.size > 1 and spec.positional:
            check_positions(options)
        return sink_logits(self.sink, spec.q_heads, spec.state_dtype, spec.on_device)

    def _shared(self, q: Any, sink: Any) -> tuple[tuple[str, Any], ...]:
        return (*self.shared, *fingerprints(q, sink))

    @staticmethod
    def _attempt_of(signature: Signature, state: PartialState, shared: tuple[tuple[str, Any], ...]) -> Attempt:
        check, details = (digest(repr(shared).encode()), lambda: dict(shared)) if shared else (0, None)
        return Attempt(signature, state, None, check, details)

    def _in_groups(self, arguments: Callable[[], Arguments], groups: int) -> Any:
        """Run it in groups of KV heads, whose merged states are put together before they are finished."""
        whole: _Whole | Exception
        try:
            whole = self._whole(*arguments(), groups)
        except Exception as error:  # whatever it is, the other ranks must hear of it before it is raised here
            whole = error
        merged = self.team.in_groups(groups, partial(self._group, whole))
        assert not isinstance(whole, Exception), "the first exchange has raised it"
        if None in merged:
            return (None, None) if self.return_lse else None
        return deliver(together(whole.spec, whole.parts, merged), whole.spec, whole.sink, self.return_lse)

    def _whole(self, q: Any, k: Any, v: Any, options: Options, groups: int) -> _Whole:
        check_root(self.root, self.team.size)
        spec, args = resolve(q, k, v, options)
        sink = self._checked(spec, options)
        return _Whole(spec, parts_of(spec, args, groups), sink, self._shared(q, sink))

    def _group(self, whole: _Whole | Exception, index: int, beside: Beside) -> Attempt:
        if isinstance(whole, Exception):
            return Attempt(None, None, whole)
        part = whole.parts[index]
        try:
            signature = _signature(whole.spec, self.root, len(whole.parts), part.spec.packed_shape)
            return self._attempt_of(signature, compute_part(part, self.backend, beside), whole.shared)
        except Exception as error:  # as above
            return Attempt(None, None, error)


@dataclass(frozen=True, slots=True)
class _Whole:
    """A call that is made in groups, validated."""

    spec: Spec
    parts: list[Part]
    sink: Any
    shared: tuple[tuple[str, Any], ...]


@lru_cache(maxsize=256)
def _signature(
    spec: Spec, root: int | None, groups: int = 1, shape: tuple[int, int, int, int] | None = None
) -> Signature:
    """Give what ranks have to agree on in a call, or in one of its groups, of another shape than the whole."""
    fields = *agreed_fields(spec), ("pipeline", groups)
    return Signature("decode", root, fields, shape or spec.packed_shape, spec.state_dtype)


def agreed_fields(spec: Spec) -> tuple[tuple[str, Any], ...]:
    """Name what must be the same on every rank for a call to make sense."""
    return (
        ("q.shape", (spec.batch, spec.q_heads, spec.q_tokens, spec.head_dim)),
        ("q.dtype", spec.q_dtype),
        ("number of kv heads", spec.kv_heads),
        ("v.width", spec.v_head_dim),
        ("scale", spec.scale),
        ("softcap", spec.softcap),
        ("causal", spec.causal),
        ("window", spec.window),
        ("layout", spec.layout),
    )


def check_positions(options: Options) -> None:
    """Refuse causal and window without global positions, on several ranks."""
    for name in ("q_pos", "kv_pos"):
        if getattr(options, name) is None:
            expected = "global positions, since causal and window are about the whole sequence"
            raise InputError.of(name, expected=expected, got="None on a communicator of several ranks")


def fingerprints(q: Any, sink: Any) -> tuple[tuple[str, int], ...]:
    """Digest what must hold the same values on every rank; q, where it must, only when asked: it costs a pass."""
    found = []
    if sink is not None and not on_device(sink):  # what is on a card is not read for this
        found.append(("sink", digest_of_array(sink)))
    if q is not None and checks():
        found += [(CHECK_VARIABLE, 1), ("q", digest_of_array(fetch(to_array("q", q))))]
    return tuple(found)
