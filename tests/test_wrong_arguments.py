"""Anything at all, as any argument of anything public: it works, or is one InputError that names the argument."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn.errors import InputError
from treeattn.testing import run_ranks

F32 = np.float32


class Stubborn:
    """Has no truth value, no length, and is no array."""

    def __repr__(self) -> str:
        return "Stubborn()"

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


ANYTHING = [
    None, True, np.bool_(True), 0, 1, -1, 2**70, -(2**70), 10**400, np.int64(3), 1.5, 1e300, 1e-300, float("nan"),
    float("inf"), -float("inf"), F32(1), 1j, "", "x", "float32", b"x", (), (1,), (1, 2), (1, 2, 3), [], [None], {},
    {"a"}, range(3), slice(3), np.array(3), np.array([]), np.array([1, 2]), np.array([[1.0]]), np.array("x"),
    np.array(None, dtype=object), np.array([2**63], np.uint64), np.ma.array([1.0, 2.0], mask=[0, 1]),
    np.datetime64("2020-01-01"), Stubborn(), int, print,
]  # fmt: skip


def array(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=F32)


Q, K, V = array(1, 2, 3, 4), array(1, 2, 6, 4), array(1, 2, 6, 4)
QKV = {"q": Q, "k": K, "v": V}
SIZES = {"batch": 1, "kv_heads": 2, "head_dim": 4, "capacity": 20}


def filled(comm: Any) -> treeattn.ShardedKVCache:
    cache = treeattn.ShardedKVCache(comm, **SIZES)
    cache.append(K, V)
    return cache


def calls(comm: treeattn.TreeComm) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What is public, by name, with arguments that are right.

    Nothing is compiled for it: each worker asks when it reads this file, and would wait for the other.
    """
    state = treeattn.PartialState.from_lse(Q, array(1, 2, 3), base="e")
    cache, at = filled(comm), {"q_pos": [3, 4, 5], "kv_pos": 0}
    collective = {
        "decode": (treeattn.decode, {**QKV, "comm": comm, **at}),
        "decode in groups": (treeattn.decode, {**QKV, "comm": comm, **at, "pipeline": 2}),
        "prefill": (treeattn.prefill, {**QKV, "comm": comm, **at}),
        "ring": (treeattn.baselines.ring, {**QKV, "comm": comm, **at}),
        "allreduce": (comm.allreduce, {"state": state}),
        "allreduce_begin": (lambda state, out=None: comm.allreduce_begin(state, out=out).end(), {"state": state}),
        "reduce": (comm.reduce, {"state": state}),
        "bcast": (comm.bcast, {"array": Q}),
        "ShardedKVCache": (treeattn.ShardedKVCache, {"comm": comm, **SIZES}),
        "cache.prefill": (lambda k, v: filled(comm).prefill(k, v), {"k": K, "v": V}),
        "cache.decode": (cache.decode, {"q": Q}),
        "cache.attend": (cache.attend, {"q": Q, "q_pos": [3, 4, 5]}),
    }
    alone = {
        "attention": (treeattn.attention, QKV),
        "partial_attention": (treeattn.partial_attention, QKV),
        "energy": (treeattn.energy, {**QKV, "zeta": np.zeros(4)}),
        "zigzag": (treeattn.zigzag, {"tokens": 8, "size": 2, "rank": 0}),
        "merge": (treeattn.merge, {"states": [state]}),
        "plan_for": (comm.plan_for, {"payload_bytes": 100}),
        "wire_bytes": (comm.wire_bytes, {"shape": (1, 2, 3, 4)}),
        "wire_error": (comm.wire_error, {"payload_bytes": 100}),
        "beside": (comm.beside, {"work": list}),
        "append": (lambda k, v: filled(None).append(k, v), {"k": K, "v": V}),
        "truncate": (lambda length: filled(None).truncate(length), {"length": 1}),
        "identity": (treeattn.PartialState.identity, {"shape": (1, 2, 3, 4)}),
        "state.merge": (state.merge, {"other": state}),
        "finish": (state.finish, {}),
        "to_lse": (state.to_lse, {"base": 2}),
        "from_lse": (treeattn.PartialState.from_lse, {"out": Q, "lse": array(1, 2, 3), "base": 2}),
        "predict": (comm.plan.predict, {"payload_bytes": 100}),
        "steps": (comm.plan.steps, {"rank": 0}),
        "TreeComm": (treeattn.TreeComm, {}),
    }
    return collective if comm.size > 1 else {**collective, **alone}


