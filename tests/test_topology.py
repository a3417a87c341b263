"""Which ranks share a host."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn import TreeComm
from treeattn.errors import InputError
from treeattn.planning.topology import check_hosts, group_ranks, host_labels, hosts_of_environment, near_card, rack_of
from treeattn.testing import run_ranks

LABELS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20)


@given(LABELS)
def test_groups_are_a_partition_ordered_by_lowest_rank(hosts):
    groups = group_ranks(hosts)
    assert sorted(rank for group in groups for rank in group) == list(range(len(hosts)))
    assert [group[0] for group in groups] == sorted(min(group) for group in groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert {hosts[rank] for rank in group} == {hosts[group[0]]}


@given(LABELS, st.data())
def test_ranks_share_a_host_only_where_name_and_split_agree(names, data):
    shared = data.draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    labels, agreed = host_labels(names, shared)
    for a in range(len(names)):
        for b in range(len(names)):
            assert (labels[a] == labels[b]) == (names[a] == names[b] and shared[a] == shared[b])
    pairs = set(zip(names, shared, strict=True))
    assert agreed == (len(pairs) == len(set(names)) == len(set(shared)))


def test_the_name_alone_is_the_label_where_it_stands_for_one_host():
    assert host_labels(["n1", "n2", "n1"], [0, 1, 0]) == (("n1", "n2", "n1"), True)
    assert host_labels(["n1", "n2"], [0, 0]) == (("n1", "n2"), False)


def test_the_environment_gives_one_label_per_rank():
    assert hosts_of_environment({"TREEATTN_HOSTS": "a, b,a"}) == ("a", "b", "a")
    assert hosts_of_environment({"TREEATTN_HOSTS": " "}) is None
    assert hosts_of_environment({}) is None


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a", "b"], r"^hosts: expected 3 labels, one per rank, got 2 \(a, b\)$"),
        ("a,b,c", r"^hosts: expected 3 labels, one per rank, got 'a,b,c'$"),
        (7, r"^hosts: expected 3 labels, one per rank, got 7$"),
        (["a", "", "b"], r"^hosts: expected no empty label, got \('a', '', 'b'\)$"),
    ],
)
def test_wrong_hosts_are_refused_with_a_sentence(hosts, message):
    with pytest.raises(InputError, match=message):
        check_hosts(hosts, 3)


def test_labels_may_be_numbers():
    assert check_hosts([0, 0, 1], 3) == ("0", "0", "1")


def test_a_rack_is_what_is_before_the_last_slash():
    assert [rack_of(host) for host in ("rack0/a", "a/b/c", "a", "/a")] == ["rack0", "a/b", "", ""]


def machine(folder, cards, nodes):
    """What Linux says of a machine: the NUMA node of each card, and the cores of each node."""
    for kind, name, node in cards:
        device = folder / "class" / kind / name / "device"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, cores in nodes.items():
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cores}\n")
    return folder


@pytest.mark.parametrize(
    ("cores", "near"), [({0}, False), ({4}, True), ({3, 4}, True), ({7}, False), ({8}, False), (set(), False)]
)
def test_ranks_are_near_a_card_on_its_node(tmp_path, cores, near):
    cards = [("net", "eth0", 1), ("net", "eth1", -1), ("net", "eth2", 2)]
    system = machine(tmp_path, cards, {0: "0-3", 1: "4-6", 2: "8"})
    (system / "class/net/eth2/operstate").write_text("down\n")
    (system / "class/net/eth0/operstate").write_text("up\n")
    assert near_card(system, cores) is near


@pytest.mark.parametrize(("core", "near"), [(0, False), (4, False), (8, True)])
def test_cards_for_messages_come_before_those_for_the_rest(tmp_path, core, near):
    cards = [("net", "eth0", 1), ("infiniband", "mlx5_0", 2)]
    assert near_card(machine(tmp_path, cards, {0: "0-3", 1: "4-6", 2: "8"}), {core}) is near


def leads(transport):
    """Whether this rank swaps states with other hosts."""
    with TreeComm(transport, plan="oneshot") as comm:
        sources = {each.source for stage in comm.plan.rounds for each in stage.messages if comm.plan.crosses(each)}
        return comm.rank in sources


@pytest.mark.parametrize(
    ("near", "leaders"), [({1, 2}, [1, 2]), ({0, 1, 2, 3}, [0, 2]), (set(), [0, 2]), ({3}, [0, 3])], ids=str
)
def test_ranks_near_a_card_lead_their_hosts_and_where_none_is_known_the_first_does(monkeypatch, near, leaders):
    monkeypatch.setattr(
        "treeattn.ranks.joining.near_card", lambda: int(threading.current_thread().name.split()[1]) in near
    )
    found = run_ranks(4, leads, hosts=list("aabb"))
    assert [rank for rank, leading in enumerate(found) if leading] == leaders


def test_without_a_card_or_linux_nobody_is_near(tmp_path):
    assert not near_card(machine(tmp_path, [], {0: "0-3"}), {0})
    assert not near_card(tmp_path / "none", {0})
