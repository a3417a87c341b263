"""How ranks come together in a communicator: its transport, and what they agree on before its first call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from treeattn.errors import InputError
from treeattn.execution.collective import check_collective
from treeattn.execution.window import open_window
from treeattn.gpu.cards import open_cards
from treeattn.gpu.peer_memory import open_peers
from treeattn.launch import launched
from treeattn.planning.topology import HOSTS_VARIABLE, host_labels, near_card
from treeattn.ranks.policy import Policy
from treeattn.ranks.settings import DEFAULT_TIMEOUT, Settings, timeout_of
from treeattn.ranks.team import Team
from treeattn.ranks.versions import check_versions, version
from treeattn.steps.channel import Channel
from treeattn.transports.base import SelfTransport, Transport
from treeattn.transports.gpu_mpi import Verdict, agreed
from treeattn.warning import warn_once

__all__ = ["join", "under_launcher"]


def join(comm: Any, given: Mapping[str, Any]) -> Team:
    """Bring the ranks of ``comm`` together in a team of their own; collective.

    Parameters
    ----------
    comm : mpi4py communicator, Transport or None
    given : mapping
        The other arguments of ``TreeComm``, unchecked.
    """
    team = Team(Channel(_open_transport(comm, given["timeout"])))
    try:
        _agree(team, comm, given)
    except Exception:  # raised on every rank, so that all of them come here, unless they have lost each other
        if team.usable:
            team.channel.free()
        raise
    return team


def _agree(team: Team, comm: Any, given: Mapping[str, Any]) -> None:
    """Agree with the other ranks on the settings and on who is where."""
    channel, transport, consult = team.channel, team.channel.transport, partial(team.consult, "TreeComm")
    own = {"version": version() if team.size > 1 else "", "name": transport.host_name(), "near": near_card()}
    places = channel.operate(channel.share, own)  # of ranks with other versions nothing else can be understood
    check_versions(places, team.rank)
    names = tuple(each["name"] for each in places)
    channel.name_hosts(names)
    settings = _agreed_settings(team, given)
    channel.wire_dtype, channel.collective = settings.wire_dtype, settings.collective
    channel.name_hosts(settings.hosts or _map_hosts(transport, names, consult))
    settings.check_plan(channel.hosts)
    if transport.shares_memory:
        team.session.window = open_window(channel.hosts, team.rank, partial(consult, ()))
    near = [rank for rank, each in enumerate(places) if each["near"]]
    team.policy = Policy(channel, settings, near, _notes_on(comm) if settings.measures else {})
    _join_cards(team, settings.collective)


def _agreed_settings(team: Team, given: Mapping[str, Any]) -> Settings:
    """Give the settings, once all ranks have the same, and whether MPI takes GPU memory everywhere."""
    transport = team.channel.transport
    settings, memory, error = Settings(), Verdict((), "not asked"), None
    try:
        settings = Settings.read(team.size, **given)
        if settings.collective == "mpi":
            check_collective(transport)
        memory = transport.gpu_memory()
    except Exception as wrong:  # whatever it is, the others must hear of it before it is raised here
        error = wrong
    told = team.consult("TreeComm", settings.fields, {"gpu_mpi": memory}, error)
    team.channel.gpu_memory = agreed(each["gpu_mpi"] for each in told)
    transport.timeout = settings.timeout
    return settings


def _join_cards(team: Team, collective: str) -> None:
    channel, transport = team.channel, team.channel.transport
    common = team.rank, channel.hosts, team.consult, transport.wait_for
    if collective == "nccl":
        channel.cards = open_cards(*common, transport.watched)
    elif collective == "p2p":
        channel.cards = open_peers(*common, lambda: channel.gather(b""))


def _open_transport(comm: Any, timeout: Any) -> Transport:
    """Make a transport of our own from what ``TreeComm`` takes; collective.

    A ``timeout`` that is wrong is refused later, when all ranks can hear of it.

    Raises
    ------
    InputError
        It is nothing that ranks can talk on.
    """
    if isinstance(comm, Transport):
        return comm.dup()
    if comm is None and not under_launcher():
        return SelfTransport()
    if comm is not None and "mpi4py.MPI" not in sys.modules:
        expected = "None, an mpi4py communicator or a Transport"
        raise InputError.of("comm", expected=expected, got=type(comm).__name__)
    from treeattn.transports.mpi_transport import (  # here, so that one process needs no MPI
        MpiTransport,
        world_transport,
    )

    try:
        seconds = timeout_of(timeout)
    except InputError:
        seconds = DEFAULT_TIMEOUT
    if comm is None:
        return world_transport(seconds)
    return MpiTransport.duplicate(comm, seconds)


_notes: WeakKeyDictionary[Transport, dict[Any, Any]] = WeakKeyDictionary()


def _notes_on(comm: Any) -> dict[Any, Any]:
    """Give what all communicators that are made of ``comm`` share, and that ends with it."""
    if isinstance(comm, Transport):
        return _notes.setdefault(comm, {})
    if comm is None and not under_launcher():
        return {}
    from treeattn.transports.mpi_library import cached_on  # here, so that one process needs no MPI

    return cached_on(comm, lambda _: dict[Any, Any](), lambda _: True, kind="notes")


def under_launcher() -> bool:
    """Whether a launcher started this process with others."""
    here = launched()
    return here is not None and here.size > 1


def _map_hosts(
    transport: Transport, names: Sequence[str], consult: Callable[..., list[dict[str, Any]]]
) -> tuple[str, ...]:
    """Find out which ranks share a host: only those for which names and shared memory both say so; collective."""
    shared = [each["group"] for each in consult((), {"group": transport.shared_memory_group()})]
    labels, agreed = host_labels(names, shared)
    if not agreed:
        text = "host names and shared memory disagree about which ranks share a host; taking them as "
        remedy = f"(hosts= or {HOSTS_VARIABLE} overrides this)"
        warn_once(f"{text}{', '.join(labels)} {remedy}", transport.rank, partial(consult, ()))
    return labels
