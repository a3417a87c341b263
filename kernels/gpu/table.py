"""Which kernel a call gets, compiled how: from a ``Spec`` to a `Specialisation`, by rule and without a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treeattn.arguments.spec import Spec
from treeattn.kernels.gpu.source import MAX_SPLITS, THREADS
from treeattn.kernels.gpu.targets import Target

__all__ = ["REGISTERS_PER_BLOCK_SLOT", "TYPES", "Specialisation", "choose", "without_tensor_cores"]

TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4, "int8": 5}
"""Numbers of the stored types in ``types.cu``."""

REGISTERS_PER_BLOCK_SLOT = 65536 // THREADS
"""32-bit registers of an NVIDIA multiprocessor for each thread of one block."""

MATRIX_WIDTH = {"mma": (160, 128), "mfma": (128, 128), "wmma12": (144, 128), "wmma11": (64, 128)}
"""Widest parts of a row of K and of V that one wave takes; wider rows are cut over 2 or 4 waves of a block. RDNA3 holds
every fragment of K twice."""

MATRIX_LAST_WIDTH = {"mfma": (288, 256)}
"""The same where all waves of a block share a row already: CDNA has the registers, for one wave a SIMD unit then."""

MATRIX_MULTIPLE = {"wmma12": (64, 64), "wmma11": (128, 128)}
"""What widths must be a multiple of to be cut: clang spills where a wave's part ends within a load."""

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
    share : int
        Waves that a row is cut over (matrix kernel).
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
    share: int = 1

    @property
    def step(self) -> int:
        """Keys that a block takes at once."""
        if self.kernel == "matrix":
            return THREADS // self.target.wave // self.share * 16
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
            "TA_SHARE": self.share,
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
    kernel: Literal["vector", "matrix"] = "vector"
    if without_tensor_cores(spec, target, k_wide=k_wide, v_wide=v_wide):
        shape = _vector_shape(spec, target, k_wide and v_wide)
    else:
        kernel, shape = "matrix", _matrix_shape(spec, target)
    return Specialisation(kernel, **common, **shape)  # type: ignore[arg-type]


def without_tensor_cores(spec: Spec, target: Target, *, k_wide: bool = True, v_wide: bool = True) -> list[str]:
    """Say why a call takes the vector kernel; an empty list means that it takes the tensor cores."""
    kv, rows = spec.kv, spec.group * spec.q_tokens
    exact = spec.q_dtype == kv.k_dtype or (kv.k_dtype == "bfloat16" and spec.q_dtype in ("float32", "float16"))
    reasons = {
        f"{target.arch} has no matrix instruction that is used here": target.matrix is None,
        "K and V are not both bfloat16 or both float16": kv.k_dtype != kv.v_dtype or _BYTES[kv.k_dtype] != 2,
        f"two numbers of {kv.k_dtype} don't hold one of q, {spec.q_dtype}": not exact,
        "K and V have scales": kv.k_scaled or kv.v_scaled,
        f"{rows} query rows of a KV head are too few to pay, fewer than 4": rows < 4,
        "rows of K and V can't be read 16 bytes at a time": not (k_wide and v_wide),
        f"rows of {spec.head_dim} and {spec.v_head_dim} don't fit the registers of a block's waves": (
            target.matrix is not None and not _shares(spec, target)
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _shares(spec: Spec, target: Target) -> int:
    """Fewest waves, a power of two, that have room for a row between them; 0 where all of a block have not."""
    matrix, waves = target.matrix or "mma", THREADS // target.wave
    for share in (1, 2, 4)[: waves.bit_length()]:
        widths = MATRIX_LAST_WIDTH.get(matrix, MATRIX_WIDTH[matrix]) if share == waves else MATRIX_WIDTH[matrix]
        if spec.head_dim <= share * widths[0] and spec.v_head_dim <= share * widths[1]:
            return share if share == 1 or _divides(spec, MATRIX_MULTIPLE.get(matrix, (1, 1))) else 0
    return 0


def _divides(spec: Spec, multiples: tuple[int, int]) -> bool:
    return spec.head_dim % multiples[0] == spec.v_head_dim % multiples[1] == 0


def _matrix_shape(spec: Spec, target: Target) -> dict[str, int]:
    share = _shares(spec, target)
    blocks = _matrix_blocks(spec, share)
    return {"rows": MATRIX_ROWS, "team": target.wave, "unroll": 1, "blocks": blocks, "share": share}


def _matrix_blocks(spec: Spec, share: int) -> int:
    """As many as leave the registers that the kernel needs without spilling: the checks hold it to that."""
    if max(spec.head_dim, spec.v_head_dim) <= 64:
        return 3
    whole = spec.head_dim % 32 == 0 and spec.v_head_dim % 64 == 0 and share == 1 and spec.head_dim <= 128
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
