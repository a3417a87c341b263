"""Hold the forecast to the times that the Tree Attention paper has published, seen and unseen.

    python benchmarks/published.py

One block per set of assumptions: those chosen with all rows in view, and those fitted to the rows of one machine, with
which the rows of the others are predicted. Numbers are forecast / published: seconds of the tree, of the ring, and the
ratio of both.
"""

from __future__ import annotations

import argparse

from treeattn.costs.published import CHOSEN, PAPER, Assumptions, error, fitted, paper_seconds


def show(title: str, assumed: dict[str, Assumptions], seen: set[str]) -> None:
    print(f"\n{title}")
    for row in PAPER:
        tree, ring = paper_seconds(row, assumed[row.device])
        kind = "seen" if row.device in seen else "predicted"
        factors = (
            f"tree x{tree / row.tree:.2f}, ring x{ring / row.ring:.2f}, ratio x{error(row, assumed[row.device]):.2f}"
        )
        print(f"  {row.ranks} {row.device:8}{row.tokens:>8} tokens: {factors} of {row.ratio:.2f}  {kind}")


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    show("chosen with all rows in view", CHOSEN, set(CHOSEN))
    for device in CHOSEN:
        found = fitted([row for row in PAPER if row.device == device])
        staged = f", {found.staged_gb_per_s:g} GB/s staged"
        title = f"fitted on {device}: {found.utilisation:.0%} of the matrix rate, {found.hop_us:g} us per hop{staged}"
        show(title, dict.fromkeys(CHOSEN, found), {device})


if __name__ == "__main__":
    main()
