"""The same decode step by treeattn, by PyTorch's attention and by plain CuPy, on one card. Not yet run on a card.

    python benchmarks/gpu_peers.py [--keys N ...] [--json FILE]

bfloat16, 8 KV heads for 32 query heads, D = 128, one query: device time by events, K and V rotated so that no call
finds them in the cache, the median of 50 calls of each. PyTorch chooses its own kernel, and is asked for FlashAttention
alone too. Errors are against float64 in the first KV head. Whoever is not installed is left out, and said to be.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu import COLD_BYTES, GROUP, KV_HEADS, WIDTH, microseconds, the_backend

import treeattn
from treeattn.testing.oracle import dense, on_host


def inputs(keys: int) -> tuple[Any, list[tuple[Any, Any]]]:
    """Give q and enough caches that each is out of the card's own cache when its turn comes again."""
    cupy, dtype = importlib.import_module("cupy"), importlib.import_module("ml_dtypes").bfloat16

    def normal(heads: int, tokens: int) -> Any:
        return cupy.random.standard_normal((1, heads, tokens, WIDTH), dtype="float32").astype(dtype)

    size = 2 * 2 * KV_HEADS * keys * WIDTH
    caches = [(normal(KV_HEADS, keys), normal(KV_HEADS, keys)) for _ in range(max(2, -(-COLD_BYTES // size)))]
    return normal(KV_HEADS * GROUP, 1), caches


def contenders(q: Any, caches: list[tuple[Any, Any]]) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Give each one's calls, by name."""
    backend = the_backend()
    yield "treeattn", [lambda k=k, v=v: treeattn.attention(q, k, v, backend=backend) for k, v in caches]
    yield "CuPy", [lambda k=k, v=v: plain(q, k, v) for k, v in caches]
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        print(f"PyTorch is left out: {error}")
        return
    sdpa = torch.nn.functional.scaled_dot_product_attention
    tensors = [tuple(torch.from_dlpack(each.view("uint16")).view(torch.bfloat16) for each in (q, *c)) for c in caches]
    yield "PyTorch", [lambda t=t: sdpa(*t, enable_gqa=True) for t in tensors]
    attention = importlib.import_module("torch.nn.attention")

    def flash(t: Any) -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return sdpa(*t, enable_gqa=True)

    yield "PyTorch, FlashAttention", [lambda t=t: flash(t) for t in tensors]


def plain(q: Any, k: Any, v: Any) -> Any:
    """Attention by whole products, as one writes it without a kernel."""
    cupy = importlib.import_module("cupy")
    grouped = q.astype("float32").reshape(1, KV_HEADS, GROUP, WIDTH) * np.float32(WIDTH**-0.5)
    logits = grouped @ k.astype("float32").swapaxes(2, 3)
    weights = cupy.exp(logits - logits.max(-1, keepdims=True))
    return (weights @ v.astype("float32")) / weights.sum(-1, keepdims=True)


def error_of(out: Any, q: Any, k: Any, v: Any) -> float:
    """Largest error in the first KV head, relative to the largest element."""
    first = on_host(out.float().cpu() if hasattr(out, "cpu") else out).astype(np.float64)
    got = first.reshape(1, KV_HEADS * GROUP, 1, WIDTH)[:, :GROUP]
    right = dense(*(on_host(array[:, :heads]).astype(np.float32) for array, heads in ((q, GROUP), (k, 1), (v, 1)))).out
    return float(np.abs(got - right).max() / np.abs(right).max())


def measure(keys: int) -> list[dict[str, Any]]:
    """Time every contender at one context length."""
    cupy = importlib.import_module("cupy")
    q, caches = inputs(keys)
    rows = []
    for name, calls in contenders(q, caches):
        try:
            took = microseconds(cupy, calls)
        except RuntimeError as error:  # PyTorch has no such kernel for this card
            print(f"{name} is left out: {error}")
            continue
        rate = 2 * 2 * KV_HEADS * keys * WIDTH / took / 1e6
        rows.append({"who": name, "keys": keys, "us": took, "TB/s": rate, "error": error_of(calls[0](), q, *caches[0])})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, action="append", help="keys in the cache; may be repeated")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    the_backend()  # which ends with the reasons where there is no card
    rows = [row for keys in arguments.keys or (4096, 32768, 131072) for row in measure(keys)]
    for row in rows:
        print("  ".join(f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
