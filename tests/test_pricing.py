"""What plans are priced at: terms against formulas."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn.costs.catalog import Link
from treeattn.costs.model import Cost, CostModel
from treeattn.costs.pricing import cost
from treeattn.planning.plan import HEADER_BYTES, Radices
from treeattn.planning.planner import plan_allreduce

PAYLOAD = 16640
RECORD = HEADER_BYTES + PAYLOAD
FREE = Link(0.0, 1e12, "")
WAYS = "exchange", "reduce"


def singles(count):
    return [str(host) for host in range(count)]


def model_of(**links):
    return CostModel(**{"inside": FREE, "between": FREE, **links}, merge_gb_per_s=1e12)


@given(st.integers(2, 40), st.sampled_from([None, 2, 3, 5]))
@settings(deadline=None, max_examples=60)
def test_an_exchange_pays_a_latency_a_round_a_gap_a_message_and_every_other_state(hosts, radix):
    plan = plan_allreduce(singles(hosts), Radices(between=radix))
    terms = cost(plan, PAYLOAD, model_of(between=Link(100.0, 2.0, "", gap_us=3.0))).terms
    sent = plan.predict(PAYLOAD).per_rank[0]
    assert terms.latency == pytest.approx(100.0 * len(plan.rounds))
    assert terms.injection == pytest.approx(3.0 * 2 * sent.messages), "a call at each end"
    assert terms.transfer == pytest.approx((hosts - 1) * RECORD / 2e3, rel=1e-6)
    assert terms.merge == pytest.approx(0, abs=1e-6)


@given(st.integers(2, 70))
@settings(deadline=None, max_examples=40)
def test_a_tree_of_pairs_pays_for_its_longest_chain_of_messages(hosts):
    """State i comes to the root by as many messages as i has binary digits 1; others are under way meanwhile."""
    plan = plan_allreduce(singles(hosts), Radices(between=2, scheme="reduce"))
    priced = cost(plan, PAYLOAD, model_of(between=Link(100.0, 1e12, "")))
    longest = max(state.bit_count() for state in range(hosts))
    assert priced.terms.latency == 2 * longest * 100.0
    assert sum(each.latency > 0 for each in priced.rounds) == 2 * longest
    assert sum(each.total for each in priced.rounds) == pytest.approx(priced.total_us)


def test_a_rank_that_begins_when_all_has_come_is_busy_and_pays_no_latency():
    """Host a merges 1 MB first, for 2 * 1000 us; host b's message is there after 10."""
    model = CostModel(FREE, Link(10.0, 1e12, "", gap_us=1.0, jitter_us=5.0), merge_gb_per_s=1.0)
    up, across, down = cost(plan_allreduce(["a", "a", "b"]), 10**6, model).rounds
    assert up.merge == across.merge == 2000.0
    assert (across.latency, across.injection, across.jitter) == (10.0, 2.0, 5.0), "to b, which waits"
    assert down == Cost()
    late = cost(plan_allreduce(["a", "a", "b"]), 10**6, replace(model, inside=Link(11.0, 1e12, ""))).rounds
    assert [each.latency for each in late] == [11.0, 0.0, 11.0]
    assert (late[1].injection, late[1].jitter) == (2.0, 0.0)


@pytest.mark.parametrize(("hosts", "radix", "handshakes"), [(8, None, 0), (8, 2, 1), (8, 4, 1), (4, 2, 0), (16, 2, 2)])
def test_a_message_over_a_limit_pays_a_handshake(hosts, radix, handshakes):
    """A radix sends 1, r, r * r, ... states at once; four of 16 KB and more are over 40 KB, in parts of 60 KiB too."""
    between = Link(10.0, 1e12, "", steps=((40000, 20.0),))
    terms = cost(plan_allreduce(singles(hosts), Radices(between=radix)), PAYLOAD, model_of(between=between)).terms
    assert terms.handshake == 20.0 * handshakes


