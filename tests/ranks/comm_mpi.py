"""What only MPI ranks can show: bare communicators, many of them, a rank that goes silent, a rank that dies."""

import gc
import json
import os
import signal
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
from mpi4py import MPI

import treeattn
from treeattn.errors import CommError, RankTimeout
from treeattn.transports.mpi_ending import live
from treeattn.transports.mpi_transport import MpiTransport
from treeattn.wrapping import as_tree_comm, team_of


def say(**found):
    """One line of JSON in one write, so that ranks' lines don't mix."""
    os.write(1, (json.dumps({"rank": MPI.COMM_WORLD.Get_rank(), **found}) + "\n").encode())


def state(rank):
    return treeattn.PartialState.from_lse(np.full((1, 2, 1, 3), rank, np.float32), np.zeros((1, 2, 1)), base="e")


def bare():
    """A bare communicator is wrapped once; halves of the world work beside it; forty come and go."""
    world = MPI.COMM_WORLD
    half = world.Split(world.Get_rank() % 2, world.Get_rank())
    wrapped = [as_tree_comm(comm) for comm in (world, half, None)]
    same = as_tree_comm(world) is wrapped[0] and wrapped[2] is wrapped[0] and as_tree_comm(half) is wrapped[1]
    means = [comm.allreduce(state(world.Get_rank())).finish().flat[0] for comm in wrapped]
    before = open_things()
    for _ in range(40):
        with treeattn.TreeComm(world) as comm:
            comm.bcast(np.arange(3) if comm.rank == 0 else None)
            comm.allreduce(state(comm.rank))
    left_open = open_things() - before
    # User messages under any tag must not meet ours.
    request = world.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
    wrapped[0].allreduce(state(0))
    world.send("mine", dest=(world.Get_rank() + 1) % world.Get_size(), tag=0)
    left = treeattn.TreeComm(half)  # never freed here: that is done before MPI ends
    left.allreduce(state(0))  # with receives started ahead
    found = {"same": same, "means": [float(mean) for mean in means], "message": request.wait()}
    say(**found, **{"left open": left_open, "with theirs": freed_with_theirs(world)})


def freed_with_theirs(world):
    """What stays of communicators that were passed to calls, and freed; what a cache over another one then gives."""
    before = len(live)
    for _ in range(3):
        passed = world.Dup()
        as_tree_comm(passed).allreduce(state(0))
        passed.Free()
    left = len(live) - before
    passed, ones = world.Dup(), np.ones((1, 1, 1, 2), np.float32)
    cache = treeattn.ShardedKVCache(passed, batch=1, kv_heads=1, head_dim=2, capacity=9)
    passed.Free()
    cache.append(ones, ones)
    return left, cache.decode(ones).flat[0].item()


def open_things():
    """Open files, and mapped windows."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) + Path("/proc/self/maps").read_text().count("/dev/shm/#")


def hosts():
    """Hosts as this machine has them."""
    with treeattn.TreeComm() as comm:
        say(hosts=comm.hosts)


# Ways in which the last rank stays away.
LEAVE = {
    "sleeps": lambda: time.sleep(300),
    "raises": lambda: 1 / 0,
    "exits": lambda: sys.exit(3),
    "ends": lambda: sys.exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def give_up_after(seconds, comm):
    """Set the deadline only now: on a busy machine the first steps may take longer, and what they compile."""
    team_of(comm).channel.transport.timeout = seconds


def all_but_the_last():
    """Make a communicator of those that stay, for `leave_together`."""
    world = MPI.COMM_WORLD
    return world.Split(world.rank == world.size - 1, world.rank)


def leave_together(living):
    """Wait until all have spoken, and the launcher has passed that on: whoever leaves first ends the job."""
    living.Barrier()
    time.sleep(0.5)


def silent(how, plan):
    """The last rank stays away; the others say so, and the job ends all the same."""
    living = all_but_the_last()
    comm = treeattn.TreeComm(plan=plan)
    comm.allreduce(state(comm.rank))
    give_up_after(1.5, comm)
    if comm.rank == comm.size - 1:
        LEAVE[how]()
    try:
        comm.allreduce(state(comm.rank))
    except RankTimeout as error:
        say(error=str(error), ranks=error.ranks, hosts=error.hosts, step=error.step)
    try:
        comm.bcast(1)
    except CommError as error:
        say(again=str(error))
    leave_together(living)


def steps(hosts, *plans):
    """Memory, NumPy's too, that 250 steps with room for their result take, and keep, by the worst of these plans."""
    found = [taken_by_steps(treeattn.TreeComm(hosts=hosts.split(","), plan=plan)) for plan in plans]
    grown, peak = map(max, zip(*found, strict=True))
    say(grown=grown, peak=peak)


