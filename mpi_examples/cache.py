"""A key/value cache that grows over MPI ranks, on each rank's card where it has one, and in host memory where not.

    python mpi_examples/cache.py
    mpirun -n 4 python mpi_examples/cache.py

Each rank brings its piece of a prompt, and then all append and decode token after token. Each prints where its tokens
are, how many it holds, and a checksum of the last output, which is the same on all ranks. Rank 0 adds how far that is
from attention over all keys in one process: some 1e-8, the rounding of float32.
"""

import zlib

import numpy as np

import treeattn
from treeattn.backends import available

PROMPT, NEW = 2000, 8

rng = np.random.default_rng(0)  # every rank makes the same sequence, to pass a part of it
q = rng.standard_normal((1, 32, NEW, 64), dtype=np.float32)
k, v = (rng.standard_normal((1, 8, PROMPT + NEW, 64), dtype=np.float32) for _ in "kv")

comm = treeattn.TreeComm()  # the ranks that mpirun started, or this process alone
card = next((name for name in ("nvidia", "amd") if not available()[name]), None)
if card:
    import cupy

    move, fetch = cupy.asarray, cupy.asnumpy
else:
    move = fetch = np.asarray

cache = treeattn.ShardedKVCache(comm, batch=1, kv_heads=8, head_dim=64, capacity=PROMPT + NEW)  # follows its tokens
piece = slice(comm.rank * PROMPT // comm.size, (comm.rank + 1) * PROMPT // comm.size)
cache.prefill(move(k[:, :, piece]), move(v[:, :, piece]))
for step in range(NEW):
    at = slice(PROMPT + step, PROMPT + step + 1)
    cache.append(move(k[:, :, at]), move(v[:, :, at]))
    out = cache.decode(move(q[:, :, step : step + 1]))

here = fetch(out)
line = f"rank {comm.rank} of {comm.size}, {card or 'host'}: {cache.local_length} of {cache.length} tokens"
line += f", output {zlib.crc32(here.tobytes()):08x}"
if comm.rank == 0:
    line += f", {np.abs(here - treeattn.attention(q[:, :, -1:], k, v)).max():.0e} from one process"
print(line, flush=True)
comm.free()
