"""Measuring the tree and its baselines side by side: a row per algorithm and workload, each checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.cli.contender import Contender, contender
from treeattn.errors import InputError
from treeattn.planning.plan import Stats
from treeattn.wrapping import team_of

if TYPE_CHECKING:
    from treeattn.cli.workload import Workload
    from treeattn.comm import TreeComm
    from treeattn.costs.model import CostModel
    from treeattn.transports.clocks import Clock

__all__ = ["Row", "Timing", "compare"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Row:
    """What one algorithm took for one workload on so many ranks.

    Parameters
    ----------
    algorithm : str
    ranks, hosts, tokens, batch, payload_bytes : int
        ``payload_bytes`` is one state's.
    median_ms, p10_ms, p90_ms : float
        Of one step; a step takes as long as its slowest rank. NaN where the algorithm refused.
    rounds, messages, bytes, messages_between, bytes_between, collectives : int
        All ranks together, as counted.
    rank_bytes, peak_bytes : int
        Of the busiest rank: what it sends, and its message buffers.
    memory_bytes : int
        Of the same: its buffers with its keys, values, queries and result.
    paper_bytes, paper_memory_bytes : int or None
        What the paper's formulas say that a rank sends and holds, where it has one.
    as_stated : bool
        Whether the counters equal the plan's, or the baseline's, formula on every rank.
    error, limit : float
        Largest error on any rank against a float64 oracle, and the largest allowed.
    plan : str
        The tree that was used; "" for baselines.
    alone_ms, forecast_ms : float or None
        What a shard took without an exchange on the tree's slowest rank, the median; and that with what the plan
        should take by a model measured on these ranks. None for baselines.
    refused : str
        Why the algorithm does not serve this; "" where it does.
    """

    algorithm: str
    ranks: int
    hosts: int
    tokens: int
    batch: int
    payload_bytes: int
    median_ms: float = float("nan")
    p10_ms: float = float("nan")
    p90_ms: float = float("nan")
    rounds: int = 0
    messages: int = 0
    bytes: int = 0
    messages_between: int = 0
    bytes_between: int = 0
    collectives: int = 0
    rank_bytes: int = 0
    peak_bytes: int = 0
    memory_bytes: int = 0
    paper_bytes: int | None = None
    paper_memory_bytes: int | None = None
    as_stated: bool = True
    error: float = 0.0
    limit: float = 0.0
    plan: str = ""
    alone_ms: float | None = None
    forecast_ms: float | None = None
    refused: str = ""

    @property
    def correct(self) -> bool:
        """Whether the result is right and the counters are as stated."""
        return self.error <= self.limit and self.as_stated


@dataclass(frozen=True)
class Timing:
    """How often a step is run, and how ranks start it together.

    Parameters
    ----------
    warmup, repeats : int
        Untimed steps, and timed ones.
    clock : Clock
    head_start : float
        Seconds per rank that ranks of one machine, which have one clock, get between saying that they are ready and
        starting, all at the same time: where they are crowded, they leave a barrier one after another. 0 is for
        ranks of several machines: each starts as soon as it has heard that all are ready.
    """

    warmup: int
    repeats: int
    clock: Clock
    head_start: float = 0.0


def compare(
    comm: TreeComm,
    works: Sequence[Workload],
    algorithms: Sequence[str],
    backend: str | None,
    timing: Timing,
    model: CostModel | None = None,
) -> Iterator[Row]:
    """Run every algorithm on every workload; collective, and every rank gets the rows.

    The tree's have a forecast where there is a ``model`` of these ranks.
    """
    for work in works:
        right = _right(comm, work)
        for name in algorithms:
            row = partial(Row, name, comm.size, len(set(comm.hosts)), work.tokens, work.batch, work.state_bytes)
            try:
                found = contender(comm, work, name, backend=backend)
            except InputError as reason:  # on every rank alike
                yield row(refused=str(reason).partition(" (rank")[0])
            else:
                measured = _measured(comm, found, right, timing, model)
                memory = measured["peak_bytes"] + work.held_bytes(comm.size)
                yield row(**measured, memory_bytes=memory, **_by_the_paper(work, name, comm.size))


def _measured(
    comm: TreeComm, found: Contender, right: tuple[Array, float], timing: Timing, model: CostModel | None
) -> dict[str, Any]:
    before = comm.stats
    out = found.step()
    counted, peak = comm.stats - before, comm.usage.peak_bytes
    for _ in range(timing.warmup - 1):
        found.step()
    own = {
        "seconds": [_timed(comm, found.step, timing) for _ in range(timing.repeats)],
        "alone": [] if found.alone is None else [_timed(comm, found.alone, timing) for _ in range(timing.repeats)],
        "counted": asdict(counted),
        "stated": counted == found.stated(),
        "peak": peak,
        "error": float(np.max(np.abs(out.astype(np.float64) - right[0]), initial=0)),
    }
    ranks = team_of(comm).consult("a row of the comparison", (), own)
    return {**_times(ranks), **_forecast(ranks, found, model), **_counts(ranks), "limit": right[1], "plan": found.plan}


def _timed(comm: TreeComm, step: Callable[[], Any], timing: Timing) -> float:
    clock = timing.clock
    ready = team_of(comm).consult("start of a step", (), {"at": clock()})
    start = clock()
    if timing.head_start:
        start = max(start, max(each["at"] for each in ready) + timing.head_start * comm.size)
        clock.sleep(max(0.0, start - clock()))
    step()
    return clock() - start


def _times(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    slowest = _slowest_ms(ranks, "seconds")
    deciles = statistics.quantiles(slowest * 2, n=10, method="inclusive")  # twice: one repeat is enough
    return {"median_ms": statistics.median(slowest), "p10_ms": deciles[0], "p90_ms": deciles[-1]}


def _slowest_ms(ranks: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [1e3 * max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]


def _forecast(ranks: Sequence[dict[str, Any]], found: Contender, model: CostModel | None) -> dict[str, float | None]:
    if model is None or found.exchange_us is None:
        return {}
    alone = statistics.median(_slowest_ms(ranks, "alone"))
    return {"alone_ms": alone, "forecast_ms": alone + found.exchange_us(model) / 1e3}


def _counts(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    stats = [Stats(**rank["counted"]) for rank in ranks]
    total = Stats.total(stats)
    kept = ("rounds", "messages", "bytes", "messages_between", "bytes_between", "collectives")
    return {
        **{name: getattr(total, name) for name in kept},
        "rank_bytes": max(each.bytes for each in stats),
        "peak_bytes": max(rank["peak"] for rank in ranks),
        "as_stated": all(rank["stated"] for rank in ranks),
        "error": max(rank["error"] for rank in ranks),
    }


def _right(comm: TreeComm, work: Workload) -> tuple[Array, float]:
    """Give the right answer and the largest error allowed; rank 0 works it out for all."""
    found = work.right if comm.rank == 0 else None
    answer = comm.bcast(None if found is None else found.answer)
    return answer, float(comm.bcast(None if found is None else np.array([found.limit]))[0])


def _by_the_paper(work: Workload, name: str, ranks: int) -> dict[str, Any]:
    """Give what a rank sends and holds by the paper's formulas, with d that of the KV heads where keys are meant."""
    held = work.held_bytes(ranks)  # 2·b·t·d + 2·b·d elements with t = N / p
    if name == "ring":  # 2·b·t·d·p and 4·b·t·d + 2·b·d elements
        return {"paper_bytes": work.kv_bytes, "paper_memory_bytes": held + work.shard_bytes(ranks)}
    if name in ("tree", "allreduce3"):  # 2 (p - 1) / p (b·d + 2·b·n_h) and 2·b·t·d + 2·b·d + 2·b·n_h elements
        return {"paper_bytes": work.paper_bytes(ranks), "paper_memory_bytes": held + work.sums_bytes}
    return {}
