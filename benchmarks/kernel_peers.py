"""The libraries that are compared: each gives the forms in which it can do a case, of which the fastest counts.

All work on the same keys and values where they lie. Where a library has no special call for grouped heads, the heads of
a group are packed as query tokens, so that it reads each key once.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from kernel_cases import Case, options_of

import treeattn
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Args, Options, Spec
from treeattn.backends.registry import find

__all__ = ["PEERS", "Form", "UnsupportedError", "extra_bytes"]

Array: TypeAlias = npt.NDArray[Any]
Sets: TypeAlias = Sequence[tuple[Array, Array]]


class Form(NamedTuple):
    """One way to decode: ``call(i)`` works on set ``i``; ``answer(i)`` gives its output (1, Hq, Tq, Dv) for a check."""

    call: Callable[[int], Any]
    answer: Callable[[int], Array]


Forms: TypeAlias = dict[str, Form]


class UnsupportedError(Exception):
    """A library can't do a case; the message says why."""


def _forms(**calls: Callable[[int], Array]) -> Forms:
    return {name: Form(call, call) for name, call in calls.items()}


def treeattn_forms(case: Case, q: Array, sets: Sets, threads: int) -> Forms:
    options = options_of(case)
    return {
        "attention": Form(
            lambda i: treeattn.attention(q, *sets[i], **options),
            lambda i: treeattn.partial_attention(q, *sets[i], **options).finish(),  # not rounded to q's dtype
        )
    }


def prepared_forms(case: Case, q: Array, sets: Sets, threads: int) -> Forms:
    """Only the backend's prepared call: no validation, and a state as the result."""
    calls = [resolved(case, q, k, v) for k, v in sets]
    prepared, out = find("cpu").prepare(calls[0][0]), np.empty(calls[0][0].packed_shape, np.float32)

    def call(i: int) -> Array:
        prepared(calls[i][1], out)
        return out

    return {"prepared": Form(call, lambda i: call(i)[..., :-2] / out[..., -2:-1])}


def resolved(case: Case, q: Array, k: Array, v: Array) -> tuple[Spec, Args]:
    return resolve(q, k, v, Options(**options_of(case)))


