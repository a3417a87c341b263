"""One rank is wrong in a collective call, or is another than the others are, which fails on all of them."""

import sys

import numpy as np

import treeattn
from treeattn.launch import install_abort_hook

install_abort_hook()
comm = treeattn.TreeComm()
second = int(comm.rank == 1)
comm.bcast(np.ones(3), root={"one": -second, "differ": second}[sys.argv[1]])
