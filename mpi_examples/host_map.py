"""Say by hand which ranks share a host, and see the tree that follows from it.

    mpirun -n 4 python mpi_examples/host_map.py
    mpirun -n 4 python mpi_examples/host_map.py a,b,a,b

By default treeattn asks MPI and the host names. Labels of your own override that: to put the ranks of a socket, a rack
or a switch into one subtree, or, as here, to try a layout that you don't have. Without labels the first half of the
ranks is on a host "left" and the second on "right". Rank 0 prints the tree; then each rank prints what it sent in one
decode step, in all and to other hosts, which is what the plan predicted for it.
"""

from __future__ import annotations

import sys

import numpy as np

import treeattn
from treeattn.launch import install_abort_hook, launched
from treeattn.planning.plan import Stats

Q_HEADS, KV_HEADS, WIDTH = 32, 8, 128


def labels() -> list[str]:
    """Give one label per rank: those of the command line, or two halves."""
    if len(sys.argv) > 1:
        return sys.argv[1].split(",")
    here = launched()
    size = here.size if here else 1
    return ["left" if 2 * rank < size else "right" for rank in range(size)]


def summary(stats: Stats) -> str:
    """Write counts in words."""
    messages = "1 message" if stats.messages == 1 else f"{stats.messages} messages"
    return f"{messages} of {stats.bytes} bytes, {stats.messages_between} to other hosts"


def main() -> None:
    """Decode once on the ranks that mpirun started."""
    install_abort_hook()  # a rank that fails ends the others too
    comm = treeattn.TreeComm(hosts=labels())
    shard = np.random.default_rng(comm.rank)
    k, v = (shard.standard_normal((1, KV_HEADS, 256, WIDTH), dtype=np.float32) for _ in "kv")
    q = np.ones((1, Q_HEADS, 1, WIDTH), np.float32)

    treeattn.decode(q, k, v, comm=comm)  # the first call also agrees on the shapes
    before = comm.stats
    treeattn.decode(q, k, v, comm=comm)
    sent = comm.stats - before
    predicted = comm.plan.predict(Q_HEADS * (WIDTH + 2) * 4).per_rank[comm.rank]  # o, l and m of each head, float32

    if comm.rank == 0:
        print(comm.plan.draw(), flush=True)
    comm.bcast(np.zeros(1))  # nobody goes on before the tree is drawn
    print(f"rank {comm.rank} sent {summary(sent)}; predicted {summary(predicted)}", flush=True)
    comm.free()


if __name__ == "__main__":
    main()
