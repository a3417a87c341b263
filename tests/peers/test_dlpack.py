"""Arrays of other libraries, real ones: taken where they are, and results given back as theirs."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn.arguments.arrays import to_array
from treeattn.arguments.devices import give, kind_of
from treeattn.errors import InputError
from treeattn.testing import FakeBackend, run_ranks

pytestmark = pytest.mark.peers

LIBRARIES = ["torch", "jax"]
DTYPES = ["float32", "float16", "bfloat16"]


def library(name: str) -> Any:
    pytest.importorskip(name, reason=f"{name} is not installed; `make test-peers` installs what it can")
    return importlib.import_module("jax.numpy" if name == "jax" else name)


def numpys(dtype: str = "float32") -> list[Any]:
    rng = np.random.default_rng(0)
    made = [rng.standard_normal((1, heads, n, 16), dtype=np.float32) for heads, n in ((4, 1), (2, 30), (2, 30))]
    return [array.astype(getattr(ml_dtypes, dtype, dtype)) for array in made]


def theirs(name: str, arrays: Any) -> list[Any]:
    """Make the library's own arrays, in memory of its own."""
    module = library(name)
    if name == "jax":
        return [module.asarray(array) for array in arrays]
    return [give(array.copy(), "torch") for array in arrays]


def assert_same(got: Any, right: Any, name: str) -> None:
    """Assert that ``got`` is the library's and has the bits of NumPy's ``right``."""
    if isinstance(right, tuple):
        assert len(got) == len(right)
        for pair in zip(got, right, strict=True):
            assert_same(*pair, name)
        return
    module = importlib.import_module("jax" if name == "jax" else name)
    assert isinstance(got, module.Array if name == "jax" else module.Tensor)
    assert str(got.dtype).removeprefix("torch.") == right.dtype.name
    assert to_array("got", got).tobytes() == right.tobytes()


def in_a_cache(q: Any, k: Any, v: Any) -> Any:
    cache = treeattn.ShardedKVCache(
        None, batch=1, kv_heads=2, head_dim=16, capacity=64, dtype=str(k.dtype).removeprefix("torch.")
    )
    cache.append(k[:, :, :20], v[:, :, :20])
    cache.prefill(k[:, :, 20:], v[:, :, 20:])
    return cache.decode(q, return_lse=True)


def merged(q: Any, k: Any, v: Any) -> Any:
    parts = [treeattn.partial_attention(q, k[:, :, at], v[:, :, at]) for at in (slice(0, 7), slice(7, 30))]
    identity = treeattn.PartialState.identity(parts[0].shape)
    return treeattn.merge([identity, *parts]).finish(return_lse=True)


def imported(q: Any, k: Any, v: Any) -> Any:
    out, lse = treeattn.partial_attention(q, k, v).to_lse(base=2)
    return treeattn.PartialState.from_lse(out, lse, base=2).to_lse(base="e")


WAYS: dict[str, Any] = {
    "attention": lambda q, k, v: treeattn.attention(q, k, v, return_lse=True),
    "its out alone": lambda q, k, v: treeattn.attention(q, k, v, layout="bthd"),
    "partial_attention": lambda q, k, v: treeattn.partial_attention(q, k, v).finish(return_lse=True),
    "a state in q's dtype": lambda q, k, v: treeattn.partial_attention(q, k, v).finish(
        dtype=str(q.dtype).removeprefix("torch.")
    ),
    "merge": merged,
    "to_lse and from_lse": imported,
    "energy": lambda q, k, v: treeattn.energy(q, k, v, q),
    "decode": lambda q, k, v: treeattn.decode(q, k, v, comm=None, return_lse=True),
    "a baseline": lambda q, k, v: treeattn.baselines.ring(q, k, v, comm=None, return_lse=True),
    "prefill": lambda q, k, v: treeattn.prefill(q, k, v, None, causal=False, return_lse=True),
    "ShardedKVCache": in_a_cache,
    "a backend on a device": lambda q, k, v: treeattn.attention(q, k, v, backend=FakeBackend(), return_lse=True),
}


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_results_are_of_the_callers_kind_with_the_bits_of_numpys(way: str, dtype: str, name: str) -> None:
    arrays = numpys(dtype)
    if way == "its out alone":
        arrays = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
    assert_same(WAYS[way](*theirs(name, arrays)), WAYS[way](*arrays), name)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_taken_without_a_copy(dtype: str, name: str) -> None:
    for array in theirs(name, numpys(dtype)):
        address = array.data_ptr() if name == "torch" else array.unsafe_buffer_pointer()
        assert to_array("q", array).ctypes.data == address


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_pytorch_gets_results_without_a_copy(dtype: str) -> None:
    library("torch")
    out = numpys(dtype)[0]
    given = give(out, "torch")
    assert given.data_ptr() == out.ctypes.data
    assert_same(given, out, "torch")
    assert give(out[:, :, :0], "torch").shape == (1, 4, 0, 16)