@pytest.mark.parametrize(
    ("nbytes", "parts", "handshakes"), [(61000, 1, 0), (61440, 2, 0), (950_000, 16, 0), (10**6, 1, 1)]
)
def test_messages_between_hosts_go_in_parts_for_which_nobody_asks(nbytes, parts, handshakes):
    link = Link(10.0, 1e12, "", gap_us=1.0, steps=((65536, 20.0),))
    apart = cost(plan_allreduce("ab"), nbytes, CostModel(FREE, link, merge_gb_per_s=1e12)).terms
    assert (apart.injection, apart.handshake) == (2.0 * parts, 20.0 * handshakes)
    inside = cost(plan_allreduce("aa"), nbytes, CostModel(link, FREE, merge_gb_per_s=1e12)).terms
    assert (inside.injection, inside.handshake) == (2.0, 40.0 * (nbytes > 65536))  # up and down


def test_merging_counts_each_state_that_the_busiest_rank_reads():
    model = CostModel(FREE, FREE, merge_gb_per_s=1.0)
    rounds = cost(plan_allreduce(["a", "a", "a", "b"]), PAYLOAD, model).rounds
    assert [each.merge for each in rounds] == pytest.approx([3 * PAYLOAD / 1e3, 2 * PAYLOAD / 1e3, 0])


def test_levels_have_links_of_their_own():
    links = {"inside": Link(1.0, 1e12, ""), "between": Link(100.0, 1e12, ""), "window": Link(0.1, 1e12, "")}
    hosts = ["a", "a", "b", "b"]
    by_messages, shared = Radices(), Radices("shared")
    assert [each.latency for each in cost(plan_allreduce(hosts, by_messages), PAYLOAD, model_of(**links)).rounds] == [
        1.0,
        100.0,
        1.0,
    ]
    assert [each.latency for each in cost(plan_allreduce(hosts, shared), PAYLOAD, model_of(**links)).rounds] == [
        0.1,
        100.0,
        0.1,
    ]


def test_in_shared_memory_a_rank_publishes_once_and_pays_for_what_it_reads():
    window = Link(0.0, 1.0, "", gap_us=1.0)
    (only,) = cost(plan_allreduce(["a"] * 5, Radices("shared")), PAYLOAD, model_of(window=window)).rounds
    assert (only.injection, only.transfer) == (4.0, pytest.approx(4 * RECORD / 1e3))


def test_ranks_of_a_host_wait_for_lanes():
    plan = plan_allreduce(["a"] * 4, Radices(flat=True))
    for lanes, bytes_at_once in ((1, 12), (2, 6), (4, 3), (None, 3)):
        terms = cost(plan, PAYLOAD, model_of(inside=Link(0.0, 1.0, "", lanes=lanes))).terms
        assert terms.transfer == pytest.approx(bytes_at_once * RECORD / 1e3)


@given(st.integers(2, 20), st.sampled_from([None, 2, 2.5, 4, 100]))
@settings(deadline=None, max_examples=40)
def test_all_ranks_between_hosts_wait_for_the_trunk(hosts, trunk):
    """Where all send to all, all are in each other's way; up a tree to one, that one takes as long as all others."""
    model = model_of(between=Link(0.0, 1.0, "", gap_us=3.0, trunk=trunk))
    swaps, tree = (cost(plan_allreduce(singles(hosts), Radices(scheme=way)), PAYLOAD, model).terms for way in WAYS)
    crowding = 1.0 if trunk is None else max(1.0, hosts / trunk)
    assert swaps.injection == pytest.approx(crowding * 2 * (hosts - 1) * 3.0)
    assert swaps.transfer == pytest.approx(crowding * (hosts - 1) * RECORD / 1e3)
    assert tree.injection == pytest.approx(2 * (hosts - 1) * 3.0)
    assert tree.transfer == pytest.approx(2 * (hosts - 1) * RECORD / 1e3)


def test_ranks_inside_hosts_have_no_trunk():
    plan = plan_allreduce(["a"] * 4 + ["b"] * 4, Radices())
    apart, together = (model_of(inside=Link(1.0, 1.0, "", gap_us=3.0, trunk=trunk)) for trunk in (None, 1))
    assert cost(plan, PAYLOAD, apart) == cost(plan, PAYLOAD, together)


def test_jitter_is_told_and_not_added():
    terms = cost(plan_allreduce(["a", "b"]), PAYLOAD, model_of(between=Link(5.0, 1e12, "", jitter_us=7.0))).terms
    assert terms.jitter == 7.0
    assert terms.total == pytest.approx(5.0, abs=1e-3)


def test_one_rank_costs_nothing():
    assert cost(plan_allreduce(["a"]), PAYLOAD).terms == Cost()
