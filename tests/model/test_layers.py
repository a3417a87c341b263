"""The model against a plain float64 Llama, and what its files may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import treeattn
from gguf_llama.generation import Generation, ShardedAttention
from gguf_llama.gguf_file import GGUFFile
from gguf_llama.model import Llama
from gguf_llama.processes import Processes
from gguf_llama.unpacking import unpack
from gguf_llama.weights import Weights, load, map_tensors

pytestmark = pytest.mark.model

IDS = [1, 30, 77, 40, 5, 200, 41, 9, 2, 8, 77, 30, 31]
RNG = np.random.default_rng(3)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied output": ({}, {}),
    "output of its own": ({}, {"output.weight": RNG.standard_normal((266, 24), dtype=np.float32)}),
    "heads of another width": ({"llama.attention.key_length": 10, "llama.attention.value_length": 6}, {}),
    "a part of each head rotated": ({"llama.attention.key_length": 10, "llama.rope.dimension_count": 6}, {}),
    "linear scaling": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {}),
    "Llama 3.1's scaling": ({}, {"rope_freqs.weight": np.array([1.0, 8.0], np.float32)}),
}


def weights_of(model: Path) -> Weights:
    """Unpack a model in this process, which is faster than `load`."""
    flat = model.with_suffix(".flat")
    flat.touch()
    unpacked = unpack(model, [str(flat)])
    return Weights(unpacked.config, map_tensors(unpacked.target, unpacked.tensors), unpacked.vocabulary)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_plain_model(write_model: Any, plain_logits: Any, variant: str) -> None:
    changed, tensors = VARIANTS[variant]
    exact, single = plain_logits(IDS, changed, tensors)
    weights = weights_of(write_model(changed, tensors))
    comm = treeattn.TreeComm()
    attention = ShardedAttention(weights.config, comm, Processes(), capacity=len(IDS))
    model = Llama(weights)

    prefilled = Generation(model, attention).prefill(np.array(IDS[:-2]), 4, lambda done: None)
    stepped = [
        model.logits(model.forward(np.array([token]), attention.length, attention.step)[0]) for token in IDS[-2:]
    ]

    allowed = 2 * np.abs(single - exact).max() + 8 * np.finfo(np.float32).eps * np.abs(exact).max()
    for got, wanted in zip((prefilled, *stepped), exact[-3:], strict=True):
        assert np.abs(got - wanted).max() <= allowed


def test_quantised_tensors_are_read_as_the_package_reads_them(write_model: Any, plain_logits: Any) -> None:
    weights = np.random.default_rng(1).standard_normal((7, 64), dtype=np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    path = write_model()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("half", weights.astype(np.float16))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()

    got = np.empty_like(weights)
    GGUFFile(path).read("half", got)
    assert np.array_equal(got, weights.astype(np.float16).astype(np.float32))
    GGUFFile(path).read("packed", got)
    step = np.abs(weights).reshape(7, 2, 32).max(-1, keepdims=True) / 127
    assert (np.abs(got - weights).reshape(7, 2, 32) <= step * 0.51).all()


def test_weights_are_read_only_and_leave_no_file(write_model: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    weights = load(write_model(), Processes())
    assert weights.tensors["blk.0.qkv"].shape == (24 + 8 + 8, 24)
    assert not weights.tensors["token_embd"].flags.writeable
    assert list((tmp_path / "scratch").iterdir()) == []
