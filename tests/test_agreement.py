"""A wrong rank raises one clear error on every rank, nobody hangs, and the next call works."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn.errors import CommError, InputError, MissingDependencyError
from treeattn.execution.agreement import DIFFER, Attempt, Description, Header, Signature, conclude
from treeattn.execution.executor import Exchange
from treeattn.planning.plan import HEADER_BYTES
from treeattn.testing import FakeBackend, run_ranks
from treeattn.wrapping import team_of

SPEC = importlib.util.spec_from_file_location("comm_program", Path(__file__).parent / "ranks" / "comm_program.py")
program = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(program)

OWN = {
    "no state": ("InputError", "state: expected a PartialState, got NoneType"),
    "root out of range": ("InputError", "root: expected a rank from 0 to {last}, got 99"),
    "root is no number": ("InputError", "root: expected a rank from 0 to {last}, got '0'"),
    "kernel out of memory": ("MemoryError", "no room for scores"),
    "array of objects": ("InputError", "array: expected an array of numbers, got dtype object"),
    "error in consult": ("ValueError", "not mine"),
    "wrong out": ("InputError", "out: expected a state like"),
}


def assert_every_rank_heard(reports, quarrel):
    """One rank made another call than the others: each of them must have got the right error."""
    size = len(reports)
    common, other, wrong, _, _ = reports[0][quarrel]
    outcomes = [report[quarrel][3] for report in reports]
    what = f"all {common}, but rank {wrong} {other}: {outcomes}"
    if other in program.BAD:
        kind, text = OWN[other]
        text = text.format(last=size - 1)
        assert outcomes[wrong][0] == kind, what
        assert outcomes[wrong][1].startswith(text), what
        for rank in set(range(size)) - {wrong}:
            assert outcomes[rank][0] == (kind if kind == "InputError" else "CommError"), what
            assert f"rank {wrong} on host " in outcomes[rank][1], what
            assert text in outcomes[rank][1], what
    elif size > 1:
        assert all(each == outcomes[0] for each in outcomes), what
        assert outcomes[0][0] == "InputError", what
        assert ": expected the same on every rank, got " in outcomes[0][1], what
        assert f" on rank {wrong}" in outcomes[0][1], what


def assert_program_went_well(reports):
    """Judge what the ranks of `program.report` say."""
    size = len(reports)
    assert [report["rank"] for report in reports] == list(range(size))
    agreed = reports[0]["results"]["allreduce"][0]
    for name in program.GOOD:
        roots = {"reduce to first": 0, "reduce to last": size - 1}
        for report in reports:
            once, again = report["results"][name]
            assert once == again, f"{name}: another result the second time"
            assert once[0] == "ok", f"{name} on rank {report['rank']}: {once}"
            if name in roots:
                assert once[1] == (agreed[1] if report["rank"] == roots[name] else None)
            else:
                assert once == reports[0]["results"][name][0], f"{name}: rank {report['rank']} has other bits"
    assert reports[0]["results"]["consult"][0][1] == [{"rank": rank} for rank in range(size)]
    assert reports[0]["results"]["bcast"][0][1] == list(range(7))
    assert max(report["error"] for report in reports) < 1e-6
    for call in range(2):
        predicted = reports[0]["counted"][call][1]
        assert [tuple(report["counted"][call][0]) for report in reports] == [tuple(each) for each in predicted]
    for kind in ("quarrels", "first quarrels"):
        by_quarrel = zip(*(report[kind] for report in reports), strict=True)
        for quarrel in by_quarrel:
            assert_every_rank_heard([[each] for each in quarrel], 0)
            assert all(each[4] == agreed[1] for each in quarrel), "the next call works, with the same bits"


HOSTS = {1: "a", 2: "ab", 3: "aba", 4: "aabb", 5: "abcab", 6: "aaabbc", 7: "abcdaba"}


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Compile the merge before ranks have to wait for it."""
    program.expected(2)
    program.expected(2, dtype="float64")


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("one_host", [False, True])
def test_threads(size, one_host):
    hosts, stride = (None, 4) if one_host else (list(HOSTS[size]), 1)
    assert_program_went_well(run_ranks(size, lambda t: program.report(t, stride=stride), hosts=hosts))


