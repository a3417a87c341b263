"""What every baseline is: one skeleton that agrees, runs a scheme of messages, reports errors and delivers.

To add one: subclass `Baseline` in a file of its own, set ``name``, write `run` and, from nothing but a `Problem`,
`cost`; make one instance and name it in ``treeattn/baselines/__init__.py``. Its tests take it from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from treeattn.arguments.checks import check_flag, check_root
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Args, Options, Spec
from treeattn.arguments.state_arguments import sink_logits
from treeattn.backends.base import Backend
from treeattn.backends.registry import find, following
from treeattn.baselines._call import Call, Holding
from treeattn.baselines._parcel import Manifest
from treeattn.distributed import agreed_fields, check_positions, fingerprints
from treeattn.errors import InputError
from treeattn.local import deliver
from treeattn.pipeline import check_pipeline
from treeattn.planning.messages import count_messages
from treeattn.planning.plan import Stats
from treeattn.ranks.team import Team
from treeattn.state import PartialState
from treeattn.steps.wire import Wire
from treeattn.wrapping import team_of

__all__ = ["Baseline", "Cost", "Prepared", "Problem", "RankCost"]

Fields: TypeAlias = "tuple[tuple[str, Any], ...]"


@dataclass(frozen=True)
class RankCost:
    """What one call costs one rank: messages and bytes that it sends, and bytes of message buffers at the peak."""

    messages: int
    bytes: int
    peak_bytes: int
    messages_between: int = 0
    bytes_between: int = 0


@dataclass(frozen=True)
class Cost:
    """What one call costs, by a baseline's stated formula.

    Parameters
    ----------
    rounds : int
        Steps in which messages travel in parallel.
    rounds_between : int
        Those in which any goes to another host.
    ranks : tuple of RankCost
    collectives : int
        Calls of the runtime's own collectives.
    """

    rounds: int
    rounds_between: int
    ranks: tuple[RankCost, ...]
    collectives: int = 0

    def stats(self, rank: int) -> Stats:
        """Give one rank's share as the communicator counts it."""
        one = self.ranks[rank]
        between = self.rounds_between, one.messages_between, one.bytes_between
        return Stats(self.rounds, one.messages, one.bytes, *between, self.collectives)


