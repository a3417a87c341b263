"""A program for mpirun: every rank decodes on a fake card of its own, and says whether all went well.

Its first argument is a folder for compiled kernels. A device pointer that reached MPI or any other CPU code would end
the rank with a segmentation fault.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from emulation import Emulator
from fake_card import FakeCard, FakeCardBackend

import treeattn
from treeattn.kernels import combine
from treeattn.testing.oracle import assert_attention

KEYS = 90


def main() -> None:
    comm = treeattn.TreeComm()
    card = FakeCard(Emulator(Path(sys.argv[1])))
    backend = FakeCardBackend(card)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, n, 16), dtype=np.float32) for heads, n in ((4, 1), (2, KEYS), (2, KEYS)))
    edges = np.linspace(0, KEYS, comm.size + 1).astype(int)
    mine = slice(edges[comm.rank], edges[comm.rank + 1])
    shard = [np.ascontiguousarray(array[:, :, mine]) for array in (k, v)]
    there = [card.upload(array) for array in (q, *shard)]
    out, lse = treeattn.decode(*there, comm=comm, backend=backend, return_lse=True)
    assert_attention((out.get(), lse.get()), q, k, v)
    state = treeattn.partial_attention(*there, backend=backend)
    merged = comm.allreduce(state)
    assert np.array_equal(combine.finish(merged.packed.get(), None)[0], out.get()), (
        "a GPU's finish differs from a CPU's"
    )
    print(json.dumps({"rank": comm.rank, "bits": out.get().tobytes().hex()}), flush=True)


if __name__ == "__main__":
    main()
