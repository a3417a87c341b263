"""Which plan is chosen: the cheapest by the model, within its limits, and what that is on common layouts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn.costs.catalog import Link
from treeattn.costs.choosing import candidates, choose_radices, estimate
from treeattn.costs.model import DEFAULT_MODEL, PRESETS, CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.planner import plan_allreduce
from treeattn.planning.radices import Radices

STATE = 16640
SOME = settings(deadline=None, max_examples=80)


def layout(racks, hosts, ranks):
    return [f"r{rack}/{host}" for rack in range(racks) for host in range(hosts) for _ in range(ranks)]


LINKS = st.builds(
    Link,
    st.floats(0, 1e4),
    st.floats(0.01, 100),
    st.just(""),
    st.floats(0, 10),
    st.sampled_from([(), ((65536, 20.0),)]),
    st.sampled_from([None, 2, 4, 8]),
    st.sampled_from([None, 1, 2]),
    st.just(0.0),
    st.sampled_from([None, 1.5, 4]),
)
MODELS = st.sampled_from(list(PRESETS.values())) | st.builds(
    CostModel, LINKS, LINKS, LINKS, LINKS, st.floats(1, 1000), *[st.floats(0, 10)] * 3
)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from([240, STATE]), MODELS)
@SOME
def test_the_choice_is_the_cheapest_of_what_is_worth_a_look(racks, hosts, ranks, shared, payload, model):
    labels = layout(racks, hosts, ranks)
    found = choose_radices(labels, payload, shared=shared, model=model)
    worth = candidates(labels, shared=shared, model=model)
    costs = {radices: cost(plan_allreduce(labels, radices), payload, model).total_us for radices in worth}
    assert costs[found] <= 1.1001 * min(costs.values())
    assert len(worth) == len(set(worth))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), MODELS)
@SOME
def test_levels_add_up_to_the_whole_plan_where_hosts_are_alike(racks, hosts, ranks, shared, model):
    labels, payload = layout(racks, hosts, ranks), 12 * 520
    for radices in candidates(labels, shared=shared, model=model):
        whole = cost(plan_allreduce(labels, radices), payload, model).total_us
        assert estimate(labels, radices, payload, model).total == pytest.approx(whole, rel=1e-6)


@given(st.lists(st.sampled_from(["a", "b", "r/c", "r/d"]), min_size=1, max_size=12), st.integers(1, 10**6), MODELS)
@SOME
def test_no_more_meet_in_a_round_than_a_link_allows(hosts, payload, model):
    for radices in candidates(hosts, model=model):
        plan = plan_allreduce(hosts, radices)
        for each in plan.rounds:
            crosses = any(plan.crosses(message) for message in each.messages)
            links = [model.between, model.rack or model.between] if crosses else [model.inside]
            limit = max(link.largest_radix or 64 for link in links)
            met = [sum(m.dest == rank and m.piece == 0 for m in each.messages) for rank in range(len(hosts))]
            assert max(met) < limit


@pytest.mark.parametrize("hosts", range(1, 17))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_up_to_16_hosts_meet_at_once_and_share_windows(hosts, ranks):
    labels = layout(1, hosts, ranks)
    for payload in (1000, STATE, 60000):
        assert choose_radices(labels, payload, shared=True) == Radices("shared")
        if hosts > 1:
            assert choose_radices(labels, payload) == Radices()


def test_more_hosts_meet_in_two_rounds():
    assert choose_radices(layout(1, 17, 1), STATE) == Radices(None, 5)
    assert choose_radices(layout(1, 48, 1), STATE) == Radices(None, 7)
    assert choose_radices(layout(1, 64, 1), STATE // 4) == Radices(None, 8)


def test_on_one_host_few_ranks_swap_small_states_and_large_states_are_split():
    assert choose_radices(["a"] * 4, STATE).flat
    assert choose_radices(["a"] * 5, STATE) == Radices()
    assert choose_radices(["a"] * 4, 10**6) == Radices(leaders="all")


def test_large_states_go_through_every_rank_where_each_has_a_card_and_through_one_where_they_share_it():
    model = PRESETS["nvlink-infiniband"]
    assert choose_radices(layout(1, 8, 8), STATE, model=model).leaders == 1
    assert choose_radices(layout(1, 8, 8), 64 * STATE, model=model).leaders == "all"
    fast = Link(1.0, 1000.0, "")
    crowded = CostModel(fast, Link(10.0, 1.0, "", gap_us=1.0, lanes=1), merge_gb_per_s=1000.0)
    assert choose_radices(layout(1, 8, 8), 64 * STATE, model=crowded).leaders == 1


def test_very_large_states_are_merged_on_their_way():
    assert choose_radices(layout(1, 16, 1), 10**8).scheme == "reduce"


def test_a_rack_is_a_level_where_leaving_it_is_dear():
    labels = layout(4, 8, 1)
    far = replace(DEFAULT_MODEL.between, alpha_us=1000.0, gb_per_s=0.1)
    assert choose_radices(labels, STATE).rack == "skip"
    assert (
        choose_radices(labels, STATE, model=replace(DEFAULT_MODEL, rack=DEFAULT_MODEL.between, between=far)).rack
        is None
    )


def test_of_plans_that_cost_alike_the_steadier_is_taken():
    """One round of 9 and two of 3; each round has its own jitter."""
    labels, free = layout(1, 9, 1), Link(0.0, 1e12, "")
    steady = CostModel(free, Link(4.0, 1e12, "", gap_us=1.0, jitter_us=1.0), merge_gb_per_s=1e12)
    assert choose_radices(labels, STATE, model=steady) == Radices(None, 3)  # 16 us against 20
    equal = replace(steady, between=replace(steady.between, alpha_us=8.0))
    assert choose_radices(labels, STATE, model=equal) == Radices()  # 24 us each