@dataclass(frozen=True)
class Problem:
    """All that a cost depends on.

    Parameters
    ----------
    hosts : tuple of str
        One label per rank.
    call : Call
        Any rank's; only what all ranks know is asked of it.
    native_allreduce : bool
        Whether an all-reduce is one call of the runtime's.
    """

    hosts: tuple[str, ...]
    call: Call
    native_allreduce: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def manifests(self) -> list[Manifest]:
        """Every rank's parcel."""
        return self.call.manifests

    @property
    def rows(self) -> int:
        """Rows of the result: batch, query heads and query tokens together."""
        return self.call.spec.batch * self.call.spec.q_heads * self.call.spec.q_tokens

    @property
    def itemsize(self) -> int:
        """Bytes of one number of a state."""
        return 8 if self.call.spec.state_dtype == "float64" else 4

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all queries of one rank."""
        return self.rows * (self.call.spec.v_head_dim + 2) * self.itemsize

    def cost(self, rounds: int, sent: Callable[[int], Sequence[tuple[int, int]]], peak: Sequence[int]) -> Cost:
        """Add up what ranks send.

        Parameters
        ----------
        rounds : int
        sent : callable
            Gives what a rank sends, as (destination, bytes) of each array.
        peak : sequence of int
            Bytes of message buffers, by rank.
        """
        ranks = tuple(self._rank_cost(rank, sent(rank), peak[rank]) for rank in range(self.size))
        return Cost(rounds, rounds * (len(set(self.hosts)) > 1), ranks)

    def _rank_cost(self, rank: int, sent: Sequence[tuple[int, int]], peak: int) -> RankCost:
        near = [size for dest, size in sent if self.hosts[dest] == self.hosts[rank]]
        far = [size for dest, size in sent if self.hosts[dest] != self.hosts[rank]]
        across = sum(count_messages(size, between=True) for size in far)
        messages = across + sum(count_messages(size, between=False) for size in near)
        return RankCost(messages, sum(near) + sum(far), peak, across, sum(far))


class Baseline(ABC):
    """An exact scheme other than the tree; calling it is like calling `treeattn.decode`."""

    name: str
    spreads_queries = False
    """Whether it also serves queries that differ from rank to rank, as in prefill."""
    same_bits = True
    """Whether all ranks get the same bits in decoding, as they do from the tree."""

    def __repr__(self) -> str:
        return f"<treeattn.baselines: {self.name}>"

    @abstractmethod
    def run(self, call: Call, wire: Wire) -> PartialState | None:
        """Compute and send; give the state of all keys for this rank's queries, None where nobody wants it."""

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """State what `run` costs."""

    def refusal(self, spec: Spec, size: int) -> InputError | None:
        """Give the reason why the scheme can't serve such a call on so many ranks, if there is one."""
        return None

    @property
    def fields(self) -> Fields:
        """What else must be the same on every rank."""
        return ()

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        comm: Any,
        root: int | None = None,
        return_lse: bool = False,
        sink: Any = None,
        scale: float | None = None,
        mask: Any = None,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        q_pos: Any = None,
        kv_pos: Any = None,
        kv_len: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        kv_dtype: Any = None,
        layout: str = "bhtd",
        backend: Any = None,
        pipeline: int = 1,
    ) -> Any:
        """Attend as `treeattn.decode` does, by this scheme; collective.

        All parameters, results and errors are those of `treeattn.decode`, but for three things: keys and values must
        be in host memory, ``pipeline`` must be 1, since a baseline overlaps what its own scheme does, and without
        `same_bits` the result may differ from rank to rank in the last places.
        """
        options = Options(
            scale, mask, causal, window, softcap, q_pos, kv_pos, kv_len, k_scale, v_scale, kv_dtype, layout
        )
        prepared = self.prepare(
            q,
            k,
            v,
            options,
            comm=comm,
            root=root,
            return_lse=return_lse,
            sink=sink,
            backend=backend,
            pipeline=pipeline,
        )
        prepared.run()
        return prepared.result()

    def prepare(
        self,
        q: Any,
        k: Any,
        v: Any,
        options: Options,
        *,
        comm: Any,
        root: int | None = None,
        return_lse: bool = False,
        sink: Any = None,
        backend: Any = None,
        pipeline: int = 1,
        replicated: bool = True,
    ) -> Prepared:
        """Agree with the other ranks on a call that can then be run, and timed, any number of times; collective."""
        team, found, error = team_of(comm), None, None
        try:
            _check_whole(pipeline)
            check_flag("return_lse", return_lse)
            found = self._own(q, k, v, options, team.size, root, sink, backend, replicated)
        except Exception as wrong:  # whatever it is, the other ranks must hear of it before it is raised here
            error = wrong
        fields, values = ((), {}) if found is None else (found[0], found[3].to_json())
        told = team.consult(self.name, fields, values, error)
        assert found is not None, "whose error was raised"
        _, spec, args, _, sink, backend = found
        holdings = [Holding.from_json(each) for each in told]
        call = Call(team.rank, team.size, spec, args, holdings, backend, root, replicated)
        return Prepared(self, team, call, sink, return_lse)

    def _own(
        self, q: Any, k: Any, v: Any, options: Options, size: int, root: Any, sink: Any, backend: Any, same: bool
    ) -> tuple[Fields, Spec, Args, Holding, Any, Backend]:
        """Validate this rank's arguments; give what must be the same everywhere, and what others must know."""
        check_root(root, size)
        spec, args = resolve(q, k, v, options)
        if size > 1 and spec.positional:
            check_positions(options)
        _check_on_host(args)
        backend = find(following(spec) if backend is None else backend, spec)
        if reason := self.refusal(spec, size):
            raise reason
        sink = sink_logits(sink, spec.q_heads, spec.state_dtype, spec.on_device)
        fields = agreed_fields(spec) if same else _fields_of_spread(spec)
        shared = fingerprints(q if same else None, sink)
        state = (("root", root), ("dtype of the state", spec.state_dtype))
        return (*fields, *state, *shared, *self.fields), spec, args, Holding.of(spec, args), sink, backend


def _check_whole(pipeline: Any) -> None:
    if check_pipeline(pipeline) > 1:
        hint = "only the tree's exchange can go on while the next group of heads is computed: use treeattn.decode"
        raise InputError.of("pipeline", expected="1, for a baseline", got=pipeline, hint=hint)


def _check_on_host(args: Args) -> None:
    for name, array in (("q", args.q), ("k", args.k), ("v", args.v)):
        if not isinstance(array, np.ndarray):
            hint = "baselines send keys and values from host memory: copy them there; kernels may still run on a GPU"
            raise InputError.of(name, expected="an array in host memory", got="one on a device", hint=hint)


def _fields_of_spread(spec: Spec) -> Fields:
    """Name what must be the same where every rank has queries of its own."""
    kept = {name: value for name, value in agreed_fields(spec) if name != "q.shape"}
    return (("q.shape without tokens", (spec.batch, spec.q_heads, spec.head_dim)), *kept.items())


@dataclass
class Prepared:
    """A call on which all ranks have agreed."""

    baseline: Baseline
    team: Team
    call: Call
    sink: Any
    return_lse: bool
    state: PartialState | None = None

    @property
    def problem(self) -> Problem:
        """What `Baseline.cost` needs."""
        channel = self.team.channel
        return Problem(channel.hosts, self.call, channel.transport.native_allreduce)

    def run(self) -> None:
        """Compute and send; collective. An error of this rank's own is kept for `result`."""
        self.state = self.team.converse(lambda wire: self.baseline.run(self.call, wire))

    def result(self) -> Any:
        """Give what `treeattn.decode` would, or raise any rank's error on every rank; collective."""
        self.team.consult(self.baseline.name, (), {}, self.call.error)
        return self.deliver()

    def deliver(self) -> Any:
        """Finish this rank's state, without asking the others whether they have an error."""
        if self.state is None or self.call.root not in (None, self.call.rank):
            return (None, None) if self.return_lse else None
        return deliver(self.state, self.call.spec, self.sink, self.return_lse)
