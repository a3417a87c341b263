"""Decoding on the card that is here, against the card's own streaming read. Not yet run on a card.

    python benchmarks/gpu.py [--keys N ...] [--json FILE]

Per context length: device time of the local part (one launch), its share of the rate at which a plain reduction reads
the same bytes in the same minute, and the error against float64 in the first KV head. K and V are rotated so that
no call finds them in the L2 cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treeattn
from treeattn.backends import registry
from treeattn.backends.base import Backend
from treeattn.testing.oracle import dense

KV_HEADS, GROUP, WIDTH = 8, 4, 128
COLD_BYTES = 2**30
"""Bytes between two uses of the same keys: several times the largest L2 cache."""

REPEATS = 50


def the_backend() -> Backend:
    """Give the backend of the card that is here, or end with the reasons why there is none."""
    reasons = {name: registry.load(name).reasons() for name in ("nvidia", "amd")}
    for name, found in reasons.items():
        if not found:
            return registry.load(name)
    raise SystemExit("\n".join(f"{name}: {'; '.join(found)}" for name, found in reasons.items()))


def microseconds(cupy: Any, calls: list[Callable[[], object]]) -> float:
    """Median device time of one call, each timed by events on the current stream."""
    for call in calls:
        call()
    times = []
    for i in range(REPEATS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(times))


def measure(backend: Backend, keys: int) -> dict[str, float]:
    """Time one context length."""
    cupy = importlib.import_module("cupy")
    dtype = importlib.import_module("ml_dtypes").bfloat16
    shape = (1, KV_HEADS, keys, WIDTH)
    size = 2 * int(np.prod(shape)) * 2
    q = cupy.random.standard_normal((1, KV_HEADS * GROUP, 1, WIDTH), dtype="float32").astype(dtype)
    caches = [
        [cupy.random.standard_normal(shape, dtype="float32").astype(dtype) for _ in "kv"]
        for _ in range(max(2, -(-COLD_BYTES // size)))
    ]
    state = treeattn.partial_attention(q, *caches[0], backend=backend)
    ours = [lambda k=k, v=v: treeattn.partial_attention(q, k, v, backend=backend, out=state) for k, v in caches]
    reads = [lambda k=k, v=v: (k.view("uint32").max(), v.view("uint32").max()) for k, v in caches]
    took, read = microseconds(cupy, ours), microseconds(cupy, reads)
    k, v = (array[:, :1].get() for array in caches[0])
    out = treeattn.partial_attention(q, *caches[0], backend=backend).finish().get()[:, :GROUP]
    right = dense(q[:, :GROUP].get().astype(np.float32), k, v).out
    error = float(np.abs(out - right).max() / np.abs(right).max())
    return {"keys": keys, "us": took, "TB/s": size / took / 1e6, "share of read": read / took, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, action="append", help="keys in the cache; may be repeated")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    backend = the_backend()
    rows = [measure(backend, keys) for keys in arguments.keys or (128, 4096, 32768, 131072, 524288)]
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
