"""Plans, with no MPI: thousands of host maps and radices, followed step by step in one thread."""

import copy
import functools
import json
import operator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans import radices_of
from treeattn.costs.model import DEFAULT_MODEL, CostModel, read_model
from treeattn.costs.pricing import cost
from treeattn.errors import InputError
from treeattn.planning.plan import HEADER_BYTES, Merge, Message, Plan, Radices, Round, Stats
from treeattn.planning.planner import parse_radices, plan_allreduce, plan_bcast, plan_reduce
from treeattn.planning.topology import group_ranks, rack_of

PAYLOAD = 1000
MANY = settings(deadline=None, max_examples=200)
THOUSANDS = settings(deadline=None, max_examples=2000)


LABELS = [f"{rack}{host}" for rack in ("", "r0/", "r1/", "r2/") for host in "abc"]


@st.composite
def host_maps(draw):
    """Block, cyclic, unequal, shuffled: any way of putting up to 24 ranks on up to 12 hosts in up to 4 racks."""
    return draw(st.lists(st.sampled_from(LABELS), min_size=1, max_size=24))


RADIX = st.sampled_from([None, 2, 3, 4, 7])
RADICES = radices_of(RADIX, leaders=[1, 2, 3, 5])


class Follower:
    """Follows one piece of a plan for all ranks in one thread, with tuples for states and sets for headers."""

    def __init__(self, plan, first, piece=0):
        self.plan, self.piece = plan, piece
        self.records = [{0: first(rank)} for rank in range(plan.size)]
        self.heard = [{rank} for rank in range(plan.size)]
        self.steps = [
            {step.number: step for step in plan.steps(rank) if step.piece == piece} for rank in range(plan.size)
        ]
        for number in range(len(plan.rounds)):
            self._round(number)

    def _round(self, number):
        sent = {}
        steps = {rank: steps[number] for rank, steps in enumerate(self.steps) if number in steps}
        for rank, step in steps.items():
            for dest, slots in step.sends:
                assert (rank, dest) not in sent, "one message per edge and round"
                sent[rank, dest] = [self.records[rank][i] for i in range(slots)], set(self.heard[rank])
        for rank, step in steps.items():
            self._receive(rank, step, sent)
        assert not sent, "every message is received"

    def _receive(self, rank, step, sent):
        sending = {i for _, slots in step.sends for i in range(slots)}
        landed = set()
        for source, slots, at in step.receives:
            states, heard = sent.pop((source, rank))
            assert len(states) == slots
            places = set(range(at, at + slots))
            assert not places & landed, "two messages land in one record"
            assert not places & sending, "a record is overwritten while it is sent"
            assert at + slots <= self.plan.records(rank, self.piece)
            landed |= places
            self.heard[rank] |= heard
            self.records[rank].update(zip(range(at, at + slots), states, strict=True))
        for sources in step.merges:
            self.records[rank][0] = self.merged([self.records[rank][source] for source in sources])

    @staticmethod
    def merged(states):
        return tuple(states)


def ranks_in(state):
    """Ranks of a nested tuple of merges, in merge order."""
    return [state] if isinstance(state, int) else [rank for part in state for rank in ranks_in(part)]


def has_racks(hosts, radices):
    """Whether there is a level of racks: several, and fewer than hosts."""
    return radices.rack != "skip" and not radices.flat and 1 < len(set(map(rack_of, hosts))) < len(set(hosts))


def expected_order(hosts, radices, deterministic):
    if deterministic or radices.flat:
        return list(range(len(hosts)))
    groups = group_ranks(hosts)
    if has_racks(hosts, radices):
        racks = group_ranks(rack_of(hosts[group[0]]) for group in groups)
        groups = [groups[index] for rack in racks for index in rack]
    return [rank for group in groups for rank in group]


def followed(plan):
    """Each piece, followed."""
    return [Follower(plan, first=lambda rank: rank, piece=piece) for piece in range(plan.pieces)]


@given(host_maps(), RADICES, st.booleans())
@THOUSANDS
def test_an_allreduce_brings_every_state_to_every_rank_once_and_in_order(hosts, radices, deterministic):
    order = expected_order(hosts, radices, deterministic)
    for piece in followed(plan_allreduce(hosts, radices, deterministic=deterministic)):
        for rank in range(len(hosts)):
            assert ranks_in(piece.records[rank][0]) == order
            assert piece.records[rank][0] == piece.records[0][0], "merged alike, so equal bits"


