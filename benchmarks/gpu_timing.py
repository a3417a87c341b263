"""How work on a card is timed, and how fast the card reads. Not yet run on a card."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["COLD_BYTES", "best_read", "microseconds", "normal", "report"]

COLD_BYTES = 2**30
"""Bytes between two uses of the same keys: several times the largest L2 cache."""

REPEATS = 50
HELD_CYCLES = 2_000_000
"""About a millisecond in which the card is kept busy while Python starts what is timed behind it."""

TEXT = """
struct alignas(16) quad { unsigned x, y, z, w; };

extern "C" __global__ void hold(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

extern "C" __global__ void read_all(const quad* from, long long quads, unsigned* never) {
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned seen = 0;
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 7 * step < quads; at += 8 * step) {
    quad found[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) found[i] = from[at + i * step];
#pragma unroll
    for (int i = 0; i < 8; ++i) seen ^= found[i].x ^ found[i].y ^ found[i].z ^ found[i].w;
  }
  for (; at < quads; at += step) seen ^= from[at].x ^ from[at].y ^ from[at].z ^ from[at].w;
  if (seen == 0x9e3779b9u) *never = seen;
}
"""


def kernel(cupy: Any, name: str) -> Any:
    """Compile one of the two kernels above; CuPy keeps it."""
    return cupy.RawModule(code=TEXT, options=("-std=c++17",)).get_function(name)


def microseconds(cupy: Any, calls: list[Callable[[], object]]) -> float:
    """Median device time of one call, between two events on the current stream.

    The card is held until Python has queued a call: else a short one would be timed with the launch that it waits for.
    """
    hold = kernel(cupy, "hold")
    for call in calls:
        call()
    times = []
    for i in range(REPEATS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        hold((1,), (1,), (np.int64(HELD_CYCLES),))
        start.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(times))


def best_read(cupy: Any, caches: list[tuple[Any, Any]], processors: int) -> float:
    """Microseconds in which the card reads a K and a V: by a plain kernel, with the number of blocks that suits it."""
    read, never = kernel(cupy, "read_all"), cupy.zeros(1, "uint32")

    def reads(blocks: int) -> list[Callable[[], object]]:
        def both(pair: tuple[Any, Any]) -> None:
            for array in pair:
                read((blocks,), (256,), (array, np.int64(array.nbytes // 16), never))

        return [lambda pair=pair: both(pair) for pair in caches]

    return min(microseconds(cupy, reads(processors * each)) for each in (4, 8, 16, 32))


def normal(cupy: Any, shape: tuple[int, ...]) -> Any:
    """Draw normal numbers in bfloat16, rounded by hand: older CuPy can't convert."""
    bits = cupy.random.standard_normal(shape, dtype="float32").view("uint32")
    return (
        ((bits + np.uint32(2**15)) >> np.uint32(16))
        .astype("uint16")
        .view(importlib.import_module("ml_dtypes").bfloat16)
    )


def report(rows: Iterable[dict[str, Any]], file: Path | None) -> None:
    """Print each row as it comes, and keep what has come so far in ``file``: a run may be cut off."""
    kept = []
    for row in rows:
        kept.append(row)
        print("  ".join(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in row.items()))
        if file:
            file.write_text(json.dumps(kept, indent=1) + "\n")
