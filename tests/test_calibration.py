"""The measured cost model: what is fitted to known times, and measuring on ranks that are threads, and on MPI."""

import itertools
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn import PartialState, TreeComm
from treeattn.calibration import timing as calibration
from treeattn.calibration.fitting import CLOSE, Sample, add_steps, fit
from treeattn.calibration.probes import probes_for
from treeattn.calibration.timing import Calibration
from treeattn.costs.catalog import Link
from treeattn.costs.choosing import candidates, choose_radices
from treeattn.costs.model import DEFAULT_MODEL, CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.plan import HEADER_BYTES
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices
from treeattn.planning.saved import check_plan
from treeattn.steps.shortcut import Shortcut
from treeattn.testing import run_ranks
from treeattn.transports.emulation import DelayedTransport, Delays

RECORD = 16672


def samples_of(way, link, partners, *, crowd=1):
    """What a link's own formula says of the probes: every size with one partner, two sizes with many."""
    sizes = [32, RECORD, 2 * RECORD, 4 * RECORD]
    kinds = [(1, size, 1) for size in sizes] + [(partners, size, 1) for size in sizes[:2] if partners > 1]
    kinds += [(partners, RECORD, crowd)] * (crowd > 1)
    for many, size, leaders in kinds:
        share = leaders / min(leaders, link.lanes or leaders)
        moving = many * (2 * link.gap_us + link.transfer_us(size)) * share
        took = link.alpha_us + moving + link.handshake_us(size)
        yield Sample(way, many, size, leaders, took, took + link.jitter_us)


@given(
    st.floats(1, 1e4),
    st.floats(0.1, 50),
    st.floats(0, 10),
    st.sampled_from([1, 3, 7]),
    st.booleans(),
    st.floats(0, 100),
)
@settings(deadline=None)
def test_a_link_is_found_in_the_times_that_it_takes(alpha, rate, gap, partners, asks, jitter):
    gap = gap if partners > 1 else 0.0  # which is not told from latency where there are two hosts
    steps = ((65536, 2 * alpha),) if asks else ()
    link = Link(alpha, rate, "measured", gap, steps, jitter_us=jitter)
    found = fit(list(samples_of("between", link, partners)), 10.0)
    assert found.between.alpha_us == pytest.approx(alpha, rel=1e-6, abs=1e-6)
    assert found.between.gap_us == pytest.approx(gap, rel=1e-6, abs=1e-6)
    assert found.between.gb_per_s == pytest.approx(rate, rel=1e-3)
    assert found.between.jitter_us == pytest.approx(jitter, abs=1e-6)
    assert [limit for limit, _ in found.between.steps] == [limit for limit, _ in steps]
    assert [more for _, more in found.between.steps] == pytest.approx([more for _, more in steps], rel=1e-3)
    assert (found.inside, found.window) == (DEFAULT_MODEL.inside, DEFAULT_MODEL.window)


@pytest.mark.parametrize("partners", [1, 7])
@pytest.mark.parametrize("lanes", [1, 1.5, 2, 4, None])
def test_what_all_ranks_of_a_host_take_at_once_tells_how_many_can(lanes, partners):
    link = Link(50.0, 1.0, "measured", lanes=lanes)
    found = fit(list(samples_of("between", link, partners, crowd=4)), 10.0).between.lanes or 4
    assert found == pytest.approx(lanes or 4, rel=1e-4)


