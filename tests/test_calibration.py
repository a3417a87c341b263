"""The measured cost model: what is fitted to known times, and measuring on ranks that are threads, and on MPI."""

import itertools
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn import PartialState, TreeComm
from treeattn.calibration import timing as calibration
from treeattn.calibration.fitting import Timed, fit, least_squares
from treeattn.calibration.probes import probes_for
from treeattn.costs.catalog import Link
from treeattn.costs.choosing import candidates, choose_radices
from treeattn.costs.model import DEFAULT_MODEL, CostModel
from treeattn.costs.pricing import cost
from treeattn.errors import TreeattnError
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices
from treeattn.planning.saved import check_plan
from treeattn.steps.session import Session
from treeattn.steps.shortcut import Shortcut
from treeattn.testing import run_ranks
from treeattn.transports.base import with_tags
from treeattn.transports.emulation import DelayedTransport, Delays
from treeattn.wrapping import team_of

ROW, ROWS = 520, 32
MERGING = 10.0


def names(hosts, ranks=1):
    return tuple(f"h{host}" for host in range(hosts) for _ in range(ranks))


def timed_by(model, hosts, shared=False, noise=lambda: 0.0):
    """What steps would take by a model, but for noise: shares by which they are longer."""
    for probe in probes_for(hosts, ROWS, shared):
        us = cost(probe.plan, probe.rows * ROW, model).total_us * (1 + noise())
        yield Timed(probe.plan, probe.rows * ROW, us, 1.5 * us)


def fitted(model, hosts, shared=False):
    return fit(list(timed_by(model, hosts, shared)), model.merge_gb_per_s)


def off(found, right, hosts, shared=False, payload=ROWS * ROW):
    """By which shares all candidates are forecast too high."""
    plans = [plan_allreduce(hosts, each) for each in candidates(hosts, shared=shared)]
    return [cost(plan, payload, found).total_us / cost(plan, payload, right).total_us - 1 for plan in plans]


def model_of(between, **others):
    return replace(DEFAULT_MODEL, between=between, merge_gb_per_s=MERGING, round_us=0.0, **others)


LATENCIES, GAPS, RATES, CALLS = st.floats(30, 1e4), st.floats(0, 0.1), st.floats(0.5, 50), st.floats(0, 1e4)


@given(LATENCIES, GAPS, RATES, CALLS, st.integers(2, 9), st.sampled_from([1, 2]), st.booleans())
@settings(deadline=None, max_examples=50)
def test_a_model_fitted_to_what_steps_take_forecasts_every_plan(alpha, gap, rate, call, hosts, ranks, shared):
    right, labels = model_of(Link(alpha, rate, "", gap * alpha), call_us=call), names(hosts, ranks)
    found = fitted(right, labels, shared)
    assert np.abs(off(found, right, labels, shared)).max() < 0.03


@given(LATENCIES, st.floats(0, 0.1), RATES, CALLS, st.integers(4, 9), st.sampled_from([2, 4]), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=25)
def test_an_exchange_that_takes_longer_than_trees_tells_how_many_ranks_can_send_at_once(
    alpha, gap, rate, call, hosts, crowding, ranks
):
    trunk = max(2.0, hosts / crowding)
    right = model_of(Link(alpha, rate, "", gap * alpha, trunk=trunk), call_us=call)
    labels = names(hosts, ranks)
    assert np.abs(off(fitted(right, labels), right, labels)).max() < 0.05


@pytest.mark.parametrize("limit", [16384, 32768])
def test_exchanges_whose_messages_are_large_tell_which_ones_need_a_handshake(limit):
    right, labels = model_of(Link(100.0, 5.0, "", 2.0, ((limit, 300.0),))), names(8)
    found = fitted(right, labels)
    assert [each for each, _ in found.between.steps] == [limit]
    assert found.between.steps[0][1] == pytest.approx(300.0, rel=1e-3)
    assert off(found, right, labels) == pytest.approx([0] * 6, abs=1e-3)


