"""Decoding in groups of heads: the bits of one group, so many times the messages, and the errors of every rank."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import ShardedKVCache, TreeComm
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.errors import CommError, InputError
from treeattn.local import run_backend
from treeattn.pipeline import parts_of
from treeattn.testing import run_ranks
from treeattn.wrapping import team_of

BATCH, KV_HEADS, GROUP, TOKENS, WIDTH, KEYS = 2, 5, 2, 3, 8, 12


def arrays(rank, keys=KEYS):
    q = np.random.default_rng(0).standard_normal((BATCH, KV_HEADS * GROUP, TOKENS, WIDTH), dtype=np.float32)
    rng = np.random.default_rng([1, rank])
    k, v = (rng.standard_normal((BATCH, KV_HEADS, keys, WIDTH), dtype=np.float32) for _ in "kv")
    return q, k, v


def options_of(name, rank):
    rng = np.random.default_rng([2, rank])
    heads = KV_HEADS * GROUP
    return {
        "none": {},
        "mask": {"mask": rng.random((1, heads, TOKENS, KEYS)) > 0.3},
        "bias": {"mask": rng.standard_normal((BATCH, 1, 1, KEYS), dtype=np.float32)},
        "causal": {"causal": True, "q_pos": np.arange(20, 20 + TOKENS), "kv_pos": rank * KEYS},
        "lengths": {"kv_len": np.array([KEYS - rank, 0])},
        "sink and lse": {"sink": np.linspace(-1, 1, heads, dtype=np.float32), "return_lse": True},
        "scales": {
            "k_scale": rng.random((BATCH, KV_HEADS, 3, 1), dtype=np.float32),
            "v_scale": rng.random((1, KV_HEADS, 1, 1), dtype=np.float32),
        },
    }[name]


def bits(found):
    return [None if each is None else each.tobytes() for each in (found if isinstance(found, tuple) else (found,))]


NAMES = ["none", "mask", "bias", "causal", "lengths", "sink and lse", "scales"]


@given(
    st.sampled_from(NAMES), st.integers(2, KV_HEADS), st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
    st.sampled_from([None, 0]), st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_bits_do_not_depend_on_the_groups(name, groups, hosts, root, deterministic):
    def body(transport):
        with TreeComm(transport, deterministic=deterministic) as comm:
            call = {"comm": comm, "root": root, **options_of(name, comm.rank)}
            one = treeattn.decode(*arrays(comm.rank), **call)
            return bits(one), bits(treeattn.decode(*arrays(comm.rank), pipeline=groups, **call))

    for one, several in run_ranks(len(hosts), body, hosts=hosts):
        assert several == one


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes_and_layouts(layout, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    given = [each.astype(kind) for each in arrays(0)]
    given = given if layout == "bhtd" else [each.transpose(0, 2, 1, 3) for each in given]
    one, several = (treeattn.decode(*given, comm=None, layout=layout, pipeline=groups) for groups in (1, 3))
    assert several.dtype == one.dtype
    assert bits(several) == bits(one)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_parts_of_many_keys_have_the_bits_of_the_whole(backend):
    """So many that a call of fewer heads alone would cut them into more parts."""
    q, k, v = arrays(0, keys=9000)
    spec, args = resolve(q[:1], k[:1], v[:1], Options())
    whole = run_backend(spec, args, backend)
    for part in parts_of(spec, args, 3):
        found = run_backend(part.spec, part.args, backend)
        np.testing.assert_array_equal(found.packed, whole.packed[:, part.first : part.last])


def test_so_many_times_the_messages_and_no_agreement_between():
    def body(transport):
        with TreeComm(transport) as comm:
            for counted in (False, True):  # the first time, lanes are opened and agree
                before = comm.stats
                treeattn.decode(*arrays(comm.rank), comm=comm, pipeline=3)
                found = comm.stats - before
                if counted:
                    size = BATCH * GROUP * TOKENS * (WIDTH + 2) * 4
                    each = [comm.plan_for(heads * size).predict(heads * size).per_rank[comm.rank] for heads in (1, 2)]
                    assert found == each[0] + each[1] + each[1]

    run_ranks(4, body, hosts=list("aabb"))


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_leaves_nothing_in_flight():
    def body(transport):
        with TreeComm(transport) as comm:
            q, k, v = arrays(comm.rank)
            for _ in range(3):
                with pytest.raises(InputError, match=r"^k: expected"):
                    treeattn.decode(q, k[0] if comm.rank == 1 else k, v, comm=comm, pipeline=2)
                treeattn.decode(q, k, v, comm=comm, pipeline=5)

    run_ranks(3, body, hosts=list("aab"))


def test_a_kernel_that_fails_in_the_middle_is_told_to_all():
    from treeattn.testing import FakeBackend

    def body(transport):
        fake = FakeBackend()
        with TreeComm(transport) as comm:
            treeattn.decode(*arrays(comm.rank), comm=comm)
            fake.failures |= {"prepare": RuntimeError("device lost")} if comm.rank == 1 else {}
            kind = RuntimeError if comm.rank == 1 else CommError
            with pytest.raises(kind, match="device lost"):
                treeattn.decode(*arrays(comm.rank), comm=comm, pipeline=2, backend=fake)

    run_ranks(2, body)


@pytest.mark.parametrize(("pipeline", "text"), [(0, "from 1 to 8, got 0"), (9, "from 1 to 8"), (True, "got True")])
def test_what_can_not_be_in_flight_is_refused(pipeline, text):
    with pytest.raises(InputError, match=f"^pipeline: expected a number of groups .*{text}"):
        treeattn.decode(*arrays(0), comm=None, pipeline=pipeline)


@pytest.mark.parametrize("pipeline", [0, 9, "2", None, 2.0, True])
@pytest.mark.parametrize("others", [1, 3])
def test_a_wrong_number_of_groups_on_one_rank_is_raised_on_all(pipeline, others):
    def body(transport):
        with TreeComm(transport) as comm:
            for _ in range(2 if others == 1 else 1):
                if others == 1:
                    treeattn.decode(*arrays(comm.rank), comm=comm)
                with pytest.raises(InputError, match=r"^pipeline: expected a number of groups from 1 to 8, got "):
                    treeattn.decode(*arrays(comm.rank), comm=comm, pipeline=pipeline if comm.rank == 1 else others)
            return bits(treeattn.decode(*arrays(comm.rank), comm=comm, pipeline=np.int64(3)))

    first, *rest = run_ranks(3, body)
    assert all(each == first for each in rest)


OTHERS = {
    "allreduce": lambda comm: comm.allreduce(treeattn.PartialState.identity((1, 2, 1, 4))),
    "reduce": lambda comm: comm.reduce(treeattn.PartialState.identity((1, 2, 1, 4))),
    "consult": lambda comm: team_of(comm).consult("test", (), {}),
    "bcast": lambda comm: comm.bcast(1.0),
    "a wrong shape": lambda comm: treeattn.decode(*arrays(0)[:2], None, comm=comm, pipeline=2),
    "a sink of its own": lambda comm: treeattn.decode(
        *arrays(0), comm=comm, pipeline=4, sink=np.full(KV_HEADS * GROUP, comm.rank, np.float32)
    ),
}


def call(comm, what):
    if what in OTHERS:
        return OTHERS[what](comm)
    return treeattn.decode(*arrays(comm.rank), comm=comm, pipeline=what)


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 5, 0, 6, 9, *OTHERS]), min_size=2, max_size=2, unique_by=str),
    st.lists(st.booleans(), min_size=2, max_size=5).filter(lambda firsts: len(set(firsts)) > 1),
    st.sampled_from(["aaaaa", "aabbc", "abcde"]),
    st.lists(st.sampled_from([1, 2, 4, 5]), max_size=3),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_ranks_that_do_different_things_all_hear_of_it_at_once(different, firsts, hosts, before, flying):
    """Whatever lanes were opened before, and whatever is in flight; what follows is as if nothing had been."""
    one = np.full((1, 2, 1, 6), 1.5, np.float32)

    def body(transport):
        with TreeComm(transport) as comm:
            right = bits(treeattn.decode(*arrays(comm.rank), comm=comm))
            assert all(bits(call(comm, groups)) == right for groups in before)
            begun = comm.allreduce_begin(treeattn.PartialState(one, treeattn.PartialState.identity(one.shape).ops))
            found = None if flying else bits(begun.end().packed)
            with pytest.raises((InputError, CommError)) as caught:
                call(comm, different[0] if firsts[comm.rank] else different[1])
            text = str(caught.value)
            assert all(bits(call(comm, groups)) == right for groups in (2, 1, 5))
            return text.split(" (rank")[0], found or bits(begun.end().packed)

    found = run_ranks(len(firsts), body, hosts=hosts[: len(firsts)])
    assert all(each[1] == found[0][1] for each in found)
    if all(isinstance(each, int) and 1 <= each <= KV_HEADS for each in different):
        assert {text for text, _ in found} == {found[0][0]}
        assert found[0][0].startswith("pipeline: expected the same on every rank, got ")


def test_more_groups_than_heads_are_refused():
    with pytest.raises(InputError, match="pipeline: expected at most 5 groups, the number of KV heads, got 6"):
        treeattn.decode(*arrays(0), comm=None, pipeline=6)


def test_a_cache_decodes_in_groups_too():
    def body(transport):
        with TreeComm(transport) as comm:
            cache = ShardedKVCache(comm, batch=BATCH, kv_heads=KV_HEADS, head_dim=WIDTH, dtype="float32", capacity=64)
            q, k, v = arrays(7)
            cache.prefill(k, v)
            return bits(cache.decode(q)), bits(cache.decode(q, pipeline=4))

    for one, several in run_ranks(3, body):
        assert several == one
