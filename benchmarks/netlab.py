"""Measure the tree and four baselines between hosts, with the constants that a forecast of them needs.

    mpirun -n 4 --hostfile hosts --map-by node python benchmarks/netlab.py
    python benchmarks/netlab.py --compare benchmarks/netlab.json

With one rank per host it prints one JSON object: what a lone message and a lone kernel were measured to take, and every
algorithm's times. ``benchmarks/netlab.json`` holds such objects; its hosts were network namespaces of one machine, with
a wire of 1 and 10 ms between them. ``--compare`` prints them beside the forecast, and `tests/test_forecast.py` holds
the forecast to them. A step begins at the same moment on all ranks, whose clocks are one machine's, and takes as long
as its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treeattn
from treeattn.cli.contender import contender
from treeattn.cli.workload import Workload
from treeattn.costs.published import measured_step
from treeattn.launch import install_abort_hook
from treeattn.steps.wire import Wire
from treeattn.wrapping import team_of

ALGORITHMS = ("tree", "ring_query", "allreduce3", "ring", "dist_flash")
SHAPE = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "tokens": 512, "dtype": "float32"}
SIZES = (64, 60_000, 900_000, 1_000_000)
"""Bytes of messages to calibrate by: a short one, a longer one, one in many parts, and one for which MPI asks first."""

REPEATS = 7
HEAD_START = 0.03


def times(comm: treeattn.TreeComm, step: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Run a step on all ranks at once; give the milliseconds of the slowest for each repeat but the first."""
    own = []
    for _ in range(repeats + 1):
        ready = team_of(comm).consult("start", (), {"at": time.monotonic()})
        start = max(each["at"] for each in ready) + HEAD_START
        time.sleep(max(0.0, start - time.monotonic()))
        step()
        own.append(1e3 * (time.monotonic() - start))
    every = team_of(comm).consult("times", (), {"own": own})
    return [round(max(each), 3) for each in zip(*(rank["own"] for rank in every), strict=True)][1:]


def one_way(comm: treeattn.TreeComm, nbytes: int) -> float:
    """Milliseconds of a message from rank 0 to rank 1: half of there and back."""
    data = np.zeros(nbytes, np.uint8)

    def there_and_back(wire: Wire) -> None:
        other = 1 - comm.rank
        for turn in range(2):
            end = {"sends" if turn == comm.rank else "receives": [(other, data)]}
            wire.finish(wire.start(**end))

    def step() -> None:
        team_of(comm).converse(there_and_back if comm.rank < 2 else lambda wire: None)

    return statistics.median(times(comm, step)) / 2


def kernel(comm: treeattn.TreeComm, tokens: int) -> float:
    """Milliseconds of the kernel over so many keys, on all ranks at once."""
    rng = np.random.default_rng(0)
    q, k = (
        rng.standard_normal((1, heads, n, 128), dtype=np.float32)
        for heads, n in ((SHAPE["q_heads"], 1), (SHAPE["kv_heads"], tokens))
    )
    return statistics.median(times(comm, lambda: treeattn.partial_attention(q, k, k)))


def compare(file: Path) -> None:
    """Print every run of a file: forecast / median, in milliseconds."""
    print("hosts  wire  " + "".join(f"{name:>22}" for name in ALGORITHMS))
    for run in json.loads(file.read_text())["runs"]:
        cells = []
        for name in ALGORITHMS:
            ours, measured = measured_step(run, name), statistics.median(run["step_ms"][name])
            cells.append(f"{ours:.1f} / {measured:.1f} = {ours / measured:.2f}")
        print(f"{run['hosts']:>5}{run['delay_ms']:>3} ms  " + "".join(f"{cell:>22}" for cell in cells))


def measure() -> None:
    """Measure on the ranks that a launcher has started; rank 0 prints."""
    work = Workload.of({**SHAPE, "batch": 1, "v_head_dim": None, "layout": "bhtd", "window": None, "softcap": None,
                        "q_tokens": 1, "causal": False, "seed": 0})  # fmt: skip
    with treeattn.TreeComm() as comm:
        if comm.size < 2:
            raise SystemExit("netlab.py measures between ranks: start it on several, one per host, with mpirun")
        found = {
            "hosts": len(set(comm.hosts)),
            "ranks": comm.size,
            "shape": SHAPE,
            "one_way_ms": {nbytes: one_way(comm, nbytes) for nbytes in SIZES},
            "kernel_ms": {tokens: kernel(comm, tokens) for tokens in (1, SHAPE["tokens"] // comm.size)},
            "step_ms": {name: times(comm, contender(comm, work, name).step) for name in ALGORITHMS},
        }
        if comm.rank == 0:
            print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print these runs beside the forecast instead")
    options = parser.parse_args()
    install_abort_hook()
    if options.compare:
        compare(options.compare)
    else:
        measure()


if __name__ == "__main__":
    main()
