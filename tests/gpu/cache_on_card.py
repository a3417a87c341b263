"""A program for mpirun: a cache over ranks, in the memory of the card that is here; ranks of one host may share it."""

from __future__ import annotations

import importlib
import json
import os

import numpy as np

import treeattn
from treeattn.launch import install_abort_hook, launched
from treeattn.testing.oracle import assert_attention

PROMPT, STEPS = 3000, 5


def main() -> None:
    install_abort_hook()
    cupy = importlib.import_module("cupy")
    here = launched()
    if here is not None and here.local_rank is not None:  # as the backend does, which is not yet in use
        cupy.cuda.Device(here.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    comm = treeattn.TreeComm()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, PROMPT + STEPS, 64), dtype=np.float32) for n in (8, 2, 2))
    cache = treeattn.ShardedKVCache(comm, batch=1, kv_heads=2, head_dim=64, block_size=2, capacity=PROMPT + STEPS)
    edges = np.linspace(0, PROMPT, comm.size + 1).astype(int)
    piece = slice(edges[comm.rank], edges[comm.rank + 1])
    cache.prefill(cupy.asarray(k[:, :, piece]), cupy.asarray(v[:, :, piece]))
    bits = b""
    for at in range(PROMPT, PROMPT + STEPS):
        new, last = slice(at, at + 1), slice(at - 2, at + 1)  # three queries: the later ones need positions
        cache.append(cupy.asarray(k[:, :, new]), cupy.asarray(v[:, :, new]))
        found = cache.decode(cupy.asarray(q[:, :, last]), return_lse=True)
        out, lse = (each.get() for each in found)
        assert_attention((out, lse), q[:, :, last], k[:, :, : at + 1], v[:, :, : at + 1], causal=True)
        bits += out.tobytes()
    report = json.dumps({"rank": comm.rank, "bits": bits.hex()[:1000]})
    os.write(1, (report + "\n").encode())


if __name__ == "__main__":
    main()
