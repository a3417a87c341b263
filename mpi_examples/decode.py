"""Exact attention over a key/value cache that is split over MPI ranks.

    python mpi_examples/decode.py
    mpirun -n 4 python mpi_examples/decode.py

Each rank prints a line: how many of the keys it held, and a checksum of the output, which is the same on all ranks.
Rank 0 adds how far the output is from attention over all keys in one process: some 1e-8, the rounding of float32.
"""

import zlib

import numpy as np

import treeattn

rng = np.random.default_rng(0)  # every rank makes the same sequence, to keep a part of it
q = rng.standard_normal((1, 32, 1, 64), dtype=np.float32)
k, v = (rng.standard_normal((1, 8, 4096, 64), dtype=np.float32) for _ in "kv")

comm = treeattn.TreeComm()  # the ranks that mpirun started, or this process alone
shard = slice(comm.rank * 4096 // comm.size, (comm.rank + 1) * 4096 // comm.size)
out = treeattn.decode(q, k[:, :, shard], v[:, :, shard], comm=comm)

line = (
    f"rank {comm.rank} of {comm.size}: {shard.stop - shard.start} of 4096 keys, output {zlib.crc32(out.tobytes()):08x}"
)
if comm.rank == 0:
    line += f", {np.abs(out - treeattn.attention(q, k, v)).max():.0e} from one process"
print(line, flush=True)
comm.free()
