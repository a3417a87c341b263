"""Which compiled parts a call needs, and the list of all that there can be.

Common widths have products written out for them, for each storage type; all other widths, rows whose elements are not
neighbours, and types that this processor can't widen in registers share products that read a widened working copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from llvmlite import binding

from treeattn.inputs import Spec
from treeattn.kernels import softmax, visibility, widen
from treeattn.kernels.call import STORAGES
from treeattn.kernels.loads import PAIRED, UNITS, can_widen, padded, stored_bytes
from treeattn.kernels.scores import scores_of
from treeattn.kernels.values import STRIP, strip_keys, values_of, values_of_any_width
from treeattn.kernels.vectors import LANES, has_feature

__all__ = [
    "COMMON_WIDTHS",
    "Stored",
    "k_strip",
    "knows_pairs",
    "multiplies_pairs",
    "parts_of",
    "specialisations",
    "stored",
    "v_strip",
]

COMMON_WIDTHS = (64, 80, 96, 128, 192, 256)

PORTABLE_VARIABLE = "TREEATTN_PORTABLE"
"""Environment variable that, set to 1, keeps kernels from instructions that only some processors have."""

Part = Callable[[], int]


class Stored(NamedTuple):
    """K or V as it is stored, and as what it is summed."""

    storage: str
    strides: tuple[int, ...]
    width: int
    dtype: str

    @property
    def contiguous(self) -> bool:
        """Whether the elements of a row are neighbours."""
        return self.strides[3] == stored_bytes(self.storage) or self.width == 1

    @property
    def common(self) -> bool:
        """Whether rows are read by a product that is written out for them."""
        fits = self.storage == self.dtype or (self.dtype == "float32" and self.storage != "float64")
        return self.contiguous and fits and self.width in COMMON_WIDTHS and can_widen(self.storage)

    @property
    def row_bytes(self) -> int:
        """Bytes of a widened row."""
        return padded(self.width) * stored_bytes(self.dtype)

    @property
    def paired(self) -> bool:
        """Whether elements come out of registers with the even ones first."""
        return self.common and self.storage in PAIRED

    @property
    def unit(self) -> float:
        """What the numbers that come out of registers have to be multiplied with."""
        return UNITS.get(self.storage, 1.0) if self.common else 1.0


def stored(spec: Spec) -> tuple[Stored, Stored]:
    """Give how K and V are stored."""
    kv = spec.kv
    return (
        Stored(kv.k_dtype, kv.k_strides, spec.head_dim, spec.state_dtype),
        Stored(kv.v_dtype, kv.v_strides, spec.v_head_dim, spec.state_dtype),
    )


def k_strip(k: Stored) -> int:
    """Keys that are copied at a time; 0 where they are read where they lie."""
    if k.common or (k.storage == k.dtype and k.contiguous):
        return 0
    return max(LANES, STRIP // k.row_bytes // LANES * LANES)


def v_strip(v: Stored) -> int:
    """Values that are copied at a time; 0 where they are read where they lie."""
    return 0 if v.common else strip_keys(v.row_bytes)


def multiplies_pairs(spec: Spec) -> bool:
    """Whether scores are sums of pairs of bfloat16 products, which is exact only for queries of that type too."""
    k, _ = stored(spec)
    return spec.q_dtype == "bfloat16" and k.dtype == "float32" and k.common and knows_pairs(k.storage)


def knows_pairs(storage: str) -> bool:
    """Whether this processor multiplies pairs of bfloat16, and may, and can read the type as such."""
    wanted = os.environ.get(PORTABLE_VARIABLE, "0") != "1"
    known = LANES == 16 and has_feature("avx512bf16") and binding.llvm_version_info >= (16,)
    return wanted and known and storage == "bfloat16"


def parts_of(spec: Spec) -> dict[str, Part]:
    """Give the parts that a call needs, by their names in `treeattn.kernels.call.Call`; calling one compiles it."""
    (k, v), double = stored(spec), spec.state_dtype == "float64"
    parts = {
        "scores": scores_of(*((k.storage, k.width) if k.common else (k.dtype, 0)), pairs=multiplies_pairs(spec)),
        "weigh": softmax.weigh_double if double else softmax.weigh_single,
        "values": values_of(v.storage, v.width) if v.common else values_of_any_width(v.dtype),
    }
    if spec.positional or spec.mask is not None:
        parts["see"] = visibility.see_double if double else visibility.see_single
    if k_strip(k) or v_strip(v):
        parts["widen"] = widen.widen_double if double else widen.widen_single
    return parts


def specialisations() -> Iterator[tuple[str, Part]]:
    """Give the name of every part that a call on this processor may need, and the function that compiles it.

    Examples
    --------
    >>> from treeattn.kernels.specialisations import specialisations
    >>> "scores of bfloat16, width 128" in dict(specialisations())
    True
    """
    for module, names in ((softmax, "weigh"), (visibility, "see"), (widen, "widen")):
        for precision in ("single", "double"):
            yield f"{names} {precision}", getattr(module, f"{names}_{precision}")
    for dtype in ("float32", "float64"):
        yield f"scores of {dtype}, any width", scores_of(dtype, 0, pairs=False)
        yield f"values of {dtype}, any width", values_of_any_width(dtype)
    for storage, width in product(STORAGES, COMMON_WIDTHS):
        if can_widen(storage):
            yield f"scores of {storage}, width {width}", scores_of(storage, width, pairs=False)
            yield f"values of {storage}, width {width}", values_of(storage, width)
            if knows_pairs(storage):
                yield f"scores of {storage} for bfloat16 queries, width {width}", scores_of(storage, width, pairs=True)
