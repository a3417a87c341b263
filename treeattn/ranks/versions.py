"""Which code a rank runs: ranks with different code can't follow one plan."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from treeattn.errors import TOLD_ELSEWHERE, CommError
from treeattn.execution.agreement import ranks_in_words

__all__ = ["check_versions", "version"]

ROOT = Path(__file__).parents[1]


@cache
def version(root: Path = ROOT) -> str:
    """Give treeattn's version, and a digest of its sources, which are the same wherever they are installed."""
    digest = hashlib.sha256()
    folders = root, root / "kernels", root / "backends"  # the last two may be links, which patterns do not follow
    found = {source for folder in folders for kind in ("py", "cu") for source in folder.glob(f"**/*.{kind}")}
    for source in sorted(found):
        digest.update(f"{source.relative_to(root).as_posix()}\0".encode() + source.read_bytes())
    return f"{sys.modules['treeattn'].__version__} ({digest.hexdigest()[:12]})"


def check_versions(told: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Refuse ranks that run different code.

    Parameters
    ----------
    told : sequence of mapping
        By rank, its "version" and its host's "name"; others know other words.
    rank : int
        This rank.

    Raises
    ------
    CommError
        On every rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for number, each in enumerate(told):
        ranks_of.setdefault(str(each.get("version", "one that does not say")), []).append(number)
    if len(ranks_of) > 1:
        who = "; ".join(f"{found} on {_where(ranks, told)}" for found, ranks in ranks_of.items())
        error = CommError(f"ranks run different versions of treeattn: {who}. Install the same on every host")
        setattr(error, TOLD_ELSEWHERE, rank != 0)
        raise error


def _where(ranks: Sequence[int], told: Sequence[Mapping[str, Any]]) -> str:
    hosts = list(dict.fromkeys(str(told[rank].get("name", "unknown")) for rank in ranks))
    more = f" and {len(hosts) - 8} more" * (len(hosts) > 8)
    return f"{ranks_in_words(ranks)}, host{'s' * (len(hosts) > 1)} {', '.join(hosts[:8])}{more}"
