"""Redraw the figures of the Tree Attention paper: forecasts at its sizes, and measurements at sizes that fit here.

    python benchmarks/paper.py docs/paper.png

Four pictures: how many times faster the tree is than a ring, by context; time of one layer's attention by number of
ranks, at the contexts of the paper (forecast); time of a step with emulated latency, on up to 64 ranks (measured); and
how much more memory a ring rank takes (counted, and resident). It needs the extra `plot`, and takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import treeattn
from treeattn.baselines import paper
from treeattn.cli.plots import import_pyplot
from treeattn.costs.catalog import DEVICES, LINKS, MODELS
from treeattn.costs.forecast import Cluster, Demand, forecast
from treeattn.testing import run_ranks

RANKS = (8, 16, 32, 64, 128)
CONTEXTS = (80_000, 160_000, 320_000, 640_000, 1_280_000, 2_560_000, 5_120_000)
EMULATED_TICKS = (2, 4, 8, 16, 32, 64)
EMULATED_MS = 10
RESIDENT_TOKENS = (8_000, 16_000, 32_000)
RESIDENT_HEADS, RESIDENT_WIDTH = 4, 128


def attention_ms(algorithm: str, tokens: int, ranks: int) -> float:
    """Forecast one layer of 16 heads of width 128, as many for keys, in bf16: the paper's attention block."""
    model = replace(MODELS["llama-3-8b"], layers=1, q_heads=16, kv_heads=16, parameters=0.0)
    cluster = Cluster.of(DEVICES["h100"], ranks, 8, LINKS["ib-ndr"])
    return forecast(algorithm, Demand(model, tokens), cluster).total


def emulated() -> list[dict[str, Any]]:
    """Measure with latency between hosts; a step of little work, so that the wire is what counts."""
    shape = ("--tokens", "256", "--q-heads", "4", "--kv-heads", "4", "--head-dim", "16")
    names = (
        "--algorithms",
        "tree,ring,ring_query,dist_flash,allreduce3",
        "--ranks",
        ",".join(map(str, EMULATED_TICKS)),
    )
    command = [sys.executable, "-m", "treeattn", "bench", "--emulate-latency", str(EMULATED_MS), *shape, *names]
    done = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def peak(algorithm: str, tokens: int) -> tuple[int, int]:
    """Bytes of message buffers, and of resident memory beyond the arguments, of each of two ranks that are threads."""
    shape = (1, RESIDENT_HEADS, tokens, RESIDENT_WIDTH)
    q, k, v = np.ones((1, RESIDENT_HEADS, 1, RESIDENT_WIDTH), np.float32), *(np.ones(shape, np.float32) for _ in "kv")

    def rank(transport: Any, tokens: int) -> int:
        with treeattn.TreeComm(transport) as comm:
            step = treeattn.decode if algorithm == "tree" else treeattn.baselines.BASELINES[algorithm]
            step(q, k[:, :, :tokens], v[:, :, :tokens], comm=comm)
            return comm.usage.peak_bytes

    run_ranks(2, lambda transport: rank(transport, 64), timeout=600)  # compiles, which takes memory too
    Path("/proc/self/clear_refs").write_text("5")  # the highest from here on
    before = resident("VmRSS")
    counted = run_ranks(2, lambda transport: rank(transport, tokens), rendezvous=True, timeout=600)  # sends don't copy
    return max(counted), (resident("VmHWM") - before) // 2


def resident(field: str) -> int:
    """Bytes of memory that this process has (VmRSS), or has had at the most (VmHWM), as Linux counts them."""
    _, _, rest = Path("/proc/self/status").read_text().partition(f"{field}:")
    return 1024 * int(rest.split()[0])


def peak_apart(algorithm: str, tokens: int) -> tuple[int, int]:
    """Run `peak` in a process of its own, whose memory nothing else has used before."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", algorithm, str(tokens)], capture_output=True, text=True, check=True
    )
    counted, held = json.loads(done.stdout)
    return counted, held


def draw_forecasts(by_context: Any, by_ranks: Any) -> None:
    for ranks in RANKS:
        ratios = [attention_ms("ring", n, ranks) / attention_ms("tree", n, ranks) for n in CONTEXTS]
        by_context.plot(CONTEXTS, ratios, marker="o", label=f"{ranks} ranks")
    by_context.set(title="forecast: ring's time by the tree's", xlabel="tokens", xscale="log", yscale="log")
    for tokens in (CONTEXTS[0], CONTEXTS[-1]):
        for name, style in (("tree", "-"), ("ring_query", ":"), ("ring", "--")):
            times = [attention_ms(name, tokens, ranks) for ranks in RANKS]
            by_ranks.plot(RANKS, times, style, marker="o", label=f"{name}, {tokens / 1e6:g}M tokens")
    by_ranks.set(title="forecast: ms of one layer", xlabel="ranks", xscale="log", yscale="log")
    by_ranks.set_ylim(top=1e6)  # room for the legend


def draw_emulated(axis: Any, rows: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name]
        axis.plot([row["ranks"] for row in own], [row["median_ms"] for row in own], marker="o", label=name)
    ranks = sorted({row["ranks"] for row in rows})
    axis.plot(ranks, [EMULATED_MS * (p - 1) for p in ranks], "k:", label="(P - 1) delays")
    axis.set(
        title=f"emulated: ms of a step, {EMULATED_MS} ms between hosts", xlabel="ranks", xscale="log", yscale="log"
    )


def draw_memory(axis: Any) -> None:
    width = RESIDENT_HEADS * RESIDENT_WIDTH
    ring, tree = ([peak_apart(name, tokens) for tokens in RESIDENT_TOKENS] for name in ("ring", "tree"))
    gaps = [[(a[which] - b[which]) / 1e6 for a, b in zip(ring, tree, strict=True)] for which in (0, 1)]
    stated = [paper.peak_gap_bytes(1, tokens, width, RESIDENT_HEADS, 4) / 1e6 for tokens in RESIDENT_TOKENS]
    styles = (("o", gaps[0], "counted buffers"), ("x", gaps[1], "resident"), (":", stated, "the paper's formula"))
    for style, values, label in styles:
        axis.plot(RESIDENT_TOKENS, values, style, markersize=9, fillstyle="none", label=label)
        print(f"{label}: {', '.join(f'{value:.1f} MB' for value in values)} at {RESIDENT_TOKENS} tokens per rank")
    axis.set(title="measured: MB that a ring rank takes more", xlabel="tokens per rank, 512 wide, float32")


def draw(file: Path) -> None:
    figure, axes = import_pyplot().subplots(2, 2, figsize=(11, 8), layout="constrained")
    draw_forecasts(axes[0, 0], axes[0, 1])
    draw_emulated(axes[1, 0], emulated())
    draw_memory(axes[1, 1])
    for axis in axes.flat:
        axis.legend(fontsize="small")
        if axis.get_xlabel() == "ranks":
            ticks = EMULATED_TICKS if axis is axes[1, 0] else RANKS
            axis.set_xticks(ticks, map(str, ticks))
            axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=100)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("paper.png"), help="of the kind its name ends in")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)  # what `peak_apart` starts
    options = parser.parse_args()
    if options.peak:
        algorithm, tokens = options.peak
        print(json.dumps(peak(algorithm, int(tokens))))
    else:
        draw(options.file)


if __name__ == "__main__":
    main()
