"""Generate on all ranks for each of HOSTS, and for "alone" on rank 0: MODEL PROMPT_IDS NEW_TOKENS CHUNK HOSTS..."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "mpi_examples"))

import numpy as np

import treeattn
from gguf_llama.generation import Generation, ShardedAttention
from gguf_llama.model import Llama
from gguf_llama.processes import Processes
from gguf_llama.weights import Weights, load
from treeattn.launch import install_abort_hook


def generate(
    weights: Weights, comm: treeattn.TreeComm, prompt: list[int], limit: int, chunk: int
) -> tuple[list[int], list[int]]:
    """Give the new tokens, and how many tokens each rank held in the end."""
    processes = Processes.of(comm)
    attention = ShardedAttention(weights.config, comm, processes, capacity=len(prompt) + limit)
    generation = Generation(Llama(weights), attention)
    logits = generation.prefill(np.array(prompt), chunk, lambda done: None)
    new = list(generation.tokens(logits, limit, ends=[]))
    return new, processes.gather_rows(np.array([attention.local_length]), [1] * comm.size).tolist()


def main() -> None:
    """Run one process of the job."""
    install_abort_hook()
    model, prompt, limit, chunk, *maps = sys.argv[1:]
    task = (json.loads(prompt), int(limit), int(chunk))
    comm = treeattn.TreeComm()
    weights = load(Path(model), Processes.of(comm))
    together = [treeattn.TreeComm(hosts=hosts.split(",")) for hosts in maps if hosts != "alone"]
    report = {"rank": comm.rank, "runs": [generate(weights, each, *task) for each in together]}
    if "alone" in maps and comm.rank == 0:
        from mpi4py import MPI

        report["alone"] = generate(weights, treeattn.TreeComm(MPI.COMM_SELF), *task)[0]
    os.write(1, (json.dumps(report) + "\n").encode())


if __name__ == "__main__":
    main()
