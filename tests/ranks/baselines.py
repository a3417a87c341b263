"""Every baseline on MPI ranks: exact, and counted as its formula says."""

import json
import os

import numpy as np

import treeattn
from treeattn.baselines import BASELINES, Ulysses
from treeattn.inputs import Options
from treeattn.launch import install_abort_hook
from treeattn.testing.oracle import assert_attention

install_abort_hook()
algorithms = {**BASELINES, "ulysses_replicated": Ulysses(replicate_kv=True)}
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, heads, n, 8), dtype=np.float32) for heads, n in ((8, 4), (4, 50), (4, 50)))
checked, collectives = [], {}
with treeattn.TreeComm() as comm:
    shard = [np.ascontiguousarray(array[:, :, comm.rank :: comm.size]) for array in (k, v)]
    for name, algorithm in algorithms.items():
        prepared = algorithm.prepare(q, *shard, Options(), comm=comm, return_lse=True)
        before = comm.stats
        prepared.run()
        counted = comm.stats - before
        assert counted == algorithm.cost(prepared.problem).stats(comm.rank), name
        assert_attention(prepared.result(), q, k, v)
        checked.append(name)
        collectives[name] = counted.collectives
    report = {"rank": comm.rank, "checked": sorted(checked), "collectives of allreduce3": collectives["allreduce3"]}
os.write(1, (json.dumps(report) + "\n").encode())
