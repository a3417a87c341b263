"""What the plan "mpi" must do, on the first so many ranks and on the others, for each number that is given.

With "silent" instead, the last rank stays away from the collective.
"""

import json
import os
import sys
import time
from functools import partial

import numpy as np
from comm_program import BAD, GOOD, bits, one_wrong, state_of
from mpi4py import MPI

import treeattn
from treeattn.errors import RankTimeout
from treeattn.launch import install_abort_hook
from treeattn.testing.oracle import assert_attention
from treeattn.transports.mpi_operator import MpiRowReduction
from treeattn.wrapping import team_of

install_abort_hook()

CALLS = ("allreduce", "allreduce float64", "allreduce long", "reduce to first", "reduce to last")
QUARRELS = (
    *(("allreduce", other) for other in (*BAD, "allreduce long", "reduce to last", "consult")),
    *(("reduce to last", other) for other in ("no state", "reduce to first", "allreduce float64")),
)


def say(**found):
    os.write(1, (json.dumps(found) + "\n").encode())  # one write, so that lines stay whole


def check_decode(comm, dtype):
    """Compare with dense attention in float64, for all ranks and for a root: shards of any length, one without keys."""
    shapes = (1, 4, 3, 16), (1, 2, 50, 16), (1, 2, 50, 6)
    q, k, v = (np.random.default_rng(7).standard_normal(shape).astype(dtype) for shape in shapes)
    cuts = [rank * rank * 50 // comm.size**2 for rank in range(comm.size)] + [50]
    cuts[1:2] = cuts[:1]  # nothing is left for rank 0
    mine = np.s_[:, :, cuts[comm.rank] : cuts[comm.rank + 1]]
    step = partial(treeattn.decode, q, k[mine], v[mine], comm=comm, return_lse=True, backend="reference")
    assert_attention(step(), q, k, v)
    for root in range(comm.size):
        found = step(root=root)
        if comm.rank == root:
            assert_attention(found, q, k, v)
        else:
            assert found in (None, (None, None))


def in_flight(comm):
    """Bits of merges that are in flight together, and of one into its own state."""
    begun = [comm.allreduce_begin(state_of(comm.rank)) for _ in range(3)]
    own = state_of(comm.rank)
    comm.allreduce(own, out=own)
    return [bits(own), *(bits(each.end()) for each in begun)]


def counted(comm, call):
    """How many collectives and messages a call takes that was agreed on before."""
    call(comm)
    before = comm.stats
    call(comm)
    after = comm.stats - before
    return [after.collectives, after.messages, after.bytes]


def report(world):
    with treeattn.TreeComm(world, plan="mpi") as passing:
        passing.allreduce(state_of(passing.rank))
    comm = treeattn.TreeComm(world, plan="mpi")  # never freed here: that is done before MPI ends
    for dtype in ("float32", "float64"):
        check_decode(comm, dtype)
    results = {name: [GOOD[name](comm) for _ in range(3)] for name in CALLS}
    quarrels = []
    for number, (common, other) in enumerate(QUARRELS):
        wrong = number % comm.size
        quarrels.append([common, other, wrong, one_wrong(comm, common, other, wrong), GOOD["allreduce"](comm)])
    say(
        size=comm.size,
        rank=comm.rank,
        repr=repr(comm),
        results=results,
        quarrels=quarrels,
        flight=in_flight(comm),
        counted=[counted(comm, GOOD[name]) for name in ("allreduce", "reduce to last")],
    )


def silent():
    world = MPI.COMM_WORLD
    living = world.Split(world.rank == world.size - 1, world.rank)
    comm = treeattn.TreeComm(plan="mpi")
    comm.allreduce(state_of(comm.rank))
    team_of(comm).channel.transport.timeout = 1.5  # only now: on a busy machine the first may take longer
    if comm.rank == comm.size - 1:
        MpiRowReduction.start = lambda *_: time.sleep(300)
    try:
        comm.allreduce(state_of(comm.rank))
    except RankTimeout as error:
        say(rank=comm.rank, ranks=error.ranks, usable=comm.usable)
    living.Barrier()
    time.sleep(0.5)  # until the launcher has passed on what all said: whoever leaves first ends the job


if sys.argv[1:] == ["silent"]:
    silent()
else:
    rank = MPI.COMM_WORLD.rank
    for first in map(int, sys.argv[1:]):
        report(MPI.COMM_WORLD.Split(rank < first, rank))
