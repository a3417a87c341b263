"""Rank 0 starts children in several ways, which try what ranks do; then the ranks go on as before."""

import json
import multiprocessing
import os
import sys

import numpy as np

import treeattn
from treeattn.errors import CommError
from treeattn.launch import install_abort_hook


def words_of(call):
    try:
        call()
    except CommError as error:
        return str(error)
    return "it went on"


def try_as_a_rank(answers):
    q, k, v = (np.ones((1, 1, n, 4), np.float32) for n in (1, 5, 5))
    answers.put(words_of(lambda: treeattn.decode(q, k, v, comm=None)))


def try_what_was_inherited(answers):
    answers.put(words_of(comm.total_stats))
    try_as_a_rank(answers)


def answers_of(way, target, number):
    context = multiprocessing.get_context(way)
    answers = context.Queue()
    child = context.Process(target=target, args=(answers,))
    child.start()
    found = [answers.get(timeout=30) for _ in range(number)]
    child.join(30)
    return [*found, child.exitcode]


if __name__ == "__main__":
    install_abort_hook()
    comm = treeattn.TreeComm(timeout=60)
    before = comm.total_stats()
    report = {"rank": comm.rank}
    if comm.rank == 0:
        report["fork"] = answers_of("fork", try_what_was_inherited, 2)
        report["spawn"] = answers_of("spawn", try_as_a_rank, 1)
    comm.total_stats()
    os.write(1, (json.dumps(report) + "\n").encode())
    sys.exit(0)
