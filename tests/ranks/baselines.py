"""Every baseline on MPI ranks: exact, counted as its formula says, and a ring with emulated latency."""

import hashlib
import json
import os
import time

import numpy as np

import treeattn
from treeattn.arguments.spec import Options
from treeattn.baselines import BASELINES, Ulysses
from treeattn.launch import install_abort_hook
from treeattn.testing.oracle import assert_attention
from treeattn.transports.emulation import DelayedTransport, Delays
from treeattn.transports.mpi_transport import world_transport
from treeattn.wrapping import team_of

install_abort_hook()
algorithms = {**BASELINES, "ulysses_gqa": Ulysses(replicate_kv=True)}
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, heads, n, 8), dtype=np.float32) for heads, n in ((8, 4), (4, 50), (4, 50)))
checked, collectives = [], {}
with treeattn.TreeComm() as comm:
    shard = [np.ascontiguousarray(array[:, :, comm.rank :: comm.size]) for array in (k, v)]
    for name, algorithm in algorithms.items():
        prepared = algorithm.prepare(q, *shard, Options(), comm=comm, return_lse=True, backend="reference")
        before = comm.stats
        prepared.run()
        counted = comm.stats - before
        assert counted == algorithm.cost(prepared.problem).stats(comm.rank), name
        out, lse = prepared.result()
        assert_attention((out, lse), q, k, v)
        digests = team_of(comm).consult("bits", (), {"bits": hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()})
        assert not algorithm.same_bits or len({each["bits"] for each in digests}) == 1, name
        checked.append(name)
        collectives[name] = counted.collectives

delays = Delays(0, 0.02)
transport = world_transport(60)
with treeattn.TreeComm(DelayedTransport(transport, list("abc"), delays)) as comm:
    prepared = treeattn.baselines.ring.prepare(q, *shard, Options(), comm=comm, backend="reference")
    before, start = comm.stats, time.monotonic()
    prepared.run()
    end, rounds = time.monotonic(), (comm.stats - before).rounds

report = {
    "rank": comm.rank,
    "checked": sorted(checked),
    "collectives of allreduce3": collectives["allreduce3"],
    "rounds of the ring": rounds,
    "start": start,
    "end": end,
}
os.write(1, (json.dumps(report) + "\n").encode())
