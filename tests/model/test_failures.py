"""What can't be used is refused in one sentence: wrong files, wrong prompts, wrong options; on every rank."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llama_generate
from gguf_llama.config import Config
from gguf_llama.errors import LlamaError
from gguf_llama.gguf_file import GGUFFile
from gguf_llama.report import AnswerStream
from gguf_llama.task import Question, Task
from gguf_llama.unpacking import unpack
from gguf_llama.vocabulary import Vocabulary
from gguf_llama.weights import _unpack_in_child

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).parents[2] / "mpi_examples" / "llama_generate.py"

WRONG_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another architecture": ({"architecture": "qwen2"}, {}, "architecture 'qwen2'"),
    "experts": ({"llama.expert_count": 8}, {}, "mixture of experts"),
    "another scaling": ({"llama.rope.scaling.type": "yarn"}, {}, "'yarn'"),
    "no number of layers": ({"llama.block_count": None}, {}, "no llama.block_count"),
    "no layer": ({"llama.block_count": 0}, {}, "block_count: expected a positive number, got 0"),
    "layers that are not there": ({"llama.block_count": 2**31}, {}, "no tensor blk.2.attn_norm.weight"),
    "no head": ({"llama.attention.head_count": 0}, {}, "head_count: expected a positive number, got 0"),
    "a number that is text": ({"llama.context_length": "64"}, {}, "context_length: expected int or list, got '64'"),
    "no number": ({"llama.rope.freq_base": float("nan")}, {}, "freq_base: expected a positive number, got nan"),
    "tokens that are no text": ({"tokenizer.ggml.tokens": [1, 2]}, {}, "expected an array of str, got 1 in it"),
    "kinds of fewer tokens": ({"tokenizer.ggml.token_type": [1]}, {}, "expected one for each of 266 tokens, got 1"),
    "a merge of no tokens": ({"tokenizer.ggml.merges": ["a ä€"]}, {}, r"expected pairs .* got \('a', 'ä€'\)"),
    "an end that is no token": ({"tokenizer.ggml.eos_token_id": 266}, {}, "expected one of 266 tokens, got 266"),
    "no tokenizer": ({"tokenizer.ggml.model": None}, {}, "no tokenizer.ggml.model"),
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


def test_whatever_bytes_are_wrong_a_model_is_read_or_refused(write_model: Any, tmp_path: Path) -> None:
    """Before the weights, which may be any numbers, each byte says something: most of all the first 24 do."""
    whole, rng = write_model().read_bytes(), np.random.default_rng(5)
    weights = whole.rindex(b"output_norm.weight") + 64
    (tmp_path / "flat").touch()
    refused = 0
    for number in range(100):
        damaged = bytearray(whole)
        for at in rng.integers(4, 24 if number % 4 == 0 else weights, 1 + number % 3):
            damaged[at] = rng.choice([0, 1, 127, 128, 255, damaged[at] ^ 1 << rng.integers(8)])
        (tmp_path / "damaged").write_bytes(damaged[: rng.integers(len(whole))] if number % 5 == 0 else damaged)
        try:
            unpack(tmp_path / "damaged", [str(tmp_path / "flat")])
        except LlamaError:
            refused += 1
    assert refused > 50


def test_an_array_that_says_it_is_longer_than_its_file_is_not_looked_for(write_model: Any, tmp_path: Path) -> None:
    whole = bytearray(write_model().read_bytes())
    length = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    assert int.from_bytes(whole[length : length + 8], "little") == 266
    whole[length + 7] = 16
    (tmp_path / "long").write_bytes(whole[: length + 8 + 4 * 266])
    with pytest.raises(LlamaError, match="it ends at byte"):
        unpack(tmp_path / "long", [])


def test_weights_that_fit_nowhere_are_refused(write_model: Any, tmp_path: Path) -> None:
    with pytest.raises(LlamaError, match="MB of weights fit neither"):
        unpack(write_model(), [])


def test_a_full_shared_memory_is_no_reason_not_to_unpack(write_model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("_multiprocessing.SemLock", full)
    (tmp_path / "flat").touch()
    unpacked = _unpack_in_child(write_model(), [str(tmp_path / "flat")])
    assert unpacked.config.layers == 2
    with pytest.raises(LlamaError, match="not a GGUF file"):
        _unpack_in_child(tmp_path / "flat", [])


def sentence(*arguments: object, status: int = 1) -> str:
    """Run the script, which must fail with one sentence, and give it."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.startswith("llama_generate: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


def test_one_sentence_and_a_status_on_the_command_line(write_model: Any, tmp_path: Path) -> None:
    assert "give a --prompt" in sentence(status=2)
    assert "No such option" in sentence("--frobnicate", status=2)
    assert "no.gguf can't be read: No such file" in sentence("--model", tmp_path / "no.gguf", "--prompt", "x")
    long = sentence("--model", write_model(), "--raw", "--prompt", "x" * 64)
    assert "the prompt has 64 tokens, which leaves no room for an answer in 64" in long


def told(monkeypatch: Any, capfd: Any, *arguments: object) -> tuple[int, list[str]]:
    """Run the script's main in this process; give its status and the last line on stderr."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        llama_generate.main()
    return ended.value.code, capfd.readouterr().err.splitlines()[-1:]


class Full(io.StringIO):
    """A disk on which no room is left."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_that_is_full_is_named(write_model: Any, monkeypatch: Any, capfd: Any) -> None:
    options = ["--model", write_model(), "--raw", "--prompt", "x", "--max-new-tokens", 1]
    full = "llama_generate: {}: No space left on device"
    assert told(monkeypatch, capfd, *options, "--json", "/dev/full") == (1, [full.format("/dev/full")])
    monkeypatch.setattr(sys, "stdout", Full())
    assert told(monkeypatch, capfd, *options) == (1, [full.format("standard output")])


def test_a_file_that_can_not_be_written_is_refused_first(monkeypatch: Any, capfd: Any) -> None:
    options = "--model", "/nowhere/model", "--prompt", "x", "--json", "/nowhere/out"
    assert told(monkeypatch, capfd, *options) == (1, ["llama_generate: /nowhere/out: No such file or directory"])


def test_a_model_whose_logits_are_no_numbers_is_refused(write_model: Any, monkeypatch: Any, capfd: Any) -> None:
    model = write_model(tensors={"output_norm.weight": np.full(24, np.nan, np.float32)})
    status, lines = told(monkeypatch, capfd, "--model", model, "--raw", "--prompt", "x")
    assert (status, lines) == (1, ["llama_generate: the logits are not numbers: the model's file may be damaged"])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room for 8 bytes")])
def test_what_ends_a_run_needs_no_traceback(monkeypatch: Any, capfd: Any, error: BaseException) -> None:
    def run(*_: object) -> None:
        raise error

    monkeypatch.setattr("gguf_llama.session.run", run)
    said = ["llama_generate: not enough memory: no room for 8 bytes"]
    expected = (130, [""]) if isinstance(error, KeyboardInterrupt) else (1, said)
    assert told(monkeypatch, capfd, "--prompt", "x") == expected


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
