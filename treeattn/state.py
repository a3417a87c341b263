"""The partial attention state and its merge: the algebra that everything else here carries around.

A state is three numbers per query and head, ``m`` = max logit, ``l`` = sum of exp(logit - m) and the vector
``o`` = sum of exp(logit - m) v, in one packed buffer. Between ranks it travels in another form of the same size; see
`treeattn.wire_form`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import FLOAT_DTYPES, as_array, cast, known_dtype, narrow_dtype, to_numpy
from treeattn.arguments.checks import check_flag
from treeattn.arguments.devices import Kind, give, kind_of
from treeattn.arguments.state_arguments import log_of_base, sink_logits, state_dtype, state_shape
from treeattn.errors import InputError
from treeattn.state_ops import StateOps

__all__ = ["PartialState", "buffer_for", "check_writable", "made_of", "merge"]

Array: TypeAlias = npt.NDArray[Any]


class PartialState:
    """Attention over some of the keys, exact and mergeable with attention over the others.

    Parameters
    ----------
    packed : array (B, Hq, Tq, Dv + 2), float32 or float64, C-contiguous
        The state's one buffer. It is not copied.
    ops : StateOps
        The backend's operations on it.
    kind : str, optional
        Whose arrays `finish` and `to_lse` give, "torch" or "jax" for instance; by default those of the backend.

    Raises
    ------
    InputError
        ``packed`` is an array of another form: compiled code reads a state by its address alone.

    Notes
    -----
    States are immutable: every operation gives a new one, and the arrays ``o``, ``l`` and ``m``, the backend's
    whatever the ``kind``, are read-only views. Source: arXiv 2408.04093, section 3 (the merge is the associative
    reduction of Algorithm 1).

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6))
    >>> left = treeattn.partial_attention(q, k[:, :, :4], v[:, :, :4])
    >>> right = treeattn.partial_attention(q, k[:, :, 4:], v[:, :, 4:])
    >>> np.allclose(left.merge(right).finish(), treeattn.attention(q, k, v))
    True
    """

    __slots__ = ("_packed", "kind", "ops")

    def __init__(self, packed: Array, ops: StateOps, kind: Kind = "numpy") -> None:
        _check_packed(packed)
        self._packed = packed
        self.ops = ops
        self.kind = kind

    @property
    def packed(self) -> Array:
        """The one buffer (B, Hq, Tq, Dv + 2); read-only."""
        return _read_only(self._packed)

    @property
    def o(self) -> Array:
        """Sum of exp(logit - m) v, shape (B, Hq, Tq, Dv)."""
        return self.packed[..., :-2]

    @property
    def l(self) -> Array:  # noqa: E743 - the field's name for it
        """Sum of exp(logit - m), shape (B, Hq, Tq)."""
        return self.packed[..., -2]

    @property
    def m(self) -> Array:
        """Largest logit, natural base, shape (B, Hq, Tq); -inf where no key was seen.

        After a merge between ranks it is what o and l are relative to, and at most ln 2 above the largest logit.
        """
        return self.packed[..., -1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Precision of the sums, float32 or float64."""
        return self._packed.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of ``o``: (batch, query heads, query tokens, width of v)."""
        batch, heads, tokens, width = self._packed.shape
        return batch, heads, tokens, width - 2

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer."""
        return int(self._packed.nbytes)

    def __repr__(self) -> str:
        batch, heads, tokens, width = self.shape
        seen = int(np.count_nonzero(self.l)) if isinstance(self._packed, np.ndarray) else "?"
        rows = batch * heads * tokens
        return (
            f"PartialState(batch={batch}, heads={heads}, tokens={tokens}, width={width}, dtype={self.dtype.name}, "
            f"backend={self.ops.name!r}, rows with keys: {seen} of {rows})"
        )

    @classmethod
    def identity(
        cls, shape: tuple[int, int, int, int], *, dtype: npt.DTypeLike = np.float32, backend: Any = None
    ) -> PartialState:
        """Make the state of no keys, which changes nothing that it is merged with.

        Parameters
        ----------
        shape : tuple of int
            (B, Hq, Tq, Dv).
        dtype : float32 or float64
        backend : str or Backend, optional
            Where the state lives; the CPU by default.

        Returns
        -------
        PartialState
            o = 0, l = 0 and m = -inf.

        Examples
        --------
        >>> import treeattn
        >>> bool(treeattn.PartialState.identity((1, 2, 1, 4)).finish().any())
        False
        """
        ops = _ops(backend)
        *rows, width = state_shape(shape)
        packed = ops.empty((*rows, width + 2), state_dtype(dtype))
        ops.fill_identity(packed)
        return cls(packed, ops)

    def _like(self, packed: Array) -> PartialState:
        """Make a state of ``packed``, of this one's backend and kind."""
        return made_of(packed, self.ops, self.kind)

    def merge(self, other: PartialState) -> PartialState:
        """Merge with the state of other keys; see `treeattn.merge`.

        Parameters
        ----------
        other : PartialState
            Of the same shape, dtype and backend.

        Returns
        -------
        PartialState
            A new one.
        """
        if not isinstance(other, PartialState):
            raise InputError.of("other", expected="a PartialState", got=type(other).__name__)
        return merge((self, other))

    def finish(self, *, sink: Any = None, dtype: npt.DTypeLike | None = None, return_lse: bool = False) -> Any:
        """Turn the state of all keys into attention's output.

        Parameters
        ----------
        sink : array (Hq,), optional
            An extra raw logit per head, with no value behind it. It is counted once, here.
        dtype : dtype, optional
            Type of ``out``; the state's own by default.
        return_lse : bool
            Whether ``lse`` is wanted too.

        Returns
        -------
        out : array (B, Hq, Tq, Dv)
            ``o / l``, and 0 in rows that saw no key.
        lse : array (B, Hq, Tq), of the state's dtype
            Only with ``return_lse``: log of the sum of exp of the logits, natural base, with the sink in it.
            A row that saw no key has -inf, or the sink.

        Raises
        ------
        InputError
            An argument is wrong; the message begins with its name.
        """
        return_lse = check_flag("return_lse", return_lse)
        there = not isinstance(self._packed, np.ndarray)
        out, lse = self.ops.finish(self._packed, sink_logits(sink, self.shape[1], self.dtype.name, there))
        if dtype is not None:
            out = cast(out, narrow_dtype(known_dtype("dtype", dtype, FLOAT_DTYPES)))
        out = give(out, self.kind)
        return (out, give(lse, self.kind)) if return_lse else out

    def to_lse(self, *, base: Any) -> tuple[Array, Array]:
        """Export as (out, lse), the form that other engines exchange.

        Parameters
        ----------
        base : "e" or 2
            Base of the logarithm that the receiver expects. There is no default: guessing it wrong is silent.

        Returns
        -------
        out : array (B, Hq, Tq, Dv)
        lse : array (B, Hq, Tq)
            Both of the state's dtype.

        Examples
        --------
        >>> import numpy as np, treeattn
        >>> q, k, v = (np.ones((1, 1, n, 4), np.float32) for n in (1, 8, 8))
        >>> out, lse = treeattn.partial_attention(q, k, v).to_lse(base=2)
        >>> bool(np.isclose(lse, 2 / np.log(2) + 3).all())  # of eight logits of 2
        True
        """
        out, lse = self.ops.finish(self._packed, None)
        return give(out, self.kind), give(lse / lse.dtype.type(log_of_base(base)), self.kind)

    @classmethod
    def from_lse(cls, out: Any, lse: Any, *, base: Any) -> PartialState:
        """Import (out, lse) from another engine.

        Parameters
        ----------
        out : array (B, Hq, Tq, Dv)
            Normalised output; what it holds where ``lse`` is -inf does not matter.
        lse : array (B, Hq, Tq)
            Where it is NaN or +inf, so that the sum it stands for is lost, the state's row finishes to NaN.
        base : "e" or 2
            Base of the logarithm in ``lse``.

        Returns
        -------
        PartialState
            In host memory; float64 if any of ``out`` and ``lse`` is, else float32.

        Raises
        ------
        InputError
            An argument is wrong; the message begins with its name.

        Examples
        --------
        >>> import numpy as np, treeattn
        >>> out, lse = np.ones((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1), np.float32)
        >>> state = treeattn.PartialState.from_lse(out, lse, base="e")
        >>> bool((state.merge(state).finish() == out).all())
        True
        """
        kind, out, lse = kind_of(out), _host_floats("out", out), _host_floats("lse", lse)
        dtype = "float64" if np.float64 in (out.dtype, lse.dtype) else "float32"
        if out.ndim != 4:
            expected = "four axes (batch, query heads, query tokens, width)"
            raise InputError.of("out", expected=expected, got=f"shape {out.shape}")
        if lse.shape != out.shape[:3]:
            raise InputError.of("lse", expected=f"shape {out.shape[:3]}, as out has", got=f"shape {lse.shape}")
        ops = _ops(None)
        packed = ops.empty((*out.shape[:3], out.shape[3] + 2), dtype)
        m = cast(lse, dtype) * np.dtype(dtype).type(log_of_base(base))
        seen = m != -math.inf
        packed[..., :-2] = np.where(seen[..., None], out, 0)
        packed[..., -2], packed[..., -1] = np.where(m < math.inf, seen, math.nan), m
        return cls(packed, ops, kind)