@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("options", [{"plan": "binary"}, {"plan": "flat,2"}, {"deterministic": True}], ids=str)
def test_other_plans_with_messages_that_wait_and_arrive_in_any_order(size, options):
    hosts = list(HOSTS[size])
    reports = run_ranks(size, lambda t: program.report(t, stride=4, **options), hosts=hosts, rendezvous=True, seed=size)
    assert_program_went_well(reports)
    if options != {"plan": "binary"}:
        assert reports[0]["results"]["allreduce"][0][1] == reports[0]["in rank order"]


IN_PIECES = {"plan": "shared,all,leaders=all", "stride": 25}


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_mpi(mpirun, ranks):
    """With four ranks, states then also travel in pieces, as many as a host has ranks."""
    options = {
        2: [{}],
        3: [{"plan": "binary", "stride": 2}],
        4: [{"hosts": list("abab"), "stride": 2}, {"hosts": list("abab"), **IN_PIECES}],
        7: [{"hosts": list("abcdaba"), "stride": 5}],
    }[ranks]
    assert_programs_went_well(mpirun, ranks, options)


def test_mpich(mpich_run):
    """Windows inside two hosts, and messages between them."""
    hosts = list("abab")
    assert_programs_went_well(mpich_run, 4, [{"hosts": hosts, "stride": 5}, {"hosts": hosts, **IN_PIECES}])


def assert_programs_went_well(run, ranks, options):
    """Run the program in one job with each of these options, by which bits are the same."""
    job = run("comm_program", ranks, *map(json.dumps, options))
    each = [job.reports[turn :: len(options)] for turn in range(len(options))]
    for reports in each:
        assert_program_went_well(reports)
    assert len({str(reports[0]["results"]["allreduce"]) for reports in each}) == 1


CALLS = st.sampled_from(list(program.CALLS))


@given(st.integers(2, 5), st.lists(st.tuples(CALLS, CALLS, st.integers(0, 4)), min_size=1, max_size=6), st.integers())
@settings(deadline=None, max_examples=60)
def test_any_sequence_of_calls_ends_alike_on_every_rank(size, sequence, seed):
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            found = [program.one_wrong(comm, common, other, wrong % size) for common, other, wrong in sequence]
            return found, program.GOOD["allreduce"](comm)

    ended = run_ranks(size, body, hosts=list(HOSTS[size]), seed=seed)
    assert len({last for _, last in ended}) == 1
    for number, (common, other, _) in enumerate(sequence):
        outcomes = [found[number] for found, _ in ended]
        went_well = common == other and common in program.GOOD
        assert all((each[0] == "ok") == went_well for each in outcomes), outcomes