@pytest.mark.parametrize("lanes", [1, 2, None])
def test_steps_through_all_ranks_of_a_host_tell_how_many_can_send_at_once(lanes):
    right, labels = model_of(Link(20.0, 0.05, "", 2.0, lanes=lanes), call_us=30.0, piece_us=4.0), names(3, 4)
    found = fitted(right, labels, shared=True)
    assert found.between.lanes == lanes
    assert off(found, right, labels, shared=True) == pytest.approx([0] * 8, abs=1e-2)


@given(st.lists(st.floats(-0.05, 0.05), min_size=10, max_size=10), st.sampled_from([None, 2.0]))
@settings(deadline=None, max_examples=40)
def test_times_that_are_off_by_some_shares_make_forecasts_that_are_off_by_little_more(noise, trunk):
    right, labels, shares = model_of(Link(1000.0, 1.0, "", 30.0, trunk=trunk), call_us=300.0), names(8, 2), iter(noise)
    found = fit(list(timed_by(right, labels, True, lambda: next(shares))), MERGING)
    single = [
        abs(each)
        for each, way in zip(off(found, right, labels, True), candidates(labels), strict=True)
        if way.leaders == 1
    ]
    assert max(single) < 4 * 0.05


def test_a_trunk_is_not_supposed_where_noise_alone_speaks_for_it():
    """By Akaike's criterion it is now and then, and then one that hinders little."""
    random = np.random.default_rng(0)
    right, labels, found = model_of(Link(1000.0, 1.0, "", 30.0)), names(8, 2), []
    for _ in range(20):
        noise = lambda: random.uniform(-0.05, 0.05)  # noqa: E731
        found.append(fit(list(timed_by(right, labels, True, noise)), MERGING).between.trunk)
    assert found.count(None) >= 12
    assert all(each is None or each >= 4 for each in found)


def test_on_one_host_a_window_and_messages_are_fitted_each_to_its_steps():
    window, inside = Link(0.5, 3.0, "", 0.1), Link(2.0, 6.0, "", 0.5)
    right, labels = model_of(DEFAULT_MODEL.between, window=window, inside=inside, call_us=9.0), names(1, 6)
    found = fitted(right, labels, shared=True)
    for shared in (True, False):
        assert np.abs(off(found, right, labels, shared)).max() < 0.03
    assert found.between == DEFAULT_MODEL.between


def test_racks_have_a_link_of_their_own():
    labels = tuple(f"r{rack}/{host}" for rack in range(3) for host in range(3))
    right = model_of(Link(100.0, 5.0, "", 1.0), rack=Link(10.0, 5.0, "", 1.0))
    found = fitted(right, labels)
    assert found.between.alpha_us == pytest.approx(100.0, rel=0.02)
    assert found.rack.alpha_us < 0.2 * found.between.alpha_us
    assert np.abs(off(found, right, labels)).max() < 0.02


def test_jitter_is_what_a_round_takes_more_at_the_99th_percentile():
    right, labels = model_of(Link(100.0, 5.0, "", 2.0)), names(5)
    steps = [each._replace(p99_us=each.p50_us + 7.0) for each in timed_by(right, labels)]
    alone = [each for each in steps if each.plan.radices == Radices()]
    assert fit(alone, MERGING).between.jitter_us == pytest.approx(7.0)


