"""Tiny random Llama models in GGUF files, and a float64 Llama written down plainly to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 24, 6, 2, 40, 2
CHATML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"  # noqa: E501
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 9", "2 0", "20 19", "Ġ 1"]


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)]


BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)],
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (256 + len(MERGES)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": CHATML,
}
SHAPE = {
    "llama.block_count": LAYERS,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": HIDDEN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1000.0,
}


def random_tensors(metadata: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Weights for such a model, by their names in GGUF."""
    rng = np.random.default_rng(7)
    d = metadata.get("llama.attention.key_length", WIDTH // HEADS)
    dv = metadata.get("llama.attention.value_length", d)
    shapes = {"token_embd": (len(metadata["tokenizer.ggml.tokens"]), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (WIDTH,),
                "attn_q": (HEADS * d, WIDTH),
                "attn_k": (KV_HEADS * d, WIDTH),
                "attn_v": (KV_HEADS * dv, WIDTH),
                "attn_output": (WIDTH, HEADS * dv),
                "ffn_norm": (WIDTH,),
                "ffn_gate": (HIDDEN, WIDTH),
                "ffn_up": (HIDDEN, WIDTH),
                "ffn_down": (WIDTH, HIDDEN),
            }.items()
        }
    return {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a GGUF file."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


WriteModel = Callable[..., Path]


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Write a tiny model: ``write_model(metadata to change, tensors to change)``; None takes something out."""

    def write(changed: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None) -> Path:
        metadata = _without_none({"architecture": "llama", **SHAPE, **BYTE_LEVEL, **(changed or {})})
        weights = _without_none({**random_tensors(metadata), **(tensors or {})})
        return write_gguf(tmp_path / "tiny.gguf", metadata.pop("architecture"), metadata, weights)

    return write


def _without_none(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


class PlainLlama:
    """Llama as its papers have it, over the whole sequence at once and without a cache, in a precision of choice."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str) -> None:
        self.metadata = {**SHAPE, **metadata}
        self.weights = {name.removesuffix(".weight"): tensor.astype(dtype) for name, tensor in tensors.items()}
        self.dtype = np.dtype(dtype)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits (T, vocab) of the token after each of ``ids``."""
        w = self.weights
        x = w["token_embd"][list(ids)]
        for layer in range(LAYERS):
            x = x + self.attention(layer, self.norm(x, f"blk.{layer}.attn_norm")) @ w[f"blk.{layer}.attn_output"].T
            h = self.norm(x, f"blk.{layer}.ffn_norm")
            gate, up = h @ w[f"blk.{layer}.ffn_gate"].T, h @ w[f"blk.{layer}.ffn_up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{layer}.ffn_down"].T
        return self.norm(x, "output_norm") @ w.get("output", w["token_embd"]).T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = self.dtype.type(self.metadata["llama.attention.layer_norm_rms_epsilon"])
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.weights[name]

    def attention(self, layer: int, h: np.ndarray) -> np.ndarray:
        q, k, v = (h @ self.weights[f"blk.{layer}.attn_{which}"].T for which in "qkv")
        tokens, d = len(h), q.shape[1] // HEADS
        heads = []
        for head in range(HEADS):
            mine, shared = slice(head * d, (head + 1) * d), head // (HEADS // KV_HEADS)
            its_v = v[:, shared * (v.shape[1] // KV_HEADS) :][:, : v.shape[1] // KV_HEADS]
            s = (
                self.rotate(q[:, mine])
                @ self.rotate(k[:, shared * d : (shared + 1) * d]).T
                / np.sqrt(self.dtype.type(d))
            )
            s[np.triu_indices(tokens, 1)] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ its_v)
        return np.concatenate(heads, axis=1)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        dims = self.metadata.get("llama.rope.dimension_count", x.shape[1])
        factor = self.metadata.get("llama.rope.scaling.factor", 1.0)
        out = x.copy()
        for i in range(0, dims, 2):
            frequency = self.metadata["llama.rope.freq_base"] ** (-i / dims) / factor
            angle = np.arange(len(x)) * frequency / self.weights.get("rope_freqs", np.ones(dims))[i // 2]
            cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
            out[:, i] = x[:, i] * cos - x[:, i + 1] * sin
            out[:, i + 1] = x[:, i] * sin + x[:, i + 1] * cos
        return out


@pytest.fixture
def plain_logits() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Give a tiny model's logits in float64, and in float32 for the error that plain NumPy makes."""

    def logits(ids: Sequence[int], changed: Mapping[str, Any], tensors: Mapping[str, Any]) -> tuple[Any, Any]:
        weights = {**random_tensors({**SHAPE, **BYTE_LEVEL, **changed}), **tensors}
        exact, single = (PlainLlama(changed, weights, dtype).logits(ids) for dtype in ("float64", "float32"))
        return exact, single

    return logits
