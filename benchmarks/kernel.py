"""How fast the kernel is, as a share of what the memory can deliver, beside NumPy and PyTorch.

    python benchmarks/kernel.py [--json FILE] [--threads N] [--tokens N] [--seconds S] [--dtype NAME]

The memory's speed drifts by a factor of 2 and more on shared machines, so a plain time says nothing. Every sample is a
sandwich: a streaming read over the same bytes, the call, and the read again; what counts is read time over call time.
Samples are dropped when their two reads differ by more than a quarter. Several sets of K and V are used in turn, so
that none is still in the cache. Each peer runs in a process of its own, one at a time, and its answer is checked.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import click
import numpy as np

PEERS = ("treeattn", "numpy", "torch")
DRIFT = 0.25
"""Largest difference of a sample's two reads, as a share of the shorter."""

APART = 600_000_000
"""Bytes read between two uses of the same keys."""

SHORTEST = 0.025
"""Seconds that each part of a sample takes at least; calls are repeated to reach it."""


@dataclass(frozen=True)
class Shape:
    """What is computed, and with what."""

    q_heads: int = 32
    kv_heads: int = 8
    width: int = 128
    tokens: int = 131_072
    dtype: str = "float32"
    threads: int = 2

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads} heads, width {self.width}, {self.tokens} tokens, {self.dtype}"


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Write the figures there.")
@click.option("--threads", default=2, show_default=True)
@click.option("--tokens", default=131_072, show_default=True)
@click.option("--q-heads", default=32, show_default=True)
@click.option("--kv-heads", default=8, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--seconds", default=8.0, show_default=True, help="Time for each peer.")
@click.option("--peer", type=click.Choice(PEERS), hidden=True, help="Be this peer: print one line of JSON.")
def main(
    path: str | None,
    threads: int,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    dtype: str,
    seconds: float,
    peer: str | None,
) -> None:
    shape = Shape(q_heads=q_heads, kv_heads=kv_heads, tokens=tokens, dtype=dtype, threads=threads)
    if peer:
        click.echo(json.dumps(measure(peer, shape, seconds)))
        return
    rows = [run_peer(name, shape, seconds) for name in PEERS]
    print_table(shape, rows)
    if path:
        with open(path, "w") as file:
            json.dump({"date": str(date.today()), "machine": machine(), **asdict(shape), "rows": rows}, file, indent=2)


def run_peer(name: str, shape: Shape, seconds: float) -> dict[str, Any]:
    """Measure one peer in a fresh process."""
    command = [sys.executable, __file__, "--peer", name, "--seconds", str(seconds), "--tokens", str(shape.tokens)]
    command += ["--threads", str(shape.threads), "--dtype", shape.dtype]
    command += ["--q-heads", str(shape.q_heads), "--kv-heads", str(shape.kv_heads)]
    count = str(shape.threads)
    variables = {"TREEATTN_THREADS": count, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"peer": name, "absent": reason}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def print_table(shape: Shape, rows: list[dict[str, Any]]) -> None:
    click.echo(f"{shape}, {shape.threads} threads, {machine()}, {date.today()}")
    click.echo(f"{'peer':10} {'ms':>9} {'GB/s':>7} {'% of a read':>12} {'samples':>8} {'error':>9}")
    for row in rows:
        if "absent" in row:
            click.echo(f"{row['peer']:10} absent: {row['absent']}")
            continue
        click.echo(
            f"{row['peer']:10} {row['ms']:9.2f} {row['gb_per_s']:7.1f} {100 * row['share']:12.0f} "
            f"{row['kept']:3} of {row['taken']:<3} {row['error']:9.1e}"
        )


def machine() -> str:
    """Name of the processor, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()} ({os.cpu_count()} processors)"


def measure(name: str, shape: Shape, seconds: float) -> dict[str, Any]:
    """Take samples for some seconds."""
    q, sets = inputs(shape)
    call = {"treeattn": treeattn_peer, "numpy": numpy_peer, "torch": torch_peer}[name](q, sets)
    size = sum(array.nbytes for array in sets[0])
    error = largest_error(call(0), q, *sets[0])
    read(sets[0], shape.threads)
    samples, end, index = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < end or not samples:
        samples.append(sample(call, sets, index, shape.threads))
        index += 1
    kept = [s for s in samples if abs(s[0] - s[2]) <= DRIFT * min(s[0], s[2])] or samples
    return {
        "peer": name,
        "ms": 1e3 * statistics.median(s[1] for s in kept),
        "gb_per_s": size / statistics.median(s[1] for s in kept) / 1e9,
        "share": statistics.median((s[0] + s[2]) / 2 / s[1] for s in kept),
        "read_gb_per_s": size / statistics.median((s[0] + s[2]) / 2 for s in kept) / 1e9,
        "kept": len(kept),
        "taken": len(samples),
        "error": error,
    }


def inputs(shape: Shape) -> tuple[Any, list[tuple[Any, Any]]]:
    """Make queries, and as many sets of keys and values as keep each out of the cache."""
    from treeattn.arrays import narrow_dtype

    rng, dtype = np.random.default_rng(0), narrow_dtype(shape.dtype)
    kv = (1, shape.kv_heads, shape.tokens, shape.width)
    count = 1 + math.ceil(APART / (2 * math.prod(kv) * dtype.itemsize))
    q = rng.standard_normal((1, shape.q_heads, 1, shape.width), dtype=np.float32).astype(dtype)
    one = [rng.standard_normal(kv, dtype=np.float32).astype(dtype) for _ in "kv"]
    return q, [(one[0].copy(), one[1].copy()) for _ in range(count)]


def sample(call: Callable[[int], Any], sets: list[tuple[Any, Any]], index: int, threads: int) -> tuple[float, ...]:
    """Seconds per read, per call and per read again, each repeated over the sets in turn."""

    def timed(work: Callable[[int], Any]) -> float:
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < SHORTEST or not count:
            work((index + count) % len(sets))
            count += 1
        return (time.perf_counter() - start) / count

    return timed(lambda i: read(sets[i], threads)), timed(call), timed(lambda i: read(sets[i], threads))


def read(arrays: tuple[Any, Any], threads: int) -> None:
    """Read all bytes once, in order, on ``threads`` threads."""
    from treeattn.kernels.threads import run_on_threads

    pieces = [piece for array in arrays for piece in np.array_split(array.reshape(-1).view(np.int32), 4 * threads)]
    add = adder()

    def work() -> None:
        while pieces:
            try:
                add(pieces.pop())
            except IndexError:  # another thread took the last one
                return

    run_on_threads(work, threads)


def adder() -> Any:
    """Compiled sum of integers: nothing but loads at the width of the machine."""
    global _adder
    if _adder is None:
        import numba

        @numba.njit("int32(int32[::1])", nogil=True)
        def add(array: Any) -> Any:
            total = np.int32(0)
            for i in range(array.size):
                total += array[i]
            return total

        _adder = add
    return _adder


_adder: Any = None


def treeattn_peer(q: Any, sets: list[tuple[Any, Any]]) -> Callable[[int], Any]:
    import treeattn

    return lambda i: treeattn.attention(q, *sets[i])


def numpy_peer(q: Any, sets: list[tuple[Any, Any]]) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        k, v = sets[i]
        grouped = q.reshape(1, k.shape[1], -1, q.shape[3])
        logits = grouped @ k.swapaxes(2, 3) * q.dtype.type(q.shape[3] ** -0.5)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return (weights @ v / weights.sum(-1, keepdims=True)).reshape(q.shape)

    return call


def torch_peer(q: Any, sets: list[tuple[Any, Any]]) -> Callable[[int], Any]:
    import torch

    def tensor(array: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    tensors = [(tensor(k), tensor(v)) for k, v in sets]

    def call(i: int) -> Any:
        k, v = tensors[i]
        grouped = tensor(q).reshape(1, k.shape[1], -1, q.shape[3])
        weights = torch.softmax(grouped @ k.transpose(2, 3) * q.shape[3] ** -0.5, -1)
        return (weights @ v).reshape(q.shape).float().numpy()

    return call


def largest_error(out: Any, q: Any, k: Any, v: Any) -> float:
    """Largest error over the largest output, on the first two KV heads, against float64."""
    from treeattn.testing.oracle import dense

    heads = 2 * q.shape[1] // k.shape[1]
    right = dense(q[:, :heads], k[:, :2], v[:, :2]).out
    return float(np.max(np.abs(out[:, :heads].astype(np.float64) - right)) / np.max(np.abs(right)))


if __name__ == "__main__":
    main()
