"""Ranks on hosts with names of their own: in UTS namespaces, and as whole small machines that talk over TCP."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

NETWORK = "10.83.0"


def check_reports(reports, names):
    """Check what all ranks of `layout` saw and sent."""
    assert [report["name"] for report in reports] == names
    for report in reports:
        assert report["hosts"] == names
        assert report["counted"] == report["predicted"]
    assert len({report["out"] for report in reports}) == 1
    hosts = len(set(names))
    assert sum(report["counted"]["messages_between"] for report in reports) == hosts * (hosts - 1)


@pytest.mark.parametrize("names", ["aba", "aabb"])
def test_ranks_are_grouped_by_the_names_of_their_hosts(mpirun, names):
    job = mpirun("layout", len(names), hosts=names)
    check_reports(job.reports, list(names))


class Machines:
    """Small machines inside this one: each has its own network, host name, processes and shared memory.

    They are joined by a bridge in a namespace of its own. Open MPI reaches them through an agent that stands in for
    ssh. All names are its own, and all is gone after `remove`.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.names, self.folder = names, folder
        self.prefix = f"treeattn-{uuid.uuid4().hex[:8]}"
        self.switch = f"{self.prefix}-switch"

    def make(self) -> None:
        ip(f"netns add {self.switch}")
        ip(f"-n {self.switch} link add bridge up type bridge")
        for number, name in enumerate(self.names, 1):
            space = f"{self.prefix}-{name}"
            ip(f"netns add {space}")
            ip(f"link add eth0 netns {space} type veth peer name port{number} netns {self.switch}")
            ip(f"-n {self.switch} link set port{number} up master bridge")
            ip(f"-n {space} addr add {NETWORK}.{number}/24 dev eth0")
            ip(f"-n {space} link set eth0 up")
            ip(f"-n {space} link set lo up")
        known = [f"{NETWORK}.{number} {name}\n" for number, name in enumerate(self.names, 1)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        self.agent.write_text(self._agent_script())
        self.agent.chmod(0o755)

    def remove(self) -> None:
        for space in (self.switch, *(f"{self.prefix}-{name}" for name in self.names)):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    @property
    def agent(self) -> Path:
        return self.folder / "agent"

    def launcher(self, mpirun: str, slots: Sequence[int]) -> Callable[[list[str]], list[str]]:
        """Give what runs a rank's command on the machines, ranks dealt in turn, started on the first of them."""
        room = ",".join(f"{name}:{ranks}" for name, ranks in zip(self.names, slots, strict=True))
        network = f"{NETWORK}.0/24"
        words = [mpirun, "-n", str(sum(slots)), "--host", room, "--map-by", "node:oversubscribe"]
        words += ["--prtemca", "plm_ssh_agent", str(self.agent), "--prtemca", "prte_if_include", network]
        words += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", network]
        return lambda command: [str(self.agent), self.names[0], shlex.join([*words, *command])]

    def _agent_script(self) -> str:
        """Run `NAME COMMAND...` on machine NAME; like ssh, the command's words are joined and read by a shell."""
        inside = 'hostname "$1"; mount -t tmpfs -o size=256m none /dev/shm; mount --bind "$2" /etc/hosts; shift 2; '
        inside += 'export TMPDIR=/dev/shm; exec sh -c "$*"'
        hosts = shlex.quote(str(self.folder / "hosts"))
        return f"""#!/bin/sh
name="$1"; shift
exec ip netns exec "{self.prefix}-$name" unshare -u -i -m -p --fork --kill-child --mount-proc \\
    sh -c {shlex.quote(inside)} sh "$name" {hosts} "$@"
"""


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines(mpirun, tmp_path_factory) -> Iterator[Machines]:
    if mpirun.runtime.name != "openmpi":
        pytest.skip("machines of our own are reached through Open MPI's launch agent")
    if " " in mpirun.runtime.mpirun:
        pytest.skip("Open MPI can't launch on other machines from a path with a space in it")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("machines of our own need root and the program ip (package iproute2)")
    made = Machines(["n1", "n2", "n3"], tmp_path_factory.mktemp("machines"))
    try:
        made.make()
        probe = subprocess.run([made.agent, "n1", "true"], capture_output=True, text=True, check=False)
        if probe.returncode != 0:
            pytest.skip(f"namespaces are not allowed here: {probe.stderr.strip()}")
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"namespaces are not allowed here: {error.stderr.strip()}")
    finally:
        made.remove()


def test_ranks_on_machines_that_share_only_a_network(mpirun, machines):
    job = mpirun("layout", 4, launcher=machines.launcher(mpirun.runtime.mpirun, slots=[2, 1, 1]))
    check_reports(job.reports, ["n1", "n2", "n3", "n1"])
