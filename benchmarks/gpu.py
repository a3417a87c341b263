"""Decoding on the card that is here, against the card's own streaming read. Not yet run on a card.

    python benchmarks/gpu.py [--keys N ...] [--json FILE]

bfloat16, 8 KV heads for 32 query heads, D = 128, one query. Per context length: device time of the local part (one
launch), the same replayed from a graph, its share of the rate at which a plain kernel reads the same bytes in the same
minute, and the error against float64 in the first KV head. K and V are rotated so that no call finds them in the L2
cache. The fewest keys show what a launch costs at all.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_timing import COLD_BYTES, best_read, microseconds, normal, report

import treeattn
from treeattn.arguments.devices import fetch
from treeattn.backends import registry
from treeattn.graphs import capture
from treeattn.testing.oracle import dense

KV_HEADS, GROUP, WIDTH = 8, 4, 128
KEYS = (128, 4096, 32768, 131072, 524288)


def the_backend() -> Any:
    """Give the backend of the card that is here, or end with the reasons why there is none."""
    reasons = {name: registry.load(name).reasons() for name in ("nvidia", "amd")}
    for name, found in reasons.items():
        if not found:
            return registry.load(name)
    raise SystemExit("\n".join(f"{name}: {'; '.join(found)}" for name, found in reasons.items()))


def bytes_read(keys: int) -> int:
    """Bytes of K and V."""
    return 2 * 2 * KV_HEADS * keys * WIDTH


def inputs(cupy: Any, keys: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """Give q, and so many caches that each has left the card's own cache when its turn comes again."""
    shape, count = (1, KV_HEADS, keys, WIDTH), max(2, -(-COLD_BYTES // bytes_read(keys)))
    caches = [(normal(cupy, shape), normal(cupy, shape)) for _ in range(min(count, 64))]
    return normal(cupy, (1, KV_HEADS * GROUP, 1, WIDTH)), caches


def error_of(out: Any, q: Any, k: Any, v: Any) -> float:
    """Largest error in the first KV head, relative to the largest element; ``out`` is NumPy's, (1, heads, 1, width)."""
    first = [fetch(array[:, :heads]).astype(np.float32) for array, heads in ((q, GROUP), (k, 1), (v, 1))]
    right = dense(*first).out
    return float(np.abs(out[:, :GROUP].astype(np.float64) - right).max() / np.abs(right).max())


def measure(backend: Any, keys: int) -> dict[str, Any]:
    """Time one context length."""
    cupy = importlib.import_module("cupy")
    q, caches = inputs(cupy, keys)
    state = treeattn.partial_attention(q, *caches[0], backend=backend)
    took = microseconds(
        cupy, [lambda k=k, v=v: treeattn.partial_attention(q, k, v, backend=backend, out=state) for k, v in caches]
    )
    read = best_read(cupy, caches, backend.runtime.multiprocessors)
    lengths = cupy.full(1, keys, "int64")
    replays: list[Any] = [capture(q, k, v, kv_len=lengths, backend=backend) for k, v in caches[:8]]
    row = {"keys": keys, "us": took, "us from a graph": microseconds(cupy, replays), "us of a read": read}
    out = fetch(treeattn.partial_attention(q, *caches[0], backend=backend).finish())
    rates = {"TB/s": bytes_read(keys) / took / 1e6, "share of read": read / took}
    return {**row, **rates, "error": error_of(out, q, *caches[0])}


def rows(
    measure: Callable[[Any, int], dict[str, Any]], backend: Any, lengths: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Measure each length, whatever becomes of the others."""
    for keys in lengths:
        try:
            yield measure(backend, keys)
        except Exception as error:  # whatever a driver throws, the other lengths are still worth knowing
            yield {"keys": keys, "failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, action="append", help="keys in the cache; may be repeated")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    report(rows(measure, the_backend(), tuple(arguments.keys or KEYS)), arguments.json)


if __name__ == "__main__":
    main()
