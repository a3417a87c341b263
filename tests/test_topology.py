"""Which ranks share a host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeattn.errors import InputError
from treeattn.topology import check_hosts, group_ranks, host_labels, hosts_of_environment

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
