"""What the paper on Tree Attention (arXiv 2408.04093, v4) states about volume and memory, as it states it.

Counts are elements per decode step and layer: b batch rows, t keys per rank, d = n_h * d_h the hidden width, p ranks.
The paper lets every head have keys of its own; with GQA, d of the keys is smaller. What this library counts stands
beside these, and does not always agree: see each baseline's `cost`.
"""

from __future__ import annotations

__all__ = ["peak_gap_bytes", "ring_elements", "ring_peak_elements", "tree_elements", "tree_peak_elements"]


def ring_elements(b: int, t: int, d: int, p: int) -> int:
    """Elements that Ring Attention moves: 2·b·t·d·p.

    >>> ring_elements(1, 64_000, 2048, 2)
    524288000
    """
    return 2 * b * t * d * p


def tree_elements(b: int, d: int, n_h: int, p: int) -> float:
    """Elements that tree decoding moves, by three all-reduces: 2 (p - 1) / p (b·d + 2·b·n_h).

    >>> tree_elements(1, 2048, 16, 2)
    2080.0
    """
    return 2 * (p - 1) / p * (b * d + 2 * b * n_h)


def ring_peak_elements(b: int, t: int, d: int) -> int:
    """Elements that a rank of Ring Attention holds at the peak: 4·b·t·d + 2·b·d."""
    return 4 * b * t * d + 2 * b * d


def tree_peak_elements(b: int, t: int, d: int, n_h: int) -> int:
    """Elements that a rank of tree decoding holds at the peak: 2·b·t·d + 2·b·d + 2·b·n_h."""
    return 2 * b * t * d + 2 * b * d + 2 * b * n_h


def peak_gap_bytes(b: int, t: int, d: int, n_h: int, itemsize: int = 2) -> int:
    """Bytes that a rank of Ring Attention holds more than one of tree decoding.

    The paper's two gaps, 2 GPUs, t = 64,000, bf16: 524 MB at hidden 2048, which follows; and 1040 MB at hidden 4096,
    where the formula gives 1048.6.

    >>> [round(peak_gap_bytes(1, 64_000, d, d // 128) / 1e6, 1) for d in (2048, 4096)]
    [524.3, 1048.6]
    """
    return itemsize * (ring_peak_elements(b, t, d) - tree_peak_elements(b, t, d, n_h))
