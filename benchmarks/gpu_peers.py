"""The same decode step by treeattn, by PyTorch's attention and by plain CuPy, on one card. Not yet run on a card.

    python benchmarks/gpu_peers.py [--keys N ...] [--json FILE]

bfloat16, 8 KV heads for 32 query heads, D = 128, one query: device time by events, K and V rotated so that no call
finds them in the cache, the median of 50 calls of each. PyTorch chooses its own kernel, and is asked for FlashAttention
alone too. Errors are against float64 in the first KV head. Whoever is not installed is left out, and said to be.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu import GROUP, KV_HEADS, WIDTH, bytes_read, error_of, inputs, the_backend
from gpu_timing import microseconds, report

import treeattn
from treeattn.testing.oracle import on_host

KEYS = (4096, 32768, 131072)
Calls = list[Callable[[], Any]]


def contenders(q: Any, caches: list[tuple[Any, Any]]) -> dict[str, Callable[[], Calls]]:
    """Give what makes each one's calls, by name."""
    backend = the_backend()
    return {
        "treeattn": lambda: [lambda k=k, v=v: treeattn.attention(q, k, v, backend=backend) for k, v in caches],
        "CuPy": lambda: [lambda k=k, v=v: plain(q, k, v) for k, v in caches],
        "PyTorch": lambda: pytorch(q, caches),
        "PyTorch, FlashAttention": lambda: pytorch(q, caches, "FLASH_ATTENTION"),
    }


def pytorch(q: Any, caches: list[tuple[Any, Any]], only: str = "") -> Calls:
    """Give calls of PyTorch's attention, by its own choice of kernel or by one alone."""
    torch: Any = importlib.import_module("torch")
    chosen: Any = importlib.import_module("torch.nn.attention")

    def call(q: Any, k: Any, v: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        if not only:
            return attend(q, k, v, enable_gqa=True)
        with chosen.sdpa_kernel(getattr(chosen.SDPBackend, only)):
            return attend(q, k, v, enable_gqa=True)

    tensors = [tuple(torch.from_dlpack(each.view("int16")).view(torch.bfloat16) for each in (q, *c)) for c in caches]
    return [lambda t=t: call(*t) for t in tensors]


def plain(q: Any, k: Any, v: Any) -> Any:
    """Attention by whole products, as one writes it without a kernel."""
    cupy = importlib.import_module("cupy")
    grouped = q.astype("float32").reshape(1, KV_HEADS, GROUP, WIDTH) * np.float32(WIDTH**-0.5)
    logits = grouped @ k.astype("float32").swapaxes(2, 3)
    weights = cupy.exp(logits - logits.max(-1, keepdims=True))
    return (weights @ v.astype("float32")) / weights.sum(-1, keepdims=True)


def rows(keys: int) -> Iterator[dict[str, Any]]:
    """Time every contender at one context length."""
    cupy = importlib.import_module("cupy")
    q, caches = inputs(cupy, keys)
    for name, made in contenders(q, caches).items():
        try:
            calls = made()
            took = microseconds(cupy, calls)
            out = calls[0]()
            found = on_host(out.float().cpu() if hasattr(out, "cpu") else out).reshape(1, KV_HEADS * GROUP, 1, WIDTH)
            rates = {"us": took, "TB/s": bytes_read(keys) / took / 1e6, "error": error_of(found, q, *caches[0])}
            yield {"who": name, "keys": keys, **rates}
        except Exception as error:  # not installed, or no such kernel for this card: the others are still to come
            yield {"who": name, "keys": keys, "failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, action="append", help="keys in the cache; may be repeated")
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    arguments = parser.parse_args()
    the_backend()  # which ends with the reasons where there is no card
    report((row for keys in arguments.keys or KEYS for row in rows(keys)), arguments.json)


if __name__ == "__main__":
    main()
