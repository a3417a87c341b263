"""A program for mpirun: every rank decodes its shard on the card that is here, which ranks of one host may share.

Its argument, if it has one, is the communicator's plan.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import numpy as np

import treeattn
from treeattn.launch import install_abort_hook, launched
from treeattn.testing.oracle import assert_attention

KEYS = 4000


def main() -> None:
    install_abort_hook()
    cupy = importlib.import_module("cupy")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, n, 64), dtype=np.float32) for heads, n in ((8, 1), (2, KEYS), (2, KEYS)))
    here = launched()
    if here is not None and here.local_rank is not None:  # as the backend does, which is not yet in use
        cupy.cuda.Device(here.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    comm = treeattn.TreeComm(plan=sys.argv[1] if len(sys.argv) > 1 else None)
    edges = np.linspace(0, KEYS, comm.size + 1).astype(int)
    mine = slice(edges[comm.rank], edges[comm.rank + 1])
    there = [cupy.asarray(array) for array in (q, k[:, :, mine], v[:, :, mine])]
    for _ in range(3):
        out, lse = treeattn.decode(*there, comm=comm, return_lse=True)
        assert_attention((out.get(), lse.get()), q, k, v)
    report = json.dumps({"rank": comm.rank, "bits": out.get()[0, 0].tobytes().hex()})
    os.write(1, (report + "\n").encode())


if __name__ == "__main__":
    main()