def test_a_window_is_half_of_up_and_down():
    """Four ranks: 6 us of latency a round, then merging 4 states at 10 GB/s and reading 4 at 5 GB/s."""
    more = 4 * (RECORD - 32) / 10e3 + 4 * (RECORD - 32) / 5e3
    samples = [Sample("window", 4, 32, 1, 12.0, 13.0), Sample("window", 4, RECORD, 1, 12.0 + more, 14.0 + more)]
    window = fit(samples, 10.0).window
    assert (window.alpha_us, window.jitter_us) == (6.0, pytest.approx(1.0))
    assert window.gb_per_s == pytest.approx(5.0)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_what_rounds_do_not_explain_of_steps_is_the_cost_of_a_call_and_of_each_piece(pieces):
    hosts, link = [host for host in "abc" for _ in range(4)], Link(10.0, 1.0, "", gap_us=1.0)
    model, payload = CostModel(link, link), 16640
    plans = [plan_allreduce(hosts, Radices(leaders=each)) for each in (1, pieces)]
    rounds = [cost(plan, payload, model).total_us for plan in plans]
    steps = [(plans[0], rounds[0] + 30.0), (plans[1], rounds[1] + 30.0 + 7.0 * (pieces - 1))][:pieces]
    found = add_steps(model, payload, steps)
    assert (found.call_us, found.piece_us) == (pytest.approx(30.0), pytest.approx(7.0 * (pieces > 1)))
    for plan, us in steps:
        assert cost(plan, payload, found).total_us == pytest.approx(us)


def test_of_two_steps_in_pieces_that_do_not_agree_each_is_missed_by_about_as_large_a_share():
    """One says 4 us for a piece more, one 8; both take about 100 us."""
    free, hosts = Link(0.0, 1e12, ""), ["a", "a", "b", "b"]
    plans = [plan_allreduce(hosts, Radices(leaders=2, scheme=scheme)) for scheme in ("exchange", "reduce")]
    found = add_steps(
        CostModel(free, free, merge_gb_per_s=1e12, call_us=96.0), 16640, [(plans[0], 100.0), (plans[1], 104.0)]
    )
    assert found.piece_us == pytest.approx(6.0, abs=0.2)


@given(st.floats(10, 1e4), st.floats(0, 20), st.floats(0, 1e4), st.integers(3, 9), st.booleans())
@settings(deadline=None)
def test_steps_of_few_and_of_many_rounds_tell_what_a_round_a_message_and_a_call_cost(alpha, gap, call, hosts, shared):
    """Rounds by themselves said something else, as they do where ranks outnumber cores."""
    payload, names = 16640, tuple(f"h{number}" for number in range(hosts) for _ in range(2))
    right = replace(DEFAULT_MODEL, between=Link(alpha, 1.0, "measured", gap), call_us=call)
    steps = [probe.plan for probe in probes_for(names, shared) if probe.way == "step" and probe.leaders == 1]
    timed = [(plan, cost(plan, payload, right).total_us) for plan in steps]
    misled = replace(right, between=Link(1.5 * alpha, 1.0, "measured", gap + 3.0), call_us=0.0)
    found = add_steps(misled, payload, timed)
    for plan, us in timed:
        assert cost(plan, payload, found).total_us == pytest.approx(us, rel=1e-5)
    assert found.between.alpha_us == pytest.approx(alpha, rel=1e-3, abs=1e-3 * timed[0][1])


CROWDS = [(4, 1), (4, 2), (5, 2), (6, 1), (7, 2), (8, 2), (8, 4), (9, 4)]


@given(st.floats(10, 1e4), st.floats(5, 50), st.floats(0, 1e4), st.sampled_from(CROWDS))
@settings(deadline=None, max_examples=25)
def test_an_exchange_that_takes_longer_than_trees_tells_how_many_ranks_can_send_at_once(alpha, gap, call, crowded):
    """A rank alone sends 1 GB/s: all at once, as they were timed, so much less."""
    payload, (hosts, crowd) = 16640, crowded
    names, trunk = tuple(f"h{number}" for number in range(hosts)), None if crowd == 1 else hosts / crowd
    right = replace(DEFAULT_MODEL, between=Link(alpha, 1.0, "measured", gap, trunk=trunk), call_us=call)
    steps = [probe.plan for probe in probes_for(names, False) if probe.way == "step"]
    timed = [(plan, cost(plan, payload, right).total_us) for plan in steps]
    misled = replace(right, between=Link(1.5 * alpha, 1.0 / crowd, "measured", gap * crowd), call_us=0.0)
    found = add_steps(misled, payload, timed)
    off = [cost(plan, payload, found).total_us / us - 1 for plan, us in timed]
    assert np.sqrt(np.mean(np.square(off))) <= 2 * CLOSE, off
    if crowd == 1:
        assert found.between.trunk is None
        assert found.between.gb_per_s == 1.0