def made_of(packed: Array, ops: StateOps, kind: Kind) -> PartialState:
    """Make a state of a buffer that is known to be one, in every step, without looking at it."""
    made = object.__new__(PartialState)
    made._packed, made.ops, made.kind = packed, ops, kind
    return made


def merge(states: Iterable[PartialState], *, out: PartialState | None = None) -> PartialState:
    """Merge any number of states of disjoint keys, in the order given.

    Parameters
    ----------
    states : iterable of PartialState
        At least one; all of one shape, dtype and backend.
    out : PartialState, optional
        A state whose buffer is overwritten instead of allocating one; it may be one of ``states``.

    Returns
    -------
    PartialState
        Equal bits for equal inputs in equal order, on every CPU and GPU.

    Examples
    --------
    >>> import treeattn
    >>> empty = treeattn.PartialState.identity((1, 2, 1, 4))
    >>> treeattn.merge([empty, empty]).l.tolist()
    [[[0.0], [0.0]]]
    """
    states = _listed(states)
    _check_mergeable(states)
    first = states[0]
    packed = buffer_for(out, first._packed.shape, first.dtype.name, first.ops)
    first.ops.merge(packed, [state._packed for state in states])
    if out is not None:
        return out
    return made_of(packed, first.ops, next((each.kind for each in states if each.kind != "numpy"), "numpy"))


