"""o in 16 bit between ranks: the error it brings, the bytes it saves, and who may ask for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import TreeComm
from treeattn.backends.host import HostOps
from treeattn.errors import InputError
from treeattn.planning.plan import Radices
from treeattn.state import PartialState
from treeattn.testing import run_ranks
from treeattn.testing.oracle import dense, tolerance

NARROW = ["bfloat16", "float16"]
PLANS = [{}, {"deterministic": True}, *({"plan": name} for name in ("oneshot", "flat", "binary"))]
Q_TOKENS, TOKENS, WIDTH = 2, 5, 7


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile before ranks have to wait for it."""
    for narrow in (None, *NARROW):
        for plan in ("auto", "flat,2"):
            outcomes("aa", narrow, {"plan": plan})


def inputs(rank):
    rng = np.random.default_rng(rank)
    return (rng.standard_normal((1, 2, n, WIDTH), dtype=np.float32) for n in (TOKENS, TOKENS))


def query():
    return np.random.default_rng(99).standard_normal((1, 4, Q_TOKENS, WIDTH), dtype=np.float32)


def outcomes(hosts, narrow, options):
    """Output, lse, bits, what was counted and predicted, and the bound, of each rank."""

    def body(transport):
        with TreeComm(transport, wire_dtype=narrow, **options) as comm:
            assert comm.wire_dtype == narrow
            k, v = inputs(comm.rank)
            for _ in range(2):
                before = comm.stats
                out, lse = treeattn.decode(query(), k, v, comm=comm, return_lse=True, backend="reference")
            size = comm.wire_bytes((1, 4, Q_TOKENS, WIDTH))
            predicted = comm.plan_for(size).predict(size).per_rank[comm.rank]
            return out, lse, out.tobytes() + lse.tobytes(), comm.stats - before, predicted, comm.wire_error(size)

    return run_ranks(len(hosts), body, hosts=list(hosts), timeout=120)


@given(st.text("abc", min_size=2, max_size=6), st.sampled_from(NARROW), st.sampled_from(PLANS))
@settings(deadline=None, max_examples=25)
def test_the_error_is_within_its_bound_and_the_bytes_are_as_predicted(hosts, narrow, options):
    k, v = (np.concatenate(each, axis=2) for each in zip(*(inputs(rank) for rank in range(len(hosts))), strict=True))
    right, limit = dense(query(), k, v), tolerance(query(), k, v)
    found = outcomes(hosts, narrow, options)
    assert len({bits for _, _, bits, *_ in found}) == 1
    for out, lse, _, counted, predicted, rounding in found:
        assert np.abs(out - right.out).max() <= limit.out + rounding * np.abs(v).max()
        assert np.abs(lse - right.lse).max() <= limit.lse
        assert counted == predicted


@given(st.text("abc", min_size=2, max_size=6), st.sampled_from(NARROW), st.booleans())
@settings(deadline=None, max_examples=15)
def test_bits_depend_neither_on_the_radix_between_hosts_nor_on_shared_memory(hosts, narrow, deterministic):
    plans = [Radices("shared"), Radices(None), Radices(None, 2), Radices("shared", 3)]
    found = {outcomes(hosts, narrow, {"plan": plan, "deterministic": deterministic})[0][2] for plan in plans}
    assert len(found) == 1


def test_messages_are_about_half_as_long():
    def body(transport):
        shape = 1, 32, 1, 128
        with TreeComm(transport) as whole, TreeComm(transport, wire_dtype="bfloat16") as half:
            assert (whole.wire_bytes(shape), half.wire_bytes(shape)) == (16640, 32 * (128 * 2 + 8))
            assert whole.plan_for(16640).predict(16640).total.bytes == 2 * (32 + 16640)
            assert half.wire_error(half.wire_bytes(shape)) == 2 / 256
            return whole.wire_error(16640)

    assert run_ranks(2, body, hosts=["a", "b"]) == [0.0, 0.0]


def test_ranks_that_want_different_forms_all_hear_of_it():
    def body(transport):
        with pytest.raises(InputError, match=r"^wire_dtype: expected the same on every rank, got None on rank 0 and "):
            TreeComm(transport, wire_dtype="float16" if transport.rank else None)

    run_ranks(3, body)


@pytest.mark.parametrize("wrong", ["float32", "int8", 16, ["float16"], np.dtype("float64"), np.array(["float16"])])
def test_what_is_no_form_of_the_wire_is_refused(wrong):
    with pytest.raises(InputError, match=r"^wire_dtype: expected None, bfloat16, float16, got "):
        TreeComm(wire_dtype=wrong)


def test_float64_states_are_refused_on_every_rank_and_others_still_travel():
    def body(transport):
        q, (k, v) = query(), inputs(transport.rank)
        wide = PartialState(np.ones((1, 2, 1, 6)), HostOps("cpu"))
        with TreeComm(transport, wire_dtype="float16") as comm:
            for call in (
                lambda: comm.allreduce(wide),
                lambda: comm.reduce(wide),
                lambda: treeattn.decode(q.astype(np.float64), k, v, comm=comm, backend="reference"),
            ):
                with pytest.raises(InputError, match=r"^wire_dtype: expected None for float64 states, got 'float16'"):
                    call()
            return treeattn.decode(q, k, v, comm=comm, backend="reference").shape

    assert run_ranks(2, body) == [(1, 4, Q_TOKENS, WIDTH)] * 2


def test_a_communicator_of_one_rank_sends_nothing_and_rounds_nothing():
    comm, q, (k, v) = TreeComm(wire_dtype="bfloat16"), query(), inputs(0)
    np.testing.assert_array_equal(treeattn.decode(q, k, v, comm=comm), treeattn.attention(q, k, v))
    assert comm.wire_error(comm.wire_bytes((1, 4, Q_TOKENS, WIDTH))) == 0


@pytest.mark.parametrize(
    ("arguments", "name"), [(((1, 4, 1),), "shape"), ((None,), "shape"), (((1, 4, 1, 8), "float16"), "dtype")]
)
def test_the_bytes_of_what_is_no_state_are_refused(arguments, name):
    with TreeComm() as comm, pytest.raises(InputError, match=f"^{name}: expected"):
        comm.wire_bytes(*arguments)