@given(st.lists(st.sampled_from(["a", "b", "r/c", "r/d", "s/e"]), min_size=2, max_size=12), st.booleans())
@settings(deadline=None, max_examples=50)
def test_probes_are_plans_in_which_each_busy_rank_swaps_with_its_partners(hosts, shared):
    for probe in probes_for(tuple(hosts), shared):
        check_plan(probe.plan)
        if probe.way in ("inside", "rack", "between"):
            busy = [each for each in probe.plan.rounds if each.action == "exchange"]
            received = Counter(message.dest for each in busy for message in each.messages)
            sent = Counter(message.source for each in busy for message in each.messages)
            assert sent == received
            assert max(sent.values()) == probe.partners
            assert {message.slots for each in busy for message in each.messages} == {probe.slots}


@pytest.mark.parametrize("hosts", range(2, 18))
def test_messages_of_every_size_that_plans_worth_a_look_have_are_timed(hosts):
    names = tuple(map(str, range(hosts)))
    timed = {probe.slots for probe in probes_for(names, False) if (probe.way, probe.partners) == ("between", 1)}
    rounds = itertools.chain(*(plan_allreduce(names, each).rounds for each in candidates(names)))
    assert timed == {0} | {message.slots for each in rounds for message in each.messages}


def test_runs_are_repeated_in_turns_and_each_as_often_as_it_should_be():
    now, begun = [0.0], []

    def run(seconds):
        begun.append(seconds)
        now[0] += seconds

    counts = {1.0: 5, 2.0: 11, 3.0: 100}
    times = calibration.in_turns(lambda: now[0], [lambda s=each: run(s) for each in counts], list(counts.values()))
    assert times == [[seconds] * count for seconds, count in counts.items()]
    assert [seconds for seconds, _ in itertools.groupby(begun)] == [1.0, 2.0, 3.0, 2.0, 3.0]


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
    ways = {(each.way, each.partners, each.leaders) for each in found[0][1].samples}
    between = {("between", 1, 1), ("between", 2, 1), ("between", 2, 2)}
    assert ways == {("inside", 1, 1), ("around", 2, 1), *between, ("step", 2, 1), ("step", 2, 2)}
    assert all(0 < each.p50_us <= each.p99_us for each in found[0][1].samples)
    payload = state_of(0).nbytes
    assert {each.nbytes for each in found[0][1].samples} == {HEADER_BYTES, payload, HEADER_BYTES + payload}


def test_rank_0_alone_fits_and_all_have_its_bits(monkeypatch):
    """Any other rank's arithmetic would be off here."""

    def off():
        return threading.current_thread().name != "rank 0"

    monkeypatch.setattr(calibration, "fit", lambda samples, rate: fit(samples, rate * (1 + 2**-40 * off())))
    monkeypatch.setattr(calibration, "_repeats", lambda seconds, slowest: [5 + off()] * len(slowest))
    found = run_ranks(2, lambda transport: delayed(transport, ["a", "b"], Delays(0, 1e-3), plan="auto")[1])
    assert found[0] == found[1]
    assert Calibration.from_json(found[0].to_json()) == found[0]


def test_racks_are_measured_apart():
    hosts = ["r0/a", "r0/b", "r1/c", "r1/d"]
    ((_, found, _, _), *_) = run_ranks(4, lambda transport: delayed(transport, hosts, Delays(0, 1e-3), plan="auto"))
    assert {each.way for each in found.samples} == {"rack", "between", "step"}
    assert found.model.rack.source == "measured"


def test_windows_are_measured_and_nothing_is_left_in_them():
    def body(transport):
        with TreeComm(transport, plan="auto") as comm:
            merged = [comm.allreduce(state_of(comm.rank)).packed.tobytes() for _ in range(3)]
            return merged, {each.way for each in comm.calibration.samples}

    found = run_ranks(4, body, hosts=["a", "a", "b", "b"])
    assert len(set(itertools.chain(*(merged for merged, _ in found)))) == 1
    assert all(ways == {"inside", "window", "between", "step"} for _, ways in found)


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