def test_jax_gets_results_without_a_copy_where_they_begin_on_a_cache_line() -> None:
    library("jax")
    room = np.zeros(64 + 4 * 64, np.uint8)
    out = room[-room.ctypes.data % 64 :][: 4 * 64].view(np.float32).reshape(1, 4, 1, 16)
    assert give(out, "jax").unsafe_buffer_pointer() == out.ctypes.data


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_a_tensor_may_be_written_to(dtype: str, layout: str) -> None:
    torch = library("torch")
    arrays = numpys(dtype)
    right = treeattn.attention(*arrays)
    if layout == "bthd":
        arrays, right = [array.swapaxes(1, 2) for array in arrays], right.swapaxes(1, 2)
    tensors = theirs("torch", arrays)
    room = torch.empty(right.shape, dtype=tensors[0].dtype)
    assert treeattn.attention(*tensors, layout=layout, out=room) is room
    assert np.array_equal(to_array("out", room), right)


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_kind_is_that_of_q(name: str) -> None:
    q, k, v = numpys()
    their_q, their_k, their_v = theirs(name, (q, k, v))
    right = treeattn.attention(q, k, v)
    assert kind_of(treeattn.attention(q, their_k, their_v)) == "numpy"
    assert_same(treeattn.attention(their_q, k, v), right, name)
    state = treeattn.partial_attention(their_q, k, v)
    for read_only in (state.o, state.packed):  # the state's own memory, which nobody is to write to
        assert isinstance(read_only, np.ndarray)
        assert not read_only.flags.writeable


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_every_rank_gets_its_callers_kind(name: str, pipeline: int) -> None:
    arrays = numpys()
    tensors = theirs(name, arrays)

    def body(transport: Any, q: Any, k: Any, v: Any) -> Any:
        mine = slice(0, 12) if transport.rank == 0 else slice(12, 30)
        with treeattn.TreeComm(transport) as comm:
            for _ in range(2):  # the second takes the shortest way
                out = treeattn.decode(q, k[:, :, mine], v[:, :, mine], comm=comm, return_lse=True, pipeline=pipeline)
                state = treeattn.partial_attention(q, k[:, :, mine], v[:, :, mine])
                both = comm.allreduce(state), comm.allreduce_begin(state).end()
            return *out, *(each.finish() for each in both)

    for got, right in zip(
        run_ranks(2, lambda transport: body(transport, *tensors)),
        run_ranks(2, lambda transport: body(transport, *arrays)),
        strict=True,
    ):
        assert_same(got, right, name)


def refusal(name: str, **changes: Any) -> str:
    q, k, v = theirs(name, numpys())
    with pytest.raises(InputError) as caught:
        treeattn.attention(**{"q": q, "k": k, "v": v, **changes})
    return str(caught.value)


def test_what_pytorch_can_t_hand_over_is_named() -> None:
    torch = library("torch")
    k = torch.zeros(1, 2, 30, 16)
    assert refusal("torch", k=k.to_sparse()).startswith("k: expected an array, got Tensor (")
    assert refusal("torch", q=torch.empty(1, 4, 1, 16, device="meta")).startswith("q: expected an array, got Tensor (")
    assert refusal("torch", v=torch.nn.Parameter(k)).startswith("v: expected an array, got Parameter (")
    assert refusal("torch", q=k.to(torch.complex64)).startswith("q: expected dtype float32")
    assert refusal("torch", out=torch.zeros(1, 4, 1, 15)).startswith("out: expected shape (1, 4, 1, 16), the output's")
    assert refusal("torch", out=torch.zeros(1, 4, 1, 16).bfloat16()) == "out: expected q's dtype float32, got bfloat16"
    assert refusal("torch", out=[0.0]) == "out: expected a NumPy array or a torch tensor, in host memory, got list"


def test_what_jax_can_t_hand_over_is_named() -> None:
    jax, jnp = pytest.importorskip("jax", reason="jax is not installed"), library("jax")
    out = jnp.zeros((1, 4, 1, 16))
    assert refusal("jax", out=out) == "out: expected an array to write to, got a read-only one"
    _, k, v = numpys()
    with pytest.raises(InputError, match=r"^q: expected an array, got \w*Tracer"):
        jax.jit(lambda q: treeattn.attention(q, k, v))(out)
