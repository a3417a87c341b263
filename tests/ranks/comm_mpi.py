"""What only MPI ranks can show: bare communicators, many of them, a rank that goes silent, a rank that dies."""

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI

import treeattn
from treeattn.comm import as_tree_comm
from treeattn.errors import CommError, RankTimeout


def say(**found):
    """One line of JSON in one write, so that ranks' lines don't mix."""
    os.write(1, (json.dumps({"rank": MPI.COMM_WORLD.Get_rank(), **found}) + "\n").encode())


def state(rank):
    return treeattn.PartialState.from_lse(np.full((1, 2, 1, 3), rank, np.float32), np.zeros((1, 2, 1)), base="e")


def bare():
    """A bare communicator is wrapped once; halves of the world work beside it; forty come and go."""
    world = MPI.COMM_WORLD
    half = world.Split(world.Get_rank() % 2, world.Get_rank())
    wrapped = [as_tree_comm(comm) for comm in (world, half, None)]
    same = as_tree_comm(world) is wrapped[0] and wrapped[2] is wrapped[0] and as_tree_comm(half) is wrapped[1]
    means = [comm.allreduce(state(world.Get_rank())).finish().flat[0] for comm in wrapped]
    for _ in range(40):
        with treeattn.TreeComm(world) as comm:
            comm.bcast(np.arange(3) if comm.rank == 0 else None)
    # User messages under any tag must not meet ours.
    request = world.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    wrapped[0].allreduce(state(0))
    world.send("mine", dest=(world.Get_rank() + 1) % world.Get_size(), tag=0)
    left = treeattn.TreeComm(half)  # never freed here: that is done before MPI ends
    say(same=same, means=[float(mean) for mean in means], message=request.wait(), left=left.size)


def hosts():
    """Hosts as this machine has them."""
    with treeattn.TreeComm() as comm:
        say(hosts=comm.hosts)


def silent():
    """The last rank sleeps; the others say so, and the job ends all the same."""
    comm = treeattn.TreeComm(timeout=2)
    comm.allreduce(state(comm.rank))  # which may compile first; `bcast` then starts all at one time
    comm.bcast(1)
    if comm.rank == comm.size - 1:
        time.sleep(300)
    try:
        comm.allreduce(state(comm.rank))
    except RankTimeout as error:
        say(error=str(error))
    try:
        comm.bcast(1)
    except CommError as error:
        say(again=str(error))
    time.sleep(1 if comm.rank == 0 else 300)  # rank 0 leaves when the others have spoken, and that ends the rest


def raises():
    """The last rank fails outside of any call, and no hook is installed."""
    comm = treeattn.TreeComm()
    if comm.rank == comm.size - 1:
        raise ValueError("the last rank has had enough")
    comm.allreduce(state(comm.rank))


def refused():
    """A launcher that MPI knows nothing of."""
    try:
        treeattn.TreeComm()
    except CommError as error:
        say(error=str(error))


if __name__ == "__main__":
    {"bare": bare, "hosts": hosts, "silent": silent, "raises": raises, "refused": refused}[sys.argv[1]]()
