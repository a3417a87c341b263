"""Instruction issue that streaming needs: counted in machine code, for cards that need not be here.

    python benchmarks/issue_slots.py [--card NAME ...] [--json FILE]

For each kernel, the instructions on the cheapest way once around the streaming loop (the way without rescaling and
without hidden keys), the bytes of K and V that a warp takes on it, and from both the share of a card's issue slots
that streaming at its datasheet's memory rate would take. Above 100 % the memory would wait for the instructions.
Clocks are the boost clocks that such cards hold under memory-bound load, an assumption.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from treeattn.kernels.gpu.offline import compile_attention, disassemble
from treeattn.kernels.gpu.source import THREADS
from treeattn.kernels.gpu.table import TYPES, Specialisation
from treeattn.kernels.gpu.targets import target_of


class Card(NamedTuple):
    """A card, by its datasheet."""

    arch: str
    multiprocessors: int
    clock: float
    bytes_per_second: float


CARDS = {
    "A100": Card("sm_80", 108, 1.41e9, 2.04e12),
    "H100": Card("sm_90", 132, 1.75e9, 3.35e12),
    "H200": Card("sm_90", 132, 1.75e9, 4.8e12),
    "RTX 4090": Card("sm_89", 128, 2.52e9, 1.008e12),
}
ISSUED_PER_CLOCK = 4
"""Warp instructions that a multiprocessor issues in one clock."""


class Instruction(NamedTuple):
    """One line of a disassembly."""

    address: int
    guarded: bool
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes; None for anything else."""
        found = re.search(r"0x([0-9a-f]+)", self.operands) if self.name.startswith("BRA") else None
        return int(found[1], 16) if found else None


def instructions(sass: str) -> list[Instruction]:
    """Read a disassembly."""
    pattern = r"/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);"
    return [Instruction(int(at, 16), bool(guard), name, rest) for at, guard, name, rest in re.findall(pattern, sass)]


def streaming_loop(code: list[Instruction]) -> list[Instruction]:
    """Give the smallest loop, by its backward branch, that has the most shuffles and matrix instructions."""
    loops = []
    for branch in code:
        if branch.target is not None and branch.target < branch.address:
            body = [each for each in code if branch.target <= each.address <= branch.address]
            work = sum(each.name.startswith(("SHFL", "HMMA")) for each in body)
            loops.append((work, -len(body), body))
    return max(loops, key=lambda each: each[:2])[2]


def wide_loads(code: list[Instruction]) -> int:
    """Count loads of 16 bytes from global memory."""
    return sum(each.name.startswith("LDG") and ".128" in each.name for each in code)


def narrow_loads(code: list[Instruction]) -> int:
    """Count loads of less than 16 bytes from global memory."""
    return sum(each.name.startswith("LDG") and ".128" not in each.name for each in code)


def cheapest_way(code: list[Instruction], loop: list[Instruction]) -> list[Instruction]:
    """Give the instructions of the shortest way from the loop's first instruction around to its backward branch."""
    first, last = loop[0].address, loop[-1].address
    at = {each.address: i for i, each in enumerate(code)}
    best = {first: 0}
    came: dict[int, int] = {}
    queue = [(0, first)]
    while queue:
        cost, here = heapq.heappop(queue)
        if here == last:
            break
        if cost > best[here]:
            continue
        for there in _next(code, at, here):
            if there != first and cost + 1 < best.get(there, len(code)):
                best[there], came[there] = cost + 1, here
                heapq.heappush(queue, (cost + 1, there))
    way = [last]
    while way[-1] != first:
        way.append(came[way[-1]])
    return [code[at[each]] for each in reversed(way)]


def _next(code: list[Instruction], at: dict[int, int], address: int) -> list[int]:
    i = at[address]
    here = code[i]
    following = [code[i + 1].address] if i + 1 < len(code) else []
    if here.name.startswith(("EXIT", "RET")) and not here.guarded:
        return []
    if here.target is None or here.name == "BRA.DIV":  # taken only where a warp has diverged, which none has
        return following
    return [here.target, *following] if here.guarded or "P" in here.operands.split(",")[0] else [here.target]


def measure(chosen: Specialisation, arch: str) -> tuple[list[Instruction], int]:
    """Give the cheapest way around the streaming loop and the bytes that a warp takes on it."""
    code = instructions(disassemble(compile_attention(chosen, arch)))
    way = cheapest_way(code, streaming_loop(code))
    rows = chosen.step // (THREADS // 32)
    per_row = chosen.d * _bytes(chosen.k_type) + chosen.dv * _bytes(chosen.v_type)
    return way, rows * per_row


def _bytes(name: str) -> int:
    return 4 if name == "float32" else 1 if TYPES[name] > 2 else 2


def share(instruction_count: int, taken: int, card: Card) -> float:
    """Share of the issue slots that streaming at the memory's rate takes."""
    issued = card.multiprocessors * ISSUED_PER_CLOCK * card.clock
    return instruction_count / taken * card.bytes_per_second / issued


def kernels() -> dict[str, Specialisation]:
    """Give the kernels of the table: D = Dv = 128, features off."""
    target = target_of("sm_90")

    def vector(k_type: str, rows: int, blocks: int) -> Specialisation:
        team = 32 if k_type == "float32" else 16
        return Specialisation("vector", target, k_type, k_type, 128, 128, rows, team, 4, blocks=blocks)

    return {
        "vector, bfloat16, group 1": vector("bfloat16", 1, 5),
        "vector, bfloat16, group 4": vector("bfloat16", 4, 3),
        "vector, bfloat16, group 8": vector("bfloat16", 8, 2),
        "vector, float32, group 4": vector("float32", 4, 4),
        "tensor cores, bfloat16, group 8": Specialisation(
            "matrix", target, "bfloat16", "bfloat16", 128, 128, 8, 32, 1, blocks=3
        ),
        "tensor cores, float16, group 8": Specialisation(
            "matrix", target, "float16", "float16", 128, 128, 8, 32, 1, blocks=3
        ),
    }


def report(names: list[str]) -> list[dict[str, object]]:
    """Measure every kernel for every architecture of the cards called ``names``."""
    cards = {name: CARDS[name] for name in names}
    rows: list[dict[str, object]] = []
    for name, chosen in kernels().items():
        for arch in dict.fromkeys(card.arch for card in cards.values()):
            way, taken = measure(chosen, arch)
            shares = {card: share(len(way), taken, each) for card, each in cards.items() if each.arch == arch}
            counts = Counter(each.name.split(".")[0] for each in way)
            rows.append(
                {
                    "kernel": name,
                    "arch": arch,
                    "instructions": len(way),
                    "bytes": taken,
                    "wide_loads": wide_loads(way),
                    "narrow_loads": narrow_loads(way),
                    "share": shares,
                    "most": dict(counts.most_common(8)),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table to this file too")
    parser.add_argument("--card", action="append", choices=list(CARDS), help="only this card; may be repeated")
    arguments = parser.parse_args()
    rows = report(arguments.card or list(CARDS))
    for row in rows:
        shares = ", ".join(f"{card} {value:.0%}" for card, value in dict(row["share"]).items())  # type: ignore[call-overload]
        print(f"{row['kernel']:34} {row['arch']}: {row['instructions']:4} for {row['bytes']:5} bytes: {shares}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