@given(host_maps(), RADICES, st.booleans(), st.data())
@MANY
def test_every_piece_is_merged_as_one_leader_would(hosts, radices, deterministic, data):
    near = data.draw(st.sets(st.integers(0, len(hosts) - 1)))
    (alone,) = followed(plan_allreduce(hosts, replace(radices, leaders=1), deterministic=deterministic))
    for piece in followed(plan_allreduce(hosts, radices, deterministic=deterministic, near=sorted(near))):
        assert piece.records[0][0] == alone.records[0][0]


@given(host_maps(), RADICES, st.booleans(), st.data())
@MANY
def test_a_reduce_is_merged_like_the_allreduce_whoever_is_root(hosts, radices, deterministic, data):
    root = data.draw(st.integers(0, len(hosts) - 1))
    everywhere = followed(plan_allreduce(hosts, radices, deterministic=deterministic))
    at_root = followed(plan_reduce(hosts, root, radices, deterministic=deterministic))
    for one, other in zip(everywhere, at_root, strict=True):
        assert one.records[root][0] == other.records[root][0]


@given(host_maps(), RADICES, st.booleans(), st.data())
@MANY
def test_after_a_plan_every_rank_has_heard_of_every_rank(hosts, radices, deterministic, data):
    root = data.draw(st.integers(0, len(hosts) - 1))
    for plan in (
        plan_allreduce(hosts, radices, deterministic=deterministic),
        plan_reduce(hosts, root, radices, deterministic=deterministic),
    ):
        for piece in followed(plan):
            assert all(each == set(range(len(hosts))) for each in piece.heard)


@given(host_maps(), st.sampled_from([1, 2, 3, 5, "all"]), st.data())
@MANY
def test_pieces_are_led_in_turns_by_those_near_a_card(hosts, leaders, data):
    near = data.draw(st.sets(st.integers(0, len(hosts) - 1)))
    plan = plan_allreduce(hosts, Radices(leaders=leaders), near=sorted(near))
    groups = group_ranks(hosts)
    candidates = {hosts[group[0]]: [rank for rank in group if rank in near] or group for group in groups}
    most = max(map(len, candidates.values()))
    assert plan.pieces == (most if leaders == "all" else min(leaders, most))
    for message in (message for each in plan.rounds for message in each.messages if plan.crosses(message)):
        able = candidates[hosts[message.source]]
        assert message.source == able[message.piece % len(able)]


@given(host_maps(), RADICES, st.data())
@MANY
def test_a_bcast_brings_the_roots_array_to_every_rank(hosts, radices, data):
    root = data.draw(st.integers(0, len(hosts) - 1))
    plan = plan_bcast(hosts, root, radices)
    (whole,) = followed(plan)
    assert all(records[0] == root for records in whole.records)
    total = plan.predict(PAYLOAD).total
    assert (total.messages, total.bytes) == (len(hosts) - 1, (len(hosts) - 1) * PAYLOAD)
    if not radices.flat:
        assert total.messages_between == len(set(hosts)) - 1


@given(host_maps(), RADIX)
@MANY
def test_the_merge_does_not_depend_on_the_radix_between_hosts(hosts, inside):
    merged = [
        Follower(plan_allreduce(hosts, Radices(inside, between)), first=lambda rank: rank).records[0][0]
        for between in (None, 2, 3, 5)
    ]
    assert all(a == b for a, b in pairwise(merged))


@given(host_maps(), host_maps(), RADICES, RADICES)
@MANY
def test_a_deterministic_merge_does_not_depend_on_hosts_or_radices(one, other, radices, others):
    size = min(len(one), len(other))
    first, second = (
        Follower(plan_allreduce(hosts[:size], r, deterministic=True), first=lambda rank: rank).records[0][0]
        for hosts, r in ((one, radices), (other, others))
    )
    assert first == second


def digits(count, radix):
    """Rounds in which ``radix`` times as many are reached each time: ceil(log_radix(count)), in whole numbers."""
    rounds, reach = 0, 1
    while reach < count:
        rounds, reach = rounds + 1, reach * (radix or max(count, 2))
    return rounds


