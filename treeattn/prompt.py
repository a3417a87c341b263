"""Attention of a prompt whose tokens are spread over the ranks: each rank has queries, and gets rows, of its own."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.checks import check_whole
from treeattn.arguments.positions import POSITION_LIMIT
from treeattn.arguments.spec import Options
from treeattn.baselines import BASELINES, Baseline
from treeattn.errors import InputError
from treeattn.ranks.team import Team
from treeattn.wrapping import team_of

__all__ = ["prefill", "zigzag"]

Array: TypeAlias = npt.NDArray[Any]

ALGORITHMS = {name: baseline for name, baseline in BASELINES.items() if baseline.spreads_queries}


def prefill(
    q: Any,
    k: Any,
    v: Any,
    comm: Any,
    *,
    algorithm: str = "ring",
    return_lse: bool = False,
    sink: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    kv_len: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: Any = None,
    layout: str = "bhtd",
    backend: Any = None,
) -> Any:
    """Attention of this rank's queries over the keys of all ranks; collective.

    Parameters
    ----------
    q : array (B, Hq, Tq, D)
        This rank's queries; Tq may differ from rank to rank and may be 0.
    k : array (B, Hkv, Tk, D)
        This rank's keys, those of its queries and any others that it holds, such as a cache's.
    v : array (B, Hkv, Tk, Dv)
        This rank's values.
    comm : TreeComm, mpi4py communicator or None
        As in `treeattn.decode`.
    algorithm : str
        "ring": shards go round, P - 1 steps. "dist_flash": folded, P // 2 steps, with half as many shards sent.
        "megatron_sp": all shards to all ranks at once, which takes memory for the whole sequence.
    return_lse : bool
        Whether ``lse`` is wanted too.
    sink, scale, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout, backend
        As in `treeattn.decode`, except that ``causal`` is True unless said otherwise and ``q_pos`` is of this rank's
        queries. Deal tokens out with `zigzag`, and a causal mask costs every rank the same.

    Returns
    -------
    out : array (B, Hq, Tq, Dv) of q's dtype, in q's layout
        This rank's rows.
    lse : array (B, Hq, Tq) of the state's dtype
        Only with ``return_lse``.

    Raises
    ------
    InputError
        On every rank, if an argument is wrong on any rank or differs where it must be the same.

    Notes
    -----
    Sources: arXiv 2310.01889 (ring), 2310.03294 (dist_flash), 2205.05198 (megatron_sp).

    Examples
    --------
    >>> import numpy as np, treeattn
    >>> from treeattn.testing import run_ranks
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 2, 20, 4), dtype=np.float32) for _ in range(3))
    >>> def program(transport):
    ...     with treeattn.TreeComm(transport) as comm:
    ...         at = treeattn.zigzag(20, comm.size, comm.rank)
    ...         shard = (array[:, :, at] for array in (q, k, v))
    ...         return at, treeattn.prefill(*shard, comm, q_pos=at, kv_pos=at)
    >>> whole = treeattn.attention(q, k, v, causal=True)
    >>> [np.allclose(out, whole[:, :, at], atol=1e-6) for at, out in run_ranks(3, program)]
    [True, True, True]
    """
    options = Options(scale, None, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout)
    prepared = _named(algorithm, team_of(comm)).prepare(
        q, k, v, options, comm=comm, return_lse=return_lse, sink=sink, backend=backend, replicated=False
    )
    prepared.run()
    return prepared.result()


def _named(algorithm: Any, team: Team) -> Baseline:
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    known = " or ".join(map(repr, ALGORITHMS))
    team.consult("prefill", (), {}, InputError.of("algorithm", expected=known, got=repr(algorithm)))
    raise AssertionError("consult raises what it is given")


def zigzag(tokens: int, size: int, rank: int) -> Array:
    """Deal consecutive tokens out so that a causal mask gives every rank the same work.

    The tokens are cut into 2 P pieces, of which rank r gets the r-th from the front and the r-th from the back:
    queries that see few keys, and as many that see many.

    Parameters
    ----------
    tokens, size, rank : int

    Returns
    -------
    array of int64
        Positions of the rank's tokens, ascending; those of all ranks together are 0 to ``tokens`` - 1.

    Raises
    ------
    InputError
        ``tokens`` is negative, there is no rank, or ``rank`` is none of them.

    Examples
    --------
    >>> import treeattn
    >>> [treeattn.zigzag(8, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    tokens, size = check_whole("tokens", tokens, 0, POSITION_LIMIT), check_whole("size", size, 1)
    rank = check_whole("rank", rank, 0, size - 1)
    pieces = rank, 2 * size - 1 - rank
    ends = ((tokens * piece // (2 * size), tokens * (piece + 1) // (2 * size)) for piece in pieces)
    return np.concatenate([np.arange(start, stop) for start, stop in ends])
