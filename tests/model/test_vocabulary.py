"""Text to tokens and back, for every way of splitting text that is known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_llama.chat import chatml
from gguf_llama.errors import LlamaError
from gguf_llama.gguf_file import GGUFFile
from gguf_llama.report import AnswerStream
from gguf_llama.vocabulary import Vocabulary

pytestmark = pytest.mark.model

SPLITS = {
    "smollm": ["Ġthe", "Ġ", "2", "0", "1", "9", ".", "Ċ"],
    "gpt-2": ["Ġthe", "Ġ", "2019", ".", "Ċ"],
    "llama-bpe": ["Ġthe", "Ġ", "20", "1", "9", ".", "Ċ"],
    "default": ["Ġthe", "Ġ", "20", "1", "9", ".", "Ċ"],
}


def vocabulary(model: Any) -> tuple[Vocabulary, Any]:
    found = Vocabulary.of(GGUFFile(model))
    return found, found.load()


@pytest.mark.parametrize("pre", SPLITS)
def test_digits_are_split_as_the_file_says(write_model: Any, pre: str) -> None:
    """All files have merges up to the token 2019; the split before them decides which can happen."""
    found, tokenizer = vocabulary(write_model({"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}))
    ids = found.encode(tokenizer, " the 2019.\n")
    assert [tokenizer.id_to_token(i) for i in ids] == SPLITS[pre]


def test_any_text_comes_back(write_model: Any) -> None:
    found, tokenizer = vocabulary(write_model())

    @settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.text())
    def check(text: str) -> None:
        assert tokenizer.decode(found.encode(tokenizer, text), skip_special_tokens=False) == text

    check()


def test_names_of_special_tokens_become_those_tokens(write_model: Any) -> None:
    found, tokenizer = vocabulary(write_model({"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eot_token_id": 0}))
    ids = found.encode(tokenizer, "<|im_start|>the<|im_end|>")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<|im_start|>", "t", "he", "<|im_end|>"]
    assert found.ends == (2, 0)


def test_a_first_token_is_added_once_where_the_file_asks_for_it(write_model: Any) -> None:
    changed = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    found, tokenizer = vocabulary(write_model(changed))
    assert found.encode(tokenizer, "t") == found.encode(tokenizer, "<|endoftext|>t") == [0, tokenizer.token_to_id("t")]


PIECES = {"<unk>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)}, "▁": -9.0, "t": -8.0, "h": -7.5, "e": -7.0}
PIECES |= {"th": -3.0, "he": -2.0, "▁t": -1.0, "▁the": -0.5, "the": -4.0, "ee": -6.0}


def merged_by_score(text: str) -> list[str]:
    """What SentencePiece does, said plainly: merge the best-scored pair, the leftmost of equals, until none is left."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-PIECES[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(write_model: Any) -> None:
    changed = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.scores": [float(score) for score in PIECES.values()],
        "tokenizer.ggml.token_type": [2] + [6] * 256 + [1] * (len(PIECES) - 257),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 0,
    }
    found, tokenizer = vocabulary(write_model(changed))
    assert found.bos == 0
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("é", add_special_tokens=False).ids] == [
        "▁",
        "<0xC3>",
        "<0xA9>",
    ]

    @settings(deadline=None, max_examples=100)
    @given(st.text("the ", min_size=1, max_size=12))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [tokenizer.id_to_token(i) for i in ids] == merged_by_score(text)
        assert tokenizer.decode(ids) == text

    check()


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"tokenizer.ggml.pre": "tekken"}, "'tekken'"), ({"tokenizer.ggml.model": "bert"}, "'bert'")],
)
def test_an_unknown_tokenizer_is_named(write_model: Any, changed: dict[str, Any], word: str) -> None:
    with pytest.raises(LlamaError, match=word):
        Vocabulary.of(GGUFFile(write_model(changed)))


def test_the_chat_template_puts_its_own_system_message_first() -> None:
    plain = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    system = "{% if loop.first %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chatml(plain, "Hi") == asked
    assert chatml(system + plain, "Hi") == "<|im_start|>system\nBe kind.<|im_end|>\n" + asked
    with pytest.raises(LlamaError, match="--raw"):
        chatml("[INST] {{ message['content'] }} [/INST]", "Hi")


def test_parts_of_a_character_are_held_back(write_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found, tokenizer = vocabulary(write_model())
    ids = found.encode(tokenizer, "a€b")
    stream, seen = AnswerStream(tokenizer), []
    for token in ids:
        stream.write(token)
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "", "€", "b"]
    assert stream.finish() == "a€b"


def test_a_character_that_is_never_whole_is_written_at_the_end(
    write_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found, tokenizer = vocabulary(write_model())
    stream = AnswerStream(tokenizer)
    for token in found.encode(tokenizer, "a€")[:-1]:
        stream.write(token)
    text = stream.finish()
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith("a")
