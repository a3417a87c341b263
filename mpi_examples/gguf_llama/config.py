"""The numbers that shape a Llama model, from a GGUF file's metadata."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf_llama.errors import LlamaError
from gguf_llama.gguf_file import GGUFFile

__all__ = ["Config"]


@dataclass(frozen=True, slots=True)
class Config:
    """What a Llama model computes.

    Parameters
    ----------
    layers, width, hidden : int
        Blocks, width of the residual stream, width inside the feed-forward network.
    heads, kv_heads, head_dim, v_head_dim : int
        Hq, Hkv, D and Dv.
    vocab, context : int
        Tokens there are, and tokens that the model was trained to see at once.
    norm_eps : float
        Added to the mean square in every RMSNorm.
    rope_dims : int
        Leading components of each head that are rotated.
    rope_base, rope_factor : float
        Component pair i of a token at position p turns by p / rope_factor * rope_base ** (-2 i / rope_dims).
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_dims: int
    rope_base: float
    rope_factor: float

    @classmethod
    def of(cls, file: GGUFFile) -> Config:
        """Read the metadata of ``file``.

        Raises
        ------
        LlamaError
            It is not a Llama model, or one with something that is not computed here.
        """
        architecture = file.get("general.architecture", str)
        if architecture != "llama":
            raise LlamaError(f"{file.path} holds a model of architecture {architecture!r}; only 'llama' runs here")
        if file.get("llama.expert_count", int, 0):
            raise LlamaError(f"{file.path} holds a mixture of experts; only dense Llama models run here")
        width = _count(file, "llama.embedding_length")
        heads = _count(file, "llama.attention.head_count")
        head_dim = _count(file, "llama.attention.key_length", width // heads)
        config = cls(
            layers=_count(file, "llama.block_count"),
            width=width,
            hidden=_count(file, "llama.feed_forward_length"),
            heads=heads,
            kv_heads=_count(file, "llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            v_head_dim=_count(file, "llama.attention.value_length", head_dim),
            vocab=len(file.get_all("tokenizer.ggml.tokens", str)),
            context=_count(file, "llama.context_length"),
            norm_eps=_number(file, "llama.attention.layer_norm_rms_epsilon"),
            rope_dims=_count(file, "llama.rope.dimension_count", head_dim),
            rope_base=_number(file, "llama.rope.freq_base", 10000.0),
            rope_factor=_rope_factor(file),
        )
        config._check(file)
        return config

    def _check(self, file: GGUFFile) -> None:
        if self.heads % self.kv_heads:
            raise LlamaError(f"{file.path} has {self.heads} query heads on {self.kv_heads} key/value heads")
        if self.rope_dims % 2 or not 0 < self.rope_dims <= self.head_dim:
            raise LlamaError(f"{file.path} rotates {self.rope_dims} of a head's {self.head_dim} components")


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    """Read a positive number; some models give it per layer, and it must be the same in all."""
    value = file.get(key, (int, list), *([] if default is None else [default]))
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise LlamaError(f"{file.path}: {key} differs from layer to layer, which is not supported here")
    (count,) = values
    if not isinstance(count, int) or count < 1:
        raise LlamaError(f"{file.path}: {key}: expected a positive number, got {count!r}")
    return count


def _number(file: GGUFFile, key: str, *default: float) -> float:
    value = float(file.get(key, (int, float), *default))
    if not 0 < value < math.inf:
        raise LlamaError(f"{file.path}: {key}: expected a positive number, got {value}")
    return value


def _rope_factor(file: GGUFFile) -> float:
    kind = file.get("llama.rope.scaling.type", str, "none")
    if kind == "none":
        # Files from before the typed keys have only this one, and mean linear scaling by it.
        return _number(file, "llama.rope.scale_linear", 1.0)
    if kind != "linear":
        raise LlamaError(f"{file.path} scales rotary positions by {kind!r}, which is not supported here")
    return _number(file, "llama.rope.scaling.factor")
