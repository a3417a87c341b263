"""What every communicator must do, as one program: run by MPI ranks, and by threads from the tests.

``report(comm)`` makes a communicator from whatever ``TreeComm`` takes, does good and bad things with it, and returns
what happened, for the test to judge.
"""

import hashlib
import json
import os
import sys
from dataclasses import astuple

import numpy as np

import treeattn
from treeattn.execution.agreement import Attempt
from treeattn.state import PartialState
from treeattn.testing import over_the_wire
from treeattn.wrapping import team_of

SHAPE = (1, 4, 1, 6)
LONG = (2, 8, 40, 64)  # in several parts between hosts


def state_of(rank, shape=SHAPE, dtype="float32"):
    """A state that depends on rank, shape and dtype alone; every fifth rank has seen no keys."""
    tokens = 0 if rank % 5 == 3 else rank + 1
    rng = np.random.default_rng([rank, *shape])
    q, k, v = (rng.standard_normal((shape[0], shape[1], n, w)).astype(dtype) for n, w in _sizes(shape, tokens))
    return treeattn.partial_attention(q, k, v, backend="reference")


def _sizes(shape, tokens):
    return (shape[2], 8), (tokens, 8), (tokens, shape[3])


def bits(state):
    return None if state is None else hashlib.sha256(state.packed.tobytes()).hexdigest()[:16]


def expected(size, **options):
    """All ranks' states merged in float64."""
    states = [state_of(rank, **options) for rank in range(size)]
    wide = [np.asarray(state.packed, np.float64) for state in states]
    ops = PartialState.identity(SHAPE, dtype="float64", backend="reference").ops
    return treeattn.merge([PartialState(packed, ops) for packed in wide])


def outcome(call):
    """What a call gave: ["ok", value], or [class, text] of what it raised."""
    try:
        return ["ok", call()]
    except Exception as error:
        return [type(error).__name__, str(error)]


# Each good call, by name: the same on every rank it succeeds.
GOOD = {
    "allreduce": lambda comm: bits(comm.allreduce(state_of(comm.rank))),
    "allreduce float64": lambda comm: bits(comm.allreduce(state_of(comm.rank, dtype="float64"))),
    "allreduce long": lambda comm: bits(comm.allreduce(state_of(comm.rank, shape=LONG))),
    "reduce to first": lambda comm: bits(comm.reduce(state_of(comm.rank))),
    "reduce to last": lambda comm: bits(comm.reduce(state_of(comm.rank), root=comm.size - 1)),
    "bcast": lambda comm: comm.bcast(np.arange(7) if comm.rank == 0 else None).tolist(),
    "bcast from last": lambda comm: comm.bcast(np.eye(2, 3) + comm.rank, root=comm.size - 1).tolist(),
    "consult": lambda comm: team_of(comm).consult("consult", (("field", [1, "x"]),), {"rank": comm.rank}),
    "total_stats": lambda comm: comm.total_stats().messages >= 0,
}

# Each bad call: where one rank makes it, every rank gets an error.
BAD = {
    "no state": lambda comm: comm.allreduce(None),
    "root out of range": lambda comm: comm.reduce(state_of(comm.rank), root=99),
    "root is no number": lambda comm: comm.reduce(state_of(comm.rank), root="0"),
    "kernel out of memory": lambda comm: team_of(comm).exchange(Attempt(None, None, MemoryError("no room for scores"))),
    "array of objects": lambda comm: comm.bcast(np.array([object()]), root=comm.rank),
    "error in consult": lambda comm: team_of(comm).consult("consult", (), {}, ValueError("not mine")),
    "wrong out": lambda comm: comm.allreduce(state_of(comm.rank), out=state_of(comm.rank, dtype="float64")),
}

CALLS = GOOD | BAD


PAIRS = [(common, other) for common in GOOD for other in CALLS if other != common]


def one_wrong(comm, common, other, wrong_rank):
    """Every rank makes the call ``common``, but one makes ``other``."""
    return outcome(lambda: CALLS[other if comm.rank == wrong_rank else common](comm))


def quarrels(comm, stride):
    """Every ``stride``-th pair of a common and another call, and after each an allreduce that all want."""
    found = []
    for number, (common, other) in enumerate(PAIRS[::stride]):
        wrong_rank = number % comm.size
        found.append([common, other, wrong_rank, one_wrong(comm, common, other, wrong_rank), GOOD["allreduce"](comm)])
    return found


def first_quarrels(source, options):
    """The same where the very first call goes wrong: a communicator made for each."""
    found = []
    for common, other in (("allreduce", "no state"), ("reduce to first", "allreduce float64"), ("bcast", "allreduce")):
        with treeattn.TreeComm(source, **options) as comm:
            wrong_rank = comm.size - 1
            trouble = one_wrong(comm, common, other, wrong_rank)
            found.append([common, other, wrong_rank, trouble, GOOD["allreduce"](comm)])
    return found


def counted(comm):
    """Rounds, messages and bytes of an allreduce and of a reduce: counted on this rank, and predicted for all."""
    found, state = [], state_of(comm.rank)
    for root in (None, comm.size - 1):
        call = comm.allreduce if root is None else lambda state: comm.reduce(state, root=comm.size - 1)
        call(state)  # agrees on the call, which costs more
        before = comm.stats
        call(state)
        prediction = comm.plan_for(state.nbytes, root).predict(state.nbytes, rows=4)
        found.append([astuple(comm.stats - before), [astuple(each) for each in prediction.per_rank]])
    return found


def report(source, stride=1, **options):
    """Do it all."""
    with treeattn.TreeComm(source, **options) as comm:
        results = {name: [outcome(lambda call=call: call(comm)) for _ in range(2)] for name, call in GOOD.items()}
        merged = comm.allreduce(state_of(comm.rank)).finish()
        found = {
            "rank": comm.rank,
            "size": comm.size,
            "hosts": comm.hosts,
            "results": results,
            "error": float(np.abs(merged - expected(comm.size).finish()).max()),
            "in rank order": bits(over_the_wire([state_of(rank) for rank in range(comm.size)])),
            "counted": counted(comm),
            "quarrels": quarrels(comm, stride),
        }
    return found | {"first quarrels": first_quarrels(source, options)}


if __name__ == "__main__":
    for options in map(json.loads, sys.argv[1:]):
        os.write(1, (json.dumps(report(None, **options)) + "\n").encode())  # one write, so that lines stay whole
