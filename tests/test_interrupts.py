"""Ctrl-C at every place of an operation where Python lets a signal in: what is left works on, or says it is broken."""

import dis
import functools
import sys
from pathlib import Path

import numpy as np
import pytest

import treeattn
from treeattn import TreeComm
from treeattn.errors import CommError
from treeattn.steps import relay
from treeattn.testing import run_ranks

LIBRARY = Path(treeattn.__file__).parent
TESTING = LIBRARY / "testing"


@functools.cache
def places_in(code):
    """Where CPython looks for signals: at the start of a function, after a call, and after a jump backwards."""
    folders = Path(code.co_filename).parents
    if LIBRARY not in folders or TESTING in folders:
        return frozenset()
    found, before = set(), "RESUME"
    for each in dis.get_instructions(code):
        if before == "RESUME" or before.startswith("CALL"):
            found.add(each.offset)
        before = each.opname
    return frozenset(found)


def tracing(at, operation):
    """Run an operation with ``at(place)`` called wherever a signal could come on this thread."""

    def on_event(frame, event, _):
        if not places_in(frame.f_code):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in places_in(frame.f_code):
            at((frame.f_code, frame.f_lasti))
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        return operation()
    finally:
        sys.settrace(before)


def places_of(operation):
    found = {}
    tracing(lambda place: found.setdefault(place), operation)
    return list(found)


def interrupted(place, operation):
    """Run an operation until it comes to a place; tell whether it did."""

    def strike(now):
        if now == place:
            raise KeyboardInterrupt

    try:
        tracing(strike, operation)
    except KeyboardInterrupt:
        return True
    return False


def arrays():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, n, 4), dtype=np.float32) for n in (1, 6, 6)]


Q, K, V = arrays()


@functools.cache
def state():
    """Not made where this file is read, which every worker does: one would compile, and the others wait for it."""
    return treeattn.partial_attention(Q, K, V)


OPERATIONS = {
    "allreduce": lambda comm: comm.allreduce(state()).finish()[0],
    "begin": lambda comm: comm.allreduce_begin(state()).end().finish()[0],
    "reduce": lambda comm: comm.reduce(state(), 0),
    "decode": lambda comm: treeattn.decode(Q, K, V, comm=comm),
    "pipeline": lambda comm: treeattn.decode(Q, K, V, comm=comm, pipeline=2),
    "bcast": lambda comm: comm.bcast(K),
    "total_stats": lambda comm: comm.total_stats(),
}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_one_process_works_on(name):
    comm = TreeComm()
    operation = functools.partial(OPERATIONS[name], comm)
    operation()
    places = places_of(operation)
    assert len(places) > 5
    for place in places:
        assert interrupted(place, operation)
        operation()


def for_ever(operation):
    while True:
        operation()


def after_an_interrupt(transport, operation, place, places, plan=None):
    """Let rank 1 be interrupted in its third call; give what it can do then."""
    comm = TreeComm(transport, plan=plan)
    if comm.rank != 1:
        with pytest.raises(CommError):  # it may still be in its second call
            for_ever(lambda: operation(comm))
        return "works on"
    for _ in range(2):
        operation(comm)
    if place is None:
        places += places_of(lambda: operation(comm))
    elif not interrupted(place, lambda: operation(comm)):
        return "was elsewhere"
    elif not comm.usable:
        with pytest.raises(CommError, match=r"^this communicator is broken \(KeyboardInterrupt"):
            operation(comm)
        return "broken"
    else:
        for _ in range(3):
            operation(comm)
    return "works on"


def some_of(places):
    """Give all places where a lock is taken or given back, and of the others one in twenty."""
    delicate = {place for place in places if Path(place[0].co_filename).stem in ("comm", "guard", "shortcut")}
    return [place for number, place in enumerate(places) if place in delicate or number % 20 == 0]


@pytest.mark.parametrize("hosts", ["aa", "ab"])
@pytest.mark.parametrize("name", sorted({*OPERATIONS} - {"begin"}))  # what was begun and never ended is lost anyway
def test_a_rank_works_on_or_knows_that_it_has_lost_the_others(name, hosts):
    assert_works_on_or_knows(name, hosts, None)


@pytest.mark.parametrize("hosts", ["aa", "aab"])
def test_a_rank_does_too_where_states_are_cut_into_pieces(hosts, monkeypatch):
    monkeypatch.setattr(relay, "SLEEP", np.array([0, 1_000_000]))  # after some of which a rank hears of the end
    assert_works_on_or_knows("allreduce", hosts, "shared,all,leaders=all")


def assert_works_on_or_knows(name, hosts, plan):
    """Interrupt rank 1 at one place after the other, in steps that take the short way."""
    places, operation, ranks = [], OPERATIONS[name], len(hosts)
    run_ranks(ranks, lambda transport: after_an_interrupt(transport, operation, None, places, plan), hosts=hosts)
    found = {
        run_ranks(ranks, lambda t, place=place: after_an_interrupt(t, operation, place, [], plan), hosts=hosts)[1]
        for place in some_of(places)
    }
    assert found - {"was elsewhere"} == {"works on", "broken"}  # what is found ready depends on the other rank


def filled_cache():
    cache = treeattn.ShardedKVCache(None, batch=1, kv_heads=2, head_dim=4, block_size=4, capacity=64)
    cache.append(K, V)
    return cache


CHANGES = {
    "append": lambda cache: cache.append(K, V),
    "prefill": lambda cache: cache.prefill(K, V),
    "truncate": lambda cache: cache.truncate(3),
    "decode": lambda cache: cache.decode(Q),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_cache_holds_what_it_held_before_or_what_it_is_to_hold(name):
    change = CHANGES[name]
    change(filled_cache())
    places = places_of(functools.partial(change, filled_cache()))
    after = {"append": 12, "prefill": 12, "truncate": 3, "decode": 6}[name]
    assert len(places) > 5
    for place in places:
        cache = filled_cache()
        assert interrupted(place, functools.partial(change, cache))
        assert cache.length in (6, after)
        assert cache.length == cache.local_length == len(cache.positions)
        both = [np.concatenate([each, each], axis=2)[:, :, : cache.length] for each in (K, V)]
        assert np.array_equal(cache.decode(Q), treeattn.attention(Q, *both))
        cache.append(K, V)
        assert cache.length in (12, after + 6)