def exchange_messages(count, radix):
    """Messages that each of ``count`` leaders sends: in each round one per further block that is still missing."""
    radix, held, sent = radix or max(count, 2), 1, 0
    while held < count:
        sent += min(radix - 1, -(-count // held) - 1)
        held *= radix
    return sent


@given(host_maps(), RADIX, RADIX)
@MANY
def test_an_allreduce_costs_what_the_formulas_say(hosts, inside, between):
    n, groups = len(hosts), group_ranks(hosts)
    h, largest, record = len(groups), max(map(len, groups)), HEADER_BYTES + PAYLOAD
    total = plan_allreduce(hosts, Radices(inside, between)).predict(PAYLOAD).total
    assert total.rounds == 2 * digits(largest, inside) + digits(h, between)
    assert total.rounds_between == digits(h, between)
    assert total.messages_between == h * exchange_messages(h, between)
    assert total.bytes_between == h * (h - 1) * record
    assert total.messages - total.messages_between == 2 * (n - h)
    assert total.bytes - total.bytes_between == 2 * (n - h) * record


@given(host_maps(), RADIX)
@MANY
def test_a_flat_allreduce_is_one_of_single_rank_hosts(hosts, between):
    n, record = len(hosts), HEADER_BYTES + PAYLOAD
    total = plan_allreduce(hosts, Radices(between=between, flat=True)).predict(PAYLOAD).total
    assert total.rounds == digits(n, between)
    assert (total.messages, total.bytes) == (n * exchange_messages(n, between), n * (n - 1) * record)


@given(host_maps(), RADIX)
@MANY
def test_in_shared_memory_only_leaders_send(hosts, between):
    h, record = len(set(hosts)), HEADER_BYTES + PAYLOAD
    plan = plan_allreduce(hosts, Radices("shared", between))
    total = plan.predict(PAYLOAD).total
    assert total.messages == total.messages_between == h * exchange_messages(h, between)
    assert total.bytes == h * (h - 1) * record
    inside = [each for each in plan.rounds if each.shared]
    assert len(inside) == (0 if len(set(hosts)) == len(hosts) else 1 if h == 1 else 2)
    assert not any(plan.crosses(message) for each in inside for message in each.messages)


@given(host_maps())
@MANY
def test_a_deterministic_allreduce_carries_rank_states(hosts):
    n, h, record = len(hosts), len(set(hosts)), HEADER_BYTES + PAYLOAD
    total = plan_allreduce(hosts, Radices(), deterministic=True).predict(PAYLOAD).total
    assert total.bytes_between == n * (h - 1) * record
    assert total.bytes - total.bytes_between == 2 * (n - h) * record


@given(host_maps(), RADIX, RADIX, st.data())
@MANY
def test_a_reduce_costs_what_the_formulas_say(hosts, inside, between, data):
    n, h, record = len(hosts), len(set(hosts)), HEADER_BYTES + PAYLOAD
    root = data.draw(st.integers(0, n - 1))
    total = plan_reduce(hosts, root, Radices(inside, between)).predict(PAYLOAD).total
    assert total.messages == 2 * (n - 1)
    assert total.messages_between == 2 * (h - 1)
    if between is None:  # with more rounds, a host state is passed on more than once
        assert total.bytes == (n - 1) * (record + HEADER_BYTES)
        assert total.bytes_between == (h - 1) * (record + HEADER_BYTES)


@given(host_maps(), RADIX, RADIX)
@MANY
def test_up_a_tree_and_down_takes_two_messages_a_host(hosts, inside, between):
    h, record = len(set(hosts)), HEADER_BYTES + PAYLOAD
    total = plan_allreduce(hosts, Radices(inside, between, scheme="reduce")).predict(PAYLOAD).total
    assert total.rounds_between == 2 * digits(h, between)
    assert (total.messages_between, total.bytes_between) == (2 * (h - 1), 2 * (h - 1) * record)


@given(host_maps(), RADIX, RADIX)
@MANY
def test_with_racks_few_messages_leave_them(hosts, rack, between):
    racks, h, record = len(set(map(rack_of, hosts))), len(set(hosts)), HEADER_BYTES + PAYLOAD
    radices = Radices(None, between, rack=rack)
    plan = plan_allreduce(hosts, radices)
    total = plan.predict(PAYLOAD).total
    if has_racks(hosts, radices):
        assert total.bytes_between == (racks * (racks - 1) + 2 * (h - racks)) * record
        far = [m for each in plan.rounds for m in each.messages if rack_of(hosts[m.source]) != rack_of(hosts[m.dest])]
        assert len(far) == racks * exchange_messages(racks, between)
        assert {each.level for each in plan.rounds if each.messages} >= {"rack", "between"}
    else:
        assert plan.rounds == plan_allreduce(hosts, replace(radices, rack="skip")).rounds


@given(host_maps(), RADICES, st.booleans(), st.integers(1, 40), st.integers(1, 30))
@MANY
def test_pieces_send_the_bytes_of_one_leader_and_more_headers(hosts, radices, deterministic, rows, width):
    payload, one = rows * width * 4, replace(radices, leaders=1)
    if radices.inside == "shared" and len(set(hosts)) == 1:
        return  # in shared memory one leader needs no round down
    plan = plan_allreduce(hosts, radices, deterministic=deterministic)
    whole = plan_allreduce(hosts, one, deterministic=deterministic).predict(payload).total
    total = plan.predict(payload, rows).total
    assert total.messages == plan.pieces * whole.messages
    assert total.rounds == whole.rounds
    headers = sum(m.slots or 1 for each in plan.rounds if not each.shared for m in each.messages)
    assert total.bytes == whole.bytes + (headers - headers // plan.pieces) * HEADER_BYTES


@given(host_maps(), RADICES, st.booleans())
@MANY
def test_a_prediction_adds_up_the_messages_of_each_rank(hosts, radices, deterministic):
    plan = plan_allreduce(hosts, radices, deterministic=deterministic)
    prediction, sizes = plan.predict(PAYLOAD), plan.piece_bytes(PAYLOAD)
    assert prediction.total == Stats.total(prediction.per_rank)
    assert sum(sizes) == PAYLOAD
    for rank, stats in enumerate(prediction.per_rank):
        steps = [step for step in plan.steps(rank) if not plan.rounds[step.number].shared]
        sent = [slots * (HEADER_BYTES + sizes[step.piece]) for step in steps for _, slots in step.sends]
        assert (stats.messages, stats.bytes) == (len(sent), sum(sent))


def test_one_rank_has_nothing_to_do():
    for plan in (plan_allreduce(["a"]), plan_reduce(["a"], 0), plan_bcast(["a"], 0)):
        assert plan.rounds == ()
        assert plan.steps(0) == ()
        assert plan.records(0) == 1
        assert plan.predict(PAYLOAD).total == Stats()


def test_two_hosts_of_two_ranks():
    assert plan_allreduce(["a", "b", "a", "b"]).rounds == (
        Round("inside", "reduce", (Message(2, 0, 1, 1), Message(3, 1, 1, 1)), (Merge(0, (0, 1)), Merge(1, (0, 1)))),
        Round("between", "exchange", (Message(1, 0, 1, 1), Message(0, 1, 1, 1)), (Merge(0, (0, 1)), Merge(1, (1, 0)))),
        Round("inside", "broadcast", (Message(0, 2, 1), Message(1, 3, 1))),
    )


@pytest.mark.parametrize(
    ("plan", "radices"),
    [
        (None, None),
        ("default", None),
        ("auto", None),
        ("flat", Radices(flat=True)),
        ("oneshot", Radices()),
        ("binary", Radices(2, 2)),
        ((3, "all"), Radices(3, None)),
        ((np.int64(3), np.uint8(4)), Radices(3, 4)),
        ([None, 4], Radices(None, 4)),
        ("3,all", Radices(3, None)),
        ("flat,2", Radices(None, 2, flat=True)),
        ("2,3,4", Radices(2, 4, rack=3)),
        ("shared,all,reduce", Radices("shared", None, rack=None, scheme="reduce")),
        ((2, "reduce3"), Radices(2, 3, scheme="reduce")),
        ("all,all,leaders=4", Radices(leaders=4)),
        ("2, 3, 4, leaders=all", Radices(2, 4, rack=3, leaders="all")),
        (Radices(5, 6), Radices(5, 6)),
        (plan_allreduce(["a", "b"], Radices(2, 3)), Radices(2, 3)),
    ],
)
def test_plan_takes_names_radices_and_plans(plan, radices):
    assert parse_radices(plan) == radices


def test_plan_takes_the_file_of_a_plan(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(plan_allreduce(["a", "b"], Radices(2, 3)).to_json())
    assert parse_radices(str(file)) == parse_radices(file) == Radices(2, 3)
    file.write_text("{}")
    with pytest.raises(InputError, match=r"^plan: expected JSON as Plan.to_json writes it, got "):
        parse_radices(file)


def short(value):
    """Name a test by a value that Python may refuse to write whole."""
    return hex(value)[:12] if isinstance(value, int) else str(value)[:20]


@pytest.mark.parametrize("radix", [0, 1, -2, 2.5, True, "2", 10**9, 10**5000, -(10**5000)], ids=short)
@pytest.mark.parametrize("level", ["inside", "rack", "between"])
def test_no_radix_is_below_two(level, radix):
    with pytest.raises(
        InputError, match=f"^{level}: expected a number of at least 2 and below 1e9, or None for all, got "
    ):
        Radices(**{level: radix})


@given(RADICES)
def test_any_radices_read_back_what_they_print(radices):
    printed = parse_radices(str(radices))
    assert printed == (replace(radices, inside=None) if radices.flat else radices)


@pytest.mark.parametrize(
    "plan",
    [
        "spiral",
        "2,3,4,5",
        "",
        "leaders=2",
        7,
        (2,),
        ("2", "x"),
        (1, 2),
        (2.5, 2),
        (True, 2),
        "0,2",
        "2,2,leaders=0",
        "2,2,leaders=",
        "2,reducex",
        "shared,shared",
        f"{'9' * 5000},2",
        f"2,2,leaders={'9' * 5000}",
        (10**5000, 2),
    ],
    ids=lambda plan: short(plan[0] if isinstance(plan, tuple) else plan),
)
def test_what_is_no_plan_is_refused_with_a_sentence(plan):
    with pytest.raises(InputError, match=r"^plan: expected ") as refused:
        parse_radices(plan)
    assert len(str(refused.value)) < 250


@given(host_maps(), RADICES)
@settings(deadline=None, max_examples=100)
def test_the_drawing_shows_every_host_rank_and_round(hosts, radices):
    plan = plan_allreduce(hosts, radices)
    lines = plan.draw().splitlines()
    assert lines[0] == str(plan)
    assert sum("rank " in line for line in lines[1:]) == len(hosts)
    assert sum(line.startswith("round ") for line in lines) == len(plan.rounds)
    assert set(hosts) <= set(lines)


def test_the_drawing_of_a_small_tree():
    assert plan_allreduce(["n1", "n1", "n2"]).draw().splitlines() == [
        "allreduce over 3 ranks on 2 hosts, radices all,all: 3 rounds, 4 messages",
        "",
        "n1",
        "└─ rank 0",
        "   └─ rank 1",
        "n2",
        "└─ rank 2",
        "",
        "round 1  inside hosts   reduce       1→0",
        "round 2  between hosts  exchange     0↔2",
        "round 3  inside hosts   broadcast    0→1",
    ]


def test_stats_add_and_subtract():
    a, b = Stats(1, 2, 3, 4, 5, 6, 7), Stats(1, 1, 1, 1, 1, 1, 1)
    assert a - b + b == a
    assert Stats.total([a, b]) == Stats(1, 3, 4, 4, 6, 7, 7)


def test_a_plan_is_data():
    plan = plan_allreduce(["a", "b", "a"])
    assert isinstance(plan, Plan)
    assert plan == plan_allreduce(("a", "b", "a"))
    assert hash(plan) == hash(plan_allreduce(("a", "b", "a")))


@given(host_maps(), RADICES, st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_plan_reads_back_what_it_writes(hosts, radices, deterministic):
    radices = replace(radices, inside=None) if radices.flat else radices
    for plan in (plan_allreduce(hosts, radices, deterministic=deterministic), plan_reduce(hosts, 0, radices)):
        assert Plan.from_json(plan.to_json()) == plan


GOOD = json.loads(plan_allreduce(["a", "b"]).to_json())

HOSTILE = [None, "x", -1, 0, 1, 1.5, 10**9, float("inf"), float("nan"), True, [], {}, [[]], ["x"], "9" * 5000]


def places(found, way=()):
    """Give the way to every value of a JSON text, the first of each list standing for all."""
    yield way
    if isinstance(found, dict):
        for name, value in found.items():
            yield from places(value, (*way, name))
    elif isinstance(found, list) and found:
        yield from places(found[0], (*way, 0))


def spoilt(found, way, value):
    if not way:
        return value
    within = copy.deepcopy(found)
    functools.reduce(operator.getitem, way[:-1], within)[way[-1]] = value
    return within


def test_whatever_stands_in_the_file_of_a_plan_it_is_refused_or_can_be_drawn_and_priced():
    good = json.loads(plan_allreduce(["r/a", "r/a", "r/b", "s/c"], Radices(2, 2, rack=2, leaders="all")).to_json())
    refused = []
    for way in places(good):
        for value in HOSTILE:
            try:
                plan = Plan.from_json(json.dumps(spoilt(good, way, value)))
            except InputError as error:
                refused.append(str(error))
                continue
            assert plan.draw()
            assert cost(plan, 1000).total_us >= 0
            assert plan.predict(1000, rows=4).total.messages >= 0
            assert all(plan.records(rank) >= 1 for rank in range(plan.size))
            assert Plan.from_json(plan.to_json()) == plan
    assert len(refused) > 100
    assert all(each.startswith("plan: expected ") for each in refused)
    with pytest.raises(InputError, match=r"^plan: expected JSON"):
        Plan.from_json("[" * 100_000)


@pytest.mark.parametrize(
    "found",
    ["", [], {}, {**GOOD, "rounds": [{}]}, {**GOOD, "radices": "wide"}, {**GOOD, "far": 1}, {**GOOD, "hosts": 3}],
)
def test_what_is_no_written_plan_is_refused_with_a_sentence(found):
    with pytest.raises(InputError, match=r"^plan: expected JSON as Plan.to_json writes it, got "):
        Plan.from_json(json.dumps(found))


def test_a_file_of_another_kind_is_refused_by_what_it_is(tmp_path):
    model, plan = DEFAULT_MODEL.to_json(), plan_allreduce("ab").to_json()
    with pytest.raises(InputError, match=r"got a cost model; it is what model= and --model take$"):
        Plan.from_json(model)
    with pytest.raises(InputError, match=r"got a plan; it is what plan= and --plan take$"):
        CostModel.from_json(plan)
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(InputError, match=r"^model: expected .* got a plan"):
        read_model(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"^model: expected .* got what --calibrate has measured$"):
        CostModel.from_json('{"samples": [], "plans": [], "chosen": "all,all"}')


@given(host_maps(), RADICES, st.integers(1, 1000), st.integers(1, 1000))
@settings(deadline=None, max_examples=50)
def test_long_messages_count_by_their_parts(hosts, radices, limit, at_once):
    """Follow from the plan's messages: as many parts as fit their bytes; and of the array, as often the rounds.

    Between hosts parts are smaller where there are up to 16 then.
    """
    plan, root = plan_allreduce(hosts, radices), len(hosts) - 1
    array = plan_bcast(hosts, root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("treeattn.planning.messages.LARGEST_MESSAGE", limit)
        patched.setattr("treeattn.planning.messages.AT_ONCE", at_once)
        total, of_array = plan.predict(PAYLOAD).total, array.predict(PAYLOAD).total

    def parts(size, crosses):
        whole, rest = divmod(size, limit)
        return whole + -(-rest // (at_once if crosses and rest <= 16 * at_once else limit))

    pieces = plan.piece_bytes(PAYLOAD)
    sent = [message for each in plan.rounds if not each.shared for message in each.messages]
    sizes = [(plan.message_bytes(each.slots, pieces[each.piece]), plan.crosses(each)) for each in sent]
    assert total.messages == sum(parts(*each) for each in sizes)
    assert total.messages_between == sum(parts(*each) for each in sizes if each[1])
    assert total.bytes == sum(size for size, _ in sizes)
    down = [array.crosses(message) for each in array.rounds for message in each.messages]
    assert of_array.messages == sum(parts(PAYLOAD, crosses) for crosses in down)
    assert of_array.rounds == -(-PAYLOAD // limit) * len(array.rounds)