@given(st.integers(2, 4), st.lists(st.lists(CALLS, min_size=4, max_size=4), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_whatever_each_rank_calls_all_succeed_or_all_fail(size, calls):
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            return [program.outcome(lambda: program.CALLS[each[comm.rank]](comm))[0] for each in calls]  # noqa: B023

    for number, kinds in enumerate(zip(*run_ranks(size, body), strict=True)):
        same = len(set(calls[number][:size])) == 1 and calls[number][0] in program.GOOD
        assert [kind == "ok" for kind in kinds] == [same] * size


# ---- headers

HEADERS = st.builds(Header, st.just(3), st.integers(0, 15), st.sampled_from([5, 2**64 - 1]), st.sampled_from([0, 9]))


@given(HEADERS, HEADERS, HEADERS)
def test_headers_combine_in_any_order_and_any_number_of_times(a, b, c):
    assert a.combine(b) == b.combine(a)
    assert a.combine(b).combine(c) == a.combine(b.combine(c))
    assert a.combine(a) == a


@given(st.lists(HEADERS, min_size=1, max_size=6))
def test_a_difference_anywhere_is_seen_everywhere(headers):
    combined = headers[0]
    for header in headers[1:]:
        combined = combined.combine(header)
    words = {(header.digest, header.check) for header in headers}
    marked = any(header.status & DIFFER for header in headers)
    assert bool(combined.status & DIFFER) == (len(words) > 1 or marked)


@given(HEADERS)
def test_headers_survive_the_way(header):
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack()) == header


def test_ranks_out_of_step_are_an_error():
    with pytest.raises(CommError, match="out of step: one is at step 2, another at step 1"):
        Header(1, 0, 0, 0).combine(Header(2, 0, 0, 0))


def test_a_signature_has_the_same_digest_in_every_process():
    digest = "Signature('x', 1, (('a', 2.5),), (1, 2, 3, 4), 'f').digest"
    script = f"from treeattn.execution.agreement import Signature; print({digest})"
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {str(Signature("x", 1, (("a", 2.5),), (1, 2, 3, 4), "f").digest)}


# ---- conclusions


def conclusion(descriptions, rank=0, own=None):
    with pytest.raises(Exception, match=r"[a-z]") as caught:
        conclude(descriptions, ["n1", "n1", "n2"], rank, own)
    return caught.value


def described(*fields, **more):
    return Description("decode", None, [list(field) for field in fields], **more)


def test_what_differs_is_named_with_its_values_and_ranks():
    shapes = [(1, 32, 1, 128), (1, 16, 1, 128), (1, 32, 1, 128)]
    error = conclusion([Description.decode(described(("q.shape", shape)).encode()) for shape in shapes])
    assert type(error) is InputError
    assert str(error) == (
        "q.shape: expected the same on every rank, got (1, 32, 1, 128) on ranks 0, 2 and (1, 16, 1, 128) on rank 1"
    )


def test_check_words_are_told_by_their_details():
    error = conclusion([described(check=n, details={"sink": 4, "cache length": n}) for n in (7, 7, 8)])
    assert str(error) == "cache length: expected the same on every rank, got 7 on ranks 0, 1 and 8 on rank 2"


def test_another_ranks_error_keeps_its_class_and_words():
    failed = Description.of_error(MissingDependencyError("bfloat16 needs ml_dtypes"))
    error = conclusion([described(), described(), failed])
    assert type(error) is MissingDependencyError
    assert str(error) == "bfloat16 needs ml_dtypes (rank 2 on host n2)"


def test_a_class_of_ones_own_is_carried_as_the_one_of_ours_it_is():
    class MyError(InputError):
        pass

    error = conclusion(
        [Description.of_error(MyError("k: no")), described(), Description.of_error(MyError("k: no"))], rank=1
    )
    assert type(error) is InputError
    assert str(error) == "k: no (rank 0 on host n1, and rank 2)"


def test_an_error_that_is_not_ours_is_told():
    error = conclusion([described(), Description.of_error(ZeroDivisionError("by zero")), described()])
    assert type(error) is CommError
    assert str(error) == "rank 1 on host n1 failed with ZeroDivisionError: by zero"


class MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def test_an_error_without_words_is_told_too():
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            wrong = MuteError() if comm.rank == 1 else None
            calls = [
                lambda: team_of(comm).exchange(Attempt(None, None, wrong or ValueError("mine"))),
                lambda: team_of(comm).consult("consult", (), {}, wrong),
                lambda: comm.bcast(Unreadable() if comm.rank == 1 else np.ones(2)),
            ]
            return [kind_of(call) for call in calls], comm.bcast(1 if comm.rank == 0 else None).item()

    for rank, found in enumerate(run_ranks(3, body)):
        mute = ["MuteError"] * 3
        others = ["ValueError", "CommError", "CommError"]
        assert found == (mute if rank == 1 else others, 1)


class Unreadable:
    def __array__(self, *_, **__):
        raise MuteError()


def kind_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_ones_own_error_is_raised_as_it_is():
    own = KeyError("mine")
    assert conclusion([Description.of_error(own), described(), described()], own=own) is own


def test_a_long_error_is_told_in_full():
    text = "k: expected something, got " + "x" * 3000

    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            error = InputError(text) if comm.rank == 1 else None
            return program.outcome(lambda: team_of(comm).consult("test", (), {}, error))[1]

    assert run_ranks(2, body) == [f"{text} (rank 1 on host localhost)", text]


def test_fields_that_cannot_travel_are_an_error_on_every_rank():
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            odd = Attempt(
                Signature("test", None, (), (1, 1, 1, 3), "float32"), program.state_of(0, (1, 1, 1, 1)), None,
                check=comm.rank, details=lambda: {"x": 1 / 0} if comm.rank == 0 else {},
            )  # fmt: skip
            return program.outcome(lambda: team_of(comm).exchange(odd))

    assert run_ranks(2, body) == [
        ["ZeroDivisionError", "division by zero"],
        ["CommError", "rank 0 on host localhost failed with ZeroDivisionError: division by zero"],
    ]


def test_numbers_equal_in_value_but_not_in_kind_differ():
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            state = program.state_of(comm.rank)
            fields = (("scale", 1 if comm.rank else 1.0),)
            signature = Signature("test", None, fields, state.packed.shape, "float32")
            return program.outcome(lambda: team_of(comm).exchange(Attempt(signature, state, None)))[0]

    assert run_ranks(2, body) == ["InputError", "InputError"]


def test_a_device_that_fails_to_give_its_state_is_told_to_all():
    def body(transport):
        fake = FakeBackend()
        state = treeattn.PartialState.identity((1, 2, 1, 4), backend=fake)
        with treeattn.TreeComm(transport) as comm:
            comm.allreduce(state)
            fake.failures |= {"to_host": RuntimeError("device lost")} if comm.rank == 1 else {}
            trouble = program.outcome(lambda: comm.allreduce(state))
            fake.failures.clear()
            comm.allreduce(state)
            return trouble

    assert run_ranks(2, body) == [
        ["CommError", "rank 1 on host localhost failed with RuntimeError: device lost"],
        ["RuntimeError", "device lost"],
    ]


def decoded(comm, heads, groups):
    q, k = (np.full((1, heads, tokens, 4), comm.rank * tokens % 5, np.float32) for tokens in (1, 3))
    return treeattn.decode(q * 0, k, k, comm=comm, pipeline=groups)


@pytest.mark.parametrize(("groups", "fails_at"), [(1, 0), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_rank_without_room_for_a_new_shape_is_told_to_all(monkeypatch, groups, fails_at, before):
    """Whichever exchange of a call has none; all go on then, and the shape is merged once there is room."""
    make, left = Exchange.__init__, {}

    def making(self, plan, transport, *others, **named):
        left[transport.rank] = left.get(transport.rank, 99) - 1
        if transport.rank == 1 and left[1] < 0:
            raise MemoryError("no room for buffers")
        make(self, plan, transport, *others, **named)

    monkeypatch.setattr(Exchange, "__init__", making)

    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            rest = [decoded(comm, 6, before).tobytes()] if before else []
            left[comm.rank] = fails_at
            trouble = program.outcome(lambda: decoded(comm, 3, groups))
            left[comm.rank] = 99
            rest += [decoded(comm, heads, each).tobytes() for each in (3, 1) for heads in (6, 3)]
            return trouble, rest

    told, rest = zip(*run_ranks(3, body, hosts=list("aab")), strict=True)
    assert told[1] == ["MemoryError", "no room for buffers"]
    assert {tuple(each) for each in (told[0], told[2])} == {
        ("CommError", "rank 1 on host a failed with MemoryError: no room for buffers")
    }
    assert rest[0] == rest[1] == rest[2]
    assert rest[0][-4:-2] == rest[0][-2:]


def test_agreement_adds_no_message_to_the_hot_path():
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            state = program.state_of(comm.rank)
            comm.allreduce(state)
            before = comm.stats
            for _ in range(5):
                comm.allreduce(state)
            return comm.stats - before, comm.plan.predict(state.nbytes).per_rank[comm.rank]

    for counted, predicted in run_ranks(4, body, hosts=list("aabb")):
        assert counted.collectives == 0
        assert (counted.messages, counted.bytes) == (5 * predicted.messages, 5 * predicted.bytes)


def test_calls_of_one_size_take_turns_without_a_message_more():
    def body(transport):
        with treeattn.TreeComm(transport) as comm:
            state = program.state_of(comm.rank)
            signatures = [Signature("test", None, (("layer", n),), state.packed.shape, "float32") for n in range(3)]
            before, found = comm.stats, set()
            for n in (0, 1, 2, 1, 0):
                found.add(program.bits(team_of(comm).exchange(Attempt(signatures[n], state, None))))
            return len(found), (comm.stats - before).messages, comm.plan.predict(0).per_rank[comm.rank].messages

    for results, messages, predicted in run_ranks(3, body):
        assert results == 1
        assert messages == 5 * predicted