def taken_by_steps(comm):
    """Give what steps keep and take.

    The first wait that takes long, whenever it comes, leaves some kilobytes that later ones use. What every step does
    shows in each of several runs of steps.
    """
    mine = treeattn.partial_attention(*(np.full((1, 32, n, 126), comm.rank + 0.5, np.float32) for n in (1, 4, 4)))
    out = comm.allreduce(mine)
    tracemalloc.start()
    for _ in range(100):  # what takes the place of something older has been counted then
        comm.allreduce(mine, out=out)
    runs = [traced(250, lambda: comm.allreduce(mine, out=out)) for _ in range(4)]
    tracemalloc.stop()
    return map(min, zip(*runs, strict=True))


def traced(times, call):
    """Bytes that so many calls keep, and that they take at most."""
    gc.collect()
    call()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    for _ in range(times):
        call()
    after, peak = tracemalloc.get_traced_memory()
    return after - before, peak - before


def flight(hosts):
    """All-reduces in flight give the bits of others, and leave nothing."""

    def once():
        with treeattn.TreeComm(hosts=hosts.split(",")) as comm:
            states = [state(comm.rank + number) for number in range(3)] * 2
            begun = [comm.allreduce_begin(each) for each in states]
            right = [comm.allreduce(each).packed.tobytes() for each in states]
            return [handle.end().packed.tobytes() == bits for handle, bits in zip(begun, right, strict=True)]

    once()
    before = open_things()
    right = once()
    say(right=right, **{"left open": open_things() - before})


def flight_silent():
    """The last rank begins no more, while others have two in flight."""
    living = all_but_the_last()
    comm = treeattn.TreeComm(hosts=list("abc"), plan="2,2")
    comm.allreduce_begin(state(comm.rank)).end()
    give_up_after(1.5, comm)
    first = comm.allreduce_begin(state(comm.rank))
    if comm.rank == 2:
        time.sleep(300)
    try:
        second = comm.allreduce_begin(state(comm.rank))
        first.end()
        second.end()
    except RankTimeout as error:
        say(error=str(error))
    leave_together(living)


def late():
    """One rank never comes to make the communicator."""
    if MPI.COMM_WORLD.Get_rank() == 1:
        time.sleep(300)
    try:
        treeattn.TreeComm(timeout=1)
    except RankTimeout as error:
        say(error=str(error))


def split():
    """The last rank does not come to MPI's split by shared memory, which MPI has no way to test for."""
    if MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1:
        MpiTransport.shared_memory_group = lambda _: time.sleep(300)
    treeattn.TreeComm(timeout=1)


def mixed():
    """One rank begins an all-reduce where the other does it at once."""
    comm = treeattn.TreeComm()
    comm.allreduce_begin(state(comm.rank)).end()
    comm.allreduce(state(comm.rank))
    give_up_after(1, comm)
    try:
        comm.allreduce_begin(state(comm.rank)).end() if comm.rank else comm.allreduce(state(comm.rank))
    except RankTimeout as error:
        say(error=str(error), ranks=error.ranks)
    leave_together(MPI.COMM_WORLD)


def raises():
    """The last rank fails outside of any call, and no hook is installed."""
    comm = treeattn.TreeComm()
    if comm.rank == comm.size - 1:
        raise ValueError("the last rank has had enough")
    comm.allreduce(state(comm.rank))


def refused():
    """A launcher that MPI knows nothing of."""
    try:
        treeattn.TreeComm()
    except CommError as error:
        say(error=str(error))


if __name__ == "__main__":
    programs = bare, hosts, silent, steps, flight, flight_silent, late, split, mixed, raises, refused
    {each.__name__: each for each in programs}[sys.argv[1]](*sys.argv[2:])
