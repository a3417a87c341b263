"""What can't be used is refused in one sentence: wrong files, wrong prompts, wrong options; on every rank."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_llama.config import Config
from gguf_llama.errors import LlamaError
from gguf_llama.gguf_file import GGUFFile
from gguf_llama.report import AnswerStream
from gguf_llama.task import Question, Task
from gguf_llama.unpacking import unpack
from gguf_llama.vocabulary import Vocabulary

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).parents[2] / "mpi_examples" / "llama_generate.py"

WRONG_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another architecture": ({"architecture": "qwen2"}, {}, "architecture 'qwen2'"),
    "experts": ({"llama.expert_count": 8}, {}, "mixture of experts"),
    "another scaling": ({"llama.rope.scaling.type": "yarn"}, {}, "'yarn'"),
    "no number of layers": ({"llama.block_count": None}, {}, "no llama.block_count"),
    "heads that don't divide": ({"llama.attention.head_count_kv": 4}, {}, "6 query heads on 4"),
    "layers that differ": ({"llama.attention.head_count_kv": [2, 3]}, {}, "differs from layer to layer"),
    "an odd rotation": ({"llama.rope.dimension_count": 3}, {}, "rotates 3"),
    "a bias": ({}, {"blk.0.attn_q.bias": np.zeros(24, np.float32)}, "blk.0.attn_q.bias"),
    "a missing tensor": ({}, {"blk.1.ffn_up.weight": None}, "no tensor blk.1.ffn_up.weight"),
    "a tensor of another shape": ({}, {"output_norm.weight": np.ones(25, np.float32)}, r"shape \(25,\)"),
}


@pytest.mark.parametrize("model", WRONG_MODELS)
def test_a_model_that_does_not_run_here_is_refused(write_model: Any, tmp_path: Path, model: str) -> None:
    changed, tensors, words = WRONG_MODELS[model]
    (tmp_path / "flat").touch()
    with pytest.raises(LlamaError, match=words):
        unpack(write_model(changed, tensors), [str(tmp_path / "flat")])


def test_a_damaged_file_is_refused(write_model: Any, tmp_path: Path) -> None:
    whole = write_model().read_bytes()
    for name, data in {"text": b"not a model", "cut": whole[: len(whole) // 2], "empty": b""}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LlamaError, match="damaged" if name == "cut" else "not a GGUF file"):
            unpack(tmp_path / name, [])


def test_weights_that_fit_nowhere_are_refused(write_model: Any, tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match="MB of weights fit neither"):
        unpack(write_model(), [])


def sentence(*arguments: object, status: int = 1) -> str:
    """Run the script, which must fail with one sentence, and give it."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.startswith("llama_generate: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def test_one_sentence_and_a_status_on_the_command_line(write_model: Any, tmp_path: Path) -> None:
    assert "give a --prompt" in sentence()
    assert "No such option" in sentence("--frobnicate")
    assert "no.gguf can't be read: No such file" in sentence("--model", tmp_path / "no.gguf", "--prompt", "x")
    long = sentence("--model", write_model(), "--raw", "--prompt", "x" * 64)
    assert "the prompt has 64 tokens, which leaves no room for an answer in 64" in long


WRONG_QUESTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no template": ({}, "use --raw"),
    "an empty prompt": ({"prompt": "", "raw": True}, "the prompt is empty"),
    "no room for an answer": ({"prompt": "x" * 9, "raw": True, "context": 9}, "9 tokens, which leaves no room"),
    "no such file": ({"prompt_file": Path("no.txt"), "raw": True}, "no.txt can't be read: No such file"),
    "not a text": ({"prompt_file": Path(sys.executable), "raw": True}, "not a text in UTF-8"),
    "bytes that are no text": ({"prompt": "\udcff", "raw": True}, "not a text in UTF-8"),
    "more than the model's context": ({"raw": True, "context": 65}, "fewer than the 65 of --context"),
}


@pytest.mark.parametrize("question", WRONG_QUESTIONS)
def test_a_question_that_can_not_be_asked_is_refused(write_model: Any, question: str) -> None:
    asked, words = WRONG_QUESTIONS[question]
    file = GGUFFile(write_model({"tokenizer.chat_template": "{{ messages }}"}))
    vocabulary = Vocabulary.of(file)
    plain = {"prompt": "x", "prompt_file": None, "question": None, "raw": False, "max_new_tokens": 9, "context": None}
    with pytest.raises(LlamaError, match=words):
        Task.of(Question(**{**plain, **asked}), Config.of(file), vocabulary, vocabulary.load())


def test_an_answer_stops_where_the_context_ends(write_model: Any) -> None:
    file = GGUFFile(write_model())
    vocabulary = Vocabulary.of(file)
    asked = Question(prompt="a", prompt_file=None, question="b", raw=True, max_new_tokens=9, context=10)
    task = Task.of(asked, Config.of(file), vocabulary, vocabulary.load())
    assert vocabulary.load().decode(task.prompt) == "a\n\nb"
    assert task.limit == 6
    assert Task.from_bytes(task.to_bytes()) == task


def test_an_answer_goes_to_an_output_that_can_not_show_it(write_model: Any, monkeypatch: Any) -> None:
    tokenizer = Vocabulary.of(GGUFFile(write_model())).load()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    stream = AnswerStream(tokenizer)
    for token in tokenizer.encode("ü").ids:
        stream.write(token)
    assert stream.finish() == "ü"
    assert written.getvalue() == b"\\xfc\n"


def test_every_rank_ends_and_one_speaks(mpirun: Any, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model")
    job = mpirun(SCRIPT, 3, "--model", tmp_path / "text.gguf", "--prompt", "x", check=False)
    assert job.rc == 1, job
    assert job.stderr.count("is not a GGUF file") == 1, job
    assert "Traceback" not in job.stderr