def _listed(states: Any) -> list[PartialState]:
    try:
        each = iter(states)
    except TypeError:
        raise InputError.of("states", expected="an iterable of states", got=type(states).__name__) from None
    return list(each)


def _check_mergeable(states: list[PartialState]) -> None:
    if not states:
        raise InputError.of("states", expected="at least one state", got="none")
    for state in states:
        if not isinstance(state, PartialState):
            raise InputError.of("states", expected="PartialState objects", got=type(state).__name__)
    first = states[0]
    for state in states[1:]:
        _check_like(state, first)


def _check_like(state: PartialState, first: PartialState) -> None:
    for what in ("shape", "dtype"):
        expected, got = getattr(first, what), getattr(state, what)
        if got != expected:
            raise InputError.of("states", expected=f"{what} {expected}, as the first has", got=got)
    if state.ops.name != first.ops.name:
        hint = "states of different backends don't mix"
        raise InputError.of("states", expected=f"backend {first.ops.name!r}", got=repr(state.ops.name), hint=hint)


def buffer_for(out: PartialState | None, packed_shape: tuple[int, ...], dtype: str, ops: StateOps) -> Array:
    """Give a packed buffer to write a state to: a new one, or that of ``out`` where it fits."""
    if out is None:
        return ops.empty(packed_shape, dtype)
    if not isinstance(out, PartialState):
        raise InputError.of("out", expected="a PartialState", got=type(out).__name__)
    if out._packed.shape != packed_shape or out.dtype != dtype or out.ops.name != ops.name:
        shape = (*packed_shape[:3], packed_shape[3] - 2)
        raise InputError.of("out", expected=f"a {dtype} state of shape {shape} on {ops.name!r}", got=repr(out))
    check_writable(out)
    return out._packed


def check_writable(out: PartialState) -> None:
    """Refuse to overwrite a state of a read-only array, which compiled code would not see."""
    if isinstance(out._packed, np.ndarray) and not out._packed.flags.writeable:
        raise InputError.of("out", expected="a state that can be overwritten", got="one of a read-only array")


def _check_packed(packed: Any) -> None:
    """Refuse arrays that compiled code would read wrongly; those of devices are their backend's to judge."""
    expected = "a float32 or float64 array (B, Hq, Tq, Dv + 2)"
    if not isinstance(packed, np.ndarray):
        if not hasattr(packed, "shape"):
            raise InputError.of("packed", expected=expected, got=type(packed).__name__)
        return
    if packed.dtype not in (np.float32, np.float64) or packed.ndim != 4 or packed.shape[3] < 2:
        raise InputError.of("packed", expected=expected, got=f"{packed.dtype} of shape {packed.shape}")
    if not (packed.flags.c_contiguous and packed.flags.aligned):
        raise InputError.of("packed", expected="a C-contiguous array", got=f"one of strides {packed.strides}")


def _read_only(array: Array) -> Array:
    if not isinstance(array, np.ndarray):
        return array  # on a GPU, where no array can be read-only
    view: Array = array.view()
    view.flags.writeable = False
    return view


def _ops(backend: Any) -> StateOps:
    from treeattn.backends.registry import find  # here, so that a state can be named without any backend

    return find(backend).ops


def _host_floats(name: str, value: Any) -> Array:
    array = to_numpy(name, value)
    return array if array.dtype.kind in "iu" else as_array(name, array, FLOAT_DTYPES)
