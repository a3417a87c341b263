"""PyTorch's attention, on the options that it has: dense, and merged from shards. Run by ``make test-peers``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn.errors import InputError
from treeattn.testing.oracle import assert_close, on_host, tolerance

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-peers` installs it")
sdpa = torch.nn.functional.scaled_dot_product_attention
pytestmark = pytest.mark.peers

B, TK, D = 2, 37, 16
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
CUTS = [slice(0, 5), slice(5, 5), slice(5, 30), slice(30, TK)]
CASES = ["plain", "is_causal", "bool mask", "float mask", "scale"]


def tensors(dtype, *, heads=(4, 4), tokens=3, v_width=D, seed=0):
    made = torch.Generator().manual_seed(seed)
    shapes = ((B, heads[0], tokens, D), (B, heads[1], TK, D), (B, heads[1], TK, v_width))
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def case(name, q):
    """The arguments that ask torch and treeattn for the same."""
    made = torch.Generator().manual_seed(1)
    shape = (B, q.shape[1], q.shape[2], TK)
    if name == "is_causal":  # torch lets query i see keys up to i
        return {"is_causal": True}, {"causal": True, "q_pos": np.arange(q.shape[2])}
    if name == "bool mask":
        mask = torch.rand(shape, generator=made) < 0.6
        mask[..., 0] = True
        return {"attn_mask": mask}, {"mask": mask}
    if name == "float mask":
        mask = torch.randn(shape, generator=made, dtype=torch.float64)
        return {"attn_mask": mask}, {"mask": mask.numpy()}
    return ({"scale": 0.7}, {"scale": 0.7}) if name == "scale" else ({}, {})


def cut(options, at):
    part = dict(options)
    if "mask" in part:
        part["mask"] = part["mask"][..., at]
    if "causal" in part:
        part["kv_pos"] = at.start
    return part


def both_ways(q, k, v, **options):
    """(out, lse) at once, and merged from uneven shards, one of them empty."""
    sink = options.pop("sink", None)
    yield treeattn.attention(q, k, v, **options, sink=sink, return_lse=True)
    parts = [treeattn.partial_attention(q, k[:, :, at], v[:, :, at], **cut(options, at)) for at in CUTS]
    yield treeattn.merge(parts).finish(sink=sink, dtype=str(q.dtype).removeprefix("torch."), return_lse=True)


def assert_computes(q, k, v, options, out, lse):
    limit = tolerance(q, k, v, **options)
    for got_out, got_lse in both_ways(q, k, v, **options):
        assert_close(got_out, out.numpy(), limit.out, "out")
        assert_close(got_lse, lse.numpy(), limit.lse, "lse")


def logits(q, k, scale=D**-0.5):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return scale * (q.double() @ k.double().transpose(2, 3))


def torch_lse(logit, attn_mask=None, is_causal=False):
    if is_causal:
        attn_mask = torch.ones(logit.shape[2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        logit = logit.masked_fill(~attn_mask, -torch.inf) if hidden else logit + attn_mask
    return torch.logsumexp(logit, -1)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(("tokens", "v_width"), [(1, D), (3, 5)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_scaled_dot_product_attention(dtype, name, tokens, v_width, heads):
    q, k, v = tensors(DTYPES[dtype], heads=heads, tokens=tokens, v_width=v_width)
    theirs, ours = case(name, q)
    out = sdpa(q.double(), k.double(), v.double(), enable_gqa=True, **theirs)
    scale = theirs.pop("scale", D**-0.5)
    assert_computes(q, k, v, ours, out, torch_lse(logits(q, k, scale), **theirs))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_its_error_is_at_most_twice_torchs(dtype):
    q, k, v = tensors(DTYPES[dtype], heads=(8, 2), tokens=16)
    right = sdpa(q.double(), k.double(), v.double(), enable_gqa=True).numpy()
    torchs = abs(sdpa(q, k, v, enable_gqa=True).double().numpy() - right).max()
    ours = abs(treeattn.attention(q, k, v).double().numpy() - right).max()
    assert ours <= 2 * torchs


def test_softcap_and_sink_are_what_torch_computes_step_by_step():
    q, k, v = tensors(torch.float32, heads=(6, 2))
    sink = torch.linspace(-2, 2, 6, dtype=torch.float64)
    logit = 3 * torch.tanh(logits(q, k) / 3)
    with_sink = torch.cat([logit, sink[None, :, None, None].expand(B, 6, 3, 1)], -1)
    out = torch.softmax(with_sink, -1)[..., :-1] @ v.double().repeat_interleave(3, 1)
    assert_computes(q, k, v, {"softcap": 3.0, "sink": sink}, out, torch.logsumexp(with_sink, -1))


def test_window_and_kv_len_are_masks_to_torch():
    q, k, v = tensors(torch.float32)
    kv_len, query, key = torch.tensor([20, 37]), torch.tensor([[10], [18], [19]]), torch.arange(TK)
    seen = (query - 6 <= key) & (key <= query + 2) & (key < kv_len[:, None, None, None])
    out = sdpa(q.double(), k.double(), v.double(), attn_mask=seen)
    options = {"window": (6, 2), "q_pos": query[:, 0], "kv_len": kv_len}
    got = treeattn.attention(q, k, v, **options, return_lse=True)
    limit = tolerance(q, k, v, **options)
    assert_close(got[0], out.numpy(), limit.out)
    assert_close(got[1], torch_lse(logits(q, k), seen).numpy(), limit.lse, "lse")


def test_attention_is_torchs_gradient_of_the_energy():
    q, k, v = tensors(torch.float64, heads=(6, 2))
    zeta = torch.zeros(B, 6, 3, D, dtype=torch.float64, requires_grad=True)
    energy = torch.logsumexp(logits(q, k) + zeta @ v.repeat_interleave(3, 1).transpose(2, 3), -1)
    (gradient,) = torch.autograd.grad(energy.sum(), zeta)
    assert np.allclose(treeattn.attention(q, k, v), gradient.numpy(), atol=1e-14)
    assert np.allclose(treeattn.energy(q, k, v, zeta.detach()), energy.detach().numpy(), atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_taken_where_they_are(dtype):
    q, k, v = tensors(DTYPES[dtype])
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)  # strided, as a token-major cache is
    arrays = [t.double().numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for t in (q, k, v)]
    out = treeattn.attention(q, turned, v)
    assert out.dtype == q.dtype
    assert np.array_equal(on_host(out), treeattn.attention(*arrays))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_quantised_tensors_are_taken_with_their_scales(name):
    q, k, v = tensors(torch.float32)
    k, v = ((20 * t).to(getattr(torch, name)) for t in (k, v))
    scale = torch.full((B, 4, 1, 1), 0.05)
    out = sdpa(q.double(), 0.05 * k.double(), 0.05 * v.double()).numpy()
    got = treeattn.attention(q, k, v, k_scale=scale, v_scale=scale)
    assert_close(got, out, tolerance(q, k, v, k_scale=scale, v_scale=scale).out + 1e-7)


def test_a_tensor_that_needs_a_gradient_is_refused_in_one_sentence():
    q, k, v = tensors(torch.float32)
    with pytest.raises(InputError, match=r"^q: expected an array, got Tensor \("):
        treeattn.attention(q.requires_grad_(), k, v)
