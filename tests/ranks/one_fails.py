"""Rank 1 fails in the way that the first argument names, while the others wait for it."""

import sys

from mpi4py import MPI

from treeattn.launch import abort, install_abort_hook

install_abort_hook()

if MPI.COMM_WORLD.rank == 1:
    if sys.argv[1] == "raise":
        raise ValueError("rank one has had enough")
    if sys.argv[1] == "status":
        sys.exit(3)
    if sys.argv[1] == "text":
        sys.exit("rank one says goodbye")
    abort("rank one gives up", 5)
MPI.COMM_WORLD.Barrier()
sys.exit(0)
