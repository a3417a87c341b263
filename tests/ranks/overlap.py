"""A ring with shards too long for MPI to send by itself: they arrive while a kernel works."""

import json
import os
import threading

import numpy as np

import treeattn
from treeattn.backends.registry import Backend, find
from treeattn.launch import install_abort_hook
from treeattn.steps.wire import Wire
from treeattn.transports.mpi_transport import MpiTransport

install_abort_hook()
arrived, seen = threading.Event(), []
start, progress = Wire.start, MpiTransport.progress


class Waiting(Backend):
    """Its kernel does nothing but wait for the messages that are under way, for at most 20 s."""

    name = "cpu"
    ops = find("cpu").ops

    def reasons(self, spec=None):
        return []

    def prepare(self, spec):
        def run(args, out):
            seen.append(arrived.wait(60))
            self.ops.fill_identity(out)

        return run


def starting(wire, **ends):
    arrived.clear()
    return start(wire, **ends)


def progressing(transport, requests):
    complete = progress(transport, requests)
    if complete:
        arrived.set()
    return complete


Wire.start, MpiTransport.progress = starting, progressing
q, k = np.zeros((1, 4, 1, 64), np.float32), np.zeros((1, 4, 2048, 64), np.float32)
with treeattn.TreeComm() as comm:
    treeattn.baselines.ring(q, k, k, comm=comm, backend=Waiting())
os.write(1, (json.dumps({"rank": comm.rank, "seen": seen, "bytes": 2 * k.nbytes}) + "\n").encode())
