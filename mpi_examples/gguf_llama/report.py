"""What a run says: the answer as it comes, and at the end what it took in time and in memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import numpy as np

from gguf_llama.processes import Processes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["AnswerStream", "Memory", "Times", "as_json", "gather_memory", "prefill_progress", "say", "summary"]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each stage, and tokens that went through it."""

    load: float
    prefill: float
    decode: float
    prompt_tokens: int
    new_tokens: int

    def as_dict(self) -> dict[str, float]:
        """Give everything, with the speeds, as plain data."""
        prompt, new = self.prompt_tokens / self.prefill, self.new_tokens / max(self.decode, 1e-9)
        return {**asdict(self), "prompt_tokens_per_second": prompt, "new_tokens_per_second": new}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in one rank.

    Parameters
    ----------
    rank : int
    peak : int
        Most that was ever resident, shared weights and libraries among it.
    weights : int
        Weights, which all ranks of a host share.
    cache : int
        Keys and values that this rank holds, of all layers.
    tokens : int
        Tokens that those belong to.
    """

    rank: int
    peak: int
    weights: int
    cache: int
    tokens: int

    @property
    def own(self) -> int:
        """Peak without the shared weights."""
        return self.peak - self.weights


def gather_memory(processes: Processes, weights: int, cache: int, tokens: int) -> list[Memory]:
    """Give every rank's memory on every rank; collective."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    row = np.array([[processes.rank, peak, weights, cache, tokens]], np.int64)
    return [Memory(*map(int, each)) for each in processes.gather_rows(row, [1] * processes.size)]


def say(text: str) -> None:
    """Write a line beside the answer, which has standard output to itself."""
    print(text, file=sys.stderr, flush=True)


def prefill_progress(total: int, done: int) -> None:
    """Count prompt tokens: in place on a terminal, else line by line."""
    end = "\r" if sys.stderr.isatty() and done < total else "\n"
    print(f"prompt: {done} of {total} tokens", file=sys.stderr, end=end, flush=True)


class AnswerStream:
    """Writes an answer token by token, as soon as whole characters are there.

    Parameters
    ----------
    tokenizer : Tokenizer
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal can't show must not end the answer
        self._ids: list[int] = []
        self._written = ""

    def write(self, token: int) -> None:
        """Add a token; it may be a part of a character, which is held back until it is whole."""
        self._ids.append(token)
        self._print(self._stream.step(self._tokenizer, token) or "")

    def finish(self) -> str:
        """Write what is still held back, end the line and give the whole answer."""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        self._print(text[len(self._written) :] + "\n")
        return text

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._written += text


def summary(times: Times, memory: Sequence[Memory], plan: str, limit: int) -> str:
    """Say what a run took, for people; an answer of ``limit`` tokens may have been cut off."""
    speeds = times.as_dict()
    tokens = f"{times.new_tokens} tokens" + (" (the limit)" if times.new_tokens == limit else "")
    lines = [
        "",
        f"tree    {plan}",
        f"load    {times.load:6.1f} s",
        f"prompt  {times.prefill:6.1f} s  {times.prompt_tokens} tokens, "
        f"{speeds['prompt_tokens_per_second']:.1f} a second",
        f"answer  {times.decode:6.1f} s  {tokens}, {speeds['new_tokens_per_second']:.1f} a second",
        "",
        "memory, MB   tokens held   key/value cache   peak without the shared weights   shared weights",
    ]
    for each in memory:
        sizes = f"{each.cache / 1e6:17.1f} {each.own / 1e6:33.0f} {each.weights / 1e6:16.0f}"
        lines.append(f"rank {each.rank:<7} {each.tokens:11} {sizes}")
    return "\n".join(lines)


def as_json(memory: Sequence[Memory]) -> list[dict[str, Any]]:
    """Give the memory of all ranks as plain data."""
    return [{**asdict(each), "own": each.own} for each in memory]
