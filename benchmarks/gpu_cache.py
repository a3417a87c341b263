"""A cache in the memory of the card that is here: filling it, and decoding over it. Not yet run on a card.

    python benchmarks/gpu_cache.py [--keys N ...]

bfloat16, 8 KV heads for 32 query heads, D = 128, one process. Per context length: device time of adding the whole
prompt from the card and of adding it from the host, of appending one token, of a decode step, and of one for three
tokens, which needs positions; the time that Python and the card take for a step together; and the error against float64
in the first KV head.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

import numpy as np
from gpu import GROUP, KV_HEADS, WIDTH, error_of, rows, the_backend
from gpu_timing import microseconds, normal, report

import treeattn
from treeattn.arguments.devices import fetch

KEYS = (4096, 131072)
STEPS = 50


def tokens(cupy: Any, count: int) -> tuple[Any, Any]:
    """Give keys and values."""
    shape = (1, KV_HEADS, count, WIDTH)
    return normal(cupy, shape), normal(cupy, shape)


def empty(backend: Any, keys: int) -> treeattn.ShardedKVCache:
    """Give a cache with room for one token more."""
    shape = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": WIDTH}
    return treeattn.ShardedKVCache(None, **shape, dtype="bfloat16", capacity=keys + 1, backend=backend)


def measure(backend: Any, keys: int) -> dict[str, Any]:
    """Time one context length."""
    cupy = importlib.import_module("cupy")
    prompt, new, cache = tokens(cupy, keys), tokens(cupy, 1), empty(backend, keys)
    q, three = (normal(cupy, (1, KV_HEADS * GROUP, count, WIDTH)) for count in (1, 3))
    host = [fetch(each) for each in prompt]

    def add(at: int, pair: Any) -> None:
        cache.truncate(at)
        cache.append(*pair)

    row = {
        "keys": keys,
        "us to fill": microseconds(cupy, [lambda: add(0, prompt)]),
        "us from the host": microseconds(cupy, [lambda: add(0, host)]),
        "us to append": microseconds(cupy, [lambda: add(keys, new)]),
        "us to decode": microseconds(cupy, [lambda: cache.decode(q)]),
        "us for three": microseconds(cupy, [lambda: cache.decode(three)]),
    }
    whole = [np.concatenate([each, fetch(last)], axis=2) for each, last in zip(host, new, strict=True)]
    error = error_of(fetch(cache.decode(q)), q, *whole)
    return {**row, "us of a step in all": step_time(cupy, lambda: (add(keys, new), cache.decode(q))), "error": error}


def step_time(cupy: Any, step: Any) -> float:
    """Microseconds of a step, Python's and the card's, which overlap from step to step."""
    done = cupy.cuda.Event()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    done.record()
    done.synchronize()
    return 1e6 * (time.perf_counter() - start) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, action="append", help="keys in the cache; may be repeated")
    arguments = parser.parse_args()
    report(rows(measure, the_backend(), tuple(arguments.keys or KEYS)), None)


if __name__ == "__main__":
    main()