@given(st.integers(1, 6), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_no_other_numbers_of_at_least_0_solve_equations_better(equations, unknowns, data):
    """Where some are 0, the others are the ordinary solution: all choices of those are tried."""
    numbers = st.integers(-5, 5)
    rows = np.array(
        data.draw(
            st.lists(st.lists(numbers, min_size=unknowns, max_size=unknowns), min_size=equations, max_size=equations)
        ),
        float,
    )
    values = np.array(data.draw(st.lists(numbers, min_size=equations, max_size=equations)), float)
    found, least = least_squares(rows, values), np.linalg.norm(values)
    for some in itertools.chain(*(itertools.combinations(range(unknowns), count) for count in range(1, unknowns + 1))):
        solved = np.linalg.lstsq(rows[:, some], values, rcond=None)[0]
        if (solved >= 0).all():
            least = min(least, np.linalg.norm(rows[:, some] @ solved - values))
    assert (found >= 0).all()
    assert np.linalg.norm(rows @ found - values) <= least + 1e-6


@given(
    st.lists(st.sampled_from(["a", "b", "r/c", "r/d", "s/e"]), min_size=2, max_size=12),
    st.integers(1, 64),
    st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_probes_are_plans_worth_a_look_at_two_sizes(hosts, rows, shared):
    probes = probes_for(tuple(hosts), rows, shared)
    worth = candidates(hosts, shared=shared) + candidates(hosts)
    for probe in probes:
        check_plan(probe.plan)
        assert probe.plan.radices in worth
    assert {each.rows for each in probes} == {rows, rows // 8 or rows * 8}
    whole = [each.plan.radices for each in probes if each.rows == rows]
    assert candidates(hosts, shared=shared)[0] in whole
    assert len(whole) == len(set(whole))


def test_runs_are_repeated_in_turns_and_each_as_often_as_it_should_be():
    now, begun = [0.0], []

    def run(seconds):
        begun.append(seconds)
        now[0] += seconds

    counts = {1.0: 1, 2.0: 2, 3.0: 100}
    times = calibration.in_turns(lambda: now[0], [lambda s=each: run(s) for each in counts], list(counts.values()))
    assert times == [[seconds] * count for seconds, count in counts.items()]
    assert [seconds for seconds, _ in itertools.groupby(begun)] == [1.0, 2.0, 3.0, 2.0, 3.0]


class Runs:
    """Runs of known seconds on a clock that only they move, for a channel of one rank; ``factor`` makes all longer."""

    def __init__(self, seconds):
        self.now, self.begun, self.factor = 0.0, [], lambda: 1.0
        self.transport = SimpleNamespace(clock=lambda: self.now)
        self.all = [partial(self._run, *each) for each in enumerate(seconds)]

    def _run(self, number, seconds):
        self.begun.append(number)
        self.now += seconds * self.factor()

    def gather(self, data):
        return [data]

    def medians(self):
        return calibration._quantiles(self, self.all)[: len(self.all)]


LEAST = 2 + calibration.SETTLING + 1 + calibration.FEWEST


@given(st.lists(st.floats(1e-5, 2.0), min_size=1, max_size=12))
def test_steps_are_repeated_for_as_long_as_each_other_or_for_another_turn(seconds):
    runs = Runs(seconds)
    assert runs.medians() == pytest.approx(seconds, rel=1e-3)
    share = calibration.SECONDS / len(seconds)
    for number, each in enumerate(seconds):
        count = Counter(runs.begun)[number]
        assert LEAST <= count <= max(LEAST, 2 * share / each + LEAST)
        assert count * each >= 0.9 * share or count >= calibration.MOST


def test_long_steps_have_fewer_turns():
    """Eight hosts whose wires take 10 ms."""
    delays = (1, 2, 3, 2, 6, 1, 2, 1, 2)
    runs = Runs([10e-3 * each for each in delays])
    runs.medians()
    turn = calibration.SETTLING + 1 + calibration.FEWEST
    assert [Counter(runs.begun)[number] for number in range(9)] == [
        2 + turn * {1: 3, 2: 2, 3: 1, 6: 1}[each] for each in delays
    ]
    firsts = [number for number, _ in itertools.groupby(runs.begun)]
    assert firsts == [*range(9), *range(9), *range(9), 0, 1, 3, 5, 6, 7, 8, 0, 5, 7]


@given(st.lists(st.floats(1.0, 2.0), min_size=1, max_size=200))
def test_what_a_step_usually_takes_is_a_median_and_of_few_repeats_not_quite(times):
    found, at, count = calibration._usual(times), sorted(times), len(times)
    assert at[(count - 1) // 3] <= found <= at[count // 2]
    assert found >= at[max((count - 1) // 2 - 2, 0)]


def test_of_three_turns_one_may_be_slow_from_end_to_end():
    """However much longer its repeats take."""
    assert calibration._usual([5.0, 1.0, 1.0]) == calibration._usual([1.0, 90.0, 1.0]) == 1.0


def test_a_moment_in_which_all_is_slow_spoils_no_median():
    seconds = [1e-3, 2e-3, 3e-3]
    alone = Runs(seconds)
    alone.medians()
    for start in range(5):
        runs = Runs(seconds)
        until = (start + 1) * alone.now / 5
        runs.factor = lambda runs=runs, until=until: 3.0 if until - alone.now / 5 <= runs.now < until else 1.0
        assert runs.medians() == pytest.approx(seconds)


def test_plans_with_tags_of_their_own_share_one_transport():
    """The second plan's message is waited for first."""

    def body(transport):
        other = 1 - transport.rank
        views = [with_tags(transport, first) for first in (0, 1)]
        got = [np.zeros(1, np.uint8) for _ in views]
        receives = [view.recv_init(data, other, 0) for view, data in zip(views, got, strict=True)]
        transport.start(receives)
        sends = [view.isend(np.array([7 + at], np.uint8), other, 0) for at, view in enumerate(views)]
        for receive in reversed(receives):
            transport.wait([receive])
        transport.wait(sends)
        return [int(each[0]) for each in got]

    assert run_ranks(2, body) == [[7, 8]] * 2


def state_of(rank, heads=8):
    out = np.random.default_rng(rank).standard_normal((1, heads, 1, 128), dtype=np.float32)
    return PartialState.from_lse(out, np.zeros((1, heads, 1), np.float32), base="e")


def delayed(transport, hosts, delays, **options):
    far = DelayedTransport(transport, hosts, delays)
    with TreeComm(far, **options) as comm:
        before = comm.calibration
        comm.allreduce(state_of(comm.rank))
        first = comm.calibration
        with TreeComm(far, **options) as again:
            again.allreduce(state_of(comm.rank))
            return before, first, again.calibration, comm.plan_for(state_of(0).nbytes)


def test_auto_measures_once_and_all_ranks_have_the_same_model():
    hosts, delays = ["a", "a", "b", "b", "c", "c"], Delays(0.0, 5e-3)
    found = run_ranks(6, lambda transport: delayed(transport, hosts, delays, plan="auto"))
    for before, first, again, plan in found:
        assert before is None
        assert first is again, "remembered with what both communicators were made of"
        assert first == found[0][1]
        assert plan.radices == choose_radices(hosts, state_of(0).nbytes, model=first.model)
    model = found[0][1].model
    assert cost(plan_allreduce(hosts), 16640, model).terms.total > 5e3, "a delay at least"
    plans = {str(each) for each in candidates(hosts)}
    assert (
        {"all,all", "all,2", "all,reduce", "all,all,leaders=all"}
        <= {each.plan for each in found[0][1].samples}
        <= plans
    )
    assert all(0 < each.p50_us <= each.p99_us for each in found[0][1].samples)
    payload = state_of(0).nbytes
    assert {each.nbytes for each in found[0][1].samples} == {payload, payload // 8}


def test_rank_0_alone_fits_and_all_have_its_bits(monkeypatch):
    """Any other rank's arithmetic would be off here."""

    def off():
        return threading.current_thread().name != "rank 0"

    monkeypatch.setattr(calibration, "fit", lambda samples, rate: fit(samples, rate * (1 + 2**-40 * off())))
    found = run_ranks(2, lambda transport: delayed(transport, ["a", "b"], Delays(0, 1e-3), plan="auto")[1])
    assert found[0] == found[1]


def test_racks_are_measured_apart():
    hosts = ["r0/a", "r0/b", "r1/c", "r1/d"]
    ((_, found, _, _), *_) = run_ranks(4, lambda transport: delayed(transport, hosts, Delays(0, 1e-3), plan="auto"))
    assert "all,all,all" in {each.plan for each in found.samples}
    assert found.model.rack.source == "measured"


def test_windows_are_measured_and_nothing_is_left_in_them():
    def body(transport):
        with TreeComm(transport, plan="auto") as comm:
            merged = [comm.allreduce(state_of(comm.rank)).packed.tobytes() for _ in range(3)]
            return merged, {each.plan for each in comm.calibration.samples}

    found = run_ranks(4, body, hosts=["a", "a", "b", "b"])
    assert len(set(itertools.chain(*(merged for merged, _ in found)))) == 1
    assert all("shared,all" in plans for _, plans in found)


def test_steps_are_measured_on_the_short_way_that_they_take(monkeypatch):
    way, taken = Shortcut.merge, Counter()

    def counting(self, *arguments):
        found = way(self, *arguments)
        taken[threading.current_thread().name] += found is not None
        return found

    monkeypatch.setattr(Shortcut, "merge", counting)

    def body(transport):
        with TreeComm(transport, plan="auto") as comm:
            comm.allreduce(state_of(comm.rank))  # the first of this communicator, and no short way

    run_ranks(4, body, hosts=["a", "a", "b", "b"])
    assert len(taken) == 4
    assert min(taken.values()) >= calibration.FEWEST


def test_a_rank_without_room_for_what_is_measured_is_an_error_on_all_and_the_next_call_measures(monkeypatch):
    make, failing = Session._exchange_on, [True]

    def no_memory(self, *arguments):
        if failing and threading.current_thread().name == "rank 1":
            raise MemoryError("no memory for the buffers")
        return make(self, *arguments)

    monkeypatch.setattr(Session, "_exchange_on", no_memory)

    def body(transport):
        with TreeComm(transport, plan="auto") as comm:
            with pytest.raises((MemoryError, TreeattnError), match="no memory for the buffers"):
                comm.allreduce(state_of(comm.rank))
            assert comm.calibration is None
            assert not team_of(comm).channel._branches
            transport.allgather(b"")
            failing.clear()
            return comm.allreduce(state_of(comm.rank)).packed.tobytes(), comm.calibration

    found = run_ranks(3, body, hosts=["a", "a", "b"])
    assert len({bits for bits, _ in found}) == 1
    assert all(each == found[0][1] and each is not None for _, each in found)


def test_counters_do_not_count_what_is_measured():
    def body(transport):
        with TreeComm(transport, plan="auto") as comm:
            comm.allreduce(state_of(comm.rank))
            return comm.stats, comm.plan_for(state_of(0).nbytes).predict(state_of(0).nbytes).per_rank[comm.rank]

    for stats, predicted in run_ranks(2, body, hosts=["a", "b"]):
        assert (stats.messages, stats.bytes, stats.rounds) == (predicted.messages, predicted.bytes, predicted.rounds)


def test_a_model_chooses_and_auto_takes_none():
    slow = replace(DEFAULT_MODEL, between=Link(1.0, 1e-3, "", largest_radix=2))

    def body(transport):
        with TreeComm(transport, model=slow) as comm:
            return comm.plan.radices

    hosts = list("abcdefgh")
    (radices,) = set(run_ranks(8, body, hosts=hosts))
    assert radices == Radices(None, 2, scheme="reduce")
    assert (
        cost(plan_allreduce(hosts, radices), 16640, slow).total_us < cost(plan_allreduce(hosts), 16640, slow).total_us
    )


def test_one_process_has_nothing_to_measure():
    with TreeComm(plan="auto") as comm:
        comm.allreduce(state_of(0))
        assert comm.calibration is None


def test_a_model_of_its_own_differs_by_its_digest():
    assert CostModel(*[Link(1, 1, "")] * 2).digest != CostModel(*[Link(2, 1, "")] * 2).digest
