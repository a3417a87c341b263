"""One rank is wrong in a collective call, or is another than the others are, which fails on all of them."""

import os
import sys

import numpy as np

import treeattn
from treeattn.launch import install_abort_hook, launched

install_abort_hook()
second = int(launched().rank == 1)
if sys.argv[1] == "numba" and second:
    os.environ["NUMBA_DISABLE_JIT"] = "1"
comm = treeattn.TreeComm()
comm.bcast(np.ones(3), root={"one": -second, "differ": second}[sys.argv[1]])
