"""Constants that forecasts rest on: models, devices and links, each with its source, in one table each.

Rates are stated ones, before any efficiency; `treeattn.costs.forecast` says what share of them it counts on. Links
become a cost model in `treeattn.costs.model`. A source is what was read, in November 2026: code, a page of the maker,
or, where no page of the maker could be read, tables of others. What is assumed says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from treeattn.errors import InputError

__all__ = ["DEVICES", "LINKS", "MODELS", "Device", "Link", "Model", "check_amount", "look_up"]

T = TypeVar("T")

LARGEST = 1e18
"""No time and no rate is as large, and sums of those that are smaller stay finite."""


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a language model's attention, and its size.

    Parameters
    ----------
    layers, q_heads, kv_heads, head_dim : int
    parameters : float
        In all.
    source : str
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    source: str = ""

    def kv_bytes(self, tokens: int, batch: int, itemsize: int) -> int:
        """Bytes of keys and values of all layers."""
        return 2 * batch * tokens * self.layers * self.kv_heads * self.head_dim * itemsize


def check_amount(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Refuse what is no number of at least 0, or above it, and below `LARGEST`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LARGEST
    if not is_number or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise InputError.of(name, expected=f"a number {least} and below {LARGEST:g}", got=repr(value))


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
    lanes : float or None
        How many ranks of a host can use it at once, such as a host's network cards; None is all. What was measured
        need not be whole: 1.5 says that four together take 4 / 1.5 times as long as one.
    jitter_us : float
        Microseconds by which the 99th percentile of a round lies above the median.
    trunk : float or None
        How many ranks in all can use it at once, between hosts: where a switch is narrower than what it joins, or what
        moves messages shares cores. None is all; it need not be whole either.
    """

    alpha_us: float
    gb_per_s: float
    source: str
    gap_us: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    largest_radix: int | None = None
    lanes: float | None = None
    jitter_us: float = 0.0
    trunk: float | None = None

    def __post_init__(self) -> None:
        for name in ("alpha_us", "gap_us", "jitter_us"):
            check_amount(name, getattr(self, name))
        check_amount("gb_per_s", self.gb_per_s, above_zero=True)
        if self.trunk is not None:
            check_amount("trunk", self.trunk, above_zero=True)
        for name, kind, least in (("largest_radix", int, 2), ("lanes", (int, float), 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or not least <= value < LARGEST):
                number = "whole number" if kind is int else "number"
                raise InputError.of(name, expected=f"None or a {number} of at least {least}", got=repr(value))
        if not isinstance(self.source, str):
            raise InputError.of("source", expected="text", got=repr(self.source))
        for amount in chain(*self.steps):
            check_amount("steps", amount)

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


_LITGPT = "litgpt/config.py of github.com/Lightning-AI/litgpt (0006c973), which cites each model's config.json: "

# Parameters are not stated there; they follow from the shapes: see tests/test_catalog.py.
MODELS = {
    "llama-3-8b": Model(32, 32, 8, 128, 8.03e9, _LITGPT + "Llama-3-8B; also llama-models' sku_list.py"),
    "llama-3-70b": Model(80, 64, 8, 128, 70.6e9, _LITGPT + "Llama-3-70B; also llama-models' sku_list.py"),
    "llama-3-405b": Model(126, 128, 8, 128, 405.9e9, _LITGPT + "Llama-3.1-405B; also llama-models' sku_list.py"),
    "llama-3.2-1b": Model(16, 32, 8, 64, 1.24e9, _LITGPT + "Llama-3.2-1B"),
    "llama-3.2-3b": Model(28, 24, 8, 128, 3.21e9, _LITGPT + "Llama-3.2-3B"),
    "qwen2.5-7b": Model(28, 28, 4, 128, 7.62e9, _LITGPT + "Qwen2.5-7B"),
    "qwen2.5-14b": Model(48, 40, 8, 128, 14.8e9, _LITGPT + "Qwen2.5-14B"),
    "qwen2.5-32b": Model(64, 40, 8, 128, 32.8e9, _LITGPT + "Qwen2.5-32B"),
    "qwen2.5-72b": Model(80, 64, 8, 128, 72.7e9, _LITGPT + "Qwen2.5-72B"),
    "qwen3-8b": Model(36, 32, 8, 128, 8.19e9, _LITGPT + "Qwen3-8B"),
    "qwen3-14b": Model(40, 40, 8, 128, 14.8e9, _LITGPT + "Qwen3-14B"),
    "qwen3-32b": Model(64, 64, 8, 128, 32.8e9, _LITGPT + "Qwen3-32B"),
    "mistral-7b": Model(32, 32, 8, 128, 7.25e9, _LITGPT + "Mistral-7B-v0.3"),
}

_NCCL = "latency: NCCL 2.28.3, src/graph/tuning.cc, ncclTunerConstantsDefaults.hwLatencies, tree, Simple"
_BOOK = "ttsugriy.github.io/distributed-training-book, hardware assumptions"

# NCCL's latencies per hop are, for its Simple protocol, 4.0 us by NVLink or PCIe and 14 us over a network. A message
# costs its ends a call each, a microsecond from Python (measured, Open MPI 5.0.11). Over TCP, Open MPI asks before it
# sends more than 64 KiB (btl_tcp_eager_limit), a round trip; NCCL's latency for networks is that of its protocol for
# large messages already. On Ethernet, and RoCE is Ethernet, many senders to one receiver overrun the switch's buffers;
# how many are safe depends on the switch, and 8 is an assumption.
LINKS = {
    "nvlink3": Link(4.0, 300, f"{_BOOK}: 600 GB/s both ways; {_NCCL}", 1.0),
    "nvlink4": Link(
        4.0, 450, f"MLCommons inference_results_v4.1, NVIDIA's H200-SXM system: 900 GB/s, both ways; {_NCCL}", 1.0
    ),
    "nvlink5": Link(4.0, 900, f"LLM-Prof, hardware_spec.md: 1800 GB/s, both ways; {_NCCL}", 1.0),
    "infinity-fabric": Link(
        4.0, 64, f"{_BOOK}: 896 GB/s both ways; seven links, says ROCm's mi300.md; latency taken from NVLink", 1.0
    ),
    "pcie4-staged": Link(
        20, 5, "arXiv 2408.04093 Table 2, two RTX 4090: no peer access, through host memory", 1.0, lanes=2
    ),
    "pcie5-staged": Link(20, 10, "an assumption: twice pcie4-staged", 1.0, lanes=2),
    "shared-memory": Link(
        5, 10, "measured: Open MPI 5.0.11, 4 ranks on 2 cores, 16 KiB in 6.5 to 9 us", 1.0, largest_radix=8, lanes=2
    ),
    "window": Link(3, 25, "measured: 2 ranks on 2 cores, a state of 16 KiB swapped and merged in 5.3 us", 1.0),
    "ib-ndr": Link(14, 50, f"{_BOOK}: about 50 GB/s; {_NCCL}", 1.0),
    "ib-hdr": Link(14, 25, f"200 Gbit/s per rank, by its name; {_NCCL}", 1.0),
    "roce-400g": Link(14, 50, "400 Gbit/s per rank, by its name; latency taken from InfiniBand", 1.0, largest_radix=8),
    "ethernet-400g": Link(
        30, 50, "400 Gbit/s per rank, by its name; latency assumed: twice InfiniBand's", 1.0, ((65536, 60),), 8
    ),
    "ethernet-100g": Link(
        30, 12.5, "100 Gbit/s per rank, by its name; latency assumed: twice InfiniBand's", 1.0, ((65536, 60),), 8
    ),
    "ethernet-10g": Link(
        50, 1.25, "10 Gbit/s per rank, by its name; latency assumed: usual for TCP", 1.0, ((65536, 100),), 8
    ),
    "any-network": Link(
        30, 12.5, "where nothing is known: as ethernet-100g, up to 16 at once", 1.0, ((65536, 60),), 16, 1
    ),
}

DEVICES = {
    "a100": Device(80, 2039, 312, "nvlink3", f"SXM, 80 GB; {_BOOK}; bandwidth: LLM-Prof, hardware_spec.md"),
    "h100": Device(80, 3350, 989, "nvlink4", f"SXM; {_BOOK}; also stas00/ml-engineering, compute/accelerator"),
    "h200": Device(141, 4800, 989, "nvlink4", f"SXM; {_BOOK}; memory: MLCommons inference_results_v4.1"),
    "b200": Device(192, 8000, 2250, "nvlink5", "LLM-Prof, hardware_spec.md; also inferenceengineering.tech, hardware"),
    "mi300x": Device(
        192, 5300, 1307.4, "infinity-fabric", "ROCm documentation, gpu-arch/mi300.md; memory: MLCommons v4.1, 8xMI300X"
    ),
    "rtx4090": Device(
        24, 1008, 165.2, "pcie4-staged", "hmc-tech.com, RTX 4090 vs RTX PRO 5000; bandwidth: cputronic.com, RTX 4090"
    ),
    "rtx5090": Device(
        32, 1792, 209.6, "pcie5-staged", "spheron.network, RTX 5090 specs: 838.4 sparse with fp16 sums, a quarter of it"
    ),
    "cpu": Device(512, 307, 5, "shared-memory", "an assumption: a server with 8 channels of DDR5-4800, 38.4 GB/s each"),
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
    treeattn.errors.InputError: gpu: expected h100, h200, a100 or another of ...
    """
    found = table.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), table, n=3, cutoff=0.4)
    others = ", ".join(sorted(set(table) - set(near)))
    expected = f"{', '.join(near)} or another of {others}" if near else f"one of {others}"
    raise InputError.of(argument, expected=expected, got=repr(name))
