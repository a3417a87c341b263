"""The catalog's figures: that each has a source, and that what follows from others does."""

from __future__ import annotations

import pytest

from treeattn.costs.catalog import DEVICES, LINKS, MODELS

# Hidden width, width of the MLP, vocabulary, whether the two embeddings are one, whether q, k, v have a bias, whether
# heads of q and k are normed: from the same file as the shapes in the catalog.
REST = {
    "llama-3-8b": (4096, 14336, 128256, False, False, False),
    "llama-3-70b": (8192, 28672, 128256, False, False, False),
    "llama-3-405b": (16384, 53248, 128256, False, False, False),
    "llama-3.2-1b": (2048, 8192, 128256, True, False, False),
    "llama-3.2-3b": (3072, 8192, 128256, True, False, False),
    "qwen2.5-7b": (3584, 18944, 152064, False, True, False),
    "qwen2.5-14b": (5120, 13824, 152064, False, True, False),
    "qwen2.5-32b": (5120, 27648, 152064, False, True, False),
    "qwen2.5-72b": (8192, 29568, 152064, False, True, False),
    "qwen3-8b": (4096, 12288, 151936, False, False, True),
    "qwen3-14b": (5120, 17408, 151936, False, False, True),
    "qwen3-32b": (5120, 25600, 151936, False, False, True),
    "mistral-7b": (4096, 14336, 32768, False, False, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_follow_from_the_shapes(name):
    model, (hidden, inner, vocabulary, tied, bias, norms) = MODELS[name], REST[name]
    q, kv = model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    attention = hidden * (2 * q + 2 * kv) + bias * (q + 2 * kv) + norms * 2 * model.head_dim
    layer = attention + 3 * hidden * inner + 2 * hidden
    total = model.layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)
    assert model.parameters == pytest.approx(total, rel=5e-3)


@pytest.mark.parametrize("table", [MODELS, DEVICES, LINKS], ids=["models", "devices", "links"])
def test_every_row_says_where_it_is_from(table):
    assert all(len(row.source) > 20 for row in table.values())


def test_every_device_has_a_link_inside():
    assert all(device.inside in LINKS for device in DEVICES.values())
