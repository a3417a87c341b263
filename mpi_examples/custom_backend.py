"""A backend of your own, passed as an object: no change to treeattn, no registration.

    python mpi_examples/custom_backend.py
    mpirun -n 4 python mpi_examples/custom_backend.py

It computes with NumPy's matrix products, and refuses what it doesn't do with reasons that the caller gets to read.
Each rank prints how far its result is from the built-in backend's, and rank 0 prints such a refusal.
`treeattn/backends/base.py` is the guide; to offer a backend by name, a package lists it in the entry-point group
``treeattn.backends``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import treeattn
from treeattn.arguments.spec import Args, Spec
from treeattn.backends import Backend, HostOps, Prepared
from treeattn.errors import BackendError


class NumpyBackend(Backend):
    """Whole matrix products over the shard: simple, and it needs memory for every logit."""

    name = "numpy"
    ops = HostOps("numpy")  # merging and finishing states in host memory is done already

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Refuse whatever hides keys: a weight of 0 would still multiply what lies behind them."""
        if spec is None:
            return []
        refused = {
            "causal and window": spec.positional,
            "mask": spec.mask is not None,
            "kv_len": spec.ragged,
            "softcap": spec.softcap is not None,
            "k_scale and v_scale": spec.kv.k_scaled or spec.kv.v_scaled,
        }
        return [f"{option} is not supported; use backend='cpu'" for option, asked in refused.items() if asked]

    def prepare(self, spec: Spec) -> Prepared:
        """Nothing to compile: only remember the shapes."""
        return partial(compute, spec)


def compute(spec: Spec, args: Args, out: Any) -> Any:
    """Fill ``out`` (B, Hq, Tq, Dv + 2) with o, l and m of this shard."""
    q, k, v = (array.astype(spec.state_dtype, copy=False) for array in (args.q, args.k, args.v))
    # The query heads that share a KV head follow each other, so that K and V are multiplied once for all of them.
    grouped = q.reshape(spec.batch, spec.kv_heads, spec.group * spec.q_tokens, spec.head_dim)
    logits = (grouped * k.dtype.type(spec.scale)) @ k.swapaxes(2, 3)
    m = logits.max(axis=-1, initial=-np.inf)
    p = np.exp(logits - m[..., None])
    rows = spec.packed_shape[:3]
    out[..., :-2] = (p @ v).reshape(*rows, spec.v_head_dim)
    out[..., -2], out[..., -1] = p.sum(axis=-1).reshape(rows), m.reshape(rows)
    return out


def main() -> None:
    """Decode with both backends."""
    comm = treeattn.TreeComm()
    shard = np.random.default_rng(comm.rank)
    k, v = (shard.standard_normal((1, 2, 512, 64), dtype=np.float32) for _ in "kv")
    q = np.ones((1, 8, 1, 64), np.float32)

    mine = treeattn.decode(q, k, v, comm=comm, backend=NumpyBackend())
    built_in = treeattn.decode(q, k, v, comm=comm)
    print(f"rank {comm.rank} of {comm.size}: {np.abs(mine - built_in).max():.0e} from the built-in backend", flush=True)
    try:
        treeattn.decode(q, k, v, comm=comm, backend=NumpyBackend(), softcap=20.0)
    except BackendError as error:  # on every rank, and all of them go on
        if comm.rank == 0:
            print(error, flush=True)
    comm.free()


if __name__ == "__main__":
    main()
