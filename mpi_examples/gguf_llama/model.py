"""The layers of a Llama model, in float32, with attention left to the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gguf_llama.config import Config
from gguf_llama.weights import Weights

__all__ = ["Attend", "Llama"]

Array: TypeAlias = npt.NDArray[np.float32]

Attend: TypeAlias = "Callable[[int, Array, Array, Array], Array]"
"""``attend(layer, q, k, v)``: q (1, Hq, T, D), k (1, Hkv, T, D) and v (1, Hkv, T, Dv) of the tokens at hand, already
rotated, to attention's output (1, Hq, T, Dv)."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block, each (outputs, inputs)."""

    attn_norm: Array
    qkv: Array
    attn_output: Array
    ffn_norm: Array
    gate_up: Array
    ffn_down: Array


class Llama:
    """A model of the Llama architecture.

    Parameters
    ----------
    weights : Weights
    """

    def __init__(self, weights: Weights) -> None:
        tensors = weights.tensors
        self.config = weights.config
        self._layers = [
            _Layer(**{name: tensors[f"blk.{layer}.{name}"] for name in _Layer.__dataclass_fields__})
            for layer in range(self.config.layers)
        ]
        self._embedding = tensors["token_embd"]
        self._output_norm = tensors["output_norm"]
        self._output = tensors.get("output", self._embedding)
        self._frequencies = _frequencies(self.config, tensors.get("rope_freqs"))

    def forward(self, ids: npt.NDArray[np.int64], start: int, attend: Attend) -> Array:
        """Run tokens through all layers.

        Parameters
        ----------
        ids : array of int (T,)
        start : int
            Position of the first; the others follow it.
        attend : callable
            Attention over every token so far; see `Attend`.

        Returns
        -------
        array (T, width)
            What `logits` takes.
        """
        x = self._embedding[ids]
        turns = np.arange(start, start + len(ids))[:, None, None] * self._frequencies
        rotation = np.exp(1j * turns).astype(np.complex64)
        for index, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, rotation)
            x += _flat(attend(index, q, k, v)) @ layer.attn_output.T
            x += self._feed_forward(layer, x)
        return x

    def logits(self, x: Array) -> Array:
        """Give the logits (vocab,) of the token after the one whose hidden state is ``x`` (width,)."""
        return self._output @ self._norm(x, self._output_norm[0])

    def _project(self, layer: _Layer, x: Array, rotation: npt.NDArray[np.complex64]) -> tuple[Array, Array, Array]:
        shape = self.config
        projected = self._norm(x, layer.attn_norm) @ layer.qkv.T
        cuts = np.cumsum((shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim))
        q, k, v = np.split(projected, cuts, axis=1)
        q, k = (_rotated(_heads(part, shape.head_dim), rotation) for part in (q, k))
        return tuple(part.transpose(1, 0, 2)[None] for part in (q, k, _heads(v, shape.v_head_dim)))

    def _feed_forward(self, layer: _Layer, x: Array) -> Array:
        gate, up = np.split(self._norm(x, layer.ffn_norm) @ layer.gate_up.T, 2, axis=1)
        with np.errstate(over="ignore"):  # exp(-gate) is infinite where SiLU is 0
            activated = gate / (1 + np.exp(-gate)) * up
        down: Array = activated @ layer.ffn_down.T
        return down

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + np.float32(self.config.norm_eps)) * weight
        return normed


def _frequencies(config: Config, divisors: Array | None) -> npt.NDArray[np.float64]:
    """Angle that each pair of components turns by from one position to the next."""
    exponents = np.arange(0, config.rope_dims, 2) / config.rope_dims
    frequencies = config.rope_base**-exponents / config.rope_factor
    return frequencies if divisors is None else frequencies / divisors[0]


def _rotated(heads: Array, rotation: npt.NDArray[np.complex64]) -> Array:
    """Rotate pairs of neighbouring components, which is how GGUF lays out Llama's q and k.

    Each pair is read as a complex number, whose product with exp(i angle) is the rotation.
    """
    width = 2 * rotation.shape[-1]
    turned: Array = (np.ascontiguousarray(heads[..., :width]).view(np.complex64) * rotation).view(np.float32)
    return turned if width == heads.shape[-1] else np.concatenate((turned, heads[..., width:]), axis=-1)


def _heads(rows: Array, width: int) -> Array:
    return rows.reshape(len(rows), rows.shape[1] // width, width)


def _flat(attended: Array) -> Array:
    """From (1, Hq, T, Dv) to (T, Hq Dv)."""
    _, heads, tokens, width = attended.shape
    rows: Array = attended.transpose(0, 2, 1, 3).reshape(tokens, heads * width)
    return rows