def refusal(call: Any, arguments: dict[str, Any]) -> str | None:
    """What the InputError of a call says; None where there is none."""
    try:
        call(**arguments)
    except InputError as error:
        return str(error)
    return None


CALLS = calls(treeattn.TreeComm())
ARGUMENTS = [(name, argument) for name, (call, _) in CALLS.items() for argument in inspect.signature(call).parameters]
FLAGS = [(name, argument) for name, argument in ARGUMENTS if argument in ("causal", "return_lse", "deterministic")]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_anything_as_any_argument_works_or_is_one_error_that_names_it(name, argument):
    call, right = CALLS[name]
    for value in ANYTHING:
        text = refusal(call, {**right, argument: value})
        assert text is None or text.startswith(f"{argument}: expected "), f"{value!r}: {text}"


@pytest.mark.parametrize(("name", "argument"), FLAGS)
def test_flags_are_true_or_false_and_nothing_that_is_like_it(name, argument):
    call, right = CALLS[name]
    for value in (0, 1, "no", [False], np.array(True), Stubborn()):
        with pytest.raises(InputError, match=f"^{argument}: expected True or False, got "):
            call(**{**right, argument: value})
    for value in (True, np.bool_(False)):
        call(**{**right, argument: value})


def test_what_one_rank_gets_wrong_is_one_error_on_every_rank():
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            return {
                (name, argument): refusal(call, {**right, argument: Stubborn()} if comm.rank == 1 else right)
                for name, (call, right) in calls(comm).items()
                for argument in inspect.signature(call).parameters
                if argument != "comm"  # without it, a rank is not one of these
            }

    first, second = run_ranks(2, body, timeout=120)
    assert len(second) > 100
    for (name, argument), text in second.items():
        assert text is not None, (name, argument)
        assert text.startswith(f"{argument}: expected "), name
        assert first[name, argument] == f"{text} (rank 1 on host localhost)"


# ---- dtypes


def of_another_library(name: str) -> list[Any]:
    """A dtype as PyTorch has it, and a type as JAX has it."""
    torch = type("dtype", (), {"__module__": "torch", "__str__": lambda _: f"torch.{name}"})
    return [torch(), type(name, (), {"dtype": np.dtype(getattr(ml_dtypes, name, name))})]


FORMS = {
    "float32": ["float32", "f4", "<f4", "single", F32, np.dtype("f4"), np.dtype(">f4"), *of_another_library("float32")],
    "float16": ["float16", "f2", "half", np.half, np.dtype("e"), *of_another_library("float16")],
    "float64": ["float64", "double", float, np.double, *of_another_library("float64")],
    "bfloat16": [
        "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), *of_another_library("bfloat16"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_a_dtype_is_taken_in_every_form_wherever_one_is_taken(name, dtype):
    assert treeattn.ShardedKVCache(None, **SIZES, dtype=dtype).dtype.name == name
    assert treeattn.partial_attention(**QKV).finish(dtype=dtype).dtype.name == name
    k, v = (each.astype(getattr(ml_dtypes, name, name)) for each in (K, V))
    assert treeattn.attention(Q, k, v, kv_dtype=dtype).shape == Q.shape
    if name in ("float16", "bfloat16"):
        assert treeattn.TreeComm(wire_dtype=dtype).wire_dtype == name
    else:
        assert treeattn.PartialState.identity((1, 1, 1, 1), dtype=dtype).dtype.name == name
        assert treeattn.TreeComm().wire_bytes((1, 1, 1, 2), dtype) == 4 * np.dtype(name).itemsize


# ---- sizes


@pytest.mark.parametrize("name", ["batch", "kv_heads", "head_dim", "v_head_dim", "block_size", "capacity"])
def test_sizes_of_a_cache_beyond_all_addresses_are_one_error_on_every_rank(name):
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            with pytest.raises(InputError, match=f"^{name}: expected an integer below 2\\*\\*63, got {2**70}"):
                treeattn.ShardedKVCache(comm, **{**SIZES, name: 2**70})
            with pytest.raises(InputError, match=r"^capacity: expected at most .* tokens of .* bytes each"):
                treeattn.ShardedKVCache(comm, **{**SIZES, "capacity": 2**62})
            return filled(comm).length

    assert run_ranks(2, body) == [6, 6]
