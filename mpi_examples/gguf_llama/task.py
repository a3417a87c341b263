"""What is to be generated: rank 0 makes it from the command line, and all ranks work on it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_llama.chat import chatml
from gguf_llama.config import Config
from gguf_llama.errors import LlamaError
from gguf_llama.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Question", "Task"]


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asks.

    Parameters
    ----------
    prompt : str or None
    prompt_file : Path or None
        A text that follows ``prompt``.
    question : str or None
        What follows both.
    raw : bool
        Take the text as it is, without the model's chat template.
    max_new_tokens : int
    context : int or None
        Most tokens of prompt and answer together; the model's context by default.
    """

    prompt: str | None
    prompt_file: Path | None
    question: str | None
    raw: bool
    max_new_tokens: int
    context: int | None


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank must know to generate.

    Parameters
    ----------
    prompt : list of int
        Tokens.
    limit : int
        Most new tokens.
    ends : list of int
        Tokens that end the answer.
    """

    prompt: list[int]
    limit: int
    ends: list[int]

    @classmethod
    def of(cls, question: Question, config: Config, vocabulary: Vocabulary, tokenizer: Tokenizer) -> Task:
        """Turn a question into tokens.

        Raises
        ------
        LlamaError
            The prompt is empty or longer than the context, its file can't be read, or it needs ``--raw``.
        """
        text = _unicode("\n\n".join(_parts(question)))
        ids = vocabulary.encode(tokenizer, text if question.raw else chatml(vocabulary.chat_template, text))
        context = _context(question.context, config)
        if not ids:
            raise LlamaError("the prompt is empty")
        if len(ids) >= context:
            raise LlamaError(f"the prompt has {len(ids)} tokens, which leaves no room for an answer in {context}")
        return cls(ids, min(question.max_new_tokens, context - len(ids)), list(vocabulary.ends))

    def to_bytes(self) -> bytes:
        """Write it for the other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Task:
        """Read what `to_bytes` wrote."""
        return cls(**json.loads(data))


def _parts(question: Question) -> Iterable[str]:
    if question.prompt is not None:
        yield question.prompt
    if question.prompt_file is not None:
        try:
            yield question.prompt_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise LlamaError(f"{question.prompt_file} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise LlamaError(f"{question.prompt_file} is not a text in UTF-8") from None
    if question.question is not None:
        yield question.question


def _unicode(text: str) -> str:
    """Refuse what came from the command line in another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LlamaError("the prompt is not a text in UTF-8") from None
    return text


def _context(asked: int | None, config: Config) -> int:
    if asked is not None and asked > config.context:
        raise LlamaError(f"the model's context is {config.context} tokens, fewer than the {asked} of --context")
    return asked or config.context
