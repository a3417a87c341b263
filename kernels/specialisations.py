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

from treeattn.arguments.spec import Spec
from treeattn.kernels import many_softmax, softmax, visibility, widen
from treeattn.kernels.call import STORAGES
from treeattn.kernels.loads import EIGHTS, EVENS, PAIRED, UNITS, can_widen, padded, stored_bytes
from treeattn.kernels.lookup import LOOKED_UP, STEP
from treeattn.kernels.many_scores import KEYS, KINDS, many_scores_of
from treeattn.kernels.many_values import READ, fits_panels, many_values_of
from treeattn.kernels.scores import AS_PAIRS, FOUND, WIDENED, scores_of
from treeattn.kernels.target import has_feature
from treeattn.kernels.values import STRIP, strip_keys, values_of, values_of_any_width
from treeattn.kernels.vectors import LANES, ZEN

__all__ = [
    "COMMON_WIDTHS",
    "Stored",
    "has_many_rows",
    "k_strip",
    "knows_pairs",
    "parts_of",
    "specialisations",
    "stored",
    "tile_tokens",
    "v_strip",
]

COMMON_WIDTHS = (64, 80, 96, 128, 192, 256)

MOST_TOKENS, MOST_ROWS = 16, 256
"""Query tokens, and query rows, that share one pass over the keys."""

FEW_ROWS = 8
"""Query rows up to which keys are read faster than multiplied; more of them lie in lanes."""

PORTABLE_VARIABLE = "TREEATTN_PORTABLE"
"""Environment variable that, set to 1, keeps kernels from instructions that only some processors have; set to 0, it has
them use all that this one has, also those that are slow on it."""

Part = Callable[[], int]


class Stored(NamedTuple):
    """K or V as it is stored, and as what it is summed."""

    storage: str
    strides: tuple[int, ...]
    width: int
    dtype: str
    many: bool  # query rows
    pairs: bool = False  # whether keys are multiplied as pairs of bfloat16
    looked_up: bool = False  # whether numbers are looked up as bfloat16

    @property
    def contiguous(self) -> bool:
        """Whether the elements of a row are neighbours."""
        return self.strides[3] == stored_bytes(self.storage) or self.width == 1

    @property
    def in_registers(self) -> bool:
        """Whether rows are widened in registers: by a product that is written out for them, or that takes any."""
        fits = self.storage == self.dtype or (self.dtype == "float32" and self.storage != "float64")
        known = self.many or self.width in COMMON_WIDTHS
        return self.contiguous and fits and known and can_widen(self.storage)

    @property
    def row_bytes(self) -> int:
        """Bytes of a widened row."""
        return padded(self.width) * stored_bytes(self.dtype)

    @property
    def bytes_in_order(self) -> int:
        """Bytes of a stored row where the next one follows it, else 0."""
        size = self.width * stored_bytes(self.storage)
        return size if self.contiguous and self.strides[2] == size else 0

    @property
    def order(self) -> int:
        """Order in which elements come out of registers."""
        evens = self.in_registers and not self.pairs and (self.storage in PAIRED or self.looked_up)
        return EVENS * evens + EIGHTS * self.looked_up

    @property
    def unit(self) -> float:
        """What the numbers that come out of registers have to be multiplied with."""
        as_they_are = self.pairs or self.looked_up or not self.in_registers
        return 1.0 if as_they_are else UNITS.get(self.storage, 1.0)


