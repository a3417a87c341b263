"""Decode on whatever hosts the ranks find themselves, check the result, and report who is where and what was sent."""

import json
import os
import socket
from dataclasses import asdict
from functools import partial

import numpy as np

from treeattn import TreeComm, decode
from treeattn.launch import install_abort_hook
from treeattn.testing.oracle import assert_attention

install_abort_hook()

SHAPE = {"q": (1, 4, 1, 16), "k": (1, 2, 50, 16), "v": (1, 2, 50, 8)}
STATE_BYTES = 1 * 4 * 1 * (8 + 2) * 4

rng = np.random.default_rng(7)
q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in SHAPE.values())

with TreeComm() as comm:
    cuts = [rank * rank * 50 // comm.size**2 for rank in range(comm.size + 1)]
    mine = np.s_[:, :, cuts[comm.rank] : cuts[comm.rank + 1]]
    step = partial(
        decode, q, k[mine], v[mine], comm=comm, backend="reference"
    )  # no compiling: kernels are no matter here
    assert_attention(step(return_lse=True), q, k, v)
    before = comm.stats
    out = step()
    report = {
        "rank": comm.rank,
        "name": socket.gethostname(),
        "hosts": comm.hosts,
        "out": out.tobytes().hex()[:64],
        "counted": asdict(comm.stats - before),
        "predicted": asdict(comm.plan_for(STATE_BYTES).predict(STATE_BYTES).per_rank[comm.rank]),
    }
    os.write(1, (json.dumps(report) + "\n").encode())
