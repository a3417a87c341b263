"""The kernels' text: files put together for compilers that have no include path, and the constants they share."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from treeattn.kernels import exponential, wire_rows
from treeattn.kernels.gpu.targets import Target

__all__ = ["MAX_SOURCES", "MAX_SPLITS", "THREADS", "state_defines", "store_defines", "text"]

THREADS = 128
"""Threads of a block: four waves of 32 or two of 64."""

MAX_SPLITS = 256
"""Splits of one tile of rows; the block that merges them has room for the statistics of so many."""

MAX_SOURCES = 256
"""States that one launch merges; their addresses are passed by value."""

_INCLUDE = re.compile(r'^#include "(\w+\.cu)"\n', re.MULTILINE)


@cache
def text(name: str) -> str:
    """Give the text of ``vector.cu``, ``matrix.cu``, ``states.cu`` or ``store.cu``, each included file in it once."""
    return _expand(name, set())


def _expand(name: str, done: set[str]) -> str:
    done.add(name)
    written = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: "" if found[1] in done else _expand(found[1], done), written)


def store_defines(target: Target) -> dict[str, str]:
    """Give the constants of ``store.cu``."""
    return {"TA_THREADS": str(THREADS), **target.defines()}


def state_defines() -> dict[str, str]:
    """Give the constants of ``states.cu``: the CPU's very numbers, bit for bit."""
    return {
        "TA_THREADS": str(THREADS),
        "TA_SOURCES": str(MAX_SOURCES),
        "TA_EXP_TERMS": ",".join(map(float.hex, exponential.EXP_TERMS)),
        "TA_LOG_TERMS": ",".join(map(float.hex, exponential.LOG_TERMS)),
        "TA_LOG2E_DOUBLE": exponential.LOG2E.hex(),
        "TA_LN2": exponential.LN2.hex(),
        "TA_LN2_HIGH": exponential.LN2_HIGH.hex(),
        "TA_LN2_LOW": exponential.LN2_LOW.hex(),
        "TA_ROUNDER": exponential.ROUNDER.hex(),
        "TA_SQRT_HALF_BITS": f"{exponential.SQRT_HALF_BITS}LL",
        "TA_SMALLEST_NORMAL": (2.0**-1022).hex(),
        "TA_LOG2E_HIGH": wire_rows.LOG2E_HIGH.hex(),
        "TA_LOG2E_MIDDLE": wire_rows.LOG2E_MIDDLE.hex(),
        "TA_LOG2E_LOW": wire_rows.LOG2E_LOW.hex(),
        "TA_UPPER_HALF": f"{wire_rows.UPPER_HALF}LL",
        "TA_FARTHEST": wire_rows.FARTHEST.hex(),
    }