def tile_tokens(spec: Spec) -> int:
    """Query tokens that share one pass over the keys."""
    return max(1, min(MOST_TOKENS, spec.q_tokens, MOST_ROWS // spec.group))


def has_many_rows(spec: Spec) -> bool:
    """Whether query rows lie in lanes (`treeattn.kernels.many_rows`)."""
    return tile_tokens(spec) * spec.group > FEW_ROWS


def stored(spec: Spec) -> tuple[Stored, Stored]:
    """Give how K and V are stored."""
    kv, many = spec.kv, has_many_rows(spec)
    k = Stored(kv.k_dtype, kv.k_strides, spec.head_dim, spec.state_dtype, many)
    v = Stored(kv.v_dtype, kv.v_strides, spec.v_head_dim, spec.state_dtype, many)
    k = k._replace(pairs=spec.q_dtype == "bfloat16" and _multiplies_pairs(k))
    return k._replace(looked_up=_is_looked_up(k)), v._replace(looked_up=_is_looked_up(v))


def k_strip(k: Stored) -> int:
    """Keys that are copied at a time; 0 where they are read where they lie."""
    if (k.storage == k.dtype and k.contiguous) or (k.pairs if k.many else k.in_registers):
        return 0
    tile = KEYS if k.many else LANES
    return max(tile, STRIP // k.row_bytes // tile * tile)


def v_strip(v: Stored) -> int:
    """Values that are copied at a time; 0 where they are read where they lie."""
    if v.many:
        fits = v.in_registers and fits_panels(v.storage, v.width)
        return 0 if fits else max(4, STRIP // v.row_bytes)
    return 0 if v.in_registers else strip_keys(v.row_bytes)


def _multiplies_pairs(k: Stored) -> bool:
    """Whether scores are sums of pairs of bfloat16 products, which is exact only for queries of that type too."""
    fits = k.dtype == "float32" and k.in_registers and k.width % 2 == 0
    return fits and knows_pairs(k.storage, k.width, k.many)


def _is_looked_up(each: Stored) -> bool:
    if each.pairs:
        return each.storage in LOOKED_UP
    return each.in_registers and not each.many and looks_up(each.storage, each.width, pairs=False)


def knows_pairs(storage: str, width: int, many: bool) -> bool:
    """Whether this processor multiplies pairs of bfloat16, and may, and gains by it, and can read the type as such.

    Keys of 8 bits are looked up, but not for many rows.
    """
    known = _may_use("avx512bf16") and _multiplies_pairs_quickly() and binding.llvm_version_info >= (16,)
    return known and (storage == "bfloat16" or (looks_up(storage, width, True) and not many))


def looks_up(storage: str, width: int, pairs: bool) -> bool:
    """Whether this processor looks numbers up, and may, and gains by it: to widen the others is as fast."""
    gains = storage in LOOKED_UP if pairs else storage in UNITS
    return gains and width % STEP == 0 and _may_use("avx512vbmi")


def _multiplies_pairs_quickly() -> bool:
    """Whether pairs of bfloat16 are a gain, or asked for: Intel's processors take four times as long as for floats."""
    return ZEN or os.environ.get(PORTABLE_VARIABLE) == "0"


def _may_use(feature: str) -> bool:
    wanted = os.environ.get(PORTABLE_VARIABLE, "0") != "1"
    return wanted and LANES == 16 and has_feature(feature)


def parts_of(spec: Spec) -> dict[str, Part]:
    """Give the parts that a call needs, by their names in `treeattn.kernels.call.Call`; calling one compiles it."""
    (k, v), double = stored(spec), spec.state_dtype == "float64"
    parts = _for_many(k, v) if k.many else _for_few(k, v)
    if spec.positional or spec.mask is not None:
        parts["see"] = visibility.see_double if double else visibility.see_single
    for name, each, strip in (("widen_k", k, k_strip(k)), ("widen_v", v, v_strip(v))):
        if strip:
            parts[name] = _widening(each)
    return parts


def _for_few(k: Stored, v: Stored) -> dict[str, Part]:
    how = AS_PAIRS if k.pairs else FOUND if k.looked_up else WIDENED
    return {
        "scores": scores_of(k.storage, k.width, how) if k.in_registers else scores_of(k.dtype, 0, WIDENED),
        "weigh": softmax.weigh_double if k.dtype == "float64" else softmax.weigh_single,
        "values": values_of(v.storage, v.width, looked_up=v.looked_up)
        if v.in_registers
        else values_of_any_width(v.dtype),
    }


def _for_many(k: Stored, v: Stored) -> dict[str, Part]:
    return {
        "scores": many_scores_of(KINDS[2] if k.pairs else k.dtype),
        "weigh": many_softmax.many_weigh_double if k.dtype == "float64" else many_softmax.many_weigh_single,
        "values": many_values_of(v.dtype if v_strip(v) else v.storage),
    }


def _widening(each: Stored) -> Part:
    if each.many and each.in_registers and each.storage != each.dtype:
        return widen.widen_rows_of(each.storage)
    return widen.widen_double if each.dtype == "float64" else widen.widen_single


def specialisations() -> Iterator[tuple[str, Part]]:
    """Give the name of every part that a call on this processor may need, and the function that compiles it.

    Examples
    --------
    >>> from treeattn.kernels.specialisations import specialisations
    >>> "scores of bfloat16, width 128" in dict(specialisations())
    True
    """
    of_modules = ((softmax, "weigh"), (many_softmax, "many_weigh"), (visibility, "see"), (widen, "widen"))
    for module, names in of_modules:
        for precision in ("single", "double"):
            yield f"{names.replace('_', ' ')} {precision}", getattr(module, f"{names}_{precision}")
    for dtype in ("float32", "float64"):
        yield f"scores of {dtype}, any width", scores_of(dtype, 0, WIDENED)
        yield f"values of {dtype}, any width", values_of_any_width(dtype)
    for kind in KINDS[: 3 if knows_pairs("bfloat16", 2, True) else 2]:
        yield f"scores of {kind} for many rows", many_scores_of(kind)
    for storage in READ:
        yield f"values of {storage} for many rows", many_values_of(storage)
    for storage in filter(can_widen, STORAGES[2:]):
        yield f"widened rows of {storage}", widen.widen_rows_of(storage)
    for storage, width in product(STORAGES, COMMON_WIDTHS):
        if can_widen(storage):
            yield f"scores of {storage}, width {width}", scores_of(storage, width, WIDENED)
            yield f"values of {storage}, width {width}", values_of(storage, width, looked_up=False)
            if looks_up(storage, width, pairs=False):
                yield f"scores of {storage}, looked up, width {width}", scores_of(storage, width, FOUND)
                yield f"values of {storage}, looked up, width {width}", values_of(storage, width, looked_up=True)
            if knows_pairs(storage, width, False):
                yield f"scores of {storage} for bfloat16 queries, width {width}", scores_of(storage, width, AS_PAIRS)
