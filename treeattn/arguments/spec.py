"""What a call is: a frozen ``Spec`` (what to compile for), ``Args`` (what to run on), and the options behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy.typing as npt

from treeattn.arguments.devices import Kind
from treeattn.arguments.positions import Consecutive

__all__ = ["LAYOUTS", "Args", "KVView", "Layout", "Options", "Spec"]

Array: TypeAlias = npt.NDArray[Any]
Layout: TypeAlias = Literal["bhtd", "bthd"]
LAYOUTS: tuple[Layout, ...] = ("bhtd", "bthd")


@dataclass(frozen=True, slots=True)
class KVView:
    """How K and V lie in memory; all that a kernel may know about their storage.

    Parameters
    ----------
    k_dtype, v_dtype : str
        Storage types, one of ``treeattn.arguments.arrays.KV_DTYPES``.
    k_strides, v_strides : tuple of int
        Bytes from one element to the next along (batch, KV head, token, width).
    k_scaled, v_scaled : bool
        Whether a scale per block of tokens comes with the call.
    """

    k_dtype: str
    v_dtype: str
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    k_scaled: bool = False
    v_scaled: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything about a call that stays the same from one decode step to the next; hashable.

    The number of keys is not here: a cache grows, and a prepared call must survive that.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_tokens: int
    head_dim: int
    v_head_dim: int
    q_dtype: str
    state_dtype: str
    kv: KVView
    scale: float
    softcap: float | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: Literal["bool", "float"] | None = None
    ragged: bool = False
    layout: Layout = "bhtd"
    kind: Kind = "numpy"
    """Whose array q is, and the results are to be."""
    on_device: bool = False
    """Whether q, k and v are in memory that the CPU must not touch."""
    whole_kv_heads: int | None = None
    """KV heads of the call that this one is a part of, if it is one."""

    @property
    def cut_heads(self) -> int:
        """KV heads by which to decide into how many parts keys are cut: the bits of a part are those of the whole."""
        return self.whole_kv_heads or self.kv_heads

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def positional(self) -> bool:
        """Whether a key's position decides who sees it."""
        return self.causal or self.window is not None

    @property
    def packed_shape(self) -> tuple[int, int, int, int]:
        """Shape of the state's one buffer: (batch, q_heads, q_tokens, v_head_dim + 2)."""
        return self.batch, self.q_heads, self.q_tokens, self.v_head_dim + 2


class Args(NamedTuple):
    """The arrays of one call, as (batch, heads, tokens, width) views.

    ``q_pos`` (B, Tq) and ``kv_pos`` (B, Tk) are int64 and set exactly when ``spec.positional``; consecutive ``kv_pos``
    are no array but `treeattn.arguments.positions.Consecutive`; ``kv_positions`` gives an array of them too. ``kv_len``
    (B,) is int64, set exactly when ``spec.ragged``; ``mask`` (B, Hq, Tq, Tk), bool or of the state's dtype, is a
    broadcast view. ``k_scale`` and ``v_scale`` (B, Hkv, blocks) are of the state's dtype; block ``i`` covers tokens ``i
    * k_block`` up to ``(i + 1) * k_block``.
    """

    q: Array
    k: Array
    v: Array
    q_pos: Array | None = None
    kv_pos: Any = None
    kv_len: Array | None = None
    mask: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    k_block: int = 1
    v_block: int = 1

    @property
    def kv_tokens(self) -> int:
        """Keys in this call, hidden ones too."""
        return int(self.k.shape[2])

    @property
    def kv_positions(self) -> Array | None:
        """``kv_pos`` as an array, which takes memory where they are consecutive."""
        kv_pos = self.kv_pos
        found: Array | None = kv_pos.array(len(self.k), self.kv_tokens) if isinstance(kv_pos, Consecutive) else kv_pos
        return found


class Options(NamedTuple):
    """The keyword options that ``attention``, ``partial_attention``, ``energy`` and ``decode`` share."""

    scale: float | None = None
    mask: Any = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    q_pos: Any = None
    kv_pos: Any = None
    kv_len: Any = None
    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: Any = None
    layout: str = "bhtd"