def extra_bytes(case: Case, q: Array, k: Array, v: Array) -> int:
    """Most bytes that the first prepared call has allocated at once, its threads' workspaces among them."""
    spec, args = resolved(case, q, k, v)
    prepared, out = find("cpu").prepare(spec), np.empty(spec.packed_shape, np.float32)
    tracemalloc.start()
    try:
        prepared(args, out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def numpy_forms(case: Case, q: Array, sets: Sets, threads: int) -> Forms:
    if case.dtype not in ("float32", "float64"):
        raise UnsupportedError(f"NumPy has no fast products of {case.dtype}")
    grouped = q.reshape(1, case.kv_heads, -1, case.width)

    def softmax(logits: Array) -> Array:
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def matmul(i: int) -> Array:
        k, v = sets[i]
        return (softmax(grouped @ k.swapaxes(2, 3) * case.width**-0.5) @ v).reshape(q.shape)

    def einsum(i: int) -> Array:
        k, v = sets[i]
        weights = softmax(np.einsum("bhgd,bhnd->bhgn", grouped, k) * case.width**-0.5)
        return np.einsum("bhgn,bhnd->bhgd", weights, v).reshape(q.shape)

    return _forms(matmul=matmul, einsum=einsum)


def torch_forms(case: Case, q: Array, sets: Sets, threads: int) -> Forms:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    tensors = [(_tensor(torch, k), _tensor(torch, v)) for k, v in sets]
    heads = _tensor(torch, q)
    packed = heads.reshape(1, case.kv_heads, -1, case.width)

    def give(out: Any) -> Array:
        return out.reshape(1, case.q_heads, 1, -1).float().numpy()

    def matmul(i: int) -> Array:
        k, v = tensors[i]
        weights = torch.softmax((packed @ k.transpose(2, 3)).float() * case.width**-0.5, -1).to(v.dtype)
        return give(weights @ v)

    return _forms(
        matmul=matmul,
        sdpa_packed=lambda i: give(sdpa(packed, *tensors[i])),
        sdpa_enable_gqa=lambda i: give(sdpa(heads, *tensors[i], enable_gqa=True)),
        compiled_flex_attention=_flex(torch, heads, tensors, give),
    )


def _tensor(torch: Any, array: Array) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _flex(torch: Any, q: Any, tensors: list[tuple[Any, Any]], give: Callable[[Any], Array]) -> Callable[[int], Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda i: give(compiled(q, *tensors[i], enable_gqa=True))


def onnxruntime_forms(case: Case, q: Array, sets: Sets, threads: int) -> Forms:
    """GroupQueryAttention on shared buffers: it writes the last token again, in place, and reads all."""
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
    if case.dtype not in kinds:
        raise UnsupportedError(f"ONNX Runtime's GroupQueryAttention has no {case.dtype} on the CPU")
    kind, past = kinds[case.dtype], [1, case.kv_heads, case.tokens, case.width]
    shapes = {
        name: [1, 1, heads * case.width]
        for name, heads in zip("qkv", (case.q_heads, *2 * [case.kv_heads]), strict=True)
    }
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
    inputs += [helper.make_tensor_value_info(name, kind, past) for name in ("past_k", "past_v")]
    inputs += [helper.make_tensor_value_info("length", TensorProto.INT32, [1])]
    inputs += [helper.make_tensor_value_info("total", TensorProto.INT32, [])]
    outputs = [helper.make_tensor_value_info("out", kind, shapes["q"])]
    outputs += [helper.make_tensor_value_info(name, kind, past) for name in ("all_k", "all_v")]
    node = helper.make_node(
        "GroupQueryAttention", [each.name for each in inputs], [each.name for each in outputs],
        domain="com.microsoft", num_heads=case.q_heads, kv_num_heads=case.kv_heads, scale=case.width**-0.5,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "decode", inputs, outputs), opset_imports=opsets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    bound = [_bind(session, case, q, k, v) for k, v in sets]

    def call(i: int) -> Array:
        binding, out = bound[i]
        session.run_with_iobinding(binding)
        return out.reshape(q.shape)

    return _forms(GroupQueryAttention=call)


def _bind(session: Any, case: Case, q: Array, k: Array, v: Array) -> tuple[Any, Array]:
    """Bind one set's memory itself, as the past and as the present."""
    binding, out = session.io_binding(), np.empty((1, 1, q.size), q.dtype)
    binding.bind_cpu_input("q", q.reshape(1, 1, -1))
    binding.bind_cpu_input("length", np.array([case.tokens - 1], np.int32))
    binding.bind_cpu_input("total", np.array(case.tokens, np.int32))
    for name, array in (("k", k), ("v", v)):
        binding.bind_cpu_input(name, np.ascontiguousarray(array[:, :, -1]).reshape(1, 1, -1))
        binding.bind_input(f"past_{name}", "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output(f"all_{name}", "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    binding.bind_output("out", "cpu", 0, out.dtype, out.shape, out.ctypes.data)
    return binding, out


def jax_forms(case: Case, q: Array, sets: Sets, threads: int) -> Forms:
    import jax
    from jax import numpy as jnp

    arrays = [(jax.device_put(k[0]), jax.device_put(v[0])) for k, v in sets]
    grouped = jnp.asarray(q.reshape(case.kv_heads, -1, case.width))

    @jax.jit
    def attend(q: Any, k: Any, v: Any) -> Any:
        logits = jnp.einsum("hgd,hnd->hgn", q, k, preferred_element_type=jnp.float32) * case.width**-0.5
        weights = jax.nn.softmax(logits, -1).astype(v.dtype)
        return jnp.einsum("hgn,hnd->hgd", weights, v, preferred_element_type=jnp.float32)

    def call(i: int) -> Array:
        return np.asarray(attend(grouped, *arrays[i])).reshape(q.shape)

    return _forms(einsum=call)


PEERS: dict[str, Callable[[Case, Array, Sets, int], Forms]] = {
    "treeattn": treeattn_forms,
    "prepared": prepared_forms,
    "onnxruntime": onnxruntime_forms,
    "torch": torch_forms,
    "jax": jax_forms,
    "numpy": numpy_forms,
}
