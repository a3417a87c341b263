"""Constants that forecasts rest on: models, devices and links, each with its source, in one table each.

Rates are stated ones, before any efficiency; `treeattn.forecast` says what share of them it counts on. Links become a
cost model in `treeattn.costs`. For models and
devices, and for links whose source is a datasheet, the source is where to check the figure: it was written down from
memory and has not been compared with that page.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from treeattn.errors import InputError

__all__ = ["DEVICES", "LINKS", "MODELS", "Device", "Link", "Model", "look_up"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a language model's attention, and its size.

    Parameters
    ----------
    layers, q_heads, kv_heads, head_dim : int
    parameters : float
        In all.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    parameters: float

    def kv_bytes(self, tokens: int, batch: int, itemsize: int) -> int:
        """Bytes of keys and values of all layers."""
        return 2 * batch * tokens * self.layers * self.kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one rank to another.

    Parameters
    ----------
    alpha_us : float
        Microseconds until a message's first byte is there.
    gb_per_s : float
        1e9 bytes per second and rank, one direction.
    source : str
    gap_us : float
        Microseconds that each message costs its sender, and its receiver, before they can turn to the next.
    steps : tuple of (bytes, us)
        A message of more than so many bytes takes so many microseconds more: the handshakes of protocols.
    largest_radix : int or None
        Most ranks that should meet in one round; None sets no limit.
    lanes : int or None
        How many ranks of a host can use it at full rate at once, such as a host's network cards; None is all.
    jitter_us : float
        Microseconds by which the 99th percentile of a round lies above the median.
    """

    alpha_us: float
    gb_per_s: float
    source: str
    gap_us: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    largest_radix: int | None = None
    lanes: int | None = None
    jitter_us: float = 0.0

    def message_us(self, nbytes: float) -> float:
        """Microseconds until a lone message of ``nbytes`` is there."""
        return self.alpha_us + self.transfer_us(nbytes) + self.handshake_us(nbytes)

    def transfer_us(self, nbytes: float) -> float:
        """Microseconds that ``nbytes`` take to go by."""
        return nbytes / (self.gb_per_s * 1e3)

    def handshake_us(self, nbytes: float) -> float:
        """Microseconds that protocols take for a message of ``nbytes``."""
        return sum(more for limit, more in self.steps if nbytes > limit)


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on.

    Parameters
    ----------
    memory_gb : float
        1e9 bytes.
    gb_per_s : float
        Memory bandwidth, 1e9 bytes per second.
    tflops : float
        Dense bf16 matrix products with float32 sums, 1e12 per second.
    inside : str
        Link between two of them in one host, a name of `LINKS`.
    source : str
    """

    memory_gb: float
    gb_per_s: float
    tflops: float
    inside: str
    source: str


# Where to check: the config.json and the parameter count of each model's page on Hugging Face; see the module.
MODELS = {
    "llama-3-8b": Model(32, 32, 8, 128, 8.03e9),
    "llama-3-70b": Model(80, 64, 8, 128, 70.6e9),
    "llama-3-405b": Model(126, 128, 8, 128, 405.9e9),
    "llama-3.2-1b": Model(16, 32, 8, 64, 1.24e9),
    "llama-3.2-3b": Model(28, 24, 8, 128, 3.21e9),
    "qwen2.5-7b": Model(28, 28, 4, 128, 7.62e9),
    "qwen2.5-72b": Model(80, 64, 8, 128, 72.7e9),
    "qwen3-8b": Model(36, 32, 8, 128, 8.19e9),
    "qwen3-32b": Model(64, 64, 8, 128, 32.8e9),
    "mistral-7b": Model(32, 32, 8, 128, 7.25e9),
}

# NCCL states per-hop latencies in src/graph/tuning.cc: for messages of its Simple protocol 4.0 us by NVLink or PCIe
# and 14 us over a network. A message costs its ends a call each, a microsecond from Python (measured, Open MPI 5.0.11).
# Over TCP, Open MPI asks before it sends more than 64 KiB (btl_tcp_eager_limit), a round trip; NCCL's latency for
# networks is that of its protocol for large messages already. On Ethernet, and RoCE is Ethernet, many senders to one
# receiver overrun the switch's buffers; how many are safe depends on the switch, and 8 is an assumption.
LINKS = {
    "nvlink4": Link(4.0, 450, "H100 datasheet: 900 GB/s both ways; latency: NCCL tuning.cc", 1.0),
    "infinity-fabric": Link(4.0, 64, "MI300X datasheet: 128 GB/s both ways per link; latency taken from NVLink", 1.0),
    "pcie4-staged": Link(
        20, 5, "arXiv 2408.04093 Table 2, two RTX 4090: no peer access, through host memory", 1.0, lanes=2
    ),
    "pcie5-staged": Link(20, 10, "twice PCIe 4; no measurement", 1.0, lanes=2),
    "shared-memory": Link(
        5, 10, "measured: Open MPI 5.0.11, 4 ranks on 2 cores, 16 KiB in 6.5 to 9 us", 1.0, largest_radix=8, lanes=2
    ),
    "window": Link(3, 25, "measured: 2 ranks on 2 cores, a state of 16 KiB swapped and merged in 5.3 us", 1.0),
    "ib-ndr": Link(14, 50, "400 Gbit/s per rank; latency: NCCL tuning.cc", 1.0),
    "ib-hdr": Link(14, 25, "200 Gbit/s per rank; latency: NCCL tuning.cc", 1.0),
    "roce-400g": Link(14, 50, "400 Gbit/s per rank; latency taken from InfiniBand", 1.0, largest_radix=8),
    "ethernet-400g": Link(
        30, 50, "400 Gbit/s per rank; latency: twice InfiniBand's, an assumption", 1.0, ((65536, 60),), 8
    ),
    "ethernet-100g": Link(
        30, 12.5, "100 Gbit/s per rank; latency: twice InfiniBand's, an assumption", 1.0, ((65536, 60),), 8
    ),
    "ethernet-10g": Link(
        50, 1.25, "10 Gbit/s per rank; latency: usual for TCP, an assumption", 1.0, ((65536, 100),), 8
    ),
    "any-network": Link(30, 12.5, "where nothing is known: as ethernet-100g, up to 16 at once", 1.0, (), 16, 1),
}

DEVICES = {
    "h100": Device(80, 3350, 989, "nvlink4", "NVIDIA H100 SXM datasheet"),
    "h200": Device(141, 4800, 989, "nvlink4", "NVIDIA H200 SXM datasheet"),
    "mi300x": Device(192, 5300, 1307, "infinity-fabric", "AMD Instinct MI300X datasheet"),
    "rtx4090": Device(24, 1008, 165, "pcie4-staged", "NVIDIA Ada whitepaper"),
    "rtx5090": Device(32, 1792, 210, "pcie5-staged", "NVIDIA RTX Blackwell whitepaper"),
    "cpu": Device(512, 307, 5, "shared-memory", "a server with 8 channels of DDR5-4800: 8 x 38.4 GB/s"),
}


def look_up(argument: str, name: str, table: Mapping[str, T]) -> T:
    """Give the entry called ``name``.

    Raises
    ------
    InputError
        There is none; the nearest names are in the message.

    Examples
    --------
    >>> look_up("gpu", "h10", DEVICES)
    Traceback (most recent call last):
    treeattn.errors.InputError: gpu: expected h100, h200 or another of cpu, mi300x, rtx4090, rtx5090, got 'h10'
    """
    found = table.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), table, n=3, cutoff=0.4)
    others = ", ".join(sorted(set(table) - set(near)))
    expected = f"{', '.join(near)} or another of {others}" if near else f"one of {others}"
    raise InputError.of(argument, expected=expected, got=repr(name))
