"""Making a communicator: of what, by which settings, and what is refused on every rank."""

import subprocess
import sys

import pytest

import treeattn
from states import message_of, states_of
from treeattn import TreeComm
from treeattn.errors import InputError
from treeattn.planning.plan import Radices, Stats
from treeattn.planning.planner import plan_allreduce
from treeattn.testing import run_ranks
from treeattn.testing.ranks import ThreadTransport
from treeattn.wrapping import as_tree_comm, team_of


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": ["a"]}, "hosts: expected 2 labels, one per rank, got 1 (a)"),
        ({"plan": "spiral"}, "plan: expected 'default', 'auto', 'shared', 'flat', 'oneshot', 'binary', 'reduce', "),
        ({"plan": "auto", "model": "default"}, 'model: expected None with plan="auto", which measures one, got '),
        ({"model": "nvlink"}, "model: expected nvlink-infiniband or another of default, "),
        ({"deterministic": 1}, "deterministic: expected True or False, got 1"),
        ({"timeout": -1}, "timeout: expected seconds, 0 for no limit, got -1"),
        ({"timeout": "soon"}, "timeout: expected seconds, 0 for no limit, got 'soon'"),
        ({"plan": plan_allreduce("ab")}, "plan: expected a plan for hosts h, h, got allreduce over 2 ranks on 2 hosts"),
        ({"plan": __file__}, "plan: expected JSON as Plan.to_json writes it, got "),
    ],
)
def test_a_wrong_setting_is_an_error_on_every_rank(options, text):
    def everyone(transport):
        return message_of(lambda: TreeComm(transport, **options))

    assert all(each.startswith(text) for each in run_ranks(2, everyone, hosts=["h", "h"]))


def test_a_wrong_setting_of_one_rank_is_an_error_on_every_rank():
    def body(transport):
        return message_of(lambda: TreeComm(transport, hosts=["a"] if transport.rank == 1 else None))

    text = "hosts: expected 3 labels, one per rank, got 1 (a)"
    elsewhere = f"{text} (rank 1 on host localhost)"
    assert run_ranks(3, body) == [elsewhere, text, elsewhere]


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("hosts", [list("ab"), list("ba")], "hosts: expected the same on every rank, got (a, b) on rank 0 and (b, a)"),
        ("plan", ["flat", (2, 2)], "plan: expected the same on every rank, got flat,all on rank 0 and 2,2 on rank 1"),
        (
            "deterministic",
            [True, False],
            "deterministic: expected the same on every rank, got True on rank 0 and False",
        ),
    ],
)
def test_settings_that_differ_are_an_error_on_every_rank(name, values, text):
    def body(transport):
        return message_of(lambda: TreeComm(transport, **{name: values[transport.rank]}))

    assert all(each.startswith(text) for each in run_ranks(2, body))


def test_hosts_come_from_the_transport_the_environment_or_the_caller(monkeypatch):
    def body(transport, **options):
        with TreeComm(transport, **options) as comm:
            return comm.hosts

    assert run_ranks(3, body, hosts=list("aba")) == [("a", "b", "a")] * 3
    monkeypatch.setenv("TREEATTN_HOSTS", "x,x,y")
    assert run_ranks(3, body, hosts=list("aba")) == [("x", "x", "y")] * 3
    assert run_ranks(3, lambda t: body(t, hosts=[1, 2, 2]), hosts=list("aba")) == [("1", "2", "2")] * 3
    wrong = run_ranks(2, lambda t: message_of(lambda: TreeComm(t)))
    assert wrong == ["TREEATTN_HOSTS: expected 2 labels, one per rank, got 3 (x, x, y)"] * 2


def test_hosts_of_the_environment_are_not_for_a_part_of_the_world(monkeypatch):
    monkeypatch.setenv("TREEATTN_HOSTS", "x,x,y")
    assert treeattn.TreeComm().hosts != ("x",)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert run_ranks(2, lambda transport: treeattn.TreeComm(transport).hosts) == [("localhost", "localhost")] * 2


class OneMemory(ThreadTransport):
    """All ranks share memory, whatever their hosts are called."""

    def shared_memory_group(self):
        return 0


def test_a_disagreement_about_hosts_warns_once_on_rank_0():
    with pytest.warns(UserWarning, match="host names and shared memory disagree .* taking them as a, b, a") as caught:
        run_ranks(3, lambda t: TreeComm(OneMemory(t._world, t.rank)).free(), hosts=list("aba"))
    assert len(caught) == 1


def test_a_plan_made_by_hand_is_taken():
    hosts = list("aabb")
    plan = plan_allreduce(hosts, Radices(2, 2), deterministic=True)

    def body(transport):
        with TreeComm(transport, plan=plan) as comm:
            return comm.plan == plan, comm.deterministic

    assert run_ranks(4, body, hosts=hosts) == [(True, True)] * 4


def test_the_timeout_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("TREEATTN_TIMEOUT", "never")
    assert message_of(TreeComm) == "TREEATTN_TIMEOUT: expected seconds, 0 for no limit, got 'never'"
    monkeypatch.setenv("TREEATTN_TIMEOUT", "")
    assert team_of(TreeComm()).channel.transport.timeout == 300
    monkeypatch.setenv("TREEATTN_TIMEOUT", "12.5")
    assert team_of(TreeComm()).channel.transport.timeout == 12.5


@pytest.mark.parametrize("comm", ["world", 3, object()])
@pytest.mark.parametrize("make", [TreeComm, as_tree_comm])
def test_what_is_no_communicator_is_refused(make, comm):
    with pytest.raises(InputError, match=r"^comm: expected "):
        make(comm)


def test_one_process_raises_its_errors_directly():
    comm = TreeComm()
    assert (comm.rank, comm.size, len(comm.hosts)) == (0, 1, 1)
    assert message_of(lambda: comm.allreduce(3)) == "state: expected a PartialState, got int"
    assert message_of(lambda: comm.reduce(states_of(1)[0], root=1)) == "root: expected a rank from 0 to 0, got 1"
    state = states_of(1)[0]
    assert comm.allreduce(state) is state
    assert comm.reduce(state) is state
    assert comm.stats == comm.total_stats() == Stats(collectives=0)


def test_one_process_imports_no_mpi():
    script = (
        "import sys, numpy as np, treeattn, treeattn.wrapping\n"
        "comm = treeattn.TreeComm()\n"
        "comm.bcast(np.ones(3)); treeattn.wrapping.as_tree_comm(None).free(); comm.free()\n"
        "assert not any(name.startswith('mpi4py') for name in sys.modules)\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
