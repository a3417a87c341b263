"""A program for mpirun: a cache over ranks, of which every other one has a fake card, and says whether all went well.

Its argument is a folder for compiled kernels. A device pointer that reached MPI or any other CPU code would end the
rank with a segmentation fault.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from emulation import Emulator
from fake_card import FakeCard, FakeCardBackend

import treeattn
from treeattn.testing.oracle import assert_attention

PROMPT, STEPS = 50, 4


def main() -> None:
    comm = treeattn.TreeComm()
    card = FakeCard(Emulator(Path(sys.argv[1])))
    backend, moved = (FakeCardBackend(card), card.upload) if comm.rank % 2 == 0 else (None, np.asarray)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, PROMPT + STEPS, 16), dtype=np.float32) for n in (4, 2, 2))
    cache = treeattn.ShardedKVCache(
        comm, batch=1, kv_heads=2, head_dim=16, block_size=2, capacity=PROMPT + STEPS, backend=backend
    )
    edges = np.linspace(0, PROMPT, comm.size + 1).astype(int)
    piece = slice(edges[comm.rank], edges[comm.rank + 1])
    cache.prefill(moved(k[:, :, piece]), moved(v[:, :, piece]))
    bits = b""
    for at in range(PROMPT, PROMPT + STEPS):
        cache.append(moved(k[:, :, at : at + 1]), moved(v[:, :, at : at + 1]))
        found = cache.decode(moved(q[:, :, at : at + 1]), return_lse=True)
        here: Any = tuple(each if isinstance(each, np.ndarray) else each.get() for each in found)
        assert_attention(here, q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1])
        bits += here[0].tobytes()
    report = json.dumps({"rank": comm.rank, "bits": bits.hex()[:1000]})
    os.write(1, (report + "\n").encode())


if __name__ == "__main__":
    main()
