"""The plan "mpi": MPI's own collective with a compiled operator, on real ranks; and who is refused it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import TreeComm
from treeattn.errors import BackendError, InputError
from treeattn.execution.collective import CollectiveExchange
from treeattn.planning.plan import HEADER_BYTES
from treeattn.testing import run_ranks
from treeattn.transports import mpi_operator
from treeattn.wire_form import WireForm, merger, operator


def assert_went_well(reports, size):
    assert [report["rank"] for report in reports] == list(range(size))
    first = reports[0]
    agreed = first["results"]["allreduce"][0]
    for report in reports:
        assert "plan='mpi'" in report["repr"]
        assert report["flight"] == [agreed] * 4
        for name, found in report["results"].items():
            root = {"reduce to first": 0, "reduce to last": size - 1}.get(name)
            assert len(set(found)) == 1, f"{name} on rank {report['rank']}: other bits the second or third time"
            assert (found[0] is None) == (root is not None and root != report["rank"])
            assert root is not None or found == first["results"][name], f"{name}: rank {report['rank']} has other bits"
        for collectives, messages, sent in report["counted"]:
            assert (collectives, sent) == (1, messages * HEADER_BYTES)
    for quarrel in zip(*(report["quarrels"] for report in reports), strict=True):
        assert_every_rank_heard(quarrel)
        assert all(each[4] == agreed for each in quarrel), "the next call works, with the same bits"


def assert_every_rank_heard(quarrel):
    """One rank made another call than the others: it got an error, and each of them one that names it."""
    for rank, (common, other, wrong, (kind, text), _) in enumerate(quarrel):
        what = f"all {common}, but rank {wrong} {other}; rank {rank} got {kind}: {text}"
        assert kind in ("InputError", "CommError") if rank != wrong else kind != "ok", what
        assert rank == wrong or f"rank {wrong}" in text, what


def test_open_mpi(mpirun):
    """All seven ranks, then three and four, then two and five."""
    reports = mpirun("mpi_collective", 7, "7", "3", "2").reports
    for size in (7, 3, 4, 2, 5):
        assert_went_well([report for report in reports if report["size"] == size], size)


def test_mpich(mpich_run):
    assert_went_well(mpich_run("mpi_collective", 4, "4").reports, 4)


def test_a_rank_that_stays_away_from_the_collective_is_named(mpirun):
    job = mpirun("mpi_collective", 3, "silent", check=False)
    assert job.reports == [{"rank": rank, "ranks": [2], "usable": False} for rank in (0, 1)]
    assert job.rc != 0


@given(st.integers(0, 5), st.sampled_from([(7, "float32"), (8, "float32"), (8, "float64")]), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_the_operator_merges_rows_as_any_plan_does(rows, kind, seed):
    (width, dtype), rng = kind, np.random.default_rng(seed)
    form = WireForm((1, rows, 1, width), dtype)
    left, right = (rng.standard_normal((rows, width)).astype(dtype) for _ in range(2))
    for each in (left, right):
        each[:, -2] = np.abs(each[:, -2]) + 1
        each[:, -1] = np.where(rng.random(rows) < 0.2, -np.inf, rng.integers(-200, 200, rows))
    expected = np.empty(form.nbytes, np.uint8)
    merger(expected, [each.reshape(-1).view(np.uint8) for each in (left, right)], form)()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(operator(form))
    function(left.ctypes.data, right.ctypes.data, np.array([rows], np.int32).ctypes.data, 0)
    assert right.tobytes() == expected.tobytes()


def refused(error, size=2, **options):
    def body(transport):
        with pytest.raises(error) as caught:
            TreeComm(transport, plan="mpi", **options)
        return str(caught.value).partition(" (rank")[0]

    [reason] = set(run_ranks(size, body))
    return reason


def test_ranks_that_are_not_mpis_are_refused():
    assert refused(BackendError) == "plan 'mpi' can't be used: these ranks are not MPI's"


def test_what_it_can_not_keep_is_refused():
    assert refused(InputError, wire_dtype="float16").startswith("wire_dtype: expected None with plan='mpi', got ")
    assert refused(InputError, deterministic=True).startswith("deterministic: expected False with plan='mpi', where ")


def test_a_state_on_a_card_is_refused():
    exchange = object.__new__(CollectiveExchange)  # an exchange of several MPI ranks, of which only `load` matters
    with pytest.raises(BackendError, match=r"^plan 'mpi' merges states on the host, and this one of 'amd' is on a "):
        exchange.load(SimpleNamespace(_packed=object(), ops=SimpleNamespace(name="amd")))


def test_an_mpi_out_of_reach_is_a_reason(monkeypatch):
    def absent():
        raise AttributeError("undefined symbol: MPI_Op_create")

    monkeypatch.setattr(mpi_operator, "_create", absent)
    assert mpi_operator.reasons() == ["MPI_Op_create is out of reach (undefined symbol: MPI_Op_create)"]


def test_one_rank_merges_with_nobody():
    with TreeComm(plan="mpi") as comm:
        state = treeattn.PartialState.identity((1, 2, 1, 4))
        assert comm.allreduce(state) is state
