"""Which kernel a call gets, compiled how: from a ``Spec`` to a `Specialisation`, by rule and without a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treeattn.inputs import Spec
from treeattn.kernels.gpu.source import MAX_SPLITS, THREADS
from treeattn.kernels.gpu.targets import Target

__all__ = ["REGISTERS_PER_BLOCK_SLOT", "TYPES", "Specialisation", "choose"]

TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4, "int8": 5}
"""Numbers of the stored types in ``types.cu``."""

REGISTERS_PER_BLOCK_SLOT = 65536 // THREADS
"""32-bit registers of an NVIDIA multiprocessor for each thread of one block."""

MATRIX_WIDTH = {"mma": 128, "mfma": 128, "wmma12": 128, "wmma11": 64}
"""Widest row whose fragments and sums fit the registers; wider ones take the vector kernel. RDNA3 holds every
fragment twice, so that rows of 128 spill; its memory is slow enough for the vector kernel to keep up."""

MATRIX_ROWS = 8
"""Queries of one tensor-core tile; the instruction's other eight rows carry low-order parts."""

LANE_ELEMENTS = {"cuda": 128, "hip": 64}
"""Elements of q and o that one lane holds at most, where a tile of fewer rows can avoid more; clang's code for AMD
spills to memory with as many as NVIDIA's compiler still keeps."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Specialisation:
    """Everything that is compiled into a kernel; equal ones share their code.

    Parameters
    ----------
    kernel : "vector" or "matrix"
    target : Target
    k_type, v_type : str
        Storage types.
    d, dv : int
        Widths of K and V.
    rows : int
        Query rows of one tile: a block reads its keys once for all of them.
    team, unroll : int
        Lanes that own a row of K, and rows that a team takes at once (vector kernel).
    k_wide, v_wide : bool
        Whether rows may be read 16 bytes at a time: aligned, without gaps, a multiple of 16 bytes wide.
    positions, softcap, k_scaled, v_scaled : bool
    mask : 0, 1 or 2
        None, bool, float.
    blocks : int
        Blocks that an NVIDIA multiprocessor must be able to hold, which bounds the registers.
    """

    kernel: Literal["vector", "matrix"]
    target: Target
    k_type: str
    v_type: str
    d: int
    dv: int
    rows: int
    team: int
    unroll: int
    k_wide: bool = True
    v_wide: bool = True
    positions: bool = False
    mask: int = 0
    softcap: bool = False
    k_scaled: bool = False
    v_scaled: bool = False
    blocks: int = 1

    @property
    def step(self) -> int:
        """Keys that a block takes at once."""
        if self.kernel == "matrix":
            return THREADS // self.target.wave * 16
        return THREADS // self.team * self.unroll

    @property
    def registers(self) -> int:
        """Registers that a thread may have on NVIDIA's cards, by the launch bounds."""
        return min(REGISTERS_PER_BLOCK_SLOT // self.blocks // 8 * 8, 255)

    @property
    def part(self) -> int:
        """Floats that one split of one tile leaves for the block that merges."""
        return -(-self.rows * (self.dv + 2) // 4) * 4

    def defines(self) -> dict[str, str]:
        """Give the macros that the kernel's text expects."""
        numbers = {
            "TA_K_TYPE": TYPES[self.k_type],
            "TA_V_TYPE": TYPES[self.v_type],
            "TA_D": self.d,
            "TA_DV": self.dv,
            "TA_ROWS": self.rows,
            "TA_TEAM": self.team,
            "TA_UNROLL": self.unroll,
            "TA_K_WIDE": self.k_wide,
            "TA_V_WIDE": self.v_wide,
            "TA_POSITIONS": self.positions,
            "TA_MASK": self.mask,
            "TA_SOFTCAP": self.softcap,
            "TA_K_SCALED": self.k_scaled,
            "TA_V_SCALED": self.v_scaled,
            "TA_BLOCKS": self.blocks,
            "TA_THREADS": THREADS,
            "TA_MAX_SPLITS": MAX_SPLITS,
        }
        return {**{name: str(int(value)) for name, value in numbers.items()}, **self.target.defines()}


def choose(spec: Spec, target: Target, *, k_wide: bool = True, v_wide: bool = True) -> Specialisation:
    """Give the specialisation for ``spec``.

    Parameters
    ----------
    spec : Spec
    target : Target
    k_wide, v_wide : bool
        Whether this call's addresses and strides allow loads of 16 bytes; `is_wide` in ``call.py`` says so.
    """
    common = {
        "target": target,
        "k_type": spec.kv.k_dtype,
        "v_type": spec.kv.v_dtype,
        "d": spec.head_dim,
        "dv": spec.v_head_dim,
        "k_wide": k_wide,
        "v_wide": v_wide,
        "positions": spec.positional,
        "mask": {None: 0, "bool": 1, "float": 2}[spec.mask],
        "softcap": spec.softcap is not None,
        "k_scaled": spec.kv.k_scaled,
        "v_scaled": spec.kv.v_scaled,
    }
    if k_wide and v_wide and _fits_matrix(spec, target):
        blocks = _matrix_blocks(spec)
        return Specialisation("matrix", rows=MATRIX_ROWS, team=target.wave, unroll=1, blocks=blocks, **common)  # type: ignore[arg-type]
    shape = _vector_shape(spec, target, k_wide and v_wide)
    return Specialisation("vector", **common, **shape)  # type: ignore[arg-type]


def _fits_matrix(spec: Spec, target: Target) -> bool:
    """Four rows or more make the tensor cores worth it; q must fit two numbers of K's type."""
    kv = spec.kv
    exact = spec.q_dtype == kv.k_dtype or (kv.k_dtype == "bfloat16" and spec.q_dtype in ("float32", "float16"))
    sixteen = kv.k_dtype == kv.v_dtype and kv.k_dtype in ("bfloat16", "float16")
    plain = not (kv.k_scaled or kv.v_scaled)
    if target.matrix is None or not (exact and sixteen and plain) or spec.group * spec.q_tokens < 4:
        return False
    return max(spec.head_dim, spec.v_head_dim) <= MATRIX_WIDTH[target.matrix]


def _matrix_blocks(spec: Spec) -> int:
    """As many as leave the registers that the kernel needs without spilling: the checks hold it to that."""
    if max(spec.head_dim, spec.v_head_dim) <= 64:
        return 3
    whole = spec.head_dim % 32 == 0 and spec.v_head_dim % 64 == 0
    return 3 if whole and not (spec.positional or spec.mask or spec.softcap) else 2


def _vector_shape(spec: Spec, target: Target, wide: bool) -> dict[str, int]:
    k_each, v_each = 16 // _BYTES[spec.kv.k_dtype], 16 // _BYTES[spec.kv.v_dtype]
    loads = -(-spec.head_dim // k_each), -(-spec.v_head_dim // v_each)
    team = min((2**i for i in range(5, -1, -1)), key=lambda lanes: _team_cost(loads, lanes))
    k_pieces, v_pieces = (-(-n // team) for n in loads)
    elements = k_pieces * k_each + v_pieces * v_each
    rows = 1
    while rows < min(spec.group * spec.q_tokens, 8) and 2 * rows * elements <= LANE_ELEMENTS[target.dialect]:
        rows *= 2
    held = 4 * (k_pieces + v_pieces) if wide else elements  # registers of one row on its way
    unroll = 4 if held <= 8 else 2 if held <= 16 else 1
    if target.dialect == "hip" and rows * elements > 32:
        unroll = min(unroll, 2)
    registers = rows * elements + unroll * held + rows * unroll + 36
    blocks = max(1, min(REGISTERS_PER_BLOCK_SLOT // registers, 8))
    return {"team": team, "rows": rows, "unroll": unroll, "blocks": blocks}


def _team_cost(loads: tuple[int, int], lanes: int) -> float:
    """Share of the lanes' loads that would fall behind the row's end, and a tenth for each load more than one."""
    pieces = [-(-n // lanes) for n in loads]
    idle = 1 - sum(loads) / (lanes * sum(pieces))
    return idle + (sum(pieces) - 2) / 10
